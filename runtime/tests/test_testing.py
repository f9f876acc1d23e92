"""What the other tests stand on: ranks, patterns, guards, leaks."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.leaks import LeakWatch
from runtime.tensor import TensorSpec
from runtime.testing import Guarded, Rank, pattern, spawn


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 1000))
def test_a_pattern_repeats_nowhere_and_depends_on_its_seed(nbytes: int, other: int, seed: int) -> None:
    content = pattern(nbytes, seed)
    assert len(content) == nbytes
    words = content[: nbytes // 8 * 8].view(np.uint64)
    assert len(np.unique(words)) == len(words)
    assert np.array_equal(pattern(other, seed)[:nbytes], content[:other])
    if nbytes >= 8:
        assert not np.array_equal(pattern(nbytes, seed + 1), content)


def test_guards_see_a_byte_beside_the_destination() -> None:
    for offset in (-1, 12):
        guarded = Guarded(TensorSpec((3,), np.dtype(np.float32)))
        assert guarded.untouched()
        guarded.array[:] = 1
        assert guarded.intact() and not guarded.untouched()
        start = guarded.array.ctypes.data - guarded._whole.ctypes.data
        guarded._whole[start + offset] += 1
        assert not guarded.intact()


def _doubles(rank: Rank, factor: int) -> tuple[int, list[int]]:
    values = rank.exchange(rank.rank * factor)
    rank.barrier()
    return os.getpid(), values


def test_ranks_are_processes_that_exchange_values() -> None:
    results = spawn(3, _doubles, 10)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4
    assert [values for _, values in results] == [[0, 10, 20]] * 3


def _fails(rank: Rank) -> None:
    if rank.rank == 0:
        rank.barrier()
    raise ValueError(f"I am {rank.rank}")


def test_all_errors_are_reported_and_nobody_waits_for_the_failed() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        spawn(3, _fails)
    texts = [str(error) for error in raised.value.exceptions]
    assert len(texts) == 3
    assert any("another rank failed" in text for text in texts)
    assert any("I am 1" in text for text in texts) and any("I am 2" in text for text in texts)


def _dies(rank: Rank) -> list[object]:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank.exchange("alive")


def test_a_rank_that_may_die_is_not_waited_for() -> None:
    assert spawn(2, _dies, may_die=[1]) == [["alive", None], None]
    with pytest.raises(ExceptionGroup) as raised:
        spawn(2, _dies)
    assert any("rank 1 ended with exit code -9" in str(error) for error in raised.value.exceptions)


def _hangs(rank: Rank) -> None:
    if rank.rank == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_named_and_killed() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        spawn(2, _hangs, timeout=3)
    assert any("rank 1 has not ended" in str(error) for error in raised.value.exceptions)


def test_leaks_are_found() -> None:
    watch = LeakWatch()
    assert watch.leaks() == []
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="forgotten")
    thread.start()
    reader, writer = os.pipe()
    found = watch.leaks(patience=0.05)
    assert any("forgotten" in leak for leak in found)
    assert sum("descriptor" in leak for leak in found) == 2
    os.close(reader)
    os.close(writer)
    over.set()
    thread.join()
    assert watch.leaks() == []
