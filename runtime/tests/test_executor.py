"""The executor against a naive interpreter, in parts that exchange tensors, and what it does when things go wrong."""

import gc
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.deadline import Deadline
from runtime.errors import DeadlineError, GraphError, PeerLostError, StepAbortedError, UnknownGraphError
from runtime.execution.compile import compile_partition
from runtime.execution.local import LocalEngine
from runtime.execution.rendezvous import Rendezvous
from runtime.execution.resources import Resources
from runtime.future import Future
from runtime.graph import array_ops as ops
from runtime.graph import queue_ops, state_ops
from runtime.graph.graph import Graph
from runtime.graph.optimize import prune
from runtime.graph.partition import partition
from runtime.graph.placement import place
from runtime.memory.arena import POISON, Arena
from runtime.memory.plan import Place
from runtime.tensor import TensorSpec
from runtime.testing import same_bytes
from runtime.tests import random_graphs
from runtime.tests.interpreter import evaluate
from runtime.tests.local_rendezvous import LocalRendezvous
from runtime.trace import Phase, Tracer

A, B, C = (f"/job:w/task:{index}" for index in range(3))
F32 = np.float32


def soon():
    return Deadline.after(60.0)


class Parts:
    """A graph cut over devices, one executor each, run by a thread each over one LocalRendezvous."""

    def __init__(self, graph, placement, fetches, targets=(), poison=True, arena=True):
        self.parts = partition(graph, placement, fetches, targets)
        self.fetches = fetches
        self.arenas = {device: Arena(1 << 22) if arena else None for device in self.parts}
        self.resources = {device: Resources(self.arenas[device]) for device in self.parts}
        self.executors = {
            device: compile_partition(
                part.graph,
                list(part.fetches.values()),
                edges=[*part.sends, *part.recvs],
                resources=self.resources[device],
                arena=self.arenas[device],
                poison=poison,
            )
            for device, part in self.parts.items()
        }

    def run(self, step, feeds, deadline=None, rendezvous=None):
        """The fetches, or the first error that is not a mere consequence."""
        rendezvous = rendezvous or LocalRendezvous(step)
        results, errors = {}, []

        def work(device):
            part = self.parts[device]
            given = {name: feeds[name] for name in part.feeds}
            try:
                arrays = self.executors[device].run(step, rendezvous, given, deadline or soon())
                results.update(zip(part.fetches, arrays, strict=True))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(device,)) for device in self.parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, StepAbortedError)), errors[0])
        return [results[value.name] for value in self.fetches]

    def close(self):
        for executor in self.executors.values():
            executor.close()


def reference(graph, fetches, targets, feeds, resources):
    """What a naive interpreter of the whole graph gives, one node after the other, nothing planned."""
    pruned = prune(graph, fetches, targets)
    return evaluate(pruned.graph, [pruned.outputs[value] for value in fetches], feeds, resources)


@given(random_graphs.graphs(max_nodes=30), st.booleans())
@settings(max_examples=30, deadline=None)
def test_parts_that_exchange_tensors_equal_the_whole_bit_for_bit(drawn, arena):
    parts = Parts(drawn.graph, place(drawn.graph), drawn.fetches, drawn.targets, arena=arena)
    resources = Resources()
    for step in (1, 2, 3):
        wanted = reference(drawn.graph, drawn.fetches, drawn.targets, drawn.feeds, resources)
        for got, want in zip(parts.run(step, drawn.feeds), wanted, strict=True):
            assert same_bytes(got, want)
    held = {name: array for own in parts.resources.values() for name, array in own.variables().items()}
    for name, array in resources.variables().items():
        assert same_bytes(held[name], array)
    del held
    parts.resources.clear()
    parts.close()
    gc.collect()
    assert all(each is None or each.used_bytes == 0 for each in parts.arenas.values())


# Variables


def test_a_step_reads_a_variable_in_the_order_of_the_graph():
    graph = Graph()
    with graph.as_default():
        w = state_ops.variable("w", (4,), F32)
        before = ops.identity(w)
        doubled = ops.add(w, w)
        updated = state_ops.assign_add(w, np.arange(4, dtype=F32))
        after = ops.add(before, updated)  # reads the old value through `before` after the update
    engine = LocalEngine(graph, poison=True)
    step = np.arange(4, dtype=F32)
    for count in range(3):
        fetched = engine.run([w, before, doubled, updated, after])
        old = count * step
        for got, want in zip(fetched, [old, old, 2 * old, old + step, 2 * old + step], strict=True):
            assert same_bytes(got, want)
    assert engine.run([updated.node, w])[0] is None
    assert same_bytes(engine.run([w])[0], 4 * step)
    engine.close()


