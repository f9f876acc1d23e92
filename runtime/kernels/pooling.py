"""Max and average pooling of NHWC images, rows first and then columns.

A 3 x 3 window takes 2 + 2 comparisons that way. No index of the winner is kept: the gradient compares again and gives all
of a window's gradient to one of its maxima, the first column and in it the first row. Padding never wins and never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from runtime.kernels.parallel import Call, free_shares, sequence
from runtime.kernels.scratch import Scratch, aligned
from runtime.kernels.window import Piece, Window, groups, pieces

# Input of one piece of work: with what is made of it, it stays in a core's own cache.
PIECE_BYTES = 1 << 19

Region = tuple[slice, ...]


def _position_bytes(window: Window, channels: int, itemsize: int) -> int:
    return window.stride[0] * window.stride[1] * channels * itemsize


def _forward_pieces(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> list[Piece]:
    return pieces(window, batch, _position_bytes(window, channels, itemsize), threads, PIECE_BYTES)


def _backward_groups(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> list[list[Piece]]:
    return groups(window, batch, _position_bytes(window, channels, itemsize), threads, PIECE_BYTES)


def _reduce(operation: Any, start: float, target: np.ndarray, parts: Sequence[tuple[Region, np.ndarray]]) -> list[Call]:
    """``target`` = ``operation`` over the parts, each of which covers a region of it; ``start`` where nothing covers it."""
    whole = all(part.shape == target.shape for _, part in parts)
    if whole and len(parts) == 1:
        return [partial(np.copyto, target, parts[0][1])]
    if whole:
        calls: list[Call] = [partial(operation, parts[0][1], parts[1][1], out=target)]
        parts = parts[2:]
    else:
        calls = [partial(target.fill, start)]
    for region, part in parts:
        into = target[region]
        if into.size:
            calls.append(partial(operation, into, part, out=into))
    return calls


def _row_parts(x: np.ndarray, window: Window, piece: Piece) -> list[tuple[Region, np.ndarray]]:
    images = x[piece.first : piece.last]
    parts: list[tuple[Region, np.ndarray]] = []
    for offset in range(window.kernel[0]):
        out, into = window.rows(offset, piece.top, piece.bottom)
        parts.append(((slice(None), slice(out.start - piece.top, out.stop - piece.top)), images[:, into]))
    return parts


def _column_parts(rows: np.ndarray, window: Window) -> list[tuple[Region, np.ndarray]]:
    spans = (window.columns(offset) for offset in range(window.kernel[1]))
    return [((slice(None), slice(None), out), rows[:, :, into]) for out, into in spans]


def _largest_rows(window: Window, channels: int, cut: Sequence[Piece]) -> int:
    """Elements of the largest piece after its rows are reduced."""
    return max((last - first) * (bottom - top) for first, last, top, bottom in cut) * window.width * channels


def _forward(
    operation: Any,
    start: float,
    x: np.ndarray,
    y: np.ndarray,
    window: Window,
    threads: int,
    memory: np.ndarray,
    scale: np.ndarray | None,
) -> Call:
    batch, channels = x.shape[0], x.shape[3]
    if y.size == 0:
        return sequence(())
    cut = _forward_pieces(window, batch, channels, x.itemsize, threads)
    scratch = Scratch(memory)
    buffers = [scratch.take((_largest_rows(window, channels, cut),), x.dtype) for _ in range(threads)]
    items = []
    for piece in cut:
        target = y[piece.first : piece.last, piece.top : piece.bottom]
        shape = (target.shape[0], target.shape[1], window.width, channels)
        row = []
        for buffer in buffers:
            rows = buffer[: int(np.prod(shape))].reshape(shape)
            calls = _reduce(operation, start, rows, _row_parts(x, window, piece))
            calls += _reduce(operation, start, target, _column_parts(rows, window))
            if scale is not None:
                calls.append(partial(np.multiply, target, scale[piece.top : piece.bottom], out=target))
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)


def forward_workspace(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> int:
    if batch * channels == 0:
        return 0
    cut = _forward_pieces(window, batch, channels, itemsize, threads)
    return threads * aligned(_largest_rows(window, channels, cut) * itemsize)


def compile_max(x: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray) -> Call:
    """``y[n, oh, ow, c]``: the largest of each window of ``x[n, h, w, c]``."""
    return _forward(np.maximum, -np.inf, x, y, window, threads, memory, None)


def compile_average(x: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray) -> Call:
    """``y[n, oh, ow, c]``: the mean of each window of ``x[n, h, w, c]``, over what is inside of the image."""
    return _forward(np.add, 0.0, x, y, window, threads, memory, _inverse_counts(window, x.dtype))


def _inverse_counts(window: Window, dtype: np.dtype) -> np.ndarray:
    """[oh, ow, 1]: one over how many pixels of the image each window holds; 0 for a window that lies in the padding."""
    rows, columns = np.zeros(window.out_height), np.zeros(window.out_width)
    for offset in range(window.kernel[0]):
        rows[window.rows(offset)[0]] += 1
    for offset in range(window.kernel[1]):
        columns[window.columns(offset)[0]] += 1
    counts = np.outer(rows, columns)
    inverse = np.divide(1.0, counts, out=np.zeros_like(counts), where=counts > 0)
    return inverse.astype(dtype)[:, :, None]


class _Router:
    """Temporary memory of one thread for giving a gradient to the first of several parts that equals the maximum."""

    def __init__(self, size: int, dtype: np.dtype, scratch: Scratch) -> None:
        self._left = scratch.take((size,), dtype)
        self._hit = scratch.take((size,), dtype)
        self._wins = scratch.take((size,), np.dtype(np.bool_))
        self._bits = np.dtype(f"i{dtype.itemsize}")

    @staticmethod
    def nbytes(size: int, itemsize: int) -> int:
        return 2 * aligned(size * itemsize) + aligned(size)

    def route(
        self,
        parts: Sequence[tuple[Region, np.ndarray]],
        best: np.ndarray,
        gradient: np.ndarray,
        targets: list[np.ndarray],
    ) -> list[Call]:
        """Add to each of ``targets`` the gradient of the windows that its part wins.

        Masks are bit patterns: a product with 0 or 1 would have to convert them to numbers first.
        """
        left = self._left[: best.size].reshape(best.shape)
        calls: list[Call] = [partial(np.copyto, left, gradient)]
        for (region, part), target in zip(parts[:-1], targets[:-1]):
            if part.size == 0:
                continue
            rest = left[region]
            hit, wins = self._hit[: rest.size].reshape(rest.shape), self._wins[: rest.size].reshape(rest.shape)
            mask, hit_bits, rest_bits = wins.view(np.int8), hit.view(self._bits), rest.view(self._bits)
            calls += [
                partial(np.greater_equal, part, best[region], out=wins),
                partial(np.negative, mask, out=mask),  # true becomes all ones
                partial(np.bitwise_and, rest_bits, mask, out=hit_bits),
                partial(np.bitwise_xor, rest_bits, hit_bits, out=rest_bits),
                partial(np.add, target, hit, out=target),
            ]
        (region, part), target = parts[-1], targets[-1]
        if part.size:
            calls.append(partial(np.add, target, left[region], out=target))
        return calls


def max_gradient_workspace(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> int:
    if batch * channels == 0:
        return 0
    cut = [piece for group in _backward_groups(window, batch, channels, itemsize, threads) for piece in group]
    rows = _largest_rows(window, channels, cut)
    routed = max(rows, rows // window.width * window.out_width)
    return threads * (2 * aligned(rows * itemsize) + _Router.nbytes(routed, itemsize))


def compile_max_gradient(
    x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dx``: the gradient ``dy`` of every window at the place of its maximum."""
    batch, channels = x.shape[0], x.shape[3]
    if y.size == 0:
        return partial(dx.fill, 0)
    cut = _backward_groups(window, batch, channels, x.itemsize, threads)
    room = _largest_rows(window, channels, [piece for group in cut for piece in group])
    routed = max(room, room // window.width * window.out_width)
    scratch = Scratch(memory)
    own = [
        (scratch.take((room,), x.dtype), scratch.take((room,), x.dtype), _Router(routed, x.dtype, scratch))
        for _ in range(threads)
    ]
    items = []
    for group in cut:
        images = dx[group[0].first : group[0].last]
        row = []
        for maxima, gradients, router in own:
            calls: list[Call] = [partial(images.fill, 0)]
            for piece in group:
                where = (slice(piece.first, piece.last), slice(piece.top, piece.bottom))
                shape = (piece.last - piece.first, piece.bottom - piece.top, window.width, channels)
                rows, drows = (buffer[: int(np.prod(shape))].reshape(shape) for buffer in (maxima, gradients))
                row_parts, column_parts = _row_parts(x, window, piece), _column_parts(rows, window)
                calls += _reduce(np.maximum, -np.inf, rows, row_parts)
                calls.append(partial(drows.fill, 0))
                dcolumns = [part for _, part in _column_parts(drows, window)]
                calls += router.route(column_parts, y[where], dy[where], dcolumns)
                calls += router.route(row_parts, rows, drows, [part for _, part in _row_parts(dx, window, piece)])
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)


