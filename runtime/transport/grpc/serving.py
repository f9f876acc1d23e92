"""The serving end of a ``grpc`` channel: two streams a peer, one that answers at once and one for what is long or late.

*ask*: the peer's requests come in, and each is answered on the same stream at once: by the tensor if it is there and fits
into one message, by its error, or by LATER. The handler's own thread does it, so a small fetch costs no hand-over between
threads. *bulk*: long tensors in chunks, one after another, and tensors that were produced after they were asked for; the small
ones among these overtake. HTTP/2 interleaves the two streams, so a small tensor never waits behind a long one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Iterator

import grpc
import numpy as np

from runtime import wire
from runtime.errors import ShapeError, TransportError
from runtime.tensor import TensorSpec, byte_view
from runtime.trace import Phase, Tracer
from runtime.transport.base import Counters, Lease, TensorSource
from runtime.wire import Kind


@functools.lru_cache(maxsize=4096)
def _spec(shape: tuple[int, ...], dtype: np.dtype) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _checked(answer: Lease | BaseException) -> Lease | BaseException:
    """The answer, or the error of a tensor that cannot travel."""
    if isinstance(answer, Lease):
        try:
            _spec(answer.lent.shape, answer.lent.dtype)
        except ShapeError as error:
            answer.release()
            return error
    return answer


class _Asked:
    """A request until it is answered. ``answer`` holds what came while the handler was still inside ``take``."""

    __slots__ = ("answer", "late", "session", "tag")

    def __init__(self, session: Session, tag: int) -> None:
        self.session = session
        self.tag = tag
        self.answer: Lease | BaseException | None = None
        self.late = False

    def reply(self, answer: Lease | BaseException) -> None:
        """TensorSource's reply; any thread, never blocks for long."""
        answer = _checked(answer)
        with self.session.guard:
            if not self.late:
                self.answer = answer
                return
        self.session.deliver(self.tag, answer)


class _Outgoing:
    """A tensor on its way: what is left of it begins at ``offset``."""

    __slots__ = ("array", "data", "dropped", "lease", "offset", "spec", "tag")

    def __init__(self, tag: int, lease: Lease) -> None:
        self.tag = tag
        self.lease = lease
        self.array = lease.lent
        self.spec = _spec(self.array.shape, self.array.dtype)
        self.data: memoryview | None = None
        self.dropped = False
        self.offset = 0


