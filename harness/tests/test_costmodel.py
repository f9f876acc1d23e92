"""The cost model against data that it should recover, and bounds that can be worked out by hand."""

import numpy as np
import pytest

from harness.analysis.costmodel import (
    TransferFit,
    Workload,
    bottlenecks,
    bounds,
    crossover_bytes,
    fit_transfer,
    one_machine,
    predict,
    scaling,
)
from harness.analysis.simulation import Network
from harness.analysis.training_step import Layer

SIZES = [8, 1024, 65536, 1 << 20, 1 << 26]


def test_fit_recovers_alpha_and_beta_through_noise():
    generator = np.random.default_rng(1)
    times = [(20e-6 + size / 3e9) * generator.normal(1, 0.02) for size in SIZES]
    fit = fit_transfer(SIZES, times)
    assert fit.alpha == pytest.approx(20e-6, rel=0.05)
    assert fit.beta == pytest.approx(3e9, rel=0.05)
    assert fit.worst < 0.1


def test_fit_bends_where_the_caches_end():
    knee = 1 << 20
    bent = [20e-6 + min(size, knee) / 9e9 + max(0, size - knee) / 4e9 for size in (*SIZES, 1 << 24)]
    fit = fit_transfer([*SIZES, 1 << 24], bent)
    assert (fit.knee, fit.worst) == (knee, pytest.approx(0, abs=1e-6))
    assert fit.far_beta == pytest.approx(4e9)
    assert fit.seconds(1 << 27) == pytest.approx(20e-6 + knee / 9e9 + ((1 << 27) - knee) / 4e9)


def test_crossover_may_lie_beyond_the_knee():
    steady, copy = TransferFit(100e-6, 5e9, 0, 5), TransferFit(1e-6, 9e9, 0, 5, 1 << 20, 4e9)
    size = crossover_bytes(copy, steady)
    assert size is not None
    assert size > 1 << 20
    assert copy.seconds(size) == pytest.approx(steady.seconds(size))
    slower = TransferFit(50e-6, 8e9, 0, 5, 1 << 20, 6e9)
    beyond = crossover_bytes(copy, slower)
    assert beyond is not None
    assert copy.seconds(beyond) == pytest.approx(slower.seconds(beyond))


def test_fit_never_gives_a_negative_latency():
    fit = fit_transfer([1000, 2000, 3000], [1.0, 2.1, 3.3])
    assert fit.alpha == 0.0


def test_fit_of_one_size_is_refused():
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_transfer([8, 8], [1.0, 1.1])


def test_crossover_is_where_costs_are_equal():
    copy, register = TransferFit(1e-6, 5e9, 0, 5), TransferFit(50e-6, 20e9, 0, 5)
    size = crossover_bytes(copy, register)
    assert size is not None
    assert copy.seconds(size) == pytest.approx(register.seconds(size))
    assert crossover_bytes(TransferFit(1e-6, 9e9, 0, 5), TransferFit(2e-6, 8e9, 0, 5)) is None


LAYERS = [Layer("conv", 1_000_000, 9.0), Layer("fc", 9_000_000, 1.0)]
WORKLOAD = Workload(LAYERS, 0.1, 0.2, apply_seconds_per_byte=1e-9, batch=32, overlap=False)


def test_one_worker_is_compute_and_both_transfers():
    prediction = predict(WORKLOAD, Network(100e6), workers=1)
    assert 1 / prediction.steps_per_second == pytest.approx(0.3 + 0.1 + 0.1 + 0.01, rel=0.05)
    assert prediction.examples_per_second == pytest.approx(32 * prediction.steps_per_second)


def test_prediction_never_beats_the_bounds():
    network = Network(100e6, contention=0.1)
    for workers in (1, 2, 4, 8, 16):
        limit = min(bounds(WORKLOAD, network, workers).values())
        assert predict(WORKLOAD, network, workers).steps_per_second <= 1.05 * limit


def test_bottleneck_moves_from_compute_to_the_link():
    first = bottlenecks(WORKLOAD, Network(100e6), range(1, 20))
    assert first == {"the workers' compute": 1, "the server's link": 6}


def test_more_servers_lift_the_links_bound():
    frame = scaling(WORKLOAD, {"1 Gb/s": Network(117e6)}, [1000], [1, 4]).set_index("servers")
    assert frame.steps_per_second[4] == pytest.approx(4 * frame.steps_per_second[1])
    assert set(frame.way) == {"bound"}


def test_processes_of_one_machine_share_its_cores():
    network = one_machine(TransferFit(10e-6, 10e9, 0, 5))
    one = predict(WORKLOAD, network, workers=1, cores=2)
    four = predict(WORKLOAD, network, workers=4, cores=2)
    assert four.steps_per_second < 2.1 / WORKLOAD.compute_seconds
    assert four.steps_per_second > one.steps_per_second
    assert four.bottleneck == "the machine's cores"
