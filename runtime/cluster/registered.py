"""RegisteredGraph: a partition as a task holds it between registration and deregistration."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from runtime.cluster.health import Watch
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.routes import TransportSet
from runtime.deadline import Deadline
from runtime.errors import GraphError
from runtime.execution.executor import Executor
from runtime.execution.rendezvous import Edge
from runtime.execution.step import FetchRoute, PushRoute, Route, ServeRoute, SlotRoute


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

    def transport_to(self, peer: str) -> str:
        """The name of the transport that was agreed on with ``peer``."""
        if peer not in self.transports or peer not in self.peers:
            raise GraphError(f"graph {self.handle}: no route to {peer} came with the partition")
        return self.transports[peer]

    def offer_slots(self, transports: TransportSet, wire: Callable[[], int]) -> dict[str, pb.Offer]:
        """Open a slot for each edge that comes over a transport which writes to slots; offers by producer. ``wire`` gives an id
        that is new to this task."""
        offers: dict[str, pb.Offer] = {}
        slots: dict[str, dict[int, np.ndarray]] = {}
        destinations = self.executor.recv_slots
        for edge in self.receives:
            name = self.transport_to(edge.src)
            transport = transports.transport(name)
            if not transport.supports_static:
                continue
            number = wire()
            self.routes[edge.id] = SlotRoute(transport, number, name)
            offers.setdefault(edge.src, pb.Offer(transport=name)).wires[edge.id] = number
            slots.setdefault(edge.src, {})[number] = destinations[edge.id]
        for peer, offer in offers.items():
            offer.content = transports.transport(offer.transport).offer(slots[peer])
            self.wires.setdefault(offer.transport, []).extend(slots[peer])
        return offers

    def connect(self, transports: TransportSet, offers: Mapping[str, pb.Offer], deadline: Deadline) -> None:
        """Make the other edges' routes, given the offers of the consumers, who have all registered their parts."""
        for edge in self.sends:
            name = self.transport_to(edge.dst)
            offer = offers.get(edge.dst)
            if offer is not None and edge.id in offer.wires:
                channel = transports.channel(self.peers[edge.dst], name, deadline)
                self.routes[edge.id] = PushRoute(channel, offer.wires[edge.id], name)
            else:
                self.routes[edge.id] = ServeRoute(name)
        for peer, offer in offers.items():
            transports.channel(self.peers[peer], offer.transport, deadline).prepare(offer.content)
        for edge in self.receives:
            if edge.id not in self.routes:
                source, name = self.peers[edge.src], self.transport_to(edge.src)
                channel = transports.channel(source, name, deadline)
                self.routes[edge.id] = FetchRoute(channel, source.incarnation, name)


def resident_bytes() -> tuple[int, int]:
    """(now, peak) of this process, from /proc."""
    values = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key in values:
                values[key] = int(value.split()[0]) * 1024
    return values["VmRSS"], values["VmHWM"]
