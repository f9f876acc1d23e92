"""Endpoint: one end of a connection; messages under credits, transfers in pieces, and an end that is orderly or sudden.

Locking: ``_lock`` guards the link and all tables and is held for short; what may call foreign code (futures, leases,
``TensorSource.take``) is put into ``_after`` under the lock and run once it is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError, CorruptMessageError, DeadlineError, PeerLostError
from runtime.future import Future
from runtime.transport.base import Counters
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import Completion, Link, Op, Region
from runtime.transport.onesided.transfer import RESERVE, Done, Transfer

if TYPE_CHECKING:
    from runtime.transport.onesided.transport import OneSidedTransport

_MESSAGE, _IMMEDIATE = Op.MESSAGE, Op.IMMEDIATE
_CREDIT = messages.Kind.CREDIT
_GOODBYE_S = 2.0

# What a handler wants to be called, and with what, once the lock is free.
Action = tuple[Callable[[Any], object], Any]
Handler = Callable[[memoryview], "Action | None"]


class Endpoint:
    """What both ends share. ``progress`` may be called by any thread; at most one polls, others return at once or wait."""

    piece: int  # bytes of the longest single operation

    def __init__(self, transport: OneSidedTransport, link: Link, peer: str) -> None:
        self.transport = transport
        self.link = link
        self.peer = peer
        self.counters = Counters()
        self._drive: Callable[[Deadline, Callable[[], bool]], None] = partial(transport.progress.drive, own=self)
        self._lock = threading.Lock()
        self._credits = link.depth
        self._owed = 0
        self._report_at = max(2, transport.settings.depth // 4)  # in a message that goes anyway
        self._due_at = 2 * self._report_at  # in one of its own
        self.piece = min(link.max_transfer, transport.settings.chunk_bytes or 1 << 62)
        self._outbox: deque[Callable[[], bool]] = deque()
        # Tag of a post -> the transfer that it completes, which keeps the memory alive until then: a NIC reads it when it likes.
        self._flights: dict[int, Transfer] = {}
        self._cut_short: list[
            Callable[[], bool]
        ] = []  # jobs that were given up, perhaps after some of their pieces were posted
        self._next_tag = 0
        self._after: list[Action] = []
        self._reason: BaseException | None = None  # why nothing goes through any more
        self._saying_bye = False
        self._closed = False
        self._goodbye: Future[None] = Future(f"goodbye of {peer}", self._drive)
        settings = transport.settings
        unregistered = settings.protocol.startswith("paper") and not settings.message_reuse
        self._post_send = self._send_from_new_buffer if unregistered else link.post_unsignalled
        self._post_gathered = self._gather_into_new_buffer if unregistered else link.post_gathered
        self._poll = link.poll
        self._take_message = link.take
        self.peek = link.peek
        self.disarm = link.disarm
        self._handlers: list[Handler] = [self._on_unknown] * 256
        self._handle_by(
            {
                messages.Kind.CREDIT: self._on_credit,
                messages.Kind.BYE: self._on_bye,
                messages.Kind.BYE_ACK: self._on_bye_ack,
            }
        )

    # Progress's side

    def progress(self, wait: bool = False) -> bool:
        """Poll the link once and handle what came. True if anything did."""
        lock = self._lock
        if not lock.acquire(wait):
            return False
        busy = False
        after: list[Action] | None = None
        action: Action | None = None
        try:
            if self._closed:
                return False
            message = self._take_message()
            if message is not None:
                busy = True
                self._owed += 1
                self.counters.messages_in += 1
                kind = message[0]
                if message[1]:
                    self._more_credits(message)
                if self._reason is None or kind >= _CREDIT:
                    action = self._handlers[kind](message)
            else:
                completions = self._poll()
                if completions:
                    busy = True
                    self._handle(completions)
                elif not self._outbox:
                    return False
            if self._owed >= self._due_at:
                self._report()
            if self._outbox:
                self._flush()
        except BaseException as error:
            self._fail(self._translated(error))
            self.link.abort(error)
        finally:
            if self._after:
                after, self._after = self._after, []
            lock.release()
            if action is not None:
                action[0](action[1])
            if after is not None:
                run(after)
        return busy

    def expects(self) -> bool:
        """See Member. A serving end may be asked at any time."""
        return True

    def attend(self) -> None:
        """Somebody counts on being called back instead of polling. Any thread."""
        self.transport.progress.attend(self)

    def lost(self, error: BaseException) -> None:
        """The peer is gone for good: take what it still delivered, fail the rest, let go of quarantined memory."""
        while self.progress(wait=True):
            pass
        with self._lock:
            self._fail(error)
            self._quarantine_over()
            self._after.append((self._goodbye.set_result, None))
            after = self._take_after()
        run(after)
        self.link.abort(error)  # so that the peer, if it lives, learns that we have stopped
        self._peer_gone()

    def expire(self, now_ns: int) -> None:
        """Fail what has passed its deadline."""

    # The end

    def abort(self, reason: BaseException) -> None:
        """Fail what is pending with ``reason`` now and hang up, without waiting. Memory that the peer may still write to
        stays held until the peer has hung up too. Idempotent; any thread."""
        with self._lock:
            self._fail(reason)
            after = self._take_after()
        run(after)
        self.link.abort(reason)

    def close(self) -> None:
        """Fail what is pending, tell the peer, wait (bounded) until it has stopped using our memory, tear down. Idempotent."""
        with self._lock:
            polite = self._reason is None and not self._closed
            self._fail(ChannelClosedError(f"the channel with {self.peer} was closed"))
            if polite:
                self._saying_bye = True
                self._send(messages.pack_header(messages.Kind.BYE, 0, 0, 0))
            after = self._take_after()
        run(after)
        if polite:
            try:
                self._goodbye.result(Deadline.after(_GOODBYE_S))
            except DeadlineError:
                self.link.abort(PeerLostError(f"{self.peer} did not answer the goodbye within {_GOODBYE_S} s"))
        self.shut()

    def shut(self) -> None:
        """Tear the link down now. Idempotent."""
        self.transport.progress.remove(self)
        with self._lock:
            if self._closed:
                return
            self._fail(ChannelClosedError(f"the channel with {self.peer} was closed"))
            self._closed = True
            self.link.close()
            self._flights.clear()
            self._cut_short.clear()
            self._quarantine_over()
            self._after.append((self._goodbye.set_result, None))
            after = self._take_after()
        run(after)
        self.transport.forget(self)

    @property
    def reason(self) -> BaseException | None:
        """Why nothing goes through any more; None while all is well."""
        return self._reason

    # For subclasses; the lock is held

    def _dropped(self, reason: BaseException) -> None:
        """Put into ``_after`` the failure of everything pending; called once, when the endpoint fails."""
        raise NotImplementedError

    def _quarantine_over(self) -> None:
        """The peer can no longer touch our memory: let go of what was held for that reason."""
        raise NotImplementedError

    def _peer_gone(self) -> None:
        """Called without the lock, once the peer is known to be gone."""

    def _immediate(self, imm: int) -> None:
        raise CorruptMessageError(f"unexpected immediate {imm:#x} from {self.peer}")

    def _send(self, message: bytes) -> None:
        """Send a control message in order, now or when credits and queue allow."""
        if self._outbox or self._credits <= RESERVE or self._owed >= self._report_at:
            if self._outbox or self._credits <= RESERVE or not self._try_send(message):
                self._outbox.append(partial(self._send_later, message))
            return
        try:
            self._post_send(message)
        except BlockingIOError:
            self._outbox.append(partial(self._send_later, message))
            return
        self._credits -= 1
        self.counters.messages_out += 1

    def _send_gathered(self, head: bytes, body: memoryview) -> None:
        """``_send`` of a message that is ``head`` and then ``body``, which may be reused when this returns."""
        if self._outbox or self._credits <= RESERVE or self._owed >= self._report_at:
            self._send(b"".join((head, body)))
            return
        try:
            self._post_gathered(head, body)
        except BlockingIOError:
            self._outbox.append(partial(self._send_later, b"".join((head, body))))
            return
        self._credits -= 1
        self.counters.messages_out += 1

    def _write(self, local: np.ndarray, remote: Region, imm: int, done: Done) -> None:
        """Write C-contiguous ``local`` to ``remote`` in order, then deliver ``imm``; ``done`` runs under the lock."""
        self._queue(Transfer(self, local, remote, imm, done).write)

    def _read(self, local: np.ndarray, remote: Region, done: Done) -> None:
        """Read ``remote`` into C-contiguous ``local``; ``done`` runs under the lock."""
        self._queue(Transfer(self, local, remote, 0, done).read)

    def _queue(self, job: Callable[[], bool]) -> None:
        """Run ``job`` in order until it returns True: everything is posted."""
        if self._outbox or not job():
            self._outbox.append(job)

    def _tag(self, transfer: Transfer) -> int:
        self._next_tag += 1
        self._flights[self._next_tag] = transfer
        return self._next_tag

    def _try_send(self, message: bytes | bytearray) -> bool:
        if self._owed >= self._report_at:
            message = messages.return_credits(message, self._owed)
        try:
            self._post_send(message)
        except BlockingIOError:
            return False
        if message.__class__ is bytearray:
            self._owed = 0
        self._credits -= 1
        self.counters.messages_out += 1
        return True

    def _send_from_new_buffer(self, message: bytes | bytearray | memoryview) -> None:
        """The paper's protocols without message reuse: a message buffer is allocated and registered for each."""
        buffer = self.link.allocate(len(message))
        self.counters.registrations += 1
        try:
            buffer[:] = np.frombuffer(message, np.uint8)
            self.link.post_send(buffer.data)
        finally:
            self.link.free(buffer)

    def _gather_into_new_buffer(self, head: bytes, body: memoryview) -> None:
        self._send_from_new_buffer(b"".join((head, body)))

    def _take_after(self) -> list[Action]:
        after = self._after
        if after:
            self._after = []
        return after

    # Inside

    def _send_later(self, message: bytes) -> bool:
        return self._credits > RESERVE and self._try_send(message)

    def _flush(self) -> None:
        outbox = self._outbox
        while outbox and outbox[0]():
            outbox.popleft()

    def _handle(self, completions: list[Completion]) -> None:
        for op, tag, imm, payload, error in completions:
            if op is _MESSAGE:
                action = self._on_message(payload)  # type: ignore[arg-type]
                if action is not None:
                    self._after.append(action)
            elif op is _IMMEDIATE:
                self._owed += 1
                if self._reason is None:
                    self._immediate(imm)
            else:
                transfer = self._flights.pop(tag, None)
                if transfer is not None:
                    transfer.done(error)
                if error is not None:
                    raise error

    def _on_message(self, message: memoryview) -> Action | None:
        self._owed += 1
        self.counters.messages_in += 1
        kind = message[0]
        if message[1]:
            self._more_credits(message)
        if self._reason is None or kind >= _CREDIT:  # else an answer to what has failed already
            return self._handlers[kind](message)
        return None

    def _more_credits(self, message: memoryview) -> None:
        if message[1] != 1:
            raise CorruptMessageError(f"{self.peer} sends unknown flags {message[1]:#x}")
        self._credits += message[2] | message[3] << 8
        if self._credits > self.link.depth:
            raise CorruptMessageError(f"{self.peer} returns more credits than there are")

    def _report(self) -> None:
        """Give credits back in a message of their own, because none is going that way."""
        if self._credits:
            report = messages.pack_header(messages.Kind.CREDIT, 0, 0, 0)
            if not self._try_send(report):
                self._outbox.appendleft(partial(self._try_send, report))

    def _handle_by(self, handlers: Mapping[messages.Kind, Handler]) -> None:
        for kind, handler in handlers.items():
            self._handlers[kind] = handler

    def _on_unknown(self, message: memoryview) -> None:
        raise CorruptMessageError(f"message of kind {message[0]} from {self.peer}")

    def _fail(self, reason: BaseException) -> None:
        if self._reason is None:
            self._reason = reason
            self._cut_short.extend(self._outbox)
            self._outbox.clear()
            self._dropped(reason)

    def _translated(self, error: BaseException) -> BaseException:
        if isinstance(error, (PeerLostError, CorruptMessageError, ChannelClosedError)):
            return error
        if isinstance(error, IndexError):
            return CorruptMessageError(f"a message from {self.peer} that is shorter than a header")
        lost = PeerLostError(f"connection to {self.peer} failed: {error}")
        lost.__cause__ = error
        return lost

    def _on_credit(self, message: memoryview) -> None:
        messages.decode_request(message)

    def _on_bye(self, message: memoryview) -> None:
        messages.decode_request(message)
        self._fail(PeerLostError(f"{self.peer} closed the channel"))
        self._quarantine_over()
        # In order behind every write that was posted, so it says that none is under way.
        self._send(messages.pack_header(messages.Kind.BYE_ACK, 0, 0, 0))

    def _on_bye_ack(self, message: memoryview) -> None:
        messages.decode_request(message)
        if not self._saying_bye:
            raise CorruptMessageError(f"{self.peer} answers a goodbye that nobody said")
        self._quarantine_over()
        self._after.append((self._goodbye.set_result, None))


def run(after: list[Action]) -> None:
    """Run what was put off until the lock was free."""
    for action, argument in after:
        action(argument)
