"""Array ops: changes of shape, slicing and joining, nodes for control edges.

``from runtime.graph import array_ops as ops`` also gives what the modules of sources, arithmetic, functions, comparisons,
reductions and indexing define, so that one import is enough to write a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.comparison_ops import equal, greater, greater_equal, less, less_equal, not_equal, select
from runtime.graph.function_ops import abs_, exp, log, neg, sigmoid, sqrt, square, tanh
from runtime.graph.graph import Graph, Node, Output, current_graph
from runtime.graph.index_ops import gather, one_hot
from runtime.graph.math_ops import (
    Moved,
    add,
    add_n,
    apply,
    broadcast_shape,
    cast,
    check_count,
    check_same_dtype,
    div,
    maximum,
    minimum,
    mul,
    normal_axis,
    sub,
)
from runtime.graph.ops import Attrs, Call, KernelContext, Passive, register
from runtime.graph.reduction_ops import argmax, matmul, reduce_max, reduce_mean, reduce_sum, sum_to_shape
from runtime.graph.source_ops import Placeholder, constant, fill, ones_like, placeholder, zeros_like
from runtime.tensor import TensorSpec

__all__ = [
    "Placeholder", "abs_", "add", "add_n", "argmax", "broadcast_to", "cast", "concat", "constant", "div", "equal", "exp", "fill",
    "gather", "greater", "greater_equal", "group", "identity", "less", "less_equal", "log", "matmul", "maximum",
    "minimum", "mul", "neg", "no_op", "not_equal", "one_hot", "ones_like", "pad", "placeholder", "reduce_max",
    "reduce_mean", "reduce_sum", "reshape", "select", "sigmoid", "slice_", "split", "sqrt", "square", "stop_gradient",
    "sub", "sum_to_shape", "tanh", "transpose", "zeros_like",
]  # fmt: skip


class _View(Passive):
    """An op whose output is its input's memory."""

    alias = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        return [inputs[0]]


@register
class Identity(_View):
    """The same tensor; a point to hang control edges on."""

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [grads[0]]


@register
class StopGradient(_View):
    """The same tensor, through which no gradient flows."""

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [None]


