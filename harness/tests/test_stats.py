import math

import numpy as np
import pytest

from harness.analysis import stats


def processes(rounds, spread, seed, shift=0.0, iterations=200):
    """Log-normal times: processes differ by ``spread``, iterations by a heavy-tailed tenth."""
    chooser = np.random.default_rng(seed)
    return [
        np.exp(shift + chooser.normal(0, spread) + 0.1 * chooser.standard_t(3, iterations)) * 1e5 for _ in range(rounds)
    ]


def test_median_interval_surrounds_the_median_and_needs_samples():
    groups = processes(10, 0.05, 1)
    interval = stats.median_interval(groups)
    assert interval.low <= interval.value <= interval.high
    assert interval.value == np.median([np.median(group) for group in groups])
    with pytest.raises(ValueError, match="at least one"):
        stats.median_interval([])


def test_resampled_medians_follow_the_bootstrap_law():
    # Against the bootstrap done by hand: same distribution, so near quantiles.
    group = np.sort(np.random.default_rng(0).exponential(1.0, 31))
    chooser = np.random.default_rng(1)
    by_law = stats._resampled_medians([group], np.zeros((20_000, 1), int), chooser)[:, 0]
    by_hand = np.median(group[chooser.integers(0, 31, (20_000, 31))], axis=1)
    for q in (2.5, 25, 50, 75, 97.5):
        assert (
            abs(np.searchsorted(group, np.percentile(by_law, q)) - np.searchsorted(group, np.percentile(by_hand, q)))
            <= 1
        )


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_equal_sides_are_rarely_called_different(rounds):
    wrong = 0
    for seed in range(100):
        ratio = stats.paired_ratio(processes(rounds, 0.05, seed), processes(rounds, 0.05, seed + 10_000), resamples=500)
        wrong += stats.verdict(ratio, 0.03) in ("faster", "slower")
    assert wrong / 100 <= 0.09


def test_a_real_difference_is_found():
    found = 0
    for seed in range(50):
        slow = processes(15, 0.04, seed + 10_000, shift=math.log(1.1))
        found += stats.verdict(stats.paired_ratio(processes(15, 0.04, seed), slow, resamples=500), 0.03) == "slower"
    assert found >= 45


def test_pairing_removes_what_hits_both_sides_of_a_round():
    drift = np.random.default_rng(5).normal(0, 0.5, 8)
    slow, fast = processes(8, 0.01, 1, shift=math.log(1.2)), processes(8, 0.01, 2)
    for at in range(8):
        slow[at] = slow[at] * math.exp(drift[at])
        fast[at] = fast[at] * math.exp(drift[at])
    paired, unpaired = stats.paired_ratio(fast, slow), stats.unpaired_ratio(fast, slow)
    assert stats.verdict(paired, 0.03) == "slower"
    assert paired.high - paired.low < unpaired.high - unpaired.low


def test_one_round_tells_nothing():
    ratio = stats.paired_ratio(processes(1, 0.0, 1), processes(1, 0.0, 2, shift=1.0))
    assert (ratio.low, ratio.high) == (0.0, math.inf)
    assert stats.verdict(ratio, 0.03) == "cannot tell"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.5, 0.45, 0.55), "faster"),
        ((2.0, 1.8, 2.2), "slower"),
        ((1.0, 0.99, 1.01), "same"),
        ((1.1, 0.9, 1.3), "cannot tell"),
        ((1.02, 1.005, 1.05), "cannot tell"),
        ((0.9, 0.0, 0.95), "faster"),
    ],
)
def test_verdicts(interval, expected):
    assert stats.verdict(stats.Interval(*interval), 0.03) == expected


def test_p99_is_withheld_below_a_hundred_samples():
    assert stats.percentile(np.arange(99), 99) is None
    assert stats.percentile(np.arange(100), 99) is not None
    assert stats.percentile(np.arange(3), 50) == 1


def test_known_answers():
    assert stats.geometric_mean([2, 8]) == pytest.approx(4)
    assert stats.binomial_upper(0, 400) == pytest.approx(0.00746, rel=0.01)
    assert stats.binomial_upper(5, 5) == 1.0
