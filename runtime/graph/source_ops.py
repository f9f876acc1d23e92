"""Sources: placeholders, which are fed, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Output, current_graph
from runtime.graph.math_ops import check_count
from runtime.graph.ops import Attrs, Passive, register
from runtime.tensor import TensorSpec, dtype_of


class _Source(Passive):
    """An op without inputs whose output nobody computes in a step."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        return [TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))]


@register
class Placeholder(_Source):
    """A tensor that is fed each step, with ``shape`` and ``dtype``; the executor copies the fed value into it."""

    attributes = ("shape", "dtype")
    stateful = True


@register
class Constant(_Source):
    """The array ``value``."""

    attributes = ("value",)
    resident = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        value = attrs["value"]
        if not isinstance(value, np.ndarray):
            raise ShapeError(f"value must be an array, not {type(value).__name__}")
        return [TensorSpec.of(value)]

    @staticmethod
    def memory(attrs: Attrs, resources: Any) -> Sequence[np.ndarray]:
        return [attrs["value"]]


@register
class Fill(_Source):
    """``value`` (a number) in every element of ``shape``; takes no room in a serialised graph."""

    attributes = ("shape", "dtype", "value")
    resident = True

    @staticmethod
    def memory(attrs: Attrs, resources: Any) -> Sequence[np.ndarray]:
        shape, value, dtype = attrs["shape"], attrs["value"], dtype_of(attrs["dtype"])
        # Zeros that nobody writes are one page of the kernel's, mapped often.
        array = np.full(shape, value, dtype) if value or np.signbit(value) else np.zeros(shape, dtype)
        array.flags.writeable = False
        return [array]


def placeholder(shape: Sequence[int], dtype: Any = np.float32, name: str | None = None) -> Output:
    """A tensor that is fed. Added to the current graph (``Graph.as_default``)."""
    if any(size is None for size in shape):
        raise ShapeError(
            f"placeholder {name or ''} of shape {tuple(shape)}: shapes are static here; for another batch size build a second "
            f"tower on the same variables"
        )
    return current_graph().add("Placeholder", name=name, shape=tuple(shape), dtype=dtype_of(dtype)).out


def constant(value: Any, dtype: Any = None, name: str | None = None) -> Output:
    """A fixed array, in the current graph. Python floats become float32 unless ``dtype`` says otherwise; arrays keep theirs."""
    if dtype is None and not isinstance(value, np.ndarray | np.generic):
        natural = np.asarray(value).dtype
        dtype = np.float32 if natural.kind == "f" else natural
    return current_graph().add("Constant", name=name, value=np.array(value, dtype)).out


def fill(shape: Sequence[int], value: float, dtype: Any = np.float32, name: str | None = None) -> Output:
    """One number in every element, in the current graph."""
    return current_graph().add("Fill", name=name, shape=tuple(shape), value=value, dtype=dtype_of(dtype)).out


def zeros_like(x: Output, name: str | None = None) -> Output:
    return x.graph.add("Fill", name=name, shape=x.shape, value=0, dtype=x.dtype).out


def ones_like(x: Output, name: str | None = None) -> Output:
    return x.graph.add("Fill", name=name, shape=x.shape, value=1, dtype=x.dtype).out
