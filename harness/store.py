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
import io
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import environment, records
from harness.errors import BusyError, RecordError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_SCHEMA_KEY = b"verbflow.schema"
_PHASES = ("other", "queue", "serialise", "copy", "register", "request", "wire", "complete", "compute", "apply")


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
    for name, table in _tables(trials, folder.name, info, machine_id).items():
        _write_table(folder / f"{name}.parquet", table)
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
    _check_schema(info.get("schema"), path)
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
        return _frame([folder / "runs.parquet" for folder in self.folders])

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """One row an iteration."""
        return _frame([folder / "samples.parquet" for folder in self.folders])

    @functools.cached_property
    def spans(self) -> pd.DataFrame:
        return _frame([folder / "spans.parquet" for folder in self.folders])

    @functools.cached_property
    def counters(self) -> pd.DataFrame:
        return _frame([folder / "counters.parquet" for folder in self.folders])


def load(*runs: str | Path, root: Path | None = None) -> Results:
    """Load runs by path or name (see ``find_run``)."""
    return Results([run if isinstance(run, Path) else find_run(run, root) for run in runs])


def _frame(paths: Sequence[Path]) -> pd.DataFrame:
    import pyarrow as pa

    with ThreadPoolExecutor(min(8, max(1, len(paths)))) as pool:
        tables = list(pool.map(_read_table, paths))
    if not tables:
        raise RecordError("no runs to load")
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    frame = table.to_pandas()
    for field in table.schema:
        # pandas turns integers with gaps into floats; a size of 4096.0 bytes is a lie about its type.
        if pa.types.is_integer(field.type) and table[field.name].null_count:
            frame[field.name] = table[field.name].to_pandas(types_mapper={field.type: _nullable()}.get)
    return frame


def _nullable() -> Any:
    import pandas as pd

    return pd.Int64Dtype()


