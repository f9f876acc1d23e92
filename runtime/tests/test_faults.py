"""Tasks that are killed or hang in mid-step: everybody else says which, nothing hangs, nothing is left; training resumes."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from runtime.cluster.client import WorkerClient
from runtime.cluster.health import HealthMonitor
from runtime.cluster.launcher import LocalCluster, free_addresses
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.server import Server
from runtime.cluster.session import Session
from runtime.cluster.spec import ClusterSpec
from runtime.deadline import Deadline
from runtime.errors import PeerLostError
from runtime.graph.array_ops import constant
from runtime.graph.graph import Graph
from runtime.graph.math_ops import add
from runtime.graph.queue_ops import dequeue
from runtime.graph.reduction_ops import matmul
from runtime.graph.state_ops import assign_add, variable
from runtime.tensor import TensorSpec
from runtime.testing import eventually
from runtime.training.checkpoint import checkpoint_path, list_checkpoints
from runtime.transport.registry import transport_class

PS, WORKER, WORKER1 = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
COMMON = ["--transport", "grpc", "--arena-mib", "32", "--threads", "1"]
TRANSPORTS = ["grpc", "shm"]
REPLICA = ["-m", "runtime.training.replica", "--model", "mlp_digits", "--data", "digits", "--rate", "0.05"]


def common(transport: str) -> list[str]:
    """Options of the tasks; skips where the transport cannot be used."""
    available = transport_class(transport).probe()
    if not available.ok:
        pytest.skip(available.reason)
    return ["--transport", transport, *COMMON[2:]]


def all_run_a_step(cluster: LocalCluster, *tasks: str) -> bool:
    """Wait until each of the tasks, which are up, has begun a step; False if they do not."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(WorkerClient(task, cluster.spec.address(task), cluster.token)))
            for task in tasks
        ]

        def begun(client: WorkerClient) -> bool:
            # On a busy machine the first attempt to connect may time out.
            reply = client.call("Ping", pb.PingRequest(), Deadline.after(20), wait_for_ready=True)
            return bool(reply.active_steps)

        return eventually(lambda: all(begun(client) for client in clients), 60)


@contextmanager
def in_mid_step(cluster: LocalCluster, act: Callable[[], None]) -> Iterator[None]:
    """Meanwhile ``act`` is called, as soon as both PS and WORKER run a step (of ``waiting_graph`` or the like)."""

    def wait_and_act() -> None:
        if all_run_a_step(cluster, PS, WORKER):
            act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def waiting_graph() -> tuple[Graph, str]:
    """A step that waits on the parameter server for what never comes, and whose worker part waits for that."""
    graph = Graph()
    with graph.as_default():
        with graph.device(PS):
            item = dequeue("queue", TensorSpec((4,), np.dtype(np.float32)), 4)
        with graph.device(WORKER):
            add(item, item, name="twice")
    return graph, "twice"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("outside", [False, True])
def test_a_server_killed_in_mid_step_is_named_at_once(outside: bool, transport: str) -> None:
    graph, fetch = waiting_graph()
    started = ["ps", "worker"] if outside else ["ps"]
    with LocalCluster({"ps": 1, "worker": 1}, jobs_started=started, options=common(transport)) as cluster:
        own = (
            None
            if outside
            else Server(cluster.spec, "worker", 0, transport=transport, token=cluster.token, arena_bytes=1 << 20)
        )
        try:
            with Session(graph, own or cluster.spec, token=cluster.token) as session:
                killed: list[float] = []

                def kill() -> None:
                    killed.append(time.monotonic())
                    cluster.kill(PS)

                with in_mid_step(cluster, kill), pytest.raises(PeerLostError, match=PS):
                    session.run(fetch, timeout_s=60)
                assert time.monotonic() - killed[0] < 30
        finally:
            if own is not None:
                own.close()


def test_a_worker_killed_in_mid_step_is_named_to_its_master_and_forgotten_by_the_server() -> None:
    graph = Graph()
    with graph.as_default():
        with graph.device(PS):
            total = variable("total", (256, 256))
        with graph.device(WORKER):
            item = dequeue("queue", TensorSpec((256, 256), np.dtype(np.float32)), 4)
            product = matmul(total, item)
        assign_add(total, product, name="changed")
    with LocalCluster({"ps": 1, "worker": 1}, options=COMMON) as cluster:
        with Session(graph, cluster.spec, token=cluster.token) as session:
            with in_mid_step(cluster, lambda: cluster.kill(WORKER)), pytest.raises(PeerLostError, match=WORKER):
                session.run("changed", timeout_s=60)
            deadline = Deadline.after(20)
            # The server has noticed, said so, and still serves others.
            assert eventually(lambda: f"{WORKER} " in cluster.task(PS).errors(), 15)
            assert eventually(lambda: session.status(PS, deadline).memory.plan_bytes == 0, 15)
            with graph.as_default(), graph.device(PS):
                add(total, constant(np.ones((256, 256), np.float32)), name="alone")
            assert session.run("alone").sum() == 256 * 256


