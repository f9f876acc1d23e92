"""Evidence: stored runs as the two tables that claims are judged by.

``points`` are the paper's figures: cluster, transport (``single``: without distribution), workers, global steps a second, and
the way to each number. ``runs`` is one row a trial of any experiment, with its parameters; its way is the fidelity.
``speed`` is anything a second. Both have as many rows of a kind as there were fresh runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness import store
from harness.analysis import frames
from harness.analysis.paper import PRINTED, Printed, beside_printed

# What a trial of these counts as speed; of all others it is iterations a second.
_RATED = {
    "training": "operations_per_s",
    "emulated": "operations_per_s",
    "stream": "bytes_per_s",
    "fanin": "bytes_per_s",
}
_EMPTY = ["experiment", "way", "speed"]


def runs_table(results: Sequence[store.Results]) -> pd.DataFrame:
    """One row a measured trial of any run, with ``way`` and ``speed``. Suspect trials are left out."""
    tables = []
    for one in results:
        frame = frames.trials(one)
        frame = frame[frame["suspect"] == ""]
        if frame.empty:
            continue
        speed = 1e9 / frame["median_ns"]
        for bench, column in _RATED.items():
            speed = speed.where(frame["bench"] != bench, frame[column])
        frame = frame.merge(cores(one.counters), on="run_id", how="left")
        tables.append(frame.assign(way=frame["fidelity"], speed=speed.to_numpy(float)))
    if not tables:
        return pd.DataFrame(columns=_EMPTY)
    return pd.concat(tables, ignore_index=True)


def cores(counters: pd.DataFrame) -> pd.DataFrame:
    """How many processors a trial's processes kept busy while it was timed, together: ``run_id``, ``cores``."""
    by_name = frames.passed(counters)
    if not {"cpu.user", "cpu.system", "clock.monotonic"} <= set(by_name):
        return pd.DataFrame({"run_id": pd.Series(dtype=str), "cores": pd.Series(dtype=float)})
    share = (by_name["cpu.user"] + by_name["cpu.system"]) / by_name["clock.monotonic"]
    return share.groupby("run_id").sum().rename("cores").reset_index()


def measured_points(paper: Printed, runs: pd.DataFrame, path: Path = PRINTED) -> pd.DataFrame:
    """The points of the figures among ``runs``. Those of one worker, and of none, set the rates that the others run at."""
    with path.open("rb") as file:
        known = tomllib.load(file)["experiments"]
    rows = []
    for run in runs.itertuples():
        place = known.get(run.experiment)
        if place is None or (place["way"] == "hardware" and run.way != "hardware"):
            continue
        workers = 0 if run.sweep == "single" else int(run.workers)
        rows.append(
            {
                "figure": place["figure"],
                "cluster": place["cluster"],
                "transport": run.sweep,
                "workers": workers,
                "steps_per_second": run.operations_per_s / run.batch,
                "way": place["way"],
                "calibrates": place["way"] == "emulated" and workers <= 1,
            }
        )
    return pd.DataFrame(rows, columns=[*paper.points.columns])


def single_points(paper: Printed) -> pd.DataFrame:
    """The bars without distribution, as printed and as the simulation takes them."""
    rows = [
        {
            "figure": "figure5" if cluster == "A" else "figure6",
            "cluster": cluster,
            "transport": "single",
            "workers": 0,
            "steps_per_second": 1 / seconds,
            "way": way,
            "calibrates": way != "printed",
        }
        for cluster, seconds in paper.single_step_seconds.items()
        for way in ("printed", "simulated")
    ]
    return pd.DataFrame(rows)


def points_table(paper: Printed, simulated: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Printed, simulated and measured points, with ``speed``."""
    parts = [part for part in (paper.points, single_points(paper), simulated, measured) if not part.empty]
    points = pd.concat(parts, ignore_index=True)
    return points.assign(speed=points.steps_per_second)


def misses(paper: Printed, points: pd.DataFrame, margin: float = 0.15) -> pd.DataFrame:
    """Points that set no parameter beside the printed ones; ``miss`` where they are further than ``margin`` from them. The
    error is relative, in seconds a step: +0.1 is 10 % slower than printed."""
    shown = points[(points.transport != "single") & (points.way != "printed")]
    where = ["figure", "cluster", "transport", "workers", "way"]
    median = shown.groupby(where, as_index=False).agg(
        steps_per_second=("steps_per_second", "median"), calibrates=("calibrates", "first")
    )
    known = paper.points[["cluster", "transport", "workers"]]
    beside = beside_printed(paper, median.merge(known, on=["cluster", "transport", "workers"]))
    return beside.assign(miss=(beside.error.abs() > margin) & ~beside.calibrates.astype(bool))
