"""From which length on memcpy writes past the caches; a setting that every copy of a large tensor hangs on.

A write through the caches first reads the line that it overwrites, and drives out of them what somebody may still need. So glibc
copies with non-temporal stores from a threshold on that it makes from the size of the last cache. Where it believes in a
cache much larger than there is (an AMD processor whose several last caches it takes for one, a virtual machine whose CPUID
speaks of its host's), tensors between the true size and the believed one take up to twice as long as they should.

The threshold is read when a process starts, so it is set in the environment of those that we start (tunable
``glibc.cpu.x86_non_temporal_threshold``; glibc manual, "Hardware Capability Tunables").
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
_NAME = "glibc.cpu.x86_non_temporal_threshold"
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def threshold(tunables: str | None = None) -> int | None:
    """Bytes from which memcpy writes past the caches in a process started with ``tunables`` in its environment (by default
    this one's); None where the C library does not say (no glibc of 2.34 or later, no x86-64)."""
    return _threshold(os.environ.get(VARIABLE, "") if tunables is None else tunables)


def last_cache(caches: Path = _CACHES) -> int | None:
    """Bytes of the third-level cache or one behind it, as the kernel tells; None where it does not, or there is none."""
    sizes: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        for index in caches.glob("index*"):
            if (index / "type").read_text().strip() in ("Unified", "Data"):
                text = (index / "size").read_text().strip()
                number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:].isalpha() else (text, 1)
                sizes.append((int((index / "level").read_text()), int(number) * unit))
        level, size = max(sizes, default=(0, 0))
        return size if level >= 3 else None
    return None


def environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a process that is about to be started with those in ``inherited`` (by default ours): a threshold of a
    quarter of the last cache where the C library's own lies beyond the whole of it; {} where its own is sensible, or is
    somebody's choice already."""
    tunables = (os.environ if inherited is None else inherited).get(VARIABLE, "")
    if _NAME in tunables:
        return {}
    own, cache = threshold(tunables), last_cache()
    if own is None or cache is None or own <= cache:
        return {}
    chosen = f"{_NAME}={cache // 4:#x}"
    return {VARIABLE: f"{tunables}:{chosen}" if tunables else chosen}


@functools.cache
def _threshold(tunables: str) -> int | None:
    """What the loader that this interpreter was started by lists; it takes some milliseconds."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        # The sixth field is the path, which may have spaces in it.
        paths = [fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6]
        loader = next((path for path in paths if re.search(r"/ld-linux-x86-64\.so\.\d+$", path)), None)
        if loader is not None:
            listed = subprocess.run(
                [loader, "--list-tunables"],
                env={VARIABLE: tunables},
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            found = re.search(rf"^{re.escape(_NAME)}: (\w+)", listed, re.MULTILINE)
            return int(found[1], 0) if found is not None else None
    return None
