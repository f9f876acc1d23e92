"""Ops that sum or pick along axes: the matrix product, reductions, and the gradient of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import apply, broadcast_shape, check_count, check_floating, check_same_dtype, normal_axis
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels.matmul import compile_matmul, matmul_workspace
from runtime.tensor import TensorSpec


@register
class MatMul(Op):
    """Product of two matrices, either one transposed first (``transpose_a``, ``transpose_b``)."""

    attributes = ("transpose_a", "transpose_b")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        a, b = inputs
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise ShapeError(f"takes two matrices, not shapes {a.shape} and {b.shape}")
        rows, inner = a.shape[::-1] if attrs.get("transpose_a") else a.shape
        also, columns = b.shape[::-1] if attrs.get("transpose_b") else b.shape
        if inner != also:
            marks = ["^T" if attrs.get(key) else "" for key in ("transpose_a", "transpose_b")]
            raise ShapeError(f"inner sizes of {a.shape}{marks[0]} and {b.shape}{marks[1]} differ")
        if a.dtype.kind == "b":
            raise ShapeError("needs numbers, not bool")
        return [TensorSpec((rows, columns), a.dtype)]

    @staticmethod
    def workspace(inputs: Sequence[TensorSpec], attrs: Attrs, threads: int) -> int:
        rows = inputs[0].shape[1 if attrs.get("transpose_a") else 0]
        return matmul_workspace(rows, inputs[0].dtype.itemsize, threads)

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        a, b = inputs
        left = a.T if attrs.get("transpose_a") else a
        right = b.T if attrs.get("transpose_b") else b
        size = matmul_workspace(outputs[0].shape[0], outputs[0].itemsize, context.threads)
        memory = context.workspace((size,), np.uint8)
        product = compile_matmul(left, right, outputs[0], context.threads, memory)
        if bool(attrs.get("transpose_a")) == bool(attrs.get("transpose_b")) or not np.may_share_memory(a, b):
            return product
        # For x^T x numpy picks syrk, whose rounding differs from gemm's: the same graph would give other bits where
        # one of the two inputs crosses to another device and so is another array.
        apart = np.empty_like(b)
        right = apart.T if attrs.get("transpose_b") else apart
        product = compile_matmul(left, right, outputs[0], context.threads, memory)

        def product_with_itself() -> None:
            np.copyto(apart, b)
            product()

        return product_with_itself

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        a, b = node.inputs
        (g,) = grads
        assert g is not None
        match bool(node.attrs.get("transpose_a")), bool(node.attrs.get("transpose_b")):
            case False, False:
                return [matmul(g, b, transpose_b=True), matmul(a, g, transpose_a=True)]
            case False, True:
                return [matmul(g, b), matmul(g, a, transpose_a=True)]
            case True, False:
                return [matmul(b, g, transpose_b=True), matmul(a, g)]
            case _:
                return [
                    matmul(b, g, transpose_a=True, transpose_b=True),
                    matmul(g, a, transpose_a=True, transpose_b=True),
                ]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        inner = inputs[0].shape[0 if attrs.get("transpose_a") else 1]
        return Cost(2 * outputs[0].size * inner, sum(spec.nbytes for spec in (*inputs, *outputs)))


class _Reduction(Op):
    """Over ``axes`` (a tuple; None: all), which stay with size 1 if ``keepdims``."""

    attributes: ClassVar[tuple[str, ...]] = ("axes", "keepdims")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        (x,) = inputs
        if x.dtype.kind == "b":
            raise ShapeError("needs numbers, not bool")
        axes = reduced_axes(attrs, len(x.shape))
        return [TensorSpec(reduced_shape(x.shape, axes, bool(attrs.get("keepdims"))), x.dtype)]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(inputs[0].size, inputs[0].nbytes + outputs[0].nbytes)


def reduced_axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    """The axes that a reduction of a tensor of ``rank`` removes, from the front, sorted; ShapeError if one is named twice."""
    axes = attrs.get("axes")
    if axes is None:
        return tuple(range(rank))
    chosen = sorted(normal_axis(axis, rank) for axis in axes)
    if len(set(chosen)) != len(chosen):
        raise ShapeError(f"axes {axes} name one axis twice")
    return tuple(chosen)


def reduced_shape(shape: tuple[int, ...], axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _sum_call(x: np.ndarray, out: np.ndarray, axes: tuple[int, ...], keepdims: bool) -> Call:
    """A call that sums ``x`` over ``axes`` into ``out``; over none it copies."""
    if not axes:
        return partial(np.copyto, out, x)
    return partial(np.add.reduce, x, axes if len(axes) > 1 else axes[0], x.dtype, out, keepdims)


def _spread(graph: Graph, node: Node, grad: Output) -> Output:
    """The gradient of a reduction with its reduced axes put back with size 1."""
    (x,) = node.inputs
    shape = reduced_shape(x.shape, reduced_axes(node.attrs, len(x.shape)), True)
    return grad if grad.shape == shape else graph.add("Reshape", grad, shape=shape).out


@register
class ReduceSum(_Reduction):
    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        axes = reduced_axes(attrs, inputs[0].ndim)
        return _sum_call(inputs[0], outputs[0], axes, bool(attrs.get("keepdims")))

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        spread = _spread(graph, node, grads[0])
        return [graph.add("BroadcastTo", spread, shape=node.inputs[0].shape).out]


@register
class ReduceMean(_Reduction):
    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        specs = _Reduction.infer(inputs, attrs)
        check_floating(specs[0])
        if inputs[0].size == 0 and specs[0].size:
            raise ShapeError(f"no mean of no elements in shape {inputs[0].shape}")
        return specs

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (x,), (out,) = inputs, outputs
        total = _sum_call(x, out, reduced_axes(attrs, x.ndim), bool(attrs.get("keepdims")))
        count = out.dtype.type(_ratio(TensorSpec.of(x), TensorSpec.of(out)))

        def mean() -> None:
            total()
            np.true_divide(out, count, out)

        return mean

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        count = _ratio(node.inputs[0].spec, node.out.spec)
        spread = _spread(graph, node, grads[0]) / count
        return [graph.add("BroadcastTo", spread, shape=node.inputs[0].shape).out]


def _ratio(x: TensorSpec, out: TensorSpec) -> int:
    return x.size // out.size if out.size else 1


@register
class ReduceMax(_Reduction):
    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        specs = _Reduction.infer(inputs, attrs)
        if inputs[0].size == 0 and specs[0].size:
            raise ShapeError(f"no maximum of no elements in shape {inputs[0].shape}")
        return specs

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (x,), (out,) = inputs, outputs
        axes = reduced_axes(attrs, x.ndim)
        if not axes:
            return partial(np.copyto, out, x)
        return partial(np.maximum.reduce, x, axes, None, out, bool(attrs.get("keepdims")))

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        """Equal maxima share the gradient equally, as in TensorFlow."""
        (g,) = grads
        assert g is not None
        (x,) = node.inputs
        axes = reduced_axes(node.attrs, len(x.shape))
        where = graph.add("Cast", graph.add("Equal", x, _spread(graph, node, node.out)).out, dtype=x.dtype).out
        count = graph.add("ReduceSum", where, axes=axes, keepdims=True).out
        return [where / count * _spread(graph, node, g)]


@register
class SumTo(Op):
    """Sum over the axes along which ``shape`` was broadcast to the input's: the gradient of broadcasting."""

    attributes = ("shape",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        shape = tuple(attrs["shape"])
        if broadcast_shape(inputs[0].shape, shape) != inputs[0].shape:
            raise ShapeError(f"shape {shape} does not broadcast to {inputs[0].shape}")
        return [TensorSpec(shape, inputs[0].dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (x,), (out,) = inputs, outputs
        shape = (1,) * (x.ndim - out.ndim) + out.shape
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
        return _sum_call(x, out.reshape(shape), axes, True)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [graph.add("BroadcastTo", grads[0], shape=node.inputs[0].shape).out if grads[0] is not None else None]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(inputs[0].size, inputs[0].nbytes + outputs[0].nbytes)


@register
class ArgMax(Op):
    """Index of the first largest element along ``axis``, as int64."""

    attributes = ("axis",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        shape = inputs[0].shape
        axis = normal_axis(attrs["axis"], len(shape))
        if shape[axis] == 0:
            raise ShapeError(f"no maximum of no elements along axis {axis} of shape {shape}")
        return [TensorSpec(shape[:axis] + shape[axis + 1 :], np.dtype(np.int64))]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(np.argmax, inputs[0], attrs["axis"], outputs[0])

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(inputs[0].size, inputs[0].nbytes + outputs[0].nbytes)


def matmul(
    a: Output, b: Output, *, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
) -> Output:
    """Product of two matrices, each transposed first if told so (which costs nothing)."""
    return apply("MatMul", a, b, name=name, transpose_a=transpose_a, transpose_b=transpose_b)


def _axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if axis is None:
        return None
    return (axis,) if isinstance(axis, int) else tuple(axis)


def reduce_sum(
    x: Output, axis: int | Sequence[int] | None = None, keepdims: bool = False, name: str | None = None
) -> Output:
    """Sum over ``axis`` (None: all axes)."""
    return apply("ReduceSum", x, name=name, axes=_axes(axis), keepdims=keepdims)


def reduce_mean(
    x: Output, axis: int | Sequence[int] | None = None, keepdims: bool = False, name: str | None = None
) -> Output:
    """Mean over ``axis`` (None: all axes)."""
    return apply("ReduceMean", x, name=name, axes=_axes(axis), keepdims=keepdims)


def reduce_max(
    x: Output, axis: int | Sequence[int] | None = None, keepdims: bool = False, name: str | None = None
) -> Output:
    """Maximum over ``axis`` (None: all axes)."""
    return apply("ReduceMax", x, name=name, axes=_axes(axis), keepdims=keepdims)


def argmax(x: Output, axis: int = -1, name: str | None = None) -> Output:
    """Index (int64) of the first largest element along ``axis``."""
    return apply("ArgMax", x, name=name, axis=axis)


def sum_to_shape(x: Output, shape: Sequence[int], name: str | None = None) -> Output:
    """``x`` summed over the axes along which ``shape`` broadcasts to its shape."""
    return x if x.shape == tuple(shape) else apply("SumTo", x, name=name, shape=tuple(shape))
