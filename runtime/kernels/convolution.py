"""Convolution of NHWC images as matrix products over patches.

A patch matrix ("columns") has one row an output position and KH x KW x C columns. It is made for a few images at a time, so
that it is still in cache when the product reads it, in temporary memory that every call uses again; the backward pass
makes it anew rather than keep it. With (KW, C) merged the copy moves runs of KW x C contiguous numbers.

The gradient with respect to the input is, for stride 1, again a convolution: of the output's gradient with the turned
filter. Where that would copy more than it saves, and for larger strides, it is the transposed product followed by KH x KW
shifted additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from runtime.kernels.matmul import compile_matmul
from runtime.kernels.padding import padded_rows
from runtime.kernels.parallel import Call, fixed_shares, free_shares, sequence, split
from runtime.kernels.scratch import Scratch, aligned
from runtime.kernels.window import Piece, Window, groups, pieces

# Columns of one piece of work. Larger pieces make better products, smaller ones stay in cache; measured on AlexNet.
COLUMN_BYTES = 6 << 20


class _Patches:
    """Temporary memory of one thread for the columns of the largest of ``pieces``, and the copies that fill it."""

    def __init__(self, images: np.ndarray, window: Window, pieces: Sequence[Piece], scratch: Scratch) -> None:
        self._images, self._window = images, window
        if not window.trivial:
            padded, columns = self._sizes(window, images.shape[3], pieces)
            self._padded = scratch.take((padded,), images.dtype)
            self._columns = scratch.take((columns,), images.dtype)

    @staticmethod
    def _sizes(window: Window, channels: int, pieces: Sequence[Piece]) -> tuple[int, int]:
        (kh, kw), stride = window.kernel, window.stride[0]
        width = window.width + window.padding[2] + window.padding[3]
        padded = columns = 0
        for first, last, top, bottom in pieces:
            count, rows = last - first, bottom - top
            if window.padded:
                padded = max(padded, count * ((rows - 1) * stride + kh) * width * channels)
            columns = max(columns, count * rows * window.out_width * kh * kw * channels)
        return padded, columns

    @classmethod
    def nbytes(cls, window: Window, channels: int, itemsize: int, pieces: Sequence[Piece]) -> int:
        if window.trivial:
            return 0
        return sum(aligned(size * itemsize) for size in cls._sizes(window, channels, pieces))

    def of(self, piece: Piece) -> tuple[list[Call], np.ndarray]:
        """The calls that make the piece's columns, and the columns as a matrix."""
        images, window = self._images, self._window
        first, last, top, bottom = piece
        count, channels = last - first, images.shape[3]
        if window.trivial:
            return [], images[first:last, top:bottom].reshape(-1, channels)
        (kh, kw), (sh, sw) = window.kernel, window.stride
        begin, end = top * sh - window.padding[0], (bottom - 1) * sh - window.padding[0] + kh
        calls: list[Call] = []
        if window.padded:
            source, calls = self._pad(piece, begin, end)
        else:
            source = images[first:last, begin:end]
        n, h, w, c = source.strides
        patches = as_strided(
            source,
            (count, bottom - top, window.out_width, kh, kw * channels),
            (n, h * sh, w * sw, h, c),
            writeable=False,
        )
        columns = self._columns[: patches.size].reshape(patches.shape)
        calls.append(partial(np.copyto, columns, patches))
        return calls, columns.reshape(-1, kh * kw * channels)

    def _pad(self, piece: Piece, begin: int, end: int) -> tuple[np.ndarray, list[Call]]:
        """Input rows [begin, end) with zeros around, rows that lie outside of the image included."""
        window = self._window
        left, right = window.padding[2:]
        shape = (piece.last - piece.first, end - begin, left + window.width + right, self._images.shape[3])
        padded = self._padded[: int(np.prod(shape))].reshape(shape)
        return padded, padded_rows(self._images[piece.first : piece.last], begin, left, padded)


def _patch_bytes(window: Window, channels: int, itemsize: int) -> int:
    return window.kernel[0] * window.kernel[1] * channels * itemsize


