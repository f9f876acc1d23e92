"""AlexNet in two forms.

``dlbench``: what the benchmark scripts of HKBU's dlbench train, and with them Jia et al. (2018): one tower, 96-256-384-256-256
filters, no response normalisation, no dropout, ReLU after every layer, the last one included; 61,640,936 parameters.
``torchvision``: the single-tower form of Krizhevsky (2014), as torchvision has it: 64-192-384-256-256 filters, padded, dropout
before the first two dense layers; 61,100,840 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError
from runtime.graph import nn_ops
from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification, image_inputs, scaled

_FILTERS = {"dlbench": (96, 256, 384, 256, 256), "torchvision": (64, 192, 384, 256, 256)}


@dataclass(frozen=True, slots=True)
class AlexNet:
    """``width`` scales filters and units, ``image`` is the number of pixels a side (63 is the least): for tests, and for
    machines a hundred times slower. ``dropout`` and ``lrn`` (local response normalisation, as in the first AlexNet) are off, as in
    what we compare with."""

    form: str = "dlbench"
    image: int = 227
    channels: int = 3
    classes: int = 1000
    width: float = 1.0
    dropout: float = 0.0
    lrn: bool = False

    def __post_init__(self) -> None:
        if self.form not in _FILTERS:
            raise ConfigError(f"AlexNet has the forms {', '.join(_FILTERS)}, not {self.form!r}")

    def inputs(self, batch: int) -> Inputs:
        return image_inputs(batch, self.image, self.channels)

    def build(self, layers: Layers, images: Output, labels: Output) -> Network:
        filters = [scaled(count, self.width) for count in _FILTERS[self.form]]
        units = scaled(4096, self.width)
        # 227 pixels without padding give the same 55 x 55 outputs as 224 with 2 a side, which is torchvision's.
        first = "VALID" if self.form == "dlbench" or (self.image - 11) % 4 == 0 else 2
        x = layers.conv(images, "conv1", filters[0], 11, 4, first, pool=(3, 2))
        if self.lrn:
            x = nn_ops.local_response_norm(x, name="norm1")
        x = layers.conv(x, "conv2", filters[1], 5, pool=(3, 2))
        if self.lrn:
            x = nn_ops.local_response_norm(x, name="norm2")
        x = layers.conv(x, "conv3", filters[2], 3)
        x = layers.conv(x, "conv4", filters[3], 3)
        x = layers.conv(x, "conv5", filters[4], 3, pool=(3, 2))
        x = layers.dropout(x, "dropout6", self.dropout, seed=6)
        x = layers.dense(x, "fc6", units, activation="relu")
        x = layers.dropout(x, "dropout7", self.dropout, seed=7)
        x = layers.dense(x, "fc7", units, activation="relu")
        last = "relu" if self.form == "dlbench" else None
        return classification(layers.dense(x, "fc8", self.classes, activation=last), labels)
