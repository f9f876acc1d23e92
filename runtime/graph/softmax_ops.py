"""Softmax ops: what a classifier ends in, its loss, and whether it was right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_count, check_floating
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import softmax as kernels
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


@register
class Softmax(Op):
    """exp(x) over its sum along the last axis."""

    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        if not inputs[0].shape or inputs[0].shape[-1] == 0:
            raise ShapeError(f"shape {inputs[0].shape} has no elements along its last axis")
        return [inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        return kernels.compile_softmax(inputs[0], outputs[0])

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("SoftmaxGrad", node.out, grads[0]).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(5 * outputs[0].size, 2 * outputs[0].nbytes)


@register
class SoftmaxGrad(Op):
    """y (g - sum of y g along the last axis). Inputs: y, the softmax, and g, its gradient."""

    inplace = ((1, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_floating(inputs[0])
        if inputs[0] != inputs[1]:
            raise ShapeError(f"the softmax {inputs[0]} and its gradient {inputs[1]} differ")
        return [inputs[0]]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return inputs[0].nbytes

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (y, dy), (dx,) = inputs, outputs
        return kernels.compile_softmax_gradient(y, dy, dx, context.workspace((y.nbytes,), np.uint8))

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(4 * outputs[0].size, 3 * outputs[0].nbytes)


def _check_classes(logits: TensorSpec, labels: TensorSpec) -> None:
    check_floating(logits)
    if len(logits.shape) != 2 or logits.shape[1] == 0:
        raise ShapeError(f"logits must be [batch, classes], not of shape {logits.shape}")
    if labels.dtype.kind not in "iu":
        raise ShapeError(f"labels must be integers, not {labels.dtype.name}")
    if labels.shape != logits.shape[:1]:
        raise ShapeError(f"labels of shape {labels.shape} do not fit logits of shape {logits.shape}")


@register
class SparseSoftmaxCrossEntropy(Op):
    """-log softmax(logits)[label], a row each, and the softmax, which the gradient reuses. Inputs: logits, labels."""

    inplace = ((0, 1),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        logits, labels = inputs
        _check_classes(logits, labels)
        return [TensorSpec(labels.shape, logits.dtype), logits]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (logits, labels), (loss, probabilities) = inputs, outputs
        return kernels.compile_cross_entropy(logits, labels, loss, probabilities, context.node)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        dloss, dprobabilities = grads
        logits: Output | None = None
        if dloss is not None:
            logits = graph.add("SparseSoftmaxCrossEntropyGrad", node.outputs[1], node.inputs[1], dloss).out
        if dprobabilities is not None:
            other = graph.add("SoftmaxGrad", node.outputs[1], dprobabilities).out
            logits = other if logits is None else graph.add("Add", logits, other).out
        return [logits, None]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(6 * outputs[1].size, 3 * outputs[1].nbytes)


@register
class SparseSoftmaxCrossEntropyGrad(Op):
    """(softmax - one at the label) times the loss's gradient. Inputs: softmax, labels, gradient of the losses."""

    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 3)
        probabilities, labels, dloss = inputs
        _check_classes(probabilities, labels)
        if dloss != TensorSpec(labels.shape, probabilities.dtype):
            raise ShapeError(f"the gradient {dloss} does not fit losses of shape {labels.shape}")
        return [probabilities]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (probabilities, labels, dloss), (dlogits,) = inputs, outputs
        return kernels.compile_cross_entropy_gradient(probabilities, labels, dloss, dlogits)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(outputs[0].size, 2 * outputs[0].nbytes)


@register
class InTopK(Op):
    """Whether fewer than ``k`` logits of the row are larger than its label's. Inputs: logits, labels."""

    attributes = ("k",)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        logits, labels = inputs
        _check_classes(logits, labels)
        if attrs["k"] < 1:
            raise ShapeError(f"k is {attrs['k']}, which no label can reach")
        return [TensorSpec(labels.shape, np.dtype(bool))]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (logits, labels), (found,) = inputs, outputs
        return kernels.compile_in_top_k(logits, labels, found, attrs["k"], context.node)


def softmax(x: Output, name: str | None = None) -> Output:
    """Along the last axis."""
    return x.graph.add("Softmax", x, name=name).out


def sparse_softmax_cross_entropy(logits: Output, labels: Output, name: str | None = None) -> Output:
    """Losses [batch] of ``logits`` [batch, classes] for integer ``labels`` [batch]."""
    return logits.graph.add("SparseSoftmaxCrossEntropy", logits, labels, name=name).outputs[0]


def in_top_k(logits: Output, labels: Output, k: int = 1, name: str | None = None) -> Output:
    """bool [batch]: whether the label's logit is among the ``k`` largest (ties count for it)."""
    return logits.graph.add("InTopK", logits, labels, name=name, k=k).out
