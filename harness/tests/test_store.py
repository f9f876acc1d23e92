import errno
import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness import records, store
from harness.errors import BusyError, RecordError
from harness.records import RankRecord, TrialRecord
from harness.tests.fabricated import make_run


def test_a_run_comes_back_as_tidy_frames(tmp_path):
    results = store.load(make_run(tmp_path))
    assert len(results.runs) == 20
    assert results.runs["nbytes"].dtype == np.int64
    assert set(results.runs["status"]) == {"ok"}
    assert len(results.samples) == 20 * 124
    assert set(results.spans["phase"].astype(str)) == {"wire", "copy"}
    assert set(results.counters["name"]) == {"transport.bytes_in"}
    merged = results.samples.merge(results.runs, on="run_id")
    assert len(merged) == len(results.samples)
    assert set(records.RUNS) <= set(results.runs.columns)


def test_several_runs_load_together_and_gaps_stay_integers(tmp_path):
    first, second = make_run(tmp_path, "a"), make_run(tmp_path, "b", failed="shm")
    results = store.load(first, second)
    assert set(results.runs["run"]) == {"a", "b"}
    assert (results.runs["status"] == "failed").sum() == 10
    assert set(results.runs.loc[results.runs["status"] == "failed", "error"]) == {"rank 0: it broke"}


def test_a_truncated_table_is_named_with_the_way_to_rebuild_it(tmp_path):
    folder = make_run(tmp_path)
    path = folder / "samples.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"samples\.parquet is truncated or damaged.*verbflow report"):
        _ = store.load(folder).samples


def test_an_older_schema_is_refused_in_a_sentence(tmp_path):
    folder = make_run(tmp_path)
    table = pq.ParquetFile(folder / "runs.parquet").read()
    pq.write_table(table.replace_schema_metadata({b"verbflow.schema": b"0"}), folder / "runs.parquet")
    with pytest.raises(RecordError, match="written by an older version"):
        _ = store.load(folder).runs
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "schema": 99}))
    with pytest.raises(RecordError, match="a newer version"):
        store.read_info(folder)


def test_damaged_run_json_and_absent_tables_are_told(tmp_path):
    folder = make_run(tmp_path)
    (folder / "run.json").write_text("{")
    with pytest.raises(RecordError, match="damaged"):
        store.read_info(folder)
    (folder / "runs.parquet").unlink()
    with pytest.raises(RecordError, match=r"runs\.parquet does not exist"):
        _ = store.load(folder).runs


def test_a_damaged_raw_trial_is_left_out_and_named(tmp_path):
    folder = make_run(tmp_path)
    victim = sorted((folder / "raw").glob("*.npz"))[0]
    victim.write_bytes(b"PK not a zip")
    info = json.loads((folder / "run.json").read_text())
    store.compact(folder, {key: info[key] for key in ("experiment", "title", "code", "definition")})
    assert victim.name in json.loads((folder / "run.json").read_text())["damaged"][0]
    assert len(store.load(folder).runs) == 19


def test_a_full_disk_leaves_what_was_there_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "trial.npz"
    trial = TrialRecord("k-000", "k", 0, 0, "s", "b", {}, "ok", "", 1, 1, ranks=[RankRecord(0)])
    records.write_trial(path, trial)
    before = path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match="No space left on device; what was measured before is kept"):
        records.write_trial(path, trial)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["trial.npz"]


def test_records_survive_the_disk(tmp_path):
    rank = RankRecord(1, "failed", "why", "loopback", "doubt", True, 7, span_names=["a"])
    rank.samples = np.ones(3, records.SAMPLE)
    rank.counters = [records.Counter("x", 1, 2, "bytes")]
    trial = TrialRecord("k-000", "k", 0, 5, "s", "b", {"nbytes": 8}, "failed", "why", 1, 2, "loopback", [rank])
    records.write_trial(tmp_path / "t.npz", trial)
    found = records.read_trial(tmp_path / "t.npz")
    assert found.ranks[0].counters == rank.counters
    assert (found.ranks[0].samples == rank.samples).all()
    assert {**vars(found), "ranks": 0} == {**vars(trial), "ranks": 0}


def test_two_processes_get_two_folders_and_one_lock(tmp_path):
    first, second = store.new_run("x", tmp_path), store.new_run("x", tmp_path)
    assert first != second
    with store.locked(first):
        with pytest.raises(BusyError, match="another process"), store.locked(first):
            pass
        with store.locked(second):
            pass
    with store.locked(first):
        pass


def test_runs_are_found_by_what_people_call_them(tmp_path):
    folder = make_run(tmp_path, "20300101T000000")
    for name in (str(folder), "20300101T000000", "fabricated/20300101T000000", "fabricated"):
        assert store.find_run(name, tmp_path) == folder
    with pytest.raises(RecordError, match="near: fabricated"):
        store.find_run("fabricatd", tmp_path)


def test_publishing_copies_tables_only(tmp_path):
    folder = make_run(tmp_path)
    target = store.publish(folder, "2030-01-01-host", tmp_path)
    assert target == tmp_path / "published" / "fabricated" / "2030-01-01-host"
    assert sorted(path.name for path in target.iterdir()) == [
        "counters.parquet", "run.json", "runs.parquet", "samples.parquet", "spans.parquet",
    ]  # fmt: skip
    assert len(store.load(target).runs) == 20