@register
class NoOp(Passive):
    """Nothing; done when its control inputs are."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        return []


@register
class Reshape(_View):
    """The same elements in C order under another ``shape``; one size may be -1."""

    attributes = ("shape",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        shape = list(attrs["shape"])
        if shape.count(-1) == 1:
            known = math.prod(size for size in shape if size != -1)
            if known == 0 or inputs[0].size % known:
                raise ShapeError(f"shape {inputs[0].shape} cannot become {tuple(shape)}")
            shape[shape.index(-1)] = inputs[0].size // known
        spec = TensorSpec(tuple(shape), inputs[0].dtype)
        if spec.size != inputs[0].size:
            raise ShapeError(f"shape {inputs[0].shape} ({inputs[0].size} elements) cannot become {spec.shape}")
        return [spec]

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [graph.add("Reshape", grads[0], shape=node.inputs[0].shape).out if grads[0] is not None else None]


@register
class Transpose(Moved):
    """Axis i of the output is axis ``perm[i]`` of the input."""

    attributes = ("perm",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        (x,) = inputs
        perm = tuple(attrs["perm"])
        if sorted(perm) != list(range(len(x.shape))):
            raise ShapeError(f"{perm} is not a permutation of the axes of shape {x.shape}")
        return [TensorSpec(tuple(x.shape[axis] for axis in perm), x.dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(np.copyto, outputs[0], inputs[0].transpose(attrs["perm"]))

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [transpose(grads[0], [int(axis) for axis in np.argsort(node.attrs["perm"])])]


@register
class BroadcastTo(Moved):
    """Repeated to ``shape`` by numpy's rules."""

    attributes = ("shape",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        shape = tuple(attrs["shape"])
        if broadcast_shape(inputs[0].shape, shape) != shape:
            raise ShapeError(f"shape {inputs[0].shape} does not broadcast to {shape}")
        return [TensorSpec(shape, inputs[0].dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(np.copyto, outputs[0], inputs[0])

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [sum_to_shape(grads[0], node.inputs[0].shape)]


@register
class Concat(Moved):
    """Inputs joined along ``axis``."""

    attributes = ("axis",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        if not inputs:
            raise ShapeError("takes at least one input")
        check_same_dtype(inputs)
        shape = list(inputs[0].shape)
        axis = normal_axis(attrs["axis"], len(shape))
        for spec in inputs[1:]:
            if len(spec.shape) != len(shape) or any(
                a != b for at, (a, b) in enumerate(zip(spec.shape, shape)) if at != axis
            ):
                raise ShapeError(f"shapes {inputs[0].shape} and {spec.shape} differ in more than axis {axis}")
        shape[axis] = sum(spec.shape[axis] for spec in inputs)
        return [TensorSpec(tuple(shape), inputs[0].dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return partial(np.concatenate, tuple(inputs), attrs["axis"], outputs[0])

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        axis = node.attrs["axis"]
        return split(grads[0], [value.shape[axis] for value in node.inputs], axis)


@register
class Split(Moved):
    """Cut along ``axis`` into pieces of the given ``sizes``, one output each."""

    attributes = ("axis", "sizes")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        (x,) = inputs
        axis, sizes = normal_axis(attrs["axis"], len(x.shape)), attrs["sizes"]
        if sum(sizes) != x.shape[axis] or not sizes:
            raise ShapeError(f"sizes {tuple(sizes)} do not sum to {x.shape[axis]}, axis {axis} of shape {x.shape}")
        return [TensorSpec(x.shape[:axis] + (size,) + x.shape[axis + 1 :], x.dtype) for size in sizes]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        ends = list(itertools.accumulate(attrs["sizes"]))
        pairs = list(zip(outputs, np.split(inputs[0], ends[:-1], attrs["axis"])))

        def split_() -> None:
            for out, piece in pairs:
                np.copyto(out, piece)

        return split_

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        pieces = [zeros_like(out) if grad is None else grad for out, grad in zip(node.outputs, grads)]
        return [concat(pieces, node.attrs["axis"])]


@register
class Slice(Moved):
    """The ``size`` elements from ``begin`` on, along each axis."""

    attributes = ("begin", "size")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        (x,) = inputs
        begin, size = tuple(attrs["begin"]), tuple(attrs["size"])
        if (
            len(begin) != len(x.shape)
            or len(size) != len(x.shape)
            or any(at < 0 or n < 0 or at + n > limit for at, n, limit in zip(begin, size, x.shape))
        ):
            raise ShapeError(f"slice from {begin} of size {size} does not lie within shape {x.shape}")
        return [TensorSpec(size, x.dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        window = tuple(slice(at, at + n) for at, n in zip(attrs["begin"], attrs["size"]))
        return partial(np.copyto, outputs[0], inputs[0][window])

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        around = [
            (at, limit - at - n) for at, n, limit in zip(node.attrs["begin"], node.attrs["size"], node.inputs[0].shape)
        ]
        return [pad(grads[0], around)]


@register
class Pad(Moved):
    """Zeros around: ``paddings`` holds before and after of each axis, flat."""

    attributes = ("paddings",)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        (x,) = inputs
        paddings = tuple(attrs["paddings"])
        if len(paddings) != 2 * len(x.shape) or any(size < 0 for size in paddings):
            raise ShapeError(f"paddings {paddings} are not (before, after) from 0 for each axis of shape {x.shape}")
        return [TensorSpec(tuple(sum(paddings[2 * at : 2 * at + 2], n) for at, n in enumerate(x.shape)), x.dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (x,), (out,) = inputs, outputs
        before = attrs["paddings"][::2]
        inner = out[tuple(slice(at, at + n) for at, n in zip(before, x.shape))]

        def pad_() -> None:
            out.fill(0)
            np.copyto(inner, x)

        return pad_

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [slice_(grads[0], node.attrs["paddings"][::2], node.inputs[0].shape)]


def identity(x: Output, name: str | None = None) -> Output:
    """The same memory under a new node, for example to order it after control inputs."""
    return apply("Identity", x, name=name)


def stop_gradient(x: Output, name: str | None = None) -> Output:
    return apply("StopGradient", x, name=name)


def no_op(name: str | None = None) -> Node:
    """A node that does nothing, in the current graph."""
    return current_graph().add("NoOp", name=name)


def group(nodes: Sequence[Node | Output], name: str | None = None) -> Node:
    """A node that is done when all of ``nodes`` are. As a step's target it stands for them and costs no message."""
    before = [value.node if isinstance(value, Output) else value for value in nodes]
    graph = before[0].graph if before else current_graph()
    return graph.add("NoOp", name=name, control=before)


def reshape(x: Output, shape: Sequence[int], name: str | None = None) -> Output:
    """The same elements in C order; one size may be -1."""
    return apply("Reshape", x, name=name, shape=tuple(shape))


def transpose(x: Output, perm: Sequence[int] | None = None, name: str | None = None) -> Output:
    """Axis i of the result is axis ``perm[i]`` of ``x``; without ``perm`` the axes are reversed."""
    perm = tuple(range(len(x.shape)))[::-1] if perm is None else tuple(perm)
    return apply("Transpose", x, name=name, perm=perm)


def broadcast_to(x: Output, shape: Sequence[int], name: str | None = None) -> Output:
    return x if x.shape == tuple(shape) else apply("BroadcastTo", x, name=name, shape=tuple(shape))


def concat(values: Sequence[Output], axis: int, name: str | None = None) -> Output:
    return apply("Concat", *values, name=name, axis=axis)


def split(x: Output, sizes: int | Sequence[int], axis: int = 0, name: str | None = None) -> tuple[Output, ...]:
    """Pieces along ``axis``: of the given sizes, or that many equal ones."""
    if isinstance(sizes, int):
        whole = x.shape[normal_axis(axis, len(x.shape))]
        if sizes < 1 or whole % sizes:
            raise ShapeError(f"axis {axis} of {x.name} {x.spec} cannot be cut into {sizes} equal pieces")
        sizes = [whole // sizes] * sizes
    return x.graph.add("Split", x, name=name, axis=axis, sizes=tuple(sizes)).outputs


def slice_(x: Output, begin: Sequence[int], size: Sequence[int], name: str | None = None) -> Output:
    """``size`` elements from ``begin``, along each axis; a size of -1 means to the end."""
    full = [limit - at if n == -1 else n for at, n, limit in zip(begin, size, x.shape)]
    return apply("Slice", x, name=name, begin=tuple(begin), size=tuple(full) if len(size) == len(full) else tuple(size))


def pad(x: Output, paddings: Sequence[Sequence[int]], name: str | None = None) -> Output:
    """Zeros around ``x``: (before, after) for each axis."""
    return apply("Pad", x, name=name, paddings=tuple(size for pair in paddings for size in pair))
