"""What replicas wait for each other with: accumulators and the global step."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import DeadlineError, GraphError, ShapeError, StepAbortedError
from runtime.execution.accumulator import Accumulator, mean_into
from runtime.execution.resources import Resources
from runtime.graph import array_ops as ops
from runtime.graph import initialisers as init
from runtime.graph import replica_ops as replicas
from runtime.graph import state_ops as state
from runtime.graph.apply_ops import apply_sgd
from runtime.graph.graph import Graph
from runtime.tensor import TensorSpec
from runtime.tests.interpreter import Run

F32 = np.dtype(np.float32)
VECTOR = TensorSpec((3,), F32)


@pytest.fixture
def resources():
    made = Resources()
    yield made
    made.abort(StepAbortedError("the test is over"))


def _soon() -> Deadline:
    return Deadline.after(5)


def _arrays(*values: float) -> list[np.ndarray]:
    return [np.full(3, value, np.float32) for value in values]


def test_gradients_are_averaged_in_the_order_of_workers_whenever_they_come() -> None:
    generator = np.random.default_rng(1)
    gradients = [generator.standard_normal(1000).astype(np.float32) * 10**at for at in range(4)]
    wanted = (((gradients[0] + gradients[1]) + gradients[2]) + gradients[3]) / np.float32(4)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        accumulator = Accumulator("w", TensorSpec((1000,), F32))
        out = np.empty(1000, np.float32)
        futures = [accumulator.apply(worker, gradients[worker], 0, worker) for worker in order[:2]]
        take = accumulator.take(4, out, 9)
        futures += [accumulator.apply(worker, gradients[worker], 0, worker) for worker in order[2:]]
        take.result(_soon())
        assert out.tobytes() == wanted.tobytes()
        assert all(future.done() for future in futures)
        assert (accumulator.step, accumulator.taken, accumulator.applied, accumulator.dropped) == (1, 1, 4, 0)


def test_a_gradient_is_not_copied_and_is_free_only_when_it_was_summed() -> None:
    accumulator = Accumulator("w", VECTOR)
    first, second = _arrays(1, 3)
    given = accumulator.apply(0, first, 0, 1)
    first[:] = 5  # its owner must not do so before the future is done; here it shows that no copy was made
    accumulator.apply(1, second, 0, 2)
    assert not given.done()
    out = np.empty(3, np.float32)
    assert accumulator.take(2, out, 3).done() and given.done() and (out == 4).all()


def test_late_and_stale_gradients_are_dropped() -> None:
    accumulator = Accumulator("w", VECTOR)
    out = np.empty(3, np.float32)
    a, b, late, stale = _arrays(1, 2, 100, 100)
    for worker, gradient in ((2, a), (0, b), (1, late)):
        accumulator.apply(worker, gradient, 7, worker)
    accumulator.take(2, out, 9).result(_soon())
    assert (out == 1.5).all() and accumulator.step == 8 and accumulator.dropped == 1
    assert accumulator.apply(1, stale, 7, 1).done() and accumulator.dropped == 2
    fresh = accumulator.apply(1, a, 8, 1)
    assert not fresh.done()


def test_an_aborted_step_takes_its_gradient_back() -> None:
    accumulator = Accumulator("w", VECTOR)
    out = np.empty(3, np.float32)
    lost, a, b = _arrays(100, 1, 2)
    gone = accumulator.apply(0, lost, 0, 1)
    waiting = accumulator.take(2, out, 4)
    accumulator.cancel(1, StepAbortedError("worker 0 is lost"))
    with pytest.raises(StepAbortedError, match="worker 0 is lost"):
        gone.result(_soon())
    accumulator.apply(1, a, 0, 2)
    assert not waiting.done()
    accumulator.apply(0, b, 0, 3)
    assert waiting.done() and (out == 1.5).all()


def test_waits_say_what_they_wait_for() -> None:
    accumulator = Accumulator("fc6/weights", VECTOR)
    take = accumulator.take(2, np.empty(3, np.float32), 1)
    accumulator.apply(1, np.ones(3, np.float32), 0, 2)
    with pytest.raises(
        DeadlineError, match=r"gradients of fc6/weights for step 0: 1 of 2 are here, from workers \[1\]"
    ):
        take.result(Deadline.after(0))
    accumulator.abort(StepAbortedError("shutting down"))
    for future in (take, accumulator.take(1, np.empty(3, np.float32), 1), accumulator.apply(0, np.ones(3), 0, 1)):
        with pytest.raises(StepAbortedError, match="shutting down"):
            future.result(_soon())
    with pytest.raises(GraphError, match="int32 is not a floating dtype"):
        Accumulator("w", TensorSpec((1,), np.dtype(np.int32)))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, (1 << 18) + 5])
def test_mean_passes_every_block(count: int, size: int) -> None:
    arrays = [np.arange(size, dtype=np.float32) + at for at in range(count)]
    out = np.full(size, np.nan, np.float32)
    mean_into(out, arrays)
    np.testing.assert_allclose(out, np.arange(size) + (count - 1) / 2, 1e-6)


def _replica(worker: int, workers: int, chief: bool) -> Graph:
    graph = Graph()
    with graph.as_default():
        w = state.variable("w", (2,), initialiser=init.constant(1))
        step = state.global_step()
        local = ops.placeholder((), np.int64, "local")
        gradient = ops.placeholder((2,), name="g")
        given = replicas.accumulator_apply(w, gradient, local, worker)
        if chief:
            update = apply_sgd(w, replicas.accumulator_take(w, workers), 1.0)
            with graph.control_dependencies([update]):
                replicas.advance_step(step)
        with graph.control_dependencies([given]):
            replicas.await_step(step, local, name="next")
    return graph


def test_synchronous_replicas_step_together(resources: Resources) -> None:
    replicas = [_replica(0, 2, True), _replica(1, 2, False)]
    for at in range(3):
        runs = [
            Run(graph, {"local": at, "g": [worker + 1, 0]}, resources, step=10 * at + worker)
            for worker, graph in enumerate(replicas)
        ]
        while choices := [(run, node) for run in reversed(runs) for node in run.ready()]:
            run, node = choices[0]
            run.step(node)
        assert all(run.over for run in runs)
        assert [int(run.values[graph.output("next")]) for run, graph in zip(runs, replicas)] == [at + 1, at + 1]
        np.testing.assert_allclose(resources.variables()["w"], [1 - 1.5 * (at + 1), 1])


def test_a_straggler_learns_the_newest_step_at_once(resources: Resources) -> None:
    counter = resources.step_counter(state.GLOBAL_STEP)
    counter.advance(by=4)
    out = np.zeros((), np.int64)
    assert counter.wait_past(1, out, 1).done() and out == 4
    waiting = counter.wait_past(4, out, 2)
    cancelled = counter.wait_past(4, np.zeros((), np.int64), 3)
    resources.cancel(3, StepAbortedError("gone"))
    with pytest.raises(StepAbortedError, match="gone"):
        cancelled.result(_soon())
    assert not waiting.done()
    resources.restore({state.GLOBAL_STEP: np.array(9)})
    assert waiting.done() and out == 9
    with pytest.raises(DeadlineError, match="global_step to pass 20"):
        counter.wait_past(20, out, 2).result(Deadline.after(0))


def test_restoring_forgets_gradients_of_the_old_values(resources: Resources) -> None:
    accumulator = resources.accumulator("w", VECTOR)
    accumulator.step = 12
    held = accumulator.apply(0, np.ones(3, np.float32), 12, 1)
    resources.restore({"w": np.zeros(3, np.float32)})
    with pytest.raises(StepAbortedError, match="restored"):
        held.result(_soon())
    assert accumulator.step == 0
    with pytest.raises(ShapeError, match=r"accumulator w is float32\[3\], not float32\[2\]"):
        resources.accumulator("w", TensorSpec((2,), F32))
