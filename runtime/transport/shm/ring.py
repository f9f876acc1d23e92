"""Ring: messages and immediates in one direction, in memory that the receiver made and the sender maps.

Layout: one page of control words (u64), then small slots, then as many large ones of ``stride`` bytes::

    control[0]  bell   the receiver sleeps: ring its eventfd
    control[8]  head   slots that the receiver has done with (another cache line)
    small slot  word u64, payload up to SMALL_BYTES
    large slot  the payload of the same slot if it is longer

So small messages, which latency depends on, stay within a few pages that fit the first-level cache.

A slot's word is stored last, by one aligned 8-byte store, and says everything: lap (16 bits), kind (8), length or
immediate (40). On x86-64 stores become visible in program order, so who sees the lap sees the payload; on other processors
that was not proven, and ``ShmTransport.probe`` refuses them. Nothing that the sender wrote is trusted.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from runtime.errors import CorruptMessageError
from runtime.transport.onesided.link import Completion, Op
from runtime.transport.shm import area

CONTROL_BYTES = mmap.PAGESIZE
_SMALL_STRIDE = 192
SMALL_BYTES = _SMALL_STRIDE - 8
_BELL, _HEAD = 0, 8
_MESSAGE, _IMMEDIATE = 1, 2
_ONE = 1 << 40
_VALUE = _ONE - 1
_LAP_MASK = 0xFFFF
_NO_WORDS = memoryview(bytearray(CONTROL_BYTES)).cast("Q")
_OP_MESSAGE, _OP_IMMEDIATE = Op.MESSAGE, Op.IMMEDIATE
_NOTHING: list[Completion] = []
# NamedTuple's own constructor is a Python function of 0.2 us.
_completion: Callable[[tuple[Any, ...]], Completion] = functools.partial(tuple.__new__, Completion)  # type: ignore[arg-type]


def ring_bytes(slots: int, stride: int) -> int:
    """Size of the memory of a ring."""
    return -(-(CONTROL_BYTES + slots * (_SMALL_STRIDE + stride)) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Ring:
    """The mapping that both ends have. ``slots`` is a power of two, ``stride`` a multiple of 64."""

    def __init__(self, fd: int, slots: int, stride: int) -> None:
        if slots & (slots - 1) or slots < 1 or stride % 64 or stride < 64:
            raise ValueError(f"a ring of {slots} slots of {stride} bytes")
        self.slots = slots
        self.stride = stride
        self.max_payload = stride
        self._memory = memoryview(mmap.mmap(fd, ring_bytes(slots, stride), flags=mmap.MAP_SHARED))
        self._words = self._memory.cast("Q")
        # The parts of each slot's address, so that nothing is computed on the way: word, lap (u16), small and large payload.
        small = range(CONTROL_BYTES, CONTROL_BYTES + slots * _SMALL_STRIDE, _SMALL_STRIDE)
        large = range(small.stop, small.stop + slots * stride, stride)
        self._places = [(at // 8, at // 2 + 3, at + 8, big) for at, big in zip(small, large, strict=True)]
        self._mask = slots - 1
        self._count = 0
        # Taking and giving a free lock is an atomic read-modify-write, which on x86-64 is a full fence; Python has no other.
        self._fence = threading.Lock()

    def close(self) -> None:
        """Let the mapping go with the last view of it: another thread may be looking at a word just now. ``arm``, ``disarm``
        and ``ready`` do nothing afterwards."""
        self._words = _NO_WORDS
        self._memory = _NO_WORDS.cast("B")


class Receiver(_Ring):
    """The reading end; makes the memory. ``local``: completions of this end that ``ready`` shall tell of, too."""

    def __init__(self, slots: int, stride: int) -> None:
        self.fd = area.create("verbflow-ring", ring_bytes(slots, stride))
        super().__init__(self.fd, slots, stride)
        self.local: list[Completion] = []
        self._laps = self._memory.cast("H")
        self._reported = 0
        self._lap = 1
        self._word, self._lap_at, self._small, self._large = self._places[0]

    def ready(self) -> object:
        """There is something to take or to poll."""
        return self._laps[self._lap_at] == self._lap or self.local

    def take(self) -> memoryview | None:
        """The next message's payload, valid until the next call or ``poll``; None if there is none or something else is
        next. CorruptMessageError as ``poll``."""
        if self._laps[self._lap_at] != self._lap:
            return None
        word = self._words[self._word]
        value = word & _VALUE
        if word >> 40 & 0xFF != _MESSAGE:
            return None
        if value > self.max_payload:
            raise CorruptMessageError(f"a message of {value} bytes in a slot of {self.max_payload}")
        start = self._small if value <= SMALL_BYTES else self._large
        if self._reported != self._count:
            self._words[_HEAD] = self._reported = self._count
        self._count = count = self._count + 1
        if not count & self._mask:
            self._lap = self._lap + 1 & _LAP_MASK
        self._word, self._lap_at, self._small, self._large = self._places[count & self._mask]
        return self._memory[start : start + value]

    def poll(self, n: int) -> list[Completion]:
        """At most ``n`` messages and immediates; payloads are valid until the next call. CorruptMessageError if a slot
        holds what no sender would write."""
        count = self._count
        if count != self._reported:
            self._words[_HEAD] = self._reported = count
        if self._laps[self._lap_at] != self._lap:
            return _NOTHING
        found: list[Completion] = []
        while len(found) < n and self._laps[self._lap_at] == self._lap:
            word = self._words[self._word]
            value = word & _VALUE
            kind = word >> 40 & 0xFF
            if kind == _MESSAGE:
                if value > self.max_payload:
                    raise CorruptMessageError(f"a message of {value} bytes in a slot of {self.max_payload}")
                start = self._small if value <= SMALL_BYTES else self._large
                payload = self._memory[start : start + value]
                found.append(_completion((_OP_MESSAGE, 0, 0, payload, None)))
            elif kind == _IMMEDIATE and value <= 0xFFFF_FFFF:
                found.append(_completion((_OP_IMMEDIATE, 0, value, None, None)))
            else:
                raise CorruptMessageError(f"a slot of kind {kind} with {value:#x}")
            self._count = count = count + 1
            if not count & self._mask:
                self._lap = self._lap + 1 & _LAP_MASK
            self._word, self._lap_at, self._small, self._large = self._places[count & self._mask]
        return found

    def arm(self) -> None:
        """From now on the sender shall ring."""
        self._words[_BELL] = 1
        with self._fence:
            pass

    def disarm(self) -> None:
        self._words[_BELL] = 0

    def close(self) -> None:
        super().close()
        self._word = self._lap_at = 0
        self._lap = -1
        self._laps = _NO_WORDS.cast("B").cast("H")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Sender(_Ring):
    """The writing end, over the memory that a peer made; ``bell`` is the peer's eventfd (not owned)."""

    def __init__(self, fd: int, slots: int, stride: int, bell: int) -> None:
        super().__init__(fd, slots, stride)
        self._bell = bell
        self._room = slots  # slots that are surely free
        self._lap = 1 << 48
        # A fence is one atomic operation on a lock: taking it at one slot and giving it back at the next is half the cost of
        # both at each. One thread at a time sends, so it never waits.
        lock = threading.Lock()
        fences: list[Callable[[], object]] = [lock.acquire, lock.release] * (slots // 2) or [self._whole_fence]
        self._steps = [
            (word, small, large, fence) for (word, _, small, large), fence in zip(self._places, fences, strict=True)
        ]
        self._barrier: Callable[[], object]
        self._word, self._small, self._large, self._barrier = self._steps[0]

    def message(self, payload: bytes | bytearray | memoryview) -> None:
        """Publish a message, and ring if the receiver sleeps. BlockingIOError if the ring is full."""
        size = len(payload)
        if size <= SMALL_BYTES:
            start = self._small
        elif size <= self.max_payload:
            start = self._large
        else:
            raise ValueError(f"a message of {size} bytes is longer than {self.max_payload}")
        if not self._room:
            self.need_room()
        self._memory[start : start + size] = payload
        words = self._words
        words[self._word] = self._lap | 0x10000000000 | size  # _MESSAGE << 40
        self._room -= 1
        self._count = count = self._count + 1
        if not count & self._mask:
            self._lap = (count // self.slots + 1 & _LAP_MASK) << 48
        # The word must be out before the bell is looked at, as the receiver sets the bell before it looks at the word.
        self._barrier()
        self._word, self._small, self._large, self._barrier = self._steps[count & self._mask]
        if words[_BELL]:
            self._ring()

    def gathered(self, head: bytes, body: memoryview) -> None:
        """Publish a message that is ``head`` and then ``body`` (flat bytes); as ``message``."""
        middle, size = len(head), len(head) + len(body)
        if size > self.max_payload:
            raise ValueError(f"a message of {size} bytes is longer than {self.max_payload}")
        if not self._room:
            self.need_room()
        start = self._small if size <= SMALL_BYTES else self._large
        self._memory[start : start + middle] = head
        self._memory[start + middle : start + size] = body
        self._publish(_MESSAGE << 40 | size)

    def immediate(self, imm: int) -> None:
        """Publish an immediate; as ``message``."""
        if not self._room:
            self.need_room()
        self._publish(_IMMEDIATE << 40 | imm)

    def need_room(self) -> None:
        """BlockingIOError if the ring is full."""
        if self._room:
            return
        head = self._words[_HEAD]
        if not self._count - self.slots <= head <= self._count:
            raise CorruptMessageError(f"the peer has read {head} slots of {self._count}")
        self._room = self.slots - (self._count - head)
        if not self._room:
            raise BlockingIOError("the peer's ring is full")

    def _publish(self, word: int) -> None:
        # ``message`` does the same without the call.
        words = self._words
        words[self._word] = self._lap | word
        self._room -= 1
        self._count = count = self._count + 1
        if not count & self._mask:
            self._lap = (count // self.slots + 1 & _LAP_MASK) << 48
        self._barrier()
        self._word, self._small, self._large, self._barrier = self._steps[count & self._mask]
        if words[_BELL]:
            self._ring()

    def _whole_fence(self) -> None:
        with self._fence:
            pass

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was rung 2**64 times: it will wake
            os.eventfd_write(self._bell, 1)
