"""Report: one self-contained HTML page of a run, which a person can mail; no script, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness import records, store, units
from harness.analysis import frames
from harness.analysis.compare import Comparison

_FOLDER = Path(__file__).resolve().parent


def write(
    results: store.Results, comparisons: Sequence[Comparison], pictures: Sequence[Path], sentence: str, path: Path
) -> Path:
    """Write the page of a run to ``path``."""
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    info = results.info[0]
    page = environment.get_template("page.html").render(
        info=info,
        sentence=sentence,
        comparisons=comparisons,
        pictures=[
            {"name": picture.stem, "data": base64.b64encode(picture.read_bytes()).decode()} for picture in pictures
        ],
        tables=tables(results),
        failures=_failures(results.runs),
        machine=[(name, value) for name, value in info["environment"].items() if name != "git"],
    )
    records.write_atomically(path, page.encode())
    return path


def tables(results: store.Results) -> list[dict[str, Any]]:
    """One table a sweep, ready to print: what varies, then time, rate and how much they stand on; all as text."""
    if not (results.runs["status"] == "ok").any():
        return []
    made = []
    for sweep, own in frames.cells(results).groupby("sweep", sort=False):
        shown = [name for name in frames.varying(own) if name not in ("fidelity",)]
        if "transport" in own and "transport" not in shown:
            shown.insert(0, "transport")
        order = [name for name in ("nbytes", "workers", "servers", *shown) if name in shown]
        rates = own["bytes_per_s"].fillna(0).gt(0).any()
        many = own["bench"].isin(["training", "nullstep", "fanin"]).any()
        rows = []
        for _, cell in own.sort_values(list(dict.fromkeys(order))).iterrows():
            row = [_text(name, cell[name]) for name in shown]
            row += [
                units.format_ns(cell["median_ns"]),
                f"{units.format_ns(cell['low_ns'])} to {units.format_ns(cell['high_ns'])}",
                "" if pd.isna(cell["p99_ns"]) else units.format_ns(cell["p99_ns"]),
            ]
            row += [units.format_rate(cell["bytes_per_s"])] if rates else []
            row += [f"{cell['operations_per_s']:.4g}"] if many else []
            made_on = [str(cell["rounds"]), str(cell["samples"]), cell["fidelity"]]
            rows.append(row + made_on)
        columns = [
            *shown,
            "median",
            "95 % interval",
            "p99",
            *(["rate"] if rates else []),
            *(["operations/s"] if many else []),
        ]
        made.append({"name": str(sweep), "columns": [*columns, "rounds", "samples", "measured on"], "rows": rows})
    return made


def _text(name: str, value: Any) -> str:
    if value is None or pd.isna(value):
        return ""
    if name.endswith("bytes") or name == "eager_threshold":
        return units.format_bytes(value)
    return units.format_ns(value) if name.endswith("_ns") else str(value)


def _failures(runs: pd.DataFrame) -> list[dict[str, Any]]:
    bad = runs[runs["status"] != "ok"]
    shown = [name for name in frames.varying(runs) if name in bad.columns]
    found = []
    for _, group in bad.groupby("cell", sort=False):
        first = group.iloc[0]
        parts = [f"{name}={_text(name, first[name])}" for name in shown if _text(name, first[name])]
        found.append(
            {
                "label": " ".join([str(first["sweep"]), *parts]),
                "status": str(first["status"]),
                "count": len(group),
                "error": str(first["error"]),
            }
        )
    return found
