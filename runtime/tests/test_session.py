"""Sessions: what can be fetched and fed, over which tasks it runs, and what happens when a step fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from runtime.cluster.client import WorkerClient
from runtime.cluster.health import Watch
from runtime.cluster.launcher import free_addresses
from runtime.cluster.server import Server
from runtime.cluster.session import Session
from runtime.cluster.spec import ClusterSpec
from runtime.deadline import Deadline
from runtime.errors import (
    ArenaFullError,
    ConfigError,
    DeadlineError,
    GraphError,
    PeerLostError,
    ShapeError,
    StepAbortedError,
    UnauthenticatedError,
)
from runtime.graph.array_ops import concat, constant, group, placeholder
from runtime.graph.graph import Graph
from runtime.graph.math_ops import add, mul
from runtime.graph.queue_ops import dequeue, enqueue
from runtime.graph.reduction_ops import matmul, reduce_sum
from runtime.graph.state_ops import assign_add, variable
from runtime.tensor import TensorSpec
from runtime.testing import eventually
from runtime.transport.registry import transport_class

PS, PS1, WORKER, WORKER1 = "/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1"
ARENA = 4 << 20


@contextmanager
def cluster(transport: str = "inproc", **counts: int) -> Iterator[dict[str, Server]]:
    """Servers in this process, by task name."""
    counts = counts or {"ps": 1, "worker": 1}
    addresses = iter(free_addresses(sum(counts.values())))
    spec = ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in counts.items()})
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(spec, job, index, transport=transport, token="t", arena_bytes=ARENA, threads=1, poison=True)
            )
            for job, count in counts.items()
            for index in range(count)
        ]
        yield {server.name: server for server in servers}


def counter(graph: Graph, device: str = PS, size: int = 4):  # type: ignore[no-untyped-def]
    """A variable on ``device`` and an op that adds a fed tensor to it."""
    with graph.as_default():
        with graph.device(device):
            total = variable("total", (size,))
        x = placeholder((size,), name="x")
        return total, x, assign_add(total, x)


ones = np.ones(4, np.float32)


def skip_unless_usable(transport: str) -> None:
    available = transport_class(transport).probe()
    if not available.ok:
        pytest.skip(available.reason)


@pytest.fixture(params=["local", "server", "outside"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session of a fresh graph: in this process, as a task of a cluster, from outside of one."""
    if request.param == "local":
        with Session(Graph()) as made:
            yield made
        return
    with cluster() as servers:
        worker = servers[WORKER]
        target = worker if request.param == "server" else worker.cluster
        with Session(Graph(), target, token="t") as made:
            yield made


def test_fetches_come_in_the_form_in_which_they_were_asked_for(session: Session) -> None:
    total, x, added = counter(session.graph)
    with session.graph.as_default():
        twice = mul(x, 2.0, name="twice")
        done = group([added.node], name="done")
    result = session.run({"new": added, "pair": (twice, [x, x]), "op": done, "name": "twice"}, {x: ones})
    assert result["op"] is None
    assert isinstance(result["pair"], tuple) and isinstance(result["pair"][1], list)
    np.testing.assert_array_equal(result["new"], ones)
    np.testing.assert_array_equal(result["pair"][0], 2 * ones)
    np.testing.assert_array_equal(result["pair"][1][1], ones)
    np.testing.assert_array_equal(result["name"], 2 * ones)
    assert session.run(done, {"x": ones}) is None
    np.testing.assert_array_equal(session.run(total), 2 * ones)
    np.testing.assert_array_equal(session.run("twice:0", {"x:0": [1, 2, 3, 4]}), [2, 4, 6, 8])


def test_fetched_arrays_belong_to_the_caller(session: Session) -> None:
    total, x, added = counter(session.graph)
    first = session.run(added, {x: ones})
    kept = first.copy()
    for _ in range(3):
        session.run(added, {x: ones})
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(session.run(total), 4 * ones)


def test_what_cannot_be_run_is_refused_before_anything_runs(session: Session) -> None:
    total, x, added = counter(session.graph)
    with session.graph.as_default():
        i = placeholder((2,), np.int32, "i")
        ints = add(i, i)
    other = Graph()
    with other.as_default():
        foreign = constant(1.0)
    for fetches, feeds, kind, message in (
        (foreign, {}, GraphError, "belongs to another graph"),
        ("tota", {}, GraphError, "no node is called 'tota'; near: total"),
        (17, {}, GraphError, "cannot fetch 17"),
        ([added, object()], {x: ones}, GraphError, "cannot fetch <object"),
        (added, {}, GraphError, "placeholders must be fed and were not: x"),
        (added, {x: ones, total: ones}, GraphError, "only a placeholder can be fed"),
        (added, {foreign: ones}, GraphError, "cannot feed .* belongs to another graph"),
        (added, {x: np.ones(5, np.float32)}, ShapeError, r"placeholder x is float32\[4\], fed was float32\[5\]"),
        (added, {x: np.ones(4, np.float64)}, ShapeError, r"fed was float64\[4\]"),
        (added, {x: ["a"] * 4}, ShapeError, "placeholder x is .*no array of it"),
        (ints, {i: [1.5, 2]}, ShapeError, r"placeholder i is int32\[2\]; .* float64 would be cut off"),
        (added, {x: ones, "x": ones}, GraphError, "fed twice"),
    ):
        with pytest.raises(kind, match=message):
            session.run(fetches, feeds)
    np.testing.assert_array_equal(session.run(added, {x: ones}), ones)


