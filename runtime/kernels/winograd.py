"""3 x 3 convolution of stride 1 by Winograd's minimal filtering F(2 x 2, 3 x 3) (Lavin and Gray, 2015).

A tile of 4 x 4 pixels gives 2 x 2 outputs with 16 multiplications instead of 36. Tiles, filters and outputs are transformed by

    B^T = [1  0 -1  0]     G = [ 1   0   0 ]     A^T = [1  1  1  0]
          [0  1  1  0]         [1/2 1/2 1/2]           [0  1 -1 -1]
          [0 -1  1  0]         [1/2 -1/2 1/2]
          [0  1  0 -1]         [ 0   0   1 ]

on either side, and in between are 16 matrix products over the channels, one a position in the tile. The filter's gradient is the
transposed scheme: G^T [sum over tiles of (B^T d B) (A dy A^T)] G. The input's gradient is the convolution of the output's gradient
with the turned filter, whose transform is this filter's with the first and last rows and columns exchanged.

One position is dealt with at a time, for as many images as keep its operands in cache: nothing is ever as large as all 16.
Rounding errors are about twice those of the direct sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from runtime.kernels.padding import padded_rows
from runtime.kernels.parallel import Call, fixed_shares, free_shares, sequence, split
from runtime.kernels.scratch import Scratch, aligned
from runtime.kernels.window import Piece, Window, pieces

# Operands of one position's product, and of a block of the filter's transform.
PLANE_BYTES = 1 << 21
FILTER_BYTES = 1 << 19
# Transforms cost as channels grow, products as their square: 64 do not pay, 128 take a fifth off.
MIN_CHANNELS = 96
# The turned filter's transform has these positions of the filter's own.
_TURNED = (3, 1, 2, 0)


def applies(window: Window, channels: int, outputs: int) -> bool:
    """Whether this scheme is possible, and has clearly fewer multiplications than the direct one."""
    if window.kernel != (3, 3) or window.stride != (1, 1) or max(window.padding) > 2:
        return False
    grid = _Grid.of(window)
    saved = 16 * grid.rows * grid.columns / (9 * window.out_height * window.out_width)
    return min(channels, outputs) >= MIN_CHANNELS and saved < 0.75


@dataclass(frozen=True, slots=True)
class _Grid:
    """Tiles of 2 x 2 outputs that cover an image; the last ones may stand over."""

    rows: int
    columns: int

    @classmethod
    def of(cls, window: Window) -> _Grid:
        return cls(-(-window.out_height // 2), -(-window.out_width // 2))

    def pieces(self, batch: int, position_bytes: int, threads: int, limit: int) -> list[Piece]:
        """Tile rows of images, such that one position's operands take about ``limit``."""
        whole = Window(self.rows, self.columns, (1, 1), (1, 1), (0, 0, 0, 0))
        return pieces(whole, batch, position_bytes, threads, limit)

    def tiles(self, piece: Piece) -> int:
        return (piece.last - piece.first) * (piece.bottom - piece.top) * self.columns


def _combine(four: Sequence[np.ndarray], position: int, out: np.ndarray) -> Call:
    """Row ``position`` of B^T times four arrays."""
    match position:
        case 0:
            return partial(np.subtract, four[0], four[2], out=out)
        case 1:
            return partial(np.add, four[1], four[2], out=out)
        case 2:
            return partial(np.subtract, four[2], four[1], out=out)
        case _:
            return partial(np.subtract, four[1], four[3], out=out)


def _spread(two: Sequence[np.ndarray], position: int, out: np.ndarray) -> Call:
    """Row ``position`` of A times two arrays."""
    match position:
        case 0:
            return partial(np.copyto, out, two[0])
        case 1:
            return partial(np.add, two[0], two[1], out=out)
        case 2:
            return partial(np.subtract, two[0], two[1], out=out)
        case _:
            return partial(np.negative, two[1], out=out)


