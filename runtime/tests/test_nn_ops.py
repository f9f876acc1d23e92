"""Layers' ops in graphs: values, errors that name the node, and the executor with reused memory against the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.errors import GraphError, ShapeError
from runtime.execution.compile import compile_partition
from runtime.graph import array_ops as ops
from runtime.graph import nn_ops
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Output
from runtime.graph.optimize import prune
from runtime.kernels import parallel
from runtime.tests.interpreter import evaluate


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    yield
    parallel.close()


@pytest.fixture
def graph() -> Iterator[Graph]:
    made = Graph()
    with made.as_default():
        yield made


def value(output: Output, step: int = 1, **feeds: Any) -> np.ndarray:
    kept = prune(output.graph, [output])
    return evaluate(kept.graph, [kept.outputs[output]], feeds, step=step)[0]


def test_convolution_shapes(graph: Graph) -> None:
    x = ops.placeholder((2, 28, 27, 3), name="x")
    w = ops.placeholder((5, 3, 3, 8), name="w")
    assert nn_ops.conv2d(x, w).shape == (2, 28, 27, 8)
    assert nn_ops.conv2d(x, w, 2, "SAME").shape == (2, 14, 14, 8)
    assert nn_ops.conv2d(x, w, (4, 1), "VALID").shape == (2, 6, 25, 8)
    assert nn_ops.conv2d(x, w, 1, 2).shape == (2, 28, 29, 8)
    assert nn_ops.conv2d(x, w, 1, (0, 1, 2, 3)).shape == (2, 25, 30, 8)
    assert nn_ops.max_pool(x, 3, 2).shape == (2, 13, 13, 3)
    assert nn_ops.max_pool(x, 3, 2, "SAME").shape == (2, 14, 14, 3)
    assert nn_ops.avg_pool(x, (2, 3)).shape == (2, 14, 9, 3)
    assert nn_ops.global_avg_pool(x).shape == (2, 3)


@pytest.mark.parametrize(
    "shapes, build, message",
    [
        ([(2, 8, 8, 3), (3, 3, 4, 8)], lambda x, w: nn_ops.conv2d(x, w), "images have 3 channels, the filter"),
        ([(2, 8, 8), (3, 3, 3, 8)], lambda x, w: nn_ops.conv2d(x, w, 1, "VALID"), "images must be"),
        ([(2, 8, 8, 3), (3, 3, 3)], lambda x, w: nn_ops.conv2d(x, w), "a filter must be"),
        ([(2, 4, 4, 3), (5, 5, 3, 8)], lambda x, w: nn_ops.conv2d(x, w, 1, "VALID"), "larger than the image of 4 x 4"),
        ([(2, 8, 8, 3), (3, 3, 3, 8)], lambda x, w: nn_ops.conv2d(x, w, 0), "must be positive"),
        ([(2, 8, 8, 3), (3, 3, 3, 8)], lambda x, w: nn_ops.conv2d(x, w, 1, "FULL"), "'FULL' is not VALID, SAME"),
        ([(2, 8, 8, 3)], lambda x: nn_ops.max_pool(x, 2, 2, 2), "is not smaller than the window"),
        ([(2, 8), (7,)], lambda x, b: nn_ops.bias_add(x, b), r"bias of shape \(7,\) does not fit .*\(2, 8\)"),
        ([(2, 8)], lambda x: nn_ops.dropout(x, 1.0), r"rate 1.0 is not in \[0, 1\)"),
        (
            [(2, 8), (2,)],
            lambda x, y: nn_ops.sparse_softmax_cross_entropy(x, y),
            "labels must be integers, not float32",
        ),
        ([(2, 8), (2, 3)], lambda x, c: nn_ops.lstm_cell(x, c), r"\(2, 8\) are not \[b, 4 h\]"),
        ([(2, 8), (8,), (7,)], lambda x, g, b: nn_ops.batch_norm(x, g, b), "one value for each of the 8 channels"),
    ],
)
def test_what_does_not_fit_is_said_with_the_node_and_both_shapes(shapes, build, message: str, graph: Graph) -> None:
    values = [ops.placeholder(shape, name=f"in{at}") for at, shape in enumerate(shapes)]
    with pytest.raises(ShapeError, match=message) as caught:
        build(*values)
    assert "node " in str(caught.value) and "in0:0 float32" in str(caught.value)


def test_labels_fit_the_batch_and_the_classes(graph: Graph) -> None:
    logits = ops.placeholder((3, 5), name="logits")
    with pytest.raises(ShapeError, match=r"labels of shape \(4,\) do not fit logits of shape \(3, 5\)"):
        nn_ops.sparse_softmax_cross_entropy(logits, ops.placeholder((4,), np.int32))
    labels = ops.placeholder((3,), np.int64, "labels")
    losses = nn_ops.sparse_softmax_cross_entropy(logits, labels, name="losses")
    for wrong in (5, -1):
        with pytest.raises(GraphError, match=f"node losses: label {wrong} is not one of 5 classes"):
            value(losses, logits=np.zeros((3, 5)), labels=[0, wrong, 1])


def test_cross_entropy_of_logits_that_would_overflow(graph: Graph) -> None:
    logits, labels = ops.placeholder((3, 3), name="logits"), ops.placeholder((3,), np.int32, "labels")
    losses = nn_ops.sparse_softmax_cross_entropy(logits, labels)
    (grad,) = gradients(losses, [logits])
    assert grad is not None
    feeds: dict[str, Any] = {"logits": [[1e4, 0, -1e4], [1e4, 0, -1e4], [5, 5, 5]], "labels": [0, 2, 1]}
    np.testing.assert_allclose(value(losses, **feeds), [0, 2e4, np.log(3)], 1e-6)
    np.testing.assert_allclose(value(grad, **feeds), [[0, 0, 0], [1, 0, -1], [1 / 3, -2 / 3, 1 / 3]], 1e-6, 1e-6)


def test_softmax_sums_to_one(graph: Graph) -> None:
    x = ops.placeholder((2, 3, 4), name="x")
    y = value(nn_ops.softmax(x), x=np.random.default_rng(0).normal(size=(2, 3, 4)) * 50)
    np.testing.assert_allclose(y.sum(-1), 1, 1e-6)


def test_in_top_k(graph: Graph) -> None:
    logits, labels = ops.placeholder((4, 3), name="logits"), ops.placeholder((4,), np.int32, "labels")
    feeds: dict[str, Any] = {"logits": [[3, 2, 1], [3, 2, 1], [3, 2, 1], [2, 2, 2]], "labels": [0, 1, 2, 2]}
    np.testing.assert_array_equal(value(nn_ops.in_top_k(logits, labels), **feeds), [True, False, False, True])
    np.testing.assert_array_equal(value(nn_ops.in_top_k(logits, labels, 2), **feeds), [True, True, False, True])


def test_dropout_depends_on_seed_name_and_step_alone(graph: Graph) -> None:
    x = ops.placeholder((1000,), name="x")
    a, b = nn_ops.dropout(x, 0.25, seed=1, name="a"), nn_ops.dropout(x, 0.25, seed=1, name="b")
    other = nn_ops.dropout(x, 0.25, seed=2, name="c")
    ones = np.ones(1000)
    first = value(a, 1, x=ones)
    np.testing.assert_array_equal(first, value(a, 1, x=ones))
    for different in (value(a, 2, x=ones), value(b, 1, x=ones), value(other, 1, x=ones)):
        assert (first != different).any()
    assert set(np.unique(first)) == {np.float32(0), np.float32(4 / 3)}
    assert 650 < np.count_nonzero(first) < 850
    (grad,) = gradients(a, [x])
    assert grad is not None
    np.testing.assert_array_equal(value(grad, 1, x=ones), first)


def test_batch_norm_when_training_and_after(graph: Graph) -> None:
    x = ops.placeholder((64, 5), name="x")
    gamma, beta = ops.constant(np.full(5, 2.0, np.float32)), ops.constant(np.full(5, 3.0, np.float32))
    y, statistics = nn_ops.batch_norm(x, gamma, beta)
    again = nn_ops.batch_norm_inference(x, gamma, beta, statistics.mean, statistics.variance)
    feed = np.random.default_rng(0).normal(5, 4, (64, 5)).astype(np.float32)
    seen = value(y, x=feed)
    np.testing.assert_allclose(seen.mean(0), 3, 1e-4)
    np.testing.assert_allclose(seen.std(0), 2, 1e-4)
    np.testing.assert_allclose(value(again, x=feed), seen, 1e-5, 1e-5)
    np.testing.assert_allclose(value(statistics.variance, x=feed), feed.var(0), 1e-5)


def test_local_response_norm_is_the_papers_formula(graph: Graph) -> None:
    x = ops.placeholder((2, 3, 3, 7), name="x")
    feed = np.random.default_rng(0).normal(size=(2, 3, 3, 7))
    square, scale = feed**2, np.zeros_like(feed)
    for channel in range(7):
        scale[..., channel] = 2 + 0.1 * square[..., max(0, channel - 2) : channel + 3].sum(-1)
    got = value(nn_ops.local_response_norm(x, 2, 2.0, 0.1, 0.75), x=feed)
    np.testing.assert_allclose(got, feed / scale**0.75, 1e-5, 1e-5)


def _everything(graph: Graph) -> tuple[list[Output], dict[str, np.ndarray]]:
    """A network with every layer, its loss, and the gradients of all that can be differentiated."""
    generator = np.random.default_rng(0)
    shapes = {"x": (4, 12, 12, 3), "w1": (3, 3, 3, 8), "b1": (8,), "w2": (3, 3, 8, 8), "g": (8,), "b": (8,)}
    shapes |= {"w3": (288, 24), "b3": (24,), "c": (4, 6), "w4": (6, 10)}
    feeds = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    v = {name: ops.placeholder(shape, name=name) for name, shape in shapes.items()}
    labels = ops.placeholder((4,), np.int32, "labels")
    h = nn_ops.bias_add(nn_ops.max_pool(nn_ops.conv2d(v["x"], v["w1"]), 3, 2, "SAME"), v["b1"], relu=True)
    h = nn_ops.local_response_norm(h)
    h, _ = nn_ops.batch_norm(nn_ops.conv2d(h, v["w2"]), v["g"], v["b"])
    h = nn_ops.dropout(nn_ops.relu(h), 0.3)
    h = nn_ops.avg_pool(h, 3, 1, "SAME")
    h = nn_ops.bias_add(ops.matmul(ops.reshape(h, (4, -1)), v["w3"]), v["b3"])
    h, c = nn_ops.lstm_cell(h, v["c"])
    loss = ops.reduce_mean(nn_ops.sparse_softmax_cross_entropy(ops.matmul(h + c, v["w4"]), labels))
    grads = [grad for grad in gradients(loss, list(v.values())) if grad is not None]
    assert len(grads) == len(v)
    return [loss, *grads], feeds | {"labels": np.array([1, 9, 3, 3], np.int32)}


@pytest.mark.parametrize("threads", [1, 2])
def test_planned_memory_gives_what_fresh_memory_gives(threads: int, graph: Graph) -> None:
    """In-place kernels, reused buffers and the shared workspace, each overwritten as soon as it is free."""
    fetches, feeds = _everything(graph)
    expected = evaluate(graph, fetches, feeds)
    kept = prune(graph, fetches)
    executor = compile_partition(kept.graph, [kept.outputs[fetch] for fetch in fetches], threads=threads, poison=True)
    try:
        for _ in range(2):
            for got, want in zip(executor.run(1, feeds=feeds), expected, strict=True):
                np.testing.assert_allclose(got, want, 1e-4, 1e-5)
    finally:
        executor.close()
