"""Tracer: a preallocated ring of spans, and the one enumeration of phases that they belong to."""

from __future__ import annotations

import enum
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class Phase(enum.IntEnum):
    """Where time goes. Spans of one thread are exclusive, so the phases of a step sum to its end-to-end time, and what
    is left is shown as OTHER."""

    OTHER = 0
    QUEUE = 1
    SERIALISE = 2
    COPY = 3
    REGISTER = 4
    REQUEST = 5
    WIRE = 6
    COMPLETE = 7
    COMPUTE = 8
    APPLY = 9


SPAN_DTYPE = np.dtype(
    [
        ("phase", np.int8),
        ("name", np.int32),
        ("thread", np.int64),
        ("step", np.int64),
        ("start_ns", np.int64),
        ("elapsed_ns", np.int64),
        ("nbytes", np.int64),
    ]
)


class Tracer:
    """Records spans into a ring of fixed size; the oldest are overwritten and counted in ``dropped``.

    Any thread may record. Switched off (the default) a span costs one attribute look-up, so hot code asks
    ``if tracer.enabled`` first.
    """

    def __init__(self, capacity: int = 1 << 16, enabled: bool = False) -> None:
        self.enabled = enabled
        self._ring = np.zeros(capacity, SPAN_DTYPE)
        # next() of a count is one bytecode that holds the GIL: a lock-free ticket.
        self._ticket = itertools.count()
        self._recorded = 0
        self._names: dict[str, int] = {}
        self._name_guard = threading.Lock()

    def record(self, phase: Phase, name: str, step: int, start_ns: int, end_ns: int, nbytes: int = 0) -> None:
        """Store one span. Times are of ``time.monotonic_ns`` in this process."""
        if not self.enabled:
            return
        ticket = next(self._ticket)
        self._recorded = ticket + 1
        code = self._names.get(name)
        if code is None:
            with self._name_guard:
                code = self._names.setdefault(name, len(self._names))
        self._ring[ticket % len(self._ring)] = (
            phase, code, threading.get_ident(), step, start_ns, end_ns - start_ns, nbytes,
        )  # fmt: skip

    @contextmanager
    def span(self, phase: Phase, name: str, step: int = 0, nbytes: int = 0) -> Iterator[None]:
        """Time a block; for code off the hot path."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(phase, name, step, start, time.monotonic_ns(), nbytes)

    @property
    def dropped(self) -> int:
        """Spans that were overwritten before anybody read them."""
        return max(0, self._recorded - len(self._ring))

    def spans(self) -> tuple[np.ndarray, list[str]]:
        """A copy of the recorded spans, oldest first, and the names that their ``name`` field indexes."""
        count, size = self._recorded, len(self._ring)
        ring = self._ring[:count].copy() if count <= size else np.roll(self._ring, -(count % size))
        return ring, list(self._names)

    def clear(self) -> None:
        """Forget all spans. Not to be called while others record."""
        self._ticket = itertools.count()
        self._recorded = 0


def chrome_trace(spans: np.ndarray, names: list[str], process: str) -> str:
    """Spans as Chrome's trace-event JSON (open in Perfetto or chrome://tracing); times in microseconds."""
    events = [
        {
            "ph": "X",
            "name": names[span["name"]],
            "cat": Phase(int(span["phase"])).name.lower(),
            "pid": process,
            "tid": int(span["thread"]),
            "ts": span["start_ns"] / 1e3,
            "dur": span["elapsed_ns"] / 1e3,
            "args": {"step": int(span["step"]), "bytes": int(span["nbytes"])},
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
