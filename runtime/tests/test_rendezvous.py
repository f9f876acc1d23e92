"""Rendezvous: producer and consumer in either order, once each, aborts, keys, and what the manager serves to peers."""

import threading

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import ConfigError, GraphError, PeerLostError, StepAbortedError, UnknownGraphError
from runtime.execution.rendezvous import Edge, detached, make_key, parse_key, step_aborted
from runtime.execution.step import (
    TOMBSTONES,
    FetchRoute,
    PushRoute,
    RendezvousManager,
    ServeRoute,
    SlotRoute,
)
from runtime.future import Future
from runtime.tensor import TensorSpec
from runtime.testing import pattern_tensor, same_bytes
from runtime.tests.local_rendezvous import LocalRendezvous
from runtime.transport.base import Lease

PS, WORKER = "/job:ps/task:0", "/job:worker/task:1"
SPEC = TensorSpec((5, 7), np.dtype(np.float32))
EDGE = Edge(3, "fc6/weights:0", PS, WORKER, SPEC)
SOON = Deadline.after(60.0)


def tensor(seed=1):
    return pattern_tensor(SPEC, seed)


def test_keys_say_who_what_and_when():
    key = make_key(EDGE, 0xAB, 0x1_0000_0001)
    assert key == f"{PS};00000000000000ab;{WORKER};fc6/weights:0;0000000100000001"
    assert parse_key(key) == (PS, 0xAB, WORKER, "fc6/weights:0", 0x1_0000_0001)
    for wrong in ("", "a;b;c", key + ";more", key.replace("ab;", "xyz;")):
        with pytest.raises(ConfigError, match="not a rendezvous key"):
            parse_key(wrong)


@pytest.mark.parametrize("consumer_first", [False, True])
def test_either_side_may_come_first(consumer_first):
    rendezvous, into, released = LocalRendezvous(1), np.zeros(SPEC.shape, SPEC.dtype), []
    sent = tensor()
    if consumer_first:
        future = rendezvous.recv(EDGE, into)
        assert not future.done()
        rendezvous.send(EDGE, sent, lambda: released.append(True))
    else:
        rendezvous.send(EDGE, sent, lambda: released.append(True))
        assert not released
        future = rendezvous.recv(EDGE, into)
    future.result(SOON)
    rendezvous.consumed(EDGE)
    assert same_bytes(into, sent)
    assert released == [True]


def test_each_edge_is_sent_and_received_once():
    rendezvous, into = LocalRendezvous(1), np.zeros(SPEC.shape, SPEC.dtype)
    rendezvous.send(EDGE, tensor())
    with pytest.raises(GraphError, match="sent twice"):
        rendezvous.send(EDGE, tensor())
    rendezvous.recv(EDGE, into)
    with pytest.raises(GraphError, match="received twice"):
        rendezvous.recv(EDGE, into)


def test_a_wrong_destination_fails_the_receiver_only():
    rendezvous, released = LocalRendezvous(1), []
    future = rendezvous.recv(EDGE, np.zeros(3))
    rendezvous.send(EDGE, tensor(), lambda: released.append(True))
    with pytest.raises(GraphError, match=r"sent float32\[5, 7\], received into float64\[3\]"):
        future.result(SOON)
    assert released == [True]


def test_abort_fails_what_waits_and_what_comes_and_releases_what_was_sent():
    rendezvous, released = LocalRendezvous(7), []
    other = Edge(4, "x:0", WORKER, PS, SPEC)
    future = rendezvous.recv(EDGE, np.zeros(SPEC.shape, SPEC.dtype))
    rendezvous.send(other, tensor(), lambda: released.append(True))
    first = PeerLostError("/job:ps/task:0 died")
    rendezvous.abort(first)
    rendezvous.abort(ValueError("too late"))
    assert released == [True]
    for attempt in (lambda: future.result(SOON), lambda: rendezvous.send(EDGE, tensor())):
        with pytest.raises(StepAbortedError, match="step 0x7 was given up: /job:ps/task:0 died") as caught:
            attempt()
        assert caught.value.__cause__ is first


