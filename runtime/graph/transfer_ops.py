"""Send and Recv: the two ends of a cut edge in a partitioned graph. The executor runs them; they have no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.execution.rendezvous import Edge
from runtime.graph.graph import Node
from runtime.graph.math_ops import check_count
from runtime.graph.ops import Attrs, Cost, Op, register
from runtime.tensor import TensorSpec, dtype_of

CONTROL_SPEC = TensorSpec((0,), np.dtype(np.uint8))


class _Transfer(Op):
    """``edge`` is the edge's id, ``tensor`` the producer's output name, ``src`` and ``dst`` the devices."""

    attributes: ClassVar[tuple[str, ...]] = ("edge", "tensor", "src", "dst")
    stateful = True

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, sum(spec.nbytes for spec in (*inputs, *outputs)))


@register
class Send(_Transfer):
    """Sends its input; without one it tells, by an empty message, that its control inputs have run."""

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        if len(inputs) > 1:
            raise ShapeError(f"sends one tensor or none, not {len(inputs)}")
        _check_edge(attrs)
        return []


@register
class Recv(_Transfer):
    """The tensor of ``shape`` and ``dtype`` that the Send of the same edge sends."""

    attributes = (*_Transfer.attributes, "shape", "dtype")

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        _check_edge(attrs)
        return [TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))]


def _check_edge(attrs: Attrs) -> None:
    if attrs["edge"] < 0 or not attrs["tensor"] or not attrs["src"] or not attrs["dst"]:
        raise GraphError("needs an edge from 0, a tensor's name and two devices")


def edge_of(node: Node) -> Edge:
    """The edge that a Send or a Recv is an end of; GraphError for another node."""
    if not issubclass(node.op, _Transfer):
        raise GraphError(f"node {node.name} ({node.op.name}) is no end of an edge")
    attrs = node.attrs
    spec = node.specs[0] if node.specs else node.inputs[0].spec if node.inputs else CONTROL_SPEC
    return Edge(attrs["edge"], attrs["tensor"], attrs["src"], attrs["dst"], spec)
