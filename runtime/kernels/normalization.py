"""Batch normalisation over all axes but the last, and local response normalisation over neighbouring channels."""

from __future__ import annotations

from functools import partial

import numpy as np

from runtime.kernels.elementwise import over_blocks
from runtime.kernels.parallel import Call, sequence
from runtime.kernels.scratch import Scratch, aligned

# Rows of one block; the block and its centred copy stay in a core's own cache.
BLOCK_BYTES = 1 << 18


def _rows(rows: int, channels: int, itemsize: int) -> int:
    return max(1, min(rows, BLOCK_BYTES // max(1, channels * itemsize)))


def batch_workspace(rows: int, channels: int, itemsize: int) -> int:
    return aligned(_rows(rows, channels, itemsize) * channels * itemsize)


def compile_batch_statistics(x: np.ndarray, mean: np.ndarray, variance: np.ndarray, memory: np.ndarray) -> Call:
    """``mean[c]`` and ``variance[c]`` (divided by the number of rows) of ``x[r, c]``, the second from centred values."""
    rows, channels = x.shape
    step = _rows(rows, channels, x.itemsize)
    centred = Scratch(memory).take((step, channels), x.dtype)
    ones, part = np.ones(rows, x.dtype), np.empty(channels, x.dtype)
    scale = x.dtype.type(1 / rows) if rows else x.dtype.type(0)
    blocks = [(x[at : at + step], centred[: min(step, rows - at)]) for at in range(0, rows, step)]

    def statistics() -> None:
        mean.fill(0)
        for block, centre in blocks:
            np.matmul(ones[: len(centre)], block, out=part)
            np.add(mean, part, out=mean)
        np.multiply(mean, scale, out=mean)
        variance.fill(0)
        for block, centre in blocks:
            np.subtract(block, mean, out=centre)
            np.multiply(centre, centre, out=centre)
            np.matmul(ones[: len(centre)], centre, out=part)
            np.add(variance, part, out=variance)
        np.multiply(variance, scale, out=variance)

    return statistics


def compile_batch_normalise(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    y: np.ndarray,
    epsilon: float,
    threads: int,
) -> Call:
    """``y[r, c]`` = ``gamma`` (``x`` - ``mean``) / sqrt(``variance`` + epsilon) + ``beta``; may run in place."""
    scale, shift = np.empty_like(mean), np.empty_like(mean)
    small = x.dtype.type(epsilon)

    def prepare() -> None:
        np.add(variance, small, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(gamma, scale, out=scale)
        np.multiply(mean, scale, out=shift)
        np.subtract(beta, shift, out=shift)

    apply = over_blocks(
        [x, y],
        threads,
        lambda _, part: [
            partial(np.multiply, part[0], scale, out=part[1]),
            partial(np.add, part[1], shift, out=part[1]),
        ],
    )
    return sequence([prepare, apply])


def compile_batch_gradient(
    dy: np.ndarray,
    x: np.ndarray,
    gamma: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    dx: np.ndarray,
    dgamma: np.ndarray,
    dbeta: np.ndarray,
    epsilon: float,
    memory: np.ndarray,
) -> Call:
    """Gradients of training-time batch normalisation, where mean and variance depend on ``x``; in place of ``dy`` if wanted."""
    rows, channels = x.shape
    step = _rows(rows, channels, x.itemsize)
    centred = Scratch(memory).take((step, channels), x.dtype)
    ones, part = np.ones(step, x.dtype), np.empty(channels, x.dtype)
    inverse, scale, slope, offset = (np.empty_like(mean) for _ in range(4))
    small, count = x.dtype.type(epsilon), x.dtype.type(max(1, rows))
    blocks = [(x[at : at + step], dy[at : at + step], centred[: min(step, rows - at)]) for at in range(0, rows, step)]

    def sums() -> None:
        np.add(variance, small, out=inverse)
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        dgamma.fill(0)
        dbeta.fill(0)
        for block, gradient, centre in blocks:
            np.subtract(block, mean, out=centre)
            np.multiply(centre, gradient, out=centre)
            np.matmul(ones[: len(centre)], centre, out=part)
            np.add(dgamma, part, out=dgamma)
            np.matmul(ones[: len(centre)], gradient, out=part)
            np.add(dbeta, part, out=dbeta)
        np.multiply(dgamma, inverse, out=dgamma)
        # dx = scale (dy - dbeta / rows - (x - mean) inverse dgamma / rows) = scale dy - slope (x - mean) - offset
        np.multiply(gamma, inverse, out=scale)
        np.multiply(inverse, dgamma, out=slope)
        np.multiply(slope, scale, out=slope)
        np.divide(slope, count, out=slope)
        np.multiply(scale, dbeta, out=offset)
        np.divide(offset, count, out=offset)

    calls: list[Call] = [sums]
    for at in range(0, rows, step):
        block, gradient, centre = x[at : at + step], dy[at : at + step], centred[: min(step, rows - at)]
        result = dx[at : at + step]
        calls += [
            partial(np.subtract, block, mean, out=centre),
            partial(np.multiply, centre, slope, out=centre),
            partial(np.add, centre, offset, out=centre),
            partial(np.multiply, gradient, scale, out=result),
            partial(np.subtract, result, centre, out=result),
        ]
    return sequence(calls)


def _window_sum(values: np.ndarray, out: np.ndarray, radius: int) -> list[Call]:
    """``out[..., c]``: the sum of ``values`` over channels c - radius to c + radius, as far as they exist."""
    calls: list[Call] = [partial(np.copyto, out, values)]
    channels = values.shape[-1]
    for distance in range(1, min(radius, channels - 1) + 1):
        upper, lower = out[:, distance:], out[:, : channels - distance]
        calls.append(partial(np.add, upper, values[:, : channels - distance], out=upper))
        calls.append(partial(np.add, lower, values[:, distance:], out=lower))
    return calls


def compile_local_response(
    x: np.ndarray, y: np.ndarray, scale: np.ndarray, radius: int, bias: float, alpha: float, beta: float, threads: int
) -> Call:
    """``scale`` = bias + alpha * (sum of squares over 2 radius + 1 channels); ``y`` = ``x`` scale^-beta; [rows, channels]."""
    kind = x.dtype.type

    def make(_: int, part: list[np.ndarray]) -> list[Call]:
        value, result, factor = part
        return [
            partial(np.multiply, value, value, out=result),
            *_window_sum(result, factor, radius),
            partial(np.multiply, factor, kind(alpha), out=factor),
            partial(np.add, factor, kind(bias), out=factor),
            partial(np.power, factor, kind(-beta), out=result),
            partial(np.multiply, result, value, out=result),
        ]

    return over_blocks([x, y, scale], threads, make)  # type: ignore[arg-type]


def compile_local_response_gradient(
    x: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray,
    dy: np.ndarray,
    dx: np.ndarray,
    radius: int,
    alpha: float,
    beta: float,
    memory: np.ndarray,
) -> Call:
    """``dx`` = ``dy`` scale^-beta - 2 alpha beta ``x`` * (window sum of ``dy`` ``y`` / scale)."""
    kind, (rows, channels) = x.dtype.type, x.shape
    step = _rows(rows, channels, x.itemsize)
    scratch = Scratch(memory)
    ratio, total = scratch.take((step, channels), x.dtype), scratch.take((step, channels), x.dtype)
    calls: list[Call] = []
    for at in range(0, rows, step):
        value, result, factor, gradient, out = (array[at : at + step] for array in (x, y, scale, dy, dx))
        one, two = ratio[: len(value)], total[: len(value)]
        calls += [
            partial(np.multiply, gradient, result, out=one),
            partial(np.divide, one, factor, out=one),
            *_window_sum(one, two, radius),
            partial(np.multiply, two, value, out=two),
            partial(np.multiply, two, kind(2 * alpha * beta), out=two),
            partial(np.power, factor, kind(-beta), out=one),
            partial(np.multiply, one, gradient, out=one),
            partial(np.subtract, one, two, out=out),
        ]
    return sequence(calls)
