"""Placement: devices, colocation, and parameters over servers."""

from __future__ import annotations

import pytest

from runtime.errors import GraphError
from runtime.graph import array_ops as ops
from runtime.graph import state_ops as state
from runtime.graph.apply_ops import apply_adam
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph
from runtime.graph.placement import GreedyByBytes, RoundRobin, cost, place

PS, PS1, WORKER = "/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0"


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


def test_stated_devices_groups_and_the_default(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (2,))
    with graph.colocate_with(w.node):
        near = ops.square(w)
    free = ops.exp(near)
    placement = place(graph, WORKER)
    assert [placement[value.node] for value in (w, near, free)] == [PS, PS, WORKER]
    with pytest.raises(GraphError, match=r"node Exp \(Exp\) has no device"):
        place(graph)


def test_a_group_takes_the_device_that_any_of_it_states(graph: Graph) -> None:
    a = ops.placeholder((2,), name="a")
    with graph.colocate_with(a.node):
        b = ops.exp(a)
    c = graph.add("Neg", b, device=PS, colocate="a").out
    assert [place(graph, WORKER)[value.node] for value in (a, b, c)] == [PS, PS, PS]


def test_a_torn_group_names_both_nodes_and_devices(graph: Graph) -> None:
    with graph.device(PS):
        a = ops.placeholder((2,), name="a")
    graph.add("Neg", a, name="b", device=WORKER, colocate="a")
    with pytest.raises(GraphError, match=f"a is on {PS} and b on {WORKER}"):
        place(graph)


def test_updates_and_slots_lie_beside_their_variable(graph: Graph) -> None:
    with graph.device(WORKER), graph.variable_devices(RoundRobin([PS, PS1])):
        a, b = state.variable("a", (3,)), state.variable("b", (3,))
        loss = ops.reduce_sum(a * b)
        for value, grad in zip((a, b), gradients(loss, [a, b])):
            assert grad is not None
            apply_adam(value, grad, 0.1)
    where = {node.name: device for node, device in place(graph).items()}
    assert {where[name] for name in ("a", "a/adam_m", "a/adam_v", "a/adam_t", "ApplyAdam")} == {PS}
    assert {where[name] for name in ("b", "b/adam_m", "b/adam_v", "b/adam_t", "ApplyAdam_1")} == {PS1}
    assert where["Mul"] == WORKER


def test_round_robin_takes_turns_and_greedy_the_emptiest(graph: Graph) -> None:
    shapes = [(10, 10), (1,), (1,), (50,), (60,)]
    for policy, wanted in ((RoundRobin, [PS, PS1, PS, PS1, PS]), (GreedyByBytes, [PS, PS1, PS1, PS1, PS1])):
        made = Graph()
        with made.as_default(), made.variable_devices(policy([PS, PS1])):
            assert [state.variable(f"v{at}", shape).node.device for at, shape in enumerate(shapes)] == wanted
    with pytest.raises(GraphError, match="at least one device"):
        RoundRobin([])


def test_greedy_balances_alexnet_within_its_largest_variable(graph: Graph) -> None:
    sizes = [
        34848,
        96,
        614400,
        256,
        884736,
        384,
        1327104,
        384,
        884736,
        256,
        37748736,
        4096,
        16777216,
        4096,
        4096000,
        1000,
    ]
    load = {PS: 0, PS1: 0}
    with graph.variable_devices(GreedyByBytes([PS, PS1])):
        for at, size in enumerate(sizes):
            load[state.variable(f"v{at}", (size,)).node.device] += size
    assert abs(load[PS] - load[PS1]) <= max(sizes)


def test_cost_adds_up_by_device(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (4, 5))
    x = ops.placeholder((3, 4), name="x")
    ops.matmul(x, w)
    assert cost(graph)[""].flops == 2 * 3 * 4 * 5
    total = cost(graph, place(graph, WORKER))
    assert total[WORKER].nbytes == 4 * (12 + 20 + 15) and total[PS].flops == 0
