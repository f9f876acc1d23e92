"""Optimiser: fewer nodes, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from runtime.errors import GraphError
from runtime.execution.resources import Resources
from runtime.graph import array_ops as ops
from runtime.graph import state_ops as state
from runtime.graph.graph import Graph
from runtime.graph.optimize import FOLDED_BYTES, Rewrite, optimise, prune
from runtime.graph.placement import place
from runtime.tests.interpreter import evaluate
from runtime.tests.random_graphs import Drawn, graphs

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


def _names(rewrite: Rewrite) -> list[str]:
    return [node.op.name for node in rewrite.graph.nodes]


def _result(rewrite: Rewrite, drawn: Drawn) -> tuple[list[bytes], dict[str, bytes]]:
    resources = Resources()
    values = evaluate(rewrite.graph, [rewrite.outputs[value] for value in drawn.fetches], drawn.feeds, resources)
    return [value.tobytes() for value in values], {k: v.tobytes() for k, v in resources.variables().items()}


@settings(max_examples=60)
@given(graphs())
def test_random_graphs_give_the_same_bits(drawn: Drawn) -> None:
    plain = prune(drawn.graph, drawn.fetches, drawn.targets)
    better = optimise(drawn.graph, drawn.fetches, drawn.targets)
    assert len(better.graph) <= len(plain.graph)
    assert _result(better, drawn) == _result(plain, drawn)
    before = place(drawn.graph)
    after = place(better.graph)
    for old, new in better.nodes.items():
        assert after[new] == before[old]


def test_pruning_keeps_what_is_needed_and_fed(graph: Graph) -> None:
    x, y = ops.placeholder((2,), name="x"), ops.placeholder((2,), name="y")
    with graph.control_dependencies([ops.exp(x, name="first").node]):
        z = ops.neg(x)
    ops.log(x)
    rewrite = optimise(graph, [z], keep=[y.node])
    assert [node.name for node in rewrite.graph.nodes] == ["x", "y", "first", "Neg"]
    assert rewrite.outputs[z].node.control == (rewrite.graph.node("first"),)
    assert [node.name for node in graph.nodes] == ["x", "y", "first", "Neg", "Log"], "the old graph is as it was"


def test_equal_expressions_become_one_and_stateful_ones_do_not(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    fetches = [ops.exp(x) * 2.0, ops.exp(x) * 2.0, ops.exp(x) * 3.0]
    rewrite = optimise(graph, fetches)
    assert _names(rewrite).count("Exp") == 1 and _names(rewrite).count("Mul") == 2
    assert rewrite.outputs[fetches[0]] == rewrite.outputs[fetches[1]]
    w = state.variable("w", (2,))
    both = [state.assign_add(w, [1, 1]).node, state.assign_add(w, [1, 1]).node]
    assert _names(optimise(graph, [], both)).count("AssignAdd") == 2


def test_reads_before_and_after_a_write_are_different(graph: Graph) -> None:
    w = state.variable("w", (1,))
    before = w + 1.0
    wrote = state.assign_add(w, [5])
    after = w + 1.0
    rewrite = optimise(graph, [before, after], [wrote.node])
    assert rewrite.outputs[before] != rewrite.outputs[after]
    got = evaluate(rewrite.graph, [rewrite.outputs[before], rewrite.outputs[after]])
    assert [float(value[0]) for value in got] == [1, 6]


def test_equal_expressions_on_two_devices_stay_two(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    with graph.device(PS):
        a = ops.exp(x)
    with graph.device(WORKER):
        b = ops.exp(x)
    assert _names(optimise(graph, [a, b])).count("Exp") == 2


def test_attributes_that_only_look_equal_are_not(graph: Graph) -> None:
    zero, minus = ops.fill((2,), 0.0), ops.fill((2,), -0.0)
    x = ops.placeholder((2,), name="x")
    a, b = x * zero, x * minus
    rewrite = optimise(graph, [a, b])
    got = evaluate(rewrite.graph, [rewrite.outputs[a], rewrite.outputs[b]], {"x": [1, 1]})
    assert not np.signbit(got[0]).any() and np.signbit(got[1]).all()


def test_constants_are_folded_with_the_ops_own_kernels(graph: Graph) -> None:
    x = ops.placeholder((3,), name="x")
    table = ops.tanh(ops.constant([[0.1, 0.2, 0.3]]) + 1.0)
    y = x + ops.reshape(table, (3,))
    rewrite = optimise(graph, [y])
    assert _names(rewrite) == ["Placeholder", "Constant", "Add"]
    plain = prune(graph, [y])
    feeds = {"x": np.ones(3)}
    np.testing.assert_array_equal(
        evaluate(rewrite.graph, [rewrite.outputs[y]], feeds), evaluate(plain.graph, [plain.outputs[y]], feeds)
    )


def test_large_constants_and_failing_ones_are_left_to_the_step(graph: Graph) -> None:
    large = ops.fill((FOLDED_BYTES // 4 + 1,), 1.0) * 2.0
    wrong = ops.gather(ops.constant([1.0, 2.0]), ops.constant([7]))
    names = _names(optimise(graph, [large, wrong]))
    assert "Mul" in names and "Gather" in names


def test_groups_survive_the_node_that_named_them(graph: Graph) -> None:
    with graph.device(PS):
        head = ops.constant([1.0], name="head")
    with graph.colocate_with(head.node):
        a, b = ops.placeholder((1,), name="a"), ops.placeholder((1,), name="b")
    with graph.colocate_with(a.node):
        c = a + b
    rewrite = prune(graph, [c])
    assert "head" not in rewrite.graph
    assert set(place(rewrite.graph).values()) == {PS}
    assert rewrite.graph.node("b").colocate == "a" and rewrite.graph.node("a").colocate == ""


def test_fetching_from_another_graph_is_refused(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    with pytest.raises(GraphError, match="x belongs to another graph"):
        prune(Graph(), [x])
