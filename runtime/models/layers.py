"""Layers: the variables of a network and the graph nodes that use them, built once and used by any number of towers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.graph import array_ops as ops
from runtime.graph import initialisers, nn_ops
from runtime.graph.graph import Graph, Output
from runtime.graph.initialisers import Initialiser
from runtime.graph.state_ops import assign, variable

# Placeholders of a model by name: shape and dtype.
Inputs = dict[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True, slots=True)
class Product:
    """One convolution or matrix product of the forward pass: its layer and its floating-point operations for the batch.

    ``first``: nothing before it is trained, so the backward pass does not need the gradient of its input.
    """

    layer: str
    flops: int
    first: bool


class Parameters:
    """The variables of one network by name, in the order in which they were made. All towers share them.

    They are named ``prefix`` + name, whatever scopes the tower that makes them is in, so that the graphs of other workers know
    them by the same names.
    """

    def __init__(self, graph: Graph, prefix: str = "") -> None:
        self.trained: dict[str, Output] = {}
        self.statistics: dict[str, Output] = {}
        self.graph, self._prefix = graph, prefix

    def get(self, name: str, shape: Sequence[int], initialiser: Initialiser, trained: bool = True) -> Output:
        """The variable called ``name``, made now if it does not exist; ShapeError if it has another shape."""
        table = self.trained if trained else self.statistics
        found = table.get(name)
        if found is None:
            with self.graph.as_default(), self.graph.root_scope():
                found = table[name] = variable(self._prefix + name, shape, np.float32, initialiser)
        elif found.shape != tuple(shape):
            raise ShapeError(f"variable {name} is of shape {found.shape}, this tower needs {tuple(shape)}")
        return found


class Layers:
    """Builds one tower. ``training`` chooses batch statistics (and their running averages) and dropout.

    ``updates`` are nodes to run with each training step beside the optimizer's. Convolutions followed by pooling add bias and
    ReLU after the pooling: the result is the same, because both are monotone, and a quarter of the elements are touched.
    """

    def __init__(self, parameters: Parameters, training: bool, initialiser: str = "he") -> None:
        if initialiser not in ("he", "dlbench"):
            raise GraphError(f"initialiser {initialiser!r} is not one of he, dlbench")
        self.parameters = parameters
        self.training = training
        self.updates: list[Output] = []
        self.products: list[Product] = []
        self._initialiser = initialiser

    def weights(self, name: str, shape: Sequence[int], relu: bool = True) -> Output:
        """A weight tensor: normal of variance 2 / fan-in before a ReLU (He), 1 / fan-in otherwise; or dlbench's truncated normal
        of standard deviation 0.1."""
        if self._initialiser == "dlbench":
            return self.parameters.get(name, shape, initialisers.truncated_normal(0.0, 0.1))
        return self.parameters.get(name, shape, initialisers.normal(0.0, ((1 + relu) / math.prod(shape[:-1])) ** 0.5))

    def bias(self, name: str, size: int) -> Output:
        return self.parameters.get(name, (size,), initialisers.zeros())

    def product(self, name: str, flops: int, first: bool | None = None) -> None:
        """Enter a product of the forward pass in the count of operations; the first one entered is ``first`` by default."""
        self.products.append(Product(name, flops, not self.products if first is None else first))

    def conv(
        self,
        x: Output,
        name: str,
        filters: int,
        kernel: int,
        stride: int = 1,
        padding: str | int = "SAME",
        *,
        bias: bool = True,
        relu: bool = True,
        pool: tuple[int, int] | None = None,
    ) -> Output:
        """Convolution, then max-pooling of (kernel, stride) if given, then bias and ReLU if wanted."""
        channels = x.shape[3]
        w = self.weights(f"{name}/weights", (kernel, kernel, channels, filters))
        x = nn_ops.conv2d(x, w, stride, padding, name=f"{name}/conv")
        self.product(name, 2 * x.spec.size * kernel * kernel * channels)
        if pool is not None:
            x = nn_ops.max_pool(x, *pool, name=f"{name}/pool")
        if bias:
            return nn_ops.bias_add(x, self.bias(f"{name}/biases", filters), relu, name=f"{name}/bias")
        return nn_ops.relu(x, name=f"{name}/relu") if relu else x

    def dense(self, x: Output, name: str, units: int, *, activation: str | None = None) -> Output:
        """Fully connected; ``activation`` is None, "relu", "sigmoid" or "tanh". Images are flattened in the order h, w, c."""
        if len(x.shape) > 2:
            x = ops.reshape(x, (x.shape[0], -1), name=f"{name}/flat")
        inputs = x.shape[1]
        w = self.weights(f"{name}/weights", (inputs, units), activation == "relu")
        y = ops.matmul(x, w, name=f"{name}/product")
        self.product(name, 2 * x.shape[0] * inputs * units)
        y = nn_ops.bias_add(y, self.bias(f"{name}/biases", units), activation == "relu", name=f"{name}/bias")
        if activation == "sigmoid":
            return ops.sigmoid(y, name=f"{name}/sigmoid")
        return ops.tanh(y, name=f"{name}/tanh") if activation == "tanh" else y

    def batch_norm(self, x: Output, name: str, *, relu: bool = True, momentum: float = 0.9) -> Output:
        """Normalise each channel, by the batch when training and by the running averages otherwise."""
        channels = x.shape[-1]
        get = self.parameters.get
        gamma = get(f"{name}/gamma", (channels,), initialisers.constant(1.0))
        beta = get(f"{name}/beta", (channels,), initialisers.zeros())
        mean = get(f"{name}/moving_mean", (channels,), initialisers.zeros(), trained=False)
        variance = get(f"{name}/moving_variance", (channels,), initialisers.constant(1.0), trained=False)
        if self.training:
            x, batch = nn_ops.batch_norm(x, gamma, beta, name=f"{name}/normalise")
            count = x.spec.size // channels
            unbiased = count / max(1, count - 1)
            for running, seen in ((mean, batch.mean), (variance, ops.mul(batch.variance, unbiased))):
                self.updates.append(assign(running, ops.add(ops.mul(running, momentum), ops.mul(seen, 1 - momentum))))
        else:
            x = nn_ops.batch_norm_inference(x, gamma, beta, mean, variance, name=f"{name}/normalise")
        return nn_ops.relu(x, name=f"{name}/relu") if relu else x

    def dropout(self, x: Output, name: str, rate: float, seed: int = 0) -> Output:
        """Dropout when training; ``x`` itself otherwise, or if ``rate`` is 0."""
        return nn_ops.dropout(x, rate, seed, name=name) if self.training and rate > 0 else x


@dataclass(frozen=True, slots=True)
class Network:
    """What a model's builder gives for one tower: logits [n, classes], the labels [n] they are judged by, and the scalar loss.
    n is the batch, times the number of steps for sequences."""

    logits: Output
    labels: Output
    loss: Output


def classification(logits: Output, labels: Output) -> Network:
    """The mean cross-entropy of ``logits`` for integer ``labels``."""
    losses = nn_ops.sparse_softmax_cross_entropy(logits, labels, name="losses")
    return Network(logits, labels, ops.reduce_mean(losses, name="loss"))


def scaled(channels: int, width: float) -> int:
    """``channels`` times ``width``, at least one."""
    return max(1, math.floor(channels * width + 0.5))


def image_inputs(batch: int, image: int, channels: int) -> Inputs:
    """The placeholders of an image classifier."""
    return {"images": ((batch, image, image, channels), np.float32), "labels": ((batch,), np.int32)}
