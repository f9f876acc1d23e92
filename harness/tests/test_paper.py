"""The printed numbers and what is derived from them."""

import pandas as pd
import pytest

from harness import paper as campaign
from harness import units
from harness.analysis.paper import beside_printed, fit_contention, network_bandwidth, printed, steps_per_second
from harness.definition import load_experiment


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


@pytest.mark.parametrize("name", [*campaign.PARTS["full"], "paper/hardware"])
def test_every_experiment_has_a_full_and_a_shorter_quick_profile(name):
    counts = {}
    for profile in ("full", "quick"):
        experiment = load_experiment(name, profile)
        counts[profile] = len(experiment.cells()) * experiment.rounds
    assert 0 < counts["quick"] < counts["full"]


def test_compute_and_rates_of_the_emulation_are_those_of_the_bars_of_one_worker(paper):
    for name, cluster, transport in (("fig5_rdma", "A", "rdma"), ("fig6_rdma", "B", "rdma")):
        cells = [cell for cell in load_experiment(f"paper/{name}").cells() if cell.sweep == "rdma"]
        for cell in cells:
            assert cell.params["compute_ns"] / 1e9 == pytest.approx(paper.single_step_seconds[cluster], rel=0.001)
            assert cell.params["fabric_rate"] == pytest.approx(network_bandwidth(paper, cluster, transport), rel=0.001)
    for name, cluster in (("fig5_ipoib", "A"), ("fig6_ipoib", "B")):
        _, options = load_experiment(f"paper/{name}").launcher
        assert units.parse_rate(options["rate"]) / 8 == pytest.approx(
            network_bandwidth(paper, cluster, "ipoib"), rel=0.001
        )


def test_tables_are_written_for_readers_without_python(tmp_path):
    empty = pd.DataFrame({"speed": [1.0], "workers": [2]})
    found = campaign.Evidence(empty, empty, empty, empty, empty, empty, empty)
    names = {path.name for path in campaign.write_tables(found, tmp_path)}
    assert names == {
        f"{name}.csv" for name in ("points", "beside_printed", "parameters", "claims", "validation", "scaling")
    }
    assert (tmp_path / "points.csv").read_text() == "workers\n2\n"
