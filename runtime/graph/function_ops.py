"""Functions of one tensor, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import apply, check_count, check_floating
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.tensor import TensorSpec


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
