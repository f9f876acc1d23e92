"""RegistrationCache: registrations of foreign buffers, kept for the next use, replaced by size and recency.

Registering costs tens of microseconds and up, and the same numpy buffers come back step after step. Plain LRU keeps a
thousand small registrations that are cheap to make again and drops the big one that is not; Ou, He and Han (JNCA 2009)
replace by size *and* recency. Here the victim is the one whose cost to make again, divided by its age, is least.

A registration pins pages, not addresses: if the buffer is freed and its addresses are used again, a kept registration
would silently write to the old pages. So an entry lives only as long as the object that owns the memory, and
where that object cannot be watched (no weak references) nothing is kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.tensor import address_of
from runtime.transport.base import Counters

# What registering costs: a system call plus a part for each byte (rxe under emulation 0.8 ms/MiB, hardware about 0.1).
_FIXED_COST_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class Registration:
    """One registered buffer. ``handle`` is what the transport's ``register`` gave; ``uses`` pins it while above zero."""

    address: int
    nbytes: int
    handle: Any
    uses: int = 0
    last: int = 0
    kept: bool = True
    watch: Any = field(default=None, repr=False)


class RegistrationCache:
    """Bounded in bytes and entries; any thread may call. Entries in use are never dropped, so a burst may exceed the bound.

    ``register(buffer) -> handle`` and ``deregister(handle)`` belong to the transport; both run under the cache's lock.
    ``counters.registrations`` counts real registrations, so a test can prove that a steady state makes none.
    """

    def __init__(
        self,
        register: Callable[[np.ndarray], Any],
        deregister: Callable[[Any], None],
        counters: Counters,
        *,
        max_bytes: int = 256 << 20,
        max_entries: int = 256,
    ) -> None:
        self._register = register
        self._deregister = deregister
        self._counters = counters
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        # A finalizer may run on any allocation, also inside this lock on the same thread.
        self._guard = threading.RLock()
        self._entries: dict[int, Registration] = {}  # by address; the longest registration that starts there
        self._retired: list[Registration] = []  # owner is gone while in use
        self._clock = 0
        self.nbytes = 0
        self.hits = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, buffer: np.ndarray) -> Registration:
        """A registration that covers a C-contiguous buffer; give it back with ``release``. Raises what ``register`` raises."""
        address, nbytes = address_of(buffer), buffer.nbytes
        with self._guard:
            self._clock += 1
            entry = self._entries.get(address)
            if entry is None or entry.nbytes < nbytes:
                entry = self._add(buffer, address, nbytes)
            else:
                self.hits += 1
            entry.uses += 1
            entry.last = self._clock
            return entry

    def release(self, entry: Registration) -> None:
        """The transfer is over. The registration stays for the next one if there is room."""
        with self._guard:
            entry.uses -= 1
            if entry.uses == 0 and not entry.kept:
                self._retired.remove(entry)
                self._deregister(entry.handle)
            self._shrink()

    def find(self, buffer: np.ndarray) -> Registration | None:
        """The acquired registration that covers ``buffer`` (or a part of a larger acquired one); None if there is none."""
        address, nbytes = address_of(buffer), buffer.nbytes
        with self._guard:
            entry = self._entries.get(address)
            if entry is not None and entry.nbytes >= nbytes:
                return entry
            for entry in (*self._entries.values(), *self._retired):
                if entry.address <= address and address + nbytes <= entry.address + entry.nbytes:
                    return entry
        return None

    def close(self) -> None:
        """Deregister everything; nothing may be in use any more."""
        with self._guard:
            for entry in (*self._entries.values(), *self._retired):
                if entry.watch is not None:
                    entry.watch.detach()
                self._deregister(entry.handle)
            self._entries.clear()
            self._retired.clear()
            self.nbytes = 0

    def _add(self, buffer: np.ndarray, address: int, nbytes: int) -> Registration:
        shorter = self._entries.get(address)
        if shorter is not None:
            self._drop(shorter)
        handle = self._register(buffer)
        self._counters.registrations += 1
        entry = Registration(address, nbytes, handle)
        owner = _owner(buffer)
        if owner is None:
            entry.kept = False
            self._retired.append(entry)
        else:
            entry.watch = weakref.finalize(owner, self._owner_gone, entry)
            entry.watch.atexit = False
            self._entries[address] = entry
            self.nbytes += nbytes
        return entry

    def _owner_gone(self, entry: Registration) -> None:
        with self._guard:
            if self._entries.get(entry.address) is entry:
                self._drop(entry)

    def _drop(self, entry: Registration) -> None:
        del self._entries[entry.address]
        self.nbytes -= entry.nbytes
        entry.kept = False
        if entry.watch is not None:
            entry.watch.detach()
        if entry.uses:
            self._retired.append(entry)
        else:
            self._deregister(entry.handle)

    def _shrink(self) -> None:
        while self.nbytes > self._max_bytes or len(self._entries) > self._max_entries:
            idle = [entry for entry in self._entries.values() if entry.uses == 0]
            if not idle:
                return
            self._drop(min(idle, key=lambda e: (e.nbytes + _FIXED_COST_BYTES) / (self._clock - e.last + 1)))
            self.evictions += 1


def _owner(buffer: np.ndarray) -> Any | None:
    # The object whose death frees the memory is the last of the chain of bases.
    owner: Any = buffer
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    try:
        weakref.ref(owner)
    except TypeError:
        return None
    return owner
