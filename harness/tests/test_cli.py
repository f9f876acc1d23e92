import json
import shutil

import pytest
from click.testing import CliRunner

from harness import store
from harness.cli import main
from harness.tests.fabricated import fetch_ns, make_run

QUICK = """
title = "Does it work?"
rounds = 2
[measure]
min_time = "2ms"
warmup_time = "1ms"
traced_iterations = 2
timeout = "60s"
[[sweep]]
name = "latency"
bench = "transfer"
[sweep.axes]
transport = ["null", "inproc"]
nbytes = ["8B", "1KiB"]
[[conclude]]
sweep = "latency"
baseline = { transport = "inproc" }
contender = { transport = "null" }
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    root = tmp_path / "results with a space"
    monkeypatch.setenv("VERBFLOW_RESULTS", str(root))
    return root


@pytest.fixture
def quick(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(QUICK)
    return str(path)


def call(*arguments):
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome


def test_run_ends_with_table_pictures_report_and_one_sentence(results, quick):
    outcome = call("run", quick)
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()
    assert any(line.startswith("transport") and "median" in line for line in lines)
    assert sum(line.startswith("picture: ") for line in lines) >= 3
    assert any(line.startswith("report:  ") for line in lines)
    assert lines[-1].startswith("verdict: On loopback: fetching a tensor with null is")


def test_every_command_speaks_json(results, quick):
    run = json.loads(call("run", quick, "--json").output)
    assert run["counts"] == {"ok": 8}
    assert run["comparisons"][0]["verdict"] == "cannot tell" or run["comparisons"][0]["ratio"]["value"] < 1
    name = run["folder"].rpartition("/")[2]
    plan = json.loads(call("plan", quick, "--json").output)
    assert len(plan["cells"]) == 4
    assert plan["estimate"]["trials"] == 8
    assert {row["name"] for row in json.loads(call("list", "--json").output)} >= {
        "smoke",
        "alexnet_rdma",
        "alexnet_local",
    }
    assert isinstance(json.loads(call("status", "--json").output), list)
    assert json.loads(call("report", name, "--json").output)["sentence"] == run["sentence"]
    rows = json.loads(call("export", name, "--table", "runs", "--json").output)
    assert len(rows) == 8
    assert json.loads(call("doctor", "--json").output)[0]["name"].startswith("transport")
    assert json.loads(call("run", "nosuch", "--json").output.splitlines()[0])["error"].startswith("no experiment")


def test_plan_shows_cells_and_estimate_and_runs_nothing(results, quick):
    outcome = call("plan", quick, "--set", "nbytes=8B..64B *2", "--rounds", "3")
    assert "8 cells x 3 rounds = 24 trials" in outcome.output
    assert not results.exists()


def test_an_interrupted_run_is_taken_up_again(results, quick, monkeypatch):
    from harness import runner

    real, calls = runner._run, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(runner, "_run", interrupted)
    outcome = call("run", quick)
    assert outcome.exit_code == 130
    assert "--resume" in outcome.output
    monkeypatch.setattr(runner, "_run", real)
    outcome = call("run", quick, "--resume")
    assert outcome.exit_code == 0
    assert "resuming" in outcome.output
    assert "3 of 8 trials were measured before" in outcome.output
    assert len(store.runs_of("quick")) == 1
    assert "resuming" not in call("run", quick, "--resume").output


def test_failed_trials_have_an_exit_code_of_their_own(results, quick):
    outcome = call("run", quick, "--set", "transport=grpc", "--set", "protocol=paper_read", "--rounds", "1")
    assert outcome.exit_code == 3
    assert "2 of 2 trials gave nothing" in outcome.output or "Nothing was measured" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("run", "alexnet_rmda"), 1, "did you mean alexnet_rdma"),
        (("run", "smoke", "--profile", "huge"), 1, "no profile is called 'huge'"),
        (("run", "smoke", "--set", "transport=pigeon"), 1, "allowed: inproc"),
        (("run", "smoke", "--set", "nbytes"), 2, "--set takes AXIS=VALUE"),
        (("run", "smoke", "--rounds", "0"), 2, "--rounds"),
        (("compare", "a", "b"), 1, "no stored run is called 'a'"),
        (("report", "nosuch"), 1, "no stored run"),
        (("export", "nosuch"), 1, "no stored run"),
        (("rxe",), 1, "name a command"),
    ],
)
def test_mistakes_are_told_in_sentences(results, arguments, code, word):
    outcome = call(*arguments)
    assert outcome.exit_code == code, outcome.output
    assert word in outcome.output
    assert "Traceback" not in outcome.output


def test_damaged_results_are_told_in_sentences(results):
    folder = make_run(results, "damaged")
    table = folder / "runs.parquet"
    table.write_bytes(table.read_bytes()[:100])
    outcome = call("export", "damaged")
    assert outcome.exit_code == 1
    assert "truncated or damaged" in outcome.output


def test_compare_tells_who_is_slower(results):
    make_run(results, "before")
    make_run(results, "after1", took=lambda p: fetch_ns(p) * 2)
    outcome = call("compare", "before", "after1")
    assert outcome.exit_code == 0
    assert outcome.output.count("slower") == 4
    assert "not interleaved" in outcome.output
    rows = json.loads(call("compare", "before", "after1", "--json").output)
    assert {row["verdict"] for row in rows} == {"slower"}


def test_export_writes_csv_and_a_chrome_trace(results, tmp_path):
    make_run(results, "mine")
    text = call("export", "mine").output
    assert text.splitlines()[0].startswith("experiment,sweep,bench,fidelity")
    assert len(text.splitlines()) == 5
    call("export", "mine", "--table", "trace", "--output", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_published_run_reports_without_its_raw_trials(results, tmp_path):
    make_run(results, "mine")
    assert call("publish", "mine", "2030-01-01-host").exit_code == 0
    shutil.rmtree(results / "scratch")
    outcome = call("report", "fabricated")
    assert outcome.exit_code == 0, outcome.output
    assert "shm is" in outcome.output


def test_doctor_says_what_can_run_and_why_not(results):
    output = call("doctor").output
    for word in (
        "transport shm",
        "soft-RoCE guest",
        "locked memory",
        "CPU governor",
        "load",
        "peer perftest",
        "huge pages",
    ):
        assert word in output


def test_without_a_guest_the_rest_runs_and_the_missing_packages_are_named(results, tmp_path, monkeypatch):
    from harness.launch import vm
    from runtime.errors import UnavailableError

    def nowhere(*arguments, **settings):
        raise UnavailableError("a soft-RoCE guest needs qemu, which is not installed; run: make setup")

    monkeypatch.setattr(vm, "choose", nowhere)
    path = tmp_path / "rdma.toml"
    text = QUICK.replace('title = "Does it work?"', 'title = "t"\nneeds_rdma = true').replace('"inproc"', '"verbs"')
    path.write_text(text + '[profile.soft-roce]\nplace = "guest"\n')
    outcome = call("run", str(path))
    assert outcome.exit_code == 0, outcome.output
    assert "here, without RDMA: a soft-RoCE guest needs qemu" in outcome.output
    assert "Nothing can be concluded" in outcome.output or "gave nothing" in outcome.output
    checked = call("run", str(path), "--check")
    assert checked.exit_code == 0
    assert "nothing is checked" in checked.output
