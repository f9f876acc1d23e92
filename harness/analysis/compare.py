"""Compare: who is faster than whom, by how much, and how far the claim reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness import store, units
from harness.analysis import frames, stats

# What a conclusion is about decides which figure of a trial is compared; all of them are times, so below 1 is faster.
METRICS = {
    "latency": "median_ns",
    "message-cost": "median_ns",
    "overhead": "median_ns",
    "bandwidth": "ns_per_byte",
    "training": "ns_per_operation",
}
# Under software emulation the processor that copies, checksums and computes is a hundred times too slow, and not evenly so.
_NOT_CLAIMED = {
    "soft-roce-emulated": {
        "bandwidth": "the guest's processor is emulated, which says nothing about the bandwidth of RDMA against TCP",
        "training": "compute and copies are emulated; that both trained correctly is shown, how fast hardware would is not",
    },
    "soft-roce": {
        "bandwidth": "soft-RoCE moves the bytes in software; an adapter's bandwidth is not shown by it",
    },
}


@dataclass(frozen=True)
class Comparison:
    """One contender against one baseline in the same setting. ``ratio`` is contender's time over baseline's. ``not_claimed`` is
    empty, or says why the figures, whatever they are, do not carry the claim."""

    sweep: str
    about: str
    baseline: dict[str, Any]
    contender: dict[str, Any]
    setting: dict[str, Any]
    fidelity: str
    rounds: int
    baseline_ns: float
    contender_ns: float
    ratio: stats.Interval
    margin: float
    verdict: str
    not_claimed: str = ""

    def sentence(self) -> str:
        """One plain sentence."""
        where = _named(self.setting)
        ratio = self.ratio
        times = f"{_figure(self.about, self.contender_ns)} against {_figure(self.about, self.baseline_ns)}"
        who, whom = _named(self.contender), _named(self.baseline)
        if self.verdict in ("faster", "slower"):
            factor, low, high = ratio.value, ratio.low, ratio.high
            if self.verdict == "faster":
                factor, low, high = 1 / factor, 1 / high, 1 / max(low, 1e-12)
            text = (
                f"{who} is {factor:.3g} times {_adjective(self.verdict)} than {whom} ({low:.3g} to {high:.3g}; {times})"
            )
        elif self.verdict == "same":
            text = f"{who} and {whom} are the same within {self.margin:.0%} ({times})"
        else:
            text = f"cannot tell {who} from {whom} (ratio {ratio.low:.3g} to {ratio.high:.3g}; {times})"
        return f"{where}: {text}" if where else text

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence()}


def conclude(results: store.Results, conclusions: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """The comparisons that a definition asks for, one a setting that both sides were measured in.

    Ratios are paired within rounds. Rows of different fidelity are not compared unless the conclusion says ``mixed``.
    """
    measured = frames.trials(results)
    durations = frames.trial_samples(results)
    found: list[Comparison] = []
    for item in conclusions:
        rows = _matching(measured[measured["sweep"] == item["sweep"]], item.get("where", {}))
        sides = [_matching(rows, item[side]) for side in ("baseline", "contender")]
        chosen = set(item["baseline"]) | set(item["contender"])
        others = [name for name in frames.varying(rows) if name not in chosen]
        if not item.get("mixed"):
            others.append("fidelity")
        found += _compare_sides(sides[0], sides[1], others, durations, item, paired=True)
    return found


@dataclass(frozen=True)
class Expectation:
    """A band that a ratio was expected in, what was found, and whether it lies inside. ``found`` is missing where nothing was
    measured, which counts as not met."""

    what: str
    low: float
    high: float
    found: float | None
    met: bool
    because: str

    def sentence(self) -> str:
        found = "not measured" if self.found is None else f"{self.found:.3g}"
        state = "met" if self.met else "NOT MET"
        return f"{state}: {self.what}: {found}, expected {self.low:g} to {self.high:g} ({self.because})"


def expectations(results: store.Results, bands: Sequence[Mapping[str, Any]]) -> list[Expectation]:
    """Check ratios of times against the bands of a definition; suspect rows count as not met."""
    checked: list[Expectation] = []
    for band in bands:
        low, high = band["ratio"]
        found = conclude(results, [band])
        if not found:
            what = f"{band['sweep']}: {_named(band['contender'])} over {_named(band['baseline'])}"
            checked.append(Expectation(what, low, high, None, False, band["because"]))
        for item in found:
            what = f"{_named(item.setting)} {_named(item.contender)} over {_named(item.baseline)}".strip()
            inside = low <= item.ratio.value <= high and not item.not_claimed.startswith("suspect")
            checked.append(Expectation(what, low, high, item.ratio.value, inside, band["because"]))
    return checked


def compare(
    first: store.Results, second: store.Results, margin: float = 0.03, about: str = "latency"
) -> list[Comparison]:
    """Two runs, cell by cell: ``first`` is the baseline. They were not interleaved, so drift between them counts too."""
    frames_of = [frames.trials(results) for results in (first, second)]
    if first.folders == second.folders:
        raise ValueError("a run compared with itself says nothing; name two runs")
    # Rounds of one cell have the same run_id in two runs.
    durations: dict[str, np.ndarray] = {}
    for at, (results, frame) in enumerate(zip((first, second), frames_of)):
        samples_of = frames.trial_samples(results)
        frame["run_id"] = [f"{run_id}@{at}" for run_id in frame["run_id"]]
        durations.update({f"{run_id}@{at}": samples for run_id, samples in samples_of.items()})
    shared = [name for name in frames.parameters(first.runs) if name in second.runs.columns]
    item = {"about": about, "margin": margin, "baseline": {"run": "first"}, "contender": {"run": "second"}}
    found: list[Comparison] = []
    for sweep in frames_of[0]["sweep"].unique():
        sides = [frame[frame["sweep"] == sweep] for frame in frames_of]
        settings = [name for name in shared if pd.concat(sides)[name].nunique(dropna=False) > 1]
        found += _compare_sides(
            sides[0], sides[1], [*settings, "fidelity"], durations, {**item, "sweep": sweep}, paired=False
        )
    return found


def summary(comparisons: Sequence[Comparison]) -> str:
    """One plain sentence over all: what is shown, and what is not claimed."""
    if not comparisons:
        return "Nothing can be concluded: no setting was measured on both sides."
    claimed = [item for item in comparisons if not item.not_claimed]
    parts = []
    for key in dict.fromkeys((item.about, _named(item.contender), _named(item.baseline)) for item in claimed):
        group = [item for item in claimed if (item.about, _named(item.contender), _named(item.baseline)) == key]
        parts.append(_group_sentence(*key, group))
    silent = [item for item in comparisons if item.not_claimed]
    for about, reason in dict.fromkeys((item.about, item.not_claimed) for item in silent):
        parts.append(f"nothing is claimed about {_about(about)}: {reason}")
    grounds = ", ".join(sorted({item.fidelity for item in comparisons if item.fidelity}))
    text = "; ".join(parts)
    return f"On {grounds or 'this machine'}: {text}."


def _group_sentence(about: str, contender: str, baseline: str, group: Sequence[Comparison]) -> str:
    tally: dict[str, list[Comparison]] = {name: [] for name in ("faster", "slower", "same", "cannot tell")}
    for item in group:
        tally[item.verdict].append(item)
    pieces = []
    for verdict in ("faster", "slower"):
        items = tally[verdict]
        if items:
            factors = [1 / item.ratio.value if verdict == "faster" else item.ratio.value for item in items]
            span = f"{min(factors):.3g}" if len(items) == 1 else f"{min(factors):.3g} to {max(factors):.3g}"
            pieces.append(f"{span} times {_adjective(verdict)}{_where(items, group)}")
    if tally["same"]:
        pieces.append(f"the same within {tally['same'][0].margin:.0%}{_where(tally['same'], group)}")
    if tally["cannot tell"]:
        pieces.append(f"not distinguishable{_where(tally['cannot tell'], group)}")
    return f"{_about(about)} with {contender} is {', '.join(pieces)} against {baseline}"


def _where(items: Sequence[Comparison], group: Sequence[Comparison]) -> str:
    if len(group) == 1:
        return ""
    sizes = sorted({item.setting["nbytes"] for item in items if "nbytes" in item.setting})
    if sizes:
        span = units.format_bytes(sizes[0])
        return f" at {span}" if len(sizes) == 1 else f" from {span} to {units.format_bytes(sizes[-1])}"
    return f" in {len(items)} of {len(group)} settings"


def _compare_sides(
    baseline: pd.DataFrame,
    contender: pd.DataFrame,
    others: Sequence[str],
    durations: Mapping[str, np.ndarray],
    item: Mapping[str, Any],
    paired: bool,
) -> list[Comparison]:
    found = []
    about = item.get("about", "latency")
    metric = METRICS[about]
    keys = list(dict.fromkeys(others))
    groups = _grouped(contender, keys)
    for values, below in _grouped(baseline, keys).items():
        above = groups.get(values)
        if above is None:
            continue
        if paired:
            rounds = sorted(set(below["round"]) & set(above["round"]))
            below = below[below["round"].isin(rounds)].sort_values("round")
            above = above[above["round"].isin(rounds)].sort_values("round")
            if not rounds or len(below) != len(above):
                continue
        sides = [_values(side, metric, durations) for side in (below, above)]
        estimate = stats.paired_ratio if paired else stats.unpaired_ratio
        ratio = estimate(sides[0], sides[1])
        margin = float(item.get("margin", 0.03))
        setting = {name: _plain(value) for name, value in zip(keys, values) if name != "fidelity"}
        fidelities = sorted({*below["fidelity"], *above["fidelity"]})
        suspects = [text for text in [*below["suspect"], *above["suspect"]] if text]
        not_claimed = next((_NOT_CLAIMED[f][about] for f in fidelities if about in _NOT_CLAIMED.get(f, {})), "")
        found.append(
            Comparison(
                sweep=item["sweep"],
                about=about,
                baseline=dict(item["baseline"]),
                contender=dict(item["contender"]),
                setting={name: value for name, value in setting.items() if value is not None},
                fidelity=" against ".join(fidelities),
                rounds=len(below),
                baseline_ns=float(below[metric].median()),
                contender_ns=float(above[metric].median()),
                ratio=ratio,
                margin=margin,
                verdict=stats.verdict(ratio, margin),
                not_claimed=f"suspect rows ({suspects[0]})" if suspects else not_claimed,
            )
        )
    return found


def _grouped(frame: pd.DataFrame, keys: Sequence[str]) -> dict[tuple[Any, ...], pd.DataFrame]:
    if not keys:
        return {(): frame} if len(frame) else {}
    grouped = frame.groupby(list(keys), dropna=False, sort=True)
    return {tuple(None if pd.isna(value) else value for value in values): group for values, group in grouped}


def _values(side: pd.DataFrame, metric: str, durations: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    if metric == "median_ns":
        return [durations[run_id] for run_id in side["run_id"]]
    return [np.array([value]) for value in side[metric]]


def _matching(frame: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in wanted.items():
        if name not in frame.columns:
            return frame.iloc[:0]
        allowed = value if isinstance(value, list) else [value]
        frame = frame[frame[name].isin(allowed)]
    return frame


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _named(values: Mapping[str, Any]) -> str:
    shown = []
    for name, value in values.items():
        if name in ("transport", "run"):
            shown.append(str(value))
        elif name == "nbytes":
            shown.append(units.format_bytes(value))
        else:
            shown.append(f"{name} {value}")
    return " ".join(shown)


def _figure(about: str, ns: float) -> str:
    """A metric as people read it: a rate for what is about rates."""
    if METRICS[about] == "ns_per_byte":
        return units.format_rate(1e9 / ns)
    return f"{1e9 / ns:.3g}/s" if METRICS[about] == "ns_per_operation" else units.format_ns(ns)


def _adjective(verdict: str) -> str:
    return {"faster": "faster", "slower": "slower"}[verdict]


def _about(about: str) -> str:
    return {
        "latency": "fetching a tensor",
        "message-cost": "a message",
        "bandwidth": "bandwidth",
        "training": "training",
        "overhead": "the runtime's own cost",
    }[about]
