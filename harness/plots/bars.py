"""Bars: rates side by side, speed-ups with their intervals, and scaling over workers with the ideal line."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.plots import palette
from harness.plots.ground import stamp_fidelity


def speedup_bars(comparisons: pd.DataFrame, ax: Axes, *, mixed: bool = False) -> Axes:
    """How many times faster the contender is, one bar a setting, with 95 % intervals; 1 is the same.

    Columns: setting (text), contender, ratio, low, high (contender's time over baseline's), fidelity.
    """
    places = np.arange(len(comparisons))
    speed = 1 / comparisons["ratio"].astype(float).to_numpy()
    low, high = 1 / comparisons["high"].to_numpy(float), comparisons["low"].to_numpy(float)
    # One round has no interval (0 to infinity): no bar of error then.
    low, high = np.where(low > 0, low, speed), np.divide(1, high, out=speed.copy(), where=high > 0)
    colours = [palette.colour(name) for name in comparisons["contender"]]
    ax.bar(places, speed, color=colours, yerr=np.abs([speed - low, high - speed]), capsize=3, width=0.6)
    ax.axhline(1, color="0.4", linewidth=1)
    ax.set_xticks(places, comparisons["setting"], rotation=30, ha="right")
    ax.set_ylabel("times faster than the baseline")
    ax.set_title("Speed-up")
    return stamp_fidelity(comparisons, ax, mixed)


def rate_bars(cells: pd.DataFrame, ax: Axes, *, operation: str = "images", mixed: bool = False) -> Axes:
    """Operations a second by transport and number of workers."""
    frame = cells.assign(workers=cells.get("workers", 1))
    names, workers = list(frame["transport"].unique()), sorted(frame["workers"].unique())
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        own = frame[frame["transport"] == name].groupby("workers")["operations_per_s"].median().reindex(workers)
        ax.bar(
            np.arange(len(workers)) + (at - (len(names) - 1) / 2) * width,
            own.to_numpy(float),
            width * 0.92,
            color=palette.colour(name),
            label=palette.label(name),
        )
    ax.set_xticks(np.arange(len(workers)), [str(count) for count in workers])
    ax.set_xlabel("workers")
    ax.set_ylabel(f"{operation}/s, median over rounds")
    ax.set_title("Training rate")
    ax.legend()
    return stamp_fidelity(cells, ax, mixed)


def scaling(cells: pd.DataFrame, ax: Axes, *, operation: str = "images", mixed: bool = False) -> Axes:
    """Operations a second over workers, one line a transport, and the ideal line from the fastest single worker."""
    for name, line in cells.groupby("transport", sort=False):
        own = line.groupby("workers")["operations_per_s"].median().sort_index()
        ax.plot(own.index, own.to_numpy(), marker="o", color=palette.colour(str(name)), label=palette.label(str(name)))
    fewest = int(cells["workers"].min())
    best = cells[cells["workers"] == fewest]["operations_per_s"].max()
    counts = sorted(cells["workers"].unique())
    ax.plot(counts, [best * count / fewest for count in counts], linestyle=":", color="0.4", label="ideal")
    ax.set_xticks(counts)
    ax.set_xlabel("workers")
    ax.set_ylabel(f"{operation}/s, median over rounds")
    ax.set_title("Scaling over workers")
    ax.legend()
    return stamp_fidelity(cells, ax, mixed)
