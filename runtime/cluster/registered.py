"""RegisteredGraph: a partition as a task holds it between registration and deregistration."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from runtime.cluster.health import Watch
from runtime.cluster.proto import control_pb2 as pb
from runtime.execution.executor import Executor
from runtime.execution.rendezvous import Edge
from runtime.execution.step import Route


@dataclass
class RegisteredGraph:
    """``guard`` is held by the step that runs. ``wires``: slots of its static edges, by transport."""

    handle: str
    session: int
    master: str
    executor: Executor
    sends: list[Edge]
    receives: list[Edge]
    feeds: list[str]
    routes: dict[int, Route] = field(default_factory=dict)
    wires: dict[str, list[int]] = field(default_factory=dict)
    peers: dict[str, pb.Peer] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)
    watches: list[Watch] = field(default_factory=list)
    running: int = 0  # the step's id
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=16))  # that may not be cleaned up yet
    guard: threading.Lock = field(default_factory=threading.Lock)


def resident_bytes() -> tuple[int, int]:
    """(now, peak) of this process, from /proc."""
    values = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key in values:
                values[key] = int(value.split()[0]) * 1024
    return values["VmRSS"], values["VmHWM"]
