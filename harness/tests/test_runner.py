import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness import runner, store
from harness.cell import Cell, Measure, schedule
from harness.errors import RecordError
from harness.launch.base import JobSpec, launcher
from harness.progress import Lines, Silent
from harness.records import read_trial
from harness.runner import Plan
from runtime.deadline import Deadline

SHORT = Measure(min_time_ns=5_000_000, warmup_time_ns=1_000_000, traced_iterations=2, timeout_ns=60_000_000_000)


def cell(transport="inproc", nbytes=64, measure=SHORT, **params):
    return Cell("latency", "transfer", {"transport": transport, "nbytes": nbytes, **params}, measure)


def plan(cells, rounds=1, **changes):
    return Plan("test", "full", 1, rounds, "code", tuple(schedule(cells, rounds, 1, "code")), **changes)


def records(folder, made):
    return [read_trial(runner.trial_path(folder, trial)) for trial in made.trials]


def test_trials_run_in_fresh_processes_and_leave_samples_spans_and_counters(tmp_path):
    made = plan([cell(), cell("null")], rounds=2)
    assert runner.execute(tmp_path, made, Silent()) == {"ok": 4}
    pids = set()
    for trial in records(tmp_path, made):
        rank = trial.ranks[0]
        pids.add(rank.facts["pid"])
        assert rank.verified
        assert rank.iterations == (~rank.samples["traced"]).sum() >= 5
        assert rank.samples["traced"].sum() == 2
        assert (rank.samples["elapsed_ns"] > 0).all()
        names = {counter.name for counter in rank.counters}
        assert {"cpu.user", "switches.voluntary", "memory.peak_rss", "transport.fetches"} <= names
        if trial.params["transport"] == "inproc":
            assert len(rank.spans) >= 2
            assert rank.samples["nbytes"].min() == 64
    assert len(pids) == 4
    assert os.getpid() not in pids


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_two_ranks_over_a_real_transport(tmp_path, transport):
    made = plan([cell(transport, 100_000)])
    assert runner.execute(tmp_path, made, Silent()) == {"ok": 1}
    trial = records(tmp_path, made)[0]
    assert [rank.verified for rank in trial.ranks] == [True, True]
    assert [len(rank.samples) > 0 for rank in trial.ranks] == [True, False]
    assert [rank.suspect for rank in trial.ranks] == ["", ""]
    received = next(counter for counter in trial.ranks[0].counters if counter.name == "transport.bytes_in")
    assert received.after - received.before == 100_000 * trial.ranks[0].iterations


def test_a_failed_cell_keeps_its_error_and_the_rest_go_on(tmp_path, capsys):
    broken = cell("grpc", protocol="paper_read")
    made = plan([broken, cell("null")], rounds=4)
    counts = runner.execute(tmp_path, made, Lines())
    assert counts == {"ok": 4, "failed": 4}
    errors = [trial.error for trial in records(tmp_path, made) if trial.status == "failed"]
    assert sum("protocol" in error for error in errors) == runner.GIVE_UP_AFTER
    assert sum("given up" in error for error in errors) == 4 - runner.GIVE_UP_AFTER
    assert any("Traceback" in log.read_text() for log in (tmp_path / "logs").rglob("rank-0.log"))
    assert "failed" in capsys.readouterr().out


def test_what_cannot_run_here_is_skipped_with_its_reason(tmp_path):
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this machine has an RDMA device, so verbs can run")
    made = plan([cell("verbs")], rounds=2)
    assert runner.execute(tmp_path, made, Silent()) == {"skipped": 2}
    assert all("no RDMA device" in trial.error for trial in records(tmp_path, made))


def test_a_run_is_resumed_without_measuring_anything_twice(tmp_path):
    made = plan([cell(), cell("null")], rounds=2)
    first = replace(made, trials=made.trials[:3])
    runner.execute(tmp_path, first, Silent())
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "raw").iterdir()}
    victim = runner.trial_path(tmp_path, made.trials[0])
    victim.write_bytes(b"torn")
    assert runner.execute(tmp_path, made, Silent()) == {"ok": 4}
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "raw").iterdir()}
    assert len(after) == 4
    changed = {name for name, stamp in stamps.items() if after[name] != stamp}
    assert changed == {victim.name}


