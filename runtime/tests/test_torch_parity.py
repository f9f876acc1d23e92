"""Whole models' losses and gradients against PyTorch, from the same parameters; see ``make test-torch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from runtime.execution.local import LocalEngine
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph
from runtime.kernels import parallel
from runtime.models import catalog
from runtime.models.layers import Inputs, Layers, Network, Parameters, classification
from runtime.models.model import Model, build_model
from runtime.models.resnet import basic_block, bottleneck_block

torch = pytest.importorskip(
    "torch", reason="torch is not installed; `make test-torch` makes an environment that has it"
)
functional = torch.nn.functional

pytestmark = pytest.mark.torch
# Largest difference of a gradient's element, relative to the gradient's largest.
TOLERANCE = 1e-4
Tensors = dict[str, Any]


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    parallel.close()


def compare(
    model: Model, feeds: dict[str, np.ndarray], forward: Callable[[Tensors, Tensors], Any], threads: int = 1
) -> None:
    """Loss and every parameter's gradient, here and by ``forward(parameters, inputs)`` -> loss in torch."""
    grads = gradients(model.loss, model.parameters)
    with closing(LocalEngine(model.loss.graph, threads=threads)) as engine:
        fetches = [model.loss, *model.parameters, *(grad for grad in grads if grad is not None)]
        values = engine.run(fetches, {model.inputs[name]: value for name, value in feeds.items()})
    loss, *arrays = [value for value in values if value is not None]
    count = len(model.parameters)
    names = [line.name for line in model.manifest()]
    parameters = {
        name: torch.tensor(value, requires_grad=True) for name, value in zip(names, arrays[:count], strict=True)
    }
    inputs = {
        name: torch.tensor(value.astype(np.int64) if value.dtype.kind == "i" else value)
        for name, value in feeds.items()
    }
    expected = forward(parameters, inputs)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    for name, got in zip(names, arrays[count:], strict=True):
        want = parameters[name].grad.numpy()
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < TOLERANCE, f"{name}: {error:.1e}"


