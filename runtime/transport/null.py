"""null: answers at once and moves nothing. A benchmark or a step over it measures everything but the transport."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError
from runtime.future import Future, completed, failed
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Availability, Channel, Counters, Options, TensorSource, Transport
from runtime.transport.channels import OpenChannels
from runtime.transport.pending import encode_key


@dataclass(frozen=True, slots=True)
class NullSettings:
    """``fill``: byte (0 to 255) that a given destination is filled with, -1 leaves it as it is. ``nbytes``: length of the
    uint8 tensor of zeros that a fetch without a destination gets; all such fetches share it."""

    fill: int = -1
    nbytes: int = 0


class NullTransport(Transport):
    """Never asks its listener; every address is as good as any other."""

    name = "null"

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        super().__init__(options, arena, tracer)
        self.settings = options.settings(self.name, NullSettings)
        self.channels: OpenChannels[NullChannel] = OpenChannels()

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "always available; moves no bytes")

    def listen(self, source: TensorSource) -> bytes:
        return b"null"

    def connect(self, address: bytes, *, peer: str, deadline: Deadline) -> Channel:
        channel = NullChannel(self, peer)
        self.channels.add(channel)
        return channel

    def totals(self) -> Counters:
        return self.channels.totals()

    def close(self) -> None:
        self.channels.close()


class NullChannel(Channel):
    """Completes every fetch before it returns. ``bytes_in`` stays 0: nothing came."""

    def __init__(self, transport: NullTransport, peer: str) -> None:
        self.peer = peer
        self.counters = Counters()
        self._transport = transport
        self._settings = transport.settings
        self._zeros = np.zeros(transport.settings.nbytes, np.uint8)
        self._broken: BaseException | None = None

    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        if self._broken is not None:
            return failed(self._broken)
        encode_key(key)
        self.counters.fetches += 1
        if into is None:
            return completed(self._zeros)
        if self._settings.fill >= 0 and into.size:
            into.reshape(-1).view(np.uint8).fill(self._settings.fill)
        return completed(into)

    def close(self) -> None:
        self.abort(ChannelClosedError(f"the channel to {self.peer} was closed"))
        self._transport.channels.remove(self)

    def abort(self, reason: BaseException) -> None:
        if self._broken is None:
            self._broken = reason
