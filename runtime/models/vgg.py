"""VGG (Simonyan and Zisserman, 2014): 3 x 3 convolutions in five blocks, then three dense layers."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError
from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification, image_inputs, scaled

_BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@dataclass(frozen=True, slots=True)
class VGG:
    """``depth`` 11, 13, 16 (138,357,544 parameters) or 19."""

    depth: int = 16
    image: int = 224
    channels: int = 3
    classes: int = 1000
    width: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.depth not in _BLOCKS:
            raise ConfigError(f"VGG has the depths {', '.join(map(str, _BLOCKS))}, not {self.depth}")

    def inputs(self, batch: int) -> Inputs:
        return image_inputs(batch, self.image, self.channels)

    def build(self, layers: Layers, images: Output, labels: Output) -> Network:
        x = images
        for block, (count, filters) in enumerate(zip(_BLOCKS[self.depth], (64, 128, 256, 512, 512)), start=1):
            for index in range(1, count + 1):
                pool = (2, 2) if index == count else None
                x = layers.conv(x, f"conv{block}_{index}", scaled(filters, self.width), 3, pool=pool)
        for index in (6, 7):
            x = layers.dense(x, f"fc{index}", scaled(4096, self.width), activation="relu")
            x = layers.dropout(x, f"dropout{index}", self.dropout, seed=index)
        return classification(layers.dense(x, "fc8", self.classes), labels)
