"""Arena: alignment, best fit, coalescing, the lifetime of tensors, and what its errors say."""

import gc
import itertools
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ArenaFullError, ConfigError
from runtime.memory.arena import ALIGNMENT, POISON, Arena
from runtime.tensor import TensorSpec


def test_blocks_are_aligned_and_do_not_overlap():
    arena = Arena(1 << 16)
    blocks = [arena.allocate(size) for size in (1, 63, 64, 65, 1000)]
    for number, block in enumerate(blocks):
        assert (arena.address + block.offset) % ALIGNMENT == 0
        block.memory[:] = number
    assert all((block.memory == number).all() for number, block in enumerate(blocks))
    arena.close()


def test_freed_neighbours_become_one_again():
    arena = Arena(mmap.PAGESIZE)
    blocks = [arena.allocate(mmap.PAGESIZE // 4) for _ in range(4)]
    for index in (1, 3, 0, 2):
        arena.free(blocks[index])
    assert arena.used_bytes == 0
    whole = arena.allocate(mmap.PAGESIZE)
    assert whole.offset == 0
    arena.free(whole)
    arena.close()


def test_best_fit_takes_the_tightest_hole():
    arena = Arena(mmap.PAGESIZE)
    wide, _, narrow, _ = (arena.allocate(size) for size in (1024, 64, 256, 64))
    arena.free(wide)
    arena.free(narrow)
    assert arena.allocate(200).offset == narrow.offset
    arena.close()


def test_full_arena_lists_its_occupants_and_stays_usable():
    arena = Arena(mmap.PAGESIZE)
    held = arena.allocate(4000, "conv1/weights")
    with pytest.raises(ArenaFullError, match=r"4096 bytes has no 512 contiguous bytes for fc6.*conv1/weights 4000"):
        arena.allocate(512, "fc6")
    arena.free(held)
    arena.allocate(4096)
    arena.close()


def test_double_free_is_an_error():
    arena = Arena(mmap.PAGESIZE)
    block = arena.allocate(10)
    arena.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        arena.free(block)
    arena.close()


def test_a_tensor_frees_its_block_with_its_last_view():
    arena = Arena(mmap.PAGESIZE)
    tensor = arena.tensor(TensorSpec((4, 4), np.dtype(np.float32)), "weights")
    view = tensor[1:].T
    del tensor
    gc.collect()
    assert arena.used_bytes == 64
    assert arena.offset_of(np.ascontiguousarray(view)) is None
    del view
    gc.collect()
    assert arena.used_bytes == 0
    arena.close()


def test_poison_overwrites_what_is_freed():
    arena = Arena(mmap.PAGESIZE, poison=True)
    block = arena.allocate(100)
    block.memory[:] = 1
    arena.free(block)
    assert (arena.memory[block.offset : block.offset + 100] == POISON).all()
    arena.close()


def test_shared_memory_can_be_mapped_by_descriptor_but_not_shrunk():
    arena = Arena(mmap.PAGESIZE, shared=True)
    assert arena.fd is not None
    arena.memory[:8] = np.arange(8)
    other = mmap.mmap(arena.fd, mmap.PAGESIZE)
    assert other[:8] == bytes(range(8))
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    other.close()
    arena.close()
    arena.close()


def test_views_outlive_a_closed_arena():
    arena = Arena(mmap.PAGESIZE)
    block, tensor = arena.allocate(64), arena.tensor(TensorSpec((4,), np.dtype(np.float32)))
    block.memory[:] = 7
    tensor[:] = 3
    arena.close()
    assert (block.memory == 7).all()
    assert (tensor == 3).all()


def test_too_small_an_arena_is_refused():
    with pytest.raises(ConfigError, match="too small"):
        Arena(10)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_allocations_keeps_the_books(actions):
    arena = Arena(1 << 15)
    held = []
    for size, pick in actions:
        if held and pick < 4:
            arena.free(held.pop(pick % len(held)))
            continue
        try:
            held.append(arena.allocate(size))
        except ArenaFullError:
            continue
    spans = sorted((block.offset, block.offset + max(1, block.nbytes)) for block in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert [block.nbytes for block in arena.occupants()] == sorted((block.nbytes for block in held), reverse=True)
    for block in held:
        arena.free(block)
    assert arena.used_bytes == 0
    arena.free(arena.allocate(1 << 15))
    arena.close()


def test_a_tensor_that_dies_inside_allocate_is_given_back_later():
    arena = Arena(1 << 20)
    held = [arena.tensor(TensorSpec((1000,), np.uint8))]
    with arena._guard:  # as when the garbage collector runs in the middle of an allocation
        held.clear()
    assert arena.used_bytes == 0
    arena.close()
