import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import units
from harness.errors import DefinitionError
from harness.sweep import axis_values, combinations


def size(value):
    return units.parse_size(value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4KiB..64KiB *4", [4096, 16384, 65536]),
        ("8B..100B *2", [8, 16, 32, 64]),
        ("1..7 +2", [1, 3, 5, 7]),
        ("1..4", [1, 2, 3, 4]),
        (["8B", "1MiB..4MiB *2"], [8, 1 << 20, 2 << 20, 4 << 20]),
        (["1", "1..2"], [1, 2]),
        (5, [5]),
    ],
)
def test_ranges(text, values):
    assert axis_values(text, size) == values


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("8..4", "empty"),
        ("1..8 *1", "at least 2"),
        ("0..8 *2", "stays 0"),
        ("1..", "not a range"),
        ("1..8 +x", "not a"),
        ("1..8 *1.5", "not a number"),
        ([], "at least one value"),
        ("0..1GiB", "more than"),
    ],
)
def test_impossible_ranges_say_why(text, word):
    with pytest.raises(DefinitionError, match=word):
        axis_values(text, size)


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(2, 9))
def test_a_geometric_range_begins_at_its_first_value_and_stays_within(first, more, factor):
    values = axis_values(f"{first}..{first + more} *{factor}", size)
    assert values[0] == first
    assert values[-1] <= first + more < values[-1] * factor
    assert all(later == earlier * factor for earlier, later in itertools.pairwise(values))


def test_combinations_less_excludes():
    axes = {"transport": ["grpc", "shm"], "nbytes": [1, 2], "workers": [1]}
    found = combinations(axes, [{"transport": ["shm"], "nbytes": [2]}])
    assert len(found) == 3
    assert {"transport": "shm", "nbytes": 2, "workers": 1} not in found
    assert found[0] == {"transport": "grpc", "nbytes": 1, "workers": 1}
