from dataclasses import replace

from harness.cell import Cell, Measure, code_version


def test_the_key_follows_parameters_measurement_and_sources():
    cell = Cell("latency", "transfer", {"transport": "grpc", "nbytes": 8})
    key = cell.key("abc")
    assert key == Cell("another sweep", "transfer", {"nbytes": 8, "transport": "grpc"}).key("abc")
    assert key != cell.key("abd")
    assert key != replace(cell, bench="stream").key("abc")
    assert key != replace(cell, params={"transport": "grpc", "nbytes": 9}).key("abc")
    assert key != replace(cell, measure=Measure(min_time_ns=1)).key("abc")
    assert key == replace(cell, measure=Measure(timeout_ns=1)).key("abc")


def test_a_cell_survives_json():
    cell = Cell("latency", "transfer", {"transport": "grpc", "nbytes": 8}, Measure(min_iterations=7))
    assert Cell.from_json(cell.to_json()) == cell


def test_the_code_version_is_a_hash_of_the_sources():
    assert len(code_version()) == 16
    assert code_version() == code_version()
