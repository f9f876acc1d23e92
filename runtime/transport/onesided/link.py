"""Link: raw one-sided operations with one peer; what perftest measures, and what the protocols stand on.

Order is that of a reliable connection (IB spec, vol. 1, 9.5 and 10.8.3.3): operations posted on one link start in order;
a message or an immediate is delivered after all writes posted before it have landed; a read does not wait for later writes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


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


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a peer may write to or read from: start address in its owner's space, key, length in bytes.

    ``addr`` is an opaque 64-bit number to the peer (shm: offset in the area)."""

    addr: int
    key: int
    nbytes: int

    def slice(self, offset: int, nbytes: int) -> Region:
        """Part of this region; ValueError if it does not lie inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"slice of {nbytes} bytes at {offset} does not lie in a region of {self.nbytes} bytes")
        return Region(self.addr + offset, self.key, nbytes)


class Link(ABC):
    """A connected pair of endpoints. One thread at a time may call it (the protocol holds a lock around it)."""

    peer: str
    max_message: int  # bytes that post_send takes
    max_inflight: int  # posts that may be outstanding; a post beyond raises BlockingIOError and has no effect

    @abstractmethod
    def region(self, buffer: np.ndarray) -> Region:
        """The exported region of a buffer that lies in registered memory (arena); ValueError if it does not."""

    @abstractmethod
    def post_send(self, message: bytes | bytearray | memoryview, tag: int = 0, signalled: bool = False) -> None:
        """Deliver a small message to the peer. The bytes may be reused when this returns."""

    @abstractmethod
    def post_write(
        self, local: np.ndarray, remote: Region, imm: int | None = None, tag: int = 0, signalled: bool = True
    ) -> None:
        """Write ``local`` (registered, C-contiguous, not to be changed until completed) to ``remote`` (same nbytes)."""

    @abstractmethod
    def post_read(self, local: np.ndarray, remote: Region, tag: int = 0) -> None:
        """Read ``remote`` into ``local`` (registered, C-contiguous, same nbytes); always completes with READ."""

    @abstractmethod
    def poll(self, n: int = 64) -> list[Completion]:
        """At most ``n`` completions that have happened; never blocks."""

    @abstractmethod
    def arm(self) -> int | None:
        """Ask to be woken: a descriptor that becomes readable at the next completion, or None if there is none to wait on.

        Call ``poll`` once more after arming and before sleeping: what came in between may not ring."""

    @abstractmethod
    def close(self) -> None:
        """Tear down in order; afterwards no peer can touch our memory through this link. Idempotent."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """Stop now; pending posts complete with ``reason`` at the next poll. Idempotent, any thread."""
