"""Steps of two tasks that exchange tensors over real transports, static where the transport has static edges, else fetched."""

import threading

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import StepAbortedError
from runtime.execution.compile import compile_partition
from runtime.execution.resources import Resources
from runtime.execution.step import FetchRoute, PushRoute, RendezvousManager, Route, ServeRoute, SlotRoute
from runtime.graph import array_ops as ops
from runtime.graph import state_ops
from runtime.graph.apply_ops import apply_sgd
from runtime.graph.graph import Graph
from runtime.graph.partition import partition
from runtime.testing import pair, same_bytes
from runtime.transport.registry import transport_class

F32 = np.float32
PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
SIZE = 40_000  # above every eager threshold


class Task:
    """One task of a two-task cluster, with the work that ``cluster.worker`` does when a graph is registered."""

    def __init__(self, name, incarnation):
        self.name = name
        self.incarnation = incarnation
        self.manager = RendezvousManager(name, incarnation)
        self.routes: dict[int, Route] = {}

    def register(self, part, end):
        self.part, self.end = part, end
        self.resources = Resources(end.arena)
        self.executor = compile_partition(
            part.graph, list(part.fetches.values()), resources=self.resources, arena=end.arena, poison=True
        )

    def bind(self, peer):
        """Routes of this task's edges, of which the receiver's slots are offered to the sender."""
        transport, channel = self.end.transport, self.end.channel
        for edge in self.part.recvs:
            if transport.supports_static:
                self.routes[edge.id] = SlotRoute(transport, edge.id + 100, transport.name)
            else:
                self.routes[edge.id] = FetchRoute(channel, peer.incarnation, transport.name)
        for edge in self.part.sends:
            static = transport.supports_static
            self.routes[edge.id] = PushRoute(channel, edge.id + 100) if static else ServeRoute()
        if transport.supports_static and self.part.recvs:
            slots = {edge + 100: slot for edge, slot in self.executor.recv_slots.items()}
            peer.end.channel.prepare(transport.offer(slots))

    def close(self):
        transport = self.end.transport
        if transport.supports_static:
            transport.withdraw([edge.id + 100 for edge in self.part.recvs], StepAbortedError("the test is over"))
        self.executor.close()
        del self.resources, self.routes, self.end

    def run(self, step, generation, feeds, deadline):
        rendezvous = self.manager.begin(step, self.routes, generation=generation, deadline=deadline)
        try:
            return self.executor.run(step, rendezvous, {name: feeds[name] for name in self.part.feeds}, deadline)
        except BaseException as error:
            self.manager.abort(step, error)
            raise


def run_all(tasks, step, generation, feeds):
    """Fetches of all tasks by name, or a dict of the errors by task."""
    results, errors, deadline = {}, {}, Deadline.after(60.0)

    def work(task):
        try:
            values = task.run(step, generation, feeds, deadline)
            results.update(zip(task.part.fetches, values, strict=True))
        except Exception as error:
            errors[task.name] = error
            for other in tasks:  # what a master does
                other.manager.abort(step, error)

    threads = [threading.Thread(target=work, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for task in tasks:
        task.manager.cleanup(step)
    return errors or results


@pytest.fixture(params=["inproc", "grpc", "grpc_proto", "shm"])
def ends(request):
    available = transport_class(request.param).probe()
    if not available.ok:
        pytest.skip(available.reason)
    tasks = Task(PS, 0xA1), Task(WORKER, 0xB2)
    with pair(request.param, [task.manager for task in tasks]) as connected:
        yield tasks, connected
        for task in tasks:
            task.close()


def regression():
    """A model with its weights at the parameter server: (graph, fetches, targets)."""
    graph = Graph()
    with graph.as_default():
        with graph.device(PS):
            w = state_ops.variable("w", (SIZE,), F32)
        with graph.device(WORKER):
            x = ops.placeholder((SIZE,), F32, name="x")
            error = ops.sub(ops.mul(w, x), ops.constant(np.ones(SIZE, F32)), name="error")
            gradient = ops.mul(error, x)
        with graph.device(PS):
            update = apply_sgd(w, gradient, 0.5)
    return graph, [error], [update]


def register(tasks, connected, graph, fetches, targets=()):
    parts = partition(graph, {node: node.device for node in graph.nodes}, fetches, targets)
    for task, end in zip(tasks, connected, strict=True):
        task.register(parts[task.name], end)
    for task, peer in zip(tasks, reversed(tasks), strict=True):
        task.bind(peer)


def test_steps_pull_compute_push_and_update(ends):
    tasks, connected = ends
    graph, fetches, targets = regression()
    register(tasks, connected, graph, fetches, targets)
    w = np.zeros(SIZE, F32)
    for generation in range(4):
        x = np.linspace(0.1, 1.0, SIZE, dtype=F32) * F32(generation + 1)
        error = w * x - F32(1)
        results = run_all(tasks, 0x100 + generation, generation, {"x": x})
        assert same_bytes(results[fetches[0].name], error), results
        w -= F32(0.5) * (error * x)
        assert same_bytes(tasks[0].resources.variables()["w"], w)


def test_control_edges_cross(ends):
    tasks, connected = ends
    graph = Graph()
    with graph.as_default():
        with graph.device(PS):
            w = state_ops.variable("w", (), F32)
            updated = state_ops.assign_add(w, 1.0)
        with graph.device(WORKER), graph.control_dependencies([updated.node]):
            v = state_ops.variable("v", (), F32)
            counted = state_ops.assign_add(v, 10.0)
    register(tasks, connected, graph, [counted])
    assert [float(run_all(tasks, step + 1, step, {})[counted.name]) for step in range(3)] == [10.0, 20.0, 30.0]
    assert float(tasks[0].resources.variables()["w"]) == 3.0


def test_a_failed_part_ends_the_others(ends):
    tasks, connected = ends
    graph = Graph()
    with graph.as_default():
        with graph.device(WORKER):
            index = ops.placeholder((1,), np.int64, name="index")
            row = ops.gather(ops.constant(np.ones((3, SIZE), F32)), index, name="row")
        with graph.device(PS):
            doubled = ops.add(row, row)
    register(tasks, connected, graph, [doubled])
    assert same_bytes(run_all(tasks, 1, 0, {"index": np.array([2])})[doubled.name], np.full((1, SIZE), 2, F32))
    errors = run_all(tasks, 2, 1, {"index": np.array([5])})
    assert "row" in str(errors[WORKER])
    assert isinstance(errors[PS], StepAbortedError)
    assert "row" in str(errors[PS])
