"""The contract of every transport where something goes wrong: ``check_*(name)`` as in contract.py."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ArenaFullError,
    ChannelClosedError,
    DeadlineError,
    PeerLostError,
    ProtocolMismatchError,
    ShapeError,
    StepAbortedError,
    TransportError,
    UnauthenticatedError,
)
from runtime.tensor import TensorSpec
from runtime.testing import (
    End,
    Guarded,
    Rank,
    Shelf,
    eventually,
    faulty,
    open_end,
    pair,
    pattern,
    pattern_tensor,
    same_bytes,
    spawn,
)
from runtime.tests.contract import KIB, MIB, PATIENCE, bytes_spec, soon


def check_abort_with_fetches_in_flight(name: str) -> None:
    """Pending fetches fail with the reason, and so do later ones; the other end and new channels live."""
    with pair(name) as (client, server):
        fetched = [client.channel.fetch(f"never {at}", deadline=soon()) for at in range(10)]
        assert eventually(lambda: server.source.asked("never 9"))
        reason = StepAbortedError("step 7 was given up")
        client.channel.abort(reason)
        client.channel.abort(StepAbortedError("a later reason"))
        for future in fetched:
            assert future.exception(soon()) is reason
        assert client.channel.fetch("never again", deadline=soon()).exception(soon()) is reason
        client.channel.close()
        server.source.put("never 3", pattern(8))
        again = client.transport.connect(server.address, peer="again", deadline=soon())
        server.source.put("fine", pattern(1000))
        assert np.array_equal(again.fetch("fine", deadline=soon()).result(soon()), pattern(1000))


def check_close_with_fetches_in_flight(name: str) -> None:
    """Pending fetches fail, and once ``close`` is back nothing writes to their destinations, though the tensor comes."""
    with pair(name) as (client, server):
        guarded = [Guarded(bytes_spec(nbytes)) for nbytes in (100, 5 * MIB)]
        fetched = [client.channel.fetch(f"key {at}", g.array, deadline=soon()) for at, g in enumerate(guarded)]
        assert eventually(lambda: server.source.asked("key 1"))
        client.channel.close()
        client.channel.close()
        for future in fetched:
            assert isinstance(future.exception(soon()), ChannelClosedError)
        for at, g in enumerate(guarded):
            server.source.put(f"key {at}", pattern(g.array.nbytes))
        assert isinstance(client.channel.fetch("key 0", deadline=soon()).exception(soon()), ChannelClosedError)
        assert eventually(lambda: server.source.leased == 0)
        assert all(g.untouched() for g in guarded)


def check_listener_closed(name: str) -> None:
    """The serving end goes in order while fetches wait: PeerLostError that names it, at once."""
    with pair(name) as (client, server):
        fetched = client.channel.fetch("never", deadline=soon())
        assert eventually(lambda: server.source.asked("never"))
        server.transport.close()
        error = fetched.exception(soon())
        assert isinstance(error, PeerLostError), repr(error)
        assert "/job:test/task:1" in str(error)
        assert isinstance(client.channel.fetch("more", deadline=soon()).exception(soon()), PeerLostError)


def check_deadline(name: str) -> None:
    """A fetch that nobody answers ends at its deadline, waited for or not, and says what it was; others go on."""
    with pair(name) as (client, server):
        fetched = client.channel.fetch("absent", deadline=Deadline.after(0.2))
        with pytest.raises(DeadlineError, match=r"absent.*/job:test/task:1"):
            fetched.result(Deadline.after(0.2))
        unwaited = client.channel.fetch("absent too", deadline=Deadline.after(0.1))
        assert eventually(unwaited.done)
        assert isinstance(unwaited.exception(soon()), DeadlineError)
        patient = client.channel.fetch("late", deadline=soon())
        with pytest.raises(DeadlineError):
            patient.result(Deadline.after(0.05))
        server.source.put("late", pattern(5000))
        assert np.array_equal(patient.result(soon()), pattern(5000))


def check_slow_peer(name: str) -> None:
    """Answers that come late, in any order, go to the right fetches."""
    shelf = Shelf()
    with faulty(shelf, delay=0.05) as slow, pair(name, (None, slow)) as (client, _):
        for at in range(20):
            shelf.put(f"key {at}", pattern(2000 * at, at))
        fetched = [client.channel.fetch(f"key {at}", deadline=soon()) for at in range(20)]
        for at, future in enumerate(fetched):
            assert np.array_equal(future.result(soon()), pattern(2000 * at, at))


def check_dropped_answer(name: str) -> None:
    """One key that is never answered does not hold the others up."""
    shelf = Shelf()
    with faulty(shelf, drop=lambda key: key == "lost") as lossy, pair(name, (None, lossy)) as (client, _):
        lost = client.channel.fetch("lost", deadline=Deadline.after(1.0))
        shelf.put("found", pattern(3000))
        assert np.array_equal(client.channel.fetch("found", deadline=soon()).result(soon()), pattern(3000))
        assert isinstance(lost.exception(soon()), DeadlineError)


def check_arena_full(name: str) -> None:
    """No room for a fresh destination fails that fetch, naming the occupants, and no other."""
    with pair(name, arena_bytes=8 * MIB) as (client, server):
        server.source.put("large", pattern(3 * MIB, 1))
        server.source.put("small", pattern(1000, 2))
        kept = client.arena.allocate(client.arena.nbytes - client.arena.used_bytes - MIB - 64 * KIB, "kept")
        error = client.channel.fetch("large", deadline=soon()).exception(soon())
        assert isinstance(error, ArenaFullError), repr(error)
        assert "kept" in str(error)
        assert np.array_equal(client.channel.fetch("small", deadline=soon()).result(soon()), pattern(1000, 2))
        client.arena.free(kept)
        assert np.array_equal(client.channel.fetch("large", deadline=soon()).result(soon()), pattern(3 * MIB, 1))


def check_fresh_memory_comes_back(name: str) -> None:
    """What a fetch allocated is given back with the last view of it."""
    with pair(name, arena_bytes=16 * MIB) as (client, server):
        server.source.put("key", pattern(3 * MIB))
        used = []
        for _ in range(20):
            assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(3 * MIB))
            used.append(client.arena.used_bytes)
        assert eventually(lambda: client.arena.used_bytes <= min(used))


def check_wrong_token(name: str) -> None:
    """A peer of another run is refused, and the listener lives on."""
    with pair(name) as (client, server), _end(name, token="another run's token") as stranger:
        with pytest.raises(UnauthenticatedError):
            stranger.transport.connect(server.address, peer="server", deadline=soon())
        with pytest.raises(UnauthenticatedError):
            with _end(name, token="") as nameless:
                nameless.transport.connect(server.address, peer="server", deadline=soon())
        server.source.put("key", pattern(10))
        assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(10))


def check_version_mismatch(name: str) -> None:
    """A peer of another protocol version is refused with both versions named, and the listener lives on."""
    if name == "inproc":
        with pair(name) as (client, server), pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "PROTOCOL_VERSION", 99)
            with pytest.raises(ProtocolMismatchError, match=r"1.*99"):
                client.transport.connect(server.address, peer="server", deadline=soon())
        return
    spawn(2, _rank_of_another_version, name)


def _rank_of_another_version(rank: Rank, name: str) -> None:
    if rank.rank == 0:
        with _end(name) as server:
            rank.exchange(server.listen())
            rank.barrier()
            with _end(name) as client:
                channel = client.transport.connect(server.address, peer="server", deadline=soon())
                server.source.put("key", pattern(10))
                assert np.array_equal(channel.fetch("key", deadline=soon()).result(soon()), pattern(10))
        return
    wire.PROTOCOL_VERSION = 99
    address = rank.exchange()[0]
    with _end(name) as client:
        with pytest.raises(ProtocolMismatchError, match="99"):
            client.transport.connect(address, peer="server", deadline=soon())
    rank.barrier()


def check_nobody_listens(name: str) -> None:
    """Connecting to an end that has gone fails at once, or at the deadline, with the peer's name."""
    with pair(name) as (client, server):
        address = server.address
        server.transport.close()
        with pytest.raises((PeerLostError, DeadlineError), match="the server"):
            client.transport.connect(address, peer="the server", deadline=Deadline.after(5))


