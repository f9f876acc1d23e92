"""Who polls and who sleeps: how long a spin lasts, and which bells are armed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.testing import End, eventually, pair, pattern
from runtime.tests.verbs_simulation import PLACE, SimulatedDevice, SimulatedPair
from runtime.transport.onesided.spinning import Spinning
from runtime.transport.onesided.transport import OneSidedTransport
from runtime.transport.verbs import transport as verbs_transport

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
    library = SimpleNamespace(name="simulated", open=lambda name: SimulatedDevice())
    monkeypatch.setattr(verbs_transport, "load_binding", lambda name="auto": library)
    monkeypatch.setattr(verbs_transport, "choose_place", lambda *_: PLACE)
    monkeypatch.setattr(verbs_transport, "why_unavailable", lambda: None)
    asked: list[SimulatedPair] = []
    request = SimulatedPair.request_notification
    monkeypatch.setattr(SimulatedPair, "request_notification", lambda pair: (asked.append(pair), request(pair))[1])
    return asked


def test_who_fetches_in_a_loop_arms_no_bell_each_time(arms: list[SimulatedPair]) -> None:
    with pair("verbs") as (client, server):
        server.source.put("key", pattern(1000))
        into = np.empty(1000, np.uint8)
        channel = client.channel
        ours = channel.link._pair  # type: ignore[attr-defined]
        before = arms.count(ours)
        for _ in range(200):
            channel.fetch("key", into, deadline=soon()).result(soon())
        assert np.array_equal(into, pattern(1000))
        assert arms.count(ours) - before < 100


def test_an_answer_that_somebody_wants_to_be_called_for_rings(arms: list[SimulatedPair]) -> None:
    with pair("verbs") as (client, server):
        progress = _progress(client)
        server.source.put("key", pattern(1000))
        channel = client.channel
        came = threading.Event()
        channel.fetch("key", deadline=soon()).result(soon())
        later = channel.fetch("later", deadline=soon())
        later.add_done_callback(lambda _: came.set())
        assert eventually(lambda: channel not in progress._unarmed)
        server.source.put("later", pattern(500))
        assert came.wait(30)
        assert np.array_equal(later.result(soon()), pattern(500))


def _progress(end: End):  # type: ignore[no-untyped-def]
    assert isinstance(end.transport, OneSidedTransport)
    return end.transport.progress
