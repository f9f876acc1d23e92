"""Link: raw one-sided operations with one peer; what perftest measures, and what the protocols stand on.

Order is that of a reliable connection (IB spec, vol. 1, 9.5 and 10.8.3.3): operations posted on one link start in order;
a message or an immediate is delivered after all writes posted before it have landed; a read does not wait for later writes.
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from runtime.tensor import TensorSpec


class Op(enum.IntEnum):
    """What a completion is about. The first three belong to our own posts, the others to what the peer did."""

    SENT = 1
    WRITTEN = 2
    READ = 3
    MESSAGE = 4
    IMMEDIATE = 5


class Completion(NamedTuple):
    """``tag`` is the one given when posting; ``payload`` the received message (MESSAGE only; valid until the next
    ``poll``, copy what is kept); ``imm`` the peer's 32-bit immediate (IMMEDIATE only); ``error`` None if all went well, after
    an error the link is dead."""

    op: Op
    tag: int
    imm: int
    payload: memoryview | None
    error: BaseException | None


class Region(NamedTuple):
    """Memory that a peer may write to or read from: start address in its owner's space, key, length in bytes.

    ``addr`` is an opaque 64-bit number to the peer (shm: offset in the area), ``key`` has 32 bits."""

    addr: int
    key: int
    nbytes: int

    def slice(self, offset: int, nbytes: int) -> Region:
        """Part of this region; ValueError if it does not lie inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"slice of {nbytes} bytes at {offset} does not lie in a region of {self.nbytes} bytes")
        return Region(self.addr + offset, self.key, nbytes)


NO_REGION = Region(0, 0, 0)
# NamedTuple's own constructor is a Python function of 0.2 us.
make_region: Callable[[tuple[int, int, int]], Region] = functools.partial(tuple.__new__, Region)  # type: ignore[arg-type]


class Link(ABC):
    """A connected pair of endpoints. One thread at a time may call it (the protocol holds a lock around it), except
    ``peek``, ``arm``, ``disarm``, ``acknowledge``, ``lost`` and ``abort``, which any thread may call at any time, also
    after ``close`` (then they do nothing)."""

    peer: str
    max_message: int  # bytes that post_send takes
    max_inflight: int  # posts that may be outstanding; a post beyond raises BlockingIOError and has no effect
    max_transfer: int  # bytes of one post_write or post_read; the protocol cuts longer ones
    # Messages and immediates that the peer's end takes before its poll() must hand them out. The protocol counts credits
    # and never exceeds it; a link keeps room for 64 more, because credits are given back while a polled batch is
    # still being read.
    depth: int
    registers: bool  # local buffers of post_write and post_read must be registered (arena, ``RegistrationCache``)
    revokes: bool = True  # after ``close`` the peer cannot write to our memory even if it wants to
    prefers: str  # "read" or "write": which rendezvous protocol ``auto`` takes
    # Arming is a system call, and the next completion rings even if somebody polls by then.
    costly_bell: bool = False
    maps: bool = False  # ``map`` works: both ends share memory
    control: int | None = None  # a descriptor that becomes readable when the peer may be gone: then ask ``lost()``

    @abstractmethod
    def region(self, buffer: np.ndarray) -> Region:
        """The exported region of a C-contiguous buffer that lies in registered memory; ValueError if it does not.

        An empty buffer has ``NO_REGION``, wherever it lies."""

    @abstractmethod
    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        """Deliver a small message to the peer. The bytes may be reused when this returns.

        Unsignalled posts give no SENT; a link whose queue needs signals to be cleaned sets and swallows its own."""

    def post_unsignalled(self, message: bytes | bytearray | memoryview) -> None:
        """``post_send`` without a tag or a completion: what the protocols use, so a link may make it quick."""
        self.post_send(message)

    def post_gathered(self, head: bytes, body: memoryview) -> None:
        """``post_unsignalled`` of one message that is ``head`` and then ``body`` (flat bytes), without joining them first."""
        self.post_unsignalled(b"".join((head, body)))

    @abstractmethod
    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        """Write ``local`` (registered, C-contiguous, of any shape, not to be changed until completed) to ``remote`` (same
        nbytes).

        Zero bytes are fine: then only the immediate travels. CorruptMessageError where the link can see that ``remote`` is
        not the peer's exported memory, with no effect."""

    @abstractmethod
    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0, signalled: bool = True) -> None:
        """Read ``remote`` into ``local`` (registered, C-contiguous, of any shape, same nbytes).

        Reads complete in order, so only the last of several needs to be ``signalled``. CorruptMessageError as in
        ``post_write``."""

    def map(self, remote: Region, like: TensorSpec | np.ndarray) -> np.ndarray:
        """A read-only view of the peer's memory with the shape and dtype of ``like``, which has as many bytes; where ``maps``. It
        may outlive the link. Raises as post_read."""
        raise NotImplementedError(f"{type(self).__name__} shares no memory with its peer")

    @abstractmethod
    def allocate(self, nbytes: int) -> np.ndarray:
        """Fresh memory (uint8), made and exported for this one use, at whatever that costs: the paper's unoptimised
        buffer. ``region`` of it works until ``free``."""

    @abstractmethod
    def free(self, buffer: np.ndarray) -> None:
        """Give back what ``allocate`` gave, also after ``close``; the peer must not be writing to it any more."""

    @abstractmethod
    def poll(self, n: int = 64) -> list[Completion]:
        """At most ``n`` completions that have happened; never blocks."""

    def peek(self) -> object:
        """False if ``take`` and ``poll`` would surely find nothing; a quick look without the lock, for spinning threads."""
        return True

    def take(self) -> memoryview | None:
        """The payload of a message if that is what ``poll`` would hand out next, without the cost of a Completion; valid
        until the next ``take`` or ``poll``. None says nothing: ask ``poll``."""
        return None

    @abstractmethod
    def arm(self) -> int | None:
        """Ask to be woken: a descriptor that becomes readable at the next completion, or None if there is none to wait on.

        Always the same descriptor. Call ``poll`` once more after arming and before sleeping: what came in between may
        not ring."""

    def disarm(self) -> None:
        """Somebody polls now, so the peer need not ring. Cheap; only a hint."""
        return

    def acknowledge(self) -> None:
        """The descriptor was seen readable: take its events, so that it is not readable any more. Never blocks."""
        return

    def lost(self) -> BaseException | None:
        """Called when ``control`` is readable: why the peer is lost, or None if it is not. Never blocks."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Tear down in order; afterwards no peer can touch our memory through this link
        (but see ``revokes``). Idempotent."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """Stop now; pending posts complete with ``reason`` at the next poll. Idempotent, any thread. The peer learns of it."""
