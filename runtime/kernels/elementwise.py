"""Passes over activations in blocks that stay in cache, the blocks shared by threads: bias, ReLU and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from runtime.kernels.parallel import Call, fixed_shares, free_shares, sequence, split
from runtime.kernels.scratch import Scratch, aligned

BLOCK_BYTES = 1 << 18
# Below this a hand-over to another thread costs more than it saves.
PARALLEL_BYTES = 1 << 20
# A bias shorter than this is repeated, because numpy pays for every run of the inner loop anew.
RUN_LENGTH = 2048


def over_blocks(
    arrays: Sequence[np.ndarray], threads: int, make: Callable[[int, Sequence[np.ndarray]], Sequence[Call]]
) -> Call:
    """``make(thread, blocks)`` gives the calls for equal slices of ``arrays`` along their common first axis."""
    count, nbytes = len(arrays[0]), max(array.nbytes for array in arrays)
    threads = threads if nbytes >= PARALLEL_BYTES else 1
    parts = max(threads, -(-nbytes // BLOCK_BYTES))
    items = []
    for start, stop in split(count, parts) if count else []:
        blocks = [array[start:stop] for array in arrays]
        items.append([sequence(make(thread, blocks)) for thread in range(threads)])
    return free_shares(items)


def compile_relu(x: np.ndarray, y: np.ndarray, threads: int) -> Call:
    """``y`` = max(``x``, 0); may run in place."""
    zero = x.dtype.type(0)
    arrays = [x.reshape(-1), y.reshape(-1)]
    return over_blocks(arrays, threads, lambda _, part: [partial(np.maximum, part[0], zero, out=part[1])])


def relu_gradient_workspace(itemsize: int, threads: int) -> int:
    return threads * aligned(BLOCK_BYTES // itemsize)


def compile_relu_gradient(y: np.ndarray, dy: np.ndarray, dx: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``dx`` = ``dy`` where ``y`` > 0, else 0; may run in place of either.

    The condition becomes a bit mask, because a product with a boolean would convert it to a number first.
    """
    zero, bits = y.dtype.type(0), np.dtype(f"i{y.itemsize}")
    scratch = Scratch(memory)
    flags = [scratch.take((BLOCK_BYTES // y.itemsize,), np.dtype(np.bool_)) for _ in range(threads)]

    def make(thread: int, part: Sequence[np.ndarray]) -> list[Call]:
        value, gradient, result = part
        flag = flags[thread][: value.size]
        mask = flag.view(np.int8)
        return [
            partial(np.greater, value, zero, out=flag),
            partial(np.negative, mask, out=mask),  # true becomes all ones
            partial(np.bitwise_and, gradient.view(bits), mask, out=result.view(bits)),
        ]

    return over_blocks([y.reshape(-1), dy.reshape(-1), dx.reshape(-1)], threads, make)


def _repeats(rows: int, channels: int) -> int:
    """How many rows to treat as one, so that a run of the inner loop is long enough."""
    wanted = max(1, RUN_LENGTH // max(1, channels))
    return next((count for count in range(wanted, 0, -1) if rows % count == 0), 1)


def bias_workspace(rows: int, channels: int, itemsize: int) -> int:
    return aligned(_repeats(rows, channels) * channels * itemsize)


def compile_bias(
    x: np.ndarray, bias: np.ndarray, y: np.ndarray, threads: int, memory: np.ndarray, relu: bool = False
) -> Call:
    """``y[..., c]`` = ``x[..., c]`` + ``bias[c]``, cut off below 0 if ``relu``; may run in place."""
    channels = bias.size
    rows = x.size // max(1, channels)
    count = _repeats(rows, channels)
    run = Scratch(memory).take((count, channels), bias.dtype)
    zero = x.dtype.type(0)

    def make(_: int, part: Sequence[np.ndarray]) -> list[Call]:
        calls: list[Call] = [partial(np.add, part[0], run.reshape(-1), out=part[1])]
        if relu:
            calls.append(partial(np.maximum, part[1], zero, out=part[1]))
        return calls

    arrays = [array.reshape(rows // count, count * channels) for array in (x, y)]
    return sequence([partial(np.copyto, run, bias), over_blocks(arrays, threads, make)])


def column_sum_workspace(columns: int, itemsize: int, threads: int) -> int:
    return threads * aligned(columns * itemsize)


def compile_column_sum(matrix: np.ndarray, out: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``out[c]``: the sum over rows of ``matrix[r, c]``, as a product with ones, whose partial sums are also more exact."""
    rows, columns = matrix.shape
    if matrix.size == 0:
        return partial(out.fill, 0)
    if matrix.nbytes < PARALLEL_BYTES:
        threads = 1
    ones = np.ones(-(-rows // threads), matrix.dtype)
    scratch = Scratch(memory)
    shares: list[list[Call]] = []
    sums: list[Call] = []
    for thread, (start, stop) in enumerate(split(rows, threads)):
        total = out if thread == 0 else scratch.take((columns,), out.dtype)
        shares.append([partial(np.matmul, ones[: stop - start], matrix[start:stop], out=total)])
        if thread:
            sums.append(partial(np.add, out, total, out=out))
    return sequence([fixed_shares(shares), *sums])