def test_a_failing_kernel_names_its_node_and_the_session_lives_on(session: Session) -> None:
    from runtime.graph.array_ops import gather

    graph = session.graph
    with graph.as_default(), graph.device(PS):
        at = placeholder((1,), np.int64, name="at")
        row = gather(constant(np.arange(6, dtype=np.float32).reshape(3, 2)), at, name="row")
    with pytest.raises(GraphError, match="row"):
        session.run(row, {at: [7]})
    np.testing.assert_array_equal(session.run(row, {at: [2]}), [[4, 5]])


def test_steps_of_many_threads_do_not_mix(session: Session) -> None:
    total, x, added = counter(session.graph)
    with session.graph.as_default():
        square = mul(x, x)
    wrong: list[object] = []

    def work(number: int) -> None:
        for step in range(10):
            value = np.full(4, number * 100 + step, np.float32)
            got, _ = session.run([square, added], {x: value})
            if not np.array_equal(got, value * value):
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert session.run(total)[0] == sum(number * 100 + step for number in range(4) for step in range(10))


def test_a_session_needs_a_target_that_it_knows() -> None:
    with pytest.raises(ConfigError, match="target is a Server, a ClusterSpec or None, not 'grpc://localhost:2222'"):
        Session(Graph(), "grpc://localhost:2222")  # type: ignore[arg-type]


def test_a_closed_session_says_so() -> None:
    graph = Graph()
    _, x, added = counter(graph)
    session = Session(graph)
    session.close()
    session.close()
    with pytest.raises(ConfigError, match="session is closed"):
        session.run(added, {x: ones})


# Over several tasks.


@pytest.mark.parametrize("transport", ["inproc", "grpc", "grpc_proto", "shm"])
def test_tensors_cross_tasks_and_stay_bit_for_bit(transport: str) -> None:
    skip_unless_usable(transport)
    graph, local = Graph(), Graph()
    for target in (graph, local):
        with target.as_default():
            x = placeholder((8, 16), name="x")
            parts = []
            for index, device in enumerate((PS, PS1, WORKER, WORKER1)):
                with target.device(device):
                    weights = variable(f"w{index}", (16, 16))
                    changed = assign_add(
                        weights, constant(np.arange(256, dtype=np.float32).reshape(16, 16) / (index + 1))
                    )
                    parts.append(matmul(x, changed))
            with target.device(WORKER):
                reduce_sum(concat(parts, 1), 0, name="out")
    value = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    with cluster(transport, ps=2, worker=2) as servers, Session(local) as alone:
        with Session(graph, servers[WORKER1]) as session:
            for _ in range(3):
                np.testing.assert_array_equal(session.run("out", {"x": value}), alone.run("out", {"x": value}))
            routes = session.routes()
            assert {route[0] for route in routes.values()} == {transport}


@pytest.mark.parametrize("inside", [True, False])
def test_large_fetches_come_over_the_transport_to_a_task_and_in_the_answer_to_others(inside: bool) -> None:
    size = 64 << 10
    with cluster() as servers:
        graph = Graph()
        total, x, added = counter(graph, size=size)
        value = np.arange(size, dtype=np.float32)
        with Session(graph, servers[WORKER] if inside else servers[WORKER].cluster, token="t") as session:
            np.testing.assert_array_equal(session.run(added, {x: value}), value)
            before = servers[WORKER].worker.transports.counters()["inproc.bytes_in"]
            np.testing.assert_array_equal(session.run(total), value)
            moved = servers[WORKER].worker.transports.counters()["inproc.bytes_in"] - before
            assert moved == (4 * size if inside else 0)
            # Beside an update a variable is what it was before it, wherever it is fetched to.
            old, new = session.run([total, added], {x: value})
            np.testing.assert_array_equal(old, value)
            np.testing.assert_array_equal(new, 2 * value)