def _read_table(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read(use_threads=False)
    except FileNotFoundError:
        raise RecordError(
            f"{path} does not exist; rebuild the tables with `verbflow report {path.parent.name}`"
        ) from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise RecordError(
            f"{path} is truncated or damaged ({reason}); rebuild it with `verbflow report {path.parent.name}`, "
            f"or restore the file"
        ) from error
    found = (table.schema.metadata or {}).get(_SCHEMA_KEY)
    _check_schema(int(found) if found and found.isdigit() else None, path)
    return table.replace_schema_metadata(None)


def _check_schema(found: int | None, path: Path) -> None:
    if found != records.SCHEMA_VERSION:
        age = "an older" if found is None or found < records.SCHEMA_VERSION else "a newer"
        raise RecordError(
            f"{path} was written by {age} version (schema {found}, this one reads {records.SCHEMA_VERSION}); "
            f"read it with that version, or run the experiment anew"
        )


def _write_table(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    marked = table.replace_schema_metadata({_SCHEMA_KEY: str(records.SCHEMA_VERSION)})
    buffer = io.BytesIO()
    # A table of a few rows is read faster without dictionaries and statistics, and a thousand of them are read at once.
    small = marked.num_rows < 1000
    pq.write_table(marked, buffer, compression="zstd", use_dictionary=not small, write_statistics=not small)
    records.write_atomically(path, buffer.getvalue())


def _tables(
    trials: Sequence[records.TrialRecord], run: str, info: dict[str, Any], machine_id: str
) -> dict[str, pa.Table]:
    import pyarrow as pa

    return {
        "runs": pa.Table.from_pylist(
            [_run_row(trial, run, info, machine_id) for trial in trials], schema=_runs_schema(trials)
        ),
        "samples": _concatenate([_samples(trial.run_id, rank) for trial in trials for rank in trial.ranks], _SAMPLES),
        "spans": _concatenate([_spans(trial.run_id, rank) for trial in trials for rank in trial.ranks], _SPANS),
        "counters": pa.Table.from_pylist(
            [
                {"run_id": trial.run_id, "rank": rank.rank, **vars(counter)}
                for trial in trials
                for rank in trial.ranks
                for counter in rank.counters
            ],
            schema=_schema(_COUNTERS),
        ),
    }


_INTEGER_COLUMNS = {"round", "order", "started_ns", "wall_ns", "iterations"}
_SAMPLES = {
    "run_id": "dictionary", "rank": "int64", "iteration": "int64", "start_ns": "int64", "elapsed_ns": "int64",
    "nbytes": "int64", "operations": "int64", "traced": "bool",
}  # fmt: skip
_SPANS = {
    "run_id": "dictionary", "rank": "int64", "thread": "int64", "step": "int64", "phase": "dictionary",
    "name": "dictionary", "start_ns": "int64", "elapsed_ns": "int64", "nbytes": "int64",
}  # fmt: skip
_COUNTERS = {
    "run_id": "string", "rank": "int64", "name": "string", "before": "int64", "after": "int64", "unit": "string",
}  # fmt: skip


def _schema(columns: dict[str, str]) -> pa.Schema:
    import pyarrow as pa

    types = {
        "string": pa.string(), "int64": pa.int64(), "bool": pa.bool_(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }  # fmt: skip
    return pa.schema([(name, types[kind]) for name, kind in columns.items()])


def _runs_schema(trials: Sequence[records.TrialRecord]) -> pa.Schema:
    import pyarrow as pa

    fields = []
    for name in records.RUNS:
        kind = pa.int64() if name in _INTEGER_COLUMNS else pa.bool_() if name == "verified" else pa.string()
        fields.append((name, kind))
    kinds: dict[str, Any] = {}
    for trial in trials:
        for name, value in trial.params.items():
            kind = _parameter_type(value)
            kinds[name] = kind if kinds.get(name, kind) == kind else pa.string()
    return pa.schema([*fields, *((name, kind) for name, kind in kinds.items() if name not in records.RUNS)])


def _parameter_type(value: Any) -> pa.DataType:
    import pyarrow as pa

    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64()
    return pa.float64() if isinstance(value, float) else pa.string()


def _run_row(trial: records.TrialRecord, run: str, info: dict[str, Any], machine_id: str) -> dict[str, Any]:
    suspects = "; ".join(f"rank {rank.rank}: {rank.suspect}" for rank in trial.ranks if rank.suspect)
    return {
        **trial.params,
        "run_id": trial.run_id,
        "run": run,
        "experiment": info["experiment"],
        "sweep": trial.sweep,
        "bench": trial.bench,
        "cell": trial.key,
        "round": trial.round,
        "order": trial.order,
        "status": trial.status,
        "error": trial.error,
        "fidelity": trial.fidelity,
        "suspect": suspects,
        "verified": bool(trial.ranks) and all(rank.verified for rank in trial.ranks),
        "environment": machine_id,
        "code": info.get("code", ""),
        "started_ns": trial.started_ns,
        "wall_ns": trial.wall_ns,
        "iterations": max((rank.iterations for rank in trial.ranks), default=0),
    }


def _samples(run_id: str, rank: records.RankRecord) -> dict[str, Any]:
    count = len(rank.samples)
    columns = {name: rank.samples[name] for name in records.SAMPLE.names or ()}
    return {"run_id": _constant(run_id, count), "rank": np.full(count, rank.rank), **columns}


def _spans(run_id: str, rank: records.RankRecord) -> dict[str, Any]:
    import pyarrow as pa

    spans, count = rank.spans, len(rank.spans)
    names = pa.DictionaryArray.from_arrays(pa.array(spans["name"].astype(np.int32)), pa.array(rank.span_names or [""]))
    phases = pa.DictionaryArray.from_arrays(pa.array(spans["phase"].astype(np.int32)), pa.array(_PHASES))
    return {
        "run_id": _constant(run_id, count),
        "rank": np.full(count, rank.rank),
        "thread": spans["thread"],
        "step": spans["step"],
        "phase": phases,
        "name": names,
        "start_ns": spans["start_ns"],
        "elapsed_ns": spans["elapsed_ns"],
        "nbytes": spans["nbytes"],
    }


def _constant(text: str, count: int) -> pa.DictionaryArray:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))


def _concatenate(parts: Sequence[dict[str, Any]], columns: dict[str, str]) -> pa.Table:
    import pyarrow as pa

    schema = _schema(columns)
    tables = [pa.table([part[name] for name in columns], schema=schema) for part in parts if len(part["rank"])]
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks() if tables else schema.empty_table()
