"""Claims as data: each published claim is judged against measured rows, never by hand.

A claim is a ratio of speeds (see the head of ``experiments/paper/claims.toml`` for the fields). Verdicts:

- ``reproduced``: the ratio, with its interval where rows are repeated, lies in the claimed range.
- ``not reproduced``: it lies outside.
- ``undetermined``: rows are missing, the interval crosses an edge of the range, or every row that the claim needs was used
  to set a parameter and so proves nothing.
- ``not comparable``: there are rows, but of a way (fidelity) that this claim must not be judged by.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CLAIMS = Path(__file__).parents[2] / "experiments" / "paper" / "claims.toml"

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
UNDETERMINED = "undetermined"
NOT_COMPARABLE = "not comparable"

_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "min": min, "max": max}
_RESAMPLES = 2000


class ClaimError(ValueError):
    """A claims file that cannot be read as claims; the message names the file and the claim."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One published claim. ``of`` and ``over`` select rows by column values; see the module for the rest."""

    id: str
    source: str
    says: str
    table: str
    of: Mapping[str, Any]
    over: Mapping[str, Any]
    ways: tuple[str, ...]
    aggregate: str = "mean"
    per: str | None = None
    per_side: str = "both"
    mixed: bool = False
    at: tuple[Any, ...] = ()
    printed: float | None = None
    low: float = -np.inf
    high: float = np.inf


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one claim, with the numbers that it rests on. ``low`` and ``high`` are the 95 % interval of ``value``
    where rows are repeated, else None."""

    claim: Claim
    verdict: str
    reason: str
    way: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None


def load(path: Path = CLAIMS) -> list[Claim]:
    """Read a claims file; ClaimError names what is wrong and where."""
    with path.open("rb") as file:
        try:
            data = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ClaimError(f"{path.name}: {error}") from None
    defaults = data.get("defaults", {})
    claims = []
    for entry in data.get("claim", []):
        fields = {**defaults, **entry}
        name = fields.get("id", "a claim without id")
        unknown = set(fields) - set(Claim.__slots__)
        missing = {"id", "source", "says", "table", "of", "over", "ways"} - set(fields)
        if unknown or missing:
            problem = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
            raise ClaimError(f"{path.name}: {name}: {problem}; fields are {', '.join(Claim.__slots__)}")
        if fields["aggregate"] not in _AGGREGATES:
            raise ClaimError(f"{path.name}: {name}: aggregate must be one of {', '.join(_AGGREGATES)}")
        if bool(fields.get("per")) != bool(fields.get("at")):
            raise ClaimError(f"{path.name}: {name}: `per` and `at` go together")
        if "low" not in fields and "high" not in fields:
            raise ClaimError(f"{path.name}: {name}: a claim needs `low`, `high` or both")
        fields["ways"], fields["at"] = tuple(fields["ways"]), tuple(fields.get("at", ()))
        claims.append(Claim(**fields))
    names = [claim.id for claim in claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ClaimError(f"{path.name}: claim ids used twice: {', '.join(sorted(twice))}")
    return claims


def judge(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> Judgement:
    """Judge one claim. Tables hold a ``way`` and a ``speed`` column, and optionally ``calibrates``, beside the columns that
    claims select by; ``speed`` is anything a second."""
    table = tables.get(claim.table, pd.DataFrame())
    cells = _cells(claim, table)
    if not cells:
        return Judgement(claim, UNDETERMINED, "no rows: the runs that it needs have not been made")
    for way in claim.ways:
        # TCP beside RDMA on one host is that host's loopback, whatever RDMA runs on.
        pairs = [
            (of[of.way == way], over[over.way != "printed"] if claim.mixed else over[over.way == way])
            for of, over in cells
        ]
        if all(len(of) and len(over) for of, over in pairs):
            return _judge_pairs(claim, way, pairs)
    seen = sorted(
        {str(way) for of, over in cells for way in set(of.way) & set(over.way)} - set(claim.ways) - {"printed"}
    )
    if seen:
        return Judgement(
            claim, NOT_COMPARABLE, f"measured only as {', '.join(seen)}; it takes {' or '.join(claim.ways)} to judge"
        )
    return Judgement(claim, UNDETERMINED, "some of the rows that it needs are missing")


def printed_value(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> float | None:
    """What the source's own printed numbers give for the claim's ratio, or None where it prints no such rows."""
    pairs = [
        (of[of.way == "printed"], over[over.way == "printed"])
        for of, over in _cells(claim, tables.get(claim.table, pd.DataFrame()))
    ]
    if not pairs or not all(len(of) and len(over) for of, over in pairs):
        return None
    return _ratio(claim, [(of.speed.to_numpy(), over.speed.to_numpy()) for of, over in pairs])


def judge_all(claims: Sequence[Claim], tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row a claim: what it says, the printed number, ours with its interval, the way, the verdict and the reason."""
    rows = []
    for claim in claims:
        judgement = judge(claim, tables)
        rows.append(
            {
                "id": claim.id,
                "source": claim.source,
                "says": claim.says,
                "printed": claim.printed,
                "from_printed_bars": printed_value(claim, tables),
                "claimed_low": claim.low,
                "claimed_high": claim.high,
                "ours": judgement.value,
                "ours_low": judgement.low,
                "ours_high": judgement.high,
                "way": judgement.way,
                "verdict": judgement.verdict,
                "reason": judgement.reason,
            }
        )
    return pd.DataFrame(rows)


