"""Cell: one combination of parameters of one benchmark, and the key under which its measurements are known."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Measure:
    """How long a cell is measured. Times in nanoseconds; ``timeout_ns`` is for the whole cell, processes' start included."""

    min_time_ns: int = 500_000_000
    warmup_time_ns: int = 100_000_000
    min_iterations: int = 5
    max_iterations: int = 10_000
    traced_iterations: int = 20
    timeout_ns: int = 120_000_000_000


@dataclass(frozen=True)
class Cell:
    """``sweep`` is the part of the experiment that asks for it; it does not enter the key, so that two sweeps share cells."""

    sweep: str
    bench: str
    params: dict[str, Any]
    measure: Measure = field(default_factory=Measure)

    def key(self, code: str) -> str:
        """Twenty hex digits over the benchmark, its parameters, how long it is measured, and the sources ``code``."""
        measure = asdict(self.measure)
        # A cell that got a longer time limit is the same measurement.
        del measure["timeout_ns"]
        canonical = json.dumps([self.bench, self.params, measure, code], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]

    def label(self) -> str:
        """For progress lines and logs: ``transfer transport=grpc nbytes=4096``."""
        return " ".join([self.bench, *(f"{name}={value}" for name, value in self.params.items())])

    def to_json(self) -> dict[str, Any]:
        return {"sweep": self.sweep, "bench": self.bench, "params": self.params, "measure": asdict(self.measure)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        return cls(data["sweep"], data["bench"], data["params"], Measure(**data["measure"]))


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution of a cell in fresh processes: the cell, its round, and its place in the whole order."""

    cell: Cell
    key: str
    round: int
    order: int

    @property
    def run_id(self) -> str:
        return f"{self.key}-{self.round:03d}"

    def to_json(self) -> dict[str, Any]:
        return {"cell": self.cell.to_json(), "key": self.key, "round": self.round, "order": self.order}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        return cls(Cell.from_json(data["cell"]), data["key"], data["round"], data["order"])


def schedule(cells: Sequence[Cell], rounds: int, seed: int, code: str) -> list[Trial]:
    """Every cell once a round, each round in a fresh random order of ``seed``: drift of the machine hits all alike."""
    chooser = random.Random(seed)
    trials: list[Trial] = []
    for round_index in range(rounds):
        turn = list(cells)
        chooser.shuffle(turn)
        trials += [Trial(cell, cell.key(code), round_index, len(trials) + at) for at, cell in enumerate(turn)]
    return trials


@functools.cache
def code_version() -> str:
    """Sixteen hex digits over the sources that a measurement runs through: ``runtime`` and ``harness/bench``.

    Content, not git: a dirty tree and an unpacked archive have a version too. Tests do not count.
    """
    digest = hashlib.sha256()
    for folder in ("runtime", "harness/bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "tests" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
