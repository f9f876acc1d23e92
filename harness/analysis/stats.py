"""Statistics of times: medians, intervals by a hierarchical bootstrap, paired ratios, and when to stay silent.

Iterations inside one process are correlated (memory layout, core, connection), so that resampling them alone gives intervals
far too narrow; processes are resampled first, then iterations within them (Kalibera and Jones, ISMM'13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 4000
# A 99th percentile of fewer samples than this is the maximum under another name.
SAMPLES_FOR_P99 = 100
# Below so many pairs the bootstrap has too few distinct resamples to reach its level, and Student's t helps.
_FEW = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the interval around it; ``level`` is its nominal coverage."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def percentile(samples: np.ndarray, q: float) -> float | None:
    """The q-th percentile (0 to 100), or None where there are too few samples for it: 1/(1-q) samples in the tail's unit,
    which for p99 is 100."""
    needed = math.ceil(1 / (1 - q / 100) - 1e-9) if 50 < q < 100 else 1
    return float(np.percentile(samples, q)) if len(samples) >= needed else None


def median_interval(processes: Sequence[np.ndarray], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Median over processes of each process's median, with its interval. ValueError without any sample."""
    groups = _sorted(processes)
    value = float(np.median([np.median(group) for group in groups]))
    chooser = np.random.default_rng(seed)
    chosen = chooser.integers(0, len(groups), (resamples, len(groups)))
    medians = np.median(_resampled_medians(groups, chosen, chooser), axis=1)
    tail = _tail(len(groups))
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(value, min(float(low), value), max(float(high), value))


def paired_ratio(
    baseline: Sequence[np.ndarray], contender: Sequence[np.ndarray], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Contender's time over the baseline's: the median over rounds of the ratio of the two medians of that round.

    The i-th arrays of both were measured in the same round; whatever slowed the machine in it hits both. Rounds are
    resampled first, then iterations of both sides. With one round the interval is unbounded.
    """
    if len(baseline) != len(contender):
        raise ValueError(f"{len(baseline)} rounds of the baseline do not pair with {len(contender)} of the contender")
    below, above = _sorted(baseline), _sorted(contender)
    logs = np.array([math.log(np.median(b) / np.median(a)) for a, b in zip(below, above)])
    value = float(np.median(logs))
    if len(logs) < 2:
        return Interval(math.exp(value), 0.0, math.inf)
    chooser = np.random.default_rng(seed)
    chosen = chooser.integers(0, len(logs), (resamples, len(logs)))
    ratios = np.log(_resampled_medians(above, chosen, chooser)) - np.log(_resampled_medians(below, chosen, chooser))
    tail = _tail(len(logs))
    low, high = np.quantile(np.median(ratios, axis=1), [tail, 1 - tail])
    if len(logs) < _FEW:
        half = _t_quantile(1 - (1 - LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
        low, high = min(low, logs.mean() - half), max(high, logs.mean() + half)
    return Interval(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def unpaired_ratio(
    baseline: Sequence[np.ndarray], contender: Sequence[np.ndarray], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Like ``paired_ratio``, for two runs that were not interleaved; drift between them counts as a difference."""
    below, above = _sorted(baseline), _sorted(contender)
    value = float(np.median([np.median(group) for group in above]) / np.median([np.median(group) for group in below]))
    if min(len(below), len(above)) < 2:
        return Interval(value, 0.0, math.inf)
    chooser = np.random.default_rng(seed)

    def draw(groups: list[np.ndarray]) -> np.ndarray:
        chosen = chooser.integers(0, len(groups), (resamples, len(groups)))
        return np.log(np.median(_resampled_medians(groups, chosen, chooser), axis=1))

    tail = _tail(min(len(below), len(above)))
    low, high = np.exp(np.quantile(draw(above) - draw(below), [tail, 1 - tail]))
    if min(len(below), len(above)) < _FEW:
        logs = [np.log([np.median(group) for group in groups]) for groups in (below, above)]
        error = math.sqrt(sum(float(values.var(ddof=1)) / len(values) for values in logs))
        half = _t_quantile(1 - (1 - LEVEL) / 2, min(len(values) for values in logs) - 1) * error
        center = float(logs[1].mean() - logs[0].mean())
        low, high = min(low, math.exp(center - half)), max(high, math.exp(center + half))
    return Interval(value, min(float(low), value), max(float(high), value))


def verdict(ratio: Interval, margin: float) -> str:
    """``faster``, ``slower``, ``same`` (within the margin) or ``cannot tell``, for a ratio of times.

    A difference is claimed only if the interval excludes 1 and the estimate is larger than the margin, sameness only if the
    whole interval lies within the margin.
    """
    bound = math.log1p(margin)
    value, low, high = (
        math.log(number) if number > 0 else -math.inf for number in (ratio.value, ratio.low, ratio.high)
    )
    if -bound <= low and high <= bound:
        return "same"
    if high < 0 and value < -bound:
        return "faster"
    if low > 0 and value > bound:
        return "slower"
    return "cannot tell"


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return float(np.exp(np.mean(np.log(values))))


def binomial_upper(successes: int, trials: int, level: float = LEVEL) -> float:
    """One-sided upper bound of a rate (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if successes >= trials else float(beta.ppf(level, successes + 1, trials - successes))


def _sorted(processes: Sequence[np.ndarray]) -> list[np.ndarray]:
    groups = [np.sort(np.asarray(samples, float)) for samples in processes]
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("an estimate needs at least one process, and at least one sample of each")
    return groups


def _resampled_medians(groups: Sequence[np.ndarray], chosen: np.ndarray, chooser: np.random.Generator) -> np.ndarray:
    """The median of a fresh resample of each chosen group.

    The median of n draws with replacement is the order statistic whose rank follows a Beta((n+1)/2, (n+1)/2) law (David and
    Nagaraja, Order Statistics, 2.3), so that no resample needs to be made; exact for odd n.
    """
    medians = np.empty(chosen.shape)
    for at, group in enumerate(groups):
        places = chosen == at
        half = (len(group) + 1) / 2
        ranks = chooser.beta(half, half, int(places.sum()))
        medians[places] = group[np.minimum((ranks * len(group)).astype(np.int64), len(group) - 1)]
    return medians


def _tail(count: int) -> float:
    """The tail of a percentile interval, widened for few processes (Hesterberg, Am. Stat. 69(4), 2015, 'expanded')."""
    tail = (1 - LEVEL) / 2
    if count < 2:
        return 0.0
    from scipy.special import ndtr

    return float(ndtr(-math.sqrt(count / (count - 1)) * _t_quantile(1 - tail, count - 1)))


def _t_quantile(probability: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
