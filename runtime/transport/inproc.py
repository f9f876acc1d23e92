"""inproc: channels within one process; the reference behaviour that every other transport is tested against."""

from __future__ import annotations

import hmac
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ChannelClosedError,
    PeerLostError,
    ProtocolMismatchError,
    ShapeError,
    TransportError,
    UnauthenticatedError,
    VerbflowError,
)
from runtime.future import Future, failed
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, byte_view
from runtime.trace import Phase, Tracer
from runtime.transport.base import Availability, Channel, Counters, Lease, Options, TensorSource, Transport
from runtime.transport.channels import OpenChannels
from runtime.transport.pending import Pending, encode_key
from runtime.transport.watch import Watch

_listeners: dict[str, _Listener] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class InprocSettings:
    """There is nothing to set."""


class _Listener:
    """A source under an address, and the channels that lead to it."""

    def __init__(self, source: TensorSource, token: str, transport: InprocTransport) -> None:
        self.source = source
        self.token = token
        self.version = wire.PROTOCOL_VERSION
        self.transport = transport
        self.channels: set[InprocChannel] = set()


class InprocTransport(Transport):
    """Fetches by calling the listener's source directly; one copy, made on the thread that produced the tensor."""

    name = "inproc"

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        super().__init__(options, arena, tracer)
        options.settings(self.name, InprocSettings)
        self._guard = threading.Lock()
        self._address: str | None = None
        self.channels: OpenChannels[InprocChannel] = OpenChannels()
        self.served = Counters()
        self.watch = Watch("inproc-watch", self._expire)

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "always available, within one process")

    def listen(self, source: TensorSource) -> bytes:
        if self._address is not None:
            raise TransportError(f"this transport listens already, at {self._address}")
        self._address = f"inproc:{os.getpid()}:{next(_numbers)}"
        _listeners[self._address] = _Listener(source, self.options.token, self)
        return self._address.encode()

    def reaches(self, address: bytes) -> bool:
        return address.startswith(f"inproc:{os.getpid()}:".encode())

    def connect(self, address: bytes, *, peer: str, deadline: Deadline) -> Channel:
        listener = _listeners.get(address.decode(errors="replace"))
        if listener is None:
            raise PeerLostError(f"nobody listens at {address!r} in this process (asked for {peer})")
        if listener.version != wire.PROTOCOL_VERSION:
            raise ProtocolMismatchError(
                f"{peer} speaks protocol version {listener.version}, this end version {wire.PROTOCOL_VERSION}"
            )
        if not hmac.compare_digest(listener.token.encode(), self.options.token.encode()):
            raise UnauthenticatedError(f"{peer} at {address.decode()} refuses this run's token")
        channel = InprocChannel(self, listener, peer)
        self.channels.add(channel)
        listener.channels.add(channel)
        return channel

    def totals(self) -> Counters:
        total = self.channels.totals()
        with self._guard:
            total.add(self.served)
        return total

    def close(self) -> None:
        self.channels.close()
        listener = _listeners.pop(self._address or "", None)
        if listener is not None:
            for channel in list(listener.channels):
                channel.abort(PeerLostError(f"{channel.peer} closed its listener"))
        self.watch.close()

    def _expire(self, now_ns: int) -> int | None:
        moments = [moment for channel in self.channels if (moment := channel.expire(now_ns)) is not None]
        return min(moments, default=None)


class InprocChannel(Channel):
    """The way to one listener of this process."""

    def __init__(self, transport: InprocTransport, listener: _Listener, peer: str) -> None:
        self.peer = peer
        self.counters = Counters()
        self._transport = transport
        self._listener = listener
        self._guard = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._tags = itertools.count(1)
        self._broken: VerbflowError | BaseException | None = None

    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        encode_key(key)
        pending = Pending(key, into, deadline, f"fetch of {key} from {self.peer} over inproc")
        tag = next(self._tags)
        with self._guard:
            if self._broken is not None:
                return failed(self._broken)
            self._pending[tag] = pending
            self.counters.fetches += 1
        self._transport.watch.at(deadline.at_ns)
        self._listener.source.take(key, self._reply(tag))
        return pending.future

    def _reply(self, tag: int) -> Callable[[Lease | BaseException], None]:
        def reply(answer: Lease | BaseException) -> None:
            with self._guard:
                pending = self._pending.pop(tag, None)
            if isinstance(answer, BaseException):
                if pending is not None:
                    # Through the wire's form, so that a caller sees the same error that a remote peer would give.
                    pending.fail(wire.error_from_text(wire.error_text(answer).decode(), self.peer))
                return
            if pending is not None:
                try:
                    self._deliver(pending, answer.lent)
                except ShapeError as error:  # a dtype that no transport takes
                    pending.fail(wire.error_from_text(wire.error_text(error).decode(), self.peer))
            answer.release()

        return reply

    def _deliver(self, pending: Pending, source: np.ndarray) -> None:
        tracer = self._transport.tracer
        start = time.monotonic_ns() if tracer.enabled else 0
        array = np.ascontiguousarray(source).reshape(source.shape)
        fresh = pending.write(TensorSpec.of(array), 0, byte_view(array), self._transport.arena)
        if tracer.enabled:
            tracer.record(Phase.COPY, pending.key, 0, start, time.monotonic_ns(), array.nbytes)
        copies = int(array.nbytes > 0) + int(not source.flags.c_contiguous)
        served = self._listener.transport.served
        with self._guard:
            self.counters.copies += copies
            self.counters.allocations += max(fresh, 0)
            if fresh >= 0:
                self.counters.bytes_in += array.nbytes
                self.counters.messages_in += 1
        with self._listener.transport._guard:
            served.served += 1
            served.bytes_out += array.nbytes
            served.messages_out += 1
        pending.complete()

    def expire(self, now_ns: int) -> int | None:
        """Fail fetches whose deadline has passed; the moment of the next one, or None."""
        with self._guard:
            late = [tag for tag, pending in self._pending.items() if pending.deadline.at_ns <= now_ns]
            expired = [self._pending.pop(tag) for tag in late]
            following = min((pending.deadline.at_ns for pending in self._pending.values()), default=None)
        for pending in expired:
            pending.fail(pending.deadline.error(pending.future.what))
        return following

    def close(self) -> None:
        self.abort(ChannelClosedError(f"the channel to {self.peer} was closed"))
        self._transport.channels.remove(self)

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self._broken is None:
                self._broken = reason
            reason = self._broken
            pending, self._pending = self._pending, {}
        self._listener.channels.discard(self)
        for fetch in pending.values():
            fetch.fail(reason)
