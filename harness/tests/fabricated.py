"""Fabricated runs: stored results with known figures, for the tests of everything behind the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness import records, store
from harness.cell import Cell, Measure
from harness.records import RankRecord, TrialRecord

DEFINITION = {
    "conclude": [
        {"sweep": "latency", "baseline": {"transport": "grpc"}, "contender": {"transport": "shm"}, "about": "latency"},
    ]
}


def fetch_ns(params: dict[str, Any]) -> float:
    """shm takes a tenth of grpc: 30 us or 300 us, plus 1 GB/s."""
    return (30_000 if params["transport"] == "shm" else 300_000) + params["nbytes"]


def make_run(
    root: Path,
    name: str = "run1",
    rounds: int = 5,
    sizes: Sequence[int] = (8, 65536),
    transports: Sequence[str] = ("grpc", "shm"),
    took: Callable[[dict[str, Any]], float] = fetch_ns,
    fidelity: Callable[[str], str] = lambda transport: "loopback",
    samples: int = 120,
    failed: str = "",
) -> Path:
    """A run of ``transfer`` cells under ``root``; ``failed`` names a transport whose trials all failed."""
    folder = root / "scratch" / "fabricated" / name
    (folder / "raw").mkdir(parents=True)
    chooser = np.random.default_rng(len(name))
    order = 0
    for number in range(rounds):
        for transport in transports:
            for nbytes in sizes:
                params = {"transport": transport, "nbytes": nbytes, "protocol": "auto"}
                key = Cell("latency", "transfer", params, Measure()).key("code")
                trial = TrialRecord(
                    f"{key}-{number:03d}", key, number, order, "latency", "transfer", params, "ok", "", 1, 10**9,
                    fidelity(transport), [_rank(took(params), nbytes, samples, chooser)],
                )  # fmt: skip
                if transport == failed:
                    trial.status, trial.error, trial.ranks = "failed", "rank 0: it broke", []
                records.write_trial(folder / "raw" / f"{trial.run_id}.npz", trial)
                order += 1
    (folder / "environment.json").write_text(json.dumps({"cpu": "a processor", "git": {}}))
    info = {
        "experiment": "fabricated", "title": "Fabricated", "question": "", "profile": "full", "place": "nowhere",
        "code": "code", "rounds": rounds, "definition": DEFINITION,
    }  # fmt: skip
    store.compact(folder, info)
    return folder


def _rank(ns: float, nbytes: int, count: int, chooser: np.random.Generator) -> RankRecord:
    rank = RankRecord(0, fidelity="loopback", verified=True, iterations=count)
    elapsed = (ns * np.exp(chooser.normal(0, 0.01) + chooser.normal(0, 0.02, count + 4))).astype(np.int64)
    rank.samples = np.zeros(count + 4, records.SAMPLE)
    rank.samples["iteration"] = np.arange(count + 4)
    rank.samples["elapsed_ns"] = elapsed
    rank.samples["start_ns"] = np.concatenate([[1000], 1000 + np.cumsum(elapsed)[:-1]])
    rank.samples["nbytes"] = nbytes
    rank.samples["operations"] = 1
    rank.samples["traced"] = np.arange(count + 4) >= count
    traced = rank.samples[count:]
    # Of every traced iteration a half is wire, and a quarter of it is a copy inside the wire's span.
    rank.spans = np.zeros(2 * len(traced), records.SPAN)
    for at, sample in enumerate(traced):
        half = sample["elapsed_ns"] // 2
        rank.spans[2 * at] = (6, 0, 1, 0, sample["start_ns"], half, nbytes)
        rank.spans[2 * at + 1] = (3, 1, 2, 0, sample["start_ns"], half // 2, nbytes)
    rank.span_names = ["reply", "payload"]
    rank.counters = [records.Counter("transport.bytes_in", 0, nbytes * count, "bytes")]
    return rank
