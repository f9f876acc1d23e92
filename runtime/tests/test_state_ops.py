"""State: variables and their initial values, update rules, queues, checkpoints' view."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import ArenaFullError, DeadlineError, GraphError, ShapeError, StepAbortedError
from runtime.execution.resources import Resources
from runtime.execution.tensor_queue import TensorQueue
from runtime.future import Future
from runtime.graph import array_ops as ops
from runtime.graph import initialisers as init
from runtime.graph import queue_ops
from runtime.graph import state_ops as state
from runtime.graph.apply_ops import apply_adagrad, apply_adam, apply_momentum, apply_sgd
from runtime.graph.graph import Graph
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec
from runtime.tests.interpreter import evaluate

F32 = np.dtype(np.float32)
VECTOR = TensorSpec((3,), F32)


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


@pytest.fixture
def resources():
    made = Resources()
    yield made
    made.abort(StepAbortedError("the test is over"))


def _soon() -> Deadline:
    return Deadline.after(5)


# Variables


def test_a_variable_outlives_steps_and_graphs(resources: Resources) -> None:
    for wanted in (5, 6):
        graph = Graph()
        with graph.as_default(), graph.scope("layer"):
            w = state.variable("w", (2,), initialiser=init.constant(4))
            value = state.assign_add(w, [1, 1])
        np.testing.assert_array_equal(evaluate(graph, [value], resources=resources)[0], [wanted, wanted])
    assert list(resources.variables()) == ["layer/w"]


def test_containers_are_apart_and_specs_are_held(resources: Resources) -> None:
    a = resources.variable("w", VECTOR)
    b = resources.variable("w", VECTOR, container="other")
    a[:] = 1
    assert not b.any() and resources.variable("w", VECTOR) is a
    with pytest.raises(ShapeError, match=r"variable w of container 'other' is float32\[3\], not float32\[4\]"):
        resources.variable("w", TensorSpec((4,), F32), container="other")
    resources.clear("other")
    assert resources.variables("other") == {} and "w" in resources.variables()


def test_variables_lie_in_the_arena_and_leave_it_with_their_last_reader() -> None:
    arena = Arena(1 << 16)
    resources = Resources(arena)
    memory = resources.variable("w", TensorSpec((100,), F32), lambda array: array.fill(2))
    assert arena.offset_of(memory) is not None and memory.sum() == 200
    with pytest.raises(ArenaFullError, match="big"):
        resources.variable("big", TensorSpec((1 << 20,), F32))
    assert list(resources.variables()) == ["w"]
    resources.clear()
    assert arena.used_bytes > 0
    del memory
    assert arena.used_bytes == 0
    arena.close()


def test_a_variable_that_found_no_room_may_come_again_smaller() -> None:
    resources = Resources(Arena(1 << 16))
    with pytest.raises(ArenaFullError, match=r"for large: .*Open it larger \(arena_bytes=, --arena-mib\)"):
        resources.variable("large", TensorSpec((1 << 20,), F32))
    assert resources.variable("large", VECTOR).shape == (3,)


def test_of_many_callers_one_initialises(resources: Resources) -> None:
    calls: list[int] = []
    seen: list[float] = []

    def initialise(array: np.ndarray) -> None:
        calls.append(1)
        array.fill(7)

    def register() -> None:
        seen.append(float(resources.variable("w", VECTOR, initialise).sum()))

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and seen == [21.0] * 8


@pytest.mark.parametrize(
    ("initialiser", "low", "high", "mean", "deviation"),
    [
        (init.uniform(-1, 3), -1, 3, 1, 4 / 12**0.5),
        (init.normal(1, 2), -np.inf, np.inf, 1, 2),
        (init.truncated_normal(0, 0.5), -1, 1, 0, 0.44),
        (init.glorot_uniform(4, 2), -1, 1, 0, 1 / 3**0.5),
        (init.he_normal(8), -np.inf, np.inf, 0, 0.5),
    ],
)
def test_random_initial_values(initialiser: Any, low: float, high: float, mean: float, deviation: float) -> None:
    spec = TensorSpec((40000,), F32)
    draws = np.empty(spec.shape, spec.dtype)
    init.write_initial(initialiser.attrs("w", spec), draws)
    assert low <= draws.min() and draws.max() <= high
    assert abs(draws.mean() - mean) < 0.05 and abs(draws.std() - deviation) < 0.05
    again, other = draws.copy(), draws.copy()
    init.write_initial(initialiser.attrs("w", spec), again)
    init.write_initial(initialiser.attrs("v", spec), other)
    assert (again == draws).all() and (other != draws).any(), "the name is the default seed"


def test_other_initial_values() -> None:
    value = np.arange(6.0).reshape(2, 3)
    for initialiser, wanted in (
        (init.zeros(), 0 * value),
        (init.constant(3), 0 * value + 3),
        (init.tensor(value), value),
    ):
        array = np.full((2, 3), np.nan)
        init.write_initial(initialiser.attrs("w", TensorSpec.of(value)), array)
        np.testing.assert_array_equal(array, wanted)
    with pytest.raises(ShapeError, match=r"variable w is float32\[3\], its initial value float64\[2, 3\]"):
        init.tensor(value).attrs("w", VECTOR)
    with pytest.raises(GraphError, match="'magic' is not one of zeros"):
        init.Initialiser("magic").attrs("w", VECTOR)


def test_only_variables_can_be_changed(graph: Graph) -> None:
    x = ops.placeholder((3,), name="x")
    with pytest.raises(GraphError, match="x:0 is not a variable"):
        state.assign(x, x)
    w = state.variable("w", (3,))
    with pytest.raises(GraphError, match="Neg:0 is not a variable"):
        apply_sgd(ops.neg(w), x, 0.1)
    assert state.variable_node(ops.identity(state.assign(w, x))) is w.node
    assert state.variables(graph) == [w]


def test_the_global_step_of_an_empty_graph_is_made_in_it() -> None:
    empty, other = Graph(), Graph()
    step = state.global_step(empty)
    assert step.graph is empty and state.global_step(empty) == step
    with other.as_default():
        assert state.global_step(Graph()).graph is not other
        assert len(other) == 0
        assert state.global_step().graph is other


# Update rules


def _reference(rule: str, w: np.ndarray, grads: list[np.ndarray], lr: float) -> np.ndarray:
    w = w.astype(np.float64)
    m, v, s = np.zeros_like(w), np.zeros_like(w), np.full_like(w, 0.1)
    for t, g in enumerate(grads, start=1):
        if rule == "sgd":
            w = w - lr * g
        elif rule in ("momentum", "nesterov"):
            m = 0.9 * m + g
            w = w - lr * (g + 0.9 * m if rule == "nesterov" else m)
        elif rule == "adagrad":
            s = s + g * g
            w = w - lr * g / np.sqrt(s)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w = w - lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-8)
    return w


RULES: dict[str, Any] = {
    "sgd": apply_sgd,
    "momentum": apply_momentum,
    "nesterov": lambda w, g, lr: apply_momentum(w, g, lr, nesterov=True),
    "adagrad": apply_adagrad,
    "adam": apply_adam,
}


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 17) + 13])
@pytest.mark.parametrize("rule", RULES)
def test_update_rules(graph: Graph, resources: Resources, rule: str, size: int) -> None:
    generator = np.random.default_rng(0)
    start = generator.standard_normal(size)
    grads = [generator.standard_normal(size) for _ in range(3)]
    w = state.variable("w", (size,), np.float64, init.tensor(start))
    gradient = ops.placeholder((size,), np.float64, "g")
    rate = ops.placeholder((), np.float64, "rate")
    RULES[rule](w, gradient, rate)
    for g in grads:
        evaluate(graph, [], {"g": g, "rate": 0.05}, resources)
    np.testing.assert_allclose(resources.variables()["w"], _reference(rule, start, grads, 0.05), 1e-9, 1e-9)


def test_slots_are_shared_by_steps_of_one_graph_and_checked(graph: Graph) -> None:
    w, g = state.variable("w", (3,)), ops.placeholder((3,), name="g")
    with graph.scope("towers"):
        first, second = apply_momentum(w, g, 0.1), apply_momentum(w, g, 0.2)
    assert first.inputs[1] == second.inputs[1] and first.inputs[1].node.name == "w/momentum"
    with pytest.raises(ShapeError, match=r"the variable is float32\[3\], the gradient float32\[2\]"):
        apply_sgd(w, ops.placeholder((2,), name="short"), 0.1)
    with pytest.raises(ShapeError, match=r"the learning rate is float32\[1\], not a scalar"):
        apply_sgd(w, g, ops.placeholder((1,), name="rates"))


def test_updates_of_one_variable_exclude_each_other_and_snapshots(graph: Graph, resources: Resources) -> None:
    size = 1 << 18
    w = state.variable("w", (size,))
    state.assign_add(w, np.ones(size, np.float32))
    torn: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            copies = resources.snapshot()
            if copies and copies["w"].min() != copies["w"].max():
                torn.append(1)

    def train() -> None:
        for _ in range(20):
            evaluate(graph, [], resources=resources)

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=train) for _ in range(2)]
    watcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    over.set()
    watcher.join()
    assert not torn and (resources.variables()["w"] == 40).all()


# Queues


def _arrays(*values: float) -> list[np.ndarray]:
    return [np.full(3, value, np.float32) for value in values]


def test_a_queue_is_bounded_and_keeps_the_order() -> None:
    queue = TensorQueue("q", VECTOR, 2)
    tensors, outs = _arrays(1, 2, 3), _arrays(0, 0, 0, 0)
    puts = [queue.put(tensor, 1) for tensor in tensors]
    assert [put.done() for put in puts] == [True, True, False] and len(queue) == 2
    tensors[0][:] = 9
    gets = [queue.get(out, 2) for out in outs]
    assert puts[2].done() and [get.done() for get in gets] == [True, True, True, False]
    assert [float(out[0]) for out in outs[:3]] == [1, 2, 3]
    queue.cancel(2, StepAbortedError("gone"))
    with pytest.raises(StepAbortedError, match="gone"):
        gets[3].result(_soon())
    waiting = queue.get(outs[3], 3)
    with pytest.raises(DeadlineError, match="a tensor in queue q"):
        waiting.result(Deadline.after(0))
    queue.abort(StepAbortedError("closed"))
    for future in (waiting, queue.put(tensors[0], 1)):
        with pytest.raises(StepAbortedError, match="closed"):
            future.result(_soon())
    with pytest.raises(GraphError, match="capacity 0"):
        TensorQueue("q", VECTOR, 0)


def test_queue_ops(graph: Graph, resources: Resources) -> None:
    x = ops.placeholder((3,), name="x")
    put = queue_ops.enqueue("q", x, capacity=4)
    with graph.control_dependencies([put]):
        got = queue_ops.dequeue("q", VECTOR, capacity=4)
    np.testing.assert_array_equal(evaluate(graph, [got], {"x": [1, 2, 3]}, resources)[0], [1, 2, 3])
    with pytest.raises(ShapeError, match=r"queue q holds float32\[3\], not float32\[4\]"):
        resources.queue("q", TensorSpec((4,), F32), 4)
    with pytest.raises(GraphError, match=r"needs a queue's name and a capacity from 1"):
        queue_ops.enqueue("", x, 4)


# Restoring, aborting


def test_restore_checks_all_before_it_writes_any(resources: Resources) -> None:
    resources.variable("a", VECTOR)
    resources.variable("b", VECTOR)
    ones = np.ones(3, np.float32)
    with pytest.raises(ShapeError, match=r"variable b is float32\[3\], not float32\[4\]"):
        resources.restore({"a": ones, "new": ones, "b": np.ones(4, np.float32)})
    assert not resources.variables()["a"].any() and "new" not in resources.variables()
    resources.variable("new", TensorSpec((7,), F32))  # the failed attempt left no trace
    resources.restore({"a": ones, "fresh": ones})
    assert resources.variables()["a"].all()
    assert resources.variable("fresh", VECTOR, lambda array: array.fill(5)).sum() == 3, "restored before registered"


def test_abort_fails_all_waits_now_and_later(resources: Resources) -> None:
    futures: list[Future] = [
        resources.accumulator("w", VECTOR).take(1, np.empty(3, np.float32), 1),
        resources.queue("q", VECTOR, 1).get(np.empty(3, np.float32), 1),
        resources.step_counter("s").wait_past(0, np.zeros((), np.int64), 1),
    ]
    resources.abort(StepAbortedError("first"))
    resources.abort(StepAbortedError("second"))
    futures.append(resources.queue("later", VECTOR, 1).get(np.empty(3, np.float32), 1))
    for future in futures:
        with pytest.raises(StepAbortedError, match="first"):
            future.result(_soon())
