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
    if _prefers_small(inner, out):
        return _outer(a, b, out, threads)
    if memory is not None and b.T.flags.c_contiguous and _prefers_small(rows, b):
        return _by_rows_of(b.T, a, out, threads, memory)
    if is_all_result(rows, inner, columns, out.itemsize):
        calls = [partial(np.matmul, a[i:j], b, out=out[i:j]) for i, j in _row_blocks(out, threads)]
        return free_shares([[call] * threads for call in calls])
    if rows >= columns:
        calls = [partial(np.matmul, a[i:j], b, out=out[i:j]) for i, j in split(rows, threads)]
    else:
        calls = [partial(np.matmul, a, b[:, i:j], out=out[:, i:j]) for i, j in split(columns, threads)]
    return fixed_shares([[call] for call in calls])


def is_all_result(rows: int, inner: int, columns: int, itemsize: int) -> bool:
    """Whether the result is far larger than the operands, so that it is made in blocks of rows that stay in cache."""
    return inner < 256 and rows * columns * itemsize > 4 * BLOCK_BYTES


def _small_columns(batch: int) -> int:
    """How many columns a block of SMALL_ROWS rows may have to stay a small product: a multiple of 16, at most 1024."""
    return max(16, min(1024, SMALL_PRODUCT // (SMALL_ROWS * max(1, batch)) // 16 * 16))


def _outer(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int) -> Call:
    """The gradient of a large weight matrix: ``a`` is [m, batch], ``b`` [batch, n], and the result is large."""
    items = []
    for start, stop in _row_blocks(out, threads):
        items.append([sequence(_small_products(a[start:stop], b, out[start:stop]))] * threads)
    return free_shares(items)


def _row_blocks(out: np.ndarray, threads: int) -> list[tuple[int, int]]:
    """Rows of a large result in pieces of about BLOCK_BYTES, one for each thread at least; whole numbers of SMALL_ROWS."""
    units = -(-len(out) // SMALL_ROWS)
    pieces = split(units, max(threads, -(-out.nbytes // BLOCK_BYTES)))
    return [(start * SMALL_ROWS, min(stop * SMALL_ROWS, len(out))) for start, stop in pieces]


def _small_products(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[Call]:
    """``out = a @ b`` for some rows of the result, as stacks of products that need no packing."""
    (rows, batch), columns = a.shape, b.shape[1]
    width, whole = _small_columns(batch), rows // SMALL_ROWS * SMALL_ROWS
    calls: list[Call] = []
    for at in range(0, columns, width):
        part, target = b[:, at : at + width], out[:, at : at + width]
        if whole:
            stack = a[:whole].reshape(-1, SMALL_ROWS, batch)
            calls.append(partial(np.matmul, stack, part, out=_stacked(target[:whole])))
        if whole < rows:
            calls.append(partial(np.matmul, a[whole:], part, out=target[whole:]))
    return calls


def _prefers_small(inner: int, out: np.ndarray) -> bool:
    return (
        out.dtype == np.float32 and inner <= SKINNY_ROWS and out.size >= SKINNY_SIZE and blas.core() in UNPACKED_CORES
    )


def descent_workspace(rows: int, columns: int, itemsize: int, threads: int) -> int:
    """Bytes for ``compile_descent`` on a matrix of that shape: a block of rows a thread."""
    if rows * columns == 0:
        return 0
    pieces = _row_blocks(np.broadcast_to(np.zeros((), f"V{itemsize}"), (rows, columns)), threads)
    return threads * max(stop - start for start, stop in pieces) * columns * itemsize


def compile_descent(
    a: np.ndarray, b: np.ndarray, target: np.ndarray, rate: np.ndarray, threads: int, memory: np.ndarray
) -> Call:
    """``target[m, n] -= rate * (a[m, batch] @ b[batch, n])``: a gradient that is used up while it is in cache.

    Where ``is_all_result``, bit for bit what ``compile_matmul`` of the product and the update after it give.
    """
    rows, columns = target.shape
    if target.size == 0:
        return sequence(())
    pieces, room = _row_blocks(target, threads), descent_workspace(rows, columns, target.itemsize, 1)
    spare = [memory[thread * room : (thread + 1) * room].view(target.dtype) for thread in range(threads)]
    small = _prefers_small(a.shape[1], target)
    items = []
    for start, stop in pieces:
        own, row = target[start:stop], []
        for memory_of_thread in spare:
            product = memory_of_thread[: own.size].reshape(own.shape)
            calls = (
                _small_products(a[start:stop], b, product)
                if small
                else [partial(np.matmul, a[start:stop], b, out=product)]
            )
            calls.append(partial(np.multiply, product, rate, out=product))
            calls.append(partial(np.subtract, own, product, out=own))
            row.append(sequence(calls))
        items.append(row)
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
