"""Validate: the cost model against steps that were measured on the same machine.

The model is fitted to parts only: alpha and beta of each transport from ``transfer`` runs, the operations of a step from traces
of processes that train alone (as many at once as there are workers, for they share caches and memory). It then predicts
distributed steps that it has not seen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pandas as pd

from harness import store
from harness.analysis import frames
from harness.analysis.costmodel import TransferFit, Workload, fit_transfer, one_machine, predict
from harness.analysis.paper import Printed, printed
from harness.analysis.simulation import Layer

EXPERIMENT = "paper/costmodel"
MARGIN = 0.15
_GRADIENTS = "gradients/"
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


def step_costs(results: store.Results) -> dict[int, StepCost]:
    """Median cost of a step by number of processes that train alone at once, from their traces."""
    runs = results.runs[(results.runs["bench"] == "alone") & (results.runs["status"] == "ok")]
    spans = results.spans.merge(runs[["run_id", "processes"]], on="run_id")
    phase, backward = spans["phase"].astype(str), spans["name"].astype(str).str.startswith(_GRADIENTS)
    part = pd.Series("other", index=spans.index)
    part[(phase == "compute") & ~backward] = "forward"
    part[(phase == "compute") & backward] = "backward"
    part[phase == "apply"] = "apply"
    steps = (
        spans.assign(part=part)
        .groupby(["processes", "run_id", "rank", "step", "part"], observed=True)["elapsed_ns"]
        .sum()
        .unstack(fill_value=0)
    )
    median = steps.groupby("processes").median() * 1e-9
    return {
        int(processes): StepCost(row.get("forward", 0.0), row.get("backward", 0.0), row.get("apply", 0.0))
        for processes, row in median.iterrows()
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
    networks = {name: one_machine(fit) for name, fit in fits(results).items()}
    costs = step_costs(results)
    measured = frames.cells(results)
    rows = []
    for cell in measured[measured["bench"] == "training"].itertuples():
        batch, workers = int(cell.batch), int(cell.workers)
        cost = costs.get(workers)
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
    margin, 3 if some are not, 4 if there is nothing to compare."""
    arguments = sys.argv[1:] if argv is None else argv
    table = validate(store.load(*(arguments or [EXPERIMENT])))
    print(
        table.to_string(index=False, float_format=lambda value: f"{value:.3g}") if len(table) else "nothing to compare"
    )
    return 4 if table.empty else 3 if (table["error"].abs() > MARGIN).any() else 0


if __name__ == "__main__":
    sys.exit(main())
