"""Replica ops: what the replicas of a training step wait for each other with, the global step and gradients' accumulators.

With synchronous replicas nothing need be locked: a worker pulls after ``await_step`` said that all updates are done, and the
next update begins after N workers gave their gradients; a straggler that pulls meanwhile gives a stale gradient, which is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.graph.graph import Node, Output
from runtime.graph.math_ops import check_count, check_floating
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.graph.state_ops import NAMED, update, update_lock, variable_node
from runtime.tensor import TensorSpec, dtype_of


def _check_step(spec: TensorSpec) -> None:
    if spec != TensorSpec((), np.dtype(np.int64)):
        raise ShapeError(f"a step is an int64 scalar, not {spec}")


def _step_counter(attrs: Attrs, context: KernelContext) -> Any:
    return context.resources.step_counter(attrs["variable"], container=attrs.get("container", ""))


def _accumulator(array: np.ndarray, attrs: Attrs, context: KernelContext) -> Any:
    return context.resources.accumulator(attrs["accumulator"], TensorSpec.of(array), attrs.get("container", ""))


class _StepOp(Op):
    """An op on the step counter of ``variable``: an int64 scalar in, one out."""

    attributes = NAMED
    stateful = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        _check_step(inputs[0])
        return [inputs[0]]


@register
class AdvanceStep(_StepOp):
    """Counts the global step (int64 scalar) on by one and lets those go on who await it; gives the variable's memory."""

    alias = True
    mutates = (0,)

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        counter = _step_counter(attrs, context)
        lock = update_lock(inputs[0], attrs, context)

        def advance() -> None:
            with lock:
                counter.advance()

        return advance


@register
class AwaitStep(_StepOp):
    """Waits until the global step called ``variable`` is greater than the input (int64 scalar); gives its value then.

    It does not take the variable as an input, because it must not be put in order before or after its updates.
    """

    asynchronous = True

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        counter = _step_counter(attrs, context)
        (local_step,), (out,), step = inputs, outputs, context.step
        return lambda: counter.wait_past(int(local_step), out, step.id)


@register
class AccumulatorApply(Op):
    """Gives a gradient and the step that it belongs to (int64 scalar) to ``accumulator``, as replica number ``worker``.

    Done when the gradient was averaged, or at once if it is stale.
    """

    attributes = ("accumulator", "container", "worker")
    stateful = True
    asynchronous = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_floating(inputs[0])
        _check_step(inputs[1])
        if not attrs["accumulator"] or attrs["worker"] < 0:
            raise GraphError("needs an accumulator's name and a worker from 0")
        return []

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        gradient, local_step = inputs
        accumulator = _accumulator(gradient, attrs, context)
        worker, step = attrs["worker"], context.step
        return lambda: accumulator.apply(worker, gradient, int(local_step), step.id)


@register
class AccumulatorTake(Op):
    """The mean of ``count`` replicas' gradients of one step, when they are there."""

    attributes = ("accumulator", "container", "count", "shape", "dtype")
    stateful = True
    asynchronous = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        if not attrs["accumulator"] or attrs["count"] < 1:
            raise GraphError("needs an accumulator's name and a count from 1")
        spec = TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))
        check_floating(spec)
        return [spec]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (out,) = outputs
        accumulator = _accumulator(out, attrs, context)
        count, step = attrs["count"], context.step
        return lambda: accumulator.take(count, out, step.id)

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(attrs["count"] * outputs[0].size, (attrs["count"] + 1) * outputs[0].nbytes)


def advance_step(step: Output, name: str | None = None) -> Output:
    """Count the global step on by one, waking those in ``await_step``; gives the new value."""
    return update("AdvanceStep", step, name=name).out


def await_step(step: Output, local_step: Output, name: str | None = None) -> Output:
    """Wait until the global step ``step`` is greater than ``local_step``; gives its value then."""
    owner = variable_node(step)
    with step.graph.colocate_with(owner):
        return step.graph.add(
            "AwaitStep",
            local_step,
            name=name,
            variable=owner.attrs["variable"],
            container=owner.attrs.get("container", ""),
        ).out


def accumulator_apply(
    target: Output, gradient: Output, local_step: Output, worker: int, name: str | None = None
) -> Node:
    """Give ``worker``'s gradient of the variable ``target`` to that variable's accumulator, on its device."""
    owner = variable_node(target)
    if gradient.spec != target.spec:
        raise ShapeError(f"gradient {gradient.name} {gradient.spec} is not of variable {target.name} {target.spec}")
    with target.graph.colocate_with(owner):
        return target.graph.add(
            "AccumulatorApply",
            gradient,
            local_step,
            name=name,
            accumulator=owner.attrs["variable"],
            container=owner.attrs.get("container", ""),
            worker=worker,
        )


def accumulator_take(target: Output, count: int, name: str | None = None) -> Output:
    """The mean of ``count`` workers' gradients of the variable ``target``, on its device."""
    owner = variable_node(target)
    with target.graph.colocate_with(owner):
        return target.graph.add(
            "AccumulatorTake",
            name=name,
            accumulator=owner.attrs["variable"],
            container=owner.attrs.get("container", ""),
            count=count,
            shape=target.shape,
            dtype=target.dtype,
        ).out