def feeds_of(model: Model, classes: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {
        name: generator.integers(0, classes, value.shape, np.int32)
        if value.dtype.kind == "i"
        else generator.random(value.shape, np.float32)
        for name, value in model.inputs.items()
    }


def conv(x: Any, p: Tensors, name: str, stride: int = 1, padding: Any = "same") -> Any:
    """Convolution with our [h, w, in, out] filter, on torch's NCHW."""
    weights = p[f"{name}/weights"].permute(3, 2, 0, 1)
    return functional.conv2d(x, weights, p.get(f"{name}/biases"), stride, padding)


def dense(x: Any, p: Tensors, name: str) -> Any:
    return x @ p[f"{name}/weights"] + p[f"{name}/biases"]


def nchw(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def flat(x: Any) -> Any:
    """Images flattened as ours are: channels last."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1)


def batch_norm(x: Any, p: Tensors, name: str) -> Any:
    return functional.batch_norm(x, None, None, p[f"{name}/gamma"], p[f"{name}/beta"], training=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_mlp(threads: int) -> None:
    model = catalog.build("mlp", 24, graph=Graph(), features=2000, hidden=(600, 40))

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = dense(inputs["features"], p, "fc1").relu()
        return functional.cross_entropy(dense(dense(x, p, "fc2").relu(), p, "fc3"), inputs["labels"])

    compare(model, feeds_of(model, 10), forward, threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("image", [28, 8])
def test_lenet(image: int, threads: int) -> None:
    model = catalog.build("lenet", 5, graph=Graph(), image=image)

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = functional.max_pool2d(conv(nchw(inputs["images"]), p, "conv1").relu(), 2)
        x = conv(x, p, "conv2", padding="same" if image == 8 else 0)
        x = flat(functional.max_pool2d(x.relu(), 2))
        x = dense(x, p, "fc3").relu()
        x = dense(dense(x, p, "fc4").relu(), p, "fc5") if image == 28 else dense(x, p, "fc4")
        return functional.cross_entropy(x, inputs["labels"])

    compare(model, feeds_of(model, 10), forward, threads)


@pytest.mark.parametrize("form, image", [("dlbench", 67), ("torchvision", 64), ("torchvision", 67)])
def test_narrow_alexnet(form: str, image: int) -> None:
    lrn = image == 64
    model = catalog.build("alexnet", 6, graph=Graph(), form=form, image=image, width=0.125, classes=20, lrn=lrn)

    def norm(x: Any) -> Any:  # torch divides alpha by the window's size
        return functional.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0) if lrn else x

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = conv(nchw(inputs["images"]), p, "conv1", 4, 2 if image == 64 else 0).relu()
        x = norm(functional.max_pool2d(x, 3, 2))
        x = norm(functional.max_pool2d(conv(x, p, "conv2").relu(), 3, 2))
        for name in ("conv3", "conv4", "conv5"):
            x = conv(x, p, name).relu()
        x = flat(functional.max_pool2d(x, 3, 2))
        x = dense(dense(dense(x, p, "fc6").relu(), p, "fc7").relu(), p, "fc8")
        return functional.cross_entropy(x.relu() if form == "dlbench" else x, inputs["labels"])

    compare(model, feeds_of(model, 20), forward, threads=2)


def test_vgg_whose_wide_layers_take_winograds_convolution() -> None:
    model = catalog.build("vgg11", 3, graph=Graph(), image=32, width=0.5, classes=20)

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = nchw(inputs["images"])
        for block, count in enumerate((1, 1, 2, 2, 2), start=1):
            for index in range(1, count + 1):
                x = conv(x, p, f"conv{block}_{index}").relu()
            x = functional.max_pool2d(x, 2)
        x = dense(dense(dense(flat(x), p, "fc6").relu(), p, "fc7").relu(), p, "fc8")
        return functional.cross_entropy(x, inputs["labels"])

    compare(model, feeds_of(model, 20), forward, threads=2)


class _Blocks:
    """Two residual blocks of one kind, the second with a stride and more channels."""

    def __init__(self, block: Callable[..., Any]) -> None:
        self.block = block

    def inputs(self, batch: int) -> Inputs:
        return {"images": ((batch, 9, 9, 8), np.float32), "labels": ((batch,), np.int32)}

    def build(self, layers: Layers, images: Any, labels: Any) -> Network:
        x = self.block(layers, images, "one", 8, 1)
        x = self.block(layers, x, "two", 16, 2)
        return classification(layers.dense(x, "fc", 4), labels)


def test_basic_residual_blocks() -> None:
    model = build_model("blocks", _Blocks(basic_block), 6, graph=Graph())

    def block(x: Any, p: Tensors, name: str, stride: int, widen: int) -> Any:
        y = batch_norm(conv(x, p, f"{name}/conv1", stride, 1), p, f"{name}/norm1").relu()
        y = batch_norm(conv(y, p, f"{name}/conv2", 1, 1), p, f"{name}/norm2")
        x = functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, widen // 2, widen // 2))
        return (x + y).relu()

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = block(block(nchw(inputs["images"]), p, "one", 1, 0), p, "two", 2, 8)
        return functional.cross_entropy(dense(flat(x), p, "fc"), inputs["labels"])

    compare(model, feeds_of(model, 4), forward)


def test_bottleneck_residual_blocks() -> None:
    model = build_model("blocks", _Blocks(bottleneck_block), 6, graph=Graph())

    def block(x: Any, p: Tensors, name: str, stride: int) -> Any:
        y = batch_norm(conv(x, p, f"{name}/conv1"), p, f"{name}/norm1").relu()
        y = batch_norm(conv(y, p, f"{name}/conv2", stride, 1), p, f"{name}/norm2").relu()
        y = batch_norm(conv(y, p, f"{name}/conv3"), p, f"{name}/norm3")
        x = batch_norm(conv(x, p, f"{name}/shortcut", stride, 0), p, f"{name}/shortcut_norm")
        return (x + y).relu()

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = block(block(nchw(inputs["images"]), p, "one", 1), p, "two", 2)
        return functional.cross_entropy(dense(flat(x), p, "fc"), inputs["labels"])

    compare(model, feeds_of(model, 4), forward)


def test_lstm() -> None:
    model = catalog.build("lstm", 3, graph=Graph(), vocabulary=50, units=16, layers=2, steps=5)

    def forward(p: Tensors, inputs: Tensors) -> Any:
        x = p["embedding"][inputs["tokens"].T]
        for layer in ("lstm1", "lstm2"):
            weights = [
                p[f"{layer}/input_weights"].T,
                p[f"{layer}/recurrent_weights"].T,
                p[f"{layer}/biases"],
                torch.zeros(4 * 16),
            ]
            start = (torch.zeros(1, 3, 16), torch.zeros(1, 3, 16))
            x = torch.lstm(x, start, weights, True, 1, 0.0, True, False, False)[0]
        logits = dense(x.reshape(-1, 16), p, "softmax")
        return functional.cross_entropy(logits, inputs["labels"].T.reshape(-1))

    compare(model, feeds_of(model, 50), forward)


def test_parameters_keep_their_prefix_out_of_the_manifest() -> None:
    """``compare`` relies on manifest names being the layers'."""
    parameters = Parameters(Graph(), "replica/")
    model = build_model("blocks", _Blocks(basic_block), 2, graph=parameters.graph, prefix="replica/")
    assert model.parameters[0].node.name == f"replica/{model.manifest()[0].name}"
