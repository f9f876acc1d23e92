"""LeNet (LeCun et al., 1998) with max-pooling and ReLU; a smaller form for the 8 x 8 digits that scikit-learn carries."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification, image_inputs, scaled


@dataclass(frozen=True, slots=True)
class LeNet:
    """Images of 28 x 28 pixels (61,706 parameters) or fewer. Below 20 pixels kernels are 3 x 3, there are four times the filters
    and one dense layer less: 46,178 parameters for 8 x 8 pixels."""

    image: int = 28
    channels: int = 1
    classes: int = 10
    width: float = 1.0

    def inputs(self, batch: int) -> Inputs:
        return image_inputs(batch, self.image, self.channels)

    def build(self, layers: Layers, images: Output, labels: Output) -> Network:
        size = [scaled(units, self.width) for units in (6, 16, 120, 84)]
        if self.image < 20:
            x = layers.conv(images, "conv1", 4 * size[0], 3, pool=(2, 2))
            x = layers.conv(x, "conv2", 4 * size[1], 3, pool=(2, 2))
            x = layers.dense(x, "fc3", size[2], activation="relu")
            return classification(layers.dense(x, "fc4", self.classes), labels)
        x = layers.conv(images, "conv1", size[0], 5, pool=(2, 2))
        x = layers.conv(x, "conv2", size[1], 5, padding="VALID", pool=(2, 2))
        x = layers.dense(x, "fc3", size[2], activation="relu")
        x = layers.dense(x, "fc4", size[3], activation="relu")
        return classification(layers.dense(x, "fc5", self.classes), labels)
