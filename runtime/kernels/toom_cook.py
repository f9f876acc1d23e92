"""Minimal filtering F(m, r): m outputs of a filter with r taps by m + r - 1 multiplications (Winograd, 1980; Toom and Cook).

The outputs y of data d and filter g are

    y = A^T [(G g) * (B^T d)]

where B^T, G and A^T evaluate and interpolate polynomials at n - 1 chosen points and at infinity, n = m + r - 1. Nested with
itself it gives m x m outputs of an r x r filter by n x n multiplications (Lavin and Gray, 2015). The points decide how rounding
errors grow; of 0, 1, -1 with every choice of others from twenty small fractions these had the smallest, or nearly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

# By n. Rounding errors of a 3 x 3 convolution in float32 are about 1, 4, 4 and 9 times the direct sum's.
_POINTS = {
    4: ("0", "1", "-1"),
    5: ("0", "1", "-1", "2"),
    6: ("0", "1", "-1", "2", "-1/2"),
    7: ("0", "1", "-1", "2", "-3/2", "1/3"),
}
SIZES = tuple(_POINTS)


class Matrices(NamedTuple):
    """``bt`` [n, n] for the data, ``g`` [n, r] for the filter, ``at`` [m, n] for the outputs."""

    bt: np.ndarray
    g: np.ndarray
    at: np.ndarray


@dataclass(frozen=True, slots=True)
class Scheme:
    """F(outputs, taps)."""

    outputs: int
    taps: int

    @property
    def size(self) -> int:
        """n, the multiplications; data are taken in pieces of as many."""
        return self.outputs + self.taps - 1

    def matrices(self, dtype: np.dtype) -> Matrices:
        return _matrices(self.outputs, self.taps, dtype)


@functools.cache
def _matrices(outputs: int, taps: int, dtype: np.dtype) -> Matrices:
    points = [Fraction(point) for point in _POINTS[outputs + taps - 1]]
    last = len(points)
    bt = np.zeros((last + 1, last + 1), dtype)
    g = np.zeros((last + 1, taps), dtype)
    at = np.zeros((outputs, last + 1), dtype)
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        polynomial = _with_roots(others)
        bt[row, :last] = [float(c) for c in polynomial]
        norm = Fraction(1)
        for other in others:
            norm *= point - other
        g[row] = [float(point**k / norm) for k in range(taps)]
        at[:, row] = [float(point**k) for k in range(outputs)]
    bt[last] = [float(c) for c in _with_roots(points)]
    g[last, -1] = at[-1, last] = 1
    for matrix in (bt, g, at):
        matrix.flags.writeable = False
    return Matrices(bt, g, at)


def _with_roots(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - root), lowest power first."""
    product = [Fraction(1)]
    for root in roots:
        product = [
            high - root * low for low, high in zip([*product, Fraction(0)], [Fraction(0), *product], strict=True)
        ]
    return product
