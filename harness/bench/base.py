"""Benchmark: what is measured, and the one loop that measures it.

The loop is written once: verify the content, warm up, agree on the number of iterations, time, trace. A benchmark states how
many ranks it needs, sets up, and does one iteration.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from harness import counters
from harness.bench.group import Group
from harness.cell import Measure
from harness.records import SAMPLE, Counter, RankRecord
from runtime.deadline import Deadline
from runtime.errors import ConfigError, VerbflowError
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Options, Transport
from runtime.transport.registry import known, open_transport, transport_class

_CLASSES = {
    "transfer": "harness.bench.transfer:Transfer",
    "stream": "harness.bench.stream:Stream",
    "fanin": "harness.bench.fanin:FanIn",
    "registration": "harness.bench.registration:Registration",
    "overhead": "harness.bench.overhead:Overhead",
    "nullstep": "harness.bench.nullstep:NullStep",
    "training": "harness.bench.training:Training",
    "alone": "harness.bench.alone:Alone",
    "emulated": "harness.bench.emulated:Emulated",
    "perftest": "harness.bench.peers.perftest:Perftest",
    "tensorflow": "harness.bench.peers.tensorflow:TensorFlowFetch",
    "gloo": "harness.bench.peers.gloo:GlooSend",
    "mpi4py": "harness.bench.peers.mpi4py:MpiSend",
}
TRANSPORTS = tuple(known())


class VerificationError(VerbflowError):
    """Bytes that arrived are not those that were sent; the message names the first wrong offset."""


def parameter(
    default: Any,
    meaning: str,
    *,
    unit: str = "count",
    choices: Sequence[Any] | None = None,
    at_least: int = 0,
    at_most: int | None = None,
) -> Any:
    """A field of a benchmark's parameters. ``unit`` is bytes, ns, count, text or flag, and says how values are written."""
    metadata = {"meaning": meaning, "unit": unit, "choices": choices, "at_least": at_least, "at_most": at_most}
    return field(default=default, metadata=metadata)


def transport_parameter(default: str = "grpc") -> Any:
    return parameter(default, "how tensors travel", unit="text", choices=TRANSPORTS)


@dataclass
class RankContext:
    """What a rank knows. ``host`` is the address that its transports bind to."""

    rank: int
    size: int
    group: Group
    measure: Measure
    deadline: Deadline
    folder: Path
    token: str
    host: str = "127.0.0.1"
    tracer: Tracer = field(default_factory=lambda: Tracer(capacity=1 << 16))

    def open(self, transport: str, arena_bytes: int, **params: Any) -> Transport:
        """Open a transport with an arena of its own, touched; close both with ``close_transport``."""
        arena = Arena(arena_bytes, shared=transport == "shm")
        arena.touch()
        options = Options(token=self.token, bind=self.host, task=f"/job:bench/task:{self.rank}", params=params)
        try:
            return open_transport(transport, options, arena, self.tracer)
        except BaseException:
            arena.close()
            raise


def close_transport(transport: Transport) -> None:
    """Close a transport and the arena that was made for it."""
    transport.close()
    transport.arena.close()


class Benchmark(ABC):
    """One thing that is measured. Stateless: what an execution needs is in the state that ``setup`` returns."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Params: ClassVar[type]
    operation: ClassVar[str] = "message"

    @abstractmethod
    def ranks(self, p: Any) -> int:
        """How many processes it takes."""

    @abstractmethod
    def setup(self, ctx: RankContext, p: Any) -> Any:
        """Make everything that an iteration needs, at every rank. May use ``ctx.group``."""

    @abstractmethod
    def once(self, ctx: RankContext, state: Any) -> int:
        """One iteration, at timed ranks; returns payload bytes moved."""

    @abstractmethod
    def verify(self, ctx: RankContext, state: Any) -> None:
        """Check the content that an iteration moves, at every rank; VerificationError. Before any timing."""

    def iterate(self, ctx: RankContext, state: Any, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``count`` iterations: when each began, how long it took (ns), and the payload bytes it moved."""
        starts, ends, moved = (np.zeros(count, np.int64) for _ in range(3))
        once, clock = self.once, time.monotonic_ns
        for at in range(count):
            start = clock()
            nbytes = once(ctx, state)
            end = clock()
            starts[at] = start
            ends[at] = end
            moved[at] = nbytes
        return starts, ends - starts, moved

    def teardown(self, ctx: RankContext, state: Any) -> None:  # noqa: B027  not every benchmark takes something
        """Give back what ``setup`` took, at every rank."""

    def timed(self, ctx: RankContext, p: Any) -> bool:
        """Does this rank run iterations? The others serve."""
        return ctx.rank == 0

    def bytes_per_iteration(self, p: Any) -> int:
        """Payload bytes that one iteration moves, for plans."""
        return int(getattr(p, "nbytes", 0))

    def operations(self, p: Any) -> int:
        """How many ``operation`` are in one iteration."""
        return 1

    def transport_totals(self, ctx: RankContext, state: Any) -> dict[str, int] | None:
        """What this rank's transport says it did so far, by name; None where there is none to ask."""
        return None

    def tracer(self, ctx: RankContext, state: Any) -> Tracer:
        """Where this rank's spans are recorded."""
        return ctx.tracer

    def suspicion(self, ctx: RankContext, p: Any, before: dict[str, int], after: dict[str, int], moved: int) -> str:
        """Proof of path: a sentence if the transport's counters do not agree with the ``moved`` payload bytes that this rank
        timed, else empty."""
        return ""

    def fidelity(self, p: Any) -> str:
        """On what it is measured, as far as the transport can tell."""
        return str(transport_class(p.transport).probe().fidelity)

    def environment(self, p: Any) -> dict[str, str]:
        """Variables that must be set before numpy loads."""
        return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def known_benchmarks() -> list[str]:
    """Names that ``benchmark`` takes."""
    return list(_CLASSES)


