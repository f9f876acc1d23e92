"""Residual networks (He et al., 2015): the CIFAR family of 6 n + 2 layers, and ResNet-50 with bottleneck blocks."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.graph import array_ops as ops
from runtime.graph import nn_ops
from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification, image_inputs, scaled


def basic_block(layers: Layers, x: Output, name: str, filters: int, stride: int) -> Output:
    """Two 3 x 3 convolutions and a shortcut without parameters: every other pixel, new channels zero (their option A)."""
    y = layers.conv(x, f"{name}/conv1", filters, 3, stride, 1, bias=False, relu=False)
    y = layers.batch_norm(y, f"{name}/norm1")
    y = layers.conv(y, f"{name}/conv2", filters, 3, 1, 1, bias=False, relu=False)
    y = layers.batch_norm(y, f"{name}/norm2", relu=False)
    if stride > 1:
        x = nn_ops.avg_pool(x, 1, stride, name=f"{name}/subsample")
    more = filters - x.shape[3]
    if more:
        x = ops.pad(x, [(0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)], name=f"{name}/widen")
    return nn_ops.relu(ops.add(x, y, name=f"{name}/sum"), name=f"{name}/out")


def bottleneck_block(layers: Layers, x: Output, name: str, filters: int, stride: int) -> Output:
    """1 x 1, 3 x 3 (which has the stride) and 1 x 1 to four times the filters; a projected shortcut where the shape changes."""
    y = layers.conv(x, f"{name}/conv1", filters, 1, bias=False, relu=False)
    y = layers.batch_norm(y, f"{name}/norm1")
    y = layers.conv(y, f"{name}/conv2", filters, 3, stride, 1, bias=False, relu=False)
    y = layers.batch_norm(y, f"{name}/norm2")
    y = layers.conv(y, f"{name}/conv3", 4 * filters, 1, bias=False, relu=False)
    y = layers.batch_norm(y, f"{name}/norm3", relu=False)
    if stride > 1 or x.shape[3] != 4 * filters:
        x = layers.conv(x, f"{name}/shortcut", 4 * filters, 1, stride, "VALID", bias=False, relu=False)
        x = layers.batch_norm(x, f"{name}/shortcut_norm", relu=False)
    return nn_ops.relu(ops.add(x, y, name=f"{name}/sum"), name=f"{name}/out")


@dataclass(frozen=True, slots=True)
class CifarResNet:
    """``blocks`` (n) in each of three stages of 16, 32, 64 filters: n = 3 is ResNet-20, n = 9 ResNet-56 (853,018 parameters)."""

    blocks: int = 9
    image: int = 32
    channels: int = 3
    classes: int = 10
    width: float = 1.0

    def inputs(self, batch: int) -> Inputs:
        return image_inputs(batch, self.image, self.channels)

    def build(self, layers: Layers, images: Output, labels: Output) -> Network:
        x = layers.conv(images, "conv0", scaled(16, self.width), 3, 1, 1, bias=False, relu=False)
        x = layers.batch_norm(x, "norm0")
        for stage, filters in enumerate((16, 32, 64), start=1):
            for block in range(1, self.blocks + 1):
                stride = 2 if stage > 1 and block == 1 else 1
                x = basic_block(layers, x, f"stage{stage}_{block}", scaled(filters, self.width), stride)
        return classification(layers.dense(nn_ops.global_avg_pool(x, name="mean"), "fc", self.classes), labels)


@dataclass(frozen=True, slots=True)
class ResNet50:
    """Bottleneck blocks 3-4-6-3; 25,557,032 trained parameters."""

    image: int = 224
    channels: int = 3
    classes: int = 1000
    width: float = 1.0
    blocks: tuple[int, ...] = (3, 4, 6, 3)

    def inputs(self, batch: int) -> Inputs:
        return image_inputs(batch, self.image, self.channels)

    def build(self, layers: Layers, images: Output, labels: Output) -> Network:
        x = layers.conv(images, "conv0", scaled(64, self.width), 7, 2, 3, bias=False, relu=False)
        x = layers.batch_norm(x, "norm0")
        x = nn_ops.max_pool(x, 3, 2, 1, name="pool0")
        for stage, count in enumerate(self.blocks, start=1):
            for block in range(1, count + 1):
                stride = 2 if stage > 1 and block == 1 else 1
                filters = scaled(64 * 2 ** (stage - 1), self.width)
                x = bottleneck_block(layers, x, f"stage{stage}_{block}", filters, stride)
        return classification(layers.dense(nn_ops.global_avg_pool(x, name="mean"), "fc", self.classes), labels)
