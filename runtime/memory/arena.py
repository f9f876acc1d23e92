"""Arena: one big piece of memory, mapped and touched once, from which tensors that cross processes are cut.

A fresh page costs about as much as sending it (1.6-2.7 us a 4 KiB page), and registering memory costs more, so both are paid
once, at start. Best fit with coalescing, like TensorFlow's BFC allocator; blocks are 64-byte aligned.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.errors import ArenaFullError, ConfigError
from runtime.tensor import TensorSpec, address_of

ALIGNMENT = 64
POISON = 0xDB
DEFAULT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Block:
    """An allocated piece of an arena: offset and length in bytes, who asked for it, and the memory itself (uint8)."""

    offset: int
    nbytes: int
    label: str
    memory: np.ndarray

    def array(self, spec: TensorSpec, offset: int = 0) -> np.ndarray:
        """A tensor of ``spec`` at ``offset`` bytes into the block."""
        return self.memory[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)


class Arena:
    """Fixed size; any thread may allocate and free.

    ``shared=True`` backs it with a sealed memfd that ``fd`` names, so that a peer can map it and nobody can shrink it under
    us (no SIGBUS, no name in /dev/shm). Otherwise it is private anonymous memory. Huge pages are asked for in both cases.
    ``poison`` fills freed blocks with ``POISON``, so that a use after release shows.
    """

    def __init__(self, nbytes: int = DEFAULT_BYTES, *, shared: bool = False, poison: bool = False) -> None:
        if nbytes < mmap.PAGESIZE:
            raise ConfigError(f"an arena of {nbytes} bytes is too small; at least {mmap.PAGESIZE}")
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.poison = poison
        self.fd: int | None = None
        try:
            if shared:
                self.fd = os.memfd_create("verbflow-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, self.nbytes)
                _seal_size(self.fd)
                mapping = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
            else:
                mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            if self.fd is not None:
                os.close(self.fd)
            raise ArenaFullError(f"{self.nbytes} bytes of memory cannot be had: {error}") from error
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._map: mmap.mmap | None = mapping
        self.memory = np.frombuffer(mapping, np.uint8)
        self.address = address_of(self.memory)
        self._guard = threading.Lock()
        self._free: list[tuple[int, int]] = [(self.nbytes, 0)]  # (length, offset), sorted: best fit is a bisection
        self._free_by_start: dict[int, int] = {0: self.nbytes}
        self._free_by_end: dict[int, int] = {self.nbytes: 0}
        self._blocks: dict[int, Block] = {}
        self._dropped: deque[Block] = deque()  # blocks of tensors that are gone, not given back yet
        self._used = 0
        self.allocations = 0
        self.peak_bytes = 0

    def touch(self) -> None:
        """Make every page present now, instead of at first use inside a step."""
        self.memory[:: mmap.PAGESIZE] = 0

    def allocate(self, nbytes: int, label: str = "") -> Block:
        """A block of at least ``nbytes``; ArenaFullError lists the largest occupants. Content is undefined."""
        length = _block_length(nbytes)
        with self._guard:
            self._settle()
            at = bisect.bisect_left(self._free, (length, 0))
            if at == len(self._free):
                raise ArenaFullError(self._full_message(nbytes, label))
            found, offset = self._free.pop(at)
            del self._free_by_start[offset], self._free_by_end[offset + found]
            if found > length:
                self._insert_free(offset + length, found - length)
            block = Block(offset, nbytes, label, self.memory[offset : offset + nbytes])
            self._blocks[offset] = block
            self.allocations += 1
            self._used += length
            self.peak_bytes = max(self.peak_bytes, self._used)
        return block

    def tensor(self, spec: TensorSpec, label: str = "") -> np.ndarray:
        """A tensor that gives its block back when the last view of it is gone."""
        block = self.allocate(spec.nbytes, label)
        # A view of a view keeps only the outermost owner alive, so the finalizer hangs on an owner of our own.
        owner = np.frombuffer(self.memory.data, np.uint8, count=max(1, spec.nbytes), offset=block.offset)
        weakref.finalize(owner, self._drop, block).atexit = False
        return _owned_view(owner, spec)

    def free(self, block: Block) -> None:
        """Give a block back. ValueError if it is not allocated (a double free)."""
        with self._guard:
            self._give_back(block)

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated blocks, rounded up to the alignment."""
        with self._guard:
            self._settle()
            return self._used

    def offset_of(self, array: np.ndarray) -> int | None:
        """Where a C-contiguous array begins in this arena, or None if it does not lie inside it."""
        offset = address_of(array) - self.address
        return offset if offset >= 0 and offset + array.nbytes <= self.nbytes else None

    def occupants(self) -> list[Block]:
        """Allocated blocks, largest first."""
        with self._guard:
            self._settle()
            return sorted(self._blocks.values(), key=lambda block: -block.nbytes)

    def close(self) -> None:
        """Close the descriptor and, once no view is alive, unmap. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.memory = np.empty(0, np.uint8)
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # views are alive: the mapping goes with the last of them
                mapping.close()

    def _drop(self, block: Block) -> None:
        # Runs wherever the garbage collector does, perhaps inside ``allocate`` on this very thread: it must not wait.
        self._dropped.append(block)
        if self._guard.acquire(False):
            try:
                self._settle()
            finally:
                self._guard.release()

    def _settle(self) -> None:
        while self._dropped:
            self._give_back(self._dropped.popleft())

    def _give_back(self, block: Block) -> None:
        if self._blocks.get(block.offset) is not block:
            raise ValueError(f"block {block.label or block.offset} is not allocated in this arena")
        del self._blocks[block.offset]
        length = _block_length(block.nbytes)
        self._used -= length
        if self.poison:
            self.memory[block.offset : block.offset + length] = POISON
        start, end = block.offset, block.offset + length
        if end in self._free_by_start:
            end = end + self._remove_free(end)
        if start in self._free_by_end:
            before = self._free_by_end[start]
            self._remove_free(before)
            start = before
        self._insert_free(start, end - start)

    def _insert_free(self, offset: int, length: int) -> None:
        bisect.insort(self._free, (length, offset))
        self._free_by_start[offset] = length
        self._free_by_end[offset + length] = offset

    def _remove_free(self, offset: int) -> int:
        length = self._free_by_start.pop(offset)
        del self._free_by_end[offset + length]
        self._free.remove((length, offset))
        return length

    def _full_message(self, nbytes: int, label: str) -> str:
        largest = sorted(self._blocks.values(), key=lambda block: -block.nbytes)[:5]
        held = ", ".join(f"{block.label or 'unnamed'} {block.nbytes}" for block in largest) or "nobody"
        contiguous = self._free[-1][0] if self._free else 0
        return (
            f"arena of {self.nbytes} bytes has no {nbytes} contiguous bytes for {label or 'an allocation'}: "
            f"{self._used} in use, longest free run {contiguous}; largest occupants (bytes): {held}. "
            f"Open it larger (arena_bytes=, --arena-mib)."
        )


def _block_length(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


def _owned_view(owner: np.ndarray, spec: TensorSpec) -> np.ndarray:
    # numpy collapses chains of bases down to the owner of the memory unless the base is not a plain array; a memoryview
    # keeps ``owner`` (and so its finalizer) alive as long as any view of the result.
    return (
        np.frombuffer(owner.data, spec.dtype, count=spec.size).reshape(spec.shape)
        if spec.size
        else np.empty(spec.shape, spec.dtype)
    )


def _seal_size(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
