"""What a figure measured over an RDMA device is worth: hardware, soft-RoCE, or soft-RoCE in an emulated guest.

Read from files only, so that a launcher can ask without loading any RDMA library.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from runtime.transport.base import Fidelity

SYSFS = Path("/sys/class/infiniband")
FIDELITY_VARIABLE = "VERBFLOW_FIDELITY"


def fidelity_of(device: str, sysfs: Path = SYSFS, cpuinfo: Path = Path("/proc/cpuinfo")) -> Fidelity:
    """The fidelity of a device by name. A launcher that knows better says so in the environment (VERBFLOW_FIDELITY)."""
    with contextlib.suppress(ValueError):
        return Fidelity(os.environ.get(FIDELITY_VARIABLE, ""))
    # rxe is the only driver with a `parent` attribute (the name of the network interface below it).
    if not (sysfs / device / "parent").exists():
        return Fidelity.HARDWARE
    try:
        model = cpuinfo.read_text()
    except OSError:
        model = ""
    return Fidelity.SOFT_ROCE_EMULATED if "QEMU TCG" in model else Fidelity.SOFT_ROCE
