"""Ground: every picture says on what its figures were measured, and refuses to put different grounds side by side."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.frames import require_one_fidelity


def stamp_fidelity(frame: pd.DataFrame, ax: Axes, mixed: bool = False) -> Axes:
    """Print the fidelity of ``frame`` into the picture. ValueError if there are several and ``mixed`` is not said."""
    found = require_one_fidelity(frame, mixed)
    text = f"measured on: {', '.join(found) or 'unknown'}"
    if len(found) > 1:
        text = f"MIXED GROUNDS, {text}"
    ax.set_title(text, loc="right", fontsize=8, fontweight="normal", color="0.35")
    return ax
