"""Claims: each verdict, and files that are no claims."""

import pandas as pd
import pytest

from harness.analysis.claims import (
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDETERMINED,
    Claim,
    ClaimError,
    judge,
    judge_all,
    load,
    printed_value,
)
from harness.analysis.paper import printed


def claim(**changes):
    fields = {
        "id": "c",
        "source": "s",
        "says": "a is twice b",
        "table": "points",
        "of": {"transport": "a"},
        "over": {"transport": "b"},
        "ways": ("hardware", "simulated"),
        "low": 1.8,
        "high": 2.2,
    }
    return Claim(**{**fields, **changes})


def points(*rows):
    return {"points": pd.DataFrame(rows, columns=["transport", "workers", "way", "speed"])}


def test_in_range_is_reproduced_by_the_best_way_there_is():
    tables = points(
        ("a", 1, "simulated", 9.0), ("b", 1, "simulated", 1.0), ("a", 1, "hardware", 2.0), ("b", 1, "hardware", 1.0)
    )
    judgement = judge(claim(), tables)
    assert (judgement.verdict, judgement.way, judgement.value) == (REPRODUCED, "hardware", 2.0)


def test_out_of_range_says_by_how_much():
    judgement = judge(claim(), points(("a", 1, "hardware", 1.5), ("b", 1, "hardware", 1.0)))
    assert judgement.verdict == NOT_REPRODUCED
    assert judgement.reason == "17% below the range"


def test_rows_of_another_fidelity_do_not_judge():
    judgement = judge(claim(ways=("hardware",)), points(("a", 1, "loopback", 2.0), ("b", 1, "loopback", 1.0)))
    assert judgement.verdict == NOT_COMPARABLE
    assert "loopback" in judgement.reason


def test_what_is_compared_with_may_be_of_another_fidelity_where_the_claim_says_so():
    tables = points(("a", 1, "soft-roce", 2.0), ("b", 1, "loopback", 1.0))
    ways = ("hardware", "soft-roce")
    assert judge(claim(ways=ways), tables).verdict == UNDETERMINED
    judgement = judge(claim(ways=ways, mixed=True), tables)
    assert (judgement.verdict, judgement.way, judgement.value) == (REPRODUCED, "soft-roce", 2.0)


def test_gaps_in_a_column_select_nothing():
    tables = points(("a", 1, "hardware", 2.0), ("b", 1, "hardware", 1.0), ("a", None, "hardware", 9.0))
    tables["points"]["workers"] = tables["points"]["workers"].astype("Int64")
    assert judge(claim(of={"transport": "a", "workers": 1}), tables).value == 2.0


def test_missing_rows_are_undetermined():
    assert judge(claim(), points(("a", 1, "hardware", 2.0))).verdict == UNDETERMINED
    assert judge(claim(), {}).verdict == UNDETERMINED
    mixed = points(("a", 1, "hardware", 2.0), ("b", 1, "simulated", 1.0))
    assert judge(claim(), mixed).verdict == UNDETERMINED


def test_an_interval_across_the_edge_is_undetermined():
    rows = [("a", 1, "hardware", speed) for speed in (1.5, 2.0, 2.6)] + [("b", 1, "hardware", 1.0)] * 3
    judgement = judge(claim(), points(*rows))
    assert judgement.verdict == UNDETERMINED
    assert judgement.low < 1.8 < judgement.high


def test_rows_that_calibrated_prove_nothing():
    tables = points(("a", 1, "simulated", 2.0), ("b", 1, "simulated", 1.0))
    tables["points"]["calibrates"] = True
    assert judge(claim(), tables).verdict == UNDETERMINED


def test_ratio_is_taken_at_each_value_and_aggregated():
    rows = [("a", 1, "hardware", 1.0), ("b", 1, "hardware", 1.0), ("a", 2, "hardware", 6.0), ("b", 2, "hardware", 2.0)]
    per = {"per": "workers", "at": (1, 2)}
    assert judge(claim(**per), points(*rows)).value == pytest.approx(2.0)
    assert judge(claim(**per, aggregate="max"), points(*rows)).value == pytest.approx(3.0)
    assert judge(claim(per="workers", at=(1, 3)), points(*rows)).verdict == UNDETERMINED


def test_the_committed_claims_read_and_their_printed_numbers_follow_from_the_bars():
    claims = load()
    assert len(claims) >= 20
    paper = printed()
    single = [
        {"cluster": cluster, "transport": "single", "workers": 0, "steps_per_second": 1 / seconds, "way": "printed"}
        for cluster, seconds in paper.single_step_seconds.items()
    ]
    bars = pd.concat([paper.points, pd.DataFrame(single)]).assign(speed=lambda frame: frame.steps_per_second)
    checked = 0
    for one in claims:
        value = printed_value(one, {"points": bars})
        if value is not None:
            assert value == pytest.approx(one.printed, rel=0.015), one.id
            checked += 1
    assert checked >= 16
    assert set(judge_all(claims, {"points": bars}).verdict) == {UNDETERMINED}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[claim]]\nid = 'x'", "x: missing"),
        ("[[claim]]\nid = 'x'\ncolour = 1", "x: unknown"),
        ("[[claim", "claims.toml"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(ClaimError, match=message):
        load(path)
