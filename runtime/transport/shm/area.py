"""Memory that two processes share: sealed memfds of our own, and mappings of the peer's."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

from runtime.errors import CorruptMessageError, ProtocolMismatchError
from runtime.tensor import TensorSpec
from runtime.transport.onesided.link import Region

# Linux 5.14 and later (man 2 madvise); older kernels answer EINVAL and pages come at first use.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str, nbytes: int) -> int:
    """A memfd of ``nbytes`` that nobody can resize; it has no name that could be left behind."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check(fd: int, nbytes: int) -> None:
    """ProtocolMismatchError unless a peer's descriptor is a memory file of at least ``nbytes`` that cannot shrink: only then
    can touching it never raise SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    size = os.fstat(fd).st_size
    if not seals & fcntl.F_SEAL_SHRINK or size < nbytes:
        raise ProtocolMismatchError(
            f"a peer offers a memory file of {size} bytes (seals {seals:#x}) as {nbytes}, sealed"
        )


class PeerArea:
    """The peer's transfer area, mapped here: once to read (and lend to the application), once to write, each when first
    needed. Owns the descriptor."""

    def __init__(self, fd: int, nbytes: int, key: int, used: int) -> None:
        """``used``: bytes from the start that the peer has in use now; those pages are made present at once."""
        self._fd = fd
        self.nbytes = nbytes
        self.key = key
        self._used = min(used, nbytes)
        self._readable: np.ndarray | None = None
        self._writable: np.ndarray | None = None

    def read(self, region: Region, like: TensorSpec | np.ndarray) -> np.ndarray:
        """A read-only view of the region with the shape and dtype of ``like``, which has as many bytes. CorruptMessageError if
        the region does not lie in the area."""
        addr, key, nbytes = region
        if key != self.key or addr + nbytes > self.nbytes:
            raise self._outside(region)
        if self._readable is None:
            self._readable = self._map(mmap.PROT_READ, _MADV_POPULATE_READ)
        return np.ndarray(like.shape, like.dtype, self._readable, addr)

    def write(self, region: Region, like: TensorSpec | np.ndarray) -> np.ndarray:
        """As ``read``, writable."""
        addr, key, nbytes = region
        if key != self.key or addr + nbytes > self.nbytes:
            raise self._outside(region)
        if self._writable is None:
            self._writable = self._map(mmap.PROT_READ | mmap.PROT_WRITE, _MADV_POPULATE_WRITE)
        return np.ndarray(like.shape, like.dtype, self._writable, addr)

    def close(self) -> None:
        """Let the mappings go with the last view of them. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._readable = self._writable = None

    def _outside(self, region: Region) -> CorruptMessageError:
        return CorruptMessageError(
            f"{region.nbytes} bytes at {region.addr} under key {region.key:#x} do not lie in the peer's area of "
            f"{self.nbytes} bytes"
        )

    def _map(self, protection: int, populate: int) -> np.ndarray:
        mapping = mmap.mmap(self._fd, self.nbytes, flags=mmap.MAP_SHARED, prot=protection)
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        if self._used:
            with contextlib.suppress(OSError):
                mapping.madvise(populate, 0, -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE)
        # The array is the only owner of the mapping, so that it is unmapped when the last borrowed view is gone.
        return np.frombuffer(mapping, np.uint8)
