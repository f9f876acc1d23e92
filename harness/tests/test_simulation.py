"""The simulator against answers that can be worked out by hand."""

import pytest

from harness.analysis.simulation import Network, Operation, Transfer, simulate
from harness.analysis.training_step import Layer, training_step


def test_one_worker_without_overlap_pays_pull_compute_push_in_turn():
    layers = [Layer("a", 100, 1.0), Layer("b", 300, 3.0)]
    step = training_step("w", ["ps"], layers, forward_seconds=1.0, backward_seconds=2.0, overlap=False)
    outcome = simulate([step], Network(bandwidth=100.0), 2)
    assert outcome.finished[0] == pytest.approx([4 + 3 + 4, 2 * (4 + 3 + 4)])
    assert outcome.sent == {"ps": 800, "w": 800}
    assert outcome.busy["w"] == pytest.approx(6.0)


def test_overlap_hides_the_first_gradients_behind_the_backward_pass():
    layers = [Layer("a", 100, 1.0), Layer("b", 100, 1.0)]
    step = training_step("w", ["ps"], layers, forward_seconds=2.0, backward_seconds=2.0)
    # pulls end at 1 and 2; forward a 1-2, b 2-3; backward b 3-4, its push 4-5 beside backward a 4-5, whose push ends at 6
    assert simulate([step], Network(bandwidth=100.0), 1).seconds == pytest.approx(6.0)


def test_two_senders_share_the_receivers_link_equally():
    steps = [[Transfer(f"w{i}", "ps", 100)] for i in range(2)]
    assert simulate(steps, Network(bandwidth=100.0), 2).seconds == pytest.approx(2.0)


def test_a_transfer_speeds_up_when_its_rival_ends():
    steps = [[Transfer("w0", "ps", 100)], [Transfer("w1", "ps", 300)]]
    outcome = simulate(steps, Network(bandwidth=100.0), 2)
    assert outcome.finished == [[pytest.approx(2.0)], [pytest.approx(4.0)]]


def test_both_directions_of_a_link_are_independent():
    step = [Transfer("a", "b", 100), Transfer("b", "a", 100)]
    assert simulate([step], Network(bandwidth=100.0), 1).seconds == pytest.approx(1.0)


def test_contention_slows_the_link_as_a_whole():
    steps = [[Transfer(f"w{i}", "ps", 100)] for i in range(2)]
    assert simulate(steps, Network(bandwidth=100.0, contention=0.5), 2).seconds == pytest.approx(3.0)


def test_latency_and_message_cost_count_once_a_transfer_and_end():
    step = [Transfer("a", "b", 100), Transfer("a", "b", 100, after=(0,))]
    network = Network(bandwidth=100.0, latency=0.25, handling=lambda nbytes: 0.5)
    assert simulate([step], network, 1).seconds == pytest.approx(2 * (0.5 + 1.0 + 0.25 + 0.5))


def test_cores_are_shared_by_all_hosts():
    steps = [[Operation(f"w{i}", 1.0)] for i in range(4)]
    assert simulate(steps, Network(1.0), 4).seconds == pytest.approx(1.0)
    assert simulate(steps, Network(1.0), 4, cores=2).seconds == pytest.approx(2.0)
    assert simulate(steps, Network(1.0), 4, cores=1).seconds == pytest.approx(4.0)


def test_synchronous_steps_wait_for_the_slowest():
    steps = [[Operation("fast", 1.0)], [Operation("slow", 3.0)]]
    outcome = simulate(steps, Network(1.0), 4, synchronous=True)
    assert outcome.finished == [pytest.approx([1.0, 4.0]), pytest.approx([3.0, 6.0])]


def test_asynchronous_steps_are_counted_over_all_workers():
    steps = [[Operation("fast", 1.0)], [Operation("slow", 3.0)]]
    outcome = simulate(steps, Network(1.0), 6)
    assert [len(ends) for ends in outcome.finished] == [4, 2]
    assert outcome.rate() == pytest.approx(6 / 6.0)


def test_jitter_is_reproducible_and_centred():
    step = [Operation("w", 1.0)]
    first = simulate([step], Network(1.0), 500, jitter=0.4, seed=3)
    assert first.finished == simulate([step], Network(1.0), 500, jitter=0.4, seed=3).finished
    assert first.seconds == pytest.approx(500, rel=0.02)


def test_tensors_go_to_the_least_loaded_server():
    layers = [Layer("a", 100, 1.0), Layer("b", 60, 1.0), Layer("c", 50, 1.0)]
    step = training_step("w", ["ps0", "ps1"], layers, 1.0, 1.0)
    pulls = [item.src for item in step[:3]]
    assert pulls == ["ps0", "ps1", "ps1"]


def test_a_step_that_waits_for_its_future_is_refused():
    with pytest.raises(ValueError, match="item 0 of a step waits for item 1"):
        simulate([[Operation("w", 1.0, after=(1,)), Operation("w", 1.0)]], Network(1.0), 1)
