"""stream: many fetches in flight; bandwidth with a window, in one direction or both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.bench.base import (
    RankContext,
    check_pattern,
    close_transport,
    parameter,
    pattern,
    transport_parameter,
)
from harness.bench.fetching import FetchBenchmark, FetchState, Served, arena_bytes
from harness.bench.settings import (
    binding_parameter,
    chunk_bytes_parameter,
    eager_threshold_parameter,
    protocol_parameter,
    transport_params,
)
from runtime.errors import ConfigError
from runtime.tensor import TensorSpec


@dataclass(frozen=True)
class StreamParams:
    transport: str = transport_parameter()
    nbytes: int = parameter(1 << 20, "tensor size", unit="bytes", at_least=1, at_most=1 << 32)
    window: int = parameter(8, "fetches in flight", at_least=1, at_most=1024)
    directions: int = parameter(1, "1: one rank fetches, 2: both do at once", at_least=1, at_most=2)
    protocol: str = protocol_parameter()
    eager_threshold: int = eager_threshold_parameter()
    chunk_bytes: int = chunk_bytes_parameter()
    binding: str = binding_parameter()


@dataclass
class StreamState(FetchState):
    p: StreamParams
    into: list[np.ndarray]


class Stream(FetchBenchmark):
    name = "stream"
    summary = "a window of fetches in flight: bandwidth, one way or both"
    Params = StreamParams

    def ranks(self, p: StreamParams) -> int:
        return 2

    def timed(self, ctx: RankContext, p: StreamParams) -> bool:
        return ctx.rank < p.directions

    def operations(self, p: StreamParams) -> int:
        return p.window

    def bytes_per_iteration(self, p: StreamParams) -> int:
        return p.window * p.nbytes * p.directions

    def setup(self, ctx: RankContext, p: StreamParams) -> StreamState:
        if p.transport in ("inproc", "null"):
            raise ConfigError(f"stream needs two processes; {p.transport} stays in one")
        transport = ctx.open(p.transport, arena_bytes((p.window + 1) * p.nbytes), **transport_params(p))
        try:
            spec = TensorSpec((p.nbytes,), np.dtype(np.uint8))
            content = transport.arena.allocate(p.nbytes, "content").array(spec)
            content[:] = pattern(p.nbytes, seed=ctx.rank)
            address = transport.listen(Served({f"tensor{index}": content for index in range(p.window)}))
            addresses = ctx.group.exchange_bytes(address)
            channel = None
            into: list[np.ndarray] = []
            if self.timed(ctx, p):
                peer = 1 - ctx.rank
                channel = transport.connect(addresses[peer], peer=f"/job:bench/task:{peer}", deadline=ctx.deadline)
                into = [transport.arena.allocate(p.nbytes, f"into{index}").array(spec) for index in range(p.window)]
            return StreamState(p, transport, channel, into)
        except BaseException:
            close_transport(transport)
            raise

    def verify(self, ctx: RankContext, state: StreamState) -> None:
        if state.channel is not None:
            self.once(ctx, state)
            for index, array in enumerate(state.into):
                check_pattern(array, 1 - ctx.rank, f"fetch {index} of a window over {state.p.transport}")

    def once(self, ctx: RankContext, state: StreamState) -> int:
        channel = state.channel
        assert channel is not None
        futures = [
            channel.fetch(f"tensor{index}", into=array, deadline=ctx.deadline) for index, array in enumerate(state.into)
        ]
        for future in futures:
            future.result(ctx.deadline)
        return state.p.window * state.p.nbytes
