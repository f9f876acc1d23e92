"""The LSTM cell: one matrix product by MatMul, and everything elementwise in one op."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_count, check_floating, check_same_dtype
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import recurrent
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


@register
class LSTMGates(Op):
    """Inputs: preactivations [b, 4 h] in the order input, forget, candidate, output, and the cell state before [b, h].
    Outputs: hidden state, cell state [b, h], and the activated gates [b, 4 h] for the gradient."""

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        check_floating(inputs[0])
        gates, before = inputs
        if len(before.shape) != 2 or gates.shape != (before.shape[0], 4 * before.shape[1]):
            raise ShapeError(f"preactivations of shape {gates.shape} are not [b, 4 h] for a cell state {before.shape}")
        return [before, before, gates]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return inputs[1].nbytes

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (preactivations, before), (hidden, cell, gates) = inputs, outputs
        memory = context.workspace((before.nbytes,), np.uint8)
        return recurrent.compile_lstm(preactivations, before, hidden, cell, gates, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        dhidden, dcell, dgates = grads
        if dgates is not None:
            raise ShapeError(f"node {node.name}: no gradient flows through the gates output")
        _, cell, gates = node.outputs
        given = [grad for grad in (dhidden, dcell) if grad is not None]
        return graph.add(
            "LSTMGatesGrad", gates, node.inputs[1], cell, *given, hidden=dhidden is not None, cell=dcell is not None
        ).outputs

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(20 * inputs[1].size, sum(spec.nbytes for spec in (*inputs, *outputs)))


@register
class LSTMGatesGrad(Op):
    """Inputs: gates, cell state before and after, then the gradient of the hidden state if ``hidden`` and that of the cell
    state if ``cell``. Outputs: gradients of the preactivations and of the cell state before."""

    attributes = ("hidden", "cell")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 3 + bool(attrs["hidden"]) + bool(attrs["cell"]))
        check_same_dtype(inputs)
        gates, before = inputs[0], inputs[1]
        for spec in inputs[2:]:
            if spec != before:
                raise ShapeError(f"{spec} and the cell state {before} differ")
        return [gates, before]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return 2 * inputs[1].nbytes

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        given = iter(inputs[3:])
        dhidden = next(given) if attrs["hidden"] else None
        dcell = next(given) if attrs["cell"] else None
        memory = context.workspace((2 * inputs[1].nbytes,), np.uint8)
        (gates, before, after), (dgates, dbefore) = inputs[:3], outputs
        return recurrent.compile_lstm_gradient(gates, before, after, dhidden, dcell, dgates, dbefore, memory)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(30 * inputs[1].size, sum(spec.nbytes for spec in (*inputs, *outputs)))


def lstm_cell(preactivations: Output, cell: Output, name: str | None = None) -> tuple[Output, Output]:
    """Hidden and cell state [b, h] after one step, from preactivations [b, 4 h] (input, forget, candidate, output)."""
    hidden, after, _ = preactivations.graph.add("LSTMGates", preactivations, cell, name=name).outputs
    return hidden, after
