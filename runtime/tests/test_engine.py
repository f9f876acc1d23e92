"""A whole graph in one process: feeds and fetches, errors, memory, traces."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

from runtime.errors import GraphError, ShapeError
from runtime.execution.compile import compile_partition
from runtime.execution.local import LocalEngine
from runtime.graph import array_ops as ops
from runtime.graph import state_ops
from runtime.graph.graph import Graph, Output
from runtime.memory.plan import Place
from runtime.testing import same_bytes
from runtime.trace import Phase, Tracer

F32 = np.float32


# Feeds, fetches, errors


def square():
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((2, 2), F32, name="x")
        y = ops.mul(x, x, name="y")
    return graph, x, y


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, GraphError, "must be fed and were not: x"),
        (np.zeros((2, 3), F32), ShapeError, r"placeholder x is float32\[2, 2\], fed was float32\[2, 3\]"),
        (np.zeros((2, 2)), ShapeError, r"placeholder x is float32\[2, 2\], fed was float64\[2, 2\]"),
        ("text", ShapeError, "placeholder x is"),
        ([[1j, 0], [0, 0]], ShapeError, "complex128 would be cut off"),
        ([[1], [2, 3]], ShapeError, "placeholder x is"),
    ],
)
def test_wrong_feeds_are_refused_and_the_engine_goes_on(value, error, text):
    graph, x, y = square()
    engine = LocalEngine(graph)
    with pytest.raises(error, match=text):
        engine.run([y], {} if value is None else {x: value})
    assert same_bytes(engine.run([y], {x: [[1, 2], [3, 4]]})[0], np.array([[1, 4], [9, 16]], F32))
    engine.close()


def test_only_placeholders_of_this_graph_are_fed_and_only_its_own_fetched():
    graph, x, y = square()
    _, other_x, other_y = square()
    engine = LocalEngine(graph)
    value = np.ones((2, 2), F32)
    with pytest.raises(GraphError, match="only a placeholder can be fed"):
        engine.run([y], {x: value, y: value})
    with pytest.raises(GraphError, match="another graph"):
        engine.run([y], {other_x: value})
    with pytest.raises(GraphError, match="another graph"):
        engine.run([other_y], {x: value})
    with pytest.raises(GraphError, match="cannot be fetched"):
        engine.run(["y"], {x: value})
    engine.close()
    with pytest.raises(GraphError, match="closed"):
        engine.run([y], {x: value})


def test_unknown_feeds_are_named():
    graph, _, y = square()
    executor = compile_partition(graph, [y])
    with pytest.raises(GraphError, match="no placeholder that this step reads: z; it reads: x"):
        executor.run(1, None, {"x": np.ones((2, 2), F32), "z": np.ones(1)})
    executor.close()


def test_nothing_to_run_gives_nothing():
    graph, _, _ = square()
    with graph.as_default():
        nothing = ops.no_op()
    engine = LocalEngine(graph)
    assert engine.run([]) == []
    assert engine.run([nothing]) == [None]
    engine.close()


def test_fetches_are_the_callers_own_unless_asked_otherwise():
    graph, _, y = square()
    executor = compile_partition(graph, [y, y])
    feed = np.full((2, 2), 3, F32)
    own, again = executor.run(1, None, {"x": feed})
    own[:] = 0
    assert again[0, 0] == 9
    (view, _) = executor.run(2, None, {"x": feed}, copy=False)
    assert not view.flags.writeable
    executor.run(3, None, {"x": feed + 1})
    assert view[0, 0] == 16
    del view
    executor.close()


def test_a_kernels_error_names_its_node():
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((1,), np.int64, name="x")
        y = ops.gather(ops.constant(np.zeros((3, 2), F32)), x, name="lookup")
    engine = LocalEngine(graph)
    with pytest.raises(GraphError, match="lookup"):
        engine.run([y], {x: np.array([3])})
    assert engine.run([y], {x: np.array([0])})[0].shape == (1, 2)
    engine.close()


def test_threads_share_an_engine():
    graph, x, y = square()
    engine = LocalEngine(graph)
    failures = []

    def work(number):
        for _ in range(50):
            value = np.full((2, 2), number, F32)
            (got,) = engine.run([y], {x: value})
            if not same_bytes(got, value * value):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    engine.close()


# Memory and traces


def test_a_steady_step_allocates_nothing_large():
    graph, size = Graph(), 1 << 18
    with graph.as_default():
        x = ops.placeholder((size,), F32, name="x")
        w = state_ops.variable("w", (size,), F32)
        y = ops.tanh(ops.add(ops.mul(x, w), x))
        state_ops.assign_add(w, y, name="update")
        total = ops.reduce_sum(ops.square(y))
    engine = LocalEngine(graph, threads=1)
    feeds = {x: np.ones(size, F32)}
    fetches = [total, graph.node("update")]
    engine.run(fetches, feeds)
    tracemalloc.start()
    try:
        for _ in range(3):
            engine.run(fetches, feeds)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    engine.close()


def test_the_plan_accounts_for_its_bytes():
    graph, size = Graph(), 1 << 16
    with graph.as_default():
        x = ops.placeholder((size,), F32, name="x")
        w = state_ops.variable("w", (size,), F32)
        y = x
        for _ in range(20):
            y = ops.add(ops.tanh(y), w)
    engine = LocalEngine(graph)
    plan = engine.executor([y]).plan
    assert plan.bytes_of(Place.VARIABLE) == 4 * size
    assert plan.bytes_of(Place.BLOCK) == 4 * size, "one buffer: fed, then overwritten in place to the end"
    assert plan.total_bytes == 8 * size
    engine.close()


def test_a_plan_goes_with_its_executor_without_the_cycle_collector():
    graph, _, y = square()
    gc.collect()
    gc.disable()
    try:
        executor = compile_partition(graph, [y])
        executor.run(1, None, {"x": np.ones((2, 2), F32)})
        heap = weakref.ref(executor._heap)
        del executor
        assert heap() is None
    finally:
        gc.enable()


def test_updates_are_traced_as_apply():
    graph, tracer = Graph(), Tracer(enabled=True)
    with graph.as_default():
        w = state_ops.variable("w", (4,), F32)
        updated = state_ops.assign_add(w, np.ones(4, F32), name="update")
    engine = LocalEngine(graph, tracer=tracer)
    assert isinstance(updated, Output)
    engine.run([updated])
    spans, names = tracer.spans()
    assert {Phase(int(span["phase"])) for span in spans if names[span["name"]] == "update"} == {Phase.APPLY}
    engine.close()
