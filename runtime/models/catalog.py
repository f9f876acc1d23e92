"""The models by name.

>>> with graph.as_default():
...     model = catalog.build("alexnet", batch=24)
...     train = SGD(0.01).minimise(model.loss, model.parameters)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from runtime.errors import ConfigError
from runtime.graph.graph import Graph, Output
from runtime.models.alexnet import AlexNet
from runtime.models.fcn import FCN
from runtime.models.lenet import LeNet
from runtime.models.lstm import LSTM
from runtime.models.mlp import MLP
from runtime.models.model import Architecture, Model, Parameter, build_model
from runtime.models.resnet import CifarResNet, ResNet50
from runtime.models.synthetic import Synthetic
from runtime.models.vgg import VGG

_MODELS: dict[str, Callable[..., Architecture]] = {
    "mlp": MLP,
    "mlp_digits": partial(MLP, features=64, hidden=(64,)),
    "lenet": LeNet,
    "lenet_digits": partial(LeNet, image=8),
    "alexnet": AlexNet,
    "alexnet_torchvision": partial(AlexNet, form="torchvision"),
    "alexnet_narrow": partial(AlexNet, image=67, width=1 / 16, classes=10),
    "vgg11": partial(VGG, depth=11),
    "vgg16": partial(VGG, depth=16),
    "resnet20": partial(CifarResNet, blocks=3),
    "resnet56": partial(CifarResNet, blocks=9),
    "resnet50": ResNet50,
    "lstm": LSTM,
    "fcn5": partial(FCN, hidden=3),
    "fcn8": partial(FCN, hidden=6),
}
_SYNTHETIC = "synthetic"


def names() -> list[str]:
    """What ``build`` knows. "synthetic" takes the option ``like``, one of the others, and their options."""
    return [*_MODELS, _SYNTHETIC]


def architecture(name: str, **options: Any) -> Architecture:
    """The network called ``name`` with ``options`` (fields of its class); ConfigError lists what there is on a miss."""
    if name == _SYNTHETIC:
        own = {key: options.pop(key) for key in ("seconds", "batch", "overlap") if key in options}
        return Synthetic(architecture(options.pop("like", "alexnet"), **options), **own)
    make = _MODELS.get(name)
    if make is None:
        near = difflib.get_close_matches(name, names(), 3) or names()
        raise ConfigError(f"no model is called {name!r}; there are {', '.join(near)}")
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"model {name}: {error}") from None


def build(
    name: str,
    batch: int,
    *,
    training: bool = True,
    graph: Graph | None = None,
    scope: str = "",
    prefix: str = "",
    inputs: Mapping[str, Output] | None = None,
    initialiser: str = "he",
    **options: Any,
) -> Model:
    """Build a model into ``graph`` (the current one); see ``build_model`` for the other arguments, its class for ``options``."""
    if name == _SYNTHETIC:
        options = {"batch": batch, **options}
    return build_model(
        name,
        architecture(name, **options),
        batch,
        training=training,
        graph=graph,
        scope=scope,
        prefix=prefix,
        inputs=inputs,
        initialiser=initialiser,
    )


def manifest(name: str, **options: Any) -> list[Parameter]:
    """Names, shapes and dtypes of a model's trained parameters. Builds a graph of its own and computes nothing."""
    return build(name, 1, graph=Graph(), **options).manifest()