def check_destination_that_does_not_fit(name: str) -> None:
    """Another shape or dtype: ShapeError naming both, the destination untouched, the channel well."""
    with pair(name) as (client, server):
        spec = TensorSpec((6, 4), np.dtype(np.float32))
        tensors = {"small": pattern_tensor(spec, 1), "large": pattern(5 * MIB, 2)}
        for key, tensor in tensors.items():
            server.source.put(key, tensor)
        for key, wrong in [
            ("small", TensorSpec((4, 6), np.dtype(np.float32))),
            ("small", TensorSpec((6, 4), np.dtype(np.int32))),
            ("small", TensorSpec((6, 3), np.dtype(np.float32))),
            ("large", bytes_spec(5 * MIB - 1)),
            ("large", bytes_spec(5 * MIB + 1)),
            ("large", bytes_spec(0)),
        ]:
            guarded = Guarded(wrong)
            error = client.channel.fetch(key, guarded.array, deadline=soon()).exception(soon())
            assert isinstance(error, ShapeError), repr(error)
            assert str(TensorSpec.of(tensors[key])) in str(error) and str(wrong) in str(error)
            assert guarded.untouched()
        for unusable in (np.empty((4, 6), np.float32).T, _frozen(np.empty((6, 4), np.float32))):
            with pytest.raises(ShapeError):
                client.channel.fetch("small", unusable, deadline=soon()).result(soon())
        for key, tensor in tensors.items():
            assert same_bytes(client.channel.fetch(key, deadline=soon()).result(soon()), tensor)
        assert eventually(lambda: server.source.leased == 0)


