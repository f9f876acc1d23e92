"""Every benchmark runs a short trial over real transports, verifies its content, and is not suspect."""

import numpy as np
import pytest

from harness import runner
from harness.bench.base import VerificationError, benchmark, check_pattern, known_benchmarks, parameters_of, pattern
from harness.cell import Cell, Measure, schedule
from harness.launch.base import launcher
from runtime.errors import ConfigError

SHORT = Measure(1_000_000, 1_000_000, 2, 20, 1, 100_000_000_000)
SMALL = {"arena_bytes": 64 << 20, "batch": 4}


def measure(tmp_path, bench, **params):
    defaults = {name: item.default for name, item in parameters_of(benchmark(bench)).items()}
    trial = schedule([Cell("sweep", bench, {**defaults, **params}, SHORT)], 1, 1, "code")[0]
    place = launcher("local")
    record = runner._run(tmp_path, trial, place, "")
    assert record.status == "ok", record.error
    assert all(rank.verified and not rank.suspect for rank in record.ranks)
    return record


@pytest.mark.parametrize(
    ("bench", "params", "timed"),
    [
        ("stream", {"transport": "shm", "window": 3, "directions": 2, "nbytes": 5000}, [0, 1]),
        ("stream", {"transport": "grpc", "window": 2, "nbytes": 70_000}, [0]),
        ("fanin", {"transport": "grpc", "workers": 2, "servers": 2, "payload": "medium"}, [2, 3]),
        ("fanin", {"transport": "shm", "workers": 2, "payload": "small", "push": False}, [1, 2]),
        ("overhead", {"ops": 10}, [0]),
        ("nullstep", {"transport": "shm", "access": "scalar", "workers": 2}, [1, 2]),
        ("nullstep", {"transport": "grpc", "nbytes": 1 << 20, "tensors": 3, "servers": 2}, [2]),
        ("alone", {"model": "mlp_digits", "batch": 4, "processes": 2}, [0, 1]),
        ("alone", {"model": "mlp_digits", "batch": 4, "beside": "shm", "nbytes": 70_000}, [0]),
        ("training", {"transport": "grpc", "model": "mlp_digits", **SMALL}, [1]),
        (
            "training",
            {"transport": "shm", "model": "mlp_digits", "workers": 2, "synchrony": "synchronous", **SMALL},
            [1, 2],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_short_trial(tmp_path, bench, params, timed):
    record = measure(tmp_path, bench, **params)
    assert [rank.rank for rank in record.ranks if len(rank.samples)] == timed
    counts = {rank.iterations for rank in record.ranks}
    assert len(counts) == 1
    for rank in (record.ranks[at] for at in timed):
        assert (rank.samples["elapsed_ns"] > 0).all()


def test_a_training_step_moves_the_parameters_both_ways(tmp_path):
    record = measure(tmp_path, "training", transport="grpc", model="mlp_digits", **SMALL)
    worker = record.ranks[1]
    moved = int(worker.samples["nbytes"][0])
    deltas = {counter.name: counter.after - counter.before for counter in worker.counters}
    assert deltas["transport.grpc.bytes_in"] >= worker.iterations * moved // 2
    assert deltas["transport.grpc.bytes_out"] >= worker.iterations * moved // 2
    assert {1, 2} & set(worker.spans["phase"].tolist()) or len(worker.spans)


def test_a_pattern_shows_the_first_wrong_byte():
    good = pattern(10_000, 7)
    check_pattern(good, 7, "copy")
    bad = good.copy()
    bad[4097] ^= 1
    with pytest.raises(VerificationError, match="byte 4097 of 10000"):
        check_pattern(bad, 7, "copy")
    for shift in (1, 64, 4096):
        assert not np.array_equal(pattern(9000, 7)[shift:], pattern(9000 - shift, 7))
    assert not np.array_equal(pattern(100, 1), pattern(100, 2))


def test_unknown_benchmarks_list_the_known_ones():
    with pytest.raises(ConfigError, match="known: transfer, stream"):
        benchmark("telepathy")
    for name in known_benchmarks():
        made = benchmark(name)
        assert made.name == name
        assert made.summary
        assert all(item.metadata["meaning"] for item in parameters_of(made).values())


@pytest.mark.parametrize("name", ["tensorflow", "gloo", "mpi4py"])
def test_a_peer_that_is_not_installed_is_skipped_with_the_way_to_install_it(tmp_path, monkeypatch, name):
    # An interpreter without any package.
    import sys

    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.base_exec_prefix}/bin/python3" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("VERBFLOW_PEER_PYTHON", str(bare))
    defaults = {key: item.default for key, item in parameters_of(benchmark(name)).items()}
    trial = schedule([Cell("sweep", name, defaults, SHORT)], 1, 1, "code")[0]
    record = runner._run(tmp_path, trial, launcher("local"), "")
    assert record.status == "skipped"
    assert "make peers" in record.error
