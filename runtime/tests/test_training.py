"""Training over parameter servers: optimizers and schemes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from runtime.cluster.launcher import free_addresses
from runtime.cluster.server import Server
from runtime.cluster.session import Session
from runtime.cluster.spec import ClusterSpec
from runtime.errors import ConfigError, GraphError
from runtime.graph.array_ops import placeholder
from runtime.graph.graph import Graph, Output
from runtime.graph.initialisers import uniform
from runtime.graph.math_ops import mul, sub
from runtime.graph.reduction_ops import matmul, reduce_mean
from runtime.graph.state_ops import global_step, variable
from runtime.tensor import TensorSpec
from runtime.training.checkpoint import Checkpoint, latest_checkpoint
from runtime.training.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, optimizer
from runtime.training.report import read_report, write_report
from runtime.training.schemes import agn, asynchronous, downpour, sagn, synchronous
from runtime.training.supervisor import Supervisor

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
ARENA = 8 << 20


@contextmanager
def cluster(workers: int) -> Iterator[tuple[Server, list[Server]]]:
    """One parameter server and ``workers`` workers in this process."""
    address, *others = free_addresses(1 + workers)
    spec = ClusterSpec({"ps": [address], "worker": others})
    with ExitStack() as stack:

        def start(job: str, index: int) -> Server:
            options = {"transport": "inproc", "token": "t", "arena_bytes": ARENA, "threads": 1, "poison": True}
            return stack.enter_context(Server(spec, job, index, **options))  # type: ignore[arg-type]

        yield start("ps", 0), [start("worker", index) for index in range(workers)]


def regression(graph: Graph, batch: int, device: str = "", servers: str = PS) -> tuple[Output, Output, Output]:
    """Least squares: (x, y, loss), the weights on ``servers``."""
    with graph.as_default(), graph.device(device):
        with graph.variable_devices(lambda spec: servers):
            weights = variable("weights", (4, 2), np.float32, uniform(-1, 1, seed=3))
        x, y = placeholder((batch, 4), name="x"), placeholder((batch, 2), name="y")
        error = sub(matmul(x, weights), y)
        return x, y, reduce_mean(mul(error, error))


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    return x, x @ np.arange(8, dtype=np.float32).reshape(4, 2)


# Optimizers.


@pytest.mark.parametrize("rule", [SGD(0.1), Momentum(0.05), Momentum(0.05, nesterov=True), Adagrad(0.5), Adam(0.2)])
def test_every_optimizer_minimises(rule: Optimizer) -> None:
    graph = Graph()
    x, y, loss = regression(graph, 32)
    with graph.as_default():
        train = rule.minimise(loss, step=global_step())
    xs, ys = examples(32)
    with Session(graph) as session:
        first = session.run(loss, {x: xs, y: ys})
        for _ in range(100):
            session.run(train, {x: xs, y: ys})
        assert session.run(loss, {x: xs, y: ys}) < 0.05 * first
        assert session.run("global_step") == 100


def test_what_cannot_be_minimised_is_refused() -> None:
    graph = Graph()
    x, _, loss = regression(graph, 8)
    with graph.as_default():
        other = variable("other", (3,))
        with pytest.raises(GraphError, match=r"not a scalar"):
            SGD(0.1).minimise(x)
        with pytest.raises(GraphError, match=r"does not depend on other:0"):
            SGD(0.1).minimise(loss, [other])
        with pytest.raises(GraphError, match=r"depends on no variable"):
            SGD(0.1).minimise(reduce_mean(x))
    with pytest.raises(ConfigError, match=r"unknown optimizer 'sdg'; known: sgd, momentum"):
        optimizer("sdg", 0.1)


# Schemes, in one process.


def in_parallel(work: Callable[[int], None], count: int) -> None:
    """Run ``work(k)`` on a thread each; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_asynchronous_workers_share_the_variables() -> None:
    xs, ys = examples(32)
    with cluster(2) as (_, workers):
        everybody = threading.Barrier(2)

        def work(number: int) -> None:
            graph = Graph()
            x, y, loss = regression(graph, 32, workers[number].name)
            scheme = asynchronous(loss, SGD(0.1))
            with Session(graph, workers[number]) as session:
                everybody.wait(60)
                for _ in range(50):
                    session.run([loss, scheme.train, scheme.step], {x: xs, y: ys})
                everybody.wait(60)  # it takes the steps of both
                assert session.run(loss, {x: xs, y: ys}) < 0.01
                assert session.run("global_step") == 100

        in_parallel(work, 2)