def benchmark(name: str) -> Benchmark:
    """The benchmark called ``name``; ConfigError lists the known ones. Its module is imported only now."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown benchmark {name!r}; known: {', '.join(_CLASSES)}")
    module, attribute = _CLASSES[name].split(":")
    made: Benchmark = getattr(import_module(module), attribute)()
    return made


def parameters_of(bench: Benchmark) -> dict[str, dataclasses.Field]:
    """The benchmark's parameters by name."""
    return {item.name: item for item in dataclasses.fields(bench.Params)}


def measure_rank(bench: Benchmark, p: Any, ctx: RankContext) -> RankRecord:
    """One rank's part of a trial. Collective: every rank of the group calls it with the same parameters.

    Verify, warm up for ``warmup_time_ns``, let rank 0 choose n from the slowest rank's median, time n iterations with the
    garbage collector off, then a few more with the tracer on. Errors are raised after the others have been told.
    """
    record = RankRecord(ctx.rank, fidelity=bench.fidelity(p))
    state: Any = None
    ready = False
    try:
        state = bench.setup(ctx, p)
        ready = True
        bench.verify(ctx, state)
        record.verified = True
        ctx.group.barrier()
        iterations, traced = _agree(bench, p, ctx, state)
        record.iterations = iterations
        timed = bench.timed(ctx, p)
        before, totals_before = counters.snapshot(), bench.transport_totals(ctx, state)
        ctx.group.barrier()
        samples = _time(bench, p, ctx, state, iterations if timed else 0, traced=False)
        ctx.group.barrier()
        totals_after, after = bench.transport_totals(ctx, state), counters.snapshot()
        record.counters = counters.differences(before, after) + _transport_counters(totals_before, totals_after)
        if timed and totals_before is not None and totals_after is not None:
            moved = int(samples["nbytes"].sum())
            record.suspect = bench.suspicion(ctx, p, totals_before, totals_after, moved)
        tracer = bench.tracer(ctx, state)
        tracer.clear()
        tracer.enabled = traced > 0
        ctx.group.barrier()
        more = _time(bench, p, ctx, state, traced if timed else 0, traced=True)
        ctx.group.barrier()
        tracer.enabled = False
        record.samples = np.concatenate([samples, more])
        record.spans, record.span_names = tracer.spans()
        ctx.group.barrier()
    except BaseException as error:
        ctx.group.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        if ready:
            bench.teardown(ctx, state)
    return record


def _agree(bench: Benchmark, p: Any, ctx: RankContext, state: Any) -> tuple[int, int]:
    # Ranks of a synchronous benchmark must run equally many iterations in every part, so the length of the warm-up is
    # agreed on too, from one first iteration.
    measure = ctx.measure
    timed = bench.timed(ctx, p)

    def slowest(count: int) -> int:
        elapsed = _time(bench, p, ctx, state, count, traced=False)["elapsed_ns"] if timed and count else np.zeros(1)
        return max(1, *(int(value) for value in ctx.group.exchange(int(np.median(elapsed)))))

    first = slowest(1)
    warm = min(measure.max_iterations, math.ceil(measure.warmup_time_ns / first))
    typical = slowest(warm) if warm > 1 else first
    wanted = math.ceil(measure.min_time_ns / typical)
    iterations = max(measure.min_iterations, min(measure.max_iterations, wanted))
    traced = min(measure.traced_iterations, iterations)
    chosen: list[int] = ctx.group.broadcast([iterations, traced])
    return chosen[0], chosen[1]


def _time(bench: Benchmark, p: Any, ctx: RankContext, state: Any, count: int, traced: bool) -> np.ndarray:
    if count == 0:
        return np.zeros(0, SAMPLE)
    collecting = gc.isenabled()
    gc.disable()
    try:
        starts, elapsed, moved = bench.iterate(ctx, state, count)
    finally:
        if collecting:
            gc.enable()
    samples = np.zeros(len(elapsed), SAMPLE)
    samples["iteration"] = np.arange(len(elapsed))
    samples["start_ns"] = starts
    samples["elapsed_ns"] = elapsed
    samples["nbytes"] = moved
    samples["operations"] = bench.operations(p)
    samples["traced"] = traced
    return samples


def _transport_counters(before: dict[str, int] | None, after: dict[str, int] | None) -> list[Counter]:
    if before is None or after is None:
        return []
    return [
        Counter(f"transport.{name}", before.get(name, 0), value, "bytes" if "bytes" in name else "count")
        for name, value in after.items()
    ]


def pattern(nbytes: int, seed: int) -> np.ndarray:
    """Bytes whose value depends on position and seed, so that a wrong offset, order or sender shows: the
    multiplicative hash (Knuth 6.4) does not repeat within a page, a chunk or a slot."""
    position = np.arange(nbytes, dtype=np.uint32)
    return ((position * np.uint32(2654435761) + np.uint32(seed) * np.uint32(40503)) >> np.uint32(13)).astype(np.uint8)


def check_pattern(received: np.ndarray, seed: int, what: str) -> None:
    """VerificationError with the first wrong offset unless ``received`` (uint8) is ``pattern(len, seed)``."""
    expected = pattern(len(received), seed)
    if not np.array_equal(received, expected):
        at = int(np.argmax(received != expected))
        raise VerificationError(f"{what}: byte {at} of {len(received)} is {int(received[at])}, not {int(expected[at])}")
