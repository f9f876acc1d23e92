"""alone: processes that each train a model by themselves, without servers; what a step's operations cost.

The operations' spans are what the cost model knows of compute. Several processes at once show what they cost each other
through caches and memory; so do two more that exchange tensors meanwhile, whose counters then tell what a byte costs a busy
machine.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bench.base import (
    Benchmark,
    RankContext,
    VerificationError,
    check_pattern,
    close_transport,
    parameter,
    pattern,
)
from harness.bench.fetching import Served, arena_bytes
from runtime.execution.local import LocalEngine
from runtime.execution.resources import Resources
from runtime.graph.graph import Graph, Node, Output
from runtime.memory.arena import ALIGNMENT, Arena
from runtime.models import catalog
from runtime.models.model import Model
from runtime.tensor import TensorSpec
from runtime.training.optimizers import compute_gradients, optimizer
from runtime.transport.base import Channel, Transport

NOBODY = "none"
_KEY = "/job:bench/task:0;tensor"


@dataclass(frozen=True)
class AloneParams:
    model: str = parameter("alexnet", "what is trained", unit="text", choices=tuple(catalog.names()))
    batch: int = parameter(8, "examples a step", at_least=1)
    processes: int = parameter(1, "processes that do the same at once", at_least=1, at_most=64)
    threads: int = parameter(1, "threads of a process's kernels", at_least=1, at_most=1024)
    shared: bool = parameter(False, "variables in memory that peers could map, as a server's over shm", unit="flag")
    optimizer: str = parameter("sgd", "update rule", unit="text", choices=("sgd", "momentum", "adagrad", "adam"))
    beside: str = parameter(
        NOBODY, "over which transport two more processes exchange a tensor meanwhile, without a pause", unit="text",
        choices=(NOBODY, "grpc", "grpc_proto", "shm", "verbs"),
    )  # fmt: skip
    nbytes: int = parameter(16 << 20, "that tensor's size", unit="bytes", at_least=1, at_most=1 << 32)


@dataclass
class Exchange:
    """One of the two that exchange tensors; ``channel`` and ``thread`` are the fetching one's."""

    transport: Transport
    channel: Channel | None
    into: np.ndarray
    thread: threading.Thread | None = None
    error: Exception | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def fetch(self, ctx: RankContext) -> None:
        assert self.channel is not None
        self.channel.fetch(_KEY, into=self.into, deadline=ctx.deadline).result(ctx.deadline)

    def fetch_on(self, ctx: RankContext) -> None:
        """Until ``stopping``; an error before that is kept."""
        try:
            while not self.stopping.is_set():
                self.fetch(ctx)
        except Exception as error:  # of whatever kind: without traffic the measurement is worth nothing
            if not self.stopping.is_set():
                self.error = error


@dataclass
class AloneState:
    engine: LocalEngine
    model: Model
    targets: list[Node]
    feeds: dict[Output, Any]
    arena: Arena


class Alone(Benchmark):
    name = "alone"
    summary = "training in one process, without a network: the operations' cost"
    Params = AloneParams
    operation = "image"

    def ranks(self, p: AloneParams) -> int:
        return p.processes + (0 if p.beside == NOBODY else 2)

    def timed(self, ctx: RankContext, p: AloneParams) -> bool:
        return ctx.rank < p.processes

    def operations(self, p: AloneParams) -> int:
        return p.batch

    def fidelity(self, p: AloneParams) -> str:
        return "loopback"

    def bytes_per_iteration(self, p: AloneParams) -> int:
        return 0

    def setup(self, ctx: RankContext, p: AloneParams) -> AloneState | Exchange:
        if ctx.rank >= p.processes:
            return self._exchange(ctx, p)
        state = self._training(ctx, p)
        if p.beside != NOBODY:
            ctx.group.exchange_bytes(b"")  # the others' addresses
        return state

    def _exchange(self, ctx: RankContext, p: AloneParams) -> Exchange:
        """The last rank serves, the one before it fetches."""
        transport = ctx.open(p.beside, arena_bytes(p.nbytes))
        try:
            array = transport.arena.allocate(p.nbytes, "tensor").array(TensorSpec((p.nbytes,), np.dtype(np.uint8)))
            address = b""
            if ctx.rank == ctx.size - 1:
                array[:] = pattern(p.nbytes, seed=1)
                address = transport.listen(Served({_KEY: array}))
            address = ctx.group.exchange_bytes(address)[-1]
            channel = None
            if ctx.rank < ctx.size - 1:
                channel = transport.connect(address, peer=f"/job:bench/task:{ctx.size - 1}", deadline=ctx.deadline)
            return Exchange(transport, channel, array)
        except BaseException:
            close_transport(transport)
            raise

    def _training(self, ctx: RankContext, p: AloneParams) -> AloneState:
        graph = Graph()
        with graph.as_default():
            model = catalog.build(p.model, p.batch)
            pairs = compute_gradients(model.loss, model.parameters)
            train = optimizer(p.optimizer, 1e-3).apply_gradients(pairs)
        arena = Arena(model.parameter_bytes + (len(model.parameters) + 64) * ALIGNMENT * 8, shared=p.shared)
        arena.touch()
        engine = LocalEngine(graph, resources=Resources(arena), threads=p.threads, tracer=ctx.tracer)
        # Gradients are asked for too: otherwise the largest would be applied while they are made, which one that travels is not.
        targets = [train, *(gradient.node for _, gradient in pairs)]
        return AloneState(engine, model, targets, random_feeds(model, ctx.rank), arena)

    def verify(self, ctx: RankContext, state: AloneState | Exchange) -> None:
        """The loss is a number before and after a step; the tensor that is fetched is the one that is served."""
        if isinstance(state, Exchange):
            if state.channel is not None:
                state.fetch(ctx)
                check_pattern(state.into, 1, f"fetch over {state.transport.name}")
                state.thread = threading.Thread(target=state.fetch_on, args=(ctx,), name="fetching", daemon=True)
                state.thread.start()
            return
        for _ in range(2):
            (loss,) = state.engine.run([state.model.loss], state.feeds, ctx.deadline)
            if loss is None or not np.isfinite(loss):
                raise VerificationError(f"the loss is {loss}")
            self.once(ctx, state)

    def once(self, ctx: RankContext, state: AloneState) -> int:
        state.engine.run(state.targets, state.feeds, ctx.deadline)
        return 0

    def transport_totals(self, ctx: RankContext, state: AloneState | Exchange) -> dict[str, int] | None:
        if not isinstance(state, Exchange):
            return None
        if state.error is not None:
            raise state.error  # what was timed was not beside anything
        return state.transport.totals().as_dict()

    def teardown(self, ctx: RankContext, state: AloneState | Exchange) -> None:
        if isinstance(state, Exchange):
            state.stopping.set()
            if state.channel is not None:
                state.channel.close()
            if state.thread is not None:
                state.thread.join()
            close_transport(state.transport)
            return
        state.engine.close()
        state.arena.close()


def random_feeds(model: Model, seed: int) -> dict[Output, Any]:
    """Random values for a model's placeholders."""
    generator = np.random.default_rng(seed)
    feeds: dict[Output, Any] = {}
    for value in [*model.inputs.values(), model.labels]:
        if value.node.op.name != "Placeholder":
            continue
        if value.dtype.kind == "f":
            feeds[value] = generator.random(value.shape, dtype=np.float32)
        else:
            feeds[value] = generator.integers(0, model.logits.shape[-1], value.shape).astype(value.dtype)
    return feeds
