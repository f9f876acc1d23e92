"""Rules for every test: warnings are errors (pyproject.toml), nothing leaks, nothing hangs, hypothesis is the same each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from runtime.deadline import Deadline
from runtime.leaks import LeakWatch
from runtime.testing import pair, pattern

hypothesis.settings.register_profile(
    "verbflow",
    deadline=None,  # a shared machine says nothing about the code
    derandomize=True,
    database=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("verbflow")

# A test that is not marked as long ends by then, or is stuck.
SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("timeout", "slow", "guest", "rxe")):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def grpc_is_warm() -> Iterator[None]:
    """gRPC opens descriptors at its first use; that is no leak of the first test.

    It closes them some time after its last channel is gone, and opens others with the next: one stays open until the end.
    """
    if "grpc" not in os.environ.get("VERBFLOW_CONTRACT_TRANSPORTS", "grpc"):
        yield  # a slow guest is spared its import and its busy threads
        return
    with pair("grpc") as (client, server):
        server.source.put("key", pattern(8))
        client.channel.fetch("key", deadline=Deadline.after(30)).result(Deadline.after(30))
        yield


@pytest.fixture(autouse=True)
def no_leaks(grpc_is_warm: None) -> Iterator[None]:
    """Fail a test that leaves threads, child processes, descriptors or names in /dev/shm behind."""
    watch = LeakWatch()
    yield
    leaks = watch.leaks()
    assert not leaks, "left behind: " + "; ".join(leaks)
