"""emulated: a published job on machines that are not here. Real processes, tensors and transport; timed waits for compute.

Asynchronous workers pull all weights, wait as long as the published machine computed, and push all gradients. Steps are
counted over all workers, as the paper counts its 300. The network is real and shaped (launcher ``netns``), or a paced fabric
under the one-sided protocols (``fabric_rate``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bench.base import RankContext, VerificationError, parameter
from harness.bench.settings import spin_us_parameter
from harness.bench.training import Training, TrainingParams, TrainingState, run_updates
from runtime.cluster.session import Session
from runtime.errors import ConfigError
from runtime.graph.graph import Graph
from runtime.models import catalog
from runtime.trace import Tracer
from runtime.training import schemes
from runtime.training.optimizers import optimizer

ALONE = "inproc"
_RATE = 1e-3
_SLACK = 64 << 20


@dataclass(frozen=True)
class EmulatedParams(TrainingParams):
    """The paper's job unless something else is said."""

    transport: str = parameter(
        "grpc", "how tensors travel; inproc: one process without servers", unit="text",
        choices=("grpc", "grpc_proto", "shm", "verbs", ALONE),
    )  # fmt: skip
    model: str = parameter("synthetic", "what is trained", unit="text", choices=("synthetic",))
    compute_ns: int = parameter(746_666_667, "how long a step computes", unit="ns")
    batch: int = parameter(24, "examples a worker's step", at_least=1)
    arena_bytes: int = parameter(0, "memory of a task; 0: what the model and the workers need", unit="bytes")
    overlap: bool = parameter(False, "layers compute as soon as their own weights are there", unit="flag")
    jitter_percent: int = parameter(30, "a step's compute varies by so much, uniformly around its mean", at_most=100)
    spread_ns: int = parameter(0, "workers begin evenly over this time, best a step's of one worker", unit="ns")
    global_steps: int = parameter(24, "timed steps of all workers together", at_least=1)
    fabric_rate: int = parameter(0, "bytes a second of every task's port; 0: no fabric", unit="bytes")
    spin_us: int = spin_us_parameter()


@dataclass
class EmulatedState(TrainingState):
    steps: int = 0
    chooser: np.random.Generator = field(default_factory=np.random.default_rng)


