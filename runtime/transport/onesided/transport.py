"""OneSidedTransport: what shm and verbs share; a subclass makes links and names memory, nothing else."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import DeadlineError, TransportError
from runtime.future import Future
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Channel, Counters, Options, TensorSource, Transport
from runtime.transport.onesided.channel import OneSidedChannel
from runtime.transport.onesided.endpoint import Endpoint
from runtime.transport.onesided.fabric import Fabric, FabricLink
from runtime.transport.onesided.link import Link, Region
from runtime.transport.onesided.progress import Progress
from runtime.transport.onesided.registration import RegistrationCache
from runtime.transport.onesided.serving import ServingEndpoint
from runtime.transport.onesided.settings import Settings
from runtime.transport.onesided.slots import Slots

_WITHDRAW_S = 5.0


class OneSidedTransport(Transport):
    """The transport over any Link. Hooks for a subclass: ``_listen``, ``_dial``, ``_export``, ``_stop_listening``,
    ``_release_resources``; it may set ``registrations`` (links that register) and calls ``accepted`` for every new peer.

    A link handed over must be connected, of the same protocol version and token, and both ends must know each other's
    ``settings.depth`` (``Link.depth`` is the peer's).
    """

    supports_static = True
    settings_class: ClassVar[type[Settings]] = Settings

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        super().__init__(options, arena, tracer)
        self.settings = options.settings(self.name, self.settings_class)
        self._fabric = Fabric(self.settings.fabric, self.settings.fabric_rate) if self.settings.fabric else None
        self.progress = Progress(self.name, self.settings.spin_us, self.settings.spin_max_us)
        self.registrations: RegistrationCache | None = None
        self.slots = Slots()
        self.counters = Counters()  # of the transport itself: registrations of the arena and of foreign buffers
        self._guard = threading.Lock()
        self._endpoints: set[Endpoint] = set()
        self._past = Counters()
        self._source: TensorSource | None = None
        self._closed = False

    # Hooks

    @abstractmethod
    def _listen(self) -> bytes:
        """Begin to accept peers and return the address. For every peer that has shown the token and the version call
        ``accepted`` (from a handler given to ``progress.watch``, or a thread of its own)."""

    @abstractmethod
    def _dial(self, address: bytes, peer: str, deadline: Deadline) -> Link:
        """A connected link to the listener at ``address``. Raises what ``Transport.connect`` raises."""

    @abstractmethod
    def _export(self, array: np.ndarray) -> Region:
        """The region by which any peer of this transport reaches an array in the arena; ValueError if it lies outside.
        An empty array has ``NO_REGION``."""

    @abstractmethod
    def _stop_listening(self) -> None:
        """Stop accepting, without waiting for peers; also called when ``_listen`` never was."""

    def _release_resources(self) -> None:
        """Called last, when all links are closed and the progress thread has ended."""

    def accepted(self, link: Link, peer: str) -> None:
        """A peer has connected: serve it."""
        assert self._source is not None
        link = self._on_fabric(link)
        endpoint = ServingEndpoint(self, link, peer, self._source)
        if not self._enter(endpoint):
            link.close()

    # Transport

    def listen(self, source: TensorSource) -> bytes:
        if self._source is not None:
            raise TransportError("this transport listens already")
        self._source = source
        return self._listen()

    def connect(self, address: bytes, *, peer: str, deadline: Deadline) -> Channel:
        channel = OneSidedChannel(self, self._on_fabric(self._dial(address, peer, deadline)), peer)
        if not self._enter(channel):
            channel.link.close()
            raise TransportError("this transport is closed")
        return channel

    def offer(self, slots: Mapping[int, np.ndarray]) -> bytes:
        return self.slots.offer(slots, self._export)

    def arrival(self, edge: int, generation: int) -> Future[None]:
        future: Future[None] = Future(f"arrival of generation {generation} of edge {edge}", self.progress.drive)
        return self.slots.arrival(edge, generation, future)

    def release(self, edge: int, generation: int) -> None:
        credit = self.slots.release(edge, generation)
        if credit is not None:
            owner, index, following = credit
            owner.give_credit(index, following)

    def withdraw(self, edges: list[int], reason: BaseException) -> None:
        bound = self.slots.withdraw(edges, reason)
        answers = [(owner, indices, owner.withdraw(indices)) for owner, indices in bound.items()]
        deadline = Deadline.after(_WITHDRAW_S)
        for owner, indices, answer in answers:
            try:
                answer.result(deadline)
            except DeadlineError as error:
                owner.abort(error)
                owner.shut()
                if not owner.link.revokes:
                    raise TransportError(
                        f"{owner.peer} has not confirmed that it stopped writing to {len(indices)} withdrawn slots; "
                        f"their memory must not be used again"
                    ) from error
            self.slots.settled(indices)

    def totals(self) -> Counters:
        total = Counters()
        with self._guard:
            total.add(self._past)
            endpoints = list(self._endpoints)
        for counters in (self.counters, *(endpoint.counters for endpoint in endpoints)):
            total.add(counters)
        total.wakeups += self.progress.wakeups
        return total

    def close(self) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            endpoints = list(self._endpoints)
        self._stop_listening()
        for endpoint in endpoints:
            endpoint.close()
        while self._endpoints:  # one that the progress thread is just tearing down
            time.sleep(0.001)
        self.progress.close()
        if self.registrations is not None:
            self.registrations.close()
        self._release_resources()
        if self._fabric is not None:
            self._fabric.close()

    # For endpoints

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint's link is closed: keep only its counters."""
        with self._guard:
            if endpoint in self._endpoints:
                self._endpoints.discard(endpoint)
                self._past.add(endpoint.counters)

    def _on_fabric(self, link: Link) -> Link:
        return link if self._fabric is None else FabricLink(link, self._fabric, self.options.task)

    def _enter(self, endpoint: Endpoint) -> bool:
        with self._guard:
            if self._closed:
                return False
            self._endpoints.add(endpoint)
        self.progress.add(endpoint)
        return True