def synchronous_weights(members: int, aggregate: int, steps: int) -> tuple[np.ndarray, int]:
    """Weights after ``steps`` synchronous steps of ``members`` workers, each with its share of 32 examples; and how many
    gradients were dropped."""
    xs, ys = examples(32)
    share = 32 // members
    result: list[np.ndarray] = []
    with cluster(members) as (server, workers):
        stop = threading.Event()

        def work(number: int) -> None:
            graph = Graph()
            x, y, loss = regression(graph, share, workers[number].name)
            scheme = synchronous(loss, Momentum(0.05), worker=number, aggregate=aggregate, replicas=members)
            mine = slice(number * share, (number + 1) * share)
            with Session(graph, workers[number]) as session, Session(graph, workers[number]) as updates:

                def update() -> None:
                    for _ in range(steps):
                        updates.run(scheme.update, timeout_s=60)

                updater = threading.Thread(target=update)
                if number == 0:
                    updater.start()
                at = 0
                while at < steps:
                    feeds = {x: xs[mine], y: ys[mine], scheme.local_step: np.int64(at)}
                    at = int(session.run([scheme.next_step, scheme.train], feeds, timeout_s=60)[0])
                if number == 0:
                    updater.join(60)
                    result.append(session.run("weights"))
                    stop.set()
                stop.wait(60)

        in_parallel(work, members)
        dropped = server.worker.resources.accumulators()["weights"].dropped
    return result[0], dropped


@pytest.mark.parametrize("members", [1, 2, 4])
def test_synchronous_replicas_equal_one_process(members: int) -> None:
    xs, ys = examples(32)
    graph = Graph()
    x, y, loss = regression(graph, 32)
    with graph.as_default():
        train = Momentum(0.05).minimise(loss)
    with Session(graph) as session:
        for _ in range(20):
            session.run(train, {x: xs, y: ys})
        alone = session.run("weights")
    weights, dropped = synchronous_weights(members, members, 20)
    np.testing.assert_allclose(weights, alone, rtol=1e-5, atol=1e-6)
    assert dropped == 0


def test_late_gradients_are_dropped() -> None:
    # 2 of 3 make a step: whoever is third is late, and must neither be waited for nor counted.
    weights, dropped = synchronous_weights(3, 2, 150)
    np.testing.assert_allclose(weights, np.arange(8).reshape(4, 2), atol=0.5)
    assert dropped > 0


def test_impossible_replicas_are_refused() -> None:
    graph = Graph()
    _, _, loss = regression(graph, 8)
    with pytest.raises(ConfigError, match=r"3 gradients of 2 replicas"):
        synchronous(loss, SGD(0.1), worker=0, aggregate=3, replicas=2)


@pytest.mark.parametrize("kind", ["downpour", "agn", "sagn"])
def test_local_update_schemes_train_the_servers_variables(kind: str) -> None:
    window, members = 3, 2
    xs, ys = examples(32)
    with cluster(members) as (_, workers):
        everybody = threading.Barrier(members)

        def work(number: int) -> None:
            graph = Graph()
            device = workers[number].name
            x, y, loss = regression(graph, 32, device, servers=device)

            def place(spec: TensorSpec) -> str:
                return PS

            local = SGD(0.01)
            if kind == "sagn":
                scheme = sagn(
                    loss, local, SGD(0.1), window=window, place=place, worker=number, aggregate=2, replicas=members
                )
            elif kind == "downpour":
                scheme = downpour(loss, local, SGD(0.02), window=window, place=place)
            else:
                scheme = agn(loss, local, SGD(0.1), window=window, place=place)
            with Session(graph, workers[number]) as session, Session(graph, workers[number]) as updates:
                session.run(scheme.pull)
                np.testing.assert_array_equal(session.run("weights"), session.run("server/weights"))
                everybody.wait(60)  # nobody trains before all have looked
                barrier = scheme.synchronous

                def update() -> None:
                    assert barrier is not None
                    for _ in range(40):
                        updates.run(barrier.update, timeout_s=60)

                updater = threading.Thread(target=update)
                if barrier is not None and number == 0:
                    updater.start()
                at = 0
                for _ in range(40):
                    for _ in range(scheme.window):
                        session.run(scheme.local, {x: xs, y: ys})
                    if barrier is None:
                        session.run(scheme.exchange)
                    else:
                        feeds = {barrier.local_step: np.int64(at)}
                        at = int(session.run([barrier.next_step, scheme.exchange], feeds, timeout_s=60)[0])
                        session.run(scheme.pull)
                    np.testing.assert_array_equal(session.run("weights/gathered"), np.zeros((4, 2)))
                everybody.wait(60)
                session.run(scheme.pull)  # what the others have pushed since this worker's last exchange
                assert session.run(loss, {x: xs, y: ys}) < 0.5
                if updater.ident is not None:
                    updater.join(60)

        in_parallel(work, members)


