"""Multi-layer perceptron with ReLU between the layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification


@dataclass(frozen=True, slots=True)
class MLP:
    """``hidden`` sizes between ``features`` inputs and ``classes`` outputs."""

    features: int = 784
    hidden: tuple[int, ...] = (256, 128)
    classes: int = 10

    def inputs(self, batch: int) -> Inputs:
        return {"features": ((batch, self.features), np.float32), "labels": ((batch,), np.int32)}

    def build(self, layers: Layers, features: Output, labels: Output) -> Network:
        x = features
        for index, units in enumerate(self.hidden, start=1):
            x = layers.dense(x, f"fc{index}", units, activation="relu")
        return classification(layers.dense(x, f"fc{len(self.hidden) + 1}", self.classes), labels)
