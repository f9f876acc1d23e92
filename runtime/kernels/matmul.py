"""Matrix products split over threads, and cut to small ones where a large operand is used for few rows only.

BLAS copies ("packs") its operands so that the inner kernel reads them in order. For a fully connected layer at a batch of 32 this
costs as much as the arithmetic: each of 37 million weights is packed to be used 32 times. OpenBLAS for AVX-512 has kernels that
do without packing for products of up to a million multiplications, so the two gradients of such a layer are computed as stacks of
products of that size, which numpy runs in one call. For the forward product it does not pay.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from runtime.kernels import blas
from runtime.kernels.parallel import Call, fixed_shares, free_shares, sequence, split

# Below this a hand-over to another thread (20-40 us) costs more than it saves.
MIN_PARALLEL_FLOPS = 4_000_000
# A result larger than this is cut: BLAS clears it first and then adds to it, which should happen in cache.
BLOCK_BYTES = 1 << 20
# "Few rows", and how large the other operand must be.
SKINNY_ROWS = 40
SKINNY_SIZE = 1 << 18
# OpenBLAS takes the kernels without packing up to 100^3 multiplications; blocks of 32 rows measured best.
SMALL_PRODUCT = 1_000_000
SMALL_ROWS = 32
UNPACKED_CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")


def compile_matmul(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int = 1, memory: np.ndarray | None = None
) -> Call:
    """``out[m, n] = a[m, k] @ b[k, n]``; ``a`` and ``b`` may be transposed views. ``memory``: ``matmul_workspace`` bytes."""
    (rows, inner), columns = a.shape, b.shape[1]
    if out.size == 0 or inner == 0:
        return partial(out.fill, 0)
    if 2 * rows * inner * columns < MIN_PARALLEL_FLOPS:
        return partial(np.matmul, a, b, out=out)
    if out.dtype == np.float32 and blas.core() in UNPACKED_CORES:
        if inner <= SKINNY_ROWS and out.size >= SKINNY_SIZE:
            return _outer(a, b, out, threads)
        if rows <= SKINNY_ROWS and memory is not None and b.size >= SKINNY_SIZE and b.T.flags.c_contiguous:
            return _by_rows_of(b.T, a, out, threads, memory)
    blocks = threads
    if out.nbytes > 4 * BLOCK_BYTES and inner < 256:
        blocks = threads * max(1, -(-out.nbytes // (BLOCK_BYTES * threads)))
    if rows >= columns or rows >= 8 * blocks:
        calls = [partial(np.matmul, a[i:j], b, out=out[i:j]) for i, j in split(rows, blocks)]
    else:
        calls = [partial(np.matmul, a, b[:, i:j], out=out[:, i:j]) for i, j in split(columns, blocks)]
    if len(calls) <= threads:
        return fixed_shares([[call] for call in calls])
    return free_shares([[call] * threads for call in calls])


def _small_columns(batch: int) -> int:
    """How many columns a block of SMALL_ROWS rows may have to stay a small product: a multiple of 16, at most 1024."""
    return max(16, min(1024, SMALL_PRODUCT // (SMALL_ROWS * max(1, batch)) // 16 * 16))


def _outer(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int) -> Call:
    """The gradient of a large weight matrix: ``a`` is [m, batch], ``b`` [batch, n], and the result is large."""
    (rows, batch), columns = a.shape, b.shape[1]
    width = _small_columns(batch)
    items = []
    for start, stop in split(rows, max(threads, -(-out.nbytes // (BLOCK_BYTES * threads)))):
        whole = start + (stop - start) // SMALL_ROWS * SMALL_ROWS
        calls: list[Call] = []
        for at in range(0, columns, width):
            part, target = b[:, at : at + width], out[:, at : at + width]
            if whole > start:
                stack = a[start:whole].reshape(-1, SMALL_ROWS, batch)
                calls.append(partial(np.matmul, stack, part, out=_stacked(target[start:whole])))
            if whole < stop:
                calls.append(partial(np.matmul, a[whole:stop], part, out=target[whole:stop]))
        items.append([sequence(calls)] * threads)
    return free_shares(items)


def _stacked(matrix: np.ndarray) -> np.ndarray:
    """[blocks * SMALL_ROWS, n], perhaps a slice of columns, as a view [blocks, SMALL_ROWS, n]."""
    rows, columns = matrix.shape
    shape = (rows // SMALL_ROWS, SMALL_ROWS, columns)
    strides = (matrix.strides[0] * SMALL_ROWS, *matrix.strides)
    return np.lib.stride_tricks.as_strided(matrix, shape, strides)


def _by_rows_of(w: np.ndarray, a: np.ndarray, out: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``out[batch, m] = a[batch, n] @ w[m, n].T``: the gradient of a fully connected layer's input."""
    batch, columns = a.shape
    width = _small_columns(batch)
    rows_at_once = 32 * SMALL_ROWS
    spare = [part.view(out.dtype) for part in np.split(memory[: threads * _spare_bytes(batch, out.itemsize)], threads)]
    items = []
    for start in range(0, len(w), rows_at_once):
        stop = min(len(w), start + rows_at_once)
        whole = start + (stop - start) // SMALL_ROWS * SMALL_ROWS
        row = []
        for room in spare:
            calls: list[Call] = []
            for low, high in ((start, whole), (whole, stop)):
                if low == high:
                    continue
                size = SMALL_ROWS if high == whole else high - low
                target = out[:, low:high].reshape(batch, -1, size).transpose(1, 0, 2)
                product = room[: target.size].reshape(target.shape)
                for at in range(0, columns, width):
                    weights = w[low:high, at : at + width]
                    stack = _stacked(weights) if size == SMALL_ROWS else weights[None]
                    into = product if at else target
                    calls.append(partial(np.matmul, a[:, at : at + width], stack.transpose(0, 2, 1), out=into))
                    if at:
                        calls.append(partial(np.add, target, product, out=target))
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)


def _spare_bytes(batch: int, itemsize: int) -> int:
    return batch * 32 * SMALL_ROWS * itemsize


def matmul_workspace(rows: int, itemsize: int, threads: int) -> int:
    """Bytes that ``compile_matmul`` may use for a result of ``rows`` rows."""
    return threads * _spare_bytes(rows, itemsize) if rows <= SKINNY_ROWS else 0
