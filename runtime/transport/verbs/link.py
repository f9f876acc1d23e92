"""VerbsLink: a Link over one RC queue pair.

Messages are SENDs into posted receives of one size, so the adapter keeps the ring; immediates take a receive too, whose buffer
stays empty. Every receive that poll() handed out is posted again at the next poll, in groups, because a post costs a system
call or a doorbell.

Sends complete in order, so one signalled request in a while tells that all before it are done: each request's id is its
number in sequence, and the difference to the last completed one is what is outstanding.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections import deque

import numpy as np

from runtime.errors import ChannelClosedError, PeerLostError, TransportError
from runtime.tensor import address_of
from runtime.transport.onesided.link import Completion, Link, Op, Region
from runtime.transport.verbs.binding import (
    INLINE,
    LOCAL_WRITE,
    RECV,
    SIGNALED,
    Device,
    MemoryRegion,
    Opcode,
    QpState,
    QueuePair,
    WorkCompletion,
)
from runtime.transport.verbs.memory import Memory
from runtime.transport.verbs.qp import EndPoint, QpAttributes, random_psn, to_init, to_ready, translate

_GROUP = 16  # receives posted together
_MAX_POLL = 64
# Beyond what the peer has credits for: a batch that is being read, and a group that is not full yet.
_SPARE_RECEIVES = _MAX_POLL + _GROUP
_RECEIVE_ID = 1 << 62
_ALIGNMENT = 64
_INLINE_WANTED = (512, 256, 128, 64, 0)
_MAX_REASON_BYTES = 2048
# A machine that is gone, or a cable, closes no connection. Found out after 5 + 5 * 2 seconds (the unit of TCP's timers).
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5, socket.TCP_USER_TIMEOUT: 15_000}
_SEND, _WRITE, _WRITE_IMM, _READ = (int(op) for op in (Opcode.SEND, Opcode.WRITE, Opcode.WRITE_IMM, Opcode.READ))


class VerbsLink(Link):
    """See Link. Made unconnected; ``describe``, ``connect`` and ``adopt``, in this order, make it ready.

    ``control`` is the TCP connection over which the two ends found each other, kept open because verbs say nothing when an
    idle peer dies; it carries at most one line, the reason of an abort.
    """

    registers = True
    prefers = "write"
    costly_bell = True

    def __init__(
        self,
        device: Device,
        memory: Memory,
        *,
        port: int,
        gid: bytes,
        gid_index: int,
        attributes: QpAttributes,
        depth: int,
        message_bytes: int,
        send_depth: int,
    ) -> None:
        limits, state = device.limits(), device.port(port)
        self.peer = "a peer that is not connected yet"
        self._device = device
        self._memory = memory
        self._port = port
        self._gid_index = gid_index
        self._attributes = attributes
        self._depth = depth
        receives = -(-(depth + _SPARE_RECEIVES) // _GROUP) * _GROUP
        self.max_inflight = min(send_depth, limits.max_qp_wr - 1, limits.max_cqe - receives)
        self.max_transfer = min(state.max_msg_sz, 1 << 30)
        self._slot_bytes = -(-message_bytes // _ALIGNMENT) * _ALIGNMENT
        self._send_slots = self.max_inflight
        self._signal_every = max(1, self.max_inflight // 4)

        self._map = mmap.mmap(-1, (receives + self._send_slots) * self._slot_bytes)
        self._ring = memoryview(self._map)
        ring = np.frombuffer(self._map, np.uint8)
        base = address_of(ring)
        self._ring_region: MemoryRegion = memory.register(ring, LOCAL_WRITE)
        try:
            self._pair = _queue_pair(device, self.max_inflight, receives)
        except TransportError:
            self._ring_region.close()
            raise
        self._receive_views = [
            self._ring[at * self._slot_bytes : (at + 1) * self._slot_bytes] for at in range(receives)
        ]
        self._send_base = receives * self._slot_bytes
        self._send_address = base + self._send_base
        self._pair.prepare_receives(
            _RECEIVE_ID, [base + at * self._slot_bytes for at in range(receives)], self._slot_bytes,
            self._ring_region.lkey, _GROUP,
        )  # fmt: skip
        self._groups = receives // _GROUP
        self._next_group = 0  # the one whose slots are handed out first
        self._used = 0  # receives handed out and not posted again

        self._posted = 0
        self._reaped = 0
        self._signalled = 0  # the last request that will give a completion
        self._messages = 0
        self._pending: deque[tuple[int, Op, int]] = deque()  # (id, op, tag) of what the caller wants to hear of
        self._found: deque[WorkCompletion] = deque()  # of the device, not handed out yet
        self._looking = threading.Lock()  # peek may run beside take and poll, and order must be kept
        self._looked = False  # take has just found nothing
        self._failure: BaseException | None = None
        self._told = False
        self._guard = threading.Lock()  # of teardown against arm, acknowledge and abort
        self._armed = False
        self._closed = False
        self._socket: socket.socket | None = None
        self._ours = EndPoint(
            number=self._pair.number,
            psn=random_psn(),
            lid=state.lid,
            gid=gid,
            mtu=state.active_mtu,
            link_layer=state.link_layer,
            max_rd_atomic=max(1, min(attributes.max_rd_atomic, limits.max_rd_atomic, 255)),
            depth=depth,
            message_bytes=self._slot_bytes,
        )
        to_init(self._pair, port, attributes)
        for group in range(self._groups):
            self._pair.post_receives(group)

    # Becoming ready

    def describe(self) -> bytes:
        """What the peer's ``connect`` needs. Receives are posted, so the peer may send as soon as it is ready."""
        return self._ours.pack()

    def connect(self, described: bytes, peer: str) -> None:
        """Become ready to send and receive."""
        theirs = EndPoint.unpack(described)
        self.peer = peer
        to_ready(self._pair, self._ours, theirs, self._port, self._gid_index, self._attributes)
        self.depth = theirs.depth
        self.max_message = min(theirs.message_bytes, self._slot_bytes)

    def adopt(self, control: socket.socket) -> None:
        """Take over the connection over which the two ends found each other."""
        control.setblocking(False)
        if control.family != socket.AF_UNIX:
            for option, value in _KEEPALIVE.items():
                control.setsockopt(socket.IPPROTO_TCP, option, value)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = control
        self.control = control.fileno()

    # Link

    def region(self, buffer: np.ndarray) -> Region:
        return self._memory.region(buffer)

    def allocate(self, nbytes: int) -> np.ndarray:
        return self._memory.allocate(nbytes)

    def free(self, buffer: np.ndarray) -> None:
        self._memory.free(buffer)

    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        number = self._next()
        nbytes = len(message)
        slot = self._send_slot(nbytes)
        start = self._send_base + slot
        self._ring[start : start + nbytes] = message
        self._send(number, slot, nbytes, tag, signalled)

    post_unsignalled = post_send

    def post_gathered(self, head: bytes, body: memoryview) -> None:
        number = self._next()
        middle, nbytes = len(head), len(head) + len(body)
        slot = self._send_slot(nbytes)
        start = self._send_base + slot
        self._ring[start : start + middle] = head
        self._ring[start + middle : start + nbytes] = body
        self._send(number, slot, nbytes, 0, False)

    def _send_slot(self, nbytes: int) -> int:
        """Where in the sending half of the ring the next message goes."""
        if nbytes > self.max_message:
            raise ValueError(f"a message of {nbytes} bytes is longer than {self.max_message}")
        # As many slots as requests may be outstanding, so the slot of this one is free.
        return self._messages % self._send_slots * self._slot_bytes

    def _send(self, number: int, slot: int, nbytes: int, tag: int, signalled: bool) -> None:
        flags = self._flags(number, signalled)
        if nbytes <= self._pair.max_inline:
            flags |= INLINE
        self._pair.post(_SEND, number, self._send_address + slot, nbytes, self._ring_region.lkey, flags)
        self._messages += 1
        self._is_posted(number, flags, Op.SENT if signalled else None, tag)

    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        number = self._next()
        nbytes = local.nbytes
        address, lkey = self._local(local, remote, nbytes)
        flags = self._flags(number, signalled)
        if imm is None:
            self._pair.post(_WRITE, number, address, nbytes, lkey, flags, remote.addr, remote.key)
        else:
            self._pair.post(_WRITE_IMM, number, address, nbytes, lkey, flags, remote.addr, remote.key, imm)
        self._is_posted(number, flags, Op.WRITTEN if signalled else None, tag)

    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0, signalled: bool = True) -> None:
        number = self._next()
        nbytes = local.nbytes
        address, lkey = self._local(local, remote, nbytes)
        flags = self._flags(number, signalled)
        self._pair.post(_READ, number, address, nbytes, lkey, flags, remote.addr, remote.key)
        self._is_posted(number, flags, Op.READ if signalled else None, tag)

    def peek(self) -> object:
        if not self._found and self._failure is None:
            self._look()
        return self._found or (self._failure is not None and not self._told)

    def take(self) -> memoryview | None:
        if self._failure is not None:
            return None
        if self._used >= _GROUP:
            self._post_used()
        found = self._found
        if not found:
            self._look()
            if not found:
                self._looked = True
                return None
        first = found[0]
        if first.status or first.opcode != RECV:
            return None
        found.popleft()
        self._used += 1
        return self._receive_views[first.wr_id - _RECEIVE_ID][: first.byte_len]

    def poll(self, n: int = _MAX_POLL) -> list[Completion]:
        if self._failure is not None:
            return self._tell()
        if self._used >= _GROUP:
            self._post_used()
        waiting = self._found
        if not waiting and not self._looked:
            self._look()
        self._looked = False
        done: list[Completion] = []
        while waiting and len(done) < n:
            found = waiting.popleft()
            if found.status:
                self._fail(translate(found.status, self.peer, self._attributes, self._device.async_events()))
                return done + self._tell()
            number = found.wr_id
            if number < _RECEIVE_ID:
                self._reaped = number
                pending = self._pending
                if pending and pending[0][0] == number:
                    _, op, tag = pending.popleft()
                    done.append(Completion(op, tag, 0, None, None))
                continue
            self._used += 1
            if found.opcode == RECV:
                payload = self._receive_views[number - _RECEIVE_ID][: found.byte_len]
                done.append(Completion(Op.MESSAGE, 0, 0, payload, None))
            else:
                done.append(Completion(Op.IMMEDIATE, 0, found.imm_data, None, None))
        return done

    def arm(self) -> int | None:
        # A request stays until its event came, and making one is a system call; so one at a time.
        if not self._armed:
            with self._guard:
                if not self._closed and not self._armed:
                    try:
                        self._pair.request_notification()
                        self._armed = True
                    except TransportError as error:
                        self._fail(error)  # which the next look finds
        return self._pair.fd

    def acknowledge(self) -> None:
        with self._guard:
            if not self._closed and self._pair.take_event():
                self._armed = False

    def lost(self) -> BaseException | None:
        control = self._socket
        if control is None or self._closed:
            return None
        try:
            text = control.recv(_MAX_REASON_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            return PeerLostError(f"{self.peer} is gone: its control connection broke ({error.strerror})")
        if text:
            return PeerLostError(f"{self.peer} hung up: {text.decode(errors='replace')}")
        return PeerLostError(f"{self.peer} is gone: it closed its control connection, or its process ended")

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self._closed:
                return
            self._fail(reason)
            with contextlib.suppress(TransportError):
                # From here on the device refuses whatever the peer sends.
                self._pair.modify({"qp_state": QpState.ERR})
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(str(reason).encode()[:_MAX_REASON_BYTES])
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._fail(ChannelClosedError(f"the link with {self.peer} was closed"))
            with contextlib.ExitStack() as stack:  # the last one pushed runs first, and all run
                if self._socket is not None:
                    stack.callback(self._socket.close)
                stack.callback(self._ring.release)
                stack.callback(self._receive_views.clear)
                stack.callback(self._ring_region.close)
                # The queue pair first: while it lives the device may write to memory and look for receives.
                stack.callback(self._pair.close)
                stack.callback(self._looking.acquire)  # for good: nobody looks into a queue that is gone

    # What tests and benchmarks look at

    def state(self) -> QpState:
        """The queue pair's state, asked of the device."""
        return QpState(self._pair.state())

    @property
    def max_inline(self) -> int:
        """Bytes of a message that travel inside the request."""
        return self._pair.max_inline

    # Inside

    def _next(self) -> int:
        """The number of the next request; BlockingIOError if the queue is full."""
        if self._failure is not None:
            raise self._failure
        number = self._posted + 1
        if number - self._reaped > self.max_inflight:
            raise BlockingIOError
        return number

    def _flags(self, number: int, signalled: bool) -> int:
        """Without a completion now and then the queue would never be known to have room again."""
        return SIGNALED if signalled or number - self._signalled >= self._signal_every else 0

    def _is_posted(self, number: int, flags: int, op: Op | None, tag: int) -> None:
        self._posted = number
        if flags & SIGNALED:
            self._signalled = number
            if op is not None:
                self._pending.append((number, op, tag))

    def _local(self, local: np.ndarray, remote: Region, nbytes: int) -> tuple[int, int]:
        if nbytes != remote.nbytes:
            raise ValueError(f"{nbytes} bytes here do not fit {remote.nbytes} bytes there")
        if not nbytes:
            return self._send_address, self._ring_region.lkey
        address = address_of(local)
        return address, self._memory.keys(address, local).lkey

    def _look(self) -> None:
        """Move the device's completions to ``_found``, unless another thread is just doing that."""
        if self._looking.acquire(False):
            try:
                if not self._closed:
                    self._found.extend(self._pair.poll(_MAX_POLL))
            except TransportError as error:
                self._fail(error)
            finally:
                self._looking.release()

    def _post_used(self) -> None:
        while self._used >= _GROUP:
            self._pair.post_receives(self._next_group)
            self._next_group = (self._next_group + 1) % self._groups
            self._used -= _GROUP

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _tell(self) -> list[Completion]:
        """What was pending when the link died; once, and at least one completion, so that the caller hears of it."""
        if self._told:
            return []
        self._told = True
        ended = [Completion(op, tag, 0, None, self._failure) for _, op, tag in self._pending]
        self._pending.clear()
        return ended or [Completion(Op.SENT, 0, 0, None, self._failure)]


def _queue_pair(device: Device, send_depth: int, recv_depth: int) -> QueuePair:
    """With as much inline data as the device allows: asking for more is an error on some (rxe), not a smaller grant."""
    for inline in _INLINE_WANTED:
        try:
            return device.queue_pair(send_depth, recv_depth, inline)
        except TransportError:
            if not inline:
                raise
    raise AssertionError("unreachable")
