"""Store: folders of results, one a run, and the one call that loads any set of them into dataframes.

    results/scratch/<experiment>/<run>/      not in git; what was just measured
    results/published/<experiment>/<run>/    in git; what the notebooks and the README show

An experiment's name may have a slash (``paper/fig1_tcp``), and so has its folder.

A run's folder holds ``run.json`` and the tables runs, samples, spans and counters as parquet; a scratch run also its raw
trials, logs, pictures and report. Everything is written to a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import environment, records, tables
from harness.errors import BusyError, RecordError

if TYPE_CHECKING:
    import pandas as pd


def results_root() -> Path:
    """VERBFLOW_RESULTS, or ``results`` of this checkout."""
    named = os.environ.get("VERBFLOW_RESULTS")
    return Path(named) if named else Path(__file__).resolve().parent.parent / "results"


def new_run(experiment: str, root: Path | None = None) -> Path:
    """A fresh folder for a run of ``experiment``; two processes that ask at once get two."""
    parent = (root or results_root()) / "scratch" / experiment
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for count in range(1000):
            folder = parent / (f"{stamp}-{count}" if count else stamp)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise RecordError(f"cannot make a folder for the run in {parent}: {error.strerror}") from error
    raise RecordError(f"{parent} already has a thousand runs of this second")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run for this process; BusyError if another one does. The kernel frees it when the process dies."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"run {folder.name} is being worked on by another process") from None
        yield


def runs_of(experiment: str, root: Path | None = None) -> list[Path]:
    """Scratch runs of an experiment that have anything to show, oldest first."""
    parent = (root or results_root()) / "scratch" / experiment
    return sorted(path for path in parent.glob("*") if (path / "plan.json").exists()) if parent.is_dir() else []


def find_run(name: str, root: Path | None = None) -> Path:
    """The folder that ``name`` means: a path, ``experiment/run``, a run's name, an experiment (its newest run, scratch before
    published), or ``published/experiment`` (its newest published run)."""
    top = root or results_root()
    direct = Path(name)
    if (direct / "run.json").exists():
        return direct
    candidates = [path.parent for path in top.glob("*/**/run.json")]
    for path in candidates:
        if name in (path.name, f"{_experiment_of(path, top)}/{path.name}"):
            return path
    named = [
        path
        for path in candidates
        if name in (_experiment_of(path, top), f"{path.relative_to(top).parts[0]}/{_experiment_of(path, top)}")
    ]
    # What was just measured before what was published long ago.
    named.sort(key=lambda path: (path.relative_to(top).parts[0] != "published", path.name))
    if named:
        return named[-1]
    known = sorted({f"{_experiment_of(path, top)}/{path.name}" for path in candidates})
    import difflib

    near = difflib.get_close_matches(name, known + sorted({_experiment_of(path, top) for path in candidates}), 3)
    listed = f"near: {', '.join(near)}" if near else f"known: {', '.join(known[-8:]) or 'none yet'}"
    raise RecordError(f"no stored run is called {name!r}; {listed}")


def newest_runs(
    kinds: Sequence[str] = ("scratch", "published"), root: Path | None = None
) -> dict[tuple[str, str], Path]:
    """(experiment, place) -> its newest stored run, of the first of ``kinds`` that has one. The place is ``guest`` for profile
    soft-roce, else ``here``: what was measured in one says nothing about the other."""
    top = root or results_root()
    found: dict[tuple[str, str], Path] = {}
    for kind in kinds:
        newest: dict[tuple[str, str], Path] = {}
        for path in sorted((top / kind).glob("**/run.json"), key=lambda path: path.parent.name):
            place = "guest" if read_info(path.parent).get("profile") == "soft-roce" else "here"
            newest[_experiment_of(path.parent, top), place] = path.parent
        found = {**newest, **found}
    return found


def _experiment_of(folder: Path, top: Path) -> str:
    """The experiment of a run's folder, by where it lies."""
    return folder.parent.relative_to(top / folder.relative_to(top).parts[0]).as_posix()


def compact(folder: Path, info: dict[str, Any], wanted: Collection[str] | None = None) -> None:
    """Make the four tables and ``run.json`` from the raw trials of a run. ``info`` is what run.json says besides the
    environment; ``wanted`` are the run_ids that belong to the plan (a resumed run may hold trials of older sources). Raw trials
    stay, so that a run can be resumed; damaged ones are left out and named in run.json."""
    trials, damaged = [], []
    for path in sorted((folder / "raw").glob("*.npz")):
        if wanted is not None and path.stem not in wanted:
            continue
        try:
            trials.append(records.read_trial(path))
        except RecordError as error:
            damaged.append(str(error))
    trials.sort(key=lambda trial: trial.order)
    try:
        machine = json.loads((folder / "environment.json").read_text())
    except (OSError, ValueError):
        machine = environment.describe()
    machine_id = environment.identity(machine)
    for name, table in tables.make_tables(trials, folder.name, info, machine_id).items():
        tables.write_table(folder / f"{name}.parquet", table)
    content = {
        "schema": records.SCHEMA_VERSION,
        "run": folder.name,
        **info,
        "fidelities": sorted({trial.fidelity for trial in trials if trial.fidelity}),
        "environment_id": machine_id,
        "environment": machine,
        "damaged": damaged,
    }
    records.write_atomically(folder / "run.json", json.dumps(content, indent=1).encode())


def publish(folder: Path, label: str, root: Path | None = None) -> Path:
    """Copy a run's tables, run.json and pictures to results/published under ``label``, for git."""
    info = read_info(folder)
    target = (root or results_root()) / "published" / info["experiment"] / label
    target.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.parquet"), folder / "run.json", folder / "verdict.json"]:
        if path.exists():
            shutil.copyfile(path, target / path.name)
    if (folder / "pictures").is_dir():
        shutil.copytree(folder / "pictures", target / "pictures", dirs_exist_ok=True)
    return target


def read_info(folder: Path) -> dict[str, Any]:
    """A run's ``run.json``; RecordError if it is absent, damaged or of another schema."""
    path = folder / "run.json"
    try:
        info: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordError(
            f"{folder} has no run.json: it is not a stored run, or it was interrupted (resume it)"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error}); rebuild it with `verbflow report {folder.name}`") from error
    tables.check_schema(info.get("schema"), path)
    return info


class Results:
    """Any set of runs as tidy dataframes, each read when first asked for."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)

    @functools.cached_property
    def info(self) -> list[dict[str, Any]]:
        return [read_info(folder) for folder in self.folders]

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row a trial, with every parameter as a column."""
        return tables.read_frame([folder / "runs.parquet" for folder in self.folders])

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """One row an iteration."""
        return tables.read_frame([folder / "samples.parquet" for folder in self.folders])

    @functools.cached_property
    def spans(self) -> pd.DataFrame:
        return tables.read_frame([folder / "spans.parquet" for folder in self.folders])

    @functools.cached_property
    def counters(self) -> pd.DataFrame:
        return tables.read_frame([folder / "counters.parquet" for folder in self.folders])


def load(*runs: str | Path, root: Path | None = None) -> Results:
    """Load runs by path or name (see ``find_run``)."""
    return Results([run if isinstance(run, Path) else find_run(run, root) for run in runs])
