"""The printed numbers and what is derived from them."""

import pytest

from harness.analysis.paper import beside_printed, fit_contention, network_bandwidth, printed, steps_per_second


@pytest.fixture(scope="module")
def paper():
    return printed()


def test_the_model_is_the_papers(paper):
    assert paper.model_bytes == 4 * 61_640_936
    assert len(paper.layers) == 8


def test_every_bar_and_mark_is_there_once(paper):
    points = paper.points
    assert not points.duplicated(["cluster", "transport", "workers"]).any()
    bars = points[points.cluster == "A"].groupby("transport").size().to_dict()
    assert bars == {"tcp": 7, "ipoib": 5, "rdma": 5}
    assert points[points.cluster == "B"].groupby("transport").size().to_dict() == {"ipoib": 4, "rdma": 5}
    tcp_two = points[(points.cluster == "A") & (points.transport == "tcp") & (points.workers == 2)]
    assert tcp_two.steps_per_second.item() == pytest.approx(300 / 752)


@pytest.mark.parametrize(
    ("cluster", "transport", "megabytes_a_second"),
    [("A", "tcp", 122), ("A", "ipoib", 1138), ("A", "rdma", 2466), ("B", "rdma", 2987)],
)
def test_bandwidth_follows_from_the_bar_of_one_worker(paper, cluster, transport, megabytes_a_second):
    assert network_bandwidth(paper, cluster, transport) / 1e6 == pytest.approx(megabytes_a_second, rel=0.01)


def test_the_calibrating_bars_are_met(paper):
    network = fit_contention(paper, "A", "rdma")
    points = paper.points[(paper.points.cluster == "A") & (paper.points.transport == "rdma")].copy()
    points["steps_per_second"] = [steps_per_second(paper, "A", network, workers) for workers in points.workers]
    errors = beside_printed(paper, points).set_index("workers").error
    assert abs(errors[1]) < 0.01
    assert abs(errors[5]) < 0.05


def test_unknown_columns_of_the_paper_are_refused(paper):
    with pytest.raises(ValueError, match="no bar of one worker for tcp on cluster B"):
        network_bandwidth(paper, "B", "tcp")
