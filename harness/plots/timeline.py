"""Timeline: the spans of one step on the threads that ran them, and the same as a Chrome trace."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.plots import palette


def timeline(spans: pd.DataFrame, ax: Axes, *, fidelity: str = "") -> Axes:
    """One lane a thread of a rank. ``spans`` are rows of the spans table that belong to one trial on one host."""
    if spans.empty:
        raise ValueError("there are no spans to draw; was the trial traced?")
    start = spans["start_ns"].min()
    lanes = list(dict.fromkeys(zip(spans["rank"], spans["thread"])))
    for at, (rank, thread) in enumerate(lanes):
        own = spans[(spans["rank"] == rank) & (spans["thread"] == thread)]
        bars = list(zip((own["start_ns"] - start) / 1e3, own["elapsed_ns"] / 1e3))
        ax.broken_barh(bars, (at - 0.4, 0.8), facecolors=[palette.PHASES[str(phase)] for phase in own["phase"]])
    ax.set_yticks(range(len(lanes)), [f"rank {rank}, thread {at}" for at, (rank, _) in enumerate(lanes)])
    ax.invert_yaxis()
    ax.set_xlabel("time (us)")
    ax.set_title("One step" + (f" ({fidelity})" if fidelity else ""))
    seen = [phase for phase in palette.PHASES if phase in set(spans["phase"].astype(str))]
    ax.legend(handles=[Patch(color=palette.PHASES[phase], label=phase) for phase in seen], loc="center left",
              bbox_to_anchor=(1.0, 0.5))  # fmt: skip
    return ax


def chrome_trace(spans: pd.DataFrame) -> dict[str, Any]:
    """Spans as a Chrome trace (open in Perfetto or chrome://tracing); ranks are its processes, times in us."""
    events = [
        {
            "ph": "X",
            "name": str(row.name_),
            "cat": str(row.phase),
            "pid": int(row.rank),
            "tid": int(row.thread),
            "ts": row.start_ns / 1e3,
            "dur": row.elapsed_ns / 1e3,
            "args": {"step": int(row.step), "bytes": int(row.nbytes)},
        }
        for row in spans.rename(columns={"name": "name_"}).itertuples(index=False)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}
