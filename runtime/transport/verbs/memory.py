"""Memory that a device may touch: the arena, registered once, and buffers registered for a while."""

from __future__ import annotations

import errno
import mmap

import numpy as np

from runtime.errors import TransportError
from runtime.memory.arena import Arena
from runtime.tensor import address_of
from runtime.transport.base import Counters
from runtime.transport.onesided.link import NO_REGION, Region, make_region
from runtime.transport.onesided.registration import RegistrationCache
from runtime.transport.verbs.binding import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, Device, MemoryRegion
from runtime.transport.verbs.device import check_locked_memory

_EXPORTED = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ


class Memory:
    """The registered memory of one transport. Any thread may call it.

    The arena has one key, known to all peers of the transport: within it the protocol's bounds and generations are what
    keeps a peer in its place. Everything else has a key of its own, valid while it is registered.
    """

    def __init__(self, device: Device, arena: Arena, counters: Counters, max_bytes: int, max_entries: int) -> None:
        self._device = device
        self._counters = counters
        self._start = arena.address
        self._end = arena.address + arena.nbytes
        self._arena = self.register(arena.memory)
        counters.registrations += 1
        self.cache = RegistrationCache(
            self.register,
            lambda region: region.close(),
            counters,
            max_bytes=max_bytes,
            max_entries=max_entries,
        )
        self._allocated: dict[int, tuple[MemoryRegion, mmap.mmap, int]] = {}

    def register(self, buffer: np.ndarray, access: int = _EXPORTED) -> MemoryRegion:
        """Register a C-contiguous, writable buffer; the caller keeps it alive and closes the region. TransportError, with
        the command that raises the limit where that is the reason."""
        address = address_of(buffer)
        try:
            return self._device.register(address, buffer.nbytes, access)
        except TransportError as error:
            if error.errno == errno.ENOMEM:
                check_locked_memory(buffer.nbytes)
            raise

    def keys(self, address: int, buffer: np.ndarray) -> MemoryRegion:
        """The region in which a buffer lies; ValueError if it is not registered."""
        if self._start <= address and address + buffer.nbytes <= self._end:
            return self._arena
        allocated = self._allocated.get(address)
        if allocated is not None and buffer.nbytes <= allocated[2]:
            return allocated[0]
        entry = self.cache.find(buffer)
        if entry is None:
            raise ValueError(f"{buffer.nbytes} bytes at {address:#x} lie in no registered memory")
        region: MemoryRegion = entry.handle
        return region

    def region(self, buffer: np.ndarray) -> Region:
        """How a peer names a buffer; ValueError if it is not registered."""
        if not buffer.nbytes:
            return NO_REGION
        address = address_of(buffer)
        return make_region((address, self.keys(address, buffer).rkey, buffer.nbytes))

    def allocate(self, nbytes: int) -> np.ndarray:
        """Fresh registered memory, until ``free``."""
        mapping = mmap.mmap(-1, max(nbytes, 1))
        buffer = np.frombuffer(mapping, np.uint8, count=nbytes)
        region = self.register(np.frombuffer(mapping, np.uint8))
        self._counters.registrations += 1
        self._counters.allocations += 1
        self._allocated[address_of(buffer)] = (region, mapping, nbytes)
        return buffer

    def free(self, buffer: np.ndarray) -> None:
        """Give ``allocate``'s memory back. The mapping goes with the last view of it."""
        region, _, _ = self._allocated.pop(address_of(buffer))
        region.close()

    def close(self) -> None:
        """Deregister everything. No queue pair may use it any more. Idempotent."""
        self.cache.close()
        for region, _, _ in self._allocated.values():
            region.close()
        self._allocated.clear()
        self._arena.close()
