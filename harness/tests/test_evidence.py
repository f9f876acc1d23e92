"""Stored runs as the tables that claims are judged by, and the model's validation."""

import numpy as np
import pandas as pd
import pytest

from harness import store
from harness.analysis import evidence, paper, validate
from harness.analysis.claims import judge_all, load
from harness.tests.fabricated import make_run


@pytest.fixture(scope="module")
def printed():
    return paper.printed()


@pytest.fixture(scope="module")
def simulated(printed):
    return paper.simulated(printed)


def emulated_run(**changes):
    row = {
        "experiment": "paper/fig5_rdma",
        "sweep": "rdma",
        "workers": 2,
        "operations_per_s": 48.0,
        "batch": 24,
        "way": "emulated-compute",
    }
    return {**row, **changes}


def test_runs_have_a_way_a_speed_and_the_processors_that_they_took(tmp_path):
    runs = evidence.runs_table([store.load(make_run(tmp_path))])
    assert set(runs["way"]) == {"loopback"}
    shm = runs[(runs["transport"] == "shm") & (runs["nbytes"] == 8)]
    assert shm["speed"].median() == pytest.approx(1e9 / 30_008, rel=0.05)
    assert evidence.runs_table([]).empty


def test_the_newest_run_of_each_experiment_counts_and_scratch_comes_first(tmp_path):
    make_run(tmp_path, "20260101T000000")
    second = make_run(tmp_path, "20260102T000000")
    assert store.newest_runs(root=tmp_path) == {("fabricated", "here"): second}
    published = store.publish(second, "2026-01-02-host", tmp_path)
    assert store.newest_runs(("published",), tmp_path) == {("fabricated", "here"): published}
    assert store.newest_runs(root=tmp_path) == {("fabricated", "here"): second}


def test_suspect_trials_judge_nothing(tmp_path):
    results = store.load(make_run(tmp_path))
    results.runs.loc[results.runs["transport"] == "shm", "suspect"] = "rank 0: bytes are missing"
    assert set(evidence.runs_table([results])["transport"]) == {"grpc"}


def test_processors_are_the_ranks_time_over_the_clocks():
    rows = [
        ("a", rank, name, 0, after)
        for rank, busy in ((0, 500), (1, 1000))
        for name, after in (("cpu.user", busy), ("cpu.system", 0), ("clock.monotonic", 1000))
    ]
    counters = pd.DataFrame(rows, columns=["run_id", "rank", "name", "before", "after"])
    assert evidence.cores(counters)["cores"].tolist() == [1.5]


def test_trials_of_the_figures_become_points(printed):
    runs = pd.DataFrame(
        [
            emulated_run(),
            emulated_run(workers=1, operations_per_s=25.0),
            emulated_run(sweep="single", operations_per_s=32.0),
            emulated_run(experiment="paper/hardware", way="hardware", workers=1),
            emulated_run(experiment="paper/hardware", way="loopback"),
            emulated_run(experiment="transfer"),
        ]
    )
    points = evidence.measured_points(printed, runs)
    assert points.way.tolist() == ["emulated"] * 3 + ["hardware"]
    assert points.steps_per_second.tolist() == pytest.approx([2.0, 25 / 24, 32 / 24, 2.0])
    assert points.workers.tolist() == [2, 1, 0, 1]
    assert points.calibrates.tolist() == [False, True, True, False]
    assert set(points.columns) == set(printed.points.columns)


def test_misses_are_points_out_of_the_margin_that_set_nothing(printed):
    runs = pd.DataFrame(
        [emulated_run(workers=n, operations_per_s=24 * speed) for n, speed in ((1, 3.0), (2, 1.9), (3, 1.9))]
    )
    points = evidence.points_table(printed, pd.DataFrame(), evidence.measured_points(printed, runs))
    beside = evidence.misses(printed, points).set_index("workers")
    assert beside.miss.tolist() == [False, False, True]
    assert beside.error[3] == pytest.approx((300 / 123) / 1.9 - 1)


def test_repeated_trials_count_once_in_the_errors_and_thrice_in_the_claims(printed):
    runs = pd.DataFrame([emulated_run(operations_per_s=24 * speed) for speed in (1.8, 1.9, 2.0)])
    points = evidence.points_table(printed, pd.DataFrame(), evidence.measured_points(printed, runs))
    assert len(points[points.way == "emulated"]) == 3
    assert len(evidence.misses(printed, points)) == 1


def test_every_claim_is_judged_from_tables_alone(printed, simulated):
    made, parameters = simulated
    points = evidence.points_table(printed, made, pd.DataFrame())
    judged = judge_all(load(), {"points": points, "runs": evidence.runs_table([])})
    assert len(judged) >= 20
    assert (judged["way"] == "simulated").sum() >= 15
    assert (judged["verdict"] == "reproduced").sum() >= 8
    assert set(parameters.columns) == {"cluster", "transport", "bandwidth", "contention"}


def test_the_simulation_is_within_a_fifth_of_the_points_that_set_nothing(printed, simulated):
    beside = paper.beside_printed(printed, simulated[0])
    assert beside[~beside.calibrates].error.abs().mean() <= 0.20


