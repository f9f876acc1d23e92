"""Dropout whose mask follows from seed, node and step, so that every run, placement and replay drops the same elements."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.random import Generator, Philox

from runtime.kernels.parallel import Call


def compile_dropout(
    x: np.ndarray, y: np.ndarray, mask: np.ndarray, rate: float, seed: int, node: str, step: object, noise: np.ndarray
) -> Call:
    """``mask`` (bool): kept with probability 1 - ``rate``; ``y`` = ``x`` / (1 - rate) where kept, else 0. In place if wanted.

    The generator is Philox with the key (seed, CRC-32 of the node's name) and the counter set to ``step.id``. ``noise`` is
    float32 memory, an element each.
    """
    flat, factor = mask.reshape(-1), x.dtype.type(1 / (1 - rate))
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(node.encode())], np.uint64)
    limit = np.float32(rate)

    def dropout() -> None:
        counter = np.array([0, 0, 0, step.id & 0xFFFFFFFFFFFFFFFF], np.uint64)  # type: ignore[attr-defined]
        Generator(Philox(key=key, counter=counter)).random(dtype=np.float32, out=noise)
        np.greater_equal(noise, limit, out=flat)
        np.multiply(x, factor, out=y)
        np.multiply(y, mask, out=y)

    return dropout


def compile_dropout_gradient(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, rate: float) -> Call:
    """``dx`` = ``dy`` / (1 - rate) where kept, else 0. In place if wanted."""
    factor = dy.dtype.type(1 / (1 - rate))

    def gradient() -> None:
        np.multiply(dy, factor, out=dx)
        np.multiply(dx, mask, out=dx)

    return gradient
