"""Segment: what compiling makes of a partition, and the executor runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.execution.rendezvous import Edge
from runtime.graph.ops import Call
from runtime.trace import Phase


@dataclass(frozen=True, slots=True)
class Label:
    """What a call is, for errors and traces."""

    phase: Phase
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Calls that run in a row, once the segments ``before`` have run and ``events`` have happened."""

    calls: list[Call]
    labels: list[Label]
    before: list[int]
    events: list[int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A Recv: its event's number, its edge, and where the tensor goes."""

    event: int
    edge: Edge
    into: np.ndarray