def test_two_nodes_of_one_variable_are_one_memory():
    graph = Graph()
    spec = {"variable": "w", "shape": (4,), "dtype": F32, "init": "zeros"}
    with graph.as_default():
        first, second = (graph.add("Variable", name=name, **spec).out for name in ("w", "w_again"))
        before = ops.identity(first)
        updated = state_ops.assign_add(second, np.ones(4, F32))
        total = ops.add(before, updated)
    engine = LocalEngine(graph, poison=True)
    for count in range(3):
        first_value, total_value = engine.run([first, total])
        assert same_bytes(first_value, np.full(4, count, F32))
        assert same_bytes(total_value, np.full(4, 2 * count + 1, F32))
    assert engine.executor([first, second]).plan.bytes_of(Place.VARIABLE) == 64
    engine.close()


def test_a_variable_is_sent_from_its_own_memory_and_changed_only_when_the_peer_has_it():
    graph = Graph()
    with graph.as_default():
        with graph.device(A):
            w = state_ops.variable("w", (1000,), F32)
        with graph.device(B):
            y = ops.add(w, w)
        with graph.device(A):
            updated = state_ops.assign_add(w, np.ones(1000, F32))
    parts = Parts(graph, {node: node.device for node in graph.nodes}, [y, updated])
    sent = []

    class Slow(LocalRendezvous):
        def send(self, edge, tensor, release=None):
            sent.append(tensor)
            # The peer reads only after a while: an update before the release would change what it gets.
            threading.Timer(0.05, lambda: LocalRendezvous.send(self, edge, tensor, release)).start()

    for step in range(1, 4):
        y_value, w_value = parts.run(step, {}, rendezvous=Slow(step))
        assert same_bytes(y_value, np.full(1000, 2 * (step - 1), F32))
        assert same_bytes(w_value, np.full(1000, step, F32))
    memory = parts.resources[A].variables()["w"]
    assert all(np.shares_memory(tensor, memory) for tensor in sent)
    parts.close()


# Cut edges


class Held(Rendezvous):
    """Hands control of every arrival and release to the test."""

    def __init__(self):
        self.demands = {}
        self.sent = {}
        self.releases = []
        self.used = []
        self.reason = None
        self.asked = threading.Event()

    def send(self, edge, tensor, release=None):
        if self.reason is not None:
            raise StepAbortedError("given up") from self.reason
        self.sent[edge.tensor] = tensor.copy()
        self.releases.append(release)

    def recv(self, edge, into):
        future = Future(edge.tensor)
        self.demands[edge.tensor] = (future, into)
        self.asked.set()
        return future

    def consumed(self, edge):
        self.used.append(edge.tensor)

    def abort(self, reason):
        if self.reason is None:
            self.reason = reason
            for future, _ in self.demands.values():
                error = StepAbortedError(f"given up: {reason}")
                error.__cause__ = reason
                future.set_exception(error)

    def arrive(self, tensor, value):
        future, into = self.demands[tensor]
        np.copyto(into, value)
        future.set_result(None)


def consumer(count=2, poison=False, **options):
    """A part that receives ``count`` tensors, adds 1 to each, sends the results back, and fetches their sum."""
    graph = Graph()
    with graph.as_default():
        with graph.device(A):
            inputs = [ops.placeholder((4,), F32, name=f"x{index}") for index in range(count)]
        with graph.device(B):
            ones = ops.constant(np.ones(4, F32))
            plus = [ops.add(value, ones, name=f"plus{index}") for index, value in enumerate(inputs)]
            total = ops.add_n(plus, name="total")
        with graph.device(A):
            back = [ops.neg(value) for value in plus]
    part = partition(graph, {node: node.device for node in graph.nodes}, [total, *back])[B]
    arena = Arena(1 << 16)
    executor = compile_partition(part.graph, list(part.fetches.values()), arena=arena, poison=poison, **options)
    return executor, arena


def started(executor, rendezvous, deadline=None):
    """The executor running one step on a thread; returns (thread, outcome list)."""
    outcome = []

    def work():
        try:
            outcome.append(executor.run(1, rendezvous, {}, deadline or soon()))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert rendezvous.asked.wait(60)
    return thread, outcome


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_ready_work_runs_in_the_order_of_arrival_while_other_recvs_wait():
    executor, _ = consumer(3)
    rendezvous = Held()
    thread, outcome = started(executor, rendezvous)
    until(lambda: len(rendezvous.demands) == 3)
    for done, index in enumerate((2, 0, 1), start=1):
        assert len(rendezvous.sent) == done - 1
        rendezvous.arrive(f"x{index}:0", np.full(4, 10 * index, F32))
        until(lambda done=done: len(rendezvous.sent) == done)
        assert same_bytes(rendezvous.sent[f"plus{index}:0"], np.full(4, 10 * index + 1, F32))
    thread.join()
    assert same_bytes(outcome[0][0], np.full(4, 33, F32))
    assert sorted(rendezvous.used) == ["x0:0", "x1:0", "x2:0"]
    executor.close()


