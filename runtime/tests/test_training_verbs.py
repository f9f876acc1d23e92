"""Whole training jobs over RDMA verbs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.cluster.launcher import LocalCluster
from runtime.deadline import Deadline
from runtime.tests.test_jobs import LENET, WORKER, alone
from runtime.training.checkpoint import Checkpoint, latest_checkpoint
from runtime.training.report import read_report
from runtime.transport.registry import transport_class

pytestmark = [pytest.mark.rxe, pytest.mark.timeout(400)]
STEPS = 8


@pytest.mark.parametrize("scheme", ["async", "sync"])
def test_a_job_over_verbs_computes_what_one_process_does(tmp_path: Path, scheme: str) -> None:
    available = transport_class("verbs").probe()
    if not available.ok:
        pytest.skip(available.reason)
    program = ["-m", "runtime.training.replica", *LENET, "--batch", "16", "--steps", str(STEPS), "--warmup", "0"]
    program += ["--sync", scheme, "--checkpoint-dir", str(tmp_path), "--output", str(tmp_path / "report.npz")]
    common = ["--transport", "verbs", "--arena-mib", "16", "--threads", "1"]
    # Patience, because an emulated guest computes slowly.
    with LocalCluster({"ps": 1, "worker": 1}, programs={"worker": program}, options=common, ready_s=200) as job:
        assert job.wait("worker", Deadline.after(250)) == {WORKER: 0}, job.task(WORKER).errors()
    report = read_report(tmp_path / "report.npz")
    assert {transport for transport, _ in report.facts["routes"].values()} == {"verbs"}
    moved, least = report.counters[WORKER], STEPS * report.facts["parameter_bytes"]
    assert moved["verbs.bytes_in"] >= least and moved["verbs.bytes_out"] >= least
    path = latest_checkpoint(tmp_path)
    assert path is not None
    reached = alone(16, STEPS)
    with Checkpoint(path) as checkpoint:
        for name, array in checkpoint.variables():
            np.testing.assert_allclose(array, reached[name], rtol=1e-3, atol=1e-5, err_msg=name)
