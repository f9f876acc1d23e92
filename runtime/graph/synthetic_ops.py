"""Compute that takes a stated time and no processor, for emulating a faster machine than the one at hand.

The tensors are real: gradients have their true sizes and travel as others do. Only their values are made up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_floating
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


def _check(inputs: Specs, *durations: float) -> None:
    if not inputs or inputs[0].shape != ():
        raise ShapeError("takes a scalar, which puts the layers in order, and then any parameters")
    for spec in inputs:
        check_floating(spec)
    if min(durations) < 0:
        raise ShapeError(f"times {durations} must not be negative")


@register
class SyntheticCompute(Op):
    """Takes ``seconds`` of the thread's time without using the processor, its gradient ``gradient_seconds``. Inputs: a scalar
    that comes out again, so that layers are in order, and the layer's parameters, which are waited for and not read."""

    attributes = ("seconds", "gradient_seconds")
    stateful = True

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        _check(inputs, attrs["seconds"], attrs["gradient_seconds"])
        return [inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        seconds, source, out = attrs["seconds"], inputs[0], outputs[0]

        def compute() -> None:
            time.sleep(seconds)
            np.copyto(out, source)

        return compute

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        (g,) = grads
        assert g is not None
        # It reads nothing of the forward pass, which would be pruned where only the gradients are fetched.
        with graph.control_dependencies([node]):
            return graph.add(
                "SyntheticComputeGrad", g, *node.inputs[1:], seconds=node.attrs["gradient_seconds"]
            ).outputs

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(0, 0)


@register
class SyntheticComputeGrad(Op):
    """Takes ``seconds``, the time to write the gradients included. Inputs: the scalar's gradient, the parameters. Outputs: the
    scalar's gradient, and for each parameter a tensor of its shape full of that number."""

    attributes = ("seconds",)
    stateful = True

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        _check(inputs, attrs["seconds"])
        return list(inputs)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        seconds, source = attrs["seconds"], inputs[0]
        targets = tuple(outputs)

        def compute() -> None:
            until = time.perf_counter() + seconds
            for target in targets:
                np.copyto(target, source)
            left = until - time.perf_counter()
            if left > 0:
                time.sleep(left)

        return compute

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(0, sum(spec.nbytes for spec in outputs))
