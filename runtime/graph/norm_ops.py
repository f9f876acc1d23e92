"""Batch normalisation (training and inference) and AlexNet's local response normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_count, check_floating, check_same_dtype
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import normalization
from runtime.kernels.parallel import sequence
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


def _check_channels(inputs: Specs, first: int) -> TensorSpec:
    """The spec of a value a channel; every input from ``first`` on must be one."""
    check_same_dtype(inputs)
    check_floating(inputs[0])
    if not inputs[0].shape or inputs[0].size == 0:
        raise ShapeError(f"shape {inputs[0].shape} has nothing to normalise")
    channel = TensorSpec(inputs[0].shape[-1:], inputs[0].dtype)
    for spec in inputs[first:]:
        if spec != channel:
            raise ShapeError(f"{spec} is not one value for each of the {channel.shape[0]} channels of {inputs[0]}")
    return channel


def _matrix(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _statistics_workspace(x: TensorSpec) -> int:
    return normalization.batch_workspace(math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize)


@register
class BatchNorm(Op):
    """Training-time batch normalisation. Inputs: x, gamma, beta. Outputs: y, and the batch's mean and (biased) variance."""

    attributes = ("epsilon",)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 3)
        channel = _check_channels(inputs, 1)
        return [inputs[0], channel, channel]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return _statistics_workspace(inputs[0])

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, gamma, beta), (y, mean, variance) = inputs, outputs
        memory = context.workspace((_statistics_workspace(TensorSpec.of(x)),), np.uint8)
        return sequence(
            [
                normalization.compile_batch_statistics(_matrix(x), mean, variance, memory),
                normalization.compile_batch_normalise(
                    _matrix(x), gamma, beta, mean, variance, _matrix(y), attrs["epsilon"], context.threads
                ),
            ]
        )

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        dy, dmean, dvariance = grads
        if dmean is not None or dvariance is not None:
            raise ShapeError(f"node {node.name}: no gradient flows through the batch's statistics")
        assert dy is not None
        x, gamma, _ = node.inputs
        _, mean, variance = node.outputs
        return graph.add("BatchNormGrad", dy, x, gamma, mean, variance, epsilon=node.attrs["epsilon"]).outputs

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(7 * inputs[0].size, 4 * inputs[0].nbytes)


@register
class BatchNormGrad(Op):
    """Inputs: gradient of y, x, gamma, mean, variance. Outputs: gradients of x, gamma, beta."""

    attributes = ("epsilon",)
    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 5)
        channel = _check_channels(inputs, 2)
        if inputs[0] != inputs[1]:
            raise ShapeError(f"the gradient {inputs[0]} and x {inputs[1]} differ")
        return [inputs[1], channel, channel]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return _statistics_workspace(inputs[0])

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (dy, x, gamma, mean, variance), (dx, dgamma, dbeta) = inputs, outputs
        memory = context.workspace((_statistics_workspace(TensorSpec.of(x)),), np.uint8)
        return normalization.compile_batch_gradient(
            _matrix(dy), _matrix(x), gamma, mean, variance, _matrix(dx), dgamma, dbeta, attrs["epsilon"], memory
        )

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(11 * inputs[0].size, 5 * inputs[0].nbytes)


@register
class BatchNormInference(Op):
    """gamma (x - mean) / sqrt(variance + epsilon) + beta with given statistics. Inputs: x, gamma, beta, mean, variance."""

    attributes = ("epsilon",)
    inplace = ((0, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 5)
        _check_channels(inputs, 1)
        return [inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        x, gamma, beta, mean, variance = inputs
        return normalization.compile_batch_normalise(
            _matrix(x), gamma, beta, mean, variance, _matrix(outputs[0]), attrs["epsilon"], context.threads
        )

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(2 * inputs[0].size, 2 * inputs[0].nbytes)


@register
class LocalResponseNorm(Op):
    """x / (bias + alpha sum of squares over the channels up to ``depth_radius`` away)^beta. Outputs: that, and the bracket."""

    attributes = ("depth_radius", "bias", "alpha", "beta")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_floating(inputs[0])
        if not inputs[0].shape or attrs["depth_radius"] < 0:
            raise ShapeError(f"depth_radius {attrs['depth_radius']} on shape {inputs[0].shape}")
        return [inputs[0], inputs[0]]

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        x, y, scale = _matrix(inputs[0]), _matrix(outputs[0]), _matrix(outputs[1])
        radius, bias, alpha, beta = (attrs[key] for key in ("depth_radius", "bias", "alpha", "beta"))
        return normalization.compile_local_response(x, y, scale, radius, bias, alpha, beta, context.threads)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        dy, dscale = grads
        if dscale is not None or dy is None:
            raise ShapeError(f"node {node.name}: no gradient flows through the scale output")
        attrs = {key: node.attrs[key] for key in ("depth_radius", "alpha", "beta")}
        return [graph.add("LocalResponseNormGrad", node.inputs[0], *node.outputs, dy, **attrs).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost((2 * attrs["depth_radius"] + 6) * inputs[0].size, 3 * inputs[0].nbytes)


@register
class LocalResponseNormGrad(Op):
    """Inputs: x, y, scale, gradient of y."""

    attributes = ("depth_radius", "alpha", "beta")
    inplace = ((3, 0),)

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 4)
        for spec in inputs[1:]:
            if spec != inputs[0]:
                raise ShapeError(f"{inputs[0]} and {spec} differ")
        return [inputs[0]]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        return 2 * _statistics_workspace(inputs[0])

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        x, y, scale, dy = map(_matrix, inputs)
        memory = context.workspace((2 * _statistics_workspace(TensorSpec.of(inputs[0])),), np.uint8)
        radius, alpha, beta = (attrs[key] for key in ("depth_radius", "alpha", "beta"))
        return normalization.compile_local_response_gradient(
            x, y, scale, dy, _matrix(outputs[0]), radius, alpha, beta, memory
        )

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost((2 * attrs["depth_radius"] + 8) * inputs[0].size, 5 * inputs[0].nbytes)


class BatchStatistics(NamedTuple):
    """What a training-time batch normalisation saw: mean and biased variance a channel."""

    mean: Output
    variance: Output


def batch_norm(
    x: Output, gamma: Output, beta: Output, epsilon: float = 1e-5, name: str | None = None
) -> tuple[Output, BatchStatistics]:
    """``x`` [..., c] normalised by its own mean and variance a channel, and those two for the running averages."""
    y, mean, variance = x.graph.add("BatchNorm", x, gamma, beta, name=name, epsilon=float(epsilon)).outputs
    return y, BatchStatistics(mean, variance)


def batch_norm_inference(
    x: Output,
    gamma: Output,
    beta: Output,
    mean: Output,
    variance: Output,
    epsilon: float = 1e-5,
    name: str | None = None,
) -> Output:
    """``x`` [..., c] normalised by given statistics, as when a trained model is used."""
    return x.graph.add("BatchNormInference", x, gamma, beta, mean, variance, name=name, epsilon=float(epsilon)).out


def local_response_norm(
    x: Output,
    depth_radius: int = 2,
    bias: float = 2.0,
    alpha: float = 1e-4,
    beta: float = 0.75,
    name: str | None = None,
) -> Output:
    """AlexNet's normalisation over neighbouring channels; the defaults are that paper's (n = 5, k = 2)."""
    return x.graph.add(
        "LocalResponseNorm",
        x,
        name=name,
        depth_radius=depth_radius,
        bias=float(bias),
        alpha=float(alpha),
        beta=float(beta),
    ).outputs[0]
