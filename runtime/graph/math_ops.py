"""Arithmetic: elementwise ops of two tensors with numpy's broadcasting, sums of several, casts; checks for shape rules.

Inputs of one op have one dtype; nothing is promoted, because a silent float64 doubles what goes over the wire. Kernels
are mostly ``functools.partial`` over a numpy ufunc with its output bound, which is the cheapest call without arguments
that Python has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.tensor import TensorSpec, dtype_of


def check_count(inputs: Sequence[TensorSpec], count: int) -> None:
    """ShapeError unless an op got ``count`` inputs."""
    if len(inputs) != count:
        raise ShapeError(f"takes {count} inputs, got {len(inputs)}")


def check_floating(spec: TensorSpec) -> None:
    """ShapeError unless the dtype is a floating one."""
    if spec.dtype.kind not in "fc":
        raise ShapeError(f"needs a floating dtype, not {spec.dtype.name}")


def check_same_dtype(inputs: Sequence[TensorSpec]) -> None:
    """ShapeError, naming both, unless all inputs have one dtype."""
    for spec in inputs[1:]:
        if spec.dtype != inputs[0].dtype:
            raise ShapeError(f"dtypes {inputs[0].dtype.name} and {spec.dtype.name} differ; use cast")


def normal_axis(axis: int, rank: int) -> int:
    """``axis`` counted from the front; ShapeError if there is no such axis."""
    if not -rank <= axis < rank:
        raise ShapeError(f"axis {axis} is not one of a tensor of rank {rank}")
    return axis % rank


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ``shapes`` broadcast to by numpy's rules; ShapeError naming them if they do not."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def matched(grad: Output | None, source: Output) -> Output | None:
    """A gradient summed down to the shape of the input that was broadcast."""
    if grad is None or grad.shape == source.shape:
        return grad
    return grad.graph.add("SumTo", grad, shape=source.shape).out


class Moved(Op):
    """An op that moves elements and computes nothing."""

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 2 * sum(spec.nbytes for spec in outputs))


class Binary(Op):
    """Elementwise with broadcasting, two inputs of one dtype."""

    inplace: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0), (1, 0))
    function: ClassVar[Callable[..., Any]]

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        if inputs[0].dtype.kind == "b":
            raise ShapeError("needs numbers, not bool")
        return [TensorSpec(broadcast_shape(inputs[0].shape, inputs[1].shape), inputs[0].dtype)]

    @classmethod
    def compile(  # type: ignore[override]
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(cls.function, inputs[0], inputs[1], outputs[0])


@register
class Add(Binary):
    function = np.add

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [matched(grads[0], value) for value in node.inputs]


@register
class Sub(Binary):
    function = np.subtract

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        summed = matched(g, b)
        assert summed is not None
        return [matched(g, a), -summed]


@register
class Mul(Binary):
    function = np.multiply

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        return [matched(g * b, a), matched(g * a, b)]


@register
class Div(Binary):
    function = np.true_divide

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        specs = Binary.infer(inputs, attrs)
        check_floating(specs[0])
        return specs

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        by_a = g / b
        return [matched(by_a, a), matched(-(by_a * node.out), b)]


class _Extremum(Binary):
    comparison: ClassVar[str]

    @classmethod
    def compile(
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(cls.function, inputs[0], inputs[1], out=outputs[0])  # numpy deprecates a positional one here

    @classmethod
    def gradient(cls, graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:  # type: ignore[override]
        """All of it flows to the first input where the two are equal, as in TensorFlow."""
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        first = graph.add(cls.comparison, a, b).out
        zero = graph.as_output(0, g.dtype)
        return [
            matched(graph.add("Select", first, g, zero).out, a),
            matched(graph.add("Select", first, zero, g).out, b),
        ]


@register
class Maximum(_Extremum):
    function = np.maximum
    comparison = "GreaterEqual"


@register
class Minimum(_Extremum):
    function = np.minimum
    comparison = "LessEqual"


@register
class AddN(Op):
    """Sum of inputs of one spec, from left to right."""

    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        if not inputs:
            raise ShapeError("takes at least one input")
        for spec in inputs:
            if spec != inputs[0]:
                raise ShapeError(f"{inputs[0]} and {spec} differ")
        return [inputs[0]]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (out,) = outputs
        if len(inputs) == 1:
            return partial(np.copyto, out, inputs[0])
        first = partial(np.add, inputs[0], inputs[1], out)
        if len(inputs) == 2:
            return first
        rest = inputs[2:]

        def add_n() -> None:
            first()
            for value in rest:
                np.add(out, value, out)

        return add_n

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [grads[0]] * len(node.inputs)

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost((len(inputs) - 1) * outputs[0].size, (len(inputs) + 1) * outputs[0].nbytes)


@register
class Cast(Op):
    """To another ``dtype``, as C does it (floats are cut off towards zero)."""

    attributes = ("dtype",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        dtype = dtype_of(attrs["dtype"])
        if inputs[0].dtype.kind == "c" and dtype.kind != "c":
            raise ShapeError(f"{inputs[0].dtype.name} cannot be cast to {dtype.name}: the imaginary part would be lost")
        return [TensorSpec(inputs[0].shape, dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(np.copyto, outputs[0], inputs[0], "unsafe")

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [graph.add("Cast", grads[0], dtype=node.inputs[0].dtype).out if grads[0] is not None else None]


def apply(op: str, *values: Any, name: str | None = None, **attrs: Any) -> Output:
    """Add an op whose operands may be numbers or arrays: those take the dtype of the first output among them."""
    like = next((value for value in values if isinstance(value, Output)), None)
    if like is None:
        raise ShapeError(f"{op} needs at least one graph output among its inputs; wrap a number with constant()")
    graph = like.graph
    return graph.add(op, *(graph.as_output(value, like.dtype) for value in values), name=name, **attrs).out


def add(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Add", a, b, name=name)


def sub(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Sub", a, b, name=name)


def mul(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Mul", a, b, name=name)


def div(a: Any, b: Any, name: str | None = None) -> Output:
    """Quotient of floating tensors."""
    return apply("Div", a, b, name=name)


def maximum(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Maximum", a, b, name=name)


def minimum(a: Any, b: Any, name: str | None = None) -> Output:
    return apply("Minimum", a, b, name=name)


def add_n(values: Sequence[Output], name: str | None = None) -> Output:
    """Sum of tensors of one shape, from left to right."""
    return apply("AddN", *values, name=name)


def cast(x: Output, dtype: Any, name: str | None = None) -> Output:
    """``x`` itself if it has that dtype already."""
    return x if x.dtype == dtype_of(dtype) else apply("Cast", x, name=name, dtype=dtype_of(dtype))
