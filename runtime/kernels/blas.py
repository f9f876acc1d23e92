"""How many threads numpy's matrix products take: one each, because our own threads already fill the cores.

The environment decides when numpy is loaded (``environment``, for processes that we start); in a running process the
library is asked itself through ctypes (``set_threads``). Both are recorded by name, for the run's record.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import sys
from collections.abc import Iterator

import numpy as np

# Every BLAS and OpenMP that a numpy build may carry.
_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_SYMBOLS = (
    "scipy_openblas_{}_num_threads64_",  # numpy's own wheels
    "openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads",
)


def environment(threads: int = 1) -> dict[str, str]:
    """Variables for a process to be started, so that its BLAS has ``threads`` threads from the beginning."""
    return {name: str(threads) for name in _VARIABLES}


def _library() -> tuple[ctypes.CDLL, str] | None:
    """The OpenBLAS that this process has loaded, and the pattern of its functions' names."""
    paths: list[str] = []
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = sorted({line.split()[-1] for line in maps if "blas" in line.rsplit("/", 1)[-1]})
    if not paths:
        paths = sorted(glob.glob(os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs", "*openblas*")))
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for symbol in _SYMBOLS:
            if hasattr(library, symbol.format("set")):
                return library, symbol
    return None


@functools.cache
def core() -> str:
    """The processor that OpenBLAS took its kernels for, as it calls it; "" where it does not say."""
    found = _library()
    if found is None:
        return ""
    library, symbol = found
    name = symbol.replace("{}_num_threads", "get_corename")
    if not hasattr(library, name):
        return ""
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return (function() or b"").decode()


def threads() -> int | None:
    """How many threads a product takes now; None where numpy's BLAS does not say."""
    found = _library()
    if found is None:
        return None
    library, symbol = found
    return int(getattr(library, symbol.format("get"))())


def set_threads(count: int) -> str:
    """Ask the loaded BLAS for ``count`` threads a product. Process-wide. Returns what was done, for the run's record."""
    found = _library()
    if found is None:
        inherited = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        return f"BLAS has no known call for it; environment at start: {inherited or 'unset'}"
    library, symbol = found
    getattr(library, symbol.format("set"))(ctypes.c_int(count))
    return f"{count} by {symbol.format('set')}"


@contextlib.contextmanager
def limited(count: int) -> Iterator[None]:
    """``count`` BLAS threads inside the block, the former number after it."""
    before = threads()
    set_threads(count)
    try:
        yield
    finally:
        if before is not None:
            set_threads(before)