def test_other_parameters_are_other_cells(tmp_path):
    runner.execute(tmp_path, plan([cell(nbytes=64)]), Silent())
    runner.execute(tmp_path, plan([cell(nbytes=65)]), Silent())
    assert len(list((tmp_path / "raw").iterdir())) == 2


def test_a_cell_that_hangs_is_ended_at_its_time_limit(tmp_path):
    slow = cell("null", delay_ns=10**9, measure=replace(SHORT, min_iterations=100, timeout_ns=1_500_000_000))
    made = plan([slow])
    counts = runner.execute(tmp_path, made, Silent())
    assert set(counts) <= {"timeout", "failed"}
    assert records(tmp_path, made)[0].error


def test_the_time_budget_leaves_out_what_does_not_fit(tmp_path):
    made = plan([cell("null")], rounds=3, budget_ns=1)
    assert runner.execute(tmp_path, made, Silent()) == {"left out": 3}


def test_ctrl_c_ends_the_ranks_and_keeps_what_was_measured(tmp_path):
    slow = cell("shm", delay_ns=3 * 10**9)
    made = plan([cell("null"), slow])
    made = replace(made, trials=tuple(sorted(made.trials, key=lambda trial: "delay_ns" in trial.cell.params)))
    made.write(tmp_path)
    # Whoever runs these tests in the background has SIGINT ignored, and children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "harness.runner", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert "ok" in process.stdout.readline()
            deadline = Deadline.after(30)
            while (rank := _child_rank(process.pid)) is None:
                assert not deadline.expired()
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert len(list((tmp_path / "raw").iterdir())) == 1
    assert not _alive(rank)
    assert runner.finished(tmp_path, made) == {made.trials[0].run_id: "ok"}


def test_a_killed_runner_takes_its_ranks_with_it(tmp_path):
    made = plan([cell("shm", delay_ns=20 * 10**9)])
    made.write(tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "harness.runner", str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = Deadline.after(30)
    try:
        while (rank := _child_rank(process.pid)) is None:
            assert not deadline.expired()
            time.sleep(0.02)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.kill()
    process.wait()
    while _alive(rank) and not deadline.expired():
        time.sleep(0.02)
    assert not _alive(rank)


def _child_rank(pid):
    """The runner's child that is a rank and has begun its work: the first thing it does is to ask to die with its parent."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"harness.bench.rank" in command and "verbflow-arena" in Path(f"/proc/{child}/maps").read_text():
                return int(child)
        except FileNotFoundError:
            continue
    return None


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_every_ranks_own_error_is_told(tmp_path):
    made = plan([cell("grpc", protocol="paper_read")])
    runner.execute(tmp_path, made, Silent())
    error = records(tmp_path, made)[0].error
    assert error.startswith("rank 0: ConfigError")
    assert "rank 1: ConfigError" in error


def test_a_rank_that_is_killed_is_reported_with_its_signal(tmp_path):
    place = launcher("local")
    spec = cell("grpc", 64, delay_ns=10**9, measure=replace(SHORT, min_iterations=50))
    job = place.start(JobSpec(spec, 2, tmp_path, tmp_path / "logs"))
    time.sleep(1.0)
    os.kill(job._processes[1].pid, signal.SIGKILL)
    outcomes = job.wait(Deadline.after(30))
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].exit_code != 0
    assert "killed by signal 9" in runner._rank_record(tmp_path, outcomes[1], 1).error


def test_a_damaged_plan_is_told(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(RecordError, match=r"plan\.json cannot be read"):
        Plan.read(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"experiment": "x"}))
    with pytest.raises(RecordError, match="start a new run"):
        Plan.read(tmp_path)


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    made = plan([cell("null")], rounds=3)
    folders = [store.new_run("test", tmp_path) for _ in range(2)]
    for folder in folders:
        made.write(folder)
    commands = [[sys.executable, "-m", "harness.runner", str(folder)] for folder in folders]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0]
    for folder in folders:
        assert len(list((folder / "raw").iterdir())) == 3


def test_the_worker_imports_nothing_that_costs_seconds():
    code = (
        "import sys, harness.runner, harness.bench.rank, harness.bench.transfer\n"
        "bad = {'pandas', 'scipy', 'click', 'pydantic', 'pyarrow', 'matplotlib', 'rich', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
