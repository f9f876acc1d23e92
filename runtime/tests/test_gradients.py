"""Gradients: every op against finite differences, and the walk over the graph."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import GraphError
from runtime.graph import array_ops as ops
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Output
from runtime.graph.ops import Op, known_ops, op_class
from runtime.graph.optimize import prune
from runtime.graph.state_ops import variable
from runtime.tests.gradient_cases import CASES, Case
from runtime.tests.interpreter import evaluate

STEP = 1e-5


def differentiable_ops() -> list[str]:
    return [name for name in known_ops() if op_class(name).gradient is not Op.gradient]


def test_every_differentiable_op_has_a_case() -> None:
    missing = sorted(set(differentiable_ops()) - set(CASES))
    assert not missing, f"no gradient case for {', '.join(missing)}; add some to runtime/tests/gradient_cases.py"
    assert not set(CASES) - set(known_ops()), "cases for ops that do not exist"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{name}-{number}") for name in CASES for number, case in enumerate(CASES[name])]
)
def test_gradient_equals_finite_differences(case: Case) -> None:
    graph = Graph()
    with graph.as_default():
        inputs = [ops.placeholder(value.shape, value.dtype, f"x{at}") for at, value in enumerate(case.inputs)]
        built = case.build(*inputs)
        outputs = [built] if isinstance(built, Output) else list(built)
        # Random weights, since a plain sum would not see a gradient that is merely permuted.
        generator = np.random.default_rng(5)
        loss = ops.add_n([ops.reduce_sum(output * generator.uniform(0.5, 1.5, output.shape)) for output in outputs])
        by = [value for value in inputs if value.dtype.kind == "f"]
        grads = gradients(loss, by)
    feeds = {f"x{at}": value for at, value in enumerate(case.inputs)}
    assert all(grad is not None for grad in grads)
    got = evaluate(graph, [grad for grad in grads if grad is not None], feeds)
    for value, grad in zip(by, got):
        np.testing.assert_allclose(grad, _differences(graph, loss, feeds, value), case.tolerance, case.tolerance)


def _differences(graph: Graph, loss: Output, feeds: dict[str, np.ndarray], value: Output) -> np.ndarray:
    name = value.node.name
    base = feeds[name]
    forward = prune(graph, [loss], keep=[graph.node(name) for name in feeds])
    result = np.zeros(base.shape)
    for index in np.ndindex(base.shape):
        both = []
        for sign in (1, -1):
            moved = base.copy()
            moved[index] += sign * STEP
            both.append(float(evaluate(forward.graph, [forward.outputs[loss]], {**feeds, name: moved})[0]))
        result[index] = (both[0] - both[1]) / (2 * STEP)
    return result


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


def _value(graph: Graph, output: Output | None, **feeds: object) -> np.ndarray:
    assert output is not None
    return evaluate(graph, [output], feeds)[0]


def test_a_value_read_twice_gets_the_sum_of_both_ways(graph: Graph) -> None:
    x = ops.placeholder((3,), np.float64, "x")
    y = ops.square(x)
    loss = ops.reduce_sum(y * y + x * 3.0)
    (grad,) = gradients(loss, [x])
    at = np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(_value(graph, grad, x=at), 4 * at**3 + 3)


def test_gradient_of_an_intermediate_value_and_a_given_outer_gradient(graph: Graph) -> None:
    x = ops.placeholder((2,), np.float64, "x")
    y = ops.exp(x)
    outer = ops.constant(np.array([2.0, -1.0]))
    by_y, by_x = gradients(y * 5.0, [y, x], outer)
    np.testing.assert_allclose(_value(graph, by_y, x=[0.0, 1.0]), [10, -5])
    np.testing.assert_allclose(_value(graph, by_x, x=[0.0, 1.0]), [10, -5 * np.e])


def test_second_derivative(graph: Graph) -> None:
    x = ops.placeholder((2,), np.float64, "x")
    (first,) = gradients(ops.reduce_sum(x * x * x), [x])
    assert first is not None
    (second,) = gradients(first, [x])
    np.testing.assert_allclose(_value(graph, second, x=[1.0, -2.0]), [6, -12])


def test_none_where_the_loss_does_not_depend_on_a_parameter(graph: Graph) -> None:
    x, other = ops.placeholder((2,), name="x"), ops.placeholder((2,), name="other")
    loss = ops.reduce_sum(ops.stop_gradient(x) + x * 0.5)
    by_x, by_other = gradients(loss, [x, other])
    assert by_other is None
    np.testing.assert_array_equal(_value(graph, by_x, x=[3, 4], other=[0, 0]), [0.5, 0.5])
    assert gradients(ops.reduce_sum(ops.stop_gradient(x)), [x]) == [None]


def test_no_gradient_flows_through_integers(graph: Graph) -> None:
    x = ops.placeholder((2, 3), name="x")
    picked = ops.one_hot(ops.argmax(x, 1), 3)
    (grad,) = gradients(ops.reduce_sum(picked * x), [x])
    np.testing.assert_array_equal(_value(graph, grad, x=[[1, 2, 0], [5, 1, 1]]), [[0, 1, 0], [1, 0, 0]])


def test_the_loss_may_be_the_parameter(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    np.testing.assert_array_equal(_value(graph, gradients(x, [x])[0], x=[3, 4]), [1, 1])


def test_an_op_without_a_gradient_on_the_way_is_named(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    curved = graph.add("TanhGrad", x, x, name="bend").out
    with pytest.raises(GraphError, match=r"node bend \(TanhGrad\) has no gradient"):
        gradients(ops.reduce_sum(curved), [x])


def test_integers_have_no_derivative(graph: Graph) -> None:
    x, count = ops.placeholder((2,), name="x"), ops.placeholder((2,), np.int32, "count")
    with pytest.raises(GraphError, match=r"count:0 int32.* no derivative"):
        gradients(ops.reduce_sum(x), [count])
    with pytest.raises(GraphError, match="no derivative"):
        gradients(ops.reduce_sum(count), [x])


def test_parameters_and_outer_gradient_must_fit_the_loss(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    other = Graph()
    with other.as_default():
        foreign = ops.placeholder((2,), name="y")
    with pytest.raises(GraphError, match="another graph"):
        gradients(ops.reduce_sum(x), [foreign])
    with pytest.raises(GraphError, match=r"grad_loss .* is not of loss"):
        gradients(ops.reduce_sum(x), [x], x)


def test_gradients_lie_where_their_values_are_and_are_added_up_at_the_worker(graph: Graph) -> None:
    with graph.device("/job:ps/task:0"):
        w = variable("w", (4, 4))
    with graph.device("/job:worker/task:1"):
        x = ops.placeholder((2, 4), name="x")
        loss = ops.reduce_sum(ops.matmul(ops.matmul(x, w), w))
    before = len(graph)
    (grad,) = gradients(loss, [w])
    assert grad is not None and grad.node.op.name == "AddN"
    assert {node.device for node in graph.nodes[before:]} == {"/job:worker/task:1"}
    assert all(node.name.startswith("gradients/") for node in graph.nodes[before:])
