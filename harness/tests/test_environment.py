import json

from harness import counters, doctor, environment


def test_the_environment_is_json_and_names_no_person_or_path():
    about = environment.describe()
    text = json.dumps(about)
    assert about["cpus"] >= 1
    assert about["packages"]["numpy"]
    for word in ("/home", "/root", "/tmp"):
        assert word not in text


def test_the_identity_ignores_what_changes_from_run_to_run():
    about = environment.describe()
    assert environment.identity(about) == environment.identity({**about, "load": [99, 99, 99]})
    assert environment.identity(about) != environment.identity({**about, "kernel": "another"})


def test_counters_before_and_after():
    before = counters.snapshot()
    sum(range(200_000))
    found = {counter.name: counter for counter in counters.differences(before, counters.snapshot())}
    assert found["clock.monotonic"].after > found["clock.monotonic"].before
    assert found["cpu.user"].unit == "ns"
    assert found["memory.peak_rss"].unit == "bytes"
    assert {name.split(".")[0] for name in found} <= {"cpu", "clock", "switches", "faults", "memory", "net", "rdma"}


def test_the_doctor_gives_a_remedy_for_what_it_finds_wrong():
    checks = doctor.examine()
    assert {check.state for check in checks} <= {"ok", "warn", "no", "info"}
    for check in checks:
        assert check.finding
        if check.state == "no" and check.name.startswith(("soft-RoCE", "locked")):
            assert check.remedy


def test_small_pages_of_shared_memory_are_a_warning_with_a_remedy(monkeypatch):
    about = environment.describe()
    for found, state in (("never", "warn"), ("deny", "warn"), ("advise", "ok"), ("within_size", "ok")):
        monkeypatch.setattr(environment, "describe", lambda found=found: {**about, "huge_pages_shared": found})
        check = next(check for check in doctor._memory() if check.name == "huge pages of shared memory")
        assert check.state == state
        assert ("shmem_enabled" in check.remedy) == (state == "warn")


def test_a_memcpy_that_believes_in_a_larger_cache_is_told(monkeypatch):
    monkeypatch.setattr(doctor.memcpy, "environment", lambda: {"GLIBC_TUNABLES": "x=0x800000"})
    found = doctor._memcpy(192 << 20, 32 << 20)
    assert (found.state, found.remedy) == ("info", "elsewhere: export GLIBC_TUNABLES=x=0x800000")
    assert "192 MiB" in found.finding and "32 MiB" in found.finding
    assert doctor._memcpy(8 << 20, 32 << 20).state == "ok"
    assert doctor._memcpy(None, 32 << 20).state == "info"
    monkeypatch.setattr(doctor.memcpy, "environment", dict)
    assert doctor._memcpy(192 << 20, 32 << 20).state == "warn"