def check_error_reply(name: str) -> None:
    """An error of the source fails that one fetch: of the same class where it is ours, else with its text."""
    with pair(name) as (client, server):
        server.source.put("now", StepAbortedError("step 7 was given up"))
        with pytest.raises(StepAbortedError, match="step 7 was given up"):
            client.channel.fetch("now", deadline=soon()).result(soon())
        fetched = client.channel.fetch("later", deadline=soon())
        assert eventually(lambda: server.source.asked("later"))
        server.source.put("later", ZeroDivisionError("ünlucky " + "x" * 100_000))
        with pytest.raises(TransportError, match=r"ZeroDivisionError: ünlucky x"):
            fetched.result(soon())
        server.source.put("good", pattern(10))
        assert np.array_equal(client.channel.fetch("good", deadline=soon()).result(soon()), pattern(10))


def check_peer_killed(name: str) -> None:
    """SIGKILL of the peer with fetches in flight: PeerLostError long before their deadline, and nothing hangs."""
    spawn(2, _rank_whose_peer_is_killed, name, may_die=[1])


def _rank_whose_peer_is_killed(rank: Rank, name: str) -> None:
    with rank.connect(name) as end:
        if rank.rank == 1:
            end.source.put("key", pattern(100))
            assert eventually(lambda: end.source.asked("never 4"))
            rank.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        assert np.array_equal(end.channel.fetch("key", deadline=soon()).result(soon()), pattern(100))
        fetched = [end.channel.fetch(f"never {at}", deadline=soon()) for at in range(5)]
        rank.barrier()
        for future in fetched:
            error = future.exception(soon())
            assert isinstance(error, PeerLostError), repr(error)
            assert "/job:test/task:1" in str(error)
        later = end.channel.fetch("key", deadline=soon())
        assert isinstance(later.exception(soon()), PeerLostError)


def check_peer_stopped(name: str) -> None:
    """A peer that is stopped (SIGSTOP) answers nothing: the fetch ends by its deadline, and ``close`` ends too."""
    spawn(2, _rank_whose_peer_is_stopped, name, may_die=[1])


def _rank_whose_peer_is_stopped(rank: Rank, name: str) -> None:
    with rank.connect(name) as end:
        if rank.rank == 1:
            end.source.put("key", pattern(100))
            rank.exchange(os.getpid())
            signal.pause()
        peer = rank.exchange()[1]
        os.kill(peer, signal.SIGSTOP)
        try:
            # A peer that runs on another processor stops a moment later, and may answer in it.
            assert eventually(lambda: Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            for seconds in (0.3, 2.5):
                wait = Deadline.after(PATIENCE)
                error = end.channel.fetch("key", deadline=Deadline.after(seconds)).exception(wait)
                assert isinstance(error, (DeadlineError, PeerLostError)), repr(error)
                assert wait.remaining() > 0.6 * PATIENCE, "the wait did not end with the fetch"
            end.channel.close()
        finally:
            os.kill(peer, signal.SIGKILL)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@contextlib.contextmanager
def _end(name: str, **options: Any) -> Iterator[End]:
    end = open_end(name, **options)
    try:
        yield end
    finally:
        end.close()