def test_a_sent_slot_is_not_written_before_its_release():
    executor, _ = consumer(1)
    first = Held()
    thread, _ = started(executor, first)
    first.arrive("x0:0", np.zeros(4, F32))
    thread.join()
    second = Held()
    thread, outcome = started(executor, second)
    second.arrive("x0:0", np.ones(4, F32))
    time.sleep(0.05)
    assert not second.sent, "the peer of step 1 still reads the slot"
    first.releases[0]()
    thread.join()
    assert same_bytes(outcome[0][0], np.full(4, 2, F32))
    executor.close()


def test_a_release_that_never_comes_is_a_deadline_error():
    executor, _ = consumer(1)
    first = Held()
    thread, _ = started(executor, first)
    first.arrive("x0:0", np.zeros(4, F32))
    thread.join()
    with pytest.raises(
        DeadlineError, match=r"1 tensors sent in the step before are still being read: no answer for \d+\.\d s"
    ):
        executor.run(2, Held(), {}, Deadline.after(0.1))
    assert executor.broken
    executor.close()


def test_a_recv_that_never_comes_names_tensor_peer_path_and_time():
    class Named(Held):
        def describe(self, edge):
            return f"Recv of {edge.tensor} from {edge.src} over verbs"

        def peer_state(self, edge):
            return f"the last heartbeat of {edge.src} was 31.2 s ago"

    executor, _ = consumer(2)
    rendezvous = Named()
    with pytest.raises(DeadlineError) as caught:
        executor.run(1, rendezvous, {}, Deadline.after(0.2))
    assert re.fullmatch(
        rf"Recv of x0:0 from {A} over verbs \(and 1 more\): no answer for \d+\.\d s; "
        rf"the last heartbeat of {A} was 31\.2 s ago",
        str(caught.value),
    )
    assert rendezvous.reason is caught.value
    with pytest.raises(UnknownGraphError, match="register the graph again"):
        executor.run(2, Held(), {}, soon())
    executor.close()


def test_a_lost_peer_fails_the_step_with_what_was_awaited():
    executor, _ = consumer(1)
    rendezvous = Held()
    thread, outcome = started(executor, rendezvous)
    rendezvous.demands["x0:0"][0].set_exception(PeerLostError("connection reset"))
    thread.join()
    assert type(outcome[0]) is PeerLostError
    assert re.search(rf"Recv of x0:0 from {A} failed after \d+\.\d s: connection reset", str(outcome[0]))
    assert "connection reset" in executor.broken
    executor.close()


def test_an_abort_from_outside_ends_a_pending_step():
    executor, _ = consumer(2)
    rendezvous = Held()
    thread, outcome = started(executor, rendezvous)
    until(lambda: len(rendezvous.demands) == 2)
    rendezvous.arrive("x0:0", np.zeros(4, F32))
    reason = PeerLostError("another task died")
    rendezvous.abort(reason)
    thread.join()
    assert isinstance(outcome[0], StepAbortedError)
    assert outcome[0].__cause__ is reason
    assert executor.broken
    executor.close()


def test_the_first_error_aborts_all_parts_and_is_the_one_that_is_raised():
    graph = Graph()
    with graph.as_default():
        with graph.device(A):
            index = ops.placeholder((1,), np.int64, name="index")
            row = ops.gather(ops.constant(np.arange(6, dtype=F32).reshape(3, 2)), index, name="row")
        with graph.device(B):
            y = ops.neg(row)
        with graph.device(C):
            z = ops.neg(y)
    parts = Parts(graph, {node: node.device for node in graph.nodes}, [z])
    assert same_bytes(parts.run(1, {"index": np.array([2])})[0], np.array([[4, 5]], F32))
    with pytest.raises(GraphError, match="row"):
        parts.run(2, {"index": np.array([7])})
    with pytest.raises(UnknownGraphError):
        parts.executors[C].run(3, LocalRendezvous(3), {}, soon())
    parts.close()


def test_used_up_slots_are_poisoned():
    executor, _ = consumer(1, poison=True)
    rendezvous = Held()
    thread, outcome = started(executor, rendezvous)
    rendezvous.arrive("x0:0", np.zeros(4, F32))
    thread.join()
    assert same_bytes(outcome[0][0], np.ones(4, F32))
    assert (rendezvous.demands["x0:0"][1].view(np.uint8) == POISON).all()
    executor.close()


