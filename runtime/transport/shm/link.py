"""ShmLink: a Link between two processes of one host. A memcpy is the wire, a ring carries messages, an eventfd rings."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import socket
import threading

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import CorruptMessageError, PeerLostError, ProtocolMismatchError, TransportError
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, address_of
from runtime.transport.onesided.link import NO_REGION, Completion, Link, Op, Region, make_region
from runtime.transport.shm import area
from runtime.transport.shm.hello import AREA, AREA_GONE, Hello, credentials, decode_area, encode_area, receive_fds
from runtime.transport.shm.ring import Receiver, Sender, ring_bytes

_TELL_S = 1.0


class ShmLink(Link):
    """Posts are complete when they return; their completions wait for the next ``poll`` all the same."""

    max_inflight = 1 << 30
    max_transfer = 1 << 40
    registers = False
    revokes = False  # a mapping that a process has cannot be taken from it
    prefers = "read"
    maps = True

    def __init__(
        self,
        peer: str,
        sock: socket.socket,
        receiver: Receiver,
        doorbell: int,
        arena: Arena,
        arena_key: int,
        hello: Hello,
    ) -> None:
        """Takes over ``sock``, ``receiver``, ``doorbell`` (our eventfd) and the descriptors of the peer's ``hello``, also when
        it raises."""
        self.peer = peer
        self._socket = sock
        self._receiver = receiver
        self._doorbell = doorbell
        self._arena = arena
        self._arena_key = arena_key
        ring_fd, self._bell, arena_fd = hello.fds
        self._sender: Sender | None = None
        self._area = area.PeerArea(arena_fd, hello.arena_bytes, hello.arena_key, hello.arena_used)
        self._own: dict[int, tuple[int, int, mmap.mmap, np.ndarray]] = {}  # allocate: address -> key, fd, map, memory
        self._guard = threading.Lock()
        self._areas: dict[int, area.PeerArea] = {}  # the peer's allocate
        self._closed = False
        try:
            area.check(ring_fd, ring_bytes(hello.slots, hello.stride))
            if hello.arena_bytes:
                area.check(arena_fd, hello.arena_bytes)
            if not _is_eventfd(self._bell):
                raise ProtocolMismatchError(f"{peer} offers a doorbell that is no eventfd")
            # Else a peer's descriptor could make eventfd_write wait.
            flags = fcntl.fcntl(self._bell, fcntl.F_GETFL)
            fcntl.fcntl(self._bell, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            self._sender = Sender(ring_fd, hello.slots, hello.stride, self._bell)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ring_fd)
        # Every message goes through these; a call in between would cost a tenth of its way.
        self.post_unsignalled = self._sender.message  # type: ignore[method-assign,assignment]
        self.post_gathered = self._sender.gathered  # type: ignore[method-assign]
        self.take = receiver.take  # type: ignore[method-assign]
        self.peek = receiver.ready  # type: ignore[method-assign]
        self.disarm = receiver.disarm  # type: ignore[method-assign]
        self.depth = hello.depth
        self.max_message = self._sender.max_payload
        self.control = sock.fileno()
        sock.setblocking(False)
        self._gone: BaseException | None = None

    def region(self, buffer: np.ndarray) -> Region:
        nbytes = buffer.nbytes
        if not nbytes:
            return NO_REGION
        offset = self._arena.offset_of(buffer)
        if offset is not None:
            return make_region((offset, self._arena_key, nbytes))
        own = self._own.get(address_of(buffer))
        if own is not None and nbytes <= own[3].nbytes:
            return make_region((0, own[0], nbytes))
        raise ValueError(f"a buffer of {nbytes} bytes does not lie in the arena")

    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        self._sender.message(message)  # type: ignore[union-attr]
        if signalled:
            self._receiver.local.append(Completion(Op.SENT, tag, 0, None, None))

    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        sender = self._sender
        assert sender is not None
        if imm is not None:
            sender.need_room()
        if local.nbytes != remote.nbytes:
            raise ValueError(f"a write of {local.nbytes} bytes to {remote.nbytes}")
        if remote.nbytes:
            np.copyto(self._find(remote).write(remote, local), local)
        if imm is not None:
            sender.immediate(imm)
        if signalled:
            self._receiver.local.append(Completion(Op.WRITTEN, tag, 0, None, None))

    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0, signalled: bool = True) -> None:
        if local.nbytes != remote.nbytes:
            raise ValueError(f"a read of {remote.nbytes} bytes into {local.nbytes}")
        if remote.nbytes:
            np.copyto(local, self._find(remote).read(remote, local))
        if signalled:
            self._receiver.local.append(Completion(Op.READ, tag, 0, None, None))

    def map(self, remote: Region, like: TensorSpec | np.ndarray) -> np.ndarray:
        return self._find(remote).read(remote, like)

    def allocate(self, nbytes: int) -> np.ndarray:
        """A memory file of its own, which the peer maps when it is first named to it: what registering is to a NIC."""
        key, size = secrets.randbits(32), -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = area.create("verbflow-buffer", size)
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        memory = np.frombuffer(mapping, np.uint8)[:nbytes]
        try:
            self._tell(encode_area(AREA, key, size), [fd])
        except OSError as error:
            os.close(fd)
            raise PeerLostError(f"{self.peer} does not take a buffer: {error}") from error
        self._own[address_of(memory)] = (key, fd, mapping, memory)
        return memory

    def free(self, buffer: np.ndarray) -> None:
        own = self._own.pop(address_of(buffer), None)
        if own is not None:  # else ``close`` was quicker
            os.close(own[1])
            with contextlib.suppress(OSError):
                self._tell(encode_area(AREA_GONE, own[0], 0), [])

    def poll(self, n: int = 64) -> list[Completion]:
        receiver = self._receiver
        if receiver.local:
            local, receiver.local = receiver.local, []
            return local + receiver.poll(n)
        return receiver.poll(n)

    def take(self) -> memoryview | None:
        return self._receiver.take()

    def peek(self) -> object:
        return self._receiver.ready()

    def arm(self) -> int | None:
        self._receiver.arm()
        return self._doorbell

    def disarm(self) -> None:
        self._receiver.disarm()

    def acknowledge(self) -> None:
        with self._guard, contextlib.suppress(OSError):  # another thread was quicker
            if not self._closed:
                os.eventfd_read(self._doorbell)

    def lost(self) -> BaseException | None:
        self._read_socket()
        return self._gone

    def close(self) -> None:
        # The progress thread may be taking buffers from the socket just now: what it takes is closed here, and no more is.
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            for other in self._areas.values():
                other.close()
            self._areas.clear()
            os.close(self._doorbell)
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        for _, fd, _, _ in self._own.values():
            os.close(fd)
        self._own.clear()
        self._area.close()
        os.close(self._bell)

    def abort(self, reason: BaseException) -> None:
        # Only the sending half: the peer's end of the connection then tells when it has stopped, too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _tell(self, message: bytes, fds: list[int]) -> None:
        deadline = Deadline.after(_TELL_S)
        while True:
            try:
                socket.send_fds(self._socket, [message], fds)
                return
            except BlockingIOError:  # the peer's progress thread reads them one by one
                if not select.select([], [self._socket], [], deadline.remaining())[1]:
                    raise

    def _find(self, region: Region) -> area.PeerArea:
        if region.key == self._area.key:
            return self._area
        if region.key not in self._areas:
            self._read_socket()
        found = self._areas.get(region.key)
        if found is None:
            raise CorruptMessageError(f"{self.peer} has exported nothing under key {region.key:#x}")
        return found

    def _read_socket(self) -> None:
        with self._guard:
            while self._gone is None and not self._closed:
                try:
                    message, fds = receive_fds(self._socket)
                    if not message:
                        pid, _ = credentials(self._socket)
                        self._gone = PeerLostError(f"{self.peer} (process {pid}) closed the connection or died")
                        return
                    self._take_area(message, fds)
                except BlockingIOError:
                    return
                except (OSError, CorruptMessageError, TransportError) as error:
                    self._gone = PeerLostError(f"connection to {self.peer} failed: {error}")
                    self._gone.__cause__ = error

    def _take_area(self, message: bytes, fds: list[int]) -> None:
        try:
            kind, key, nbytes = decode_area(message)
            if kind == AREA and len(fds) == 1 and key not in self._areas and key != self._area.key:
                area.check(fds[0], nbytes)
                self._areas[key] = area.PeerArea(fds.pop(), nbytes, key, 0)
            elif kind != AREA and not fds:
                gone = self._areas.pop(key, None)
                if gone is not None:
                    gone.close()
            else:
                raise CorruptMessageError(f"a buffer with {len(fds)} descriptors")
        finally:
            for fd in fds:
                os.close(fd)


def _is_eventfd(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"
