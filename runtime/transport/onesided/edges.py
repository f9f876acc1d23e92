"""OutgoingEdges: the sender's side of static edges on one channel.

An edge goes: BIND (once) -> credit for its first generation -> one WRITE_WITH_IMM -> credit for the next -> ...
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ConfigError, CorruptMessageError, ShapeError, StepAbortedError
from runtime.future import Future, failed
from runtime.transport.onesided import messages
from runtime.transport.onesided.messages import Kind
from runtime.transport.onesided.protocol import spec_bytes
from runtime.transport.onesided.registration import Registration
from runtime.transport.onesided.slots import Offered, decode_offer

if TYPE_CHECKING:
    from runtime.transport.onesided.channel import OneSidedChannel


@dataclass(slots=True, eq=False)
class _Push:
    generation: int
    tensor: np.ndarray
    deadline: Deadline
    future: Future[None]


@dataclass(slots=True, eq=False)
class _Edge:
    slot: Offered
    spec_bytes: bytes
    bound: bool = False
    may_write: int = -1  # the generation that a credit allows, -1 for none
    last: int = -1  # the generation pushed last
    waiting: deque[_Push] = field(default_factory=deque)
    flying: list[Future[None]] = field(default_factory=list)


class OutgoingEdges:
    """Uses its channel's lock: ``prepare`` and ``push`` take it, all others are called with it."""

    def __init__(self, channel: OneSidedChannel) -> None:
        self._channel = channel
        self._by_edge: dict[int, _Edge] = {}
        self._by_index: dict[int, _Edge] = {}
        self.waiting = 0  # pushes without a credit

    def prepare(self, offer: bytes) -> None:
        slots = decode_offer(offer)
        with self._channel._lock:
            for slot in slots:
                edge = _Edge(slot, messages.encode_spec(slot.spec))
                before = self._by_edge.get(slot.edge)
                if before is not None:
                    self._forget(before, StepAbortedError(f"edge {slot.edge} was offered anew"))
                self._by_edge[slot.edge] = self._by_index[slot.index] = edge

    def push(self, edge_id: int, generation: int, tensor: np.ndarray, deadline: Deadline) -> Future[None]:
        channel = self._channel
        future: Future[None] = Future("", channel._drive)
        with channel._lock:
            if channel._reason is not None:
                return failed(channel._reason)
            edge = self._by_edge.get(edge_id)
            if edge is None:
                return failed(ConfigError(f"edge {edge_id} has no slot at {channel.peer}; prepare() its offer first"))
            if spec_bytes(tensor) != edge.spec_bytes:
                return failed(
                    ShapeError(
                        f"push of edge {edge_id}: the tensor is {tensor.dtype.name}{list(tensor.shape)}, "
                        f"the slot {edge.slot.spec}"
                    )
                )
            if edge.last >= 0 and generation != edge.last + 1:
                return failed(ConfigError(f"push of generation {generation} of edge {edge_id} after {edge.last}"))
            edge.last = generation
            future.what = f"push of generation {generation} of edge {edge_id} to {channel.whence}"
            channel.counters.pushes += 1
            if not edge.bound:
                edge.bound = True
                channel._send(messages.encode_bind(edge.slot.index, edge.slot.nonce, generation))
            push = _Push(generation, tensor, deadline, future)
            if edge.may_write == generation:
                self._write(edge, push)
            else:
                edge.waiting.append(push)
                self.waiting += 1
        channel.attend()
        return future

    def on_credit(self, message: memoryview) -> None:
        index, generation = messages.decode_edge_credit(message)
        edge = self._by_index.get(index)
        if edge is None:
            return  # it was withdrawn or offered anew while the credit travelled
        expected = edge.waiting[0].generation if edge.waiting else edge.last + 1
        if generation != expected or edge.may_write >= 0:
            raise CorruptMessageError(f"credit for generation {generation} of edge {edge.slot.edge}, not {expected}")
        edge.may_write = generation
        if edge.waiting:
            push = edge.waiting.popleft()
            self.waiting -= 1
            self._write(edge, push)

    def on_withdraw(self, message: memoryview) -> None:
        ticket, indices = messages.decode_edges(message)
        for index in indices:
            edge = self._by_index.get(index)
            if edge is not None:
                self._forget(edge, StepAbortedError(f"{self._channel.peer} has withdrawn edge {edge.slot.edge}"))
        # In order behind every write that was posted to these slots.
        self._channel._send(messages.encode_edges(Kind.WITHDRAWN, ticket, indices))

    def expire(self, now_ns: int) -> None:
        for edge in self._by_edge.values():
            for push in edge.waiting:
                if push.deadline.at_ns <= now_ns:
                    error = push.deadline.error(push.future.what)
                    self._channel._after.append((push.future.set_exception, error))

    def drop(self, reason: BaseException) -> None:
        """The channel failed with ``reason``."""
        for edge in list(self._by_edge.values()):
            self._forget(edge, reason)
            self._channel._after += [(future.set_exception, reason) for future in edge.flying]
            edge.flying.clear()

    def _forget(self, edge: _Edge, reason: BaseException) -> None:
        self._by_index.pop(edge.slot.index, None)
        if self._by_edge.get(edge.slot.edge) is edge:
            del self._by_edge[edge.slot.edge]
        self.waiting -= len(edge.waiting)
        self._channel._after += [(push.future.set_exception, reason) for push in edge.waiting]
        edge.waiting.clear()

    def _write(self, edge: _Edge, push: _Push) -> None:
        edge.may_write = -1
        channel = self._channel
        tensor, registration = push.tensor, None
        if not tensor.flags.c_contiguous:
            tensor = np.ascontiguousarray(tensor)
            channel.counters.copies += 1
        registrations = channel.transport.registrations
        if registrations is not None and tensor.nbytes:
            try:
                channel.link.region(tensor)
            except ValueError:
                registration = registrations.acquire(tensor)
        edge.flying.append(push.future)
        slot = edge.slot
        channel._write(
            tensor,
            slot.region,
            messages.edge_immediate(slot.index, push.generation),
            partial(self._written, edge, push.future, registration),
        )

    def _written(
        self, edge: _Edge, future: Future[None], registration: Registration | None, error: BaseException | None
    ) -> None:
        if registration is not None:
            assert self._channel.transport.registrations is not None
            self._channel.transport.registrations.release(registration)
        if error is None and future in edge.flying:
            edge.flying.remove(future)
            self._channel._after.append((future.set_result, None))
