"""Figures: which pictures a run's results allow, drawn and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes

from harness import store, units
from harness.analysis import frames
from harness.analysis.compare import Comparison
from harness.plots import bars, breakdown, curves, palette


def comparison_frame(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Comparisons as the table that pictures and reports take."""
    return pd.DataFrame(
        [
            {
                "sweep": item.sweep,
                "about": item.about,
                "contender": str(item.contender.get("transport", next(iter(item.contender.values()), ""))),
                "setting": _setting(item),
                "ratio": item.ratio.value,
                "low": item.ratio.low,
                "high": item.ratio.high,
                "verdict": item.verdict,
                "rounds": item.rounds,
                "fidelity": item.fidelity,
                **item.setting,
                **{name: value for name, value in item.contender.items() if name != "transport"},
            }
            for item in comparisons
        ]
    )


def draw_all(results: store.Results, comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Save every picture that the results allow as PNG; the answer is their paths. Needs no display."""
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    cells = frames.cells(results)
    saved: list[Path] = []

    def save(name: str, draw: Callable[..., Axes], frame: pd.DataFrame, **how: Any) -> None:
        import matplotlib.pyplot as plt

        with plt.style.context(palette.STYLE):
            figure, ax = plt.subplots(layout="constrained")
            draw(frame, ax, **how)
            path = folder / f"{name}.png"
            figure.savefig(path)
            plt.close(figure)
            saved.append(path)

    for (sweep, fidelity), own in cells.groupby(["sweep", "fidelity"], sort=False):
        name = f"{sweep}" if cells.groupby("sweep")["fidelity"].nunique()[sweep] == 1 else f"{sweep}-{fidelity}"
        line_by = _line_by(own)
        if "nbytes" in own and own["nbytes"].nunique() > 1:
            save(f"{name}-latency", curves.latency_over_size, own, by=line_by)
            if (own["bytes_per_s"] > 0).any():
                save(f"{name}-bandwidth", curves.bandwidth_over_size, own, by=line_by)
        if "workers" in own and own["bench"].iloc[0] == "training":
            save(f"{name}-rate", bars.rate_bars, own)
            if own["workers"].nunique() > 1:
                save(f"{name}-scaling", bars.scaling, own)
    phases = frames.breakdown(results)
    for (sweep, fidelity), own in phases.groupby(["sweep", "fidelity"], sort=False):
        chosen = own
        if "nbytes" in own and own["nbytes"].nunique() > 1:
            chosen = own[own["nbytes"] == own["nbytes"].max()]
        if chosen.groupby("phase")["ns"].sum().drop("other", errors="ignore").sum() > 0:
            save(f"{sweep}-{fidelity}-phases", breakdown.phase_stack, chosen)
    table = comparison_frame(comparisons)
    for sweep, own in table.groupby("sweep", sort=False) if len(table) else []:
        if "nbytes" in own and own["nbytes"].nunique() > 1:
            save(f"{sweep}-speedup", curves.ratio_over_size, own)
        else:
            save(f"{sweep}-speedup", bars.speedup_bars, own, mixed=True)
    return saved


def _line_by(cells: pd.DataFrame) -> str:
    """The parameter that tells lines apart: the transport, unless something else varies and it does not."""
    if "transport" in cells and cells["transport"].nunique() > 1:
        return "transport"
    others = [name for name in frames.varying(cells) if name != "nbytes"]
    return next((name for name in others if cells[name].nunique() < 8), "bench")


def _setting(item: Comparison) -> str:
    parts = [
        units.format_bytes(value) if name.endswith("bytes") else f"{name} {value}"
        for name, value in item.setting.items()
    ]
    return ", ".join(parts) or item.about
