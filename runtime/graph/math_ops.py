"""Elementwise ops: arithmetic with numpy's broadcasting, functions, comparisons, selection, casts.

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


class _Unary(Op):
    """Elementwise, floating, one input."""

    inplace = ((0, 0),)
    function: ClassVar[Callable[..., Any]]

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        return [inputs[0]]

    @classmethod
    def compile(  # type: ignore[override]
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(cls.function, inputs[0], outputs[0])


class _Signed(_Unary):
    """Elementwise, any number, one input."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        if inputs[0].dtype.kind == "b":
            raise ShapeError("needs numbers, not bool")
        return [inputs[0]]


class _Binary(Op):
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


class _Comparison(_Binary):
    """Elementwise with broadcasting, gives bool."""

    inplace = ()

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        return [TensorSpec(broadcast_shape(inputs[0].shape, inputs[1].shape), np.dtype(bool))]


@register
class Add(_Binary):
    function = np.add

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [matched(grads[0], value) for value in node.inputs]


@register
class Sub(_Binary):
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
class Mul(_Binary):
    function = np.multiply

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        return [matched(g * b, a), matched(g * a, b)]


@register
class Div(_Binary):
    function = np.true_divide

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        specs = _Binary.infer(inputs, attrs)
        check_floating(specs[0])
        return specs

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        by_a = g / b
        return [matched(by_a, a), matched(-(by_a * node.out), b)]


class _Extremum(_Binary):
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
class Neg(_Signed):
    function = np.negative

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [-grads[0]]


@register
class Abs(_Signed):
    function = np.absolute

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        specs = _Signed.infer(inputs, attrs)
        if specs[0].dtype.kind == "c":
            raise ShapeError(f"needs real numbers, not {specs[0].dtype.name}")
        return specs

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        (g,) = grads
        assert g is not None
        (x,) = node.inputs
        negative = graph.add("Less", x, graph.as_output(0, x.dtype)).out
        return [graph.add("Select", negative, -g, g).out]


@register
class Exp(_Unary):
    function = np.exp

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [grads[0] * node.out]


@register
class Log(_Unary):
    function = np.log

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [grads[0] / node.inputs[0]]


@register
class Sqrt(_Unary):
    function = np.sqrt

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [grads[0] * 0.5 / node.out]


@register
class Square(_Signed):
    function = np.square

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [grads[0] * 2 * node.inputs[0]]


@register
class Tanh(_Unary):
    function = np.tanh

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("TanhGrad", node.out, grads[0]).out]


@register
class Sigmoid(_Unary):
    @classmethod
    def compile(
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (x,), (y,) = inputs, outputs
        half = y.dtype.type(0.5)

        def sigmoid() -> None:  # by way of tanh, which cannot overflow
            np.multiply(x, half, y)
            np.tanh(y, y)
            np.multiply(y, half, y)
            np.add(y, half, y)

        return sigmoid

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("SigmoidGrad", node.out, grads[0]).out]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(4 * outputs[0].size, inputs[0].nbytes + outputs[0].nbytes)


class _FromOutput(Op):
    """Gradient of a function whose derivative follows from its value: inputs (value, gradient of it)."""

    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_floating(inputs[0])
        if inputs[0] != inputs[1]:
            raise ShapeError(f"{inputs[0]} and {inputs[1]} differ")
        return [inputs[0]]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(3 * outputs[0].size, 3 * outputs[0].nbytes)


@register
class TanhGrad(_FromOutput):
    """(1 - y^2) g"""

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (y, g), (out,) = inputs, outputs
        one = out.dtype.type(1)

        def tanh_grad() -> None:
            np.multiply(y, y, out)
            np.subtract(one, out, out)
            np.multiply(out, g, out)

        return tanh_grad


@register
class SigmoidGrad(_FromOutput):
    """y (1 - y) g, computed as (y - y^2) g so that it may run in place of y"""

    @staticmethod
    def workspace(inputs: Sequence[TensorSpec], attrs: Attrs, threads: int) -> int:
        return _block(inputs[0]) * inputs[0].dtype.itemsize

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        y, g, out = inputs[0].reshape(-1), inputs[1].reshape(-1), outputs[0].reshape(-1)
        step = _block(TensorSpec.of(y))
        rest = context.workspace((step,), y.dtype)
        one = out.dtype.type(1)
        parts = [
            (y[at : at + step], g[at : at + step], out[at : at + step], rest[: min(step, y.size - at)])
            for at in range(0, y.size, max(1, step))
        ]

        def sigmoid_grad() -> None:
            for value, grad, result, part in parts:
                np.subtract(one, value, part)
                np.multiply(part, value, part)
                np.multiply(part, grad, result)

        return sigmoid_grad


def _block(spec: TensorSpec) -> int:
    """Elements of a block that stays in the second-level cache beside its neighbours."""
    return min(spec.size, (1 << 17) // spec.dtype.itemsize)


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
class Select(_Binary):
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


@register
class Cast(Op):
    """To another ``dtype``, as C does it (floats are cut off towards zero)."""

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


def neg(x: Output, name: str | None = None) -> Output:
    return apply("Neg", x, name=name)


def abs_(x: Output, name: str | None = None) -> Output:
    return apply("Abs", x, name=name)


def exp(x: Output, name: str | None = None) -> Output:
    return apply("Exp", x, name=name)


def log(x: Output, name: str | None = None) -> Output:
    """Natural logarithm."""
    return apply("Log", x, name=name)


def sqrt(x: Output, name: str | None = None) -> Output:
    return apply("Sqrt", x, name=name)


def square(x: Output, name: str | None = None) -> Output:
    return apply("Square", x, name=name)


def tanh(x: Output, name: str | None = None) -> Output:
    return apply("Tanh", x, name=name)


def sigmoid(x: Output, name: str | None = None) -> Output:
    return apply("Sigmoid", x, name=name)


def add_n(values: Sequence[Output], name: str | None = None) -> Output:
    """Sum of tensors of one shape, from left to right."""
    return apply("AddN", *values, name=name)


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


def cast(x: Output, dtype: Any, name: str | None = None) -> Output:
    """``x`` itself if it has that dtype already."""
    return x if x.dtype == dtype_of(dtype) else apply("Cast", x, name=name, dtype=dtype_of(dtype))
