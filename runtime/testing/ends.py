"""Ends: connected transports in this process, and content that shows any misrouting.

A tensor source to fetch from (``Shelf``), one with faults (``faulty``), destinations with guards (``Guarded``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, byte_view
from runtime.trace import Tracer
from runtime.transport.base import Channel, Lease, Options, Reply, TensorSource, Transport
from runtime.transport.registry import open_transport

GUARD_BYTES = 64
_GUARD = 0xA5


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    """``nbytes`` bytes of which every aligned 8 differ from every other 8 of the same seed, so that a piece that went
    to the wrong place, or belongs to another tensor, shows."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words += np.uint64((seed * 0x9E3779B97F4A7C15 + 0x1234567) & 0xFFFFFFFFFFFFFFFF)
    words *= np.uint64(0xD1342543DE82EF95)  # odd, so the product is a permutation
    return words.view(np.uint8)[:nbytes]


def pattern_tensor(spec: TensorSpec, seed: int = 0, arena: Arena | None = None) -> np.ndarray:
    """A tensor of the pattern's bytes (truth values for bool), in ``arena`` memory if one is given."""
    content = pattern(spec.nbytes, seed)
    if spec.dtype == np.bool_:
        content &= 1
    array = np.empty(spec.shape, spec.dtype) if arena is None else arena.tensor(spec, f"pattern {seed}")
    byte_view(array)[...] = content
    return array


def same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal in dtype, shape and every byte (so NaN equals itself)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(byte_view(np.ascontiguousarray(left)), byte_view(np.ascontiguousarray(right)))


class Guarded:
    """A destination between guard bytes: ``array`` filled with 0xEE, and ``intact`` tells whether anybody wrote beside it."""

    def __init__(self, spec: TensorSpec, arena: Arena | None = None) -> None:
        total = spec.nbytes + 2 * GUARD_BYTES
        memory = TensorSpec((total,), np.dtype(np.uint8))
        self._whole = np.empty(total, np.uint8) if arena is None else arena.tensor(memory, "guarded")
        self._end = GUARD_BYTES + spec.nbytes
        self._whole.fill(_GUARD)
        self._whole[GUARD_BYTES : self._end] = 0xEE
        self.array = self._whole[GUARD_BYTES : self._end].view(spec.dtype).reshape(spec.shape)

    def intact(self) -> bool:
        """The guard bytes on both sides are what they were."""
        return bool((self._whole[:GUARD_BYTES] == _GUARD).all() and (self._whole[self._end :] == _GUARD).all())

    def untouched(self) -> bool:
        """Nobody has written to the destination either."""
        return self.intact() and bool((self._whole[GUARD_BYTES : self._end] == 0xEE).all())


class Shelf:
    """A TensorSource to put tensors on: before they are asked for, or after. They stay until the shelf goes.

    ``leased`` counts leases that a transport has taken and not yet released.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._answers: dict[str, np.ndarray | BaseException] = {}
        self._waiting: dict[str, list[Reply]] = {}
        self.leased = 0
        self.taken = 0

    def put(self, key: str, answer: np.ndarray | BaseException) -> None:
        """Give the tensor, or an error, to whoever asked and whoever will ask."""
        with self._guard:
            self._answers[key] = answer
            waiting = self._waiting.pop(key, [])
        for reply in waiting:
            self._give(answer, reply)

    def take(self, key: str, reply: Reply) -> None:
        with self._guard:
            self.taken += 1
            answer = self._answers.get(key)
            if answer is None:
                self._waiting.setdefault(key, []).append(reply)
        if answer is not None:
            self._give(answer, reply)

    def asked(self, key: str) -> bool:
        """Somebody waits for the key."""
        with self._guard:
            return key in self._waiting

    def _give(self, answer: np.ndarray | BaseException, reply: Reply) -> None:
        if isinstance(answer, BaseException):
            reply(answer)
            return
        with self._guard:
            self.leased += 1
        reply(Lease(answer, self._released))

    def _released(self) -> None:
        with self._guard:
            self.leased -= 1


class faulty:
    """A TensorSource that answers ``delay`` seconds late, and never for a key that ``drop`` says yes to.

    A context manager: on leaving, answers that are still under way are dropped and their threads are gone.
    """

    def __init__(self, source: TensorSource, delay: float = 0.0, drop: Callable[[str], bool] | None = None) -> None:
        self._source = source
        self._delay = delay
        self._drop = drop
        self._timers: list[threading.Timer] = []

    def take(self, key: str, reply: Reply) -> None:
        if self._drop is not None and self._drop(key):
            return

        def late(answer: Lease | BaseException) -> None:
            timer = threading.Timer(self._delay, reply, (answer,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

        self._source.take(key, late if self._delay > 0 else reply)

    def __enter__(self) -> faulty:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()


@dataclass
class End:
    """One end of a connected group: its transport, what it serves, and a channel to every other end by rank."""

    transport: Transport
    source: Any
    arena: Arena
    channels: dict[int, Channel] = field(default_factory=dict)
    address: bytes = b""

    def listen(self) -> bytes:
        """Begin to serve; the address, which ``address`` keeps."""
        self.address = self.transport.listen(self.source)
        return self.address

    @property
    def channel(self) -> Channel:
        """The channel to the other end of a pair."""
        (channel,) = self.channels.values()
        return channel

    def close(self) -> None:
        self.transport.close()
        self.arena.close()


def open_end(
    name: str,
    source: TensorSource | None = None,
    *,
    arena_bytes: int = 64 << 20,
    params: Mapping[str, object] | None = None,
    token: str = "a run's token",
    task: str = "",
    tracer: Tracer | None = None,
) -> End:
    """A transport of our own, not connected yet; serves ``source``, by default a new Shelf, once ``listen`` is called."""
    arena = Arena(arena_bytes, shared=True, poison=True)
    try:
        transport = open_transport(name, Options(token=token, task=task, params=params or {}), arena, tracer)
    except BaseException:
        arena.close()
        raise
    return End(transport, Shelf() if source is None else source, arena)


@contextlib.contextmanager
def pair(
    name: str, sources: Sequence[TensorSource | None] = (None, None), *, timeout: float = 30.0, **options: Any
) -> Iterator[tuple[End, End]]:
    """Two ends in this process, each listening and connected to the other; see ``open_end`` for the options.

    For two real processes see ``spawn`` and ``Rank.connect``.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for rank, source in enumerate(sources):
            end = open_end(name, source, task=f"/job:test/task:{rank}", **options)
            stack.callback(end.close)
            ends.append(end)
        addresses = [end.listen() for end in ends]
        for rank, end in enumerate(ends):
            other = 1 - rank
            end.channels[other] = end.transport.connect(
                addresses[other], peer=f"/job:test/task:{other}", deadline=Deadline.after(timeout)
            )
        yield ends[0], ends[1]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds; False if it does not within the time."""
    deadline = Deadline.after(seconds)
    while not condition():
        if deadline.expired():
            return False
        time.sleep(0.002)
    return True
