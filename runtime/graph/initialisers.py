"""Initialisers: what a new variable holds, as attributes of its node, drawn on the task that owns it.

Draws depend on the seed and the shape only, so every task, transport and number of workers starts from the same values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.tensor import TensorSpec

KINDS = ("zeros", "constant", "uniform", "normal", "truncated_normal", "tensor")
INIT_ATTRIBUTES = ("init", "init_value", "init_args", "init_seed")
_BLOCK = 1 << 20  # elements drawn at a time, which bounds the temporary memory


@dataclass(frozen=True, slots=True)
class Initialiser:
    """``kind`` is one of KINDS. ``a`` and ``b``: the constant; low and high; or mean and standard deviation.

    ``seed`` None stands for one made of the variable's name, so that variables differ and runs do not.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    seed: int | None = None
    value: np.ndarray | None = None

    def attrs(self, name: str, spec: TensorSpec) -> dict[str, Any]:
        """As attributes of the variable called ``name``; ShapeError if the value is not of ``spec``."""
        if self.kind not in KINDS:
            raise GraphError(f"initialiser {self.kind!r} is not one of {', '.join(KINDS)}")
        attrs: dict[str, Any] = {"init": self.kind}
        if self.kind == "tensor":
            assert self.value is not None
            if TensorSpec.of(self.value) != spec:
                raise ShapeError(f"variable {name} is {spec}, its initial value {TensorSpec.of(self.value)}")
            attrs["init_value"] = self.value
        elif self.kind != "zeros":
            attrs["init_args"] = (float(self.a), float(self.b))
            attrs["init_seed"] = zlib.crc32(name.encode()) if self.seed is None else self.seed
        return attrs


def zeros() -> Initialiser:
    return Initialiser("zeros")


def constant(value: float) -> Initialiser:
    """The same number everywhere."""
    return Initialiser("constant", value)


def uniform(low: float, high: float, seed: int | None = None) -> Initialiser:
    return Initialiser("uniform", low, high, seed)


def normal(mean: float = 0.0, stddev: float = 1.0, seed: int | None = None) -> Initialiser:
    return Initialiser("normal", mean, stddev, seed)


def truncated_normal(mean: float = 0.0, stddev: float = 1.0, seed: int | None = None) -> Initialiser:
    """Normal, with what lies more than two standard deviations away drawn again (TensorFlow's)."""
    return Initialiser("truncated_normal", mean, stddev, seed)


def glorot_uniform(fan_in: int, fan_out: int, seed: int | None = None) -> Initialiser:
    """Uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    limit = (6.0 / (fan_in + fan_out)) ** 0.5
    return uniform(-limit, limit, seed)


def he_normal(fan_in: int, seed: int | None = None) -> Initialiser:
    """Normal with variance 2 / fan_in (He et al., 2015)."""
    return normal(0.0, (2.0 / fan_in) ** 0.5, seed)


def tensor(value: np.ndarray) -> Initialiser:
    """Exactly this array, which travels with the graph."""
    return Initialiser("tensor", value=value)


def write_initial(attrs: Mapping[str, Any], memory: np.ndarray) -> None:
    """Fill ``memory`` as the attributes of a variable say."""
    kind = attrs["init"]
    if kind == "zeros":
        memory.fill(0)
        return
    if kind == "tensor":
        np.copyto(memory, attrs["init_value"])
        return
    a, b = attrs["init_args"]
    if kind == "constant":
        memory.fill(a)
        return
    flat = memory.reshape(-1)
    generator = np.random.Generator(np.random.Philox(attrs["init_seed"]))
    dtype = np.float64 if flat.dtype == np.float64 else np.float32
    for at in range(0, flat.size, _BLOCK):
        count = min(_BLOCK, flat.size - at)
        if kind == "uniform":
            draws = generator.random(count, dtype) * dtype(b - a) + dtype(a)
        else:
            draws = generator.standard_normal(count, dtype)
            if kind == "truncated_normal":
                while (far := np.flatnonzero(np.abs(draws) > 2)).size:
                    draws[far] = generator.standard_normal(far.size, dtype)
            draws = draws * dtype(b) + dtype(a)
        flat[at : at + count] = draws
