"""Validate: the cost model against steps that were measured on the same machine.

The model is fitted to parts only: alpha and beta of each transport from ``transfer`` runs, what a byte costs where a process
trains beside, and the operations of a step from traces of processes that train alone (as many at once as there are cores, for
they share caches and memory). It then predicts distributed steps, which set none of its parameters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pandas as pd

from harness import store
from harness.analysis import frames
from harness.analysis.costmodel import TransferFit, Workload, fit_transfer, one_machine, predict
from harness.analysis.paper import Printed, printed
from harness.analysis.training_step import Layer
from harness.errors import RecordError

EXPERIMENT = "paper/costmodel"
MARGIN = 0.15
# A sender copies by itself, into memory that the receiver shares.
_COPIED = ("shm",)
_GRADIENTS = "gradients/"
NOBODY = "none"  # beside a process that trains alone
_COLUMNS = ["model", "transport", "workers", "measured", "predicted", "error", "bottleneck"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one process's step without a network, of which every second is some core's."""

    forward: float
    backward: float
    apply: float


def fits(results: store.Results) -> dict[str, TransferFit]:
    """Alpha and beta by transport, from the medians of its transfers."""
    cells = frames.cells(results)
    found = {}
    for transport, own in cells[cells["bench"] == "transfer"].groupby("transport"):
        found[str(transport)] = fit_transfer(own["nbytes"].tolist(), (own["median_ns"] * 1e-9).tolist())
    return found


def processor_fits(results: store.Results) -> dict[str, TransferFit]:
    """The same for the processor time of an end, the mean of both, from the transfers' counters. Where a transport was also
    measured beside a process that trains, beta is that of the busy machine."""
    runs = results.runs[(results.runs["bench"] == "transfer") & (results.runs["status"] == "ok")]
    spent = _processor_ns(frames.passed(results.counters)).groupby("run_id").sum().rename("spent").reset_index()
    both = runs.merge(spent, on="run_id")
    both["seconds"] = both["spent"] * 1e-9 / both["iterations"] / 2
    busy = _busy_betas(results)
    found = {}
    for transport, own in both.groupby("transport"):
        medians = own.groupby("nbytes")["seconds"].median()
        fit = fit_transfer([int(size) for size in medians.index], medians.tolist())
        if transport in busy:
            fit = replace(fit, beta=busy[str(transport)], far_beta=busy[str(transport)])
        found[str(transport)] = fit
    return found


def _busy_betas(results: store.Results) -> dict[str, float]:
    """Bytes that an end handles in a second of its processor's time, the mean of both, beside a process that trains."""
    runs = _alone(results)
    runs = runs[runs["beside"] != NOBODY]
    if runs.empty:
        return {}
    passed = frames.passed(results.counters[results.counters["run_id"].isin(runs["run_id"])])
    if not {"cpu.user", "cpu.system", "transport.bytes_in"} <= set(passed):
        return {}
    ends = passed.assign(spent=_processor_ns(passed)).reset_index()
    ends = ends.merge(runs[["run_id", "beside", "processes"]], on="run_id")
    ends = ends[ends["rank"] >= ends["processes"]]  # the two that exchange tensors
    both = ends.groupby(["beside", "run_id"])[["transport.bytes_in", "spent"]].sum()
    betas = (both["transport.bytes_in"] / (both["spent"] * 1e-9 / 2)).groupby("beside").median()
    return {str(transport): float(beta) for transport, beta in betas.items()}


def _processor_ns(passed: pd.DataFrame) -> pd.Series:
    """Processor time of each rank, in its own code and in the system's."""
    return passed[passed.columns.intersection(["cpu.user", "cpu.system"])].sum(axis=1)


def _alone(results: store.Results) -> pd.DataFrame:
    """Runs of ``alone`` that ended well. Those of an older harness had nobody beside them."""
    runs = results.runs[(results.runs["bench"] == "alone") & (results.runs["status"] == "ok")]
    beside = runs["beside"].fillna(NOBODY) if "beside" in runs else NOBODY
    return runs.assign(beside=beside)


def step_costs(results: store.Results) -> dict[bool, StepCost]:
    """Median cost of a step by whether the variables lie in memory that peers can map, from traces of processes that train
    alone, as many at once as there are cores."""
    runs = _alone(results)
    runs = runs[runs["beside"] == NOBODY]
    if runs.empty:
        return {}
    spans = results.spans.merge(runs[["run_id", "shared"]], on="run_id")
    phase, backward = spans["phase"].astype(str), spans["name"].astype(str).str.startswith(_GRADIENTS)
    part = pd.Series("other", index=spans.index)
    part[(phase == "compute") & ~backward] = "forward"
    part[(phase == "compute") & backward] = "backward"
    part[phase == "apply"] = "apply"
    steps = (
        spans.assign(part=part)
        .groupby(["shared", "run_id", "rank", "step", "part"], observed=True)["elapsed_ns"]
        .sum()
        .unstack(fill_value=0)
    )
    median = steps.groupby("shared").median() * 1e-9
    return {
        bool(shared): StepCost(row.get("forward", 0.0), row.get("backward", 0.0), row.get("apply", 0.0))
        for shared, row in median.iterrows()
    }


def workload(layers: list[Layer], cost: StepCost, batch: int) -> Workload:
    """The step as the model sees it."""
    nbytes = sum(layer.nbytes for layer in layers)
    return Workload(layers, cost.forward, cost.backward, cost.apply / nbytes, batch)


def validate(results: store.Results | None, paper: Printed | None = None) -> pd.DataFrame:
    """Predicted beside measured global steps a second: one row a transport and number of workers, none without results.
    ``error`` is relative, in seconds a step: +0.1 is a prediction 10 % slower than measured."""
    if results is None:
        return pd.DataFrame(columns=_COLUMNS)
    layers = (paper or printed()).layers
    spent = processor_fits(results)
    networks = {name: one_machine(fit, None if name in _COPIED else spent[name]) for name, fit in fits(results).items()}
    costs = step_costs(results)
    measured = frames.cells(results)
    rows = []
    for cell in measured[measured["bench"] == "training"].itertuples():
        batch, workers = int(cell.batch), int(cell.workers)
        # Servers and workers keep all cores busy, however many workers there are.
        cost = costs.get(cell.transport in _COPIED)
        if cost is None or cell.transport not in networks:
            continue
        prediction = predict(
            workload(layers, cost, batch), networks[cell.transport], workers, int(cell.servers), cores=_cores(results)
        )
        steps = cell.operations_per_s / batch
        rows.append(
            {
                "model": cell.model,
                "transport": cell.transport,
                "workers": workers,
                "measured": steps,
                "predicted": prediction.steps_per_second,
                "error": steps / prediction.steps_per_second - 1,
                "bottleneck": prediction.bottleneck,
            }
        )
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table.sort_values(["transport", "workers"], ignore_index=True)


def _cores(results: store.Results) -> int:
    return int(results.info[0]["environment"]["cpus_allowed"])


def main(argv: list[str] | None = None) -> int:
    """Print the table for a stored run (by default the newest of the experiment); 0 if every prediction is within the
    margin, 3 if some are not, 4 if there is nothing to compare, 2 if there is no such run."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        table = validate(store.load(*(arguments or [EXPERIMENT])))
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        table.to_string(index=False, float_format=lambda value: f"{value:.3g}") if len(table) else "nothing to compare"
    )
    return 4 if table.empty else 3 if (table["error"].abs() > MARGIN).any() else 0


if __name__ == "__main__":
    sys.exit(main())
