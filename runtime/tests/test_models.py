"""Models: exact manifests, operations as counted by the graph, towers on shared variables, and LeNet learning digits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from runtime.errors import ConfigError, GraphError, ShapeError
from runtime.execution.local import LocalEngine
from runtime.graph import array_ops as ops
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.optimize import prune
from runtime.kernels import parallel
from runtime.models import catalog
from runtime.models.model import Model
from runtime.training.data import batches, digits, random_images
from runtime.training.optimizers import SGD, Momentum


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    yield
    parallel.close()


def build(name: str, batch: int = 2, **options: Any) -> Model:
    return catalog.build(name, batch, graph=Graph(), **options)


def run(engine: LocalEngine, fetches: Sequence[Output | Node], feeds: Mapping[Output, object]) -> list[np.ndarray]:
    """Values of the outputs among ``fetches``."""
    return [value for value in engine.run(fetches, feeds) if value is not None]


@pytest.mark.parametrize(
    "name, count, tensors",
    [
        ("lenet", 61_706, 10),
        ("lenet_digits", 46_178, 8),
        ("alexnet", 61_640_936, 16),
        ("alexnet_torchvision", 61_100_840, 16),
        ("vgg11", 132_863_336, 22),
        ("vgg16", 138_357_544, 32),
        ("resnet20", 269_722, 59),
        ("resnet56", 853_018, 167),
        ("resnet50", 25_557_032, 161),
        ("fcn5", 117_997_696, 8),
        ("fcn8", 130_586_752, 14),
        ("lstm", 6_180_624, 9),
    ],
)
def test_parameters_are_those_of_the_published_networks(name: str, count: int, tensors: int) -> None:
    model = build(name)
    assert (model.parameter_count, len(model.parameters)) == (count, tensors)
    assert model.parameter_bytes == 4 * count


def test_alexnet_has_the_papers_sixteen_tensors() -> None:
    sizes = {line.name: line.spec.nbytes for line in catalog.manifest("alexnet")}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    assert largest == [("fc6/weights", 150_994_944), ("fc7/weights", 67_108_864), ("fc8/weights", 16_384_000)]
    assert [sizes[f"conv{at}/weights"] for at in range(1, 6)] == [139_392, 2_457_600, 3_538_944, 3_538_944, 2_359_296]
    assert min(sizes.values()) == 384 and len(sizes) == 16


def test_the_torchvision_form_takes_224_and_227_pixels() -> None:
    for image in (224, 227):
        assert build("alexnet_torchvision", image=image).parameter_count == 61_100_840
    per_image = build("alexnet_torchvision").training_flops / 2
    assert round(per_image / 1e9, 2) == 4.14


def test_every_model_can_be_differentiated_and_its_operations_are_the_graphs() -> None:
    options: dict[str, dict[str, Any]] = {
        "vgg11": {"image": 32, "width": 0.1},
        "vgg16": {"image": 32, "width": 0.1},
        "resnet50": {"image": 32, "width": 0.1},
        "lstm": {"vocabulary": 50, "units": 8, "steps": 3},
        "fcn5": {"features": 40, "units": 10},
        "fcn8": {"features": 40, "units": 10},
        "alexnet": {"image": 67, "width": 0.1},
        "alexnet_torchvision": {"image": 64, "width": 0.1, "dropout": 0.5, "lrn": True},
    }
    for name in catalog.names():
        if name == "synthetic":
            continue
        model = build(name, **options.get(name, {}))
        assert _product_flops(model.loss.graph, [model.loss]) == model.forward_flops, name
        grads = gradients(model.loss, model.parameters)
        for variable, grad in zip(model.parameters, grads, strict=True):
            assert grad is not None and grad.spec == variable.spec, f"{name}: {variable.name}"
        assert _product_flops(model.loss.graph, [model.loss, *grads]) == model.training_flops, name


def _product_flops(graph: Graph, fetches: list) -> int:
    """What the cost rules of convolutions and matrix products sum up to."""
    total = 0
    for node in prune(graph, fetches).graph.nodes:
        if node.op.name.startswith(("Conv2D", "MatMul")):
            total += node.op.cost([value.spec for value in node.inputs], node.specs, node.attrs).flops
    return total


@pytest.mark.parametrize("name", ["mlp_digits", "lenet_digits", "alexnet_narrow"])
def test_a_step_lowers_the_loss(name: str) -> None:
    model = build(name, 8)
    generator = np.random.default_rng(0)
    feeds = {}
    for key, value in model.inputs.items():
        feeds[value] = (
            generator.integers(0, 10, value.shape, np.int32)
            if key == "labels"
            else generator.random(value.shape, np.float32)
        )
    train = SGD(0.02).minimise(model.loss, model.parameters)
    with closing(LocalEngine(model.loss.graph, threads=2)) as engine:
        losses = [float(run(engine, [model.loss, train], feeds)[0]) for _ in range(6)]
    assert losses[-1] < losses[0]


def test_lenet_learns_digits() -> None:
    data = digits()
    assert data.images.shape[1:] == (8, 8, 1) and len(data.labels) + len(data.test_labels) == 1797
    model = build("lenet_digits", 32)
    train = Momentum(0.05, 0.9).minimise(model.loss, model.parameters)
    test = model.tower(len(data.test_labels))
    with closing(LocalEngine(model.loss.graph, threads=1)) as engine:
        for images, labels in itertools.islice(batches(data, 32), 10 * (len(data.labels) // 32)):
            engine.run([train], {model.inputs["images"]: images, model.inputs["labels"]: labels})
        feeds = {test.inputs["images"]: data.test_images, test.inputs["labels"]: data.test_labels}
        accuracy = float(run(engine, [test.accuracy], feeds)[0])
    assert accuracy > 0.97


def test_an_evaluation_tower_uses_the_running_averages_that_training_keeps() -> None:
    model = build("resnet20", 8, image=16, width=0.25)
    test = model.tower(3)
    assert test.parameters == model.parameters and test.statistics == model.statistics
    assert len(model.updates) == len(model.statistics) > 0 and not test.updates
    generator = np.random.default_rng(0)
    images = generator.normal(3.0, 2.0, (8, 16, 16, 3)).astype(np.float32)
    feeds, few = {model.inputs["images"]: images}, {test.inputs["images"]: images[:3]}
    updates = [update.node for update in model.updates]
    with closing(LocalEngine(model.loss.graph, threads=1)) as engine:
        (before,) = run(engine, [test.logits], few)
        for _ in range(100):
            logits = run(engine, [model.logits, *updates], feeds)[0]
        (after,) = run(engine, [test.logits], few)
    # A hundred times the same batch: the averages are that batch's statistics, but for the unbiased variance.
    np.testing.assert_allclose(after, logits[:3], 0.05, 0.05)
    assert np.abs(before - after).max() > 0.1


def test_variables_go_where_the_graph_says_and_have_names_that_all_workers_share() -> None:
    graph = Graph()
    with graph.as_default(), graph.scope("worker1"), graph.device("/job:worker/task:1"):
        with graph.variable_devices(lambda spec: "/job:ps/task:0"):
            model = catalog.build("lenet_digits", 2, scope="train")
    assert {value.node.device for value in model.parameters} == {"/job:ps/task:0"}
    assert model.loss.node.device == "/job:worker/task:1"
    assert [line.name for line in model.manifest()][:2] == ["conv1/weights", "conv1/biases"]
    assert model.parameters[0].node.attrs["variable"] == "conv1/weights"
    assert model.loss.node.name == "worker1/train/loss"


def test_inputs_may_be_outputs_of_the_graph() -> None:
    graph = Graph()
    with graph.as_default():
        images = ops.constant(np.ones((2, 8, 8, 1), np.float32))
        model = catalog.build("lenet_digits", 2, inputs={"images": images})
        assert model.inputs["images"] == images and list(model.inputs) == ["images", "labels"]
        with pytest.raises(ShapeError, match=r"input images of lenet_digits is float32\[2, 8, 8, 1\], not float32\[3"):
            catalog.build("lenet_digits", 3, inputs={"images": images}, scope="b", prefix="b/")
        with pytest.raises(GraphError, match="has no input pixels; it takes images, labels"):
            catalog.build("lenet_digits", 2, inputs={"pixels": images}, scope="c", prefix="c/")


def test_mistakes_are_told_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no model is called 'alexnett'; there are alexnet"):
        build("alexnett")
    with pytest.raises(ConfigError, match=r"model lenet: .*unexpected keyword argument 'depth'"):
        build("lenet", depth=3)
    with pytest.raises(ConfigError, match="VGG has the depths 11, 13, 16, 19, not 17"):
        build("vgg16", depth=17)
    with pytest.raises(ConfigError, match="AlexNet has the forms"):
        build("alexnet", form="original")
    with pytest.raises(ConfigError, match="batch of 0 examples"):
        build("lenet", 0)


def test_synthetic_compute_has_the_tensors_and_takes_the_time() -> None:
    model = build("synthetic", 24, seconds=0.06, like="alexnet_narrow")
    real = catalog.manifest("alexnet_narrow")
    assert [(line.name, line.spec) for line in model.manifest()] == [(line.name, line.spec) for line in real]
    computes = [node for node in model.loss.graph.nodes if node.op.name == "SyntheticCompute"]
    assert len(computes) == 8
    assert sum(node.attrs["seconds"] for node in computes) == pytest.approx(0.02)
    grads = gradients(model.loss, model.parameters)
    with closing(LocalEngine(model.loss.graph, threads=1)) as engine:
        begin = time.perf_counter()
        fetches = [model.loss, *(grad for grad in grads if grad is not None)]
        values = run(engine, fetches, {model.inputs["seed"]: np.float32(2.5)})
        assert time.perf_counter() - begin >= 0.06  # sleeping never ends early
    assert values[0] == 2.5
    for line, value in zip(real, values[1:], strict=True):
        assert value.shape == line.spec.shape and (value == 1).all()


def test_the_papers_emulation_moves_the_papers_bytes() -> None:
    model = build("synthetic", 24)
    assert (model.parameter_count, len(model.parameters)) == (61_640_936, 16)
    assert model.training_flops == build("alexnet", 24).training_flops


def test_random_pixels_are_the_same_for_the_same_seed() -> None:
    one, two, other = random_images(2, 5, seed=3), random_images(2, 5, seed=3), random_images(2, 5, seed=4)
    np.testing.assert_array_equal(one["images"], two["images"])
    assert (one["images"] != other["images"]).any()
    assert one["images"].dtype == np.float32 and one["labels"].dtype == np.int32


def test_workers_together_see_what_one_would_see() -> None:
    data = digits(0.5)
    alone = batches(data, 30, seed=7)
    three = [batches(data, 10, worker=worker, workers=3, seed=7) for worker in range(3)]
    for _ in range(40):  # into the second epoch
        images, labels = next(alone)
        parts = [next(part) for part in three]
        np.testing.assert_array_equal(images, np.concatenate([part[0] for part in parts]))
        np.testing.assert_array_equal(labels, np.concatenate([part[1] for part in parts]))
    with pytest.raises(ConfigError, match="cannot take batches of 400"):
        next(batches(data, 400, workers=3))
    with pytest.raises(ConfigError, match=r"test_fraction 1\.5"):
        digits(1.5)
