"""Comparisons, and selection by what they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import (
    Binary,
    apply,
    broadcast_shape,
    check_count,
    check_same_dtype,
    matched,
)
from runtime.graph.ops import Attrs, Call, KernelContext, register
from runtime.tensor import TensorSpec


class _Comparison(Binary):
    """Elementwise with broadcasting, gives bool."""

    inplace = ()

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        return [TensorSpec(broadcast_shape(inputs[0].shape, inputs[1].shape), np.dtype(bool))]


@register
class Equal(_Comparison):
    function = np.equal


@register
class NotEqual(_Comparison):
    function = np.not_equal


@register
class Less(_Comparison):
    function = np.less


@register
class LessEqual(_Comparison):
    function = np.less_equal


@register
class Greater(_Comparison):
    function = np.greater


@register
class GreaterEqual(_Comparison):
    function = np.greater_equal


@register
class Select(Binary):
    """Elementwise with broadcasting: the second input where the first (bool) is true, the third elsewhere."""

    inplace = ()

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 3)
        if inputs[0].dtype != np.dtype(bool):
            raise ShapeError(f"the condition must be bool, not {inputs[0].dtype.name}")
        check_same_dtype(inputs[1:])
        return [TensorSpec(broadcast_shape(*(spec.shape for spec in inputs)), inputs[1].dtype)]

    @classmethod
    def compile(
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (condition, a, b), (out,) = inputs, outputs

        def select() -> None:
            np.copyto(out, b)
            np.copyto(out, a, where=condition)

        return select

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        condition, a, b = node.inputs
        (g,) = grads
        assert g is not None
        zero = graph.as_output(0, g.dtype)
        return [
            None,
            matched(graph.add("Select", condition, g, zero).out, a),
            matched(graph.add("Select", condition, zero, g).out, b),
        ]


def equal(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Equal", a, b, name=name)


def not_equal(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("NotEqual", a, b, name=name)


def less(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Less", a, b, name=name)


def less_equal(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("LessEqual", a, b, name=name)


def greater(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Greater", a, b, name=name)


def greater_equal(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("GreaterEqual", a, b, name=name)


def select(condition: Output, a: Any, b: Any, name: str | None = None) -> Output:
    """``a`` where ``condition`` (bool) is true, ``b`` elsewhere; all three broadcast."""
    like = next((value for value in (a, b) if isinstance(value, Output)), None)
    graph, dtype = condition.graph, like.dtype if like is not None else None
    return graph.add("Select", condition, graph.as_output(a, dtype), graph.as_output(b, dtype), name=name).out