def average_gradient_workspace(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> int:
    if batch * channels == 0:
        return 0
    cut = [piece for group in _backward_groups(window, batch, channels, itemsize, threads) for piece in group]
    rows = _largest_rows(window, channels, cut)
    return threads * (aligned(rows * itemsize) + aligned(rows // window.width * window.out_width * itemsize))


def compile_average_gradient(dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray) -> Call:
    """``dx``: every window's gradient, shared equally by its pixels."""
    batch, channels = dx.shape[0], dx.shape[3]
    if dy.size == 0:
        return partial(dx.fill, 0)
    cut = _backward_groups(window, batch, channels, dx.itemsize, threads)
    room = _largest_rows(window, channels, [piece for group in cut for piece in group])
    scratch = Scratch(memory)
    scale = _inverse_counts(window, dx.dtype)
    own = [
        (scratch.take((room,), dx.dtype), scratch.take((room // window.width * window.out_width,), dx.dtype))
        for _ in range(threads)
    ]
    items = []
    for group in cut:
        images = dx[group[0].first : group[0].last]
        row = []
        for row_buffer, share_buffer in own:
            calls: list[Call] = [partial(images.fill, 0)]
            for piece in group:
                gradient = dy[piece.first : piece.last, piece.top : piece.bottom]
                share = share_buffer[: gradient.size].reshape(gradient.shape)
                shape = (*gradient.shape[:2], window.width, channels)
                drows = row_buffer[: int(np.prod(shape))].reshape(shape)
                calls.append(partial(np.multiply, gradient, scale[piece.top : piece.bottom], out=share))
                calls.append(partial(drows.fill, 0))
                for region, part in _column_parts(drows, window):
                    if part.size:
                        calls.append(partial(np.add, part, share[region], out=part))
                for region, part in _row_parts(dx, window, piece):
                    if part.size:
                        calls.append(partial(np.add, part, drows[region], out=part))
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)
