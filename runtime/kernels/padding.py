"""Rows of images with zeros around, in a kernel's temporary memory."""

from __future__ import annotations

from functools import partial

import numpy as np

from runtime.kernels.parallel import Call


def padded_rows(images: np.ndarray, begin: int, left: int, out: np.ndarray) -> list[Call]:
    """Calls that fill ``out[n, rows, columns, c]`` with the rows of ``images`` from ``begin`` on and the columns from -``left``
    on; what lies outside of the images is zero. All of ``out`` is written every time, since nothing survives there."""
    height, width = images.shape[1:3]
    rows, columns = out.shape[1:3]
    low, high = min(max(begin, 0), height), max(min(begin + rows, height), 0)
    inside = slice(low - begin, max(low, high) - begin)
    right = min(columns, left + width)
    edges = [out[:, : inside.start], out[:, inside.stop :], out[:, inside, :left], out[:, inside, right:]]
    calls: list[Call] = [partial(np.copyto, edge, 0) for edge in edges if edge.size]
    target = out[:, inside, left:right]
    if target.size:
        calls.append(partial(np.copyto, target, images[:, low:high, : right - left]))
    return calls
