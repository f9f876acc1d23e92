"""Breakdown: where the time of an iteration goes, phase by phase, summing to the end-to-end time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.plots import palette
from harness.plots.ground import stamp_fidelity


def phase_stack(breakdown: pd.DataFrame, ax: Axes, *, by: str = "transport", mixed: bool = False) -> Axes:
    """One stacked bar a value of ``by``. ``breakdown`` as ``frames.breakdown`` gives it; phases are exclusive."""
    mean = breakdown.groupby([by, "phase"], sort=False, observed=True)["ns"].mean().unstack("phase").fillna(0.0) / 1e3
    places, bottom = np.arange(len(mean)), np.zeros(len(mean))
    for phase, shade in palette.PHASES.items():
        if phase in mean and (mean[phase] > 0).any():
            height = mean[phase].to_numpy(float)
            ax.bar(places, height, 0.6, bottom=bottom, color=shade, label=phase, edgecolor="white", linewidth=0.5)
            bottom = bottom + height
    ax.set_xticks(places, [palette.label(str(name)) for name in mean.index], rotation=20, ha="right")
    ax.set_ylabel("time of one iteration, mean (us)")
    ax.set_title("Where the time goes")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return stamp_fidelity(breakdown, ax, mixed)