def test_a_window_pushes_the_sum_of_its_gradients() -> None:
    xs, ys = examples(8)
    window = 3
    with cluster(1) as (_, (worker,)):
        graph = Graph()
        x, y, loss = regression(graph, 8, WORKER, servers=WORKER)
        scheme = downpour(loss, SGD(0.1), SGD(1.0), window=window, place=lambda spec: PS)
        own = np.zeros((4, 2), np.float32)
        with Session(graph, worker) as session:
            session.run(scheme.pull)
            before = own = session.run("weights")
            total = np.zeros_like(own)
            for _ in range(window):
                gradient = 2 * xs.T @ (xs @ own - ys) / (8 * 2)
                total += gradient
                own = own - 0.1 * gradient
                session.run(scheme.local, {x: xs, y: ys})
            np.testing.assert_allclose(session.run("weights"), own, rtol=1e-5)
            session.run(scheme.exchange)
            np.testing.assert_allclose(session.run("server/weights"), before - total, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(session.run("weights"), session.run("server/weights"))
            assert session.run("global_step") == 1


# The supervisor, in one process.


def test_the_chief_restores_and_the_others_wait_for_it(tmp_path: Path) -> None:
    for start in (0, 10):
        with cluster(2) as (_, workers):
            everybody = threading.Barrier(2)

            def work(
                number: int,
                start: int = start,
                workers: list[Server] = workers,
                everybody: threading.Barrier = everybody,
            ) -> None:
                graph = Graph()
                x, y, loss = regression(graph, 8, workers[number].name)
                scheme = asynchronous(loss, SGD(0.01))
                with Session(graph, workers[number]) as session:
                    with Supervisor(session, chief=number == 0, folder=tmp_path if number == 0 else None) as supervisor:
                        assert supervisor.prepare() >= start
                        for _ in range(5):
                            supervisor.run(lambda: session.run(scheme.train, {x: examples(8)[0], y: examples(8)[1]}))
                        everybody.wait(60)

            in_parallel(work, 2)
        path = latest_checkpoint(tmp_path)
        assert path is not None
        with Checkpoint(path) as checkpoint:
            assert checkpoint.step == start + 10
            assert sorted(checkpoint.specs) == ["global_step", "weights"]
            assert int(checkpoint.read("global_step")) == start + 10


def test_checkpoints_are_taken_by_steps_and_the_oldest_go(tmp_path: Path) -> None:
    with cluster(1) as (_, (worker,)):
        graph = Graph()
        x, y, loss = regression(graph, 8, WORKER)
        scheme = asynchronous(loss, SGD(0.01))
        with Session(graph, worker) as session:
            with Supervisor(session, chief=True, folder=tmp_path, every_steps=4, keep=2) as supervisor:
                supervisor.prepare()
                for _ in range(40):
                    feeds = {x: examples(8)[0], y: examples(8)[1]}
                    supervisor.stepped(int(session.run([scheme.step, scheme.train], feeds)[0]))
        assert len(list(tmp_path.iterdir())) <= 2
        assert supervisor.saved and supervisor.saved[-1] == 40


def test_a_session_without_a_cluster_is_saved_too_once_its_variables_exist(tmp_path: Path) -> None:
    graph = Graph()
    x, y, loss = regression(graph, 8, "")
    scheme = asynchronous(loss, SGD(0.01))
    with Session(graph) as session:
        supervisor = Supervisor(session, chief=True, folder=tmp_path)
        supervisor.prepare()
        with pytest.raises(GraphError, match=r"has no variable '(weights|global_step)' in container '' yet"):
            supervisor.save()
        session.run(scheme.train, {x: examples(8)[0], y: examples(8)[1]})
        supervisor.close()
    assert supervisor.saved == [1]


@pytest.mark.parametrize("in_cluster", [False, True], ids=["alone", "in a cluster"])
def test_a_supervisor_closed_before_any_step_leaves_no_checkpoint(tmp_path: Path, in_cluster: bool) -> None:
    with cluster(1) if in_cluster else nullcontext((None, [None])) as (_, (worker,)):
        graph = Graph()
        x, y, loss = regression(graph, 8, WORKER)
        scheme = asynchronous(loss, SGD(0.01))
        with Session(graph, worker) as session:
            with Supervisor(session, chief=True, folder=tmp_path):
                pass  # nor prepared
            with Supervisor(session, chief=True, folder=tmp_path) as supervisor:
                assert supervisor.prepare() == 0
            supervisor.close()
            assert supervisor.saved == [] and latest_checkpoint(tmp_path) is None
            with Supervisor(session, chief=True, folder=tmp_path) as supervisor:
                supervisor.prepare()
                session.run(scheme.train, {x: examples(8)[0], y: examples(8)[1]})
            assert supervisor.saved == [1]


# Reports.


def test_a_report_is_read_back(tmp_path: Path) -> None:
    from runtime.training.report import Report

    steps = np.arange(5, dtype=np.int64)
    report = Report(
        steps,
        steps + 7,
        np.ones(5, np.float32),
        steps,
        {"task": WORKER, "recoveries": 0},
        {WORKER: {"grpc.bytes_in": 3}},
    )
    write_report(tmp_path / "report.npz", report)
    back = read_report(tmp_path / "report.npz")
    np.testing.assert_array_equal(back.step_ns, steps + 7)
    assert back.facts == report.facts and back.counters == report.counters
    (tmp_path / "broken.npz").write_bytes(b"PK not a zip")
    with pytest.raises(ConfigError, match=r"no report"):
        read_report(tmp_path / "broken.npz")
    with pytest.raises(ConfigError, match=r"cannot be written"):
        write_report(tmp_path / "absent" / "report.npz", report)
