"""Cutting a kernel's temporary memory into arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # a cache line, and the widest vector register


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up, so that what follows is aligned too. Sizes announced to the plan are sums of these."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """Hands out consecutive arrays of one block of bytes. Their content is whatever was there."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self._offset = memory, 0

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        start, nbytes = self._offset, math.prod(shape) * dtype.itemsize
        self._offset += aligned(nbytes)
        return self._memory[start : start + nbytes].view(dtype).reshape(shape)

    def rest(self) -> np.ndarray:
        """The bytes that were not handed out."""
        return self._memory[self._offset :]
