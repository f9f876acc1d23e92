"""Records: what one trial leaves behind, and the schema of the tables that trials become.

Workers and the runner know only this module, which needs numpy alone, so that the same runner works inside the soft-RoCE guest,
where importing pandas takes 11 s. A trial is one ``.npz`` file, renamed into place when it is complete.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import RecordError

SCHEMA_VERSION = 1

SAMPLE = np.dtype(
    [
        ("iteration", np.int64),
        ("start_ns", np.int64),
        ("elapsed_ns", np.int64),
        ("nbytes", np.int64),
        ("operations", np.int64),
        ("traced", np.bool_),
    ]
)
SPAN = np.dtype(
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

# Columns of the four tables, with unit and meaning; results/README.md is written from the same words. Parameters of the
# benchmark follow in ``runs`` as columns of their own.
RUNS = {
    "run_id": "key of the cell and round; joins the other tables",
    "run": "name of the run's folder",
    "experiment": "name of the experiment",
    "sweep": "part of the experiment that asked for the cell",
    "bench": "name of the benchmark",
    "cell": "hash of parameters, measurement settings and sources",
    "round": "repetition in fresh processes, from 0; figures are paired within a round",
    "order": "place in the interleaved order, from 0",
    "status": "ok, failed, skipped, timeout",
    "error": "why not ok, else empty",
    "fidelity": "on what it was measured: hardware, soft-roce, soft-roce-emulated, loopback, shaped, emulated-compute, simulated",
    "suspect": "why the path or the content is in doubt, else empty",
    "verified": "content was checked before timing",
    "environment": "hash of what run.json says about the machine",
    "code": "hash of the sources that the measurement ran through",
    "started_ns": "Unix time in ns",
    "wall_ns": "start of the processes to their end, ns",
    "iterations": "timed iterations that all ranks agreed on",
}
SAMPLES = {
    "run_id": "joins runs",
    "rank": "process that timed it",
    "iteration": "from 0",
    "start_ns": "monotonic clock of the rank's host, ns",
    "elapsed_ns": "duration, ns",
    "nbytes": "payload bytes moved by this iteration",
    "operations": "messages, images or steps in this iteration, as the benchmark defines",
    "traced": "measured with the tracer on; left out of every statistic except the breakdown into phases",
}
SPANS = {
    "run_id": "joins runs",
    "rank": "process",
    "thread": "thread in that process",
    "step": "the runtime's step, or 0",
    "phase": "queue, serialise, copy, register, request, wire, complete, compute, apply, other",
    "name": "what was done",
    "start_ns": "monotonic clock of the rank's host, ns",
    "elapsed_ns": "duration, ns",
    "nbytes": "bytes concerned",
}
COUNTERS = {
    "run_id": "joins runs",
    "rank": "process",
    "name": "what was counted",
    "before": "value before the timed iterations",
    "after": "value after them",
    "unit": "bytes, ns, count, packets",
}
TABLES: dict[str, dict[str, str]] = {"runs": RUNS, "samples": SAMPLES, "spans": SPANS, "counters": COUNTERS}


@dataclass
class Counter:
    """A figure read before and after the timed iterations."""

    name: str
    before: int
    after: int
    unit: str


@dataclass
class RankRecord:
    """What one process of a trial measured. ``status`` is ok, failed or skipped; ``error`` says why not ok."""

    rank: int
    status: str = "ok"
    error: str = ""
    fidelity: str = ""
    suspect: str = ""
    verified: bool = False
    iterations: int = 0
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, SAMPLE))
    spans: np.ndarray = field(default_factory=lambda: np.zeros(0, SPAN))
    span_names: list[str] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrialRecord:
    """What one trial left behind: the ``runs`` row's own figures, and every rank's record."""

    run_id: str
    key: str
    round: int
    order: int
    sweep: str
    bench: str
    params: dict[str, Any]
    status: str
    error: str
    started_ns: int
    wall_ns: int
    fidelity: str = ""
    ranks: list[RankRecord] = field(default_factory=list)


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name beside ``path`` and rename, so that a reader sees all of it or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror}; what was measured before is kept") from error


def write_rank(path: Path, record: RankRecord) -> None:
    """Store one rank's record; called by the rank itself."""
    write_atomically(path, _pack(_rank_meta(record), {"samples": record.samples, "spans": record.spans}))


def read_rank(path: Path) -> RankRecord:
    """RecordError if the file is absent or damaged."""
    meta, arrays = _unpack(path)
    return _rank_from(meta, arrays["samples"], arrays["spans"])


def write_trial(path: Path, trial: TrialRecord) -> None:
    """Store a trial; called by the runner, once."""
    meta = {name: value for name, value in vars(trial).items() if name != "ranks"}
    meta["schema"] = SCHEMA_VERSION
    meta["ranks"] = [_rank_meta(rank) for rank in trial.ranks]
    arrays = {f"samples{at}": rank.samples for at, rank in enumerate(trial.ranks)}
    arrays |= {f"spans{at}": rank.spans for at, rank in enumerate(trial.ranks)}
    write_atomically(path, _pack(meta, arrays))


def read_trial(path: Path) -> TrialRecord:
    """RecordError if the file is damaged or of another schema."""
    meta, arrays = _unpack(path)
    schema = meta.pop("schema", None)
    if schema != SCHEMA_VERSION:
        raise RecordError(f"{path} has schema {schema}, this version reads {SCHEMA_VERSION}; run the experiment anew")
    ranks = [
        _rank_from(rank, arrays[f"samples{at}"], arrays[f"spans{at}"]) for at, rank in enumerate(meta.pop("ranks"))
    ]
    return TrialRecord(ranks=ranks, **meta)


def _rank_meta(record: RankRecord) -> dict[str, Any]:
    meta = {name: value for name, value in vars(record).items() if name not in ("samples", "spans")}
    meta["counters"] = [vars(counter) for counter in record.counters]
    return meta


def _rank_from(meta: dict[str, Any], samples: np.ndarray, spans: np.ndarray) -> RankRecord:
    counters = [Counter(**counter) for counter in meta.pop("counters")]
    return RankRecord(counters=counters, samples=samples, spans=spans, **meta)


def _pack(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    # A zip of one JSON text and plain .npy members, never a pickle.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("meta.json", json.dumps(meta))
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            archive.writestr(f"{name}.npy", member.getvalue())
    return buffer.getvalue()


def _unpack(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with zipfile.ZipFile(path) as archive:
            meta = json.loads(archive.read("meta.json"))
            arrays = {
                name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
                for name in archive.namelist()
                if name.endswith(".npy")
            }
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path} is damaged ({error}); delete it and resume the run") from error
    return meta, arrays