def _pieces(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> list[Piece]:
    return pieces(window, batch, _patch_bytes(window, channels, itemsize), threads, COLUMN_BYTES)


def _groups(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> list[list[Piece]]:
    return groups(window, batch, _patch_bytes(window, channels, itemsize), threads, COLUMN_BYTES)


def forward_workspace(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> int:
    cut = _pieces(window, batch, channels, itemsize, threads)
    return threads * _Patches.nbytes(window, channels, itemsize, cut)


def compile_forward(
    x: np.ndarray, matrix: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``y[n, oh, ow, o]`` = patches of ``x[n, h, w, c]`` times ``matrix[kh * kw * c, o]`` (which may be a transposed view)."""
    batch, channels, outputs = x.shape[0], x.shape[3], y.shape[3]
    if x.size == 0 or y.size == 0:
        return partial(y.fill, 0)
    if window.trivial:
        return compile_matmul(x.reshape(-1, channels), matrix, y.reshape(-1, outputs), threads)
    cut = _pieces(window, batch, channels, x.itemsize, threads)
    scratch = Scratch(memory)
    patches = [_Patches(x, window, cut, scratch) for _ in range(threads)]
    items = []
    for piece in cut:
        target = y[piece.first : piece.last, piece.top : piece.bottom].reshape(-1, outputs)
        row = []
        for own in patches:
            calls, columns = own.of(piece)
            row.append(sequence([*calls, partial(np.matmul, columns, matrix, out=target)]))
        items.append(row)
    return free_shares(items)


def filter_workspace(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    patch = _patch_bytes(window, channels, itemsize)
    cut = _pieces(window, batch, channels, itemsize, threads)
    filters = 2 * threads - 1  # a product and a sum each, except that thread 0 sums in the output
    return threads * _Patches.nbytes(window, channels, itemsize, cut) + filters * aligned(patch * outputs)


def compile_filter_gradient(
    x: np.ndarray, dy: np.ndarray, dw: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dw[kh, kw, c, o]``: the sum over images and positions of patch times gradient. The same sum every time."""
    batch, channels, outputs = x.shape[0], x.shape[3], dy.shape[3]
    if x.size == 0 or dy.size == 0 or dw.size == 0:
        return partial(dw.fill, 0)
    result = dw.reshape(-1, outputs)
    cut = _pieces(window, batch, channels, x.itemsize, threads)
    scratch = Scratch(memory)
    shares: list[list[Call]] = []
    sums: list[Call] = []
    for thread, (start, stop) in enumerate(split(len(cut), threads)):
        patches = _Patches(x, window, cut, scratch)
        product = scratch.take(result.shape, dw.dtype)
        total = result
        if thread:
            total = scratch.take(result.shape, dw.dtype)
            sums.append(partial(np.add, result, total, out=result))
        share: list[Call] = []
        for position, piece in enumerate(cut[start:stop]):
            calls, columns = patches.of(piece)
            gradient = dy[piece.first : piece.last, piece.top : piece.bottom].reshape(-1, outputs)
            share.extend(calls)
            share.append(partial(np.matmul, columns.T, gradient, out=product if position else total))
            if position:
                share.append(partial(np.add, total, product, out=total))
        shares.append(share)
    return sequence([fixed_shares(shares), *sums])


def _is_convolution(window: Window, channels: int, outputs: int) -> bool:
    """Whether the turned convolution is possible, and has no more columns to copy than the other way has to add."""
    return window.stride == (1, 1) and min(window.turned.padding) >= 0 and outputs <= channels


def input_workspace(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    if _is_convolution(window, channels, outputs):
        turned = aligned(_patch_bytes(window, channels, itemsize) * outputs)
        return turned + forward_workspace(window.turned, batch, outputs, itemsize, threads)
    rows = _scatter_rows(window, batch, channels, itemsize, threads)
    return threads * aligned(rows * window.out_width * _patch_bytes(window, channels, itemsize))


def compile_input_gradient(
    w: np.ndarray, dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dx[n, h, w, c]``: each position's gradient times the filter ``w[kh, kw, c, o]``, added where its patch lies."""
    kh, kw, channels, outputs = w.shape
    if dx.size == 0 or dy.size == 0:
        return partial(dx.fill, 0)
    if _is_convolution(window, channels, outputs):
        scratch = Scratch(memory)
        turned = scratch.take((channels, kh, kw, outputs), w.dtype)
        turn = partial(np.copyto, turned, w[::-1, ::-1].transpose(2, 0, 1, 3))
        matrix = turned.reshape(channels, -1).T
        return sequence([turn, compile_forward(dy, matrix, dx, window.turned, threads, scratch.rest())])
    return _compile_scattered(w, dy, dx, window, threads, memory)


def _scatter_rows(window: Window, batch: int, channels: int, itemsize: int, threads: int) -> int:
    cut = _groups(window, batch, channels, itemsize, threads)
    return max(((last - first) * (bottom - top) for group in cut for first, last, top, bottom in group), default=0)


def _compile_scattered(
    w: np.ndarray, dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    kh, kw, channels, outputs = w.shape
    batch = dx.shape[0]
    matrix = w.reshape(-1, outputs).T
    room = _scatter_rows(window, batch, channels, dx.itemsize, threads) * window.out_width * matrix.shape[1]
    scratch = Scratch(memory)
    buffers = [scratch.take((room,), dx.dtype) for _ in range(threads)]
    items = []
    for group in _groups(window, batch, channels, dx.itemsize, threads):
        images = dx[group[0].first : group[0].last]
        row = []
        for buffer in buffers:
            calls: list[Call] = [partial(images.fill, 0)]
            for first, last, top, bottom in group:
                gradient = dy[first:last, top:bottom]
                shape = (*gradient.shape[:3], kh, kw, channels)
                columns = buffer[: int(np.prod(shape))].reshape(shape)
                product = columns.reshape(-1, kh * kw * channels)
                calls.append(partial(np.matmul, gradient.reshape(-1, outputs), matrix, out=product))
                for i in range(kh):
                    rows, into_rows = window.rows(i, top, bottom)
                    rows = slice(rows.start - top, rows.stop - top)
                    for j in range(kw):
                        cols, into_cols = window.columns(j)
                        target = images[:, into_rows, into_cols]
                        if target.size:
                            calls.append(partial(np.add, target, columns[:, rows, cols, i, j], out=target))
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)
