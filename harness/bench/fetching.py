"""Fetching: what benchmarks of a channel's fetches have in common, whatever they fetch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.bench.base import Benchmark, RankContext, close_transport
from runtime.errors import ConfigError
from runtime.transport.base import Channel, Lease, Reply, Transport


class Served:
    """A tensor source that gives out the same arrays again and again."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def take(self, key: str, reply: Reply) -> None:
        array = self._arrays.get(key)
        reply(Lease(array) if array is not None else ConfigError(f"no tensor is called {key!r} here"))


def arena_bytes(payload: int) -> int:
    """Room for a payload, its guards, and what a transport needs for rings and messages."""
    return payload + (payload >> 3) + (32 << 20)


@dataclass
class FetchState:
    """``channel`` is None at a rank that only serves."""

    p: Any
    transport: Transport
    channel: Channel | None


class FetchBenchmark(Benchmark):
    """A benchmark whose state is a ``FetchState``, and whose iterations do nothing but receive payload."""

    def teardown(self, ctx: RankContext, state: FetchState) -> None:
        if state.channel is not None:
            state.channel.close()
        close_transport(state.transport)

    def transport_totals(self, ctx: RankContext, state: FetchState) -> dict[str, int]:
        return state.transport.totals().as_dict()

    def suspicion(self, ctx: RankContext, p: Any, before: dict[str, int], after: dict[str, int], moved: int) -> str:
        """The transport must have received just the bytes that were timed."""
        received = after["bytes_in"] - before["bytes_in"]
        return "" if received == moved else f"the transport counted {received} bytes received where {moved} were timed"