def test_every_kind_of_memory_can_be_sent():
    graph = Graph()
    with graph.as_default():
        with graph.device(A):
            fed = ops.placeholder((2, 3), F32, name="fed")
            large = ops.constant(np.arange(2000, dtype=F32))
            view = ops.reshape(fed, (6,))
            made = ops.add(fed, fed)
        with graph.device(B):
            of_fed, of_large, of_view, of_made = (ops.neg(value) for value in (fed, large, view, made))
            forwarded = ops.identity(fed)
        with graph.device(C):
            of_received = ops.neg(forwarded)
            sign = ops.neg(ops.constant(np.ones(3, F32)))
    fetches = [of_fed, of_large, of_view, of_made, of_received, sign, forwarded]
    placement = {node: node.device for node in graph.nodes}
    parts = Parts(graph, placement, fetches)
    for step in (1, 2):
        feeds = {"fed": np.full((2, 3), step, F32)}
        for got, want in zip(parts.run(step, feeds), reference(graph, fetches, [], feeds, None), strict=True):
            assert same_bytes(got, want)
    parts.close()


def test_control_edges_cross():
    graph = Graph()
    with graph.as_default():
        with graph.device(A):
            w = state_ops.variable("w", (), F32)
            updated = state_ops.assign_add(w, 1.0)
        with graph.device(B), graph.control_dependencies([updated.node]):
            v = state_ops.variable("v", (), F32)
            counted = state_ops.assign_add(v, 10.0)
    parts = Parts(graph, {node: node.device for node in graph.nodes}, [counted])
    assert [float(parts.run(step, {})[0]) for step in (1, 2)] == [10.0, 20.0]
    assert float(parts.resources[A].variables()["w"]) == 2.0
    parts.close()


# Asynchronous kernels


def test_an_asynchronous_op_holds_up_only_its_readers():
    graph = Graph()
    spec = TensorSpec((3,), np.dtype(F32))
    with graph.as_default():
        got = queue_ops.dequeue("q", spec, 2)  # added first: it waits for what this very step puts in
        doubled = ops.add(got, got)
        x = ops.placeholder((3,), F32, name="x")
        put = queue_ops.enqueue("q", ops.neg(x), 2)
        other = ops.add(x, x)
    engine = LocalEngine(graph, poison=True)
    value = np.arange(3, dtype=F32)
    for _ in range(3):
        results = engine.run([doubled, other, put], {x: value})
        assert same_bytes(results[0], -2 * value)
        assert same_bytes(results[1], 2 * value)
    engine.close()


def test_an_asynchronous_op_that_does_not_end_is_named_and_withdrawn():
    graph = Graph()
    with graph.as_default():
        got = queue_ops.dequeue("q", TensorSpec((3,), np.dtype(F32)), 2, name="wanted")
        x = ops.placeholder((3,), F32, name="x")
        put = queue_ops.enqueue("q", x, 2)
    engine = LocalEngine(graph)
    with pytest.raises(DeadlineError, match=r"wanted waits for a tensor in queue q: no answer for \d+\.\d s"):
        engine.run([got], None, Deadline.after(0.05))
    # The question was withdrawn, so the next tensor goes to the next who asks.
    value = np.arange(3, dtype=F32)
    engine.run([put], {x: value})
    assert same_bytes(engine.run([got])[0], value)
    engine.close()


# Steps and their spans


def test_steps_of_one_executor_do_not_overlap():
    executor, _ = consumer(1)
    rendezvous = Held()
    thread, outcome = started(executor, rendezvous)
    with pytest.raises(GraphError, match="runs a step already"):
        executor.run(2, Held(), {}, soon())
    rendezvous.arrive("x0:0", np.zeros(4, F32))
    thread.join()
    assert same_bytes(outcome[0][0], np.ones(4, F32))
    executor.close()


def test_spans_of_a_step_sum_to_its_time():
    tracer = Tracer(enabled=True)
    executor, _ = consumer(1, tracer=tracer)
    rendezvous = Held()
    start = time.monotonic_ns()
    thread, _ = started(executor, rendezvous)
    time.sleep(0.5)  # much more than is asked for below: the executor may lose the CPU before it notes that it waits
    rendezvous.arrive("x0:0", np.zeros(4, F32))
    thread.join()
    end = time.monotonic_ns()
    spans, names = tracer.spans()
    assert len(set(spans["thread"])) == 1
    assert set(spans["step"]) == {1}
    ends = spans["start_ns"] + spans["elapsed_ns"]
    assert (spans["start_ns"][1:] == ends[:-1]).all(), "each begins where the last ended"
    assert start <= spans["start_ns"][0] and ends[-1] <= end
    by_name = {names[span["name"]]: Phase(int(span["phase"])) for span in spans}
    assert by_name["plus0"] is Phase.COMPUTE
    assert by_name["wait"] is Phase.WIRE
    waited = spans["elapsed_ns"][spans["phase"] == Phase.WIRE].sum()
    assert waited >= 10_000_000
    tracer.enabled = False
    tracer.clear()
    executor.close()
