"""alone: processes that each train a model by themselves, without servers; what a step's operations cost.

The operations' spans are what the cost model knows of compute. Several processes at once show what they cost each other
through caches and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.bench.base import Benchmark, RankContext, VerificationError, parameter
from runtime.execution.local import LocalEngine
from runtime.execution.resources import Resources
from runtime.graph.graph import Graph, Node, Output
from runtime.memory.arena import ALIGNMENT, Arena
from runtime.models import catalog
from runtime.models.model import Model
from runtime.training.optimizers import compute_gradients, optimizer


@dataclass(frozen=True)
class AloneParams:
    model: str = parameter("alexnet", "what is trained", unit="text", choices=tuple(catalog.names()))
    batch: int = parameter(8, "examples a step", at_least=1)
    processes: int = parameter(1, "processes that do the same at once", at_least=1, at_most=64)
    threads: int = parameter(1, "threads of a process's kernels", at_least=1, at_most=1024)
    shared: bool = parameter(False, "variables in memory that peers could map, as a server's over shm", unit="flag")
    optimizer: str = parameter("sgd", "update rule", unit="text", choices=("sgd", "momentum", "adagrad", "adam"))


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
        return p.processes

    def timed(self, ctx: RankContext, p: AloneParams) -> bool:
        return True

    def operations(self, p: AloneParams) -> int:
        return p.batch

    def fidelity(self, p: AloneParams) -> str:
        return "loopback"

    def setup(self, ctx: RankContext, p: AloneParams) -> AloneState:
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

    def verify(self, ctx: RankContext, state: AloneState) -> None:
        """The loss is a number before and after a step."""
        for _ in range(2):
            (loss,) = state.engine.run([state.model.loss], state.feeds, ctx.deadline)
            if loss is None or not np.isfinite(loss):
                raise VerificationError(f"the loss is {loss}")
            self.once(ctx, state)

    def once(self, ctx: RankContext, state: AloneState) -> int:
        state.engine.run(state.targets, state.feeds, ctx.deadline)
        return 0

    def teardown(self, ctx: RankContext, state: AloneState) -> None:
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
