import os
import sys
from pathlib import Path

import pytest

from harness import runner
from harness.cell import Cell, Measure, schedule
from harness.launch import base
from harness.launch.base import JobSpec, RankSpec, by_core, known_launchers, launcher, split_cpus
from harness.launch.slurm import SlurmLauncher
from runtime.errors import ConfigError

PROGRAM = [sys.executable, "-m", "harness.bench.rank", "/shared/a b", "1"]


def spec(**changes):
    return RankSpec(**{"rank": 1, "size": 3, "folder": Path("/shared/a b"), **changes})


def test_local_starts_the_rank_itself_and_pins_it_where_told():
    assert launcher("local").command(spec()) == PROGRAM
    assert launcher("local").command(spec(cpus=(0, 2))) == ["taskset", "--cpu-list", "0,2", *PROGRAM]


def test_ranks_split_the_processors_where_there_are_enough():
    assert split_cpus([0, 4, 1, 5, 2], 2) == [[0, 4], [1, 5]]
    assert split_cpus([0, 1], 3) == split_cpus([0, 1], 1) == []
    assert sorted(by_core({3, 1})) == [1, 3]
    job = JobSpec(Cell("", "transfer", {}), 2, Path("/x"), Path("/x"))
    parts = [rank.cpus for rank in launcher("local", {"cpus": "split"}).specs(job)]
    if len(os.sched_getaffinity(0)) > 1:
        assert len(parts[0]) == len(parts[1]) > 0
        assert not set(parts[0]) & set(parts[1])
    with pytest.raises(ConfigError, match='neither "split" nor a list'):
        launcher("local", {"cpus": "all"}).specs(job)


def test_mpi_starts_one_rank_at_its_host_and_passes_the_token_by_name_only():
    found = launcher("mpi", {"hosts": ["a", "b"]})
    assert found.host(3) == "b"
    command = found.command(spec(host="b", environment={"OMP_NUM_THREADS": "1"}))
    assert command == [
        "mpirun", "-np", "1", "--host", "b", "-x", "VERBFLOW_TOKEN", "-x", "VERBFLOW_PARENT_DEATH", "-x", "PYTHONUNBUFFERED",
        "-x", "OMP_NUM_THREADS", *PROGRAM,
    ]  # fmt: skip
    mpich = launcher("mpi", {"hosts": ["a"], "flavour": "mpich"}).command(spec(host="a"))
    assert mpich[:7] == ["mpirun", "-np", "1", "-hosts", "a", "-genvlist", ",".join(command[6:11:2])]


def test_slurm_places_ranks_over_the_nodes_of_the_allocation(monkeypatch):
    monkeypatch.setattr(SlurmLauncher, "_nodes", lambda self: ("n1", "n2"))
    command = launcher("slurm", {"srun_args": ["--mpi=none"]}).command(spec())
    assert command == [
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap", "--kill-on-bad-exit=1", "--export=ALL", "--quiet",
        "--mpi=none", *PROGRAM,
    ]  # fmt: skip


def test_netns_builds_a_shaped_network_and_takes_it_down_again():
    found = launcher("netns", {"rate": "1Gbit/s", "delay": "50us"})
    commands = [" ".join(command) for command in found.bring_up(2)]
    assert sum("netns add" in command for command in commands) == 3
    assert sum("tbf rate 1000000000bit" in command for command in commands) == 4
    assert sum("netem delay 50us" in command for command in commands) == 4
    assert found.host(1) == "10.99.0.2"
    assert found.command(spec())[:4] == ["ip", "netns", "exec", found.namespace(1)]
    assert found.take_down() == []


def test_ssh_passes_job_and_token_by_standard_input_and_brings_records_back(tmp_path):
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    fake.chmod(0o755)
    options = {"hosts": ["127.0.0.1"], "ssh": [str(fake)], "port": 29411}
    place = launcher("ssh", options)
    assert place.available() == ""
    command = place.command(spec(environment={"OMP_NUM_THREADS": "1"}))
    assert command[1] == "127.0.0.1"
    assert command[2].endswith("&& OMP_NUM_THREADS=1 exec .venv/bin/python -m harness.bench.rank - 1")
    measure = Measure(min_time_ns=1_000_000, warmup_time_ns=1_000_000, traced_iterations=1, timeout_ns=60_000_000_000)
    cell = Cell("latency", "transfer", {"transport": "grpc", "nbytes": 64}, measure)
    trial = schedule([cell], 1, 1, "code")[0]
    record = runner._run(tmp_path, trial, place, "")
    assert record.status == "ok", record.error
    assert len(record.ranks[0].samples) > 0
    assert record.ranks[1].verified


def test_unknown_launchers_and_options_list_the_known_ones():
    with pytest.raises(ConfigError, match=", ".join(known_launchers())):
        launcher("teleport")
    with pytest.raises(ConfigError, match="has no option color"):
        launcher("local", {"color": "red"})


@pytest.mark.parametrize("spread", [False, True])
def test_ranks_on_this_host_have_memcpy_corrected_and_a_choice_goes_everywhere(tmp_path, monkeypatch, spread):
    started = []

    class Started:
        pid = 1

        def __init__(self, command, *, env, **_):
            started.append(env.get("GLIBC_TUNABLES"))

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(base.subprocess, "Popen", Started)
    monkeypatch.setattr(
        base.memcpy,
        "environment",
        lambda inherited: {} if "GLIBC_TUNABLES" in inherited else {"GLIBC_TUNABLES": "ours"},
    )
    found = launcher("local")
    monkeypatch.setattr(type(found), "spread", spread)
    job = JobSpec(Cell("", "transfer", {}), 1, tmp_path, tmp_path)
    found.start(job)
    monkeypatch.setenv("GLIBC_TUNABLES", "theirs")
    found.start(job)
    assert started == [None if spread else "ours", "theirs"]
    assert found.specs(job)[0].environment["GLIBC_TUNABLES"] == "theirs"
