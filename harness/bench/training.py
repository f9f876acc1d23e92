"""training: parameter servers and workers train a model; steps, images a second, and where a step's time goes.

Between-graph replication as in TensorFlow 1.x: each worker builds its own graph and drives its own steps, variables live on the
servers, every step pulls them and pushes gradients. Every rank is a task of the cluster in its own process.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.bench.alone import random_feeds
from harness.bench.base import TRANSPORTS, Benchmark, RankContext, VerificationError, parameter
from harness.bench.settings import (
    binding_parameter,
    chunk_bytes_parameter,
    eager_threshold_parameter,
    protocol_parameter,
    transport_params,
)
from runtime.cluster.server import Server
from runtime.cluster.session import Session
from runtime.cluster.spec import task_name
from runtime.errors import ConfigError, VerbflowError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.placement import GreedyByBytes, RoundRobin
from runtime.models import catalog
from runtime.models.model import Model
from runtime.trace import Tracer
from runtime.training import schemes
from runtime.training.optimizers import optimizer

ONE_SIDED = ("shm", "verbs")


@dataclass(frozen=True)
class TrainingParams:
    transport: str = parameter("grpc", "how tensors travel", unit="text", choices=("auto", *TRANSPORTS))
    model: str = parameter("alexnet_narrow", "what is trained", unit="text", choices=tuple(catalog.names()))
    like: str = parameter(
        "alexnet", "the synthetic model has this one's tensors", unit="text", choices=tuple(catalog.names())
    )
    compute_ns: int = parameter(0, "how long a synthetic step computes", unit="ns")
    batch: int = parameter(8, "examples a worker's step", at_least=1)
    servers: int = parameter(1, "parameter servers", at_least=1, at_most=64)
    workers: int = parameter(1, "workers", at_least=1, at_most=256)
    synchrony: str = parameter(
        "asynchronous", "Hogwild, or one update of all workers' mean gradient", unit="text",
        choices=("asynchronous", "synchronous"),
    )  # fmt: skip
    placement: str = parameter(
        "greedy", "which server holds which variable", unit="text", choices=("greedy", "round_robin")
    )
    optimizer: str = parameter("sgd", "update rule", unit="text", choices=("sgd", "momentum", "adagrad", "adam"))
    threads: int = parameter(0, "threads of a task's kernels; 0: the processors shared by the workers", at_most=1024)
    arena_bytes: int = parameter(
        1 << 30, "memory of a task for variables and tensors that travel", unit="bytes", at_least=1 << 20
    )
    protocol: str = protocol_parameter()
    eager_threshold: int = eager_threshold_parameter()
    chunk_bytes: int = chunk_bytes_parameter()
    binding: str = binding_parameter()


@dataclass
class TrainingState:
    p: TrainingParams
    server: Server
    worker: int
    stack: ExitStack
    session: Session | None = None
    model: Model | None = None
    scheme: schemes.Asynchronous | schemes.Synchronous | None = None
    target: Node | None = None
    probe: Output | None = None
    feeds: dict[Any, np.ndarray] | None = None
    local_step: int = 0
    updater: threading.Thread | None = None
    stopping: bool = False
    moved: int = 0


class Training(Benchmark):
    name = "training"
    summary = "training steps over parameter servers"
    Params = TrainingParams
    operation = "image"

    def ranks(self, p: TrainingParams) -> int:
        return p.servers + p.workers

    def timed(self, ctx: RankContext, p: TrainingParams) -> bool:
        return ctx.rank >= p.servers

    def operations(self, p: TrainingParams) -> int:
        return p.batch

    def bytes_per_iteration(self, p: TrainingParams) -> int:
        real = p.like if p.model == "synthetic" else p.model
        return 2 * p.workers * sum(item.spec.nbytes for item in catalog.manifest(real))

    def fidelity(self, p: TrainingParams) -> str:
        if p.model == "synthetic" and p.compute_ns:
            return "emulated-compute"
        return super().fidelity(p) if p.transport != "auto" else "loopback"

    def setup(self, ctx: RankContext, p: TrainingParams) -> TrainingState:
        if p.transport in ("inproc", "null"):
            raise ConfigError(f"training needs several processes; {p.transport} stays in one")
        addresses = ctx.group.exchange(_free_address(ctx.host))
        cluster = {"ps": addresses[: p.servers], "worker": addresses[p.servers :]}
        worker = ctx.rank - p.servers
        job, task = ("worker", worker) if worker >= 0 else ("ps", ctx.rank)
        own = self.transport_params(ctx, p)
        with ExitStack() as stack:
            server = stack.enter_context(
                Server(
                    cluster,
                    job,
                    task,
                    transport=p.transport,
                    token=ctx.token,
                    arena_bytes=self.arena_bytes(p, worker),
                    threads=p.threads or max(1, len(os.sched_getaffinity(0)) // p.workers),
                    bind=ctx.host,
                    params={p.transport: own} if own and p.transport in ONE_SIDED else None,
                    touch=True,
                )
            )
            # A step takes as long as it takes: under emulation a busy task answers no heartbeat for many seconds. One that
            # died is still found, for its connection is refused.
            server.worker.health.timeout_s = max(server.worker.health.timeout_s, ctx.deadline.remaining())
            state = TrainingState(p, server, worker, stack)
            ctx.group.barrier()
            if worker >= 0:
                self.build(ctx, p, state)
            state.stack = stack.pop_all()
        ctx.group.barrier()
        return state

    def transport_params(self, ctx: RankContext, p: TrainingParams) -> dict[str, Any]:
        """The transport's own settings."""
        return transport_params(p)

    def arena_bytes(self, p: TrainingParams, worker: int) -> int:
        """Memory of worker ``worker``, or of a server where that is negative."""
        return p.arena_bytes

    def model_options(self, p: TrainingParams) -> dict[str, Any]:
        return {"like": p.like, "seconds": p.compute_ns * 1e-9} if p.model == "synthetic" else {}

    def build(self, ctx: RankContext, p: TrainingParams, state: TrainingState) -> None:
        """A worker's graph, feeds and session."""
        servers = [task_name("ps", index) for index in range(p.servers)]
        choose = GreedyByBytes(servers) if p.placement == "greedy" else RoundRobin(servers)
        graph = Graph()
        with graph.as_default(), graph.device(task_name("worker", state.worker)), graph.variable_devices(choose):
            model = catalog.build(p.model, p.batch, **self.model_options(p))
            rule = optimizer(p.optimizer, 1e-3)
            if p.synchrony == "synchronous":
                state.scheme = schemes.synchronous(
                    model.loss,
                    rule,
                    worker=state.worker,
                    aggregate=p.workers,
                    replicas=p.workers,
                    params=model.parameters,
                )
            else:
                state.scheme = schemes.asynchronous(model.loss, rule, model.parameters)
                state.target = state.scheme.train
        state.feeds = random_feeds(model, state.worker)
        state.model = model
        state.moved = 2 * model.parameter_bytes
        self.connect(ctx, state, graph)

    def connect(self, ctx: RankContext, state: TrainingState, graph: Graph) -> None:
        """Open the worker's session; it closes before the worker's server does."""
        state.session = state.stack.enter_context(Session(graph, state.server, step_s=ctx.deadline.remaining()))

    def verify(self, ctx: RankContext, state: TrainingState) -> None:
        """The first loss is what an untrained classifier of that many classes must have, and it moves when trained."""
        if state.session is not None and state.model is not None:
            if state.worker == 0:
                first = self._loss(ctx, state)
                # The last layer of the paper's AlexNet is a ReLU, so the logits are not centred: only the order is checked.
                if state.p.model != "synthetic" and not 0 < first < 1e4:
                    raise VerificationError(f"the untrained loss is {first}, which no classifier has")
            if state.p.synchrony == "synchronous" and state.worker == 0:
                state.updater = threading.Thread(target=run_updates, args=(ctx, state), name="updater", daemon=True)
                state.updater.start()
        ctx.group.barrier()
        if state.session is not None and state.model is not None:
            for _ in range(2):
                self.once(ctx, state)
        ctx.group.barrier()
        if state.worker == 0 and state.model is not None:
            last = self._loss(ctx, state)
            if not np.isfinite(last):
                raise VerificationError(f"the loss is {last} after two steps over {state.p.transport}")
        ctx.group.barrier()

    def once(self, ctx: RankContext, state: TrainingState) -> int:
        session, scheme = state.session, state.scheme
        assert session is not None and state.feeds is not None
        if isinstance(scheme, schemes.Synchronous):
            feeds = {**state.feeds, scheme.local_step: np.int64(state.local_step)}
            _, following = session.run([scheme.train, scheme.next_step], feeds, timeout_s=ctx.deadline.remaining())
            state.local_step = int(following)
        else:
            session.run(state.target, state.feeds, timeout_s=ctx.deadline.remaining())
        return state.moved

    def teardown(self, ctx: RankContext, state: TrainingState) -> None:
        state.stopping = True
        state.stack.close()
        if state.updater is not None:
            state.updater.join(10)

    def transport_totals(self, ctx: RankContext, state: TrainingState) -> dict[str, int]:
        return state.server.worker.transports.counters()

    def suspicion(
        self, ctx: RankContext, p: TrainingParams, before: dict[str, int], after: dict[str, int], moved: int
    ) -> str:
        """A worker pulls and pushes every parameter; a little more travels (the step's number, the synchronisation)."""
        names = [
            name
            for name in after
            if name.endswith((".bytes_in", ".bytes_out")) and p.transport in ("auto", name.split(".")[0])
        ]
        carried = sum(after[name] - before.get(name, 0) for name in names)
        if moved <= carried <= 1.05 * moved + (1 << 20):
            return ""
        return f"{p.transport} carried {carried} bytes where {moved} of parameters and gradients were timed"

    def tracer(self, ctx: RankContext, state: TrainingState) -> Tracer:
        return state.server.worker.tracer

    def environment(self, p: TrainingParams) -> dict[str, str]:
        # Threads of our own split the work; BLAS adds none to them.
        return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def _loss(self, ctx: RankContext, state: TrainingState) -> float:
        assert state.session is not None and state.model is not None
        return float(state.session.run(state.model.loss, state.feeds, timeout_s=ctx.deadline.remaining()))


def run_updates(ctx: RankContext, state: TrainingState) -> None:
    """The synchronous scheme's updates, again and again until ``stopping``; on a thread of worker 0."""
    assert state.session is not None and isinstance(state.scheme, schemes.Synchronous)
    while not state.stopping:
        try:
            state.session.run(state.scheme.update, timeout_s=ctx.deadline.remaining())
        except VerbflowError:
            if not state.stopping:
                raise


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