def test_an_abort_passed_on_keeps_its_first_cause():
    first = PeerLostError("gone")
    again = step_aborted(2, step_aborted(1, first))
    assert again.__cause__ is first
    assert str(again) == "step 0x2 was given up: gone"


def test_a_kept_error_lets_go_of_its_frames():
    def fail():
        local = np.zeros(10)
        raise PeerLostError("gone", local.size)

    with pytest.raises(PeerLostError) as caught:
        fail()
    twin = detached(caught.value)
    assert type(twin) is PeerLostError
    assert twin.args == ("gone", 10)
    assert twin.__traceback__ is None
    aborted = detached(step_aborted(3, caught.value))
    assert isinstance(aborted.__cause__, PeerLostError)
    assert aborted.__cause__.__traceback__ is None

    class Odd(Exception):
        def __init__(self):
            super().__init__("never rebuilt from its arguments")

    assert "never rebuilt" in str(detached(Odd()))


class Peer:
    """A channel or transport end that answers when told to."""

    def __init__(self):
        self.calls = []
        self.futures = []

    def _answer(self, *call):
        self.calls.append(call)
        self.futures.append(Future("peer"))
        return self.futures[-1]

    def push(self, wire, generation, array, *, deadline):
        return self._answer("push", wire, generation, array)

    def fetch(self, key, into=None, *, deadline):
        return self._answer("fetch", key, into)

    def arrival(self, wire, generation):
        return self._answer("arrival", wire, generation)

    def release(self, wire, generation):
        self.calls.append(("release", wire, generation))


def begin(routes, step=5, generation=2, manager=None):
    manager = manager or RendezvousManager(PS, 0xAB)
    return manager, manager.begin(step, routes, generation=generation, deadline=SOON)


def test_a_pushed_edge_is_released_when_its_memory_is_free():
    peer, released = Peer(), []
    _, step = begin({3: PushRoute(peer, 70, "shm")})
    sent = tensor()
    step.send(EDGE, sent, lambda: released.append(True))
    assert peer.calls == [("push", 70, 2, sent)]
    assert not released
    peer.futures[0].set_result(None)
    assert released == [True]


def test_a_failed_push_aborts_the_step():
    peer, released = Peer(), []
    _, step = begin({3: PushRoute(peer, 70), 4: SlotRoute(peer, 71)})
    waiting = step.recv(Edge(4, "x:0", WORKER, PS, SPEC), tensor())
    step.send(EDGE, tensor(), lambda: released.append(True))
    peer.futures[1].set_exception(PeerLostError("worker is gone"))
    assert released == [True]
    with pytest.raises(StepAbortedError, match="worker is gone"):
        waiting.result(SOON)


def test_a_static_edge_gives_its_credit_back():
    peer = Peer()
    _, step = begin({3: SlotRoute(peer, 71, "verbs")})
    step.recv(EDGE, tensor())
    step.consumed(EDGE)
    assert peer.calls == [("arrival", 71, 2), ("release", 71, 2)]
    assert step.describe(EDGE) == f"Recv of fc6/weights:0 from {PS} over verbs"


def test_a_fetched_edge_asks_by_the_producers_incarnation():
    peer, into = Peer(), tensor()
    _, step = begin({3: FetchRoute(peer, 0xCD, "grpc")}, step=9)
    step.recv(EDGE, into)
    step.consumed(EDGE)
    assert peer.calls == [("fetch", make_key(EDGE, 0xCD, 9), into)]


def test_routes_refuse_the_wrong_end_and_unknown_edges():
    _, step = begin({3: ServeRoute(), 4: FetchRoute(Peer(), 0)})
    with pytest.raises(GraphError, match="not received here"):
        step.recv(EDGE, tensor())
    with pytest.raises(GraphError, match="not sent from here"):
        step.send(Edge(4, "x:0", WORKER, PS, SPEC), tensor())
    with pytest.raises(GraphError, match="no route"):
        step.send(Edge(9, "x:0", WORKER, PS, SPEC), tensor())