class Session:
    """One connected peer. The two generators run on threads of the server's pool, ``deliver`` on any thread."""

    def __init__(
        self, source: TensorSource, chunk_bytes: int, counters: Counters, counting: threading.Lock, tracer: Tracer
    ) -> None:
        self.guard = threading.Lock()
        self._source = source
        self._chunk = chunk_bytes
        self._counters = counters
        self._counting = counting
        self._tracer = tracer
        self._changed = threading.Condition(self.guard)
        self._asked: dict[int, _Asked] = {}
        self._texts: deque[bytes] = deque()
        self._short: deque[_Outgoing] = deque()
        self._long: deque[_Outgoing] = deque()
        self._cutting: _Outgoing | None = None
        self._short_turn = True
        self._ended = False

    def answers(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The handler of *ask*."""
        yield wire.encode(Kind.WELCOME)
        try:
            for request in requests:
                header = wire.decode(request)
                if header.kind is Kind.REQUEST:
                    yield self._answer(header.tag, wire.extra_text(request, header))
                elif header.kind is Kind.CANCEL:
                    self._cancel(header.tag)
                else:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{header.kind.name} is no request")
        except TransportError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def bulk(self) -> Iterator[bytes]:
        """The handler of *bulk*."""
        yield wire.encode(Kind.WELCOME)
        while (message := self._next_bulk()) is not None:
            yield message

    def end(self) -> None:
        """The peer is gone, or this end closes: drop everything, release every lease. Idempotent, any thread."""
        with self._changed:
            self._ended = True
            leases = [outgoing.lease for outgoing in (*self._short, *self._long)]
            self._short.clear()
            self._long.clear()
            self._asked.clear()
            self._changed.notify_all()
        for lease in leases:
            lease.release()

    def deliver(self, tag: int, answer: Lease | BaseException) -> None:
        """An answer that came after its request was answered by LATER."""
        with self._changed:
            wanted = self._asked.pop(tag, None) is not None and not self._ended
            if wanted:
                self._enqueue(tag, answer)
        if not wanted and isinstance(answer, Lease):
            answer.release()

    def _enqueue(self, tag: int, answer: Lease | BaseException) -> None:
        if isinstance(answer, BaseException):
            self._texts.append(_error(tag, answer))
        else:
            outgoing = _Outgoing(tag, answer)
            (self._short if outgoing.spec.nbytes <= self._chunk else self._long).append(outgoing)
        self._changed.notify()

    def _answer(self, tag: int, key: str) -> bytes:
        asked = _Asked(self, tag)
        self._source.take(key, asked.reply)
        with self.guard:
            answer = asked.answer
            if answer is None:
                asked.late = True
                if not self._ended:
                    self._asked[tag] = asked
                return wire.encode(Kind.LATER, tag)
            if isinstance(answer, Lease) and answer.lent.nbytes > self._chunk and not self._ended:
                self._enqueue(tag, answer)
                return wire.encode(Kind.LATER, tag)
        if isinstance(answer, BaseException):
            return _error(tag, answer)
        outgoing = _Outgoing(tag, answer)
        try:
            return self._cut(outgoing)
        finally:
            answer.release()

    def _cancel(self, tag: int) -> None:
        with self.guard:
            self._asked.pop(tag, None)
            if self._cutting is not None and self._cutting.tag == tag:
                self._cutting.dropped = True
            dropped = [outgoing for outgoing in (*self._short, *self._long) if outgoing.tag == tag]
            for outgoing in dropped:
                (self._short if outgoing in self._short else self._long).remove(outgoing)
        for outgoing in dropped:
            outgoing.lease.release()

    def _next_bulk(self) -> bytes | None:
        with self._changed:
            while not (self._texts or self._short or self._long or self._ended):
                self._changed.wait()
            if self._ended:
                return None
            if self._texts:
                return self._texts.popleft()
            # Short ones first, but every second turn belongs to the long ones, one after another: in turn, all of a step's
            # weights would arrive with the last.
            queue = self._short if self._short and (self._short_turn or not self._long) else self._long
            self._short_turn = queue is self._long
            outgoing = self._cutting = queue.popleft()
        message = self._cut(outgoing)
        with self.guard:
            self._cutting = None
            if outgoing.offset < outgoing.spec.nbytes and not (self._ended or outgoing.dropped):
                self._long.appendleft(outgoing)
                return message
        outgoing.lease.release()
        return message

    def _cut(self, outgoing: _Outgoing) -> bytes:
        """The next message of a tensor: header and payload joined, the one copy that gRPC in Python cannot do without."""
        start_ns = time.monotonic_ns() if self._tracer.enabled else 0
        first, copies = outgoing.data is None, 0
        if outgoing.data is None:
            array = outgoing.array
            copies = int(array.nbytes > 0)
            if not array.flags.c_contiguous:
                array = outgoing.array = np.ascontiguousarray(array)
                copies += 1
            outgoing.data = byte_view(array).data if array.nbytes else memoryview(b"")
        begin = outgoing.offset
        outgoing.offset = end = min(begin + self._chunk, outgoing.spec.nbytes)
        header = wire.encode(Kind.TENSOR, outgoing.tag, outgoing.spec, offset=begin)
        message = b"".join((header, outgoing.data[begin:end]))
        counters = self._counters
        with self._counting:
            counters.served += int(first)
            counters.copies += copies
            counters.bytes_out += end - begin
            counters.messages_out += 1
        if start_ns:
            self._tracer.record(Phase.SERIALISE, "grpc", 0, start_ns, time.monotonic_ns(), end - begin)
        return message


def _error(tag: int, error: BaseException) -> bytes:
    text = wire.error_text(error)
    return wire.encode(Kind.ERROR, tag, extra=len(text)) + text
