"""Pictures of the paper's figures: redrawn from its printed numbers, and the same from ours; errors and scaling."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

COLOURS = {"tcp": "#0072B2", "ipoib": "#56B4E9", "rdma": "#D55E00", "single": "#8C8C8C"}
NAMES = {"tcp": "gRPC over TCP, 1 Gb/s", "ipoib": "gRPC over IPoIB", "rdma": "RDMA", "single": "one node"}
GLOBAL_STEPS = 300
_WAYS = {"printed": "printed by the paper", "emulated": "emulated", "simulated": "simulated", "hardware": "measured"}


def figure1(points: pd.DataFrame, ax: Axes, way: str) -> Axes:
    """Seconds for 300 global steps over TCP on cluster A, by workers; the single node beside."""
    return _seconds(points, ax, way, ("tcp",), "Fig. 1")


def figure5(points: pd.DataFrame, ax: Axes, way: str) -> Axes:
    """Seconds for 300 global steps on cluster A, by workers and network."""
    return _seconds(points, ax, way, ("tcp", "ipoib", "rdma"), "Fig. 5")


def figure6(points: pd.DataFrame, ax: Axes, way: str, cluster: str) -> Axes:
    """Global steps a second by workers and network, one line a network."""
    own = points[(points["way"] == way) & (points["cluster"] == cluster)]
    for transport, line in own[own["transport"] != "single"].groupby("transport"):
        rates = line.groupby("workers")["steps_per_second"].median()
        ax.plot(rates.index, rates.to_numpy(), marker="o", color=COLOURS[str(transport)], label=NAMES[str(transport)])
    single = own[own["transport"] == "single"]["steps_per_second"]
    if len(single):
        ax.axhline(single.median(), color=COLOURS["single"], linestyle=":", label=NAMES["single"])
    ax.set_xlabel("workers")
    ax.set_ylabel("global steps/s")
    ax.set_title(f"Fig. 6, cluster {cluster}")
    ax.set_title(_WAYS[way], loc="right", fontsize=8, fontweight="normal", color="0.35")
    if len(own):
        ax.legend()
    return ax


def errors(beside: pd.DataFrame, ax: Axes, *, margin: float = 0.15) -> Axes:
    """Relative error of each point against the printed one, in time a step; points that set a parameter are hollow."""
    order = beside.sort_values(["cluster", "transport", "workers"])
    places: dict[tuple[str, str, int], int] = {}
    for row in order.itertuples():
        places.setdefault((row.cluster, row.transport, row.workers), len(places))
    for way, marker in (("simulated", "s"), ("emulated", "o"), ("hardware", "D")):
        own = order[order["way"] == way]
        for row in own.itertuples():
            colour = COLOURS[row.transport]
            ax.plot(
                places[row.cluster, row.transport, row.workers],
                100 * row.error,
                marker=marker,
                linestyle="none",
                color=colour,
                markerfacecolor="none" if row.calibrates else colour,
            )
        if len(own):
            ax.plot([], [], marker=marker, linestyle="none", color="0.3", label=way)
    ax.axhspan(-100 * margin, 100 * margin, color="0.9", zorder=0)
    ax.axhline(0, color="0.4", linewidth=1)
    ax.set_xticks(range(len(places)), [f"{c} {t} {n}" for c, t, n in places], rotation=90, fontsize=7)
    ax.set_ylabel("time a step against printed (%)")
    ax.set_title("Error, point by point")
    if places:
        ax.legend()
    return ax


def scaling_curves(scaling: pd.DataFrame, ax: Axes, *, servers: int) -> Axes:
    """Steps a second over workers, one line a network, each with a mark where another bottleneck begins. ``scaling`` as
    ``costmodel.scaling`` gives it."""
    own = scaling[scaling["servers"] == servers]
    colours = _shades(list(own["network"].unique()))
    for name, line in own.groupby("network", sort=False):
        line = line.sort_values("workers")
        ax.plot(line["workers"], line["steps_per_second"], color=colours[str(name)], label=str(name))
        changed = line["bottleneck"] != line["bottleneck"].shift()
        for row in line[changed].iloc[1:].itertuples():
            ax.plot(row.workers, row.steps_per_second, marker="o", color=colours[str(name)])
            ax.annotate(
                f"{row.bottleneck} from {row.workers}",
                (row.workers, row.steps_per_second),
                textcoords="offset points",
                xytext=(4, -9),
                fontsize=6,
                color=colours[str(name)],
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("workers")
    ax.set_ylabel("global steps/s")
    ax.set_title(f"{servers} parameter server{'s' if servers > 1 else ''}")
    ax.legend(fontsize=7)
    return ax


def predictions(table: pd.DataFrame, ax: Axes) -> Axes:
    """Predicted and measured steps a second of the cost model's validation, side by side."""
    places = np.arange(len(table))
    ax.bar(places - 0.2, table["measured"], 0.38, color="#009E73", label="measured")
    ax.bar(places + 0.2, table["predicted"], 0.38, color="#BDBDBD", label="predicted")
    for place, row in zip(places, table.itertuples()):
        ax.annotate(f"{100 * row.error:+.0f} %", (place + 0.2, row.predicted), ha="center", va="bottom", fontsize=8)
    names = [f"{row.transport}, {row.workers} worker{'s' if row.workers > 1 else ''}" for row in table.itertuples()]
    ax.set_xticks(places, names)
    ax.set_ylabel("global steps/s")
    ax.set_title("Cost model: error in time a step")
    ax.legend()
    return ax


def _seconds(points: pd.DataFrame, ax: Axes, way: str, transports: tuple[str, ...], title: str) -> Axes:
    own = points[(points["way"] == way) & (points["cluster"] == "A")]
    shown = own[own["transport"].isin(transports)]
    counts = sorted(int(count) for count in shown["workers"].unique())
    width = 0.84 / len(transports)
    for at, transport in enumerate(transports):
        rates = shown[shown["transport"] == transport].groupby("workers")["steps_per_second"].median()
        seconds = (GLOBAL_STEPS / rates).reindex(counts)
        places = np.arange(1, len(counts) + 1) + (at - (len(transports) - 1) / 2) * width
        bars = ax.bar(places, seconds.to_numpy(), width * 0.92, color=COLOURS[transport], label=NAMES[transport])
        labels = [f"{value:.0f}" if np.isfinite(value) else "" for value in seconds]
        ax.bar_label(bars, labels, fontsize=7, rotation=90 if len(transports) > 1 else 0, padding=1)
    single = own[own["transport"] == "single"]["steps_per_second"]
    if len(single):
        bars = ax.bar([0], [GLOBAL_STEPS / single.median()], width * 0.92, color=COLOURS["single"])
        ax.bar_label(bars, [f"{GLOBAL_STEPS / single.median():.0f}"], fontsize=7)
    ax.set_xticks(range(len(counts) + 1), ["single", *map(str, counts)])
    ax.set_ylim(0, 1850)
    ax.set_xlabel("workers")
    ax.set_ylabel(f"seconds for {GLOBAL_STEPS} steps")
    ax.set_title(title)
    ax.set_title(_WAYS[way], loc="right", fontsize=8, fontweight="normal", color="0.35")
    ax.legend(fontsize=8)
    return ax


def _shades(names: list[str]) -> Mapping[str, str]:
    spectrum = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
    return {name: spectrum[at % len(spectrum)] for at, name in enumerate(names)}
