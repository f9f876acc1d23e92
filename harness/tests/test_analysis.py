import numpy as np
import pytest

from harness import store
from harness.analysis import compare, frames
from harness.tests.fabricated import DEFINITION, fetch_ns, make_run


def test_trials_and_cells_have_the_figures_that_went_in(tmp_path):
    results = store.load(make_run(tmp_path))
    trials = frames.trials(results)
    assert len(trials) == 20
    assert trials["p99_ns"].notna().all()
    cells = frames.cells(results)
    assert len(cells) == 4
    for _, cell in cells.iterrows():
        wanted = fetch_ns({"transport": cell["transport"], "nbytes": cell["nbytes"]})
        assert cell["median_ns"] == pytest.approx(wanted, rel=0.03)
        assert cell["low_ns"] <= cell["median_ns"] <= cell["high_ns"]
        assert cell["bytes_per_s"] == pytest.approx(cell["nbytes"] / wanted * 1e9, rel=0.05)
        assert cell["rounds"] == 5
    assert frames.varying(trials) == ["transport", "nbytes"]


def test_p99_of_few_samples_is_missing(tmp_path):
    trials = frames.trials(store.load(make_run(tmp_path, samples=50)))
    assert trials["p99_ns"].isna().all()


def test_phases_are_exclusive_and_sum_to_the_end_to_end_time(tmp_path):
    results = store.load(make_run(tmp_path))
    phases = frames.breakdown(results)
    traced = results.samples[results.samples["traced"]].groupby("run_id", observed=True)["elapsed_ns"].mean()
    for run_id, group in phases.groupby("run_id"):
        total = traced[run_id]
        share = group.set_index("phase")["ns"] / total
        assert group["ns"].sum() == pytest.approx(total)
        assert share["copy"] == pytest.approx(0.25, abs=0.01)
        assert share["wire"] == pytest.approx(0.25, abs=0.01)
        assert share["other"] == pytest.approx(0.5, abs=0.01)


def test_conclusions_find_the_tenfold_difference(tmp_path):
    found = compare.conclude(store.load(make_run(tmp_path)), DEFINITION["conclude"])
    assert [item.setting["nbytes"] for item in found] == [8, 65536]
    assert all(item.verdict == "faster" for item in found)
    assert 1 / found[0].ratio.value == pytest.approx(10, rel=0.03)
    assert found[0].sentence().startswith("8 B: shm is 10")
    assert compare.summary(found).startswith("On loopback: fetching a tensor with shm is")


def test_rows_of_different_grounds_are_not_compared_unless_told_to(tmp_path):
    results = store.load(make_run(tmp_path, fidelity=lambda name: "hardware" if name == "shm" else "loopback"))
    assert compare.conclude(results, DEFINITION["conclude"]) == []
    mixed = compare.conclude(results, [{**DEFINITION["conclude"][0], "mixed": True}])
    assert {item.fidelity for item in mixed} == {"hardware against loopback"}
    with pytest.raises(ValueError, match="different grounds"):
        frames.require_one_fidelity(frames.cells(results))


def test_emulation_carries_no_claim_about_bandwidth(tmp_path):
    results = store.load(make_run(tmp_path, fidelity=lambda name: "soft-roce-emulated"))
    asked = [DEFINITION["conclude"][0], {**DEFINITION["conclude"][0], "about": "bandwidth"}]
    found = compare.conclude(results, asked)
    assert [bool(item.not_claimed) for item in found] == [False, False, True, True]
    text = compare.summary(found)
    assert "fetching a tensor with shm is" in text
    assert "nothing is claimed about bandwidth" in text
    assert "bandwidth with shm" not in text


def test_two_runs_compare_cell_by_cell(tmp_path):
    first = make_run(tmp_path, "first")
    second = make_run(tmp_path, "second one", took=lambda p: fetch_ns(p) * (1.5 if p["transport"] == "shm" else 1.0))
    found = compare.compare(store.load(first), store.load(second))
    verdicts = {(item.setting["transport"], item.setting["nbytes"]): item.verdict for item in found}
    assert verdicts[("shm", 8)] == verdicts[("shm", 65536)] == "slower"
    assert verdicts[("grpc", 8)] in ("same", "cannot tell")
    with pytest.raises(ValueError, match="compared with itself"):
        compare.compare(store.load(first), store.load(first))


def test_attribution_prefers_work_over_waiting():
    starts, ends = np.array([0, 20, 50]), np.array([100, 40, 60])
    order = {name: at for at, name in enumerate(frames._PRECEDENCE)}
    codes = np.array([order["wire"], order["compute"], order["copy"]])
    found = frames._attribute(10, 120, starts, ends, codes)
    assert found[order["compute"]] == 20
    assert found[order["copy"]] == 10
    assert found[order["wire"]] == 60
    assert found[order["other"]] == 20
    assert found.sum() == 110
