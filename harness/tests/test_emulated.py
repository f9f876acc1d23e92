"""The emulated job: small models, real processes."""

import os

import numpy as np
import pytest

from harness import runner
from harness.bench.base import VerificationError
from harness.bench.emulated import Emulated, EmulatedParams, check_steps
from harness.cell import Cell, Measure, schedule
from harness.launch.base import launcher
from harness.progress import Silent
from harness.records import read_trial
from harness.runner import Plan

MEASURE = Measure(0, 0, 2, 2, 0, 60_000_000_000)
SMALL = {"like": "alexnet_narrow", "compute_ns": 20_000_000, "batch": 24, "global_steps": 8}


def run(folder, place="local", options=None, **params):
    cell = Cell("rdma", "emulated", {**SMALL, **params}, MEASURE)
    made = Plan("test", "full", 1, 1, "code", tuple(schedule([cell], 1, 1, "code")), place, options or {})
    counts = runner.execute(folder, made, Silent())
    trial = read_trial(runner.trial_path(folder, made.trials[0]))
    assert counts == {"ok": 1}, trial.error
    return trial


def timed(trial):
    return [rank.samples for rank in trial.ranks if len(rank.samples)]


def test_steps_are_counted_over_all_workers_and_take_compute_and_wire(tmp_path):
    trial = run(tmp_path, transport="shm", fabric_rate=20_000_000, workers=2, spread_ns=40_000_000)
    samples = np.concatenate(timed(trial))
    assert len(samples) == 8
    total = int(samples["nbytes"][0]) // 2
    # Sleeping never ends early: three quarters of the compute at least, and both directions at the fabric's rate.
    assert samples["elapsed_ns"].min() >= 0.85 * 20_000_000 + 2 * total / 20_000_000 * 1e9 * 0.99
    assert all(rank.verified and not rank.suspect for rank in trial.ranks)
    assert trial.ranks[1].fidelity == "emulated-compute"


def test_without_servers_it_is_one_process(tmp_path):
    trial = run(tmp_path, transport="inproc", compute_ns=60_000_000, jitter_percent=0)
    assert len(trial.ranks) == 1
    (samples,) = timed(trial)
    assert len(samples) == 8
    assert samples["elapsed_ns"].min() >= 60_000_000  # the forward pass too, though nobody asks for its result


def test_synchronous_workers_make_equally_many_steps(tmp_path):
    trial = run(tmp_path, transport="shm", workers=2, synchrony="synchronous")
    assert [len(samples) for samples in timed(trial)] == [2, 2]


@pytest.mark.skipif(bool(launcher("netns", {}).available()), reason=launcher("netns", {}).available() or "available")
def test_over_a_shaped_link_a_step_takes_at_least_the_links_time(tmp_path):
    trial = run(tmp_path, "netns", {"rate": "50Mbit/s"}, transport="grpc", workers=1, global_steps=2)
    (samples,) = timed(trial)
    # 50 Mb/s is 6.25 MB/s; the bucket lets 256 KiB pass at once, in each direction.
    assert samples["elapsed_ns"].min() >= (samples["nbytes"][0] - 2 * 262144) / 6.25e6 * 1e9
    assert trial.fidelity == "shaped"
    left = [name for name in os.listdir("/run/netns") if name.startswith(f"vf{os.getpid()}")]
    assert left == []


def test_a_fabric_is_for_shared_memory(tmp_path):
    cell = Cell("rdma", "emulated", {**SMALL, "transport": "grpc", "fabric_rate": 1000}, MEASURE)
    made = Plan("test", "full", 1, 1, "code", tuple(schedule([cell], 1, 1, "code")))
    assert runner.execute(tmp_path, made, Silent()) == {"failed": 1}
    assert "a fabric paces shm" in read_trial(runner.trial_path(tmp_path, made.trials[0])).error


def test_arenas_hold_what_a_task_keeps():
    bench, mib = Emulated(), 1 << 20
    p = EmulatedParams(transport="shm", workers=7)
    assert 8 * 246 * 10**6 < bench.arena_bytes(p, -1) < 2_200 * mib
    assert bench.arena_bytes(p, 0) == bench.arena_bytes(p, 6) < 600 * mib
    assert bench.arena_bytes(EmulatedParams(servers=2), -1) < bench.arena_bytes(EmulatedParams(), -1) + mib
    assert bench.arena_bytes(EmulatedParams(arena_bytes=mib), 0) == mib


@pytest.mark.parametrize(
    ("updates", "message"), [([1, 2, 0], "element 2 of w"), ([1, 1.5, 1], "element 1"), ([1, 4, 2], "4.0000")]
)
def test_elements_with_a_wrong_number_of_updates_are_named(updates, message):
    check_steps(np.array([1.0, 2.0, 3.0]), 3, "w")
    with pytest.raises(VerificationError, match=message):
        check_steps(np.array(updates, float), 3, "w")
