"""OneSidedChannel: the fetching end of a connection, and the sending end of static edges."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import ArenaFullError, CorruptMessageError, ShapeError
from runtime.future import Future, failed
from runtime.tensor import TensorSpec
from runtime.trace import Phase
from runtime.transport.base import Channel, Lease
from runtime.transport.onesided import messages
from runtime.transport.onesided.destinations import Destinations
from runtime.transport.onesided.edges import OutgoingEdges
from runtime.transport.onesided.endpoint import Action, Endpoint
from runtime.transport.onesided.fetching import Fetching
from runtime.transport.onesided.link import NO_REGION, Link, Region
from runtime.transport.onesided.messages import (
    Kind,
    Mode,
    decode_eager,
    decode_offer,
    decode_spec,
    encode_fetch,
    pack_header,
)
from runtime.transport.onesided.paper import PaperReceiver
from runtime.transport.onesided.protocol import choose, flat, flat_memory, spec_bytes
from runtime.transport.pending import encode_key

if TYPE_CHECKING:
    from runtime.transport.onesided.transport import OneSidedTransport


# Looking a member up in an enumeration takes three times as long as a global name.
_READ, _WRITE, _BORROW = Mode.READ, Mode.WRITE, Mode.BORROW
_RELEASE = int(Kind.RELEASE)
_MAX_REQUEST = messages.MAX_REQUEST
# Longer tensors are lent to who borrows them: a copy needs memory of its own.
_BORROWED_BYTES = 4096


class OneSidedChannel(Endpoint, Channel):
    """The way to one listener. Any thread may call any method; ``abort`` and ``close`` are the endpoint's."""

    def __init__(self, transport: OneSidedTransport, link: Link, peer: str) -> None:
        super().__init__(transport, link, peer)
        self._mode, self._eager_limit = choose(transport.settings, link)
        self._borrow_limit = min(transport.settings.eager_threshold, _BORROWED_BYTES)
        self._inflight = transport.settings.inflight
        self.whence = f"{peer} over {transport.name}"
        self._tracer = transport.tracer
        self._chunk = min(transport.settings.chunk_bytes, (1 << 32) - 1)
        self._copies = link.maps and not self._chunk  # a read is one copy from memory that we see
        self._pending: dict[int, Fetching] = {}
        self._queued: deque[tuple[Fetching, bytes]] = deque()  # beyond ``inflight``
        self._leased: set[int] = set()
        self._next_request = 0
        self._destinations = Destinations(transport, link, self.counters, self._eager_limit)
        self._quarantine: list[Fetching] = []
        self._edges = OutgoingEdges(self)
        self._paper = PaperReceiver(self)
        self._handle_by(
            {
                Kind.EAGER: self._on_eager,
                Kind.METADATA: self._on_metadata,
                Kind.OFFER: self._on_offer,
                Kind.ERROR: self._on_error,
                Kind.EDGE_CREDIT: self._edges.on_credit,
                Kind.WITHDRAW: self._edges.on_withdraw,
            }
        )

    # Channel

    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        return self._start(key, into, self._mode, self._eager_limit, deadline)

    def borrow(self, key: str, *, deadline: Deadline) -> Future[Lease]:
        if not self.link.maps:
            return super().borrow(key, deadline=deadline)
        return self._start(key, None, _BORROW, self._borrow_limit, deadline)

    def prepare(self, offer: bytes) -> None:
        self._edges.prepare(offer)

    def push(self, edge: int, generation: int, tensor: np.ndarray, *, deadline: Deadline) -> Future[None]:
        return self._edges.push(edge, generation, tensor, deadline)

    # Progress's side

    def expects(self) -> bool:
        waiting = self._pending or self._queued or self._edges.waiting or self._flights
        return bool(waiting or self._outbox or self._saying_bye)

    # Asking

    def _start(self, key: str, into: np.ndarray | None, mode: Mode, limit: int, deadline: Deadline) -> Future[Any]:
        key_bytes = encode_key(key)
        fetch = Fetching(self, key, into, mode, deadline)
        if into is not None:
            flags = into.flags
            if not (flags.c_contiguous and flags.writeable):
                raise ShapeError(f"{fetch.what}: the destination must be C-contiguous and writable")
            fetch.spec_bytes = spec_bytes(into)
            fetch.plain = True
        tracer = self._tracer
        if tracer.enabled:
            fetch.started_ns = time.monotonic_ns()
        with self._lock:
            if self._reason is not None:
                return failed(self._reason)
            self.counters.fetches += 1
            region = NO_REGION
            if mode is _WRITE:
                try:
                    region = self._destinations.known(fetch, limit)
                except (ArenaFullError, OSError) as error:
                    return failed(error)
            pending = self._pending
            if len(pending) < self._inflight:
                fetch.request = request = self._next_request
                if region is NO_REGION and request not in self._leased and request not in pending:
                    self._next_request = request + 1 & _MAX_REQUEST
                    pending[request] = fetch
                    self._send(encode_fetch(request, mode, region, limit, self._chunk, fetch.spec_bytes, key_bytes))
                else:
                    self._ask(fetch, key_bytes, region, limit)
            else:
                self._queued.append((fetch, key_bytes))
        if tracer.enabled:
            tracer.record(Phase.REQUEST, key, 0, fetch.started_ns, time.monotonic_ns())
        return fetch

    def _ask(self, fetch: Fetching, key_bytes: bytes, region: Region, limit: int) -> None:
        pending = self._pending
        request = self._next_request
        while request in pending or request in self._leased:
            request = request + 1 & _MAX_REQUEST
        self._next_request = request + 1 & _MAX_REQUEST
        fetch.request = request
        if region is not NO_REGION:
            fetch.exposed = True
            fetch.plain = False
        pending[request] = fetch
        self._send(encode_fetch(request, fetch.mode, region, limit, self._chunk, fetch.spec_bytes, key_bytes))

    # Answers; the lock is held

    def _pending_fetch(self, request: int, what: str) -> Fetching:
        fetch = self._pending.get(request)
        if fetch is None:
            raise CorruptMessageError(f"{what} from {self.peer} for request {request}, which is not pending")
        return fetch

    def _target(self, fetch: Fetching, spec: TensorSpec, data: bytes) -> np.ndarray | None:
        """The array that ``spec`` goes to; None if the fetch failed because it has none."""
        if fetch.into is None:
            try:
                return self._destinations.fresh(spec, fetch.key)
            except ArenaFullError as error:
                self._end(fetch, error)
                return None
        if fetch.spec_bytes != data:
            wanted = TensorSpec.of(fetch.into)
            self._end(fetch, ShapeError(f"{fetch.what}: the tensor is {spec}, the destination {wanted}"))
            return None
        return fetch.into

    def _on_eager(self, message: memoryview) -> Action | None:
        request, offset, data, start, nbytes = decode_eager(message)
        fetch = self._pending.get(request)
        if fetch is not None and fetch.plain and fetch.spec_bytes == data and len(message) - start == nbytes:
            # The whole tensor, as expected: the case that latency is measured by.
            if nbytes and not fetch.done():
                flat_memory(fetch.into)[:] = message[start:]  # type: ignore[arg-type]
                self.counters.copies += 1
            return self._completed(fetch, fetch.into, nbytes)
        fetch = self._pending_fetch(request, "EAGER")
        spec = decode_spec(data)
        if fetch.received != offset:
            raise CorruptMessageError(f"EAGER from {self.peer} at {offset}, not at {fetch.received}")
        if offset == 0 and not fetch.done():
            array = self._target(fetch, spec, data)
            if array is None and spec.nbytes > len(message) - start:
                self._pending[request] = fetch  # the rest of it is on its way: take and drop it
            fetch.landing = array
            fetch.flat = flat_memory(array) if array is not None and spec.nbytes else None
        size = len(message) - start
        if fetch.flat is not None:
            fetch.flat[offset : offset + size] = message[start:]
        fetch.received = offset + size
        if fetch.received < spec.nbytes:
            return None
        self.counters.copies += 1 if size else 0
        if fetch.landing is None or fetch.done():
            self._drop(request)
        else:
            self._finish(fetch, fetch.landing, spec.nbytes)
        return None

    def _completed(self, fetch: Fetching, result: Any, nbytes: int) -> Action:
        """``_finish`` of a fetch for which no memory is held: with what the caller sets into the future once the lock is free."""
        self.counters.bytes_in += nbytes
        del self._pending[fetch.request]
        if fetch.started_ns:
            self._record(fetch, nbytes)
        if self._queued:
            self._next_queued()
        return fetch.set_result, result

    def _on_metadata(self, message: memoryview) -> None:
        request, spec = messages.decode_metadata(message)
        fetch = self._pending_fetch(request, "METADATA")
        if fetch.mode is Mode.PAPER_WRITE:
            self._paper.announced(fetch, spec)
            return
        if fetch.mode is not Mode.WRITE:
            raise CorruptMessageError(f"METADATA from {self.peer} for a fetch that does not ask for it")
        self._destinations.conclude(fetch)
        self._destinations.remember(fetch.key, spec)
        self.counters.metadata_misses += 1
        fetch.landing = None
        try:
            if fetch.into is None:
                fetch.landing = self._destinations.fresh(spec, fetch.key)
            elif TensorSpec.of(fetch.into) != spec:
                raise ShapeError(f"{fetch.what}: the tensor is {spec}, the destination {TensorSpec.of(fetch.into)}")
            region = self._destinations.expose(fetch) if spec.nbytes else NO_REGION
        except (ShapeError, ArenaFullError, OSError) as error:
            self._send(pack_header(_RELEASE, 0, 0, request))
            self._end(fetch, error)
            return
        fetch.exposed = True
        self._send(messages.encode_again(request, region))

    def _on_offer(self, message: memoryview) -> Action | None:
        request, source, offset, data, nbytes = decode_offer(message)
        fetch = self._pending_fetch(request, "OFFER")
        expected = fetch.plain and fetch.mode is _READ and fetch.spec_bytes == data and source.nbytes == nbytes
        if expected and self._copies and not fetch.done():
            # The whole tensor, in memory that we see: no completion to wait for.
            into = fetch.into
            np.copyto(into, self.link.map(source, into))  # type: ignore[arg-type]
            self._send(pack_header(_RELEASE, 0, 0, request))
            return self._completed(fetch, into, nbytes)
        spec = decode_spec(data)
        if fetch.mode is _BORROW:
            return self._lend(fetch, source, spec, nbytes)
        if fetch.mode is Mode.PAPER_READ:
            self._paper.offered(fetch, source, spec)
            return None
        if fetch.mode is not _READ:
            raise CorruptMessageError(f"OFFER from {self.peer} for a fetch that does not ask for it")
        if fetch.received != offset:
            raise CorruptMessageError(f"OFFER from {self.peer} at {offset}, not at {fetch.received}")
        fetch.received += source.nbytes
        last = fetch.received == spec.nbytes
        if fetch.landing is None and request in self._pending and not fetch.done():
            fetch.landing = self._target(fetch, spec, data)
            if fetch.landing is None and not last:
                self._pending[request] = fetch  # more offers are on their way
            elif fetch.landing is not None:
                self._destinations.acquire(fetch)
        if fetch.landing is None:
            if last:
                self._send(pack_header(_RELEASE, 0, 0, request))
                self._drop(request)
            return None
        memory = fetch.landing
        if source.nbytes != memory.nbytes:
            memory = flat(memory)[offset : offset + source.nbytes]
        self._read(memory, source, partial(self._read_done, fetch, spec.nbytes if last else 0))
        return None

    def _read_done(self, fetch: Fetching, nbytes: int, error: BaseException | None) -> None:
        if error is None and nbytes:
            self._send(pack_header(_RELEASE, 0, 0, fetch.request))
            assert fetch.landing is not None
            self._finish(fetch, fetch.landing, nbytes)

    def _lend(self, fetch: Fetching, source: Region, spec: TensorSpec, nbytes: int) -> Action | None:
        if source.nbytes != nbytes:
            raise CorruptMessageError(f"OFFER from {self.peer} of {source.nbytes} bytes to borrow {spec}")
        view = self.link.map(source, spec)
        request = fetch.request
        if fetch.done():  # too late
            self._send(pack_header(_RELEASE, 0, 0, request))
            self._drop(request)
            return None
        self._leased.add(request)
        return self._completed(fetch, Lease(view, partial(self._give_back, request)), nbytes)

    def _give_back(self, request: int) -> None:
        with self._lock:
            if request in self._leased:
                self._leased.discard(request)
                if self._reason is None:
                    self._send(pack_header(_RELEASE, 0, 0, request))

    def _on_error(self, message: memoryview) -> None:
        request, text = messages.decode_error(message)
        fetch = self._pending_fetch(request, "ERROR")
        self._end(fetch, wire.error_from_text(text, self.peer))

    def _immediate(self, imm: int) -> None:
        fetch = self._pending_fetch(imm, "a write")
        if not fetch.exposed:
            raise CorruptMessageError(f"{self.peer} wrote for request {imm} without having been told where")
        if fetch.mode is Mode.PAPER_WRITE:
            self._paper.written(fetch)
            return
        assert fetch.landing is not None
        array = fetch.landing
        if fetch.into is not None and array is not fetch.into:
            np.copyto(fetch.into, array)
            self.counters.copies += 1
            array = fetch.into
        self._finish(fetch, array, array.nbytes)

    def _finish(self, fetch: Fetching, result: Any, nbytes: int) -> None:
        """The tensor is there."""
        self.counters.bytes_in += nbytes
        if fetch.mode is Mode.WRITE and fetch.into is None:
            self._destinations.remember(fetch.key, TensorSpec.of(result))
        if fetch.mode is _BORROW:  # a copy, because it came eagerly
            result = Lease(result)
        self._after.append((fetch.set_result, result))
        if fetch.started_ns:
            self._record(fetch, nbytes)
        self._over(fetch)

    def _record(self, fetch: Fetching, nbytes: int) -> None:
        self._tracer.record(Phase.WIRE, fetch.key, 0, fetch.started_ns, time.monotonic_ns(), nbytes)

    def _end(self, fetch: Fetching, error: BaseException) -> None:
        """The fetch fails, and the peer has no more to do with it."""
        self._after.append((fetch.set_exception, error))
        self._over(fetch)

    def _over(self, fetch: Fetching) -> None:
        del self._pending[fetch.request]
        fetch.let_go()
        if fetch.registration is not None:
            self._destinations.conclude(fetch)
        if self._queued:
            self._next_queued()

    def _drop(self, request: int) -> None:
        """The peer has answered a fetch that had failed before."""
        fetch = self._pending.pop(request, None)
        if fetch is not None:
            fetch.let_go()
            self._next_queued()

    def _next_queued(self) -> None:
        while self._queued and len(self._pending) < self._inflight:
            fetch, key_bytes = self._queued.popleft()
            if fetch.done():
                self._destinations.conclude(fetch)
                continue
            limit = self._borrow_limit if fetch.mode is _BORROW else self._eager_limit
            region = self.link.region(fetch.landing) if fetch.landing is not None else NO_REGION
            self._ask(fetch, key_bytes, region, limit)

    # The end

    def expire(self, now_ns: int) -> None:
        if not self._pending and not self._queued and not self._edges.waiting:
            return
        with self._lock:
            fetches = [*self._pending.values(), *(fetch for fetch, _ in self._queued)]
            late = [f for f in fetches if f.deadline.at_ns <= now_ns and not f.done()]
            self._edges.expire(now_ns)
            after = self._take_after()
        for fetch in late:
            # It stays in the table: the peer may still write to its memory, and will answer.
            fetch.set_exception(fetch.deadline.error(fetch.what))
        for action, argument in after:
            action(argument)

    def _dropped(self, reason: BaseException) -> None:
        self._quarantine = [*self._pending.values(), *(fetch for fetch, _ in self._queued)]
        self._pending.clear()
        self._queued.clear()
        self._leased.clear()
        self._after += [(fetch.set_exception, reason) for fetch in self._quarantine]
        self._edges.drop(reason)

    def _quarantine_over(self) -> None:
        for fetch in self._quarantine:
            fetch.let_go()
            self._destinations.conclude(fetch)
            if fetch.buffer is not None and fetch.buffer.key is None:
                self._paper.buffers.give(fetch.buffer)
        self._quarantine.clear()
        self._paper.buffers.close()
