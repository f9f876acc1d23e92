"""transfer: one rank fetches a tensor from another, again and again; latency and size sweep.

What TensorFlow's RecvTensor does, without a graph: ask -> usable array in memory of the receiver's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from harness.bench.base import (
    RankContext,
    VerificationError,
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
    spin_max_us_parameter,
    spin_us_parameter,
    transport_params,
)
from runtime.tensor import TensorSpec

ONE_PROCESS = ("inproc", "null")
_GUARD = 64
_KEY = "/job:bench/task:0;tensor"


@dataclass(frozen=True)
class TransferParams:
    transport: str = transport_parameter()
    nbytes: int = parameter(4096, "tensor size", unit="bytes", at_most=1 << 33)
    protocol: str = protocol_parameter()
    eager_threshold: int = eager_threshold_parameter()
    chunk_bytes: int = chunk_bytes_parameter()
    spin_us: int = spin_us_parameter()
    spin_max_us: int = spin_max_us_parameter()
    message_reuse: bool = parameter(True, "paper_*: messages from buffers registered once", unit="flag")
    tensor_reuse: bool = parameter(True, "paper_*: a tensor's buffers are kept", unit="flag")
    pool: bool = parameter(True, "paper_*: buffers from one registered block", unit="flag")
    binding: str = binding_parameter()
    delay_ns: int = parameter(0, "added to every iteration by a busy wait, to test the instrument", unit="ns")


@dataclass
class TransferState(FetchState):
    p: TransferParams
    landing: np.ndarray
    into: np.ndarray
    moves: int


class Transfer(FetchBenchmark):
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