def test_sessions_of_a_cluster_share_its_variables() -> None:
    with cluster(ps=1, worker=2) as servers:
        graphs = [Graph(), Graph()]
        ends = [counter(graph) for graph in graphs]
        with Session(graphs[0], servers[WORKER]) as one, Session(graphs[1], servers[WORKER1]) as two:
            one.run(ends[0][2], {"x": ones})
            two.run(ends[1][2], {"x": ones})
            np.testing.assert_array_equal(one.run("total"), 2 * ones)
        with Session(graphs[0], servers[WORKER].cluster, token="t") as later:
            np.testing.assert_array_equal(later.run("total"), 2 * ones)
            with pytest.raises(ShapeError, match=r"variable total is float32\[4\], not float32\[5\]"):
                graph = Graph()
                counter(graph, size=5)
                Session(graph, servers[WORKER]).run("total")


def test_what_a_session_registered_goes_with_it() -> None:
    with cluster() as servers:
        used = [server.worker.arena.used_bytes for server in servers.values()]
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER]) as session:
            session.run(added, {x: ones})
            assert servers[PS].worker.memory().plan_bytes > 0
        assert servers[PS].worker.memory().plan_bytes == 0
        # Only the variable is left: it belongs to the cluster.
        left = [server.worker.arena.used_bytes - before for server, before in zip(servers.values(), used)]
        assert left == [64, 0]
        assert [server.worker.rendezvous.running() for server in servers.values()] == [[], []]


def test_a_master_in_its_own_task_keeps_its_graphs_without_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph)
        with graph.as_default():
            twice = mul(x, 2.0)
        with Session(graph, servers[WORKER]) as trains, Session(graph, servers[WORKER]) as evaluates:
            trains.run([added, twice], {x: ones})
            monkeypatch.setattr("runtime.cluster.worker.LEASE_S", 0.0)
            evaluates.run(twice, {x: ones})
            monkeypatch.setattr("runtime.cluster.worker.LEASE_S", 120.0)
            np.testing.assert_array_equal(trains.run([added, twice], {x: ones})[0], 2 * ones)


def test_a_step_that_waits_in_vain_ends_at_its_deadline_and_the_next_one_runs() -> None:
    with cluster() as servers:
        graph = Graph()
        with graph.as_default(), graph.device(PS):
            item = dequeue("queue", TensorSpec((4,), np.dtype(np.float32)), 4)
            x = placeholder((4,), name="x")
            put = enqueue("queue", x, 4)
        with graph.as_default(), graph.device(WORKER):
            twice = add(item, item)
        with Session(graph, servers[WORKER]) as session:
            with pytest.raises(DeadlineError, match=r"no answer for|Recv of Dequeue"):
                session.run(twice, timeout_s=0.5)
            session.run(put, {x: ones})
            np.testing.assert_array_equal(session.run(twice, timeout_s=20), 2 * ones)


def test_closing_a_session_ends_its_running_steps() -> None:
    with cluster() as servers:
        graph = Graph()
        with graph.as_default(), graph.device(PS):
            item = dequeue("queue", TensorSpec((4,), np.dtype(np.float32)), 4)
        for target in (servers[WORKER], servers[WORKER].cluster):
            session = Session(graph, target, token="t")
            errors: list[BaseException] = []

            def work(session: Session = session, errors: list[BaseException] = errors) -> None:
                try:
                    session.run(item, timeout_s=60)
                except Exception as error:
                    errors.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            assert eventually(lambda: bool(servers[PS].worker.rendezvous.running()))
            session.close()
            thread.join(20)
            assert not thread.is_alive() and len(errors) == 1
            assert eventually(lambda: not servers[PS].worker.rendezvous.running())


def test_a_restarted_task_is_found_and_its_graphs_are_registered_again() -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER], startup_s=20) as session:
            session.run(added, {x: ones})
            np.testing.assert_array_equal(session.run(added, {x: ones}), 2 * ones)
            old = servers[PS]
            old.close()
            with Server(old.cluster, "ps", 0, transport="inproc", token="t", arena_bytes=ARENA) as fresh:
                assert fresh.incarnation != old.incarnation
                # The step that finds out fails and names the task; the next one runs, on new variables.
                with pytest.raises(PeerLostError, match=PS):
                    session.run(added, {x: ones})
                np.testing.assert_array_equal(session.run(added, {x: ones}), ones)


