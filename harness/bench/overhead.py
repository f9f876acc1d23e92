"""overhead: what the runtime itself costs, without any network: an op, a session's call, a local send and receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.bench.base import Benchmark, RankContext, VerificationError, parameter
from runtime.cluster.session import Session
from runtime.graph.array_ops import placeholder
from runtime.graph.graph import Graph
from runtime.graph.math_ops import add


@dataclass(frozen=True)
class OverheadParams:
    transport: str = parameter(
        "null", "none is used; the name under which rows are drawn", unit="text", choices=("null",)
    )
    ops: int = parameter(1000, "additions of a scalar, each on the one before", at_least=1, at_most=100_000)


@dataclass
class OverheadState:
    p: OverheadParams
    session: Session
    fetch: Any
    feeds: dict[Any, np.ndarray]


class Overhead(Benchmark):
    name = "overhead"
    summary = "dispatch of tiny operations in one process"
    Params = OverheadParams
    operation = "op"

    def ranks(self, p: OverheadParams) -> int:
        return 1

    def operations(self, p: OverheadParams) -> int:
        return p.ops

    def bytes_per_iteration(self, p: OverheadParams) -> int:
        return 0

    def fidelity(self, p: OverheadParams) -> str:
        return "loopback"

    def setup(self, ctx: RankContext, p: OverheadParams) -> OverheadState:
        graph = Graph()
        with graph.as_default():
            start = placeholder((), np.float32, name="start")
            step = placeholder((), np.float32, name="step")
            value = start
            for _ in range(p.ops):
                value = add(value, step)
        return OverheadState(
            p, Session(graph, threads=1), value, {start: np.zeros((), np.float32), step: np.ones((), np.float32)}
        )

    def verify(self, ctx: RankContext, state: OverheadState) -> None:
        found = float(state.session.run(state.fetch, state.feeds))
        if found != state.p.ops:
            raise VerificationError(f"{state.p.ops} additions of one gave {found}")

    def once(self, ctx: RankContext, state: OverheadState) -> int:
        state.session.run(state.fetch, state.feeds)
        return 0

    def teardown(self, ctx: RankContext, state: OverheadState) -> None:
        state.session.close()