class Stored:
    """As ``store.Results``, from frames."""

    def __init__(self, runs, samples, spans):
        self.runs, self.samples, self.spans = runs, samples, spans
        # Each end of a fetch works half of its time.
        spent = [
            (row.run_id, rank, "cpu.user", 0, 5 * (50_000 + int(row.nbytes) // 4))
            for row in runs[runs["bench"] == "transfer"].itertuples()
            for rank in (0, 1)
        ]
        self.counters = pd.DataFrame(spent, columns=["run_id", "rank", "name", "before", "after"])
        self.info = [{"environment": {"cpus_allowed": 2}}]


def validation_runs(step_ns):
    """Fetches of 0.1 ms and 2 GB/s, a step of 0.3 s alone, and a distributed step of ``step_ns``."""
    common = {
        "experiment": "paper/costmodel", "status": "ok", "fidelity": "loopback", "round": 0, "suspect": "", "order": 0,
        "iterations": 5,
    }  # fmt: skip
    runs, samples = [], []

    def add(run_id, elapsed, operations, count=5, **row):
        runs.append({**common, "run_id": run_id, "run": "r", "error": "", "cell": run_id, **row})
        for at in range(count):
            samples.append(
                {"run_id": run_id, "rank": 1, "iteration": at, "start_ns": at * elapsed, "elapsed_ns": elapsed,
                 "nbytes": 1, "operations": operations, "traced": False}
            )  # fmt: skip

    for nbytes in (1 << 12, 1 << 20, 1 << 24):
        add(f"t{nbytes}", int(1e5 + nbytes / 2), 1, bench="transfer", sweep="transfer", transport="shm", nbytes=nbytes)
    add("alone", 300_000_000, 4, bench="alone", sweep="alone", shared=True)
    add(
        "step",
        step_ns,
        4,
        bench="training",
        sweep="step",
        transport="shm",
        workers=1,
        servers=1,
        batch=4,
        model="alexnet",
    )
    spans = [
        {"run_id": "alone", "rank": 0, "thread": 1, "step": step, "phase": phase, "name": name, "start_ns": 0,
         "elapsed_ns": int(elapsed * 1e9), "nbytes": 0}
        for step in (1, 2, 3)
        for phase, name, elapsed in (
            ("compute", "conv1/conv", 0.1), ("compute", "gradients/MatMul", 0.18), ("apply", "ApplySGD", 0.02),
            ("copy", "feeds", 1.0),
        )
    ]  # fmt: skip
    return Stored(pd.DataFrame(runs), pd.DataFrame(samples), pd.DataFrame(spans))


def test_parts_are_fitted_and_steps_predicted(printed):
    results = validation_runs(500_000_000)
    fit = validate.fits(results)["shm"]
    assert (fit.alpha, fit.beta) == (pytest.approx(1e-4, rel=0.01), pytest.approx(2e9, rel=0.01))
    spent = validate.processor_fits(results)["shm"]
    assert (spent.alpha, spent.beta) == (pytest.approx(5e-5, rel=0.01), pytest.approx(4e9, rel=0.01))
    cost = validate.step_costs(results)[True]
    assert (cost.forward, cost.backward, cost.apply) == pytest.approx((0.1, 0.18, 0.02))
    (row,) = validate.validate(results, printed).itertuples()
    # Weights and gradients take a quarter of a second in all; some of it is hidden behind compute.
    assert 1 / (0.28 + 0.02 + 0.25) < row.predicted < 1 / 0.28
    assert row.measured == pytest.approx(2.0)
    assert row.error == pytest.approx(2.0 / row.predicted - 1)
    assert validate.validate(None).empty


def test_a_byte_costs_what_it_costs_a_busy_machine(printed):
    results = validation_runs(500_000_000)
    busy = results.runs[results.runs.run_id == "alone"].assign(run_id="busy", beside="shm", processes=1)
    results.runs = pd.concat([results.runs, busy], ignore_index=True)
    passed = [(0, "cpu.user", 9e9), (1, "cpu.user", 3e8), (1, "transport.bytes_in", 1e9), (2, "cpu.system", 1e8)]
    counters = [("busy", rank, name, 0, value) for rank, name, value in passed]
    results.counters = pd.concat([results.counters, pd.DataFrame(counters, columns=results.counters.columns)])
    spent = validate.processor_fits(results)["shm"]
    assert (spent.alpha, spent.beta) == (pytest.approx(5e-5, rel=0.01), pytest.approx(5e9))
    # What trains beside is slower and says nothing of a step alone.
    assert validate.step_costs(results)[True].forward == pytest.approx(0.1)


def test_scaling_says_where_bottlenecks_begin():
    from harness.paper import scaling

    table = scaling()
    assert set(table.workers) >= {1, 1000} and set(table.servers) == {1, 4, 16}
    link = table[table.bottleneck == "the server's link"].groupby(["network", "servers"]).workers.min()
    assert link["1 Gb/s", 1] < link["25 Gb/s", 1] < link["400 Gb/s", 1]
    assert link["25 Gb/s", 1] < link["25 Gb/s", 4]
    assert np.isfinite(table.steps_per_second).all()
