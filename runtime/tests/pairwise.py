"""Pairwise combinations of test parameters: every pair of values, not the full product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs (greedy; the same ones every time)."""
    names = list(factors)
    generator = random.Random(seed)
    wanted = {
        (left, i, right, j)
        for left, right in itertools.combinations(names, 2)
        for i in range(len(factors[left]))
        for j in range(len(factors[right]))
    }
    rows = []
    while wanted:
        left, i, right, j = min(wanted)
        best: dict[str, int] = {}
        gain = -1
        for _ in range(20):
            row = {name: generator.randrange(len(factors[name])) for name in names} | {left: i, right: j}
            hits = sum((a, row[a], b, row[b]) in wanted for a, b in itertools.combinations(names, 2))
            if hits > gain:
                best, gain = row, hits
        wanted -= {(a, best[a], b, best[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: factors[name][at] for name, at in best.items()})
    return rows
