"""Who polls and who sleeps: how long a spin lasts, and which bells are armed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.testing import End, eventually, pair, pattern
from runtime.tests.verbs_simulation import SimulatedPair, simulate
from runtime.transport.onesided import progress
from runtime.transport.onesided.spinning import Spinning

US = 1000


def soon() -> Deadline:
    return Deadline.after(30)


def test_a_spin_grows_over_the_wait_that_it_missed_and_falls_back_after_a_long_one() -> None:
    spinning = Spinning(60, 1000)
    assert spinning.ns == 60 * US
    spinning.waited(200 * US)
    assert 200 * US < spinning.ns < 400 * US
    spinning.waited(900 * US)
    assert spinning.ns == 1000 * US
    spinning.waited(5000 * US)
    assert spinning.ns == 60 * US


def test_without_a_spin_none_is_learnt() -> None:
    spinning = Spinning(0, 1000)
    for waited in (1, 100, 500, 5000):
        spinning.waited(waited * US)
        assert spinning.ns == 0


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedPair]:
    """Verbs on a simulated device; the queue pairs that asked for a notification, each time that they did."""
    simulate(monkeypatch)
    asked: list[SimulatedPair] = []
    request = SimulatedPair.request_notification
    monkeypatch.setattr(SimulatedPair, "request_notification", lambda pair: (asked.append(pair), request(pair))[1])
    return asked


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks but who is woken: what a lost wake-up costs is no longer a few milliseconds. (Nor is a goodbye to a channel
    that expects nothing, whose bell may be silent: that one is given up after 2 s.)"""
    monkeypatch.setattr(progress, "TICK_S", 60.0)


def test_who_fetches_in_a_loop_arms_no_bell_each_time(arms: list[SimulatedPair]) -> None:
    # Who polls for long enough does not arm because the machine is busy.
    with pair("verbs", params={"spin_us": 10_000, "spin_max_us": 10_000}) as (client, server):
        server.source.put("key", pattern(1000))
        into = np.empty(1000, np.uint8)
        channel = client.channel
        ours = channel.link._pair  # type: ignore[attr-defined]
        before = arms.count(ours)
        for _ in range(200):
            channel.fetch("key", into, deadline=soon()).result(soon())
        assert np.array_equal(into, pattern(1000))
        assert arms.count(ours) - before < 100


def test_an_answer_that_somebody_wants_to_be_called_for_rings(arms: list[SimulatedPair], no_ticks: None) -> None:
    with pair("verbs") as (client, server):
        server.source.put("key", pattern(1000))
        channel = client.channel
        for turn in range(20):
            channel.fetch("key", deadline=soon()).result(soon())
            came = threading.Event()
            later = channel.fetch(f"later {turn}", deadline=soon())
            later.add_done_callback(lambda _, came=came: came.set())  # type: ignore[misc]
            assert eventually(lambda turn=turn: server.source.asked(f"later {turn}"))  # type: ignore[misc]
            server.source.put(f"later {turn}", pattern(500, turn))
            assert came.wait(20)
            assert np.array_equal(later.result(soon()), pattern(500, turn))


def test_who_uses_a_link_for_a_moment_hides_nothing_that_came(arms: list[SimulatedPair], no_ticks: None) -> None:
    """Its lock keeps others from looking; what rang meanwhile rings no second time."""
    with pair("verbs") as (client, server):
        came = threading.Event()
        future = client.channel.fetch("key", deadline=soon())
        future.add_done_callback(lambda _: came.set())
        assert eventually(lambda: server.source.asked("key"))
        with client.channel._lock:  # type: ignore[attr-defined]
            server.source.put("key", pattern(1000))
            assert not came.wait(0.05)  # longer than anybody spins
        assert came.wait(20)
        assert np.array_equal(future.result(soon()), pattern(1000))


def test_an_end_that_fetches_and_serves_hears_both(arms: list[SimulatedPair], no_ticks: None) -> None:
    """What rings for one connection while a thread waits for the other must be heard by somebody."""
    with pair("verbs") as (one, other):
        for end in (one, other):
            end.source.put("key", pattern(1000))

        def fetch(end: End) -> None:
            for turn in range(200):
                deadline = Deadline.after(20)
                assert end.channel.fetch("key", deadline=deadline).result(deadline).nbytes == 1000
                if turn % 20 == 0:
                    time.sleep(0.003)  # let bells be armed, and everybody sleep

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(fetch, end) for end in (one, other)]:
                done.result(60)
