from pathlib import Path

import pytest

from harness.campaign import Place, make_plan
from harness.definition import experiment_paths, load_experiment
from harness.errors import DefinitionError

GOOD = """
title = "t"
rounds = 2
[[sweep]]
name = "latency"
bench = "transfer"
[sweep.axes]
transport = ["null", "inproc"]
nbytes = "8B..64B *8"
[[conclude]]
sweep = "latency"
baseline = { transport = "inproc" }
contender = { transport = "null" }
[profile.quick]
rounds = 1
[profile.quick.axes.latency]
nbytes = "8B"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def cells(tmp_path, text, profile="full", settings=None):
    return load_experiment(write(tmp_path, text), profile).cells(settings)


def test_a_definition_expands_to_its_cells(tmp_path):
    found = cells(tmp_path, GOOD)
    assert [(cell.params["transport"], cell.params["nbytes"]) for cell in found] == [
        ("null", 8), ("null", 64), ("inproc", 8), ("inproc", 64),
    ]  # fmt: skip
    assert found[0].params["protocol"] == "auto"


def test_profiles_and_settings_replace_axes(tmp_path):
    assert len(cells(tmp_path, GOOD, "quick")) == 2
    found = cells(tmp_path, GOOD, "quick", {"nbytes": ["1KiB..4KiB *2"]})
    assert sorted({cell.params["nbytes"] for cell in found}) == [1024, 2048, 4096]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("rounds = 2", "rounds = 0"), ["mine.toml", "rounds", "greater than or equal to 1"]),
        (("rounds = 2", "runds = 2"), ["mine.toml", "runds", "no such key", "rounds"]),
        (('bench = "transfer"', 'bench = "transfr"'), ["bench", "'transfr' is not allowed", "transfer, stream"]),
        (('"null", "inproc"', '"null", "carrier pigeon"'), ["axes.transport", "carrier pigeon", "allowed: inproc"]),
        (("nbytes = ", "nbites = "), ["axes.nbites", "did you mean nbytes"]),
        (('"8B..64B *8"', '"8B..64B *1"'), ["axes.nbytes", "at least 2"]),
        (('"8B..64B *8"', '"8 stone"'), ["axes.nbytes", "is not a size", "KiB"]),
        (('"8B..64B *8"', '"16GiB"'), ["axes.nbytes", "out of range"]),
        (("[[conclude]]\nsweep = \"latency\"", "[[conclude]]\nsweep = \"speed\""), ["conclude[0].sweep", "speed"]),
        (("[profile.quick.axes.latency]", "[profile.full.axes.speed]"), ["profile.full", "speed"]),
        (('title = "t"', ""), ["title", "is missing"]),
        (("[[sweep]]", "[[sweep]]\n[["), ["is not TOML", "line"]),
        (("[[conclude]]", '[[conclude]]\nabout = "weather"'), ["conclude[0].about", "'weather'", "latency"]),
    ],
)  # fmt: skip
def test_a_broken_definition_names_file_key_and_what_is_allowed(tmp_path, change, words):
    with pytest.raises(DefinitionError) as caught:
        cells(tmp_path, GOOD.replace(*change))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_all_errors_of_a_file_are_told_at_once(tmp_path):
    text = GOOD.replace("nbytes = ", "nbites = ", 1).replace('"null", "inproc"', '"nil"')
    with pytest.raises(DefinitionError) as caught:
        cells(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 2


def test_axes_less_excludes_may_not_be_empty(tmp_path):
    text = GOOD.replace("[[conclude]]", '[[sweep.exclude]]\ntransport = ["null", "inproc"]\n[[conclude]]', 1)
    with pytest.raises(DefinitionError, match="no cell to measure"):
        cells(tmp_path, text)


def test_an_unknown_experiment_gets_the_list_and_near_matches():
    with pytest.raises(DefinitionError) as caught:
        load_experiment("alexnet_rmda")
    assert "did you mean alexnet_rdma" in str(caught.value)
    assert "smoke" in str(caught.value)


def test_an_unknown_profile_and_an_unknown_axis_are_named(tmp_path):
    with pytest.raises(DefinitionError, match="known: full, quick"):
        load_experiment(write(tmp_path, GOOD), "fast")
    with pytest.raises(DefinitionError, match="--set colour"):
        cells(tmp_path, GOOD, settings={"colour": ["red"]})


@pytest.mark.parametrize("name", [name for name in experiment_paths() if not name.startswith("paper/")])
def test_every_experiment_that_is_shipped_is_valid_in_all_its_profiles(name):
    profiles = dict.fromkeys(["full", *load_experiment(name).definition.profile])
    for profile in profiles:
        plan = make_plan(load_experiment(name, profile), None, Place("here", "", ""))
        assert plan.trials


def test_the_schedule_interleaves_every_round_in_a_seeded_order(tmp_path):
    experiment = load_experiment(write(tmp_path, GOOD))
    first, second = (make_plan(experiment, None, Place("here", "", ""), 6) for _ in range(2))
    assert first.trials == second.trials
    rounds = [[trial.key for trial in first.trials if trial.round == number] for number in range(6)]
    assert all(sorted(turn) == sorted(rounds[0]) for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    assert [trial.order for trial in first.trials] == list(range(24))
