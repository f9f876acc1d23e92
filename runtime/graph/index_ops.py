"""Indexing by tensors: rows of a table (embeddings) and one-hot rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import Moved, apply, check_count
from runtime.graph.ops import Attrs, Call, KernelContext, Op, register
from runtime.tensor import TensorSpec, dtype_of


@register
class Gather(Moved):
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
class GatherGrad(Moved):
    """Gradient of Gather: a dense table of ``rows`` rows into which rows of the second input are added, in order."""

    attributes = ("rows",)

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

    attributes = ("depth", "dtype")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        _check_indices(inputs[0])
        return [TensorSpec((*inputs[0].shape, attrs["depth"]), dtype_of(attrs["dtype"]))]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        # Of a dtype that holds both: of the indices' own alone, columns beyond its range would begin anew.
        last = np.min_scalar_type(max(0, attrs["depth"] - 1))
        columns = np.arange(attrs["depth"], dtype=np.promote_types(inputs[0].dtype, last))
        return partial(np.equal, inputs[0][..., np.newaxis], columns, outputs[0], casting="unsafe")


def gather(table: Output, indices: Output, name: str | None = None) -> Output:
    """Rows of ``table``; an index outside of it fails the step."""
    return apply("Gather", table, indices, name=name)


def one_hot(indices: Output, depth: int, dtype: Any = np.float32, name: str | None = None) -> Output:
    return apply("OneHot", indices, name=name, depth=depth, dtype=dtype_of(dtype))
