"""Ring: messages and immediates in one direction, in memory that the receiver made and the sender maps.

Layout: one page of control words (u64), then slots of ``stride`` bytes::

    control[0]  bell   the receiver sleeps: ring its eventfd
    control[8]  head   slots that the receiver has done with (another cache line)
    slot        word u64, payload

A slot's word is stored last, by one aligned 8-byte store, and says everything: lap (16 bits), kind (8), length or immediate
(40). On x86-64 stores become visible in program order, so who sees the lap sees the payload; on other processors that was
not proven, and ``ShmTransport.probe`` refuses them. Nothing that the sender wrote is trusted.
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
_BELL, _HEAD = 0, 8
_WORD_BYTES = 8
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
    return -(-(CONTROL_BYTES + slots * stride) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Ring:
    """The mapping that both ends have. ``slots`` is a power of two, ``stride`` a multiple of 64."""

    def __init__(self, fd: int, slots: int, stride: int) -> None:
        if slots & (slots - 1) or slots < 1 or stride % 64 or stride < 64:
            raise ValueError(f"a ring of {slots} slots of {stride} bytes")
        self.slots = slots
        self.stride = stride
        self.max_payload = stride - _WORD_BYTES
        self._memory = memoryview(mmap.mmap(fd, ring_bytes(slots, stride), flags=mmap.MAP_SHARED))
        self._words = self._memory.cast("Q")
        self._mask = slots - 1
        self._words_a_slot = stride // 8
        self._first = self._at = CONTROL_BYTES // 8
        # Taking and giving a free lock is an atomic read-modify-write, which on x86-64 is a full fence; Python has no other.
        self._fence = threading.Lock()

    def close(self) -> None:
        """Let the mapping go with the last view of it: another thread may be looking at a word just now. ``arm``, ``disarm``
        and ``ready`` do nothing afterwards."""
        self._at = 0
        self._words = _NO_WORDS
        self._memory = _NO_WORDS.cast("B")


class Receiver(_Ring):
    """The reading end; makes the memory."""

    def __init__(self, slots: int, stride: int) -> None:
        self.fd = area.create("verbflow-ring", ring_bytes(slots, stride))
        super().__init__(self.fd, slots, stride)
        self._count = 0
        self._reported = 0
        self._lap = 1

    def ready(self) -> bool:
        """There is something to poll."""
        return self._words[self._at] >> 48 == self._lap

    def poll(self, n: int) -> list[Completion]:
        """At most ``n`` messages and immediates; payloads are valid until the next call. CorruptMessageError if a slot
        holds what no sender would write."""
        words = self._words
        at = self._at
        count = self._count
        if count != self._reported:
            words[_HEAD] = self._reported = count
        word = words[at]
        if word >> 48 != self._lap:
            return _NOTHING
        found: list[Completion] = []
        while True:
            value = word & _VALUE
            kind = word >> 40 & 0xFF
            if kind == _MESSAGE:
                if value > self.max_payload:
                    raise CorruptMessageError(f"a message of {value} bytes in a slot of {self.max_payload}")
                start = at * 8 + _WORD_BYTES
                found.append(_completion((_OP_MESSAGE, 0, 0, self._memory[start : start + value], None)))
            elif kind == _IMMEDIATE and value <= 0xFFFF_FFFF:
                found.append(_completion((_OP_IMMEDIATE, 0, value, None, None)))
            else:
                raise CorruptMessageError(f"a slot of kind {kind} with {value:#x}")
            count += 1
            if count & self._mask:
                at += self._words_a_slot
            else:
                at = self._first
                self._lap = self._lap + 1 & _LAP_MASK
            if len(found) == n:
                break
            word = words[at]
            if word >> 48 != self._lap:
                break
        self._at = at
        self._count = count
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
        self._lap = -1
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Sender(_Ring):
    """The writing end, over the memory that a peer made; ``bell`` is the peer's eventfd (not owned)."""

    def __init__(self, fd: int, slots: int, stride: int, bell: int) -> None:
        super().__init__(fd, slots, stride)
        self._bell = bell
        self._count = 0
        self._head = 0
        self._lap = 1 << 48

    def message(self, payload: bytes | bytearray | memoryview) -> None:
        """Publish a message, and ring if the receiver sleeps. BlockingIOError if the ring is full."""
        size = len(payload)
        if size > self.max_payload:
            raise ValueError(f"a message of {size} bytes is longer than {self.max_payload}")
        if self._count - self._head >= self.slots:
            self.room()
        start = self._at * 8 + _WORD_BYTES
        self._memory[start : start + size] = payload
        self._publish(self._lap | _MESSAGE << 40 | size)

    def immediate(self, imm: int) -> None:
        """Publish an immediate; as ``message``."""
        self.room()
        self._publish(self._lap | _IMMEDIATE << 40 | imm)

    def room(self) -> None:
        """BlockingIOError if the ring is full."""
        if self._count - self._head < self.slots:
            return
        head = self._words[_HEAD]
        if not self._head <= head <= self._count:
            raise CorruptMessageError(f"the peer has read {head} slots of {self._count}")
        self._head = head
        if self._count - head >= self.slots:
            raise BlockingIOError("the peer's ring is full")

    def _publish(self, word: int) -> None:
        words = self._words
        words[self._at] = word
        self._count += 1
        if self._count & self._mask:
            self._at += self._words_a_slot
        else:
            self._at = self._first
            self._lap = self._lap + (1 << 48) & _LAP_MASK << 48
        # The word must be out before the bell is looked at, as the receiver sets the bell before it looks at the word.
        with self._fence:
            pass
        if words[_BELL]:
            with contextlib.suppress(BlockingIOError):  # it was rung 2**64 times: it will wake
                os.eventfd_write(self._bell, 1)
