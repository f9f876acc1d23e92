"""Settings of the C allocator that gRPC's throughput hangs on.

Python's gRPC makes every message anew: as ``bytes`` and as malloc'ed slices. With glibc's defaults blocks of that size are
mapped and unmapped each time, and the page faults cost more than the transfer; kept mapped, the same transfers run 3-4
times faster from 64 MiB up. One arena, because memory that one thread frees is then warm for the next.
"""

from __future__ import annotations

import ctypes
import os

# Numbers of mallopt(3) and the environment variables that do the same for a child process.
_SETTINGS = (
    ("MALLOC_ARENA_MAX", -8, 1),
    ("MALLOC_MMAP_THRESHOLD_", -3, 1 << 30),
    ("MALLOC_TRIM_THRESHOLD_", -1, (1 << 31) - 1),
    ("MALLOC_TOP_PAD_", -2, 64 << 20),
)
# Older glibc refuses a larger mmap threshold than half a heap.
_OLD_MMAP_THRESHOLD = 32 << 20

_applied: dict[str, int] = {}


def tune() -> dict[str, int]:
    """Apply the settings to this process, once; what is in force is returned, {} where the C library has no mallopt.

    Best before threads exist: an arena that a thread already owns stays. Nothing is given back to the system afterwards
    until the process ends, which is the point.
    """
    if _applied:
        return dict(_applied)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return {}
    for name, number, value in _SETTINGS:
        for attempt in (value, min(value, _OLD_MMAP_THRESHOLD)):
            if mallopt(number, ctypes.c_int(attempt)) == 1:
                _applied[name] = attempt
                break
    return dict(_applied)


def in_force() -> dict[str, int]:
    """What this process set, or inherited by environment, for the record of a run."""
    inherited = {name: int(os.environ[name]) for name, _, _ in _SETTINGS if os.environ.get(name, "").isdigit()}
    return inherited | _applied


def environment() -> dict[str, str]:
    """The same for a process that is about to be started: variables for its environment."""
    return {name: str(value) for name, _, value in _SETTINGS}
