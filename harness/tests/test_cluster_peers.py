"""What the comparison with TensorFlow's cluster runtime prints, and that its own contenders run."""

import statistics

import pytest

from harness.bench import cluster_peers


def test_ratios_are_paired_within_rounds():
    seconds = {"grpc": [2.0, 1.0, 4.0], "shm": [1.0, 1.0, 1.0], "tensorflow": [3.0, 3.0, 3.0]}
    lines = list(cluster_peers.report("alexnet", 2, 32, seconds))
    assert "alexnet: grpc 32.0 images/s" in lines
    assert "alexnet: grpc is 1.50 times as fast as tensorflow (rounds: 1.50, 3.00, 0.75)" in lines
    assert "alexnet: shm is 3.00 times as fast as tensorflow (rounds: 3.00, 3.00, 3.00)" in lines


def test_without_tensorflow_it_says_so():
    lines = list(cluster_peers.report("op", 1, 32, {"grpc": [1e-4], "shm": [5e-5]}))
    assert lines[0] == "op: grpc 100 us"
    assert "no TensorFlow" in lines[-1]


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_round_of_one_op_in_another_process(transport):
    with cluster_peers.ours(transport, "op", workers=1, batch=1, steps=20) as job:
        times = job.round() + job.round()
    assert [len(part) for part in times] == [20, 20]
    assert all(0 < statistics.median(part) < 10**9 for part in times)
