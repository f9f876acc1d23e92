"""RegistrationCache: hits, bounds, the victim, and that no registration outlives its memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.transport.base import Counters
from runtime.transport.onesided.registration import RegistrationCache

KIB = 1 << 10


class Device:
    """Counts what is registered, and notices a handle that is given back twice."""

    def __init__(self, **bounds: int) -> None:
        self.live: dict[int, int] = {}
        self.counters = Counters()
        self.cache = RegistrationCache(self.register, self.deregister, self.counters, **bounds)

    def register(self, buffer: np.ndarray) -> int:
        handle = self.counters.registrations
        self.live[handle] = buffer.nbytes
        return handle

    def deregister(self, handle: int) -> None:
        del self.live[handle]


def use(device: Device, buffer: np.ndarray) -> None:
    device.cache.release(device.cache.acquire(buffer))


def test_a_buffer_is_registered_once() -> None:
    device = Device()
    buffer = np.zeros(KIB, np.uint8)
    for _ in range(5):
        use(device, buffer)
    use(device, buffer[:100])
    assert device.counters.registrations == 1
    assert device.cache.hits == 5
    device.cache.close()
    assert not device.live


def test_a_longer_view_is_registered_anew() -> None:
    device = Device()
    buffer = np.zeros(KIB, np.uint8)
    use(device, buffer[:100])
    use(device, buffer)
    assert device.counters.registrations == 2
    assert list(device.live.values()) == [KIB]


def test_a_registration_ends_with_its_memory() -> None:
    device = Device()
    buffer = np.zeros(KIB, np.uint8)
    use(device, buffer[10:].view(np.uint16))
    del buffer
    gc.collect()
    assert not device.live
    assert device.cache.nbytes == 0


def test_memory_that_dies_in_use_is_deregistered_at_its_release() -> None:
    device = Device()
    buffer = np.zeros(KIB, np.uint8)
    entry = device.cache.acquire(buffer)
    del buffer
    gc.collect()
    assert device.live
    device.cache.release(entry)
    assert not device.live


def test_memory_whose_owner_cannot_be_watched_is_not_kept() -> None:
    device = Device()
    buffer = np.frombuffer(bytearray(KIB), np.uint8)
    entry = device.cache.acquire(buffer)
    assert device.cache.find(buffer) is entry
    device.cache.release(entry)
    assert not device.live


def test_find_knows_parts_of_what_is_acquired() -> None:
    device = Device()
    buffer = np.zeros(KIB, np.uint8)
    entry = device.cache.acquire(buffer)
    assert device.cache.find(buffer[100:200]) is entry
    assert device.cache.find(np.zeros(10, np.uint8)) is None


def test_the_victim_is_old_and_cheap() -> None:
    device = Device(max_bytes=1200 * KIB, max_entries=100)
    big, small, fresh = np.zeros(1024 * KIB, np.uint8), np.zeros(100 * KIB, np.uint8), np.zeros(100 * KIB, np.uint8)
    for buffer in (big, small, fresh):  # plain LRU would give up the big one
        use(device, buffer)
    assert sorted(device.live.values()) == [100 * KIB, 1024 * KIB]
    assert device.cache.evictions == 1
    use(device, big)
    assert device.counters.registrations == 3


def test_even_a_large_one_goes_when_it_is_old_enough() -> None:
    device = Device(max_bytes=1200 * KIB, max_entries=100)
    big, small = np.zeros(1024 * KIB, np.uint8), np.zeros(100 * KIB, np.uint8)
    use(device, big)
    for _ in range(1000):
        use(device, small)
    other = np.zeros(100 * KIB, np.uint8)
    use(device, other)
    assert sorted(device.live.values()) == [100 * KIB, 100 * KIB]


def test_what_is_in_use_is_never_dropped() -> None:
    device = Device(max_bytes=KIB, max_entries=1)
    buffers = [np.zeros(KIB, np.uint8) for _ in range(3)]
    entries = [device.cache.acquire(buffer) for buffer in buffers]
    assert len(device.live) == 3
    for entry in entries:
        device.cache.release(entry)
    assert len(device.live) == 1


def test_a_failed_registration_leaves_nothing() -> None:
    def refuse(buffer: np.ndarray) -> int:
        raise OSError("memlock limit")

    cache = RegistrationCache(refuse, lambda handle: None, Counters())
    with pytest.raises(OSError, match="memlock"):
        cache.acquire(np.zeros(8, np.uint8))
    assert len(cache) == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=60))
def test_any_use_keeps_bounds_and_balance(steps: list[tuple[int, int]]) -> None:
    device = Device(max_bytes=6 * KIB, max_entries=4)
    buffers: dict[int, np.ndarray] = {}
    held = []
    for which, action in steps:
        if action == 2:
            buffers.pop(which, None)
            continue
        entry = device.cache.acquire(buffers.setdefault(which, np.zeros((which + 1) * KIB, np.uint8)))
        if action:
            held.append(entry)
        else:
            device.cache.release(entry)
    for entry in held:
        device.cache.release(entry)
    assert device.cache.nbytes <= 6 * KIB
    assert len(device.cache) <= 4
    assert sum(device.live.values()) == device.cache.nbytes
    device.cache.close()
    assert not device.live
