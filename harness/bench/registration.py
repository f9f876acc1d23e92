"""registration: make memory usable by the adapter, or copy into memory that is usable already; where the two cross.

Frey and Alonso ("Minimizing the hidden cost of RDMA", ICDCS'09) measured that registering costs more than copying below
some size; the runtime's arena pays for neither.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from harness.bench.base import Benchmark, RankContext, VerificationError, close_transport, parameter, pattern
from harness.bench.fetching import arena_bytes
from harness.bench.settings import binding_parameter
from runtime.transport.base import Transport


@dataclass(frozen=True)
class RegistrationParams:
    transport: str = parameter("verbs", "whose registration", unit="text", choices=("verbs",))
    mode: str = parameter(
        "register",
        "register and deregister warm memory; copy warm memory into the arena; map, touch and register fresh memory",
        unit="text",
        choices=("register", "copy", "fresh"),
    )
    nbytes: int = parameter(1 << 20, "buffer size", unit="bytes", at_least=1, at_most=1 << 30)
    binding: str = binding_parameter()


@dataclass
class RegistrationState:
    p: RegistrationParams
    transport: Transport
    source: np.ndarray
    arena: np.ndarray


class Registration(Benchmark):
    name = "registration"
    summary = "register memory, or copy into registered memory"
    Params = RegistrationParams
    operation = "buffer"

    def ranks(self, p: RegistrationParams) -> int:
        return 1

    def setup(self, ctx: RankContext, p: RegistrationParams) -> RegistrationState:
        own = {"binding": p.binding} if p.binding != "auto" else {}
        # Nothing is kept in the cache of registrations, so that every acquire registers and every release deregisters.
        transport = ctx.open(p.transport, arena_bytes(p.nbytes), registration_entries=0, **own)
        source = np.frombuffer(mmap.mmap(-1, p.nbytes), np.uint8)
        source[:] = pattern(p.nbytes, seed=3)
        return RegistrationState(p, transport, source, transport.arena.allocate(p.nbytes, "landing").memory)

    def verify(self, ctx: RankContext, state: RegistrationState) -> None:
        self.once(ctx, state)
        if state.p.mode == "copy" and not np.array_equal(state.arena, state.source):
            raise VerificationError("the copy in the arena differs from its source")

    def once(self, ctx: RankContext, state: RegistrationState) -> int:
        if state.p.mode == "copy":
            np.copyto(state.arena, state.source)
            return state.p.nbytes
        buffer = state.source
        if state.p.mode == "fresh":
            buffer = np.frombuffer(mmap.mmap(-1, state.p.nbytes), np.uint8)
            buffer[:: mmap.PAGESIZE] = 1
        cache = state.transport.registrations  # type: ignore[attr-defined]
        cache.release(cache.acquire(buffer))
        return state.p.nbytes

    def teardown(self, ctx: RankContext, state: RegistrationState) -> None:
        close_transport(state.transport)
