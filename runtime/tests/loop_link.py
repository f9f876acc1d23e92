"""A Link within one process that is as awkward as hardware: it registers memory, completes late, has short queues, small
transfers and no descriptor to sleep on, and notices a protocol that breaks its rules."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import CorruptMessageError, PeerLostError
from runtime.memory.arena import Arena
from runtime.tensor import byte_view
from runtime.testing import Shelf
from runtime.transport.base import Availability, Options
from runtime.transport.onesided.channel import OneSidedChannel
from runtime.transport.onesided.link import Completion, Link, Op, Region
from runtime.transport.onesided.registration import RegistrationCache
from runtime.transport.onesided.serving import ServingEndpoint
from runtime.transport.onesided.transport import OneSidedTransport

SPARE = 64  # Link.depth: what a link takes beyond it while a batch is read


class LoopLink(Link):
    """``violations`` collects every rule of Link's contract that the other side's protocol broke."""

    max_message = 1500
    max_inflight = 6
    max_transfer = 1000
    registers = True

    def __init__(self, transport: LoopTransport, prefers: str) -> None:
        self.peer = "loop"
        self.prefers = prefers
        self.depth = transport.settings.depth
        self.transport = transport
        self.other: LoopLink
        self.guard = threading.Lock()
        self.inbox: deque[Completion] = deque()
        self.posted: deque[Completion] = deque()  # complete one a poll
        # The memory of each, and of the posts before it that complete with it: it must live as long.
        self.held: deque[list[weakref.ref[Any]]] = deque()
        self.unheard: list[weakref.ref[Any]] = []  # the memory of posts after the last that gives a completion
        self.violations: list[str] = []
        self.longest = 0
        self.closed = False

    def region(self, buffer: np.ndarray) -> Region:
        if not buffer.nbytes:
            return Region(0, 0, 0)
        offset = self.transport.arena.offset_of(buffer)
        if offset is not None:
            return Region(offset, 1, buffer.nbytes)
        for address, key in self.transport.own.items():
            offset = _address(buffer) - address
            if offset >= 0 and offset + buffer.nbytes <= self.transport.foreign[key].nbytes:
                return Region(offset, key, buffer.nbytes)
        entry = self.transport.registrations.find(buffer)
        if entry is None:
            raise ValueError("not registered")
        return Region(_address(buffer) - entry.address, entry.handle, buffer.nbytes)

    def _deliver(self, completion: Completion) -> None:
        other = self.other
        with other.guard:
            other.inbox.append(completion)
            other.longest = max(other.longest, len(other.inbox))
            if len(other.inbox) > self.depth:
                other.violations.append(f"{len(other.inbox)} messages for {self.depth} credits")

    def _post(self, completion: Completion | None, local: np.ndarray | None = None) -> None:
        if self.closed:
            raise PeerLostError("the loop is closed")
        if completion is not None and len(self.posted) >= self.max_inflight:
            raise BlockingIOError("send queue full")
        watched = None if local is None else _watched(local)
        if watched is not None:
            self.unheard.append(watched)
        if completion is not None:
            self.posted.append(completion)
            self.held.append(self.unheard)
            self.unheard = []

    def _check_memory(self, held: list[weakref.ref[Any]], until: str) -> None:
        if any(memory() is None for memory in held):
            self.other.violations.append(f"memory given up before {until}")

    def _remote(self, region: Region) -> np.ndarray:
        memory = self.other.transport.memory(region.key)
        if region.addr + region.nbytes > memory.nbytes:
            raise CorruptMessageError("outside the region")
        return memory[region.addr : region.addr + region.nbytes]

    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        if len(message) > self.max_message:
            self.other.violations.append(f"message of {len(message)}")
        self._post(Completion(Op.SENT, tag, 0, None, None) if signalled else None)
        self._deliver(Completion(Op.MESSAGE, 0, 0, memoryview(bytes(message)), None))

    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        self.region(local)
        if local.nbytes > self.max_transfer or local.nbytes != remote.nbytes:
            self.other.violations.append(f"write of {local.nbytes} to {remote.nbytes}")
        self._post(Completion(Op.WRITTEN, tag, 0, None, None) if signalled else None, local)
        if local.nbytes:
            self._remote(remote)[:] = byte_view(local)
        if imm is not None:
            self._deliver(Completion(Op.IMMEDIATE, 0, imm, None, None))

    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0, signalled: bool = True) -> None:
        self.region(local)
        if local.nbytes > self.max_transfer or local.nbytes != remote.nbytes:
            self.other.violations.append(f"read of {remote.nbytes} into {local.nbytes}")
        self._post(Completion(Op.READ, tag, 0, None, None) if signalled else None, local)
        byte_view(local)[:] = self._remote(remote)

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = np.empty(nbytes, np.uint8)
        self.transport.own[_address(memory)] = self.transport.register(memory)
        return memory

    def free(self, buffer: np.ndarray) -> None:
        self.transport.deregister(self.transport.own.pop(_address(buffer)))

    def poll(self, n: int = 64) -> list[Completion]:
        found = []
        if self.posted:
            found.append(self.posted.popleft())
            self._check_memory(self.held.popleft(), f"{found[0].op.name} was complete")
        with self.guard:
            while self.inbox and len(found) < n:
                found.append(self.inbox.popleft())
        return found

    def arm(self) -> int | None:
        return None

    def close(self) -> None:
        self._check_memory([*itertools.chain(*self.held), *self.unheard], "the link was closed")
        self.closed = True
        for key in self.transport.own.values():
            self.transport.deregister(key)
        self.transport.own.clear()

    def abort(self, reason: BaseException) -> None:
        self.closed = True


class LoopTransport(OneSidedTransport):
    """Connected by ``loop``, not by address."""

    name = "loop"
    registrations: RegistrationCache

    def __init__(self, options: Options, arena: Arena) -> None:
        super().__init__(options, arena)
        self.registrations = RegistrationCache(
            self.register, self.deregister, self.counters,
            max_bytes=self.settings.registration_bytes, max_entries=self.settings.registration_entries,
        )  # fmt: skip
        self._keys = itertools.count(2)
        self.foreign: dict[int, np.ndarray] = {}
        self.own: dict[int, int] = {}

    def register(self, buffer: np.ndarray) -> int:
        key = next(self._keys)
        # The addresses and nothing that keeps what lies there alive: an adapter does not either.
        self.foreign[key] = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(_address(buffer)))
        return key

    def deregister(self, key: int) -> None:
        del self.foreign[key]

    def memory(self, key: int) -> np.ndarray:
        if key == 1:
            return self.arena.memory
        if key not in self.foreign:
            raise CorruptMessageError(f"no key {key}")
        return self.foreign[key]

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "a test's own")

    def _listen(self) -> bytes:
        return b"loop"

    def _dial(self, address: bytes, peer: str, deadline: Deadline) -> Link:
        raise NotImplementedError

    def _export(self, array: np.ndarray) -> Region:
        return LoopLink(self, "read").region(array)

    def _stop_listening(self) -> None:
        return


class Loop:
    """A fetching and a serving end, connected. ``shelf`` is the source."""

    def __init__(self, prefers: str, params: dict[str, Any], arena_bytes: int) -> None:
        self.shelf = Shelf()
        self.arenas = [Arena(arena_bytes, poison=True) for _ in range(2)]
        self.client, self.server = (LoopTransport(Options(params=params), arena) for arena in self.arenas)
        self.links = LoopLink(self.client, prefers), LoopLink(self.server, prefers)
        self.links[0].other, self.links[1].other = self.links[1], self.links[0]
        self.server.listen(self.shelf)
        self.channel = OneSidedChannel(self.client, self.links[0], "the server")
        self.serving = ServingEndpoint(self.server, self.links[1], "the client", self.shelf)
        self.server._enter(self.serving)
        self.client._enter(self.channel)

    def close(self) -> None:
        self.client.close()
        self.server.close()
        for arena in self.arenas:
            arena.close()


@contextlib.contextmanager
def loop(prefers: str = "write", *, arena_bytes: int = 8 << 20, **params: Any) -> Iterator[Loop]:
    """A connected pair; afterwards no rule of Link was broken and every registration is gone."""
    ends = Loop(prefers, params, arena_bytes)
    try:
        yield ends
    finally:
        ends.close()
    for link in ends.links:
        assert not link.violations, link.violations[:5]
    assert not ends.client.foreign
    assert not ends.server.foreign


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _watched(local: np.ndarray) -> weakref.ref[Any] | None:
    owner: Any = local
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    try:
        return weakref.ref(owner)
    except TypeError:  # a memoryview of the arena, which outlives everything
        return None
