"""A model's tensors without its arithmetic: a step moves what the real one moves and takes the time that it is told.

This emulates machines that compute faster than the one at hand: Jia et al. (2018) have 16 AlexNet tensors, 246.6 MB, pulled and
pushed around 224/300 s of compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.errors import ConfigError
from runtime.graph import array_ops as ops
from runtime.graph import initialisers
from runtime.graph.graph import Graph, Output
from runtime.models.layers import Inputs, Layers, Network
from runtime.models.model import Architecture, Model, build_model


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The parameters of ``like``, in its layers' order; a training step computes for ``seconds`` in all, shared by the layers in
    proportion to their operations, a third of it forward. Layers without products take no time.

    With ``overlap`` False the layers are one: it waits for all weights, and all gradients come at its end, so that the
    network's time adds to the compute's in full.
    """

    like: Architecture
    seconds: float = 224 / 300
    batch: int = 24
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ConfigError(f"a step cannot take {self.seconds} s")

    def inputs(self, batch: int) -> Inputs:
        return {"seed": ((), np.float32)}

    def build(self, layers: Layers, seed: Output) -> Network:
        real = self._real()
        tensors: dict[str, list[Output]] = {}
        for parameter in real.manifest():
            value = layers.parameters.get(parameter.name, parameter.spec.shape, initialisers.zeros())
            tensors.setdefault(parameter.name.rpartition("/")[0], []).append(value)
        flops: dict[str, int] = {}
        for product in real.products:
            owner = next((name for name in (product.layer, product.layer.rpartition("/")[0]) if name in tensors), "")
            flops[owner] = flops.get(owner, 0) + product.flops
            tensors.setdefault(owner, [])
            layers.product(product.layer, product.flops, product.first)
        total, token = max(1, sum(flops.values())), seed
        if not self.overlap:
            tensors, flops = {"whole": [value for values in tensors.values() for value in values]}, {"whole": total}
        for name, values in tensors.items():
            forward = self.seconds / 3 * flops.get(name, 0) / total
            token = seed.graph.add(
                "SyntheticCompute",
                token,
                *values,
                name=f"{name or 'rest'}/compute",
                seconds=forward,
                gradient_seconds=2 * forward,
            ).out
        logits = ops.reshape(token, (1, 1), name="logits")
        labels = ops.constant(np.zeros(1, np.int32), name="labels")
        return Network(logits, labels, ops.identity(token, name="loss"))

    def _real(self) -> Model:
        return build_model("like", self.like, self.batch, graph=Graph())
