"""ServingEndpoint: the listening end of a connection; answers fetches from a TensorSource and receives static edges."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from runtime import wire
from runtime.errors import CorruptMessageError
from runtime.future import Future
from runtime.memory.arena import Block
from runtime.tensor import TensorSpec
from runtime.transport.base import Lease, TensorSource
from runtime.transport.onesided import messages
from runtime.transport.onesided.endpoint import Action, Endpoint, run
from runtime.transport.onesided.link import Link, Region
from runtime.transport.onesided.messages import Fetch, Kind, Mode, decode_request, encode_offer, pack_eager
from runtime.transport.onesided.paper import Buffer, PaperSender
from runtime.transport.onesided.protocol import flat, flat_memory, spec_bytes
from runtime.transport.onesided.registration import Registration

if TYPE_CHECKING:
    from runtime.transport.onesided.transport import OneSidedTransport

# Looking a member up in an enumeration takes three times as long as a global name.
_EAGER = int(Kind.EAGER)
_READ, _BORROW = Mode.READ, Mode.BORROW
# A peer may have this many fetches unanswered; its own limit (``Settings.inflight``) is lower or the same.
_MAX_ACTIVE = (1 << 16) + 1
# Below this size joining header and payload costs less than writing them one after the other.
_GATHERED_BYTES = 4096
# Pieces in which a source outside the arena is copied into it while the peer already reads the piece before.
_STAGING_CHUNK = 1 << 20


class Answer:
    """A fetch to answer; the ``reply`` that is given to TensorSource.take."""

    # Defaults live in the class, so that making one sets only what differs.
    given = False
    writing = False
    lease: Lease | None = None
    array: np.ndarray | None = None
    block: Block | None = None  # staging memory
    registration: Registration | None = None
    buffer: Buffer | None = None  # of the paper's protocols, and the part of it that the tensor fills
    memory: np.ndarray | None = None

    def __init__(self, endpoint: ServingEndpoint, fetch: Fetch) -> None:
        self.endpoint = endpoint
        self.fetch = fetch

    def __call__(self, outcome: Lease | BaseException) -> None:
        self.endpoint.answer(self, outcome)

    def ask(self, source: TensorSource) -> None:
        """Ask for the tensor; the lock is free."""
        try:
            source.take(self.fetch.key, self)
        except Exception as error:
            self.endpoint.answer(self, error)


class ServingEndpoint(Endpoint):
    """Serves one peer. Created when it has connected; tears itself down when the peer is gone."""

    def __init__(self, transport: OneSidedTransport, link: Link, peer: str, source: TensorSource) -> None:
        super().__init__(transport, link, peer)
        self._source = source
        self._room = link.max_message - messages.EAGER_BYTES  # for shape and payload of an EAGER message
        self._small = self._room - messages.MAX_SPEC_BYTES  # tensors that surely fit
        self._active: dict[int, Answer] = {}
        self._paper = PaperSender(self)
        self._quarantine: list[Answer] = []
        self._tickets = itertools.count(1)
        self._withdrawals: dict[int, tuple[Future[None], int]] = {}  # ticket -> (future, messages unanswered)
        self._handle_by(
            {
                Kind.FETCH: self._on_fetch,
                Kind.AGAIN: self._on_again,
                Kind.RELEASE: self._on_release,
                Kind.BIND: self._on_bind,
                Kind.WITHDRAWN: self._on_withdrawn,
            }
        )

    # Fetches

    def answer(self, answer: Answer, outcome: Lease | BaseException) -> None:
        """The source's reply; any thread, once."""
        lease = outcome if isinstance(outcome, Lease) else None
        spent: Lease | None = None
        with self._lock:
            if answer.given or self._reason is not None:
                spent = lease
            else:
                answer.given = True
                answer.lease = lease
                try:
                    if lease is None:
                        self._refuse(answer, outcome)  # type: ignore[arg-type]
                    elif lease.lent.nbytes <= answer.fetch.eager_limit and lease.lent.nbytes <= self._small:
                        # All that latency is measured by: answered on the spot, and the lease is given back below.
                        self._send_eagerly(answer.fetch.request, lease.lent)
                        del self._active[answer.fetch.request]
                        spent = lease
                    else:
                        self._respond(answer, lease.lent)
                except Exception as error:
                    self._unanswerable(answer, error)
            if self._after:
                after, self._after = self._after, []
            else:
                after = None
        if spent is not None:
            spent.release()
        if after is not None:
            run(after)

    def _send_eagerly(self, request: int, array: np.ndarray) -> None:
        nbytes = array.nbytes
        data = spec_bytes(array)
        head = pack_eager(_EAGER, 0, 0, request, 0, len(data)) + data
        if nbytes >= _GATHERED_BYTES and array.flags.c_contiguous:
            self._send_gathered(head, flat_memory(array))
        else:
            self._send(head + array.tobytes())
        counters = self.counters
        if nbytes:
            counters.copies += 1
        counters.served += 1
        counters.bytes_out += nbytes

    def _respond(self, answer: Answer, array: np.ndarray) -> None:
        fetch = answer.fetch
        nbytes = array.nbytes
        mode = fetch.mode
        if nbytes <= fetch.eager_limit:
            self._stream(answer, array, spec_bytes(array))
            return
        answer.array = array
        if mode is _READ or mode is _BORROW:
            self._offer(answer, array)
        elif mode is not Mode.WRITE:
            self._paper.respond(answer, array)
        elif fetch.into.nbytes == nbytes and fetch.spec_bytes == spec_bytes(array):
            self._write_to(answer, fetch.into)
        else:
            self._send(messages.encode_metadata(fetch.request, spec_bytes(array)))

    def _unanswerable(self, answer: Answer, error: Exception) -> None:
        """Tell the peer why; where not even that goes, or the peer broke the protocol, hang up. What the answer holds is let go
        of either way."""
        try:
            if isinstance(error, CorruptMessageError):
                raise error
            self._refuse(answer, error)
        except Exception as fault:
            reason = self._translated(fault)
            self._fail(reason)
            self.link.abort(reason)

    def _on_fetch(self, message: memoryview) -> Action | None:
        fetch = messages.decode_fetch(message)
        if fetch.request in self._active or len(self._active) >= _MAX_ACTIVE:
            raise CorruptMessageError(f"{self.peer} asks with request {fetch.request} twice, or too many at once")
        answer = Answer(self, fetch)
        self._active[fetch.request] = answer
        return answer.ask, self._source

    def _stream(self, answer: Answer, array: np.ndarray, data: bytes) -> None:
        """Send a tensor that may be longer than a message through the ring in pieces."""
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
            self.counters.copies += 1
        self.counters.copies += 1
        self._queue(_EagerStream(self, answer, flat(array), data, self._room - len(data)).post)

    def _write_to(self, answer: Answer, into: Region) -> None:
        array = answer.array
        assert array is not None
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
            self.counters.copies += 1
        if self.link.registers:
            self._register(answer, array)
        self._write(array, into, answer.fetch.request, partial(self._written, answer, array.nbytes))

    def _written(self, answer: Answer, nbytes: int, error: BaseException | None) -> None:
        if error is None and self._active.get(answer.fetch.request) is answer:
            self.counters.bytes_out -= nbytes  # _served counts them
            self._served(answer, nbytes)

    def _register(self, answer: Answer, array: np.ndarray) -> None:
        try:
            self.link.region(array)
        except ValueError:
            assert self.transport.registrations is not None
            answer.registration = self.transport.registrations.acquire(array)

    def _offer(self, answer: Answer, array: np.ndarray) -> None:
        """Tell where the tensor lies; if it does not lie where a peer can read it, copy it there piece by piece."""
        request, data = answer.fetch.request, spec_bytes(array)
        if array.flags.c_contiguous:
            link = self.link
            try:
                if link.registers:
                    self._register(answer, array)
                source = link.region(array)
            except ValueError:
                pass
            else:
                self._send(encode_offer(request, source, 0, data))
                return
        nbytes = array.nbytes
        answer.block = self.transport.arena.allocate(nbytes, f"staging of {answer.fetch.key}")
        staging = answer.block.memory
        whole = self.link.region(staging)
        self.counters.copies += 1
        if not array.flags.c_contiguous or answer.fetch.mode is _BORROW:
            np.copyto(answer.block.array(TensorSpec.of(array)), array)
            self._send(encode_offer(request, whole, 0, data))
            return
        memory = flat(array)
        chunk = answer.fetch.chunk_bytes or _STAGING_CHUNK
        for offset in range(0, nbytes, chunk):
            size = min(chunk, nbytes - offset)
            np.copyto(staging[offset : offset + size], memory[offset : offset + size])
            self._send(encode_offer(request, whole.slice(offset, size), offset, data))

    def _on_again(self, message: memoryview) -> None:
        request, into = messages.decode_again(message)
        answer = self._active.get(request)
        if answer is None or answer.array is None or into.nbytes != answer.array.nbytes:
            raise CorruptMessageError(f"AGAIN from {self.peer} for request {request}, {into.nbytes} bytes")
        if answer.fetch.mode not in (Mode.WRITE, Mode.PAPER_WRITE) or answer.writing:
            raise CorruptMessageError(f"AGAIN from {self.peer} for request {request}, which does not wait for it")
        answer.writing = True
        if answer.fetch.mode is Mode.PAPER_WRITE:
            self._paper.write(answer, into, partial(self._paper_written, answer.array.nbytes))
        else:
            self._write_to(answer, into)

    def _paper_written(self, nbytes: int, error: BaseException | None) -> None:
        self.counters.bytes_out -= nbytes  # counted when the receiver has sent its finish

    def _on_release(self, message: memoryview) -> Action | None:
        request = decode_request(message)
        answer = self._active.get(request)
        if answer is None or answer.array is None:
            raise CorruptMessageError(f"RELEASE from {self.peer} for request {request}, which has nothing to release")
        mode = answer.fetch.mode
        if (mode is _READ or mode is _BORROW) and answer.block is None and answer.registration is None:
            # Lent as it lies, which is what latency is measured by.
            counters = self.counters
            counters.served += 1
            counters.bytes_out += answer.array.nbytes
            del self._active[request]
            return Lease.release, answer.lease
        if mode is Mode.WRITE or (mode is Mode.PAPER_WRITE and not answer.writing):
            # The peer had no use for the tensor that METADATA described.
            self._let_go(answer)
            del self._active[request]
        else:
            self._served(answer, answer.array.nbytes)
        return None

    def _refuse(self, answer: Answer, error: BaseException) -> None:
        self._send(messages.encode_error(answer.fetch.request, wire.error_text(error), self.link.max_message))
        self._let_go(answer)
        del self._active[answer.fetch.request]

    def _served(self, answer: Answer, nbytes: int) -> None:
        """The peer has the tensor."""
        self.counters.served += 1
        self.counters.bytes_out += nbytes
        self._let_go(answer)
        del self._active[answer.fetch.request]

    def _let_go(self, answer: Answer) -> None:
        if answer.lease is not None:
            self._after.append((Lease.release, answer.lease))
            answer.lease = None
        if answer.buffer is not None:
            self._paper.buffers.give(answer.buffer)
            answer.buffer = None
        if answer.block is not None:
            self.transport.arena.free(answer.block)
            answer.block = None
        if answer.registration is not None:
            assert self.transport.registrations is not None
            self.transport.registrations.release(answer.registration)
            answer.registration = None

    # Static edges

    def give_credit(self, index: int, generation: int) -> None:
        """Allow the producer to write ``generation``; any thread."""
        with self._lock:
            if self._reason is None:
                self._send(messages.encode_edge_credit(index, generation))

    def withdraw(self, indices: list[int]) -> Future[None]:
        """Ask the producer to write to these slots no more; done when it cannot."""
        future: Future[None] = Future(f"withdrawal of {len(indices)} slots from {self.peer}", self._drive)
        with self._lock:
            if self._closed:
                future.set_result(None)
            elif self._reason is not None:
                self._withdrawals[next(self._tickets)] = (future, 1)  # over when the peer is gone
            else:
                room = messages.edges_per_message(self.link.max_message)
                parts = [indices[at : at + room] for at in range(0, len(indices), room)]
                ticket = next(self._tickets)
                self._withdrawals[ticket] = (future, len(parts))
                for part in parts:
                    self._send(messages.encode_edges(Kind.WITHDRAW, ticket, part))
        return future

    def _on_bind(self, message: memoryview) -> None:
        index, nonce, generation = messages.decode_bind(message)
        if self.transport.slots.bind(self, index, nonce, generation):
            self._send(messages.encode_edge_credit(index, generation))
        else:  # withdrawn before it was bound; ticket 0 is nobody's
            self._send(messages.encode_edges(Kind.WITHDRAW, 0, [index]))

    def _on_withdrawn(self, message: memoryview) -> None:
        ticket, _ = messages.decode_edges(message)
        if ticket == 0:
            return
        future, left = self._withdrawals.pop(ticket, (None, 0))
        if future is None:
            raise CorruptMessageError(f"{self.peer} confirms a withdrawal that nobody asked for")
        if left > 1:
            self._withdrawals[ticket] = (future, left - 1)
        else:
            self._after.append((future.set_result, None))

    def _immediate(self, imm: int) -> None:
        if not imm >> 31:
            raise CorruptMessageError(f"unexpected immediate {imm:#x} from {self.peer}")
        future, nbytes = self.transport.slots.landed(self, imm)
        self.counters.bytes_in += nbytes
        if future is not None:
            self._after.append((future.set_result, None))

    # The end

    def _dropped(self, reason: BaseException) -> None:
        self._quarantine = list(self._active.values())
        self._active.clear()
        self._after += [(future.set_exception, reason) for future in self.transport.slots.owner_failed(self, reason)]

    def _quarantine_over(self) -> None:
        for answer in self._quarantine:
            self._let_go(answer)
        self._quarantine.clear()
        self._paper.buffers.close()
        self._after += [(future.set_result, None) for future, _ in self._withdrawals.values()]
        self._withdrawals.clear()

    def _peer_gone(self) -> None:
        self.shut()


class _EagerStream:
    """A tensor larger than a message, on its way through the ring in pieces."""

    __slots__ = ("answer", "data", "endpoint", "memory", "offset", "room")

    def __init__(self, endpoint: ServingEndpoint, answer: Answer, memory: np.ndarray, data: bytes, room: int) -> None:
        self.endpoint = endpoint
        self.answer = answer
        self.memory = memory
        self.data = data
        self.room = room
        self.offset = 0

    def post(self) -> bool:
        endpoint, request = self.endpoint, self.answer.fetch.request
        while self.offset < len(self.memory):
            piece = self.memory[self.offset : self.offset + self.room]
            head = messages.pack_eager(Kind.EAGER, 0, 0, request, self.offset, len(self.data))
            if not endpoint._send_later(head + self.data + piece.tobytes()):
                return False
            self.offset += len(piece)
        endpoint._served(self.answer, len(self.memory))
        return True