def _cells(claim: Claim, table: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Rows above and below the line for each value of ``at`` (one pair without it); empty if any is empty in every way."""
    cells = []
    for value in claim.at or (None,):
        here: dict[str, Any] = {} if claim.per is None else {claim.per: value}
        of = _select(table, {**claim.of, **here})
        over = _select(table, claim.over if claim.per_side == "of" else {**claim.over, **here})
        if of.empty or over.empty:
            return []
        cells.append((of, over))
    return cells


def _select(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    if any(column not in table.columns for column in where):
        return table.iloc[:0]
    keep = np.ones(len(table), bool)
    for column, value in where.items():
        # Columns of several experiments have gaps, which equal nothing.
        keep &= (table[column] == value).to_numpy(bool, na_value=False)
    return table[keep]


def _judge_pairs(claim: Claim, way: str, pairs: list[tuple[pd.DataFrame, pd.DataFrame]]) -> Judgement:
    speeds = [(of.speed.to_numpy(float), over.speed.to_numpy(float)) for of, over in pairs]
    value = _ratio(claim, speeds)
    low, high = _interval(claim, speeds)
    used = pd.concat([frame for pair in pairs for frame in pair])
    if "calibrates" in used and used.calibrates.fillna(False).astype(bool).all():
        return Judgement(
            claim, UNDETERMINED, "every row that it needs set a parameter of the model", way, value, low, high
        )
    lowest, highest = (value, value) if low is None or high is None else (low, high)
    if claim.low <= lowest and highest <= claim.high:
        verdict, reason = REPRODUCED, "in the claimed range"
    elif highest < claim.low or lowest > claim.high:
        edge = claim.low if highest < claim.low else claim.high
        verdict, reason = (
            NOT_REPRODUCED,
            f"{abs(value / edge - 1):.0%} {'below' if value < edge else 'above'} the range",
        )
    else:
        verdict, reason = UNDETERMINED, "the interval crosses an edge of the claimed range"
    return Judgement(claim, verdict, reason, way, value, low, high)


def _ratio(claim: Claim, speeds: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    ratios = [float(np.median(of) / np.median(over)) for of, over in speeds]
    return _AGGREGATES[claim.aggregate](ratios)


def _interval(claim: Claim, speeds: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float | None, float | None]:
    """95 % bootstrap interval over repeated rows (a row is a fresh run, so rows are what may be resampled)."""
    if any(len(of) < 3 or len(over) < 3 for of, over in speeds):
        return None, None
    generator = np.random.default_rng(0)
    ratios = [
        _ratio(claim, [(generator.choice(of, len(of)), generator.choice(over, len(over))) for of, over in speeds])
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
