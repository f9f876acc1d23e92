"""Curves over tensor size: latency and bandwidth, one line a transport, with 95 % intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from harness import units
from harness.analysis import frames
from harness.plots import palette
from harness.plots.ground import stamp_fidelity

_STROKES = ("-", "--", "-.", ":")


def latency_over_size(cells: pd.DataFrame, ax: Axes, *, by: str = "transport", mixed: bool = False) -> Axes:
    """Median time of a fetch over tensor size, both axes logarithmic. ``cells`` as ``frames.cells`` gives them."""
    for name, line, style in _lines(cells, by):
        ax.plot(line["nbytes"], line["median_ns"] / 1e3, color=palette.colour(name), **style)
        ax.fill_between(
            line["nbytes"].astype(float),
            (line["low_ns"] / 1e3).astype(float),
            (line["high_ns"] / 1e3).astype(float),
            color=palette.colour(name),
            alpha=0.2,
            linewidth=0,
        )
    ax.set_ylabel("time of one fetch, median (us)")
    return _finish(cells, ax, mixed, "Latency over tensor size")


def bandwidth_over_size(cells: pd.DataFrame, ax: Axes, *, by: str = "transport", mixed: bool = False) -> Axes:
    """Payload bytes a second over tensor size, both axes logarithmic."""
    moving = cells[cells["bytes_per_s"] > 0]  # null moves nothing, and a logarithm knows no zero
    for name, line, style in _lines(moving, by):
        ax.plot(line["nbytes"], line["bytes_per_s"] / 1e9, color=palette.colour(name), **style)
    ax.set_ylabel("payload rate, median (GB/s)")
    return _finish(cells, ax, mixed, "Bandwidth over tensor size")


def ratio_over_size(comparisons: pd.DataFrame, ax: Axes) -> Axes:
    """How many times faster the contender is over tensor size, with 95 % intervals; 1 is the same.

    Columns: nbytes, contender, low, high, ratio (contender's time over baseline's), fidelity.
    """
    for name, line, style in _lines(comparisons.rename(columns={"contender": "transport"}), "transport"):
        speed = 1 / line["ratio"].astype(float)
        low, high = 1 / line["high"].to_numpy(float), line["low"].to_numpy(float)
        # One round has no interval (0 to infinity): no bar of error then.
        low, high = np.where(low > 0, low, speed), np.divide(1, high, out=speed.to_numpy().copy(), where=high > 0)
        error = np.abs(np.vstack([speed - low, high - speed]))
        ax.errorbar(line["nbytes"], speed, yerr=error, capsize=3, color=palette.colour(name), **style)
    ax.axhline(1, color="0.4", linewidth=1)
    ax.set_ylabel("times faster than the baseline")
    return _finish(comparisons, ax, True, "Speed-up over tensor size")


def _lines(frame: pd.DataFrame, by: str) -> list[tuple[str, pd.DataFrame, dict[str, Any]]]:
    """A value of ``by``, its rows by size, and how its line is drawn. Where something else varies too, each of its values has a
    line of its own, in the same colour and another stroke."""
    if "nbytes" not in frame or frame.empty:
        raise ValueError("this picture needs rows with a tensor size (nbytes)")
    lines: list[tuple[str, pd.DataFrame, dict[str, Any]]] = []
    told = {by, "nbytes", "setting", "ratio", "low", "high", "verdict", "rounds"}
    others = [name for name in frames.varying(frame) if name not in told]
    for name, rows in frame.groupby(by, sort=False):
        own = [other for other in others if rows[other].nunique() > 1] if rows["nbytes"].duplicated().any() else []
        parts = rows.groupby(own, sort=True, dropna=False) if own else [((), rows)]
        for at, (values, part) in enumerate(parts):
            extra = "".join(f", {key} {value}" for key, value in zip(own, values))
            style = {"marker": "o", "linestyle": _STROKES[at % 4], "label": palette.label(str(name)) + extra}
            lines.append((str(name), part.sort_values("nbytes"), style))
    return lines


def _finish(frame: pd.DataFrame, ax: Axes, mixed: bool, title: str) -> Axes:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.format_bytes(value)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.tick_params(axis="x", labelrotation=30)
    ax.set_xlabel("tensor size")
    ax.set_title(title)
    ax.legend()
    return stamp_fidelity(frame, ax, mixed)
