"""Partition: cut graphs give the same bits as whole ones, whatever runs first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import GraphError
from runtime.execution.local import LocalEngine
from runtime.execution.resources import Resources
from runtime.graph import array_ops as ops
from runtime.graph import state_ops as state
from runtime.graph.apply_ops import apply_sgd
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph
from runtime.graph.initialisers import constant, uniform
from runtime.graph.optimize import prune
from runtime.graph.partition import Partition, check_feeds, partition
from runtime.graph.placement import place
from runtime.graph.serialize import dump_graph, load_graph
from runtime.graph.transfer_ops import CONTROL_SPEC
from runtime.tests.interpreter import evaluate, evaluate_partitions
from runtime.tests.random_graphs import DEVICES, Drawn, graphs

PS, PS1, WORKER, WORKER1 = DEVICES


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


def _whole(drawn: Drawn) -> tuple[list[bytes], dict[str, bytes]]:
    pruned = prune(drawn.graph, drawn.fetches, drawn.targets)
    resources = Resources()
    values = evaluate(pruned.graph, [pruned.outputs[value] for value in drawn.fetches], drawn.feeds, resources)
    return [value.tobytes() for value in values], {k: v.tobytes() for k, v in resources.variables().items()}


@settings(max_examples=60)
@given(graphs(), st.integers(0, 5))
def test_random_graphs_cut_over_random_devices_give_the_same_bits(drawn: Drawn, seed: int) -> None:
    values, variables = _whole(drawn)
    parts = partition(drawn.graph, place(drawn.graph), drawn.fetches, drawn.targets)
    resources = {device: Resources() for device in DEVICES}
    got = evaluate_partitions(parts, drawn.feeds, resources, seed)
    assert [got[value.name].tobytes() for value in drawn.fetches] == values
    held = [resource.variables() for resource in resources.values()]
    assert {name: array.tobytes() for own in held for name, array in own.items()} == variables
    assert sum(map(len, held)) == len(variables), "a variable lives on one device"


@settings(max_examples=30)
@given(graphs(), st.integers(0, 100))
def test_every_cut_edge_has_one_send_and_one_recv(drawn: Drawn, first: int) -> None:
    parts = partition(drawn.graph, place(drawn.graph), drawn.fetches, drawn.targets, first)
    sends = [edge for part in parts.values() for edge in part.sends]
    recvs = [edge for part in parts.values() for edge in part.recvs]
    assert sorted(sends, key=lambda edge: edge.id) == sorted(recvs, key=lambda edge: edge.id)
    assert sorted(edge.id for edge in sends) == list(range(first, first + len(sends)))
    assert len({(edge.tensor, edge.src, edge.dst) for edge in sends}) == len(sends), "keys of the rendezvous collide"
    again = partition(drawn.graph, place(drawn.graph), drawn.fetches, drawn.targets, first)
    assert {device: dump_graph(part.graph) for device, part in again.items()} == {
        device: dump_graph(part.graph) for device, part in parts.items()
    }


@settings(max_examples=30)
@given(graphs())
def test_a_partition_survives_its_journey(drawn: Drawn) -> None:
    for device, part in partition(drawn.graph, place(drawn.graph), drawn.fetches, drawn.targets).items():
        there = Partition.of(device, load_graph(dump_graph(part.graph)), list(part.fetches))
        assert dump_graph(there.graph) == dump_graph(part.graph)
        assert (there.sends, there.recvs) == (part.sends, part.recvs)
        assert [value.name for value in there.fetches.values()] == [value.name for value in part.fetches.values()]
        assert list(there.feeds) == list(part.feeds)


@settings(max_examples=30)
@given(graphs(max_nodes=40))
def test_the_executor_gives_the_same_bits_step_after_step(drawn: Drawn) -> None:
    pruned = prune(drawn.graph, drawn.fetches, drawn.targets)
    resources = Resources()
    feeds = {drawn.graph.node(name).out: value for name, value in drawn.feeds.items()}
    engine = LocalEngine(drawn.graph, threads=1, poison=True)
    try:
        for _ in range(3):
            wanted = evaluate(pruned.graph, [pruned.outputs[value] for value in drawn.fetches], drawn.feeds, resources)
            got = engine.run([*drawn.fetches, *drawn.targets], feeds)[: len(wanted)]
            assert [value.tobytes() for value in got if value is not None] == [value.tobytes() for value in wanted]
            held = engine.resources.variables()
            assert {name: array.tobytes() for name, array in held.items()} == {
                name: array.tobytes() for name, array in resources.variables().items()
            }
    finally:
        engine.close()


def test_readers_of_a_tensor_on_one_device_share_one_recv(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (2, 2))
    with graph.device(WORKER):
        a, b = ops.square(w), ops.exp(w)
    with graph.device(WORKER1):
        c = ops.neg(w)
    parts = partition(graph, place(graph), [a, b, c])
    assert [(edge.tensor, edge.dst) for edge in parts[PS].sends] == [("w:0", WORKER), ("w:0", WORKER1)]
    assert len(parts[WORKER].recvs) == len(parts[WORKER1].recvs) == 1
    assert [edge.id for edge in parts[PS].sends] == [0, 1]


def test_control_edges_cross_as_one_empty_message_for_each_set(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (2,))
        first, second = state.assign_add(w, [1, 1]).node, state.assign_add(w, [2, 2]).node
    with graph.device(WORKER), graph.control_dependencies([first, second]):
        x = ops.constant(np.zeros(5000, np.float32))
        y, z = ops.exp(x), ops.neg(x)
    parts = partition(graph, place(graph), [y, z])
    assert [(edge.tensor, edge.spec) for edge in parts[PS].sends] == [("^AssignAdd_1+1", CONTROL_SPEC)]
    assert parts[WORKER].recvs == parts[PS].sends
    resources = Resources()
    evaluate_partitions(parts, resources={PS: resources})
    np.testing.assert_array_equal(resources.variables()["w"], [3, 3])


def test_a_training_step_sends_parameters_and_gradients_only(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (4, 4), initialiser=uniform(-1, 1))
        b = state.variable("b", (4,), initialiser=constant(0.5))
    with graph.device(WORKER):
        x = ops.placeholder((3, 4), name="x")
        loss = ops.reduce_mean(ops.square(ops.tanh(ops.matmul(x, w) + b)))
    pairs = list(zip([w, b], gradients(loss, [w, b])))
    train = ops.group([apply_sgd(var, grad, 0.1) for var, grad in pairs if grad is not None])
    parts = partition(graph, place(graph, WORKER), [loss], [train])
    assert [edge.tensor for edge in parts[PS].sends] == ["w:0", "b:0"]
    assert sorted(edge.tensor for edge in parts[WORKER].sends) == sorted(grad.name for _, grad in pairs if grad)
    assert all(node.op.name != "NoOp" for part in parts.values() for node in part.graph.nodes)


def test_parameters_are_sent_in_the_order_of_need_and_gradients_when_made(graph: Graph) -> None:
    with graph.device(PS):
        w = [state.variable(f"w{at}", (2, 2)) for at in range(3)]
    with graph.device(WORKER):
        h = ops.placeholder((2, 2), name="x")
        for at in (2, 0, 1):
            h = ops.matmul(h, w[at])
    parts = partition(graph, place(graph), [h])
    assert [edge.tensor for edge in parts[PS].sends] == ["w2:0", "w0:0", "w1:0"]
    names = [node.op.name for node in parts[WORKER].graph.nodes]
    assert names == ["Placeholder", "Recv", "MatMul", "Recv", "MatMul", "Recv", "MatMul"]


def test_small_constants_are_repeated_and_large_ones_sent(graph: Graph) -> None:
    with graph.device(PS):
        small, large = ops.constant(np.ones(4, np.float32)), ops.constant(np.ones(4096, np.float32))
    with graph.device(WORKER):
        a, b = ops.neg(small), ops.neg(large)
    parts = partition(graph, place(graph), [a, b])
    assert [edge.tensor for edge in parts[PS].sends] == [large.name]
    assert small.node.name not in parts[PS].graph and small.node.name in parts[WORKER].graph


def test_reads_and_writes_of_a_variable_keep_the_order_of_the_program(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (1,), initialiser=constant(1))
    with graph.device(WORKER):
        before = w + 0.0
    first = state.assign_add(w, [1])
    with graph.device(WORKER):
        between = w + 0.0
        held = ops.identity(w)
    second = state.assign_add(first, [1])
    with graph.device(WORKER):
        after = w + 0.0
        late = held + 0.0
    fetches = [before, between, after, late]
    parts = partition(graph, place(graph), fetches, [second.node])
    for seed in range(20):
        got = evaluate_partitions(parts, resources={PS: Resources()}, seed=seed)
        assert [float(got[value.name][0]) for value in fetches] == [1, 2, 3, 2]
    assert [edge.tensor for edge in parts[PS].sends] == ["w:0", "w:0@1", "w:0@2"]


def test_an_update_waits_for_the_backward_pass_that_still_reads_the_variable(graph: Graph) -> None:
    with graph.device(WORKER):
        x = ops.placeholder((2, 2), name="x")
        w0, w1 = (state.variable(name, (2, 2), initialiser=uniform(-1, 1)) for name in ("w0", "w1"))
        loss = ops.reduce_sum(ops.square(ops.matmul(ops.matmul(x, w0), w1)))
        grads = gradients(loss, [w0, w1])
        train = ops.group([apply_sgd(w, g, 0.1) for w, g in zip([w0, w1], grads) if g is not None])
    parts = partition(graph, place(graph), [], [train])
    feeds = {"x": np.eye(2)}
    results = set()
    for seed in range(20):
        resources = Resources()
        evaluate_partitions(parts, feeds, {WORKER: resources}, seed)
        results.add(b"".join(array.tobytes() for _, array in sorted(resources.variables().items())))
    assert len(results) == 1


def test_what_is_not_needed_is_not_in_a_partition(graph: Graph) -> None:
    with graph.device(WORKER):
        x = ops.placeholder((2,), name="x")
        ops.placeholder((2,), name="unused")
        y = ops.exp(x)
        ops.neg(y)
    part = partition(graph, place(graph), [y])[WORKER]
    assert [node.name for node in part.graph.nodes] == ["x", "Exp"]
    assert list(part.feeds) == ["x"] and list(part.fetches) == ["Exp:0"]


def test_only_placeholders_of_the_graph_can_be_fed_and_outputs_of_it_fetched(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    y = ops.exp(x)
    assert check_feeds([x]) == [x.node]
    with pytest.raises(GraphError, match="Exp:0 is the output of Exp; only a placeholder can be fed"):
        check_feeds([x, y])
    other = Graph()
    with pytest.raises(GraphError, match="another graph"):
        partition(other, {}, [y])
    with pytest.raises(GraphError, match=r"node x .* has no place"):
        partition(graph, {}, [y])


def test_a_foreign_partition_is_checked(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (2,))
    with graph.device(WORKER):
        y = ops.exp(w)
    part = partition(graph, place(graph), [y])[WORKER]
    with pytest.raises(GraphError, match=f"is on {WORKER}, not on {PS}"):
        Partition.of(PS, part.graph, [])
    with pytest.raises(GraphError, match="no node is called 'nothing'"):
        Partition.of(WORKER, part.graph, ["nothing:0"])
    recv = part.graph.nodes[0]
    part.graph.add("Recv", device=WORKER, name="again", **recv.attrs)
    with pytest.raises(GraphError, match="two ends of one edge"):
        Partition.of(WORKER, part.graph, [])
    stray = Graph()
    stray.add("Recv", device=PS, **recv.attrs)
    with pytest.raises(GraphError, match=f"does not end at {PS}"):
        Partition.of(PS, stray, [])


def test_changing_a_variable_from_elsewhere_is_refused(graph: Graph) -> None:
    with graph.device(PS):
        w = state.variable("w", (2,))
    change = state.assign_add(w, [1, 1])
    placement = place(graph)
    placement[change.node] = WORKER
    with pytest.raises(GraphError, match="changes variable w on /job:ps/task:0; colocate them"):
        partition(graph, placement, [], [change.node])
