"""nullstep: a training step that computes nothing; what coordination and moving the model cost.

TensorFlow's OSDI'16 paper, 6.2: each worker fetches the shared parameters, does a trivial computation, and sends an update.
``scalar`` touches four bytes of each server, ``dense`` the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.bench.base import TRANSPORTS, RankContext, VerificationError, parameter
from harness.bench.settings import (
    binding_parameter,
    chunk_bytes_parameter,
    eager_threshold_parameter,
    protocol_parameter,
)
from harness.bench.training import Training, TrainingState
from runtime.cluster.spec import task_name
from runtime.graph import initialisers
from runtime.graph.apply_ops import apply_sgd
from runtime.graph.array_ops import group
from runtime.graph.graph import Graph
from runtime.graph.math_ops import mul
from runtime.graph.state_ops import variable


@dataclass(frozen=True)
class NullStepParams:
    transport: str = parameter("grpc", "how tensors travel", unit="text", choices=("auto", *TRANSPORTS))
    access: str = parameter("dense", "how much of the model a step moves", unit="text", choices=("scalar", "dense"))
    nbytes: int = parameter(16 << 20, "the whole model", unit="bytes", at_least=4, at_most=1 << 34)
    tensors: int = parameter(16, "variables that hold it, spread over the servers", at_least=1, at_most=4096)
    servers: int = parameter(1, "parameter servers", at_least=1, at_most=64)
    workers: int = parameter(1, "workers", at_least=1, at_most=256)
    threads: int = parameter(1, "threads of a task's kernels", at_least=1, at_most=1024)
    protocol: str = protocol_parameter()
    eager_threshold: int = eager_threshold_parameter()
    chunk_bytes: int = chunk_bytes_parameter()
    binding: str = binding_parameter()

    @property
    def arena_bytes(self) -> int:
        """Room for the variables, a worker's copies, and its updates."""
        return 3 * self.nbytes + (self.nbytes >> 2) + (64 << 20)


class NullStep(Training):
    name = "nullstep"
    summary = "a training step without compute"
    Params = NullStepParams  # type: ignore[assignment]
    operation = "step"

    def operations(self, p: NullStepParams) -> int:  # type: ignore[override]
        return 1

    def bytes_per_iteration(self, p: NullStepParams) -> int:  # type: ignore[override]
        each = _elements(p) * 4
        return 2 * each * p.tensors * p.workers

    def fidelity(self, p: NullStepParams) -> str:  # type: ignore[override]
        return super(Training, self).fidelity(p) if p.transport != "auto" else "loopback"

    def build(self, ctx: RankContext, p: NullStepParams, state: TrainingState) -> None:  # type: ignore[override]
        graph = Graph()
        shape = (_elements(p),)
        with graph.as_default(), graph.device(task_name("worker", state.worker)):
            updates = []
            for index in range(p.tensors):
                with graph.device(task_name("ps", index % p.servers)):
                    shared = variable(f"shared{index}", shape, np.float32, initialisers.constant(1.0))
                # The worker's trivial computation: its update is a tenth of what it fetched.
                updates.append(apply_sgd(shared, mul(shared, 0.1), 1e-6))
            state.target = group(updates)
            state.probe = shared
        state.feeds = {}
        state.moved = 2 * _elements(p) * 4 * p.tensors
        self.connect(ctx, state, graph)

    def verify(self, ctx: RankContext, state: TrainingState) -> None:
        if state.session is not None:
            self.once(ctx, state)
        ctx.group.barrier()
        if state.worker == 0 and state.session is not None:
            value = state.session.run(state.probe, timeout_s=ctx.deadline.remaining())
            if not (np.all(value < 1.0) and np.all(value > 0.9)):
                raise VerificationError(f"after a null step the variable holds {value.min()} to {value.max()}")
        ctx.group.barrier()


def _elements(p: NullStepParams) -> int:
    return 1 if p.access == "scalar" else max(1, p.nbytes // (4 * p.tensors))
