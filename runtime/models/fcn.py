"""dlbench's synthetic fully connected networks (Shi et al., 2016): sigmoid layers of 2048 units between wide ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification


@dataclass(frozen=True, slots=True)
class FCN:
    """``hidden`` layers of ``units`` between ``features`` inputs and as many classes. Three are FCN-5 (117,997,696 parameters),
    six FCN-8."""

    hidden: int = 3
    features: int = 26752
    units: int = 2048

    def inputs(self, batch: int) -> Inputs:
        return {"features": ((batch, self.features), np.float32), "labels": ((batch,), np.int32)}

    def build(self, layers: Layers, features: Output, labels: Output) -> Network:
        x = features
        for index in range(1, self.hidden + 1):
            x = layers.dense(x, f"fc{index}", self.units, activation="sigmoid")
        return classification(layers.dense(x, f"fc{self.hidden + 1}", self.features), labels)
