"""Matrix products split over threads and cut to pieces whose result stays in cache.

OpenBLAS first clears the result and then adds to it, so a result larger than the cache would go to memory three times; a
weight gradient of a fully connected layer is all result (batch 32 against 9216 x 4096), and so is cut to blocks.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from runtime.kernels.parallel import Call, fixed_shares, free_shares, split

BLOCK_BYTES = 1 << 20
# Below this a hand-over to another thread (20-40 us) costs more than it saves.
MIN_PARALLEL_FLOPS = 4_000_000


def compile_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int = 1) -> Call:
    """``out[m, n] = a[m, k] @ b[k, n]``; ``a`` and ``b`` may be transposed views, ``out`` may be a slice of columns."""
    (rows, inner), columns = a.shape, b.shape[1]
    if out.size == 0 or inner == 0:
        return partial(out.fill, 0)
    if 2 * rows * inner * columns < MIN_PARALLEL_FLOPS:
        return partial(np.matmul, a, b, out=out)
    blocks = threads
    if out.nbytes > 4 * BLOCK_BYTES and inner < 256:
        blocks = threads * max(1, -(-out.nbytes // (BLOCK_BYTES * threads)))
    if blocks == 1:
        return partial(np.matmul, a, b, out=out)
    if rows >= columns or rows >= 8 * blocks:
        calls = [partial(np.matmul, a[i:j], b, out=out[i:j]) for i, j in split(rows, blocks)]
    else:
        calls = [partial(np.matmul, a, b[:, i:j], out=out[:, i:j]) for i, j in split(columns, blocks)]
    if len(calls) <= threads:
        return fixed_shares([[call] for call in calls])
    return free_shares([[call] * threads for call in calls])