@pytest.mark.parametrize("fatal", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_loss_of_another_task_between_steps_fails_the_next_one(
    monkeypatch: pytest.MonkeyPatch, steps_before: int, fatal: bool
) -> None:
    with cluster(ps=1, worker=2) as servers:
        health = servers[WORKER].worker.health
        told, watch = threading.Event(), health.watch

        def watched(client: WorkerClient, incarnation: int, on_lost: Callable[..., None], session: int = 0) -> Watch:
            def tell(task: str, error: PeerLostError) -> None:
                on_lost(task, error)
                told.set()

            return watch(client, incarnation, tell, session)

        monkeypatch.setattr(health, "watch", watched)
        health.interval_s = 0.1
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER]) as session:
            session.watch([WORKER1], fatal=fatal, deadline=Deadline.after(20))
            for _ in range(steps_before):
                session.run(added, {x: ones})
            servers[WORKER1].close()
            assert told.wait(20)
            # The step that is told names the task; whoever can go on without it does.
            if fatal:
                with pytest.raises(PeerLostError, match=WORKER1):
                    session.run(added, {x: ones})
            np.testing.assert_array_equal(session.run(added, {x: ones}), (steps_before + 1) * ones)


def test_a_step_that_starts_while_the_session_closes_is_aborted() -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER]) as session:
            session.run(added, {x: ones})
            assert session._master is not None
            task = session._master.task(PS)
            task.close()
            with pytest.raises(StepAbortedError, match=rf"the connection to {PS} .* was closed"):
                session.run(added, {x: ones})


def test_a_task_that_never_comes_up_is_named() -> None:
    (address, worker) = free_addresses(2)
    spec = ClusterSpec({"ps": [address], "worker": [worker]})
    graph = Graph()
    _, x, added = counter(graph)
    with Server(spec, "worker", 0, transport="inproc", token="t", arena_bytes=ARENA) as server:
        with Session(graph, server, startup_s=1) as session:
            with pytest.raises(DeadlineError, match=rf"GetStatus at {PS} \({address}\): no answer for"):
                session.run(added, {x: ones})


def test_tasks_must_agree_on_token_and_transport() -> None:
    spec = ClusterSpec(dict(zip(("ps", "worker"), ([address] for address in free_addresses(2)))))
    graph = Graph()
    _, x, added = counter(graph)
    with Server(spec, "ps", 0, transport="inproc", token="t", arena_bytes=ARENA):
        with Server(spec, "worker", 0, transport="grpc", token="t", arena_bytes=ARENA) as worker:
            with Session(graph, worker) as session:
                with pytest.raises(ConfigError, match=r"ps/task:0 was started with transport inproc, .* with grpc"):
                    session.run(added, {x: ones})
            with Session(graph, spec, token="u", startup_s=5) as session:
                with pytest.raises(UnauthenticatedError, match="wrong token"):
                    session.run(added, {x: ones})


def test_a_task_whose_arena_is_full_is_named() -> None:
    with cluster() as servers:
        graph = Graph()
        total, _, _ = counter(graph, size=ARENA)
        with Session(graph, servers[WORKER]) as session:
            with pytest.raises(ArenaFullError, match=r"^/job:ps/task:0: arena of .* for total"):
                session.run(total)


def test_an_unknown_device_is_named() -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph, "/job:ps/task:5")
        with Session(graph, servers[WORKER]) as session:
            with pytest.raises(ConfigError, match=r"placed on /job:ps/task:5, but the cluster has only"):
                session.run(added, {x: ones})


def test_variables_can_be_saved_and_set() -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER]) as session:
            session.run(added, {x: ones})
            deadline = Deadline.after(20)
            assert session.variables_elsewhere() == {PS: {"total": TensorSpec((4,), np.dtype(np.float32))}}
            assert session.variable_bytes(PS, deadline) == {"total": 16}
            assert list(session.save_variables(PS, [], deadline)) == []
            saved = dict(session.save_variables(PS, ["total"], deadline))
            np.testing.assert_array_equal(saved["total"], ones)
            session.restore_variables(PS, {"total": 5 * ones}, deadline)
            np.testing.assert_array_equal(session.run(added, {x: ones}), 6 * ones)
            with pytest.raises(GraphError, match="has no variable 'nonsense'"):
                dict(session.save_variables(PS, ["nonsense"], deadline))
            with pytest.raises(ShapeError, match="total"):
                session.restore_variables(PS, {"total": np.ones(9, np.float32)}, deadline)


def test_spans_and_counters_are_collected() -> None:
    with cluster() as servers:
        graph = Graph()
        _, x, added = counter(graph)
        with Session(graph, servers[WORKER]) as session:
            deadline = Deadline.after(20)
            session.trace(PS, deadline, enable=True)
            for _ in range(3):
                session.run(added, {x: ones})
            spans, names, counters = session.trace(PS, deadline, enable=False, clear=True)
            assert len({int(step) for step in spans["step"] if step}) == 3  # transports record under no step
            assert any("AssignAdd" in name for name in names)
            assert counters["inproc.bytes_in"] == 3 * 16
            assert len(session.trace(PS, deadline)[0]) == 0
