"""Layers' ops: activations, bias, dropout.

``from runtime.graph import nn_ops`` also gives the images' ops (``conv_ops``, ``pool_ops``), normalisation (``norm_ops``), the
LSTM cell (``recurrent_ops``) and classification (``softmax_ops``), so that one import is enough to write a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.conv_ops import conv2d
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_count, check_floating, check_same_dtype
from runtime.graph.norm_ops import batch_norm, batch_norm_inference, local_response_norm
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.graph.pool_ops import avg_pool, global_avg_pool, max_pool
from runtime.graph.recurrent_ops import lstm_cell
from runtime.graph.softmax_ops import in_top_k, softmax, sparse_softmax_cross_entropy
from runtime.kernels import dropout as dropout_kernels
from runtime.kernels import elementwise
from runtime.kernels.scratch import Scratch
from runtime.tensor import TensorSpec

__all__ = [
    "avg_pool", "batch_norm", "batch_norm_inference", "bias_add", "conv2d", "dropout", "global_avg_pool", "in_top_k",
    "local_response_norm", "lstm_cell", "max_pool", "relu", "softmax", "sparse_softmax_cross_entropy",
]  # fmt: skip

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


@register
class Relu(Op):
    """max(x, 0)"""

    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        return [inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        return elementwise.compile_relu(inputs[0], outputs[0], context.threads)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("ReluGrad", node.out, grads[0]).out]


@register
class ReluGrad(Op):
    """The second input where the first (the ReLU's output) is positive, else 0."""

    inplace = ((1, 0), (0, 0))

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_floating(inputs[0])
        if inputs[0] != inputs[1]:
            raise ShapeError(f"the output {inputs[0]} and its gradient {inputs[1]} differ")
        return [inputs[0]]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return elementwise.relu_gradient_workspace(inputs[0].dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (y, dy), (dx,) = inputs, outputs
        memory = context.workspace((elementwise.relu_gradient_workspace(y.itemsize, context.threads),), np.uint8)
        return elementwise.compile_relu_gradient(y, dy, dx, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [None, graph.add("ReluGrad", node.inputs[0], grads[0]).out]


@register
class BiasAdd(Op):
    """x[..., c] + bias[c], cut off below zero where the attribute ``relu`` is set. Inputs: x, bias."""

    attributes = ("relu",)
    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        check_floating(inputs[0])
        x, bias = inputs
        if not x.shape or bias.shape != x.shape[-1:]:
            raise ShapeError(f"a bias of shape {bias.shape} does not fit the last axis of {x.shape}")
        return [x]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        rows, channels = math.prod(inputs[0].shape[:-1]), inputs[1].size
        return elementwise.bias_workspace(rows, channels, inputs[0].dtype.itemsize)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, bias), (y,) = inputs, outputs
        if x.size == 0:
            return None
        size = elementwise.bias_workspace(x.size // bias.size, bias.size, x.itemsize)
        memory = context.workspace((size,), np.uint8)
        return elementwise.compile_bias(x, bias, y, context.threads, memory, bool(attrs.get("relu")))

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        (g,) = grads
        assert g is not None
        if node.attrs.get("relu"):
            g = graph.add("ReluGrad", node.out, g).out
        return [g, graph.add("BiasAddGrad", g).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        each = 2 if attrs.get("relu") else 1
        return Cost(each * outputs[0].size, 2 * outputs[0].nbytes + inputs[1].nbytes)


@register
class BiasAddGrad(Op):
    """The sum over all axes but the last."""

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        if not inputs[0].shape:
            raise ShapeError("a scalar has no last axis")
        return [TensorSpec(inputs[0].shape[-1:], inputs[0].dtype)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return elementwise.column_sum_workspace(inputs[0].shape[-1], inputs[0].dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (dy,), (out,) = inputs, outputs
        memory = context.workspace((BiasAddGrad.workspace([TensorSpec.of(dy)], attrs, context.threads),), np.uint8)
        matrix = dy.reshape(dy.size // max(1, out.size), out.size)
        return elementwise.compile_column_sum(matrix, out, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [graph.add("BroadcastTo", grads[0], shape=node.inputs[0].shape).out if grads[0] is not None else None]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(inputs[0].size, inputs[0].nbytes + outputs[0].nbytes)


@register
class Dropout(Op):
    """x / (1 - rate) where the mask, the second output, keeps it, else 0. The mask follows from ``seed``, the node's name and
    the step's number alone, so that every placement and every replay of a step drops the same elements."""

    attributes = ("rate", "seed")
    inplace = ((0, 0),)
    stateful = True

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        if not 0 <= attrs["rate"] < 1:
            raise ShapeError(f"rate {attrs['rate']} is not in [0, 1)")
        return [inputs[0], TensorSpec(inputs[0].shape, np.dtype(bool))]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return 4 * inputs[0].size  # float32 noise

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x,), (y, mask) = inputs, outputs
        noise = Scratch(context.workspace((4 * x.size,), np.uint8)).take((x.size,), np.dtype(np.float32))
        return dropout_kernels.compile_dropout(
            x, y, mask, attrs["rate"], attrs["seed"], context.node, context.step, noise
        )

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("DropoutGrad", grads[0], node.outputs[1], rate=node.attrs["rate"]).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(3 * outputs[0].size, 2 * outputs[0].nbytes + outputs[1].nbytes)


@register
class DropoutGrad(Op):
    """The gradient / (1 - rate) where the mask kept the element, else 0. Inputs: gradient, mask."""

    attributes = ("rate",)
    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        if inputs[1] != TensorSpec(inputs[0].shape, np.dtype(bool)):
            raise ShapeError(f"the mask is {inputs[1]}, the gradient {inputs[0]}")
        return [inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        return dropout_kernels.compile_dropout_gradient(inputs[0], inputs[1], outputs[0], attrs["rate"])

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("DropoutGrad", grads[0], node.inputs[1], rate=node.attrs["rate"]).out, None]


def relu(x: Output, name: str | None = None) -> Output:
    return x.graph.add("Relu", x, name=name).out


def bias_add(x: Output, bias: Output, relu: bool = False, name: str | None = None) -> Output:
    """``x[..., c] + bias[c]``; with ``relu`` the larger of that and zero, in the same pass."""
    return x.graph.add("BiasAdd", x, bias, name=name, relu=relu).out


def dropout(x: Output, rate: float, seed: int = 0, name: str | None = None) -> Output:
    """Drop each element with probability ``rate`` and scale the others up, so that the mean stays."""
    return x.graph.add("Dropout", x, name=name, rate=float(rate), seed=int(seed)).outputs[0]
