"""The environment that makes memcpy stream where the last cache ends."""

from __future__ import annotations

import pytest

from runtime.cluster.launcher import LocalCluster
from runtime.memory import memcpy
from runtime.testing import Rank, spawn

CHOICE = "glibc.cpu.x86_non_temporal_threshold=0x100000"


def _in_force(rank: Rank) -> int | None:
    return memcpy.threshold()


@pytest.fixture
def deceived(monkeypatch):
    """A C library that believes in 192 MiB where there are 32."""
    monkeypatch.setattr(memcpy, "threshold", lambda tunables: 192 << 20)
    monkeypatch.setattr(memcpy, "last_cache", lambda: 32 << 20)


def test_the_last_cache_that_holds_data_is_found(tmp_path):
    caches = ((1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "512K"), (3, "Unified", "32768K"))
    for index, (level, kind, size) in enumerate(caches):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert memcpy.last_cache(tmp_path) == 32 << 20
    (tmp_path / "index3" / "size").write_text("much\n")
    assert memcpy.last_cache(tmp_path) is None
    (tmp_path / "index3" / "size").unlink()
    (tmp_path / "index3" / "type").write_text("Instruction\n")  # no third level: is it hidden?
    assert memcpy.last_cache(tmp_path) is None
    assert memcpy.last_cache(tmp_path / "nothing") is None


def test_a_threshold_beyond_the_cache_is_corrected(deceived):
    assert memcpy.environment({}) == {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x800000"}


def test_other_tunables_stay_and_a_choice_wins(deceived):
    assert memcpy.environment({"GLIBC_TUNABLES": "glibc.malloc.check=1"}) == {
        "GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=0x800000"
    }
    assert memcpy.environment({"GLIBC_TUNABLES": f"glibc.malloc.check=1:{CHOICE}"}) == {}


@pytest.mark.parametrize(
    ("own", "cache"), [(8 << 20, 32 << 20), (32 << 20, 32 << 20), (None, 32 << 20), (1 << 30, None)]
)
def test_what_is_sensible_or_unknown_is_left_alone(monkeypatch, own, cache):
    monkeypatch.setattr(memcpy, "threshold", lambda tunables: own)
    monkeypatch.setattr(memcpy, "last_cache", lambda: cache)
    assert memcpy.environment({}) == {}


@pytest.mark.skipif(memcpy.threshold() is None, reason="the C library does not list the threshold")
def test_the_library_itself_obeys():
    assert memcpy.threshold(CHOICE) == 1 << 20
    (in_force,) = spawn(1, _in_force, env={"GLIBC_TUNABLES": CHOICE})
    assert in_force == 1 << 20


@pytest.mark.skipif(memcpy.threshold() is None or memcpy.last_cache() is None, reason="threshold or cache is not known")
def test_processes_that_we_start_stream_from_within_the_cache():
    (in_force,) = spawn(1, _in_force)
    assert in_force is not None and in_force <= memcpy.last_cache()
    with LocalCluster({"ps": 1}, jobs_started=()) as job:
        assert memcpy.threshold(job._environment.get(memcpy.VARIABLE, "")) <= memcpy.last_cache()
