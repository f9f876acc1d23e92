"""Paper: runs what can run here of the paper's experiments, and rebuilds what follows from them: tables, verdicts, pictures,
and the notebook, executed, that shows them beside the printed numbers."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness import campaign, store
from harness.cell import ROOT
from harness.definition import load_experiment
from harness.errors import HarnessError
from harness.progress import Progress
from harness.records import write_atomically

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOK = ROOT / "notebooks" / "05_paper.ipynb"
# The figures first: what is measured while the machine is fresh is what the verdicts stand on.
_FIGURES = ("fig1_tcp", "fig5_rdma", "fig6_rdma", "fig5_ipoib", "fig6_ipoib")
_STUDIES = ("costmodel", "microbenchmarks", "protocols", "optimisations", "polling", "registration", "rendezvous")
_LONG = ("servers", "synchrony", "models")
PARTS = {
    "full": tuple(f"paper/{name}" for name in (*_FIGURES, *_STUDIES, *_LONG)),
    "quick": tuple(f"paper/{name}" for name in (*_FIGURES[:4], *_STUDIES)),
}
RATES_GBIT = (1, 25, 100, 200, 400)
# Payload of a link: the paper's QDR link of 40 Gb/s (32 after its 8b/10b code) carried 2.47 GB/s.
_PAYLOAD = 0.62
_WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1000)
_SERVERS = (1, 4, 16)


@dataclass
class Evidence:
    """What is known about the paper's figures. ``validation`` is empty where the cost model's runs are missing."""

    points: pd.DataFrame
    runs: pd.DataFrame
    beside: pd.DataFrame
    parameters: pd.DataFrame
    judged: pd.DataFrame
    validation: pd.DataFrame
    scaling: pd.DataFrame
    folders: list[Path] = field(default_factory=list)


def perform(name: str, profile: str, progress: Progress, resume: bool = True) -> dict[str, int]:
    """Run one experiment here, as ``verbflow run`` does; an unfinished run of it is taken up again. The answer counts how its
    trials ended. HarnessError or UnavailableError where it cannot run."""
    experiment = load_experiment(name, profile)
    place = campaign.choose_place(experiment)
    plan = campaign.make_plan(experiment, None, place)
    folder, _ = campaign.open_run(plan, resume)
    with store.locked(folder):
        campaign.describe(folder, plan, experiment, place)
        counts = campaign.perform(folder, plan, place, progress)
        campaign.finish(folder)
    return counts


def collect(kinds: Sequence[str] = ("scratch", "published"), root: Path | None = None) -> Evidence:
    """Everything that the newest stored run of each experiment says; ``kinds`` as in ``store.newest_runs``."""
    from harness.analysis import claims, evidence, paper, validate

    printed = paper.printed()
    newest = store.newest_runs(kinds, root)
    runs = evidence.runs_table([store.load(folder) for folder in newest.values()])
    simulated, parameters = paper.simulated(printed)
    points = evidence.points_table(printed, simulated, evidence.measured_points(printed, runs))
    fitted = newest.get((validate.EXPERIMENT, "here"))
    validation = validate.validate(store.load(fitted) if fitted else None, printed)
    return Evidence(
        points,
        runs,
        evidence.misses(printed, points),
        parameters,
        claims.judge_all(claims.load(), {"points": points, "runs": runs}),
        validation,
        scaling(),
        list(newest.values()),
    )


def scaling() -> pd.DataFrame:
    """The paper's job on cluster A's hosts with faster links, more workers and more servers."""
    from harness.analysis import costmodel, paper
    from harness.analysis.simulation import Network
    from harness.analysis.training_step import Layer

    printed = paper.printed()
    compute = printed.single_step_seconds["A"]
    # Nothing overlaps, so that the model is one layer (see ``analysis.paper``).
    whole = [Layer("model", printed.model_bytes, 1.0)]
    job = costmodel.Workload(whole, compute / 3, 2 * compute / 3, 0.0, batch=24, overlap=False)
    networks = {f"{rate} Gb/s": Network(rate * 1e9 / 8 * (0.97 if rate == 1 else _PAYLOAD)) for rate in RATES_GBIT}
    return costmodel.scaling(job, networks, _WORKERS, _SERVERS)


def publish(label: str, root: Path | None = None) -> list[Path]:
    """Copy the newest scratch run of every experiment of the paper to ``results/published``, in place of what was there."""
    newest = {key: folder for key, folder in store.newest_runs(("scratch",), root).items() if key[0] in PARTS["full"]}
    for name in {name for name, _ in newest}:
        shutil.rmtree((root or store.results_root()) / "published" / name, ignore_errors=True)
    return [
        store.publish(folder, label if place == "here" else f"{label}-{place}", root)
        for (_, place), folder in sorted(newest.items())
    ]


def label() -> str:
    """Date and size of this machine, for published runs."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{os.cpu_count()}cpu"


def write_tables(found: Evidence, folder: Path) -> list[Path]:
    """The tables as CSV and the verdicts as JSON, for readers without Python and for diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "points": found.points.drop(columns="speed"),
        "beside_printed": found.beside,
        "parameters": found.parameters,
        "claims": found.judged,
        "validation": found.validation,
        "scaling": found.scaling,
    }
    written = []
    for name, table in tables.items():
        path = folder / f"{name}.csv"
        write_atomically(path, table.to_csv(index=False, float_format="%.6g").encode())
        written.append(path)
    return written


def run_notebook(kinds: str, target: Path, path: Path = NOTEBOOK) -> Path:
    """Execute the notebook on stored results (``published``, or ``scratch`` for what was just measured) and store it with its
    outputs as ``target``; in ``notebooks`` they have none. HarnessError if a cell fails."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    os.environ["VERBFLOW_PAPER"] = kinds
    try:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    except CellExecutionError as error:
        raise HarnessError(f"{path.name}: {error}") from error
    finally:
        del os.environ["VERBFLOW_PAPER"]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran is no result
    write_atomically(target, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())
    return target


def rebuild(profile: str, tell: Callable[[str], None]) -> Evidence:
    """Tables and notebook from what is stored; the full profile also publishes, the quick one leaves published results alone."""
    root = store.results_root()
    if profile == "full":
        for folder in publish(label()):
            tell(f"published {folder.parent.name}")
        kinds, folder = "published", root / "published" / "paper"
    else:
        kinds, folder = "scratch", root / "scratch" / "paper" / "summary"
    found = collect((kinds,))
    write_tables(found, folder)
    tell(f"notebook: {run_notebook(kinds, folder / NOTEBOOK.name)}")
    return found
