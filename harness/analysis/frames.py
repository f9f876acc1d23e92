"""Frames: stored results as the tidy dataframes that pictures, notebooks and conclusions start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness import records, store
from harness.analysis import stats

_MEASURED = (
    "median_ns", "p25_ns", "p75_ns", "p99_ns", "samples", "bytes_per_s", "operations_per_s", "ns_per_byte",
    "ns_per_operation", "low_ns", "high_ns", "rounds",
)  # fmt: skip

# When threads overlap, an instant belongs to the first of these: work before waiting, so that what is left as wire or queue
# is what the step really waited for.
_PRECEDENCE = ("compute", "apply", "serialise", "copy", "register", "complete", "request", "wire", "queue", "other")


def load(*runs: str | Path) -> store.Results:
    """Stored runs by path or name, for example ``load("alexnet_local")``."""
    return store.load(*runs)


def parameters(runs: pd.DataFrame) -> list[str]:
    """Columns of ``runs``, or of ``trials``, that are parameters of the benchmark."""
    return [name for name in runs.columns if name not in records.RUNS and name not in _MEASURED]


def varying(runs: pd.DataFrame) -> list[str]:
    """Parameters that take more than one value."""
    return [name for name in parameters(runs) if runs[name].nunique(dropna=False) > 1]


def trials(results: store.Results) -> pd.DataFrame:
    """One row a measured trial: the columns of ``runs``, and what its untraced iterations took.

    ``median_ns`` over all timed ranks' iterations, ``p99_ns`` (missing below 100 samples), ``bytes_per_s`` and ``operations_per_s``
    summed over ranks, ``ns_per_byte`` and ``ns_per_operation`` their inverses.
    """
    samples = results.samples[~results.samples["traced"]]
    rows = []
    for run_id, group in samples.groupby("run_id", observed=True, sort=False):
        elapsed = group["elapsed_ns"].to_numpy()
        quarter, median, three = np.percentile(elapsed, [25, 50, 75])
        # A rank's own duration, so that clocks of two hosts are never subtracted.
        ranks = group.groupby("rank").agg(
            first=("start_ns", "min"),
            last=("start_ns", "max"),
            nbytes=("nbytes", "sum"),
            operations=("operations", "sum"),
        )
        last = group.sort_values("start_ns").groupby("rank")["elapsed_ns"].last()
        duration = (ranks["last"] - ranks["first"] + last) * 1e-9
        rates = [(ranks["nbytes"] / duration).sum(), (ranks["operations"] / duration).sum()]
        rows.append([run_id, median, quarter, three, stats.percentile(elapsed, 99), len(elapsed), *rates])
    measured = pd.DataFrame(rows, columns=["run_id", *_MEASURED[:7]])
    measured["p99_ns"] = measured["p99_ns"].astype(float)
    measured["run_id"] = measured["run_id"].astype(str)
    measured["ns_per_byte"] = 1e9 / measured["bytes_per_s"].replace(0, np.nan)
    measured["ns_per_operation"] = 1e9 / measured["operations_per_s"].replace(0, np.nan)
    runs = results.runs[results.runs["status"] == "ok"]
    return runs.merge(measured, on="run_id", how="inner").reset_index(drop=True)


def trial_samples(results: store.Results) -> dict[str, np.ndarray]:
    """run_id -> untraced durations in ns, all timed ranks together."""
    samples = results.samples[~results.samples["traced"]]
    return {str(run_id): group.to_numpy() for run_id, group in samples.groupby("run_id", observed=True)["elapsed_ns"]}


def passed(counters: pd.DataFrame) -> pd.DataFrame:
    """By how much each counter rose while a rank was timed: one row a ``run_id`` and ``rank`` (the index), one column a counter."""
    rose = counters.assign(rose=(counters["after"] - counters["before"]).astype(float))
    return rose.pivot_table(index=["run_id", "rank"], columns="name", values="rose")


def cells(results: store.Results) -> pd.DataFrame:
    """One row a cell and fidelity: its parameters, and the median over its rounds with a 95 % interval.

    ``median_ns``, ``low_ns``, ``high_ns`` by the hierarchical bootstrap; ``bytes_per_s`` and ``operations_per_s`` are medians
    over rounds; ``rounds`` and ``samples`` say on how much they stand.
    """
    measured = trials(results)
    durations = trial_samples(results)
    keys = ["experiment", "sweep", "bench", "fidelity", *parameters(measured)]
    rows = []
    for values, group in measured.groupby(keys, dropna=False, sort=False):
        interval = stats.median_interval([durations[run_id] for run_id in group["run_id"]])
        rows.append(
            {
                **dict(zip(keys, values)),
                "median_ns": interval.value,
                "low_ns": interval.low,
                "high_ns": interval.high,
                "p99_ns": group["p99_ns"].median(),
                "bytes_per_s": group["bytes_per_s"].median(),
                "operations_per_s": group["operations_per_s"].median(),
                "rounds": group["round"].nunique(),
                "samples": group["samples"].sum(),
            }
        )
    return pd.DataFrame(rows)


def breakdown(results: store.Results, across_ranks: bool = True) -> pd.DataFrame:
    """Mean ns of an iteration in each phase, one row a trial and phase, with the trial's parameters.

    From the traced iterations. At every instant exactly one phase counts (``_PRECEDENCE``), so that the phases sum to the
    end-to-end time; what no span covers is ``other``. ``across_ranks`` lets spans of other processes explain what a rank
    waited for, which needs one clock: ranks on one host.
    """
    traced = results.samples[results.samples["traced"]]
    spans = {str(run_id): group for run_id, group in results.spans.groupby("run_id", observed=True)}
    order = {name: at for at, name in enumerate(_PRECEDENCE)}
    rows = []
    for run_id, group in traced.groupby("run_id", observed=True, sort=False):
        own = spans.get(str(run_id))
        if own is None:
            continue
        rank_sums = []
        for rank, iterations in group.groupby("rank"):
            chosen = own if across_ranks else own[own["rank"] == rank]
            starts = chosen["start_ns"].to_numpy()
            ends = starts + chosen["elapsed_ns"].to_numpy()
            codes = chosen["phase"].astype(str).map(order).to_numpy()
            for start, elapsed in zip(iterations["start_ns"].to_numpy(), iterations["elapsed_ns"].to_numpy()):
                rank_sums.append(_attribute(start, start + elapsed, starts, ends, codes))
        mean = np.mean(rank_sums, axis=0)
        rows += [{"run_id": str(run_id), "phase": name, "ns": mean[at]} for name, at in order.items()]
    frame = pd.DataFrame(rows, columns=["run_id", "phase", "ns"])
    return frame.merge(results.runs, on="run_id", how="inner")


def _attribute(start: int, end: int, starts: np.ndarray, ends: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Nanoseconds of [start, end) that belong to each phase."""
    inside = (ends > start) & (starts < end)
    begin, finish, phase = np.maximum(starts[inside], start), np.minimum(ends[inside], end), codes[inside]
    cuts = np.unique(np.concatenate([begin, finish, [start, end]]))
    best = np.full(len(cuts) - 1, len(_PRECEDENCE) - 1)
    for first, last, code in zip(np.searchsorted(cuts, begin), np.searchsorted(cuts, finish), phase):
        np.minimum(best[first:last], code, out=best[first:last])
    return np.bincount(best, weights=np.diff(cuts), minlength=len(_PRECEDENCE))


def require_one_fidelity(frame: pd.DataFrame, mixed: bool = False) -> Sequence[str]:
    """The fidelities in a frame; ValueError if there are several and nobody said that mixing them is meant."""
    found = sorted(frame["fidelity"].dropna().unique())
    if len(found) > 1 and not mixed:
        raise ValueError(
            f"these rows were measured on different grounds ({', '.join(found)}) and must not stand side by side; "
            f"choose one, or say mixed=True, and the picture will say so"
        )
    return found
