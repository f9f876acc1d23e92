"""Tables: a run's trials as four parquet files (runs, samples, spans, counters), and those files as dataframes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import records
from harness.errors import RecordError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_SCHEMA_KEY = b"verbflow.schema"
_PHASES = ("other", "queue", "serialise", "copy", "register", "request", "wire", "complete", "compute", "apply")
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


def read_frame(paths: Sequence[Path]) -> pd.DataFrame:
    """Several runs' tables of one kind, one after the other; RecordError names one that cannot be read."""
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
    check_schema(int(found) if found and found.isdigit() else None, path)
    return table.replace_schema_metadata(None)


def check_schema(found: int | None, path: Path) -> None:
    """RecordError unless ``path`` was written with the schema that is read here."""
    if found != records.SCHEMA_VERSION:
        age = "an older" if found is None or found < records.SCHEMA_VERSION else "a newer"
        raise RecordError(
            f"{path} was written by {age} version (schema {found}, this one reads {records.SCHEMA_VERSION}); "
            f"read it with that version, or run the experiment anew"
        )


def write_table(path: Path, table: pa.Table) -> None:
    """Replace ``path`` by this table, marked with the schema's version."""
    import pyarrow.parquet as pq

    marked = table.replace_schema_metadata({_SCHEMA_KEY: str(records.SCHEMA_VERSION)})
    buffer = io.BytesIO()
    # A table of a few rows is read faster without dictionaries and statistics, and a thousand of them are read at once.
    small = marked.num_rows < 1000
    pq.write_table(marked, buffer, compression="zstd", use_dictionary=not small, write_statistics=not small)
    records.write_atomically(path, buffer.getvalue())


def make_tables(
    trials: Sequence[records.TrialRecord], run: str, info: dict[str, Any], machine_id: str
) -> dict[str, pa.Table]:
    """The four tables of a run, by name."""
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
