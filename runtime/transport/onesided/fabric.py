"""Fabric: a network that exists only as time, for emulating a cluster's links between processes of one machine.

Every task has a full-duplex port of one rate on an ideal switch. A transfer occupies its sender's outgoing and its receiver's
incoming half for ``nbytes / rate`` seconds, first come first served, and is delivered at the end of that; the copy
itself happens meanwhile. So bytes, protocol and processes are real, and only the wire's time is made: the paper's InfiniBand
column on a machine without InfiniBand (fidelity "emulated").
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from runtime.errors import ConfigError
from runtime.transport.onesided.link import NO_REGION, Completion, Link, Region

_PORT = struct.Struct("<48sqq")  # task name, when its outgoing and its incoming half are free (ns of CLOCK_MONOTONIC)
_PORTS = 256
_NOTHING = np.empty(0, np.uint8)


class Fabric:
    """The ports of all tasks, in a file that all of them map; made by whoever opens it first. Any process and thread."""

    def __init__(self, path: str, rate: float) -> None:
        if rate <= 0:
            raise ConfigError(f"fabric_rate must be a positive number of bytes a second, not {rate}")
        self.rate = rate
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, _PORTS * _PORT.size)
            self._ports = mmap.mmap(self._fd, _PORTS * _PORT.size)
        except OSError as error:
            raise ConfigError(f"fabric {path!r} cannot be opened: {error}") from error
        self._indices: dict[str, int] = {}

    def reserve(self, src: str, dst: str, nbytes: int) -> int:
        """When ``nbytes`` sent now from task ``src`` have arrived at ``dst``, in ns of CLOCK_MONOTONIC."""
        with self._locked():
            sender, receiver = self._find(src), self._find(dst)
            name, outgoing, incoming = _PORT.unpack_from(self._ports, sender)
            other, their_outgoing, their_incoming = _PORT.unpack_from(self._ports, receiver)
            end = max(time.monotonic_ns(), outgoing, their_incoming) + int(nbytes / self.rate * 1e9)
            _PORT.pack_into(self._ports, sender, name, end, incoming)
            if sender != receiver:
                _PORT.pack_into(self._ports, receiver, other, their_outgoing, end)
        return end

    def close(self) -> None:
        """Unmap. Idempotent."""
        if not self._ports.closed:
            self._ports.close()
            os.close(self._fd)

    def _find(self, task: str) -> int:
        at = self._indices.get(task)
        if at is not None:
            return at
        wanted = task.encode()[-48:].ljust(48, b"\0")
        for index in range(_PORTS):
            at = index * _PORT.size
            name, _, _ = _PORT.unpack_from(self._ports, at)
            if name == wanted or not name.strip(b"\0"):
                self._ports[at : at + 48] = wanted
                self._indices[task] = at
                return at
        raise ConfigError(f"a fabric has {_PORTS} ports, and all are taken")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A lock that the kernel drops with its holder: a killed task must not stop the others.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class FabricLink(Link):
    """A link whose posts take a fabric's time. Wraps another link, which does the copying.

    Bytes are copied when posted, inside the time that they are on the wire; what tells of them (immediate, completion,
    message) follows at the end of that time, in order.
    """

    maps = False  # a mapped read would cost no wire time

    def __init__(self, inner: Link, fabric: Fabric, task: str) -> None:
        self.inner = inner
        self.fabric = fabric
        self.task = task
        self.peer = inner.peer
        self.max_message = inner.max_message
        self.max_inflight = inner.max_inflight
        self.max_transfer = inner.max_transfer
        self.depth = inner.depth
        self.registers = inner.registers
        self.revokes = inner.revokes
        self.prefers = inner.prefers
        self.control = inner.control
        self._due: deque[tuple[int, Callable[[], None]]] = deque()

    def region(self, buffer: np.ndarray) -> Region:
        return self.inner.region(buffer)

    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        self._later(len(message), partial(self.inner.post_send, bytes(message), tag, signalled))

    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        due = self.fabric.reserve(self.task, self.peer, local.nbytes)
        self.inner.post_write(local, remote, None, signalled=False)
        self._at(due, partial(self.inner.post_write, _NOTHING, NO_REGION, imm, tag, signalled))

    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0, signalled: bool = True) -> None:
        due = self.fabric.reserve(self.peer, self.task, local.nbytes)
        self._at(due, partial(self.inner.post_read, local, remote, tag, signalled))

    def allocate(self, nbytes: int) -> np.ndarray:
        return self.inner.allocate(nbytes)

    def free(self, buffer: np.ndarray) -> None:
        self.inner.free(buffer)

    def poll(self, n: int = 64) -> list[Completion]:
        self._deliver()
        return self.inner.poll(n)

    def arm(self) -> int | None:
        # What becomes due rings no bell, so the link is one without a descriptor, which progress polls on a short tick.
        return None

    def lost(self) -> BaseException | None:
        return self.inner.lost()

    def close(self) -> None:
        self._due.clear()
        self.inner.close()

    def abort(self, reason: BaseException) -> None:
        self.inner.abort(reason)

    def _later(self, nbytes: int, call: Callable[[], None]) -> None:
        self._at(self.fabric.reserve(self.task, self.peer, nbytes), call)

    def _at(self, due: int, call: Callable[[], None]) -> None:
        self._due.append((due, call))
        self._deliver()

    def _deliver(self) -> None:
        due = self._due
        while due and due[0][0] <= time.monotonic_ns():
            due.popleft()[1]()
