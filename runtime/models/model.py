"""Model: a network built into a graph, and what there is to know about its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import ConfigError, GraphError, ShapeError
from runtime.graph import array_ops as ops
from runtime.graph import nn_ops
from runtime.graph.graph import Graph, Output, current_graph
from runtime.models.layers import Inputs, Layers, Network, Parameters, Product
from runtime.tensor import TensorSpec


class Architecture(Protocol):
    """What a model's file defines: its options as fields, its placeholders, and its layers."""

    def inputs(self, batch: int) -> Inputs: ...

    @property
    def build(self) -> Callable[..., Network]:
        """A method that takes ``Layers`` and the inputs by name."""
        ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """A line of a manifest."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Model:
    """One tower of a network in a graph.

    ``inputs``: what to feed, by name. ``parameters``: the trained variables. ``statistics``: running averages, kept up by
    ``updates``, which are run with each training step. ``logits`` [n, classes]; ``loss`` and ``accuracy`` are scalars, means over
    ``labels`` [n].
    """

    name: str
    architecture: Architecture
    batch: int
    training: bool
    inputs: dict[str, Output]
    logits: Output
    labels: Output
    loss: Output
    accuracy: Output
    parameters: list[Output]
    statistics: list[Output]
    updates: list[Output]
    products: list[Product]
    variables: Parameters
    initialiser: str

    def tower(
        self, batch: int, training: bool = False, scope: str = "eval", inputs: Mapping[str, Output] | None = None
    ) -> Model:
        """The same network on the same variables for another batch, its nodes named ``scope``/...; by default for evaluation."""
        return build_tower(
            self.name, self.architecture, self.variables, batch, training, scope, inputs or {}, self.initialiser
        )

    def manifest(self) -> list[Parameter]:
        """Trained parameters in the order in which the layers have them."""
        return [Parameter(name, value.spec) for name, value in self.variables.trained.items()]

    @property
    def parameter_count(self) -> int:
        return sum(value.spec.size for value in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """What a worker pulls, and pushes as gradients, each step."""
        return sum(value.spec.nbytes for value in self.parameters)

    @property
    def forward_flops(self) -> int:
        """Multiplications and additions of the forward pass's convolutions and matrix products, for the whole batch."""
        return sum(product.flops for product in self.products)

    @property
    def training_flops(self) -> int:
        """As ``forward_flops`` for forward and backward pass: each product thrice, less the gradient of the network's input."""
        return sum((2 if product.first else 3) * product.flops for product in self.products)


def build_tower(
    name: str,
    architecture: Architecture,
    variables: Parameters,
    batch: int,
    training: bool,
    scope: str,
    inputs: Mapping[str, Output],
    initialiser: str,
) -> Model:
    """Build the architecture's layers into the variables' graph; ``inputs`` replace placeholders of the same name."""
    graph = variables.graph
    layers = Layers(variables, training, initialiser)
    wanted = architecture.inputs(batch)
    unknown = set(inputs) - set(wanted)
    if unknown:
        raise GraphError(f"{name} has no input {', '.join(sorted(unknown))}; it takes {', '.join(wanted)}")
    with graph.as_default(), graph.scope(scope) if scope else nullcontext():
        given: dict[str, Output] = {}
        for key, (shape, dtype) in wanted.items():
            value = inputs.get(key)
            spec = TensorSpec(shape, dtype)
            if value is not None and value.spec != spec:
                raise ShapeError(f"input {key} of {name} is {value.spec}, not {spec}")
            given[key] = ops.placeholder(shape, dtype, name=key) if value is None else value
        network = architecture.build(layers, **given)
        hits = nn_ops.in_top_k(network.logits, network.labels, 1, name="hits")
        accuracy = ops.reduce_mean(ops.cast(hits, network.logits.dtype), name="accuracy")
    return Model(
        name=name,
        architecture=architecture,
        batch=batch,
        training=training,
        inputs=given,
        logits=network.logits,
        labels=network.labels,
        loss=network.loss,
        accuracy=accuracy,
        parameters=list(variables.trained.values()),
        statistics=list(variables.statistics.values()),
        updates=layers.updates,
        products=layers.products,
        variables=variables,
        initialiser=initialiser,
    )


def build_model(
    name: str,
    architecture: Architecture,
    batch: int,
    *,
    training: bool = True,
    graph: Graph | None = None,
    scope: str = "",
    prefix: str = "",
    inputs: Mapping[str, Output] | None = None,
    initialiser: str = "he",
) -> Model:
    """A new network with variables of its own, named ``prefix`` + layer + "/weights" and so on; nodes are named ``scope``/...

    Devices are the graph's business: ``graph.device`` for the nodes, ``graph.variable_devices`` for the variables.
    """
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(f"a batch of {batch!r} examples cannot be built")
    variables = Parameters(current_graph() if graph is None else graph, prefix)
    return build_tower(name, architecture, variables, batch, training, scope, inputs or {}, initialiser)