class Emulated(Training):
    name = "emulated"
    summary = "a published job: real tensors and processes, timed waits for compute"
    Params = EmulatedParams
    operation = "image"

    def ranks(self, p: Any) -> int:
        return 1 if p.transport == ALONE else super().ranks(p)

    def timed(self, ctx: RankContext, p: Any) -> bool:
        return p.transport == ALONE or super().timed(ctx, p)

    def fidelity(self, p: Any) -> str:
        return "emulated-compute"

    def transport_params(self, ctx: RankContext, p: Any) -> dict[str, Any]:
        own = super().transport_params(ctx, p)
        if p.fabric_rate:
            if p.transport != "shm":
                raise ConfigError(f"a fabric paces shm between processes of one machine, not {p.transport}")
            own |= {"fabric": str(ctx.folder / "fabric"), "fabric_rate": float(p.fabric_rate)}
        return own

    def arena_bytes(self, p: Any, worker: int) -> int:
        """A worker keeps the weights that it pulled and the gradients that it made, a server its variables and a gradient
        of every worker; synchronously it sums them up beside."""
        if p.arena_bytes:
            return int(p.arena_bytes)
        sizes = [item.spec.nbytes for item in catalog.manifest(p.like)]
        total = sum(sizes)
        if worker >= 0:
            return 2 * total + _SLACK
        share = min(total, max(sizes) + total // p.servers)
        copies = 1 + p.workers * (2 if p.synchrony == "synchronous" else 1)
        return copies * share + _SLACK

    def model_options(self, p: Any) -> dict[str, Any]:
        # What varies is waited for by ``once``, so the kernel waits for what every step takes.
        seconds = p.compute_ns * 1e-9 * (1 - p.jitter_percent / 200)
        return {"like": p.like, "seconds": seconds, "overlap": p.overlap}

    def setup(self, ctx: RankContext, p: Any) -> EmulatedState:
        if p.transport == ALONE:
            return self._alone(p)
        state = super().setup(ctx, p)
        made = EmulatedState(**{name: getattr(state, name) for name in TrainingState.__dataclass_fields__})
        made.chooser = np.random.default_rng(max(0, made.worker))
        return made

    def _alone(self, p: Any) -> EmulatedState:
        """One process that holds the variables itself: the bar without distribution."""
        graph = Graph()
        with graph.as_default():
            model = catalog.build(p.model, p.batch, **self.model_options(p))
            scheme = schemes.asynchronous(model.loss, optimizer(p.optimizer, _RATE), model.parameters)
        session = Session(graph, threads=p.threads or None)
        feeds: dict[Any, np.ndarray] = {model.inputs["seed"]: np.float32(1)}  # type: ignore[dict-item]
        state = EmulatedState(p, None, 0, None, session, model, scheme, feeds=feeds)  # type: ignore[arg-type]
        state.chooser = np.random.default_rng(0)
        return state

    def verify(self, ctx: RankContext, state: Any) -> None:
        """One step of every worker, after which each element of a variable has had a whole number of updates, at least one:
        synchronously one, else up to one a worker (two at once may lose one, as Hogwild's do)."""
        p = state.p
        synchronous = p.synchrony == "synchronous"
        if synchronous and state.session is not None and state.worker == 0:
            state.updater = threading.Thread(target=run_updates, args=(ctx, state), name="updater", daemon=True)
            state.updater.start()
        ctx.group.barrier()
        if state.session is not None:
            self.once(ctx, state)
        ctx.group.barrier()
        if state.session is not None and state.worker == 0:
            small = [value for value in state.model.parameters if value.spec.nbytes <= 1 << 20]
            for value, array in zip(small, state.session.run(small, {}, timeout_s=ctx.deadline.remaining())):
                check_steps(array / -_RATE, 1 if synchronous else p.workers, value.node.name)
        ctx.group.barrier()

    def iterate(self, ctx: RankContext, state: Any, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``count`` 1 is the loop's first look at how long a step takes. Otherwise steps are made until all workers together
        have made ``global_steps`` more than the first of each, which find the phases not mixed yet; those are returned
        that began after the first and ended before the last. Nobody stops before all that are counted are done."""
        p = state.p
        if count == 1 or p.synchrony == "synchronous":
            return super().iterate(ctx, state, count)
        workers = self.ranks(p) - p.servers if p.transport != ALONE else 1
        # All have made equally many steps so far.
        first = (state.steps + 1) * workers
        # Asynchronous workers that begin together stay in phase, all pulling and then all pushing.
        time.sleep(max(0, state.worker) * p.spread_ns * 1e-9 / workers)
        rows: list[tuple[int, int, int]] = []
        while True:
            start = time.monotonic_ns()
            moved = self.once(ctx, state)
            end = time.monotonic_ns()
            if first < state.local_step <= first + p.global_steps:
                rows.append((start, end - start, moved))
            if state.local_step >= first + p.global_steps:
                break
        return split(rows)

    def once(self, ctx: RankContext, state: Any) -> int:
        p = state.p
        if p.jitter_percent:
            time.sleep(p.compute_ns * 1e-9 * p.jitter_percent / 100 * state.chooser.random())
        if p.synchrony == "synchronous":
            moved = super().once(ctx, state)
        else:
            assert state.scheme is not None
            number = state.session.run(state.scheme.step, state.feeds, timeout_s=ctx.deadline.remaining())
            state.local_step, moved = int(number), state.moved
        state.steps += 1
        return moved

    def teardown(self, ctx: RankContext, state: Any) -> None:
        if state.server is None:
            state.session.close()
        else:
            super().teardown(ctx, state)

    def tracer(self, ctx: RankContext, state: Any) -> Tracer:
        return ctx.tracer if state.server is None else super().tracer(ctx, state)

    def transport_totals(self, ctx: RankContext, state: Any) -> dict[str, int]:
        totals = {} if state.server is None else super().transport_totals(ctx, state)
        return {**totals, "steps": state.steps}

    def suspicion(self, ctx: RankContext, p: Any, before: dict[str, int], after: dict[str, int], moved: int) -> str:
        """Also steps that are not timed moved their bytes."""
        if p.transport == ALONE:
            return ""
        steps = after["steps"] - before["steps"]
        return super().suspicion(ctx, p, before, after, steps * 2 * model_bytes(p.like))


def model_bytes(name: str) -> int:
    """Bytes of a model's parameters."""
    return sum(item.spec.nbytes for item in catalog.manifest(name))


def check_steps(updates: np.ndarray, most: int, what: str) -> None:
    """VerificationError unless every element is a whole number from 1 to ``most``."""
    off = np.abs(updates - np.rint(updates))
    if off.max() > 1e-3 or updates.min() < 1 - 1e-3 or updates.max() > most + 1e-3:
        at = int(np.argmax(np.maximum(off, np.maximum(1 - updates, updates - most))))
        raise VerificationError(f"element {at} of {what} has had {updates.ravel()[at]:.4f} updates of 1 to {most}")


def split(rows: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, durations and bytes as arrays."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
