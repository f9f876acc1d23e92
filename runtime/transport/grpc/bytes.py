"""grpc: tensors as raw bytes over persistent streams; the fairest baseline that gRPC in Python allows.

What it costs and why is measured: fresh pages (allocator.py), one copy into the message and one out of it, and hand-overs
between threads. So the thread that waits for a fetch reads the stream itself, and copies straight into the destination.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import grpc
import numpy as np

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import CorruptMessageError, PeerLostError, VerbflowError
from runtime.future import Future, failed
from runtime.trace import Phase
from runtime.transport.base import TensorSource
from runtime.transport.grpc.connection import (
    MAX_CHUNK_BYTES,
    SERVICE,
    GrpcChannelBase,
    GrpcTransportBase,
    translate,
)
from runtime.transport.grpc.serving import Session
from runtime.transport.pending import Pending, encode_key
from runtime.wire import HEADER_BYTES, Kind

_SESSION = "verbflow-session"
# A waiting thread reads the stream itself only while it has more time left than this: gRPC's read takes no timeout, so
# it may come back late if the peer is stopped. A peer that leaves a request unanswered for so long, when a wait for it
# ends, is lost: it answers every request at once, with the tensor or with LATER.
_ANSWER_SECONDS = 2.0
# How long the background reader leaves the stream to whoever may be about to wait, unless it is told that nobody will,
# and how long it stays alert. A shorter tick costs a measurable part of a fetch of a few hundred microseconds.
_TICK_SECONDS = 0.005
_ALERT_SECONDS = 0.1


class GrpcTransport(GrpcTransportBase):
    """Two streams a channel: see serving.py for what goes over which."""

    name = "grpc"
    max_reply_bytes = MAX_CHUNK_BYTES + (64 << 10)

    def handlers(self, source: TensorSource) -> dict[str, grpc.RpcMethodHandler]:
        sessions: dict[str, Session] = {}

        def bulk(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            name = _session_name(context)
            session = Session(source, self.settings.chunk_bytes, self.served, self.guard, self.tracer)
            if sessions.setdefault(name, session) is not session:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this session is connected already")

            def end() -> None:
                sessions.pop(name, None)
                session.end()

            if not context.add_callback(end):
                end()
            return session.bulk()

        def ask(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            session = sessions.get(_session_name(context))
            if session is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such session")
            assert session is not None
            if not context.add_callback(session.end):
                session.end()
            return session.answers(requests, context)

        return {
            "Bulk": grpc.unary_stream_rpc_method_handler(bulk),
            "Ask": grpc.stream_stream_rpc_method_handler(ask),
        }

    def threads(self) -> int:
        return 2 * self.settings.max_channels

    def channel(self, connection: grpc.Channel, peer: str) -> GrpcChannel:
        return GrpcChannel(self, connection, peer)


def _session_name(context: grpc.ServicerContext) -> str:
    return str(dict(context.invocation_metadata()).get(_SESSION, ""))


class GrpcChannel(GrpcChannelBase[int]):
    """One peer. *bulk* is read by a thread of its own; *ask* by whoever waits for a fetch, or else by a background thread."""

    def __init__(self, transport: GrpcTransport, connection: grpc.Channel, peer: str) -> None:
        super().__init__(transport, connection, peer)
        self._tags = itertools.count(1)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._welcome: Future[None] = Future(f"connection to {peer} over grpc")
        self._calls: list[grpc.Call] = []
        self._threads: list[threading.Thread] = []
        # Requests that have no answer on *ask* yet; who holds ``_driving`` reads it.
        self._unanswered = 0
        self._driving = threading.Lock()
        self._driver_deadline_ns = 0
        self._reading_since_ns = 0
        self._wake = threading.Event()
        self._idle = False

    def connect(self, deadline: Deadline) -> None:
        """Open both streams."""
        metadata = (*self._transport.credentials(), (_SESSION, secrets.token_hex(16)))
        opened: Future[None] = Future(self._welcome.what)
        bulk = self._grpc.unary_stream(f"/{SERVICE}/Bulk")(b"", metadata=metadata)
        self._calls.append(bulk)
        self._start(self._read_bulk, bulk, opened)
        # *bulk* makes the session that *ask* then names.
        opened.result(deadline)
        ask = self._grpc.stream_stream(f"/{SERVICE}/Ask")(iter(self._requests.get, None), metadata=metadata)
        self._calls.append(ask)
        self._ask = ask
        self._unanswered = 1
        self._start(self._read_asked)
        self._wake.set()
        self._welcome.result(deadline)

    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        raw = encode_key(key)
        drive = partial(self._drive, deadline)
        pending = Pending(key, into, deadline, f"fetch of {key} from {self.peer} over grpc", drive, self._wake.set)
        tag = next(self._tags)
        if self._tracer.enabled:
            pending.asked_ns = time.monotonic_ns()
        with self._guard:
            if self._broken is not None:
                return failed(self._broken)
            self._pending[tag] = pending
            self._unanswered += 1
            self.counters.fetches += 1
            self.counters.messages_out += 1
        self._requests.put(wire.encode(Kind.REQUEST, tag, extra=len(raw)) + raw)
        if self._idle:
            self._wake.set()
        self._transport.watch.at(deadline.at_ns)
        if pending.asked_ns:
            self._tracer.record(Phase.REQUEST, key, 0, pending.asked_ns, time.monotonic_ns())
        return pending.future

    def _stop(self, reason: BaseException, given_up: Sequence[int]) -> None:
        self._welcome.set_exception(reason)
        self._requests.put(None)
        for call in self._calls:
            call.cancel()
        self._wake.set()

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def expire(self, now_ns: int) -> int | None:
        with self._guard:
            late = [tag for tag, pending in self._pending.items() if pending.deadline.at_ns <= now_ns]
            expired = [self._pending.pop(tag) for tag in late]
            moments = [pending.deadline.at_ns for pending in self._pending.values()]
        for tag in late:
            self._requests.put(wire.encode(Kind.CANCEL, tag))
        for pending in expired:
            pending.fail(pending.deadline.error(pending.future.what))
        stuck_at = self._driver_deadline_ns
        if stuck_at > now_ns:
            moments.append(stuck_at)
        elif stuck_at and (silent := (now_ns - self._reading_since_ns) * 1e-9) >= _ANSWER_SECONDS * 0.99:
            self.abort(PeerLostError(f"{self.peer} is lost: it has left a request unanswered for {silent:.1f} s"))
        return min(moments, default=None)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"grpc-{target.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _drive(self, of_fetch: Deadline, of_wait: Deadline, done: Callable[[], bool]) -> None:
        """Read *ask* on the waiting thread, as long as an answer is due on it. Returns early; the caller then sleeps."""
        deadline = of_fetch if of_fetch.at_ns < of_wait.at_ns else of_wait
        if deadline.remaining() > _ANSWER_SECONDS and self._driving.acquire(blocking=False):
            try:
                self._driver_deadline_ns = deadline.at_ns
                self._transport.watch.at(deadline.at_ns)
                while self._unanswered and self._broken is None and not done():
                    self._read_answer()
                    if deadline.remaining() <= _ANSWER_SECONDS:
                        break
            finally:
                self._driver_deadline_ns = 0
                self._driving.release()
        if self._unanswered:
            self._wake.set()

    def _read_asked(self) -> None:
        """The background reader of *ask*: takes over when answers are due and nobody drives."""
        alert_until_ns = 0
        while self._broken is None:
            if self._unanswered == 0 and time.monotonic_ns() > alert_until_ns:
                self._idle = True
                if self._unanswered == 0:
                    self._wake.wait()
                self._idle = False
                self._wake.clear()
                alert_until_ns = time.monotonic_ns() + int(_ALERT_SECONDS * 1e9)
                continue
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
            if self._unanswered and self._driving.acquire(blocking=False):
                try:
                    while self._unanswered and self._broken is None:
                        self._read_answer()
                finally:
                    self._driving.release()
                alert_until_ns = time.monotonic_ns() + int(_ALERT_SECONDS * 1e9)

    def _read_answer(self) -> None:
        self._reading_since_ns = time.monotonic_ns()
        try:
            message = next(self._ask)
        except (grpc.RpcError, StopIteration) as error:
            self._lost(error)
            return
        with self._guard:
            self._unanswered -= 1
        self._take(message, self._welcome)

    def _read_bulk(self, call: Iterator[bytes], opened: Future[None]) -> None:
        error: BaseException = StopIteration()
        try:
            for message in call:
                self._take(message, opened)
        except grpc.RpcError as rpc_error:
            error = rpc_error
        lost = self._lost(error)
        opened.set_exception(lost)

    def _lost(self, error: BaseException) -> BaseException:
        if isinstance(error, grpc.RpcError):
            lost = translate(error, self.peer)
        else:
            lost = PeerLostError(f"{self.peer} is lost: it closed the connection")
        # The channel keeps the error, which must not keep the frames that met it, nor the message in their locals.
        lost.__cause__ = error.with_traceback(None)
        self.abort(lost)
        return self._broken or lost

    def _take(self, message: bytes, welcome: Future[None]) -> None:
        try:
            header = wire.decode(message)
            if header.kind is Kind.TENSOR:
                self._take_tensor(message, header)
            elif header.kind is Kind.ERROR:
                with self._guard:
                    pending = self._pending.pop(header.tag, None)
                    self.counters.messages_in += 1
                if pending is not None:
                    pending.fail(wire.error_from_text(wire.extra_text(message, header), self.peer))
            elif header.kind is Kind.WELCOME:
                welcome.set_result(None)
            elif header.kind is not Kind.LATER:
                raise CorruptMessageError(f"{header.kind.name} from {self.peer} is no answer")
        except VerbflowError as error:
            self.abort(error)

    def _take_tensor(self, message: bytes, header: wire.Header) -> None:
        size = len(message) - HEADER_BYTES - header.extra
        last = header.offset + size >= header.nbytes
        if header.offset + size > header.nbytes or header.spec is None:
            raise CorruptMessageError(f"{size} bytes at {header.offset} of {header.nbytes} from {self.peer} do not fit")
        pending = self._pending.get(header.tag)
        if pending is None:  # given up meanwhile
            return
        start_ns = time.monotonic_ns() if pending.asked_ns else 0
        payload = memoryview(message)[HEADER_BYTES + header.extra :] if size else memoryview(b"")
        fresh = pending.write(header.spec, header.offset, payload, self._transport.arena)
        counters = self.counters
        with self._guard:
            counters.messages_in += 1
            if last or fresh < 0:
                self._pending.pop(header.tag, None)
            if fresh >= 0:
                counters.bytes_in += size
                counters.allocations += fresh
                counters.copies += int(last and header.nbytes > 0)
        if fresh < 0 and not last:
            self._requests.put(wire.encode(Kind.CANCEL, header.tag))
        if start_ns:
            self._trace(pending, start_ns, last, header.nbytes)
        if last or fresh < 0:
            pending.complete()

    def _trace(self, pending: Pending, start_ns: int, last: bool, nbytes: int) -> None:
        """One COPY span a message; one WIRE span a fetch, shortened by the copies so that the two add up."""
        now_ns = time.monotonic_ns()
        pending.copy_ns += now_ns - start_ns
        self._tracer.record(Phase.COPY, pending.key, 0, start_ns, now_ns, nbytes)
        if last:
            self._tracer.record(Phase.WIRE, pending.key, 0, pending.asked_ns, now_ns - pending.copy_ns, nbytes)
