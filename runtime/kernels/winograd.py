"""Convolution by Winograd's minimal filtering (``toom_cook``) in two dimensions.

A tile of n x n pixels gives m x m outputs of an r x r filter by n x n multiplications instead of (m r)^2. Tiles d, the filter w
and the products are transformed by

    V = B^T d B      U = G w G^T      y = A^T [sum over channels of U * V] A

and the middle is n x n matrix products over the channels, one a position (a, b) in the tile. The filter's gradient is the
transposed scheme, G^T [sum over tiles of (B^T d B) * (A dy A^T)] G; the input's gradient is the convolution of the output's
gradient with the turned filter, which is w with its taps in reverse order, so that its transform needs only G's columns reversed.

The transforms are matrix products too, of a tiny matrix and a wide one: for rows of pixels, channels make it wide; for columns all
tiles that lie at the same column of any image do, because tiles are kept in the order (tile column, image, tile row). OpenBLAS has
kernels for small products that copy no operand, and so nearly reach the speed of its large ones; additions by numpy, a call a
coefficient, took two to three times as long.

All this is for stride 1. Larger strides are folded away first (``folding``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from runtime.kernels import blas, folding
from runtime.kernels.matmul import SMALL_PRODUCT, UNPACKED_CORES
from runtime.kernels.padding import padded_rows
from runtime.kernels.parallel import Call, fixed_shares, free_shares, sequence, split
from runtime.kernels.scratch import Scratch, aligned
from runtime.kernels.toom_cook import SIZES, Scheme
from runtime.kernels.window import Piece, Window, pieces

# Operands and results of a row of positions, for one piece of work; and a block of the filter's transform.
PIECE_BYTES = 2 << 20
FILTER_BYTES = 1 << 19
# Small products of fewer tiles than these are not worth it: every piece of work reads the whole of U.
_FEW_TILES = 48
# What transforming a number of a tile or of the filter costs, and copying one of a patch or of a folded image, in multiplications
# of a large product. Measured.
_TILE_COST, _FILTER_COST, _PATCH_COST, _FOLD_COST = 50, 75, 17, 85
# Below this share of the direct way's cost a scheme is taken.
_WORTH = 0.85


@functools.lru_cache(maxsize=1024)
def chosen(window: Window, batch: int, channels: int, outputs: int, itemsize: int) -> Scheme | None:
    """The scheme that costs least, or None where the direct way does or no scheme fits. Half precision would lose too much."""
    if itemsize < 4 or not (batch and channels and outputs):
        return None
    kernel = window.kernel[0] * window.kernel[1]
    direct = batch * window.out_height * window.out_width * kernel * channels * (outputs + _PATCH_COST)
    before = 0
    if folding.is_foldable(window):
        channels *= window.stride[0] * window.stride[1]
        window = folding.folded(window)
        before = batch * window.height * window.width * channels * _FOLD_COST
    taps = window.kernel[0]
    if window.kernel != (taps, taps) or window.stride != (1, 1) or max(window.padding) >= taps or taps < 2:
        return None
    best, least = None, _WORTH * direct - before
    for size in SIZES:
        scheme = Scheme(size - taps + 1, taps)
        if scheme.outputs < 2:
            continue
        tiles = batch * math.prod(_tiles(window, scheme))
        cost = size * size * ((tiles + _FILTER_COST) * channels * outputs + tiles * _TILE_COST * (channels + outputs))
        if cost < least:
            best, least = scheme, cost
    return best


def chosen_turned(window: Window, batch: int, channels: int, outputs: int, itemsize: int) -> Scheme | None:
    """``chosen`` for the gradient with respect to the input of a convolution with ``window``, from ``channels`` to ``outputs``."""
    if window.stride != (1, 1) or min(window.turned.padding) < 0:
        return None
    return chosen(window.turned, batch, outputs, channels, itemsize)


def _tiles(window: Window, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of tiles that cover an image; the last ones may stand over."""
    return -(-window.out_height // scheme.outputs), -(-window.out_width // scheme.outputs)


def _largest(cut: Sequence[Piece]) -> tuple[int, int]:
    """Most images and most tile rows of a piece: what memory is taken for."""
    images = max((piece.last - piece.first for piece in cut), default=0)
    return images, max((piece.bottom - piece.top for piece in cut), default=0)


class _Transformed:
    """Tiles of one thread's piece of ``images`` times a matrix on either side: ``matrix`` is [n, k], tiles are k x k pixels, and
    begin every ``step`` pixels."""

    def __init__(
        self, images: np.ndarray, padding: tuple[int, int], columns: int, step: int, matrix: np.ndarray,
        cut: Sequence[Piece], scratch: Scratch,
    ) -> None:  # fmt: skip
        self._images, self._padding, self._step, self._matrix = images, padding, step, matrix
        self.columns = columns
        sizes = self._sizes(images.shape[3], columns, step, matrix.shape, cut)
        self._padded, self._rows, self._planes = (scratch.take((size,), images.dtype) for size in sizes)

    @staticmethod
    def _sizes(
        channels: int, columns: int, step: int, matrix: tuple[int, ...], cut: Sequence[Piece]
    ) -> tuple[int, int, int]:
        (size, taken), (count, height) = matrix, _largest(cut)
        width = step * (columns - 1) + taken
        padded = count * (step * (height - 1) + taken) * width * channels
        return padded, size * width * count * height * channels, size * columns * count * height * channels

    @classmethod
    def nbytes(
        cls, channels: int, columns: int, step: int, matrix: tuple[int, int], itemsize: int, cut: Sequence[Piece]
    ) -> int:
        return sum(aligned(size * itemsize) for size in cls._sizes(channels, columns, step, matrix, cut))

    def load(self, piece: Piece) -> list[Call]:
        """Calls that fetch a piece's pixels."""
        above, left = self._padding
        pixels = self._pixels(piece.last - piece.first, piece.bottom - piece.top)
        return padded_rows(self._images[piece.first : piece.last], self._step * piece.top - above, left, pixels)

    def _pixels(self, count: int, height: int) -> np.ndarray:
        width = self._step * (self.columns - 1) + self._matrix.shape[1]
        shape = (count, self._step * (height - 1) + self._matrix.shape[1], width, self._images.shape[3])
        return self._padded[: math.prod(shape)].reshape(shape)

    def begin(self, count: int, height: int) -> tuple[Call, np.ndarray]:
        """The call that transforms a loaded piece of ``count`` images and ``height`` tile rows along its columns; its result."""
        step, (size, taken) = self._step, self._matrix.shape
        pixels = self._pixels(count, height)
        width, channels = pixels.shape[2:]
        image, row, column, channel = pixels.strides
        source = as_strided(
            pixels,
            (width, count, height, taken, channels),
            (column, image, step * row, row, channel),
            writeable=False,
        )
        begun = self._rows[: size * width * count * height * channels].reshape(size, width, -1)
        target = begun.reshape(size, width, count, height, channels).transpose(1, 2, 3, 0, 4)
        return partial(np.matmul, self._matrix, source, out=target), begun

    def row(self, begun: np.ndarray, a: int) -> tuple[Call, np.ndarray]:
        """The call that makes all positions (a, b) of what ``begin`` gave, and these, [n, tiles, channels]."""
        rows, (size, taken) = begun[a], self._matrix.shape
        length = rows.shape[1]
        along, one = rows.strides
        source = as_strided(rows, (self.columns, taken, length), (self._step * along, along, one), writeable=False)
        planes = self._planes[: size * self.columns * length].reshape(size, self.columns, length)
        call = partial(np.matmul, self._matrix, source, out=planes.transpose(1, 0, 2))
        return call, planes.reshape(size, -1, self._images.shape[3])


def _transform_filter(w: np.ndarray, g: np.ndarray, u: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``u[a, b, c, o]`` = G w G^T of ``w[i, j, c, o]``. ``memory``: ``_filter_transform_bytes``."""
    (size, taps), (channels, outputs) = g.shape, w.shape[2:]
    step = _filter_rows(size, channels, outputs, w.itemsize)
    scratch = Scratch(memory)
    spare = [scratch.take((size * taps * step * outputs,), w.dtype) for _ in range(threads)]
    items = []
    for start in range(0, channels, step):
        part, target = w[:, :, start : start + step], u[:, :, start : start + step]
        length = part.shape[2] * outputs
        row = []
        for room in spare:
            half = room[: size * taps * length].reshape(size, taps, length)
            down = partial(
                np.matmul, g, part.reshape(taps, taps, length).transpose(1, 0, 2), out=half.transpose(1, 0, 2)
            )
            across = partial(np.matmul, g, half, out=target.reshape(size, size, length))
            row.append(sequence([down, across]))
        items.append(row)
    return free_shares(items)


def _filter_rows(size: int, channels: int, outputs: int, itemsize: int) -> int:
    return max(1, min(channels, FILTER_BYTES // (size * size * outputs * itemsize)))


def _filter_transform_bytes(scheme: Scheme, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    # The same for a filter and the turned one, whose channels and outputs are each other's.
    block = max(channels, outputs, FILTER_BYTES // (scheme.size * scheme.size * itemsize))
    return threads * aligned(scheme.size * scheme.taps * block * itemsize)


def _is_small(channels: int, outputs: int, itemsize: int) -> bool:
    """Whether products of a fair number of tiles are small enough for the kernels that copy nothing (``matmul``)."""
    return itemsize == 4 and _FEW_TILES * channels * outputs <= SMALL_PRODUCT and blas.core() in UNPACKED_CORES


def _pieces(
    window: Window, scheme: Scheme, batch: int, channels: int, outputs: int, itemsize: int, threads: int,
    small: bool = False,
) -> list[Piece]:  # fmt: skip
    """Tile rows of images, as many as fit into PIECE_BYTES, or as make ``small`` products."""
    tiles = PIECE_BYTES // (scheme.size * (channels + outputs) * itemsize)
    if small:
        tiles = min(tiles, SMALL_PRODUCT // (channels * outputs))
    rows, columns = _tiles(window, scheme)
    return pieces(Window(rows, columns, (1, 1), (1, 1), (0, 0, 0, 0)), batch, 1, threads, max(1, tiles))


def _fold(
    window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int
) -> tuple[int, Window, int]:
    """Memory that folding takes, and the window and channels that are left to convolve."""
    if window.stride == (1, 1):
        return 0, window, channels
    own = folding.workspace(window, batch, channels, outputs, itemsize, threads)
    return own, folding.folded(window), channels * window.stride[0] * window.stride[1]


def forward_workspace(
    scheme: Scheme, window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int
) -> int:
    fold, window, channels = _fold(window, batch, channels, outputs, itemsize, threads)
    small = _is_small(channels, outputs, itemsize)
    cut = _pieces(window, scheme, batch, channels, outputs, itemsize, threads, small)
    size, columns = scheme.size, _tiles(window, scheme)[1]
    tiles = math.prod(_largest(cut)) * columns
    own = _Transformed.nbytes(channels, columns, scheme.outputs, (size, size), itemsize, cut)
    own += aligned(size * tiles * outputs * itemsize) + aligned(size * scheme.outputs * tiles * outputs * itemsize)
    transformed = aligned(size * size * channels * outputs * itemsize)
    # The filter is transformed before the threads need their own memory, so both lie at the same place.
    return (
        fold + transformed + max(threads * own, _filter_transform_bytes(scheme, channels, outputs, itemsize, threads))
    )


def compile_forward(
    scheme: Scheme, x: np.ndarray, w: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``y[n, oh, ow, o]``: convolution of ``x[n, h, w, c]`` with ``w[r, r, c, o]``. Memory: ``forward_workspace``."""
    if window.stride != (1, 1) and x.size and y.size:
        scratch = Scratch(memory)
        fold_filter, w = folding.fold_filter(w, window, scratch)
        fold_images, x = folding.fold_images(x, window, threads, scratch)
        inner = _compile(scheme, x, w, y, folding.folded(window), threads, scratch.rest(), turned=False)
        return sequence([fold_filter, fold_images, inner])
    return _compile(scheme, x, w, y, window, threads, memory, turned=False)


def input_workspace(
    scheme: Scheme, window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int
) -> int:
    turned = aligned(scheme.taps * scheme.taps * channels * outputs * itemsize)
    own = turned if _is_small(channels, outputs, itemsize) else 0
    return own + forward_workspace(scheme, window.turned, batch, outputs, channels, itemsize, threads)


def compile_input_gradient(
    scheme: Scheme, w: np.ndarray, dy: np.ndarray, dx: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dx[n, h, w, c]`` for a convolution with ``window``. Scheme: ``chosen_turned``; memory: ``input_workspace``."""
    taps, _, channels, outputs = w.shape
    if dx.size and dy.size and _is_small(channels, outputs, w.itemsize):
        # Small products of a transposed operand take nearly twice the time; turning so small a filter takes next to none.
        scratch = Scratch(memory)
        turned = scratch.take((taps, taps, outputs, channels), w.dtype)
        turn = partial(np.copyto, turned, w[::-1, ::-1].transpose(0, 1, 3, 2))
        return sequence([turn, compile_forward(scheme, dy, turned, dx, window.turned, threads, scratch.rest())])
    return _compile(scheme, dy, w, dx, window.turned, threads, memory, turned=True)


def _compile(
    scheme: Scheme, x: np.ndarray, w: np.ndarray, y: np.ndarray, window: Window, threads: int, memory: np.ndarray,
    turned: bool,
) -> Call:  # fmt: skip
    channels, outputs = x.shape[3], y.shape[3]
    if x.size == 0 or y.size == 0:
        return partial(y.fill, 0)
    size, columns = scheme.size, _tiles(window, scheme)[1]
    bt, g, at = scheme.matrices(x.dtype)
    scratch = Scratch(memory)
    u = scratch.take((size, size, *w.shape[2:]), w.dtype)
    if turned:
        g = np.ascontiguousarray(g[:, ::-1])
    transform = _transform_filter(w, g, u, threads, scratch.rest())
    matrices = u.transpose(0, 1, 3, 2) if turned else u
    small = _is_small(channels, outputs, x.itemsize)
    cut = _pieces(window, scheme, x.shape[0], channels, outputs, x.itemsize, threads, small)
    most = math.prod(_largest(cut)) * columns
    padding = (window.padding[0], window.padding[2])
    own = [
        _Products(
            _Transformed(x, padding, columns, scheme.outputs, bt, cut, scratch),
            scratch.take((size * most * outputs,), x.dtype),
            scratch.take((size * scheme.outputs * most * outputs,), x.dtype),
            matrices,
            at,
        )
        for _ in range(threads)
    ]
    items = []
    for piece in cut:
        row = []
        for products in own:
            middle, sums = products.of(piece.last - piece.first, piece.bottom - piece.top)
            gathered = _gather(sums, at, y[piece.first : piece.last], piece.top)
            row.append(sequence([*products.tiles.load(piece), middle, *gathered]))
        items.append(row)
    return sequence([transform, free_shares(items)])


class _Products:
    """What one thread does with a loaded piece: the same for all pieces of a shape, so made once for each."""

    def __init__(
        self, tiles: _Transformed, products: np.ndarray, sums: np.ndarray, matrices: np.ndarray, at: np.ndarray
    ) -> None:
        self.tiles = tiles
        self._products, self._sums, self._matrices, self._at = products, sums, matrices, at
        self._made: dict[tuple[int, int], tuple[Call, np.ndarray]] = {}

    def of(self, count: int, height: int) -> tuple[Call, np.ndarray]:
        """The call, and its results [a, j, tile column, image, tile row, o]: columns of products times A, for every row of them."""
        made = self._made.get((count, height))
        if made is not None:
            return made
        (m, size), outputs, columns = self._at.shape, self._matrices.shape[3], self.tiles.columns
        length = count * height * outputs
        products = self._products[: size * columns * length].reshape(size, columns, length)
        sums = self._sums[: m * products.size].reshape(size, m, columns, length)
        begin, begun = self.tiles.begin(count, height)
        calls = [begin]
        for a in range(size):
            call, planes = self.tiles.row(begun, a)
            calls += [
                call,
                partial(np.matmul, planes, self._matrices[a], out=products.reshape(size, -1, outputs)),
                partial(np.matmul, self._at, products.transpose(1, 0, 2), out=sums[a].transpose(1, 0, 2)),
            ]
        result = sequence(calls), sums.reshape(size, m, columns, count, height, outputs)
        self._made[count, height] = result
        return result


def _gather(sums: np.ndarray, at: np.ndarray, y: np.ndarray, top: int) -> list[Call]:
    """``y`` from ``sums[a, j, tile column, image, tile row, o]``: A^T over a; outputs that stand over are not computed."""
    outputs = len(at)
    columns, _, height = sums.shape[2:5]
    calls: list[Call] = []
    for rows, down in _whole_and_last(top, top + height, outputs, y.shape[1]):
        for across, right in _whole_and_last(0, columns, outputs, y.shape[2]):
            part = sums[:, :right, across, :, slice(rows.start - top, rows.stop - top)]
            tall, wide = rows.stop - rows.start, across.stop - across.start
            target = y[
                :,
                rows.start * outputs : rows.start * outputs + tall * down,
                across.start * outputs : across.start * outputs + wide * right,
            ].reshape(len(y), tall, down, wide, right, y.shape[3])
            calls.append(
                partial(np.matmul, at[:down], part.transpose(1, 2, 3, 4, 0, 5), out=target.transpose(4, 3, 0, 1, 2, 5))
            )
    return calls


def _whole_and_last(start: int, stop: int, step: int, limit: int) -> list[tuple[slice, int]]:
    """Tiles [start, stop) along one axis as those that lie within ``limit`` and one that stands over, with the outputs of each."""
    whole = min(stop, limit // step)
    parts = [(slice(start, whole), step), (slice(whole, stop), limit - whole * step)]
    return [(tiles, outputs) for tiles, outputs in parts if tiles.start < tiles.stop]


def filter_workspace(
    scheme: Scheme, window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int
) -> int:
    fold, window, channels = _fold(window, batch, channels, outputs, itemsize, threads)
    cut = _pieces(window, scheme, batch, channels, outputs, itemsize, threads)
    size, m, columns = scheme.size, scheme.outputs, _tiles(window, scheme)[1]
    own = _Transformed.nbytes(channels, columns, m, (size, size), itemsize, cut)
    own += _Transformed.nbytes(outputs, columns, m, (size, m), itemsize, cut)
    products = size * channels * outputs * itemsize
    collecting = _filter_transform_bytes(scheme, channels, outputs, itemsize, threads)
    return fold + threads * (own + aligned(products) + aligned(size * products)) + collecting


def compile_filter_gradient(
    scheme: Scheme, x: np.ndarray, dy: np.ndarray, dw: np.ndarray, window: Window, threads: int, memory: np.ndarray
) -> Call:
    """``dw[r, r, c, o]``. The same sum every time."""
    channels, outputs = x.shape[3], dy.shape[3]
    if x.size == 0 or dy.size == 0:
        return partial(dw.fill, 0)
    if window.stride != (1, 1):
        scratch = Scratch(memory)
        unfold, folded = folding.unfold_filter(dw, window, scratch)
        fold, x = folding.fold_images(x, window, threads, scratch)
        window, rest = folding.folded(window), scratch.rest()
        return sequence([fold, compile_filter_gradient(scheme, x, dy, folded, window, threads, rest), unfold])
    cut = _pieces(window, scheme, x.shape[0], channels, outputs, x.itemsize, threads)
    size, m, columns = scheme.size, scheme.outputs, _tiles(window, scheme)[1]
    bt, g, at = scheme.matrices(x.dtype)
    spread = np.ascontiguousarray(at.T)
    padding = (window.padding[0], window.padding[2])
    scratch = Scratch(memory)
    shares: list[list[Call]] = []
    totals: list[np.ndarray] = []
    for start, stop in split(len(cut), threads):
        tiles = _Transformed(x, padding, columns, m, bt, cut, scratch)
        gradients = _Transformed(dy, (0, 0), columns, m, spread, cut, scratch)
        product = scratch.take((size, channels, outputs), x.dtype)
        total = scratch.take((size, size, channels, outputs), x.dtype)
        share: list[Call] = []
        for position, piece in enumerate(cut[start:stop]):
            shape = (piece.last - piece.first, piece.bottom - piece.top)
            (begin, begun), (dbegin, dbegun) = tiles.begin(*shape), gradients.begin(*shape)
            share += [*tiles.load(piece), *gradients.load(piece), begin, dbegin]
            for a in range(size):
                call, planes = tiles.row(begun, a)
                also, dplanes = gradients.row(dbegun, a)
                into = product if position else total[a]
                share += [call, also, partial(np.matmul, planes.transpose(0, 2, 1), dplanes, out=into)]
                if position:
                    share.append(partial(np.add, total[a], product, out=total[a]))
        shares.append(share)
        totals.append(total)
    return sequence([fixed_shares(shares), _collect(totals, np.ascontiguousarray(g.T), dw, threads, scratch.rest())])


def _collect(totals: list[np.ndarray], gt: np.ndarray, dw: np.ndarray, threads: int, memory: np.ndarray) -> Call:
    """``dw`` = G^T (sum of ``totals``) G, which uses the totals up. ``memory``: ``_filter_transform_bytes``."""
    (taps, size), (channels, outputs) = gt.shape, dw.shape[2:]
    rows = _filter_rows(size, channels, outputs, dw.itemsize)
    scratch = Scratch(memory)
    spare = [scratch.take((size * taps * rows * outputs,), dw.dtype) for _ in range(threads)]
    items = []
    for start, stop in split(channels, max(threads, -(-channels // rows))):
        own = totals[0][:, :, start:stop]
        length = (stop - start) * outputs
        row = []
        for room in spare:
            half = room[: size * taps * length].reshape(size, taps, length)
            calls: list[Call] = [partial(np.add, own, other[:, :, start:stop], out=own) for other in totals[1:]]
            calls += [
                partial(np.matmul, gt, own.reshape(size, size, length), out=half),
                partial(
                    np.matmul,
                    gt,
                    half.transpose(1, 0, 2),
                    out=dw[:, :, start:stop].reshape(taps, taps, length).transpose(1, 0, 2),
                ),
            ]
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items)