def test_a_hung_task_is_lost_by_its_silence() -> None:
    graph, fetch = waiting_graph()
    with LocalCluster({"ps": 1, "worker": 1}, jobs_started=["ps"], options=COMMON) as cluster:
        with Server(cluster.spec, "worker", 0, transport="grpc", token=cluster.token, arena_bytes=1 << 20) as own:
            own.worker.health.interval_s, own.worker.health.timeout_s = 0.2, 1.5
            with Session(graph, own) as session:
                with (
                    in_mid_step(cluster, lambda: cluster.task(PS).signal(signal.SIGSTOP)),
                    pytest.raises(PeerLostError, match=rf"{PS} .*no heartbeat for|last heartbeat was \d"),
                ):
                    session.run(fetch, timeout_s=60)
        cluster.task(PS).signal(signal.SIGCONT)


def test_a_synchronous_job_names_the_worker_that_was_killed() -> None:
    program = [*REPLICA, "--steps", "100000", "--sync", "sync", "--batch", "8"]
    with LocalCluster({"ps": 1, "worker": 2}, programs={"worker": program}, options=COMMON) as cluster:
        assert all_run_a_step(cluster, WORKER, WORKER1)  # who has begun watches the other
        assert cluster.task(WORKER).process.poll() is None, cluster.task(WORKER).errors()
        cluster.kill(WORKER1)
        assert cluster.task(WORKER).wait(Deadline.after(30)) == 5
        assert WORKER1 in cluster.task(WORKER).errors()
        assert eventually(lambda: f"{WORKER1} " in cluster.task(PS).errors(), 15)
        assert cluster.task(PS).process.poll() is None


def test_all_workers_of_a_job_name_the_server_that_was_killed() -> None:
    program = [*REPLICA, "--steps", "100000", "--batch", "8"]
    with LocalCluster({"ps": 1, "worker": 2}, programs={"worker": program}, options=COMMON) as cluster:
        assert all_run_a_step(cluster, WORKER, WORKER1)
        cluster.kill(PS)
        for worker in (WORKER, WORKER1):
            task = cluster.task(worker)
            assert task.wait(Deadline.after(30)) == 5, task.errors()
            assert PS in task.errors() and "Traceback" not in task.errors()


# Many more steps than are done before the first checkpoint is there; synchronous ones take longer.
@pytest.mark.parametrize(
    ("transport", "scheme", "steps"), [("grpc", "async", 2000), ("shm", "async", 2000), ("grpc", "sync", 800)]
)
def test_a_killed_server_is_started_again_and_training_goes_on(
    tmp_path: Path, transport: str, scheme: str, steps: int
) -> None:
    """SIGKILL of the parameter server in mid-training; a launcher restarts it, everything else happens by itself."""
    program = [*REPLICA, "--batch", "8", "--steps", "100000", "--global-steps", str(steps), "--recover-s", "60"]
    program += [
        "--sync",
        scheme,
        "--checkpoint-dir",
        str(tmp_path),
        "--checkpoint-steps",
        "50",
        "--checkpoint-s",
        "0.5",
        "--warmup",
        "0",
    ]
    with LocalCluster(
        {"ps": 1, "worker": 2}, programs={"worker": program}, options=common(transport), restart=["ps"]
    ) as cluster:
        assert eventually(lambda: list_checkpoints(tmp_path)[:1] >= [checkpoint_path(tmp_path, 50)], 60)
        assert all_run_a_step(cluster, WORKER, WORKER1)
        cluster.kill(PS)
        codes = cluster.wait("worker", Deadline.after(100))
        said = {name: task.errors() for name, task in cluster.tasks.items()}
        assert set(codes.values()) == {0}, said
        assert cluster.restarts == {PS: 1}
        for worker in codes:
            stdout = cluster.task(worker).process.stdout
            assert stdout is not None
            last = json.loads(stdout.readlines()[-1])
            assert last["global_step"] >= steps and last["recoveries"] >= 1, (last, said)
            assert PS in said[worker]


# The heartbeats themselves.


def test_heartbeats_tell_a_restart_from_a_silence() -> None:
    spec = ClusterSpec({"ps": free_addresses(1)})
    monitor = HealthMonitor(interval_s=0.1, timeout_s=5.0)
    told: list[tuple[str, PeerLostError]] = []
    client = WorkerClient(PS, spec.address(PS), "t")
    try:
        with Server(spec, "ps", 0, transport="inproc", token="t", arena_bytes=1 << 20) as first:
            watch = monitor.watch(client, first.incarnation, lambda *news: told.append(news))
            assert eventually(lambda: watch.answers > 2)
            assert re.search(r"last heartbeat was \d", monitor.describe(PS)) and not told
            wrong = monitor.watch(client, first.incarnation + 1, lambda *news: told.append(news))
            assert eventually(lambda: wrong.lost is not None)
            assert eventually(lambda: len(told) == 1) and "restarted" in str(told[0][1])
        assert eventually(lambda: watch.lost is not None)
        assert eventually(lambda: len(told) == 2) and told[1][0] == PS and "127.0.0.1" in str(told[1][1])
        monitor.unwatch(watch)
        assert monitor.describe("/job:ps/task:1") == ""
    finally:
        monitor.close()
        client.close()