def _transform_filter(w: np.ndarray, u: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``u[a, b, c, o]`` = G w G^T of ``w[i, j, c, o]``. ``memory``: ``_filter_transform_bytes``."""
    channels, outputs = w.shape[2:]
    half = w.dtype.type(0.5)
    step = _filter_rows(channels, outputs, w.itemsize)
    scratch = Scratch(memory)
    spare = [scratch.take((4, 4, step, outputs), w.dtype) for _ in range(threads)]
    items = []
    for start in range(0, channels, step):
        stop = min(channels, start + step)
        source, target = w[:, :, start:stop], u[:, :, start:stop]
        row = []
        for room in spare:
            rows, more = room[:, :3, : stop - start], room[:, 3, : stop - start]
            calls = _apply_g([source[i] for i in range(3)], [rows[a] for a in range(4)], more[:3], half)
            calls += _apply_g([rows[:, j] for j in range(3)], [target[:, b] for b in range(4)], more, half)
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)


def _apply_g(g: list[np.ndarray], out: list[np.ndarray], spare: np.ndarray, half: np.generic) -> list[Call]:
    """``out`` = G times three arrays; ``spare`` has the shape of one."""
    return [
        partial(np.copyto, out[0], g[0]),
        partial(np.copyto, out[3], g[2]),
        partial(np.add, g[0], g[2], out=out[2]),
        partial(np.multiply, out[2], half, out=out[2]),
        partial(np.multiply, g[1], half, out=spare),
        partial(np.add, out[2], spare, out=out[1]),
        partial(np.subtract, out[2], spare, out=out[2]),
    ]


def _filter_rows(channels: int, outputs: int, itemsize: int) -> int:
    return max(1, min(channels, FILTER_BYTES // (16 * outputs * itemsize)))


def _filter_transform_bytes(channels: int, outputs: int, itemsize: int, threads: int) -> int:
    return threads * aligned(16 * _filter_rows(channels, outputs, itemsize) * outputs * itemsize)


class _Tiles:
    """Temporary memory of one thread for the tiles of the largest of ``cut``, and their transform B^T d B by positions."""

    def __init__(self, images: np.ndarray, window: Window, cut: Sequence[Piece], scratch: Scratch) -> None:
        self._images, self._window, self._grid = images, window, _Grid.of(window)
        padded, rows, plane = self._sizes(window, images.shape[3], cut)
        self._padded = scratch.take((padded,), images.dtype)
        self._rows = scratch.take((rows,), images.dtype)
        self._plane = scratch.take((plane,), images.dtype)

    @staticmethod
    def _sizes(window: Window, channels: int, cut: Sequence[Piece]) -> tuple[int, int, int]:
        grid, padded, rows, plane = _Grid.of(window), 0, 0, 0
        for piece in cut:
            count, height = piece.last - piece.first, piece.bottom - piece.top
            width = 2 * grid.columns + 2
            padded = max(padded, count * (2 * height + 2) * width * channels)
            rows = max(rows, count * height * width * channels)
            plane = max(plane, grid.tiles(piece) * channels)
        return padded, rows, plane

    @classmethod
    def nbytes(cls, window: Window, channels: int, itemsize: int, cut: Sequence[Piece]) -> int:
        return sum(aligned(size * itemsize) for size in cls._sizes(window, channels, cut))

    def load(self, piece: Piece) -> tuple[np.ndarray, list[Call]]:
        """The piece's pixels with what its last tiles stand over, and the calls that put them there."""
        window, channels = self._window, self._images.shape[3]
        height, width = 2 * (piece.bottom - piece.top) + 2, 2 * self._grid.columns + 2
        shape = (piece.last - piece.first, height, width, channels)
        padded = self._padded[: int(np.prod(shape))].reshape(shape)
        begin = 2 * piece.top - window.padding[0]
        return padded, padded_rows(self._images[piece.first : piece.last], begin, window.padding[2], padded)

    def row(self, padded: np.ndarray, a: int) -> tuple[np.ndarray, Call]:
        """B^T along the rows, for position ``a``."""
        count, height, width, channels = padded.shape
        tiles = height // 2 - 1
        rows = self._rows[: count * tiles * width * channels].reshape(count, tiles, width, channels)
        return rows, _combine([padded[:, i : i + 2 * tiles : 2] for i in range(4)], a, rows)

    def position(self, rows: np.ndarray, b: int) -> tuple[np.ndarray, Call]:
        """B along the columns of ``rows``, for position ``b``, as a matrix [tiles, channels]."""
        count, height, _, channels = rows.shape
        tiles = self._grid.columns
        plane = self._plane[: count * height * tiles * channels].reshape(count, height, tiles, channels)
        call = _combine([rows[:, :, j : j + 2 * tiles : 2] for j in range(4)], b, plane)
        return plane.reshape(-1, channels), call


def forward_workspace(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    cut = _forward_pieces(window, batch, channels, outputs, itemsize, threads)
    plane = max((_Grid.of(window).tiles(piece) for piece in cut), default=0) * outputs
    own = _Tiles.nbytes(window, channels, itemsize, cut) + aligned(4 * plane * itemsize) + aligned(plane * itemsize)
    transformed = aligned(16 * channels * outputs * itemsize)
    # The filter is transformed before the threads need their own memory, so both lie at the same place.
    return transformed + max(threads * own, _filter_transform_bytes(channels, outputs, itemsize, threads))


def _forward_pieces(
    window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int
) -> list[Piece]:
    return _Grid.of(window).pieces(batch, (channels + outputs) * itemsize, threads, PLANE_BYTES)


def compile_forward(
    x: np.ndarray, w: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``y[n, oh, ow, o]``: convolution of ``x[n, h, w, c]`` with ``w[3, 3, c, o]``."""
    return _compile(x, w, y, window, threads, memory, turned=False)


def compile_input_gradient(
    w: np.ndarray, dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dx[n, h, w, c]`` for a convolution with ``window``. Memory: ``forward_workspace`` of ``window.turned``, from o to c."""
    return _compile(dy, w, dx, window.turned, threads, memory, turned=True)


def _compile(
    x: np.ndarray, w: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray, turned: bool
) -> Call:
    channels, outputs = x.shape[3], y.shape[3]
    if x.size == 0 or y.size == 0:
        return partial(y.fill, 0)
    scratch = Scratch(memory)
    u = scratch.take((4, 4, *w.shape[2:]), w.dtype)
    transform = _transform_filter(w, u, threads, scratch.rest())
    cut = _forward_pieces(window, x.shape[0], channels, outputs, x.itemsize, threads)
    largest = max(_Grid.of(window).tiles(piece) for piece in cut) * outputs
    own = [
        (
            _Tiles(x, window, cut, scratch),
            scratch.take((4, largest), x.dtype),
            scratch.take((largest,), x.dtype),
        )
        for _ in range(threads)
    ]

    def matrix(a: int, b: int) -> np.ndarray:
        return u[_TURNED[a], _TURNED[b]].T if turned else u[a, b]

    items = []
    for piece in cut:
        row = []
        for tiles, products, spare in own:
            padded, calls = tiles.load(piece)
            for a in range(4):
                rows, call = tiles.row(padded, a)
                calls.append(call)
                results = []
                for b in range(4):
                    plane, call = tiles.position(rows, b)
                    result = products[b, : len(plane) * outputs].reshape(-1, outputs)
                    calls += [call, partial(np.matmul, plane, matrix(a, b), out=result)]
                    results.append(result)
                calls += _gather(results, a, y, window, piece, spare[: results[0].size])
            row.append(sequence(calls))
        items.append(row)
    return sequence([transform, free_shares(items)])


def _gather(
    products: list[np.ndarray], a: int, y: np.ndarray, window: Window, piece: Piece, spare: np.ndarray
) -> list[Call]:
    """Add A^T m A's terms of row ``a`` to the outputs; ``products`` are its four columns and are used up."""
    grid = _Grid.of(window)
    shape = (piece.last - piece.first, piece.bottom - piece.top, grid.columns, y.shape[3])
    first, second, third, fourth = products
    even = spare.reshape(first.shape)
    calls: list[Call] = [
        partial(np.add, first, second, out=even),
        partial(np.add, even, third, out=even),
        partial(np.subtract, second, third, out=second),
        partial(np.subtract, second, fourth, out=second),
    ]
    for j, column in enumerate((even, second)):
        values = column.reshape(shape)
        for i in range(2):
            if (i, a) in ((0, 3), (1, 0)):
                continue  # A^T is zero there
            rows = y[piece.first : piece.last, 2 * piece.top + i : 2 * piece.bottom : 2, j::2]
            part = values[:, : rows.shape[1], : rows.shape[2]]
            if rows.size == 0:
                continue
            if a == i:  # the first term of this output
                calls.append(partial(np.copyto, rows, part))
            else:
                calls.append(partial(np.subtract if i and a > 1 else np.add, rows, part, out=rows))
    return calls


def filter_workspace(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    cut = _filter_pieces(window, batch, channels, outputs, itemsize, threads)
    grid = _Grid.of(window)
    padded = max(((piece.last - piece.first) * (piece.bottom - piece.top) for piece in cut), default=0)
    dy = padded * 4 * grid.columns * outputs
    plane = max((grid.tiles(piece) for piece in cut), default=0) * outputs
    own = _Tiles.nbytes(window, channels, itemsize, cut)
    own += sum(aligned(size * itemsize) for size in (dy, dy // 2, plane, channels * outputs))
    return threads * (own + aligned(16 * channels * outputs * itemsize))


def _filter_pieces(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> list[Piece]:
    return _Grid.of(window).pieces(batch, (channels + outputs) * itemsize, threads, PLANE_BYTES)


def compile_filter_gradient(
    x: np.ndarray, dy: np.ndarray, dw: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dw[3, 3, c, o]``. The same sum every time."""
    channels, outputs = x.shape[3], dy.shape[3]
    if x.size == 0 or dy.size == 0:
        return partial(dw.fill, 0)
    cut = _filter_pieces(window, x.shape[0], channels, outputs, x.itemsize, threads)
    grid = _Grid.of(window)
    padded_size = (
        max((piece.last - piece.first) * (piece.bottom - piece.top) for piece in cut) * 4 * grid.columns * outputs
    )
    plane_size = max(grid.tiles(piece) for piece in cut) * outputs
    scratch = Scratch(memory)
    shares: list[list[Call]] = []
    totals: list[np.ndarray] = []
    for start, stop in split(len(cut), threads):
        tiles = _Tiles(x, window, cut, scratch)
        gradients = scratch.take((padded_size,), x.dtype)
        row_room = scratch.take((padded_size // 2,), x.dtype)
        plane_room = scratch.take((plane_size,), x.dtype)
        product = scratch.take((channels, outputs), x.dtype)
        total = scratch.take((4, 4, channels, outputs), x.dtype)
        share: list[Call] = []
        for position, piece in enumerate(cut[start:stop]):
            padded, calls = tiles.load(piece)
            share += calls
            count, height = piece.last - piece.first, piece.bottom - piece.top
            shape = (count, 2 * height, 2 * grid.columns, outputs)
            dpadded = gradients[: int(np.prod(shape))].reshape(shape)
            share += padded_rows(dy[piece.first : piece.last], 2 * piece.top, 0, dpadded)
            drows = row_room[: dpadded.size // 2].reshape(count, height, 2 * grid.columns, outputs)
            dplane = plane_room[: drows.size // 2].reshape(count, height, grid.columns, outputs)
            for a in range(4):
                rows, call = tiles.row(padded, a)
                share += [call, _spread([dpadded[:, 0::2], dpadded[:, 1::2]], a, drows)]
                for b in range(4):
                    plane, call = tiles.position(rows, b)
                    share += [call, _spread([drows[:, :, 0::2], drows[:, :, 1::2]], b, dplane)]
                    into = product if position else total[a, b]
                    share.append(partial(np.matmul, plane.T, dplane.reshape(-1, outputs), out=into))
                    if position:
                        share.append(partial(np.add, total[a, b], product, out=total[a, b]))
        shares.append(share)
        totals.append(total)
    return sequence([fixed_shares(shares), _collect(totals, dw, threads)])


def _collect(totals: list[np.ndarray], dw: np.ndarray, threads: int) -> Call:
    """``dw`` = G^T (sum of ``totals``) G, which uses the totals up."""
    channels, outputs = dw.shape[2:]
    half = dw.dtype.type(0.5)
    items = []
    for start, stop in split(channels, max(threads, -(-channels // _filter_rows(channels, outputs, dw.itemsize)))):
        own = totals[0][:, :, start:stop]
        calls: list[Call] = [partial(np.add, own, other[:, :, start:stop], out=own) for other in totals[1:]]
        calls += _apply_gt([own[a] for a in range(4)], half)
        calls += _apply_gt([own[:3, b] for b in range(4)], half)
        calls.append(partial(np.copyto, dw[:, :, start:stop], own[:3, :3]))
        items.append([sequence(calls)] * threads)
    return free_shares(items)


def _apply_gt(four: list[np.ndarray], half: np.generic) -> list[Call]:
    """G^T times four arrays, into the first three; the last is used up."""
    first, second, third, fourth = four
    return [
        partial(np.multiply, second, half, out=second),
        partial(np.multiply, third, half, out=third),
        partial(np.add, first, second, out=first),
        partial(np.add, first, third, out=first),
        partial(np.add, fourth, second, out=fourth),
        partial(np.add, fourth, third, out=fourth),
        partial(np.subtract, second, third, out=second),
        partial(np.copyto, third, fourth),
    ]
