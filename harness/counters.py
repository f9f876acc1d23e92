"""Counters of the kernel around the timed iterations: CPU time, context switches, memory, interface and NIC bytes.

They are the proof of path: bytes that went over TCP show at an interface, bytes that went through an adapter at its port,
and bytes through shared memory at neither. Standard library only, for it runs in every worker.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from harness.records import Counter

# InfiniBand ports count in words of four octets (IB spec vol. 1, 16.1.3.5, PortXmitData).
_IB_WORDS = {"port_xmit_data", "port_rcv_data"}
_IB_PACKETS = {"port_xmit_packets", "port_rcv_packets", "sent_pkts", "rcvd_pkts"}


def snapshot() -> dict[str, tuple[int, str]]:
    """Name -> (value, unit), now. Reads /proc and /sys; about 0.2 ms."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    values: dict[str, tuple[int, str]] = {
        "cpu.user": (int(usage.ru_utime * 1e9), "ns"),
        "cpu.system": (int(usage.ru_stime * 1e9), "ns"),
        "clock.monotonic": (time.monotonic_ns(), "ns"),
        "switches.voluntary": (usage.ru_nvcsw, "count"),
        "switches.involuntary": (usage.ru_nivcsw, "count"),
        "faults.minor": (usage.ru_minflt, "count"),
        "faults.major": (usage.ru_majflt, "count"),
        "memory.peak_rss": (usage.ru_maxrss * 1024, "bytes"),
    }
    for statistics in _folders("/sys/class/net", "*/statistics"):
        interface = statistics.parent.name
        for direction in ("rx_bytes", "tx_bytes"):
            value = _read(statistics / direction)
            if value is not None:
                values[f"net.{interface}.{direction}"] = (value, "bytes")
    for port in _folders("/sys/class/infiniband", "*/ports/*"):
        device = f"rdma.{port.parent.parent.name}.{port.name}"
        for path in sorted([*port.glob("counters/*"), *port.glob("hw_counters/*")]):
            if path.name in _IB_WORDS | _IB_PACKETS:
                value = _read(path)
                if value is not None:
                    words = path.name in _IB_WORDS
                    unit = "bytes" if words else "packets"
                    values[f"{device}.{path.name}"] = (value * 4 if words else value, unit)
    return values


def differences(before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]]) -> list[Counter]:
    """Counters that are in both; an interface that moved nothing is left out."""
    counters = []
    for name, (value, unit) in after.items():
        if name in before:
            first = before[name][0]
            if value != first or not name.startswith(("net.", "rdma.")):
                counters.append(Counter(name, first, value, unit))
    return counters


def _folders(root: str, pattern: str) -> list[Path]:
    return sorted(Path(root).glob(pattern)) if Path(root).is_dir() else []


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # some drivers refuse some counters
        return None
