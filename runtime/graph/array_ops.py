"""Array ops: sources (placeholder, constant), changes of shape, slicing and joining, indexing.

``from runtime.graph import array_ops as ops`` also gives the arithmetic of ``math_ops`` and ``reduction_ops``, so that one
import is enough to write a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.graph.graph import Graph, Node, Output, current_graph
from runtime.graph.math_ops import (
    abs_,
    add,
    add_n,
    apply,
    broadcast_shape,
    cast,
    check_count,
    check_same_dtype,
    div,
    equal,
    exp,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    maximum,
    minimum,
    mul,
    neg,
    normal_axis,
    not_equal,
    select,
    sigmoid,
    sqrt,
    square,
    sub,
    tanh,
)
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.graph.reduction_ops import argmax, matmul, reduce_max, reduce_mean, reduce_sum, sum_to_shape
from runtime.tensor import TensorSpec, dtype_of

__all__ = [
    "abs_", "add", "add_n", "argmax", "broadcast_to", "cast", "concat", "constant", "div", "equal", "exp", "fill",
    "gather", "greater", "greater_equal", "group", "identity", "less", "less_equal", "log", "matmul", "maximum",
    "minimum", "mul", "neg", "no_op", "not_equal", "one_hot", "ones_like", "pad", "placeholder", "reduce_max",
    "reduce_mean", "reduce_sum", "reshape", "select", "sigmoid", "slice_", "split", "sqrt", "square", "stop_gradient",
    "sub", "sum_to_shape", "tanh", "transpose", "zeros_like",
]  # fmt: skip


class _Moved(Op):
    """An op that moves elements and computes nothing."""

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 2 * sum(spec.nbytes for spec in outputs))


class _View(Op):
    """An op whose output is its input's memory."""

    alias = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        return [inputs[0]]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return None

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 0)


class _Source(Op):
    """An op without inputs whose output nobody computes in a step."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        return [TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return None

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 0)


@register
class Placeholder(_Source):
    """A tensor that is fed each step, with ``shape`` and ``dtype``; the executor copies the fed value into it."""

    stateful = True


@register
class Constant(_Source):
    """The array ``value``."""

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

    resident = True

    @staticmethod
    def memory(attrs: Attrs, resources: Any) -> Sequence[np.ndarray]:
        array = np.full(attrs["shape"], attrs["value"], dtype_of(attrs["dtype"]))
        array.flags.writeable = False
        return [array]


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
class NoOp(Op):
    """Nothing; done when its control inputs are."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        return []

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return None


@register
class Reshape(_View):
    """The same elements in C order under another ``shape``; one size may be -1."""

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
class Transpose(_Moved):
    """Axis i of the output is axis ``perm[i]`` of the input."""

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
class BroadcastTo(_Moved):
    """Repeated to ``shape`` by numpy's rules."""

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
class Concat(_Moved):
    """Inputs joined along ``axis``."""

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
class Split(_Moved):
    """Cut along ``axis`` into pieces of the given ``sizes``, one output each."""

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
class Slice(_Moved):
    """The ``size`` elements from ``begin`` on, along each axis."""

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
class Pad(_Moved):
    """Zeros around: ``paddings`` holds before and after of each axis, flat."""

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


@register
class Gather(_Moved):
    """Rows of the first input (embedding look-up), chosen by an integer tensor of any shape."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        table, rows = inputs
        if not table.shape:
            raise ShapeError("cannot take rows of a scalar")
        _check_indices(rows)
        return [TensorSpec(rows.shape + table.shape[1:], table.dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (table, rows), (out,) = inputs, outputs
        check = _index_check(rows, len(table), context.node)

        def gather_() -> None:
            check()
            np.take(table, rows, 0, out, "clip")  # "raise" would gather into a temporary copy first

        return gather_

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        table, rows = node.inputs
        return [graph.add("GatherGrad", rows, grads[0], rows=table.shape[0]).out, None]


@register
class GatherGrad(_Moved):
    """Gradient of Gather: a dense table of ``rows`` rows into which rows of the second input are added, in order."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        indices, grad = inputs
        _check_indices(indices)
        rank = len(indices.shape)
        if grad.shape[:rank] != indices.shape:
            raise ShapeError(f"gradient of shape {grad.shape} does not begin with the indices' {indices.shape}")
        return [TensorSpec((attrs["rows"], *grad.shape[rank:]), grad.dtype)]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (indices, grad), (out,) = inputs, outputs
        check = _index_check(indices, len(out), context.node)
        flat = indices.reshape(-1)
        rows = grad.reshape(flat.size, -1) if flat.size else grad.reshape(0, 1)
        table = out.reshape(len(out), -1) if out.size else out.reshape(len(out), 0)

        def gather_grad() -> None:
            check()
            out.fill(0)
            for at, row in zip(flat.tolist(), rows):
                target = table[at]
                np.add(target, row, target)

        return gather_grad

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [None, gather(grads[0], node.inputs[0])]


def _check_indices(spec: TensorSpec) -> None:
    if spec.dtype.kind not in "iu":
        raise ShapeError(f"indices must be integers, not {spec.dtype.name}")


def _index_check(indices: np.ndarray, count: int, node: str) -> Call:
    """A call that raises GraphError, naming the node, if an index is not a row of ``count``."""
    if indices.size == 0:
        return lambda: None
    smallest, largest = partial(np.minimum.reduce, indices, None), partial(np.maximum.reduce, indices, None)

    def check() -> None:
        if smallest() < 0 or largest() >= count:
            raise GraphError(
                f"node {node}: index {indices.min()} or {indices.max()} is not a row of a table of {count}"
            )

    return check


@register
class OneHot(Op):
    """1 at position ``indices`` of a new last axis of size ``depth`` and 0 elsewhere; an index outside gives zeros."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        _check_indices(inputs[0])
        return [TensorSpec((*inputs[0].shape, attrs["depth"]), dtype_of(attrs["dtype"]))]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        columns = np.arange(attrs["depth"]).astype(inputs[0].dtype)
        return partial(np.equal, inputs[0][..., np.newaxis], columns, outputs[0], casting="unsafe")


def placeholder(shape: Sequence[int], dtype: Any = np.float32, name: str | None = None) -> Output:
    """A tensor that is fed. Added to the current graph (``Graph.as_default``)."""
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


def gather(table: Output, indices: Output, name: str | None = None) -> Output:
    """Rows of ``table``; an index outside of it fails the step."""
    return apply("Gather", table, indices, name=name)


def one_hot(indices: Output, depth: int, dtype: Any = np.float32, name: str | None = None) -> Output:
    return apply("OneHot", indices, name=name, depth=depth, dtype=dtype_of(dtype))
