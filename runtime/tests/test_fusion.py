"""Fusion of weight gradients with their updates: the same bits, and only where nothing else wants the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from runtime.errors import ShapeError
from runtime.execution.compile import compile_partition
from runtime.execution.local import LocalEngine
from runtime.execution.resources import Resources
from runtime.graph import array_ops as ops
from runtime.graph.apply_ops import apply_sgd
from runtime.graph.fusion import fuse_updates
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.initialisers import normal
from runtime.graph.optimize import optimise
from runtime.graph.partition import partition
from runtime.graph.state_ops import assign_add, variable
from runtime.kernels import blas, parallel

ROWS, COLUMNS = 1500, 1003  # more than 4 MiB, and a rest in both directions


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    yield
    parallel.close()


def dense(batch: int) -> tuple[Output, Output, Output, Output]:
    """(x, weights, loss, gradient of the weights) of one layer whose input is needed too."""
    x = ops.placeholder((batch, ROWS), name="x")
    w = variable("w", (ROWS, COLUMNS), initialiser=normal(0, 0.1))
    loss = ops.reduce_sum(ops.square(ops.matmul(ops.tanh(x), w)))
    gradient, by_x = gradients(loss, [w, x])
    assert gradient is not None and by_x is not None
    return x, w, loss, gradient


@pytest.mark.parametrize("core", ["SkylakeX", "Haswell"])
@pytest.mark.parametrize("batch", [3, 24, 70])
@pytest.mark.parametrize("threads", [1, 2])
def test_fused_updates_give_the_same_bits(batch: int, threads: int, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "core", lambda: core)
    graph = Graph()
    with graph.as_default():
        x, w, loss, gradient = dense(batch)
        update = apply_sgd(w, gradient, 1e-4)
    feed = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)

    with closing(LocalEngine(graph, threads=threads)) as engine:
        executor = engine.executor([loss, update])
        assert executor is not None
        for _ in range(3):
            engine.run([loss, update], {x: feed})
        fused = engine.resources.variables("")["w"].copy()
        bytes_fused = executor.plan.total_bytes

    rewrite = optimise(graph, [loss], [update])
    device = "/job:local/task:0"
    parts = partition(
        rewrite.graph, dict.fromkeys(rewrite.graph.nodes, device), [rewrite.outputs[loss]], [rewrite.nodes[update]]
    )
    resources = Resources()
    plain = compile_partition(parts[device].graph, resources=resources, threads=threads)
    try:
        for step in range(3):
            plain.run(step, feeds={"x": feed})
        np.testing.assert_array_equal(fused, resources.variables("")["w"])
        assert plain.plan.total_bytes - bytes_fused > 2 * w.spec.nbytes // 3
    finally:
        plain.close()


def operations(graph: Graph, outputs: list[Output], targets: list[Node]) -> list[str]:
    return sorted({node.op.name for node in fuse_updates(graph, outputs, targets).graph.nodes})


def test_a_gradient_that_is_wanted_elsewhere_is_kept() -> None:
    graph = Graph()
    with graph.as_default():
        x, w, _, gradient = dense(8)
        update = apply_sgd(w, gradient, 0.1)
        fused = operations(graph, [], [update])
        assert "ApplySGDProduct" in fused and "ApplySGD" not in fused
        assert "ApplySGD" in operations(graph, [gradient], [update])
        assert "ApplySGD" in operations(graph, [], [update, gradient.node])
        ops.reduce_sum(gradient)
        assert "ApplySGD" in operations(graph, [], [update])
        assert x.shape == (8, ROWS)


def test_small_weights_and_large_batches_are_left_alone() -> None:
    for rows, columns, batch in ((64, 64, 8), (ROWS, COLUMNS, 300)):
        graph = Graph()
        with graph.as_default():
            a, b = ops.placeholder((batch, rows)), ops.placeholder((batch, columns))
            w = variable("w", (rows, columns))
            update = apply_sgd(w, ops.matmul(a, b, transpose_a=True), 0.1)
        assert "ApplySGD" in operations(graph, [], [update])


def test_what_does_not_fit_is_refused() -> None:
    graph = Graph()
    with graph.as_default():
        w, rate = variable("w", (4, 5)), ops.constant(np.float32(0.1))
        a, b = ops.placeholder((3, 4), name="a"), ops.placeholder((2, 5), name="b")
        with pytest.raises(ShapeError, match="not matrices of as many rows"):
            graph.add("ApplySGDProduct", w, a, b, rate, variable="w", container="")
        with pytest.raises(ShapeError, match=r"the variable is float32\[4, 5\], the product that of"):
            graph.add("ApplySGDProduct", w, a, a, rate, variable="w", container="")


def test_a_product_of_a_variable_is_read_at_its_own_place() -> None:
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((3, ROWS), name="x")
        w = variable("w", (ROWS, COLUMNS))
        v = variable("v", (3, COLUMNS), initialiser=normal())
        product = ops.matmul(x, v, transpose_a=True)
        changed = assign_add(v, np.ones(v.shape, np.float32))
        update = apply_sgd(w, product, 1.0)
    feed = np.ones((3, ROWS), np.float32)
    with closing(LocalEngine(graph, threads=1)) as engine:
        before = engine.run([v])[0]
        assert before is not None
        engine.run([changed.node, update], {x: feed})
        np.testing.assert_allclose(engine.run([w])[0], -(feed.T @ before), rtol=1e-5, atol=1e-5)
