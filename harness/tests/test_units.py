import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import units
from harness.errors import DefinitionError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(4096, 4096), ("0", 0), ("8B", 8), ("4KiB", 4096), ("1.5 MB", 1_500_000), ("256 MiB", 1 << 28), ("1gib", 1 << 30)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert units.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["4K", "four", "-1", "1.5", "", None, -4, True, "1.0001B"])
def test_a_size_that_is_none_is_refused_and_the_units_are_named(text):
    with pytest.raises(DefinitionError, match=r"size|whole|negative"):
        units.parse_size(text)


def test_durations_and_rates():
    assert units.parse_duration("200ms") == 200_000_000
    assert units.parse_duration(1.5) == 1_500_000_000
    assert units.parse_duration("10min") == 600_000_000_000
    assert units.parse_rate("1Gbit/s") == 10**9
    with pytest.raises(DefinitionError, match="one of"):
        units.parse_duration("3 weeks")


@given(st.integers(min_value=0, max_value=1 << 45))
def test_a_formatted_size_never_drops_the_i_of_a_binary_unit(nbytes):
    text = units.format_bytes(nbytes)
    number, unit = text.split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number.replace(",", "")) * factor - nbytes) <= 0.01 * nbytes


@pytest.mark.parametrize(
    ("value", "text"), [(4096, "4 KiB"), (246_563_744, "247 MB"), (1 << 20, "1 MiB"), (1000, "1 kB"), (17, "17 B")]
)
def test_formatting_of_sizes(value, text):
    assert units.format_bytes(value) == text


def test_formatting_of_times_rates_and_ratios():
    assert units.format_ns(650) == "650 ns"
    assert units.format_ns(12_345) == "12.3 us"
    assert units.format_rate(3.6e9) == "3.6 GB/s"
    assert units.format_ratio(1.254) == "1.25x"
