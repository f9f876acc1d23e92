"""Transfer: a write or read of any length, in pieces that the link takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from runtime.transport.onesided.link import Region
from runtime.transport.onesided.protocol import flat

if TYPE_CHECKING:
    from runtime.transport.onesided.endpoint import Endpoint

# What is called, under the endpoint's lock, when a transfer is complete.
Done = Callable[[BaseException | None], None]
# The last credit is kept for CREDIT messages: two ends that are both out of credit could otherwise not tell each other.
RESERVE = 1


class Transfer:
    """A write or read, posted in pieces no longer than the link and ``chunk_bytes`` allow; only the last is signalled.

    The endpoint keeps it, and so ``local``, until the last piece is complete, or the link is closed: what is posted may be done
    later.
    """

    __slots__ = ("done", "endpoint", "imm", "local", "offset", "piece", "remote")

    def __init__(self, endpoint: Endpoint, local: np.ndarray, remote: Region, imm: int, done: Done) -> None:
        self.endpoint = endpoint
        self.local = local
        self.remote = remote
        self.imm = imm
        self.done = done
        self.offset = 0
        self.piece: int = endpoint.piece

    def write(self) -> bool:
        endpoint, size = self.endpoint, self.local.nbytes
        link = endpoint.link
        while size - self.offset > self.piece:
            try:
                link.post_write(*self._slice(self.piece), signalled=False)
            except BlockingIOError:
                return False
            self.offset += self.piece
        if endpoint._credits <= RESERVE:
            return False
        tag = endpoint._tag(self)
        try:
            link.post_write(*self._slice(size - self.offset), imm=self.imm, tag=tag)
        except BaseException as error:
            del endpoint._flights[tag]
            if isinstance(error, BlockingIOError):
                return False
            raise
        endpoint._credits -= 1
        endpoint.counters.bytes_out += size
        return True

    def read(self) -> bool:
        endpoint, size = self.endpoint, self.local.nbytes
        while self.offset < size:
            piece = min(self.piece, size - self.offset)
            last = self.offset + piece == size
            tag = endpoint._tag(self) if last else 0
            try:
                endpoint.link.post_read(*self._slice(piece), tag=tag, signalled=last)
            except BaseException as error:
                endpoint._flights.pop(tag, None)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self.offset += piece
        return True

    def _slice(self, nbytes: int) -> tuple[np.ndarray, Region]:
        if nbytes == self.local.nbytes:
            return self.local, self.remote
        return flat(self.local)[self.offset : self.offset + nbytes], self.remote.slice(self.offset, nbytes)