@pytest.mark.parametrize("ask_first", [False, True])
def test_the_manager_serves_what_a_step_sends(ask_first):
    manager, answers, released = RendezvousManager(PS, 0xAB), [], []
    key, sent = make_key(EDGE, 0xAB, 5), tensor()
    if ask_first:  # even before this task was told of the step
        manager.take(key, answers.append)
        assert not answers
    _, step = begin({3: ServeRoute("grpc")}, manager=manager)
    step.send(EDGE, sent, lambda: released.append(True))
    if not ask_first:
        manager.take(key, answers.append)
    (lease,) = answers
    assert isinstance(lease, Lease)
    assert same_bytes(lease.array, sent)
    assert not lease.array.flags.writeable
    assert not released
    lease.release()
    lease.release()
    assert released == [True]
    manager.take(key, answers.append)
    assert isinstance(answers[1], GraphError)
    manager.cleanup(5)


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ("nonsense", ConfigError, "not a rendezvous key"),
        (make_key(EDGE, 0xCD, 5), UnknownGraphError, "was restarted"),
        (make_key(Edge(1, "x:0", WORKER, PS, SPEC), 0xAB, 5), ConfigError, "not its producer"),
    ],
)
def test_questions_that_cannot_be_answered_get_an_error(key, error, text):
    answers = []
    RendezvousManager(PS, 0xAB).take(key, answers.append)
    assert isinstance(answers[0], error)
    assert text in str(answers[0])


def test_aborted_and_finished_steps_answer_at_once():
    manager, answers, released = RendezvousManager(PS, 0xAB), [], []
    manager.take(make_key(EDGE, 0xAB, 5), answers.append)
    manager.abort(5, PeerLostError("gone"))
    manager.take(make_key(EDGE, 0xAB, 5), answers.append)
    with pytest.raises(StepAbortedError, match="gone"):
        begin({}, manager=manager)
    _, step = begin({3: ServeRoute()}, step=6, manager=manager)
    step.send(EDGE, tensor(), lambda: released.append(True))
    assert manager.running() == [6]
    manager.cleanup(6)
    manager.cleanup(6)
    assert released == [True]
    manager.take(make_key(EDGE, 0xAB, 6), answers.append)
    assert all(isinstance(answer, StepAbortedError) for answer in answers)
    assert "is over" in str(answers[2])
    assert manager.running() == []


def test_a_step_runs_once_and_tombstones_are_bounded():
    manager, _ = begin({})
    with pytest.raises(GraphError, match=r"runs on .* already"):
        begin({}, manager=manager)
    for step in range(100, 100 + TOMBSTONES + 10):
        manager.cleanup(step)
    assert len(manager._ended) == TOMBSTONES


def test_close_fails_everybody():
    manager, step = begin({3: SlotRoute(Peer(), 1)})
    waiting, answers = step.recv(EDGE, tensor()), []
    manager.close(PeerLostError("shutting down"))
    with pytest.raises(StepAbortedError, match="shutting down"):
        waiting.result(SOON)
    manager.take(make_key(EDGE, 0xAB, 77), answers.append)
    assert isinstance(answers[0], StepAbortedError)
    with pytest.raises(StepAbortedError):
        begin({}, step=8, manager=manager)


def test_many_threads_meet_on_one_table():
    manager, step = begin({index: ServeRoute() for index in range(200)})
    edges = [Edge(index, f"t{index}:0", PS, WORKER, SPEC) for index in range(200)]
    got, guard = {}, threading.Lock()

    def ask(part):
        for edge in part:

            def reply(lease, edge=edge):
                with guard:
                    got[edge.id] = lease.array[0, 0]
                lease.release()

            manager.take(make_key(edge, 0xAB, 5), reply)

    def send(part):
        for edge in part:
            step.send(edge, np.full(SPEC.shape, edge.id, SPEC.dtype))

    threads = [threading.Thread(target=work, args=(edges[k::2],)) for work in (ask, send) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {index: float(index) for index in range(200)}
