"""transfer: one rank fetches a tensor from another, again and again; latency and size sweep.

What TensorFlow's RecvTensor does, without a graph: ask -> usable array in memory of the receiver's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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
    transport_parameter,
)
from runtime.errors import ConfigError
from runtime.tensor import TensorSpec
from runtime.transport.base import Channel, Lease, Reply, Transport

ONE_PROCESS = ("inproc", "null")
_GUARD = 64
_SETTINGS = {"spin_us": 60, "message_reuse": True, "tensor_reuse": True, "pool": True}
_KEY = "/job:bench/task:0;tensor"


@dataclass(frozen=True)
class TransferParams:
    transport: str = transport_parameter()
    nbytes: int = parameter(4096, "tensor size", unit="bytes", at_most=1 << 33)
    protocol: str = parameter(
        "auto",
        "how a one-sided transport moves the bytes of a fetch",
        unit="text",
        choices=("auto", "eager", "read", "write", "paper_read", "paper_write"),
    )
    eager_threshold: int = parameter(0, "below it payloads travel in the message; 0: the default", unit="bytes")
    chunk_bytes: int = parameter(0, "largest piece of one operation; 0: the default", unit="bytes")
    spin_us: int = parameter(60, "how long a waiting thread polls before it sleeps", at_most=10_000)
    message_reuse: bool = parameter(True, "paper_*: messages from buffers registered once", unit="flag")
    tensor_reuse: bool = parameter(True, "paper_*: a tensor's buffers are kept", unit="flag")
    pool: bool = parameter(True, "paper_*: buffers from one registered block", unit="flag")
    binding: str = parameter("auto", "RDMA binding", unit="text", choices=("auto", "pyverbs", "ibverbs"))
    delay_ns: int = parameter(0, "added to every iteration by a busy wait, to test the instrument", unit="ns")


@dataclass
class TransferState:
    p: TransferParams
    transport: Transport
    channel: Channel | None
    landing: np.ndarray
    into: np.ndarray
    moves: int


class Served:
    """A tensor source that gives out the same arrays again and again."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def take(self, key: str, reply: Reply) -> None:
        array = self._arrays.get(key)
        reply(Lease(array) if array is not None else ConfigError(f"no tensor is called {key!r} here"))


def transport_params(p: Any) -> dict[str, Any]:
    """The transport's own settings among a benchmark's parameters; those left at their default are not passed on."""
    params = {name: getattr(p, name) for name in ("protocol", "eager_threshold", "chunk_bytes", "binding")}
    chosen = {name: value for name, value in params.items() if value not in ("auto", 0)}
    # Their defaults are the transport's, which are not "auto" or 0.
    for name, default in _SETTINGS.items():
        value = getattr(p, name, default)
        if value != default:
            chosen[name] = value
    return chosen


def arena_bytes(payload: int) -> int:
    """Room for a payload, its guards, and what a transport needs for rings and messages."""
    return payload + (payload >> 3) + (32 << 20)


class Transfer(Benchmark):
    name = "transfer"
    summary = "one fetch of a tensor: latency, and its rate over size"
    Params = TransferParams

    def ranks(self, p: TransferParams) -> int:
        return 1 if p.transport in ONE_PROCESS else 2

    def setup(self, ctx: RankContext, p: TransferParams) -> TransferState:
        transport = ctx.open(p.transport, arena_bytes(2 * p.nbytes), **transport_params(p))
        try:
            spec = TensorSpec((p.nbytes + 2 * _GUARD,), np.dtype(np.uint8))
            landing = transport.arena.allocate(spec.nbytes, "landing").array(spec)
            landing[:] = 0xA5
            address = b""
            if ctx.rank == ctx.size - 1:
                content = transport.arena.allocate(p.nbytes, "content").array(
                    TensorSpec((p.nbytes,), np.dtype(np.uint8))
                )
                content[:] = pattern(p.nbytes, seed=1)
                address = transport.listen(Served({_KEY: content}))
            address = ctx.group.exchange_bytes(address)[-1]
            channel = None
            moves = 0 if p.transport == "null" else p.nbytes
            if ctx.rank == 0:
                channel = transport.connect(address, peer=f"/job:bench/task:{ctx.size - 1}", deadline=ctx.deadline)
            return TransferState(p, transport, channel, landing, landing[_GUARD:-_GUARD], moves)
        except BaseException:
            close_transport(transport)
            raise

    def verify(self, ctx: RankContext, state: TransferState) -> None:
        if state.channel is None or state.p.transport == "null":
            return
        self.once(ctx, state)
        check_pattern(state.into, 1, f"fetch over {state.p.transport}")
        if np.any(state.landing[:_GUARD] != 0xA5) or np.any(state.landing[-_GUARD:] != 0xA5):
            raise VerificationError(f"fetch over {state.p.transport} wrote beside its destination")
        state.into[:] = 0

    def once(self, ctx: RankContext, state: TransferState) -> int:
        assert state.channel is not None
        state.channel.fetch(_KEY, into=state.into, deadline=ctx.deadline).result(ctx.deadline)
        if state.p.delay_ns:
            end = time.monotonic_ns() + state.p.delay_ns
            while time.monotonic_ns() < end:
                continue
        return state.moves

    def teardown(self, ctx: RankContext, state: TransferState) -> None:
        if state.channel is not None:
            state.channel.close()
        close_transport(state.transport)

    def transport_totals(self, ctx: RankContext, state: TransferState) -> dict[str, int]:
        return state.transport.totals().as_dict()

    def suspicion(
        self, ctx: RankContext, p: TransferParams, before: dict[str, int], after: dict[str, int], moved: int
    ) -> str:
        return received_exactly(before, after, moved)


def received_exactly(before: dict[str, int], after: dict[str, int], moved: int) -> str:
    """A sentence unless the transport received just the bytes that were timed."""
    received = after["bytes_in"] - before["bytes_in"]
    return "" if received == moved else f"the transport counted {received} bytes received where {moved} were timed"
