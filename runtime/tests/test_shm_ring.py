"""The shared-memory ring: order, wrap, a full ring, and a sender that writes anything at all."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import CorruptMessageError
from runtime.transport.onesided.link import Op
from runtime.transport.shm.ring import CONTROL_BYTES, Receiver, Sender, ring_bytes

SLOTS, STRIDE = 8, 256


@contextlib.contextmanager
def ring(slots: int = SLOTS) -> Iterator[tuple[Sender, Receiver, int]]:
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    receiver = Receiver(slots, STRIDE)
    sender = Sender(receiver.fd, slots, STRIDE, bell)
    try:
        yield sender, receiver, bell
    finally:
        sender.close()
        receiver.close()
        os.close(bell)


messages = st.binary(max_size=STRIDE)
# A message in two parts, a message in one, an immediate.
items = st.one_of(st.tuples(messages, st.integers(0, STRIDE)), messages, st.integers(0, (1 << 32) - 1))


@given(st.lists(items, max_size=80), st.integers(1, 10))
def test_everything_arrives_in_order(sent: list[tuple[bytes, int] | bytes | int], batch: int) -> None:
    with ring() as (sender, receiver, _):
        waiting, got = list(sent), []
        while len(got) < len(sent):
            while waiting:
                try:
                    if isinstance(waiting[0], tuple):
                        message, middle = waiting[0]
                        sender.gathered(message[:middle], memoryview(message)[middle:])
                    elif isinstance(waiting[0], bytes):
                        sender.message(waiting[0])
                    else:
                        sender.immediate(waiting[0])
                except BlockingIOError:
                    break
                waiting.pop(0)
            for completion in receiver.poll(batch):
                got.append(bytes(completion.payload) if completion.op is Op.MESSAGE else completion.imm)
        assert got == [item[0] if isinstance(item, tuple) else item for item in sent]
        assert not receiver.poll(batch)
        assert not receiver.ready()


def test_a_full_ring_blocks_without_effect() -> None:
    with ring() as (sender, receiver, _):
        for at in range(SLOTS):
            sender.message(bytes([at]))
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                sender.message(b"too many")
            with pytest.raises(BlockingIOError):
                sender.gathered(b"too", memoryview(b"many"))
            with pytest.raises(BlockingIOError):
                sender.immediate(1)
        assert [bytes(c.payload) for c in receiver.poll(64)] == [bytes([at]) for at in range(SLOTS)]
        with pytest.raises(BlockingIOError):  # payloads are valid until the next poll
            sender.message(b"too early")
        assert not receiver.poll(64)
        sender.message(b"now")
        assert bytes(receiver.poll(64)[0].payload) == b"now"


def test_the_lap_counter_wraps() -> None:
    with ring(1) as (sender, receiver, _):
        for at in range((1 << 16) + 10):
            sender.immediate(at)
            assert receiver.poll(1)[0].imm == at
            assert not receiver.poll(1)


def test_the_bell_rings_only_for_who_sleeps() -> None:
    with ring() as (sender, receiver, bell):
        sender.message(b"a")
        receiver.arm()
        sender.message(b"b")
        assert os.eventfd_read(bell) == 1
        receiver.disarm()
        sender.message(b"c")
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)


def test_a_message_too_long_is_refused() -> None:
    with ring() as (sender, _, _):
        sender.message(bytes(STRIDE))
        with pytest.raises(ValueError, match="longer"):
            sender.message(bytes(STRIDE + 1))
        sender.gathered(bytes(10), memoryview(bytes(STRIDE - 10)))
        with pytest.raises(ValueError, match="longer"):
            sender.gathered(bytes(10), memoryview(bytes(STRIDE - 9)))


def test_nothing_is_seen_or_touched_after_close() -> None:
    with ring() as (sender, receiver, _):
        sender.message(b"a")
        receiver.close()
        receiver.arm()
        receiver.disarm()
        assert not receiver.ready()
        assert receiver.poll(8) == []
        receiver.close()


@given(st.lists(st.tuples(st.integers(0, SLOTS * 192 // 8 - 1), st.integers(0, (1 << 64) - 1)), max_size=40))
def test_any_memory_content_is_survived(writes: list[tuple[int, int]]) -> None:
    """Whatever a hostile sender stores, poll answers with payloads inside the slots, or CorruptMessageError."""
    with ring() as (_, receiver, _):
        with mmap.mmap(receiver.fd, ring_bytes(SLOTS, STRIDE)) as memory:
            for word, value in writes:
                at = CONTROL_BYTES + word * 8
                memory[at : at + 8] = value.to_bytes(8, "little")
            with contextlib.suppress(CorruptMessageError):
                for _ in range(20):
                    for completion in receiver.poll(4):
                        if completion.op is Op.MESSAGE:
                            assert len(bytes(completion.payload)) <= STRIDE
                        else:
                            assert 0 <= completion.imm < 1 << 32


@given(st.integers(0, 0xFF), st.integers(0, (1 << 40) - 1))
def test_any_slot_that_claims_the_right_lap(kind: int, value: int) -> None:
    with ring() as (_, receiver, _):
        with mmap.mmap(receiver.fd, ring_bytes(SLOTS, STRIDE)) as memory:
            word = 1 << 48 | kind << 40 | value
            memory[CONTROL_BYTES : CONTROL_BYTES + 8] = word.to_bytes(8, "little")
            if kind == 1 and value <= STRIDE:
                assert len(receiver.poll(1)[0].payload) == value
            elif kind == 2 and value < 1 << 32:
                assert receiver.poll(1)[0].imm == value
            else:
                with pytest.raises(CorruptMessageError):
                    receiver.poll(1)


@given(st.integers(0, (1 << 64) - 1))
def test_a_head_that_lies_never_lets_the_sender_overrun(head: int) -> None:
    with ring() as (sender, receiver, _):
        for at in range(SLOTS):
            sender.immediate(at)
        with mmap.mmap(receiver.fd, ring_bytes(SLOTS, STRIDE)) as memory:
            memory[64:72] = head.to_bytes(8, "little")
        if 0 < head <= SLOTS:
            sender.immediate(1)
        else:
            with pytest.raises((BlockingIOError, CorruptMessageError)):
                sender.immediate(1)


def test_geometry_is_checked() -> None:
    for slots, stride in ((3, 128), (8, 100), (0, 128), (8, 0)):
        fd = os.memfd_create("test")
        try:
            with pytest.raises(ValueError, match="ring"):
                Sender(fd, slots, stride, -1)
        finally:
            os.close(fd)
