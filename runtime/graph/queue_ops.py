"""Queue ops: bounded queues of tensors, by which sessions of a cluster hand each other values or signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import GraphError
from runtime.graph.graph import Node, Output, current_graph
from runtime.graph.math_ops import check_count
from runtime.graph.ops import Attrs, Call, KernelContext, Op, register
from runtime.tensor import TensorSpec, dtype_of


@register
class Enqueue(Op):
    """Puts the input into ``queue`` (of ``capacity``), when there is room."""

    attributes = ("queue", "capacity", "container")
    stateful = True
    asynchronous = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        _check_queue(attrs)
        return []

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (value,), step = inputs, context.step
        queue = _queue(value, attrs, context)
        return lambda: queue.put(value, step.id)


@register
class Dequeue(Op):
    """The oldest tensor of ``queue``, which holds tensors of ``shape`` and ``dtype``, when there is one."""

    attributes = ("queue", "capacity", "shape", "dtype", "container")
    stateful = True
    asynchronous = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        _check_queue(attrs)
        return [TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (out,), step = outputs, context.step
        queue = _queue(out, attrs, context)
        return lambda: queue.get(out, step.id)


def _queue(array: np.ndarray, attrs: Attrs, context: KernelContext) -> Any:
    return context.resources.queue(attrs["queue"], TensorSpec.of(array), attrs["capacity"], attrs.get("container", ""))


def _check_queue(attrs: Attrs) -> None:
    if not attrs["queue"] or attrs["capacity"] < 1:
        raise GraphError("needs a queue's name and a capacity from 1")


def enqueue(queue: str, value: Output, capacity: int, name: str | None = None) -> Node:
    """Put ``value`` into the queue of that name on the device of the block around."""
    return value.graph.add("Enqueue", value, name=name, queue=queue, capacity=capacity)


def dequeue(queue: str, spec: TensorSpec, capacity: int, name: str | None = None) -> Output:
    """Take the oldest tensor from the queue of that name on the device of the block around."""
    return (
        current_graph()
        .add("Dequeue", name=name, queue=queue, capacity=capacity, shape=spec.shape, dtype=spec.dtype)
        .out
    )
