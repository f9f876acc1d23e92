"""The contract of every transport, as ``check_*(name)`` functions over its name.

A new transport is right when these pass. They state what base.py promises, and nothing about how it is done. Largest
size: VERBFLOW_CONTRACT_BYTES (default 256 MiB).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ArenaFullError,
    ChannelClosedError,
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolMismatchError,
    ShapeError,
    StepAbortedError,
    TransportError,
    UnauthenticatedError,
)
from runtime.memory.arena import Arena
from runtime.tensor import DTYPES, TensorSpec
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
from runtime.transport.base import MAX_KEY_BYTES, Options
from runtime.transport.registry import open_transport, transport_class

LARGEST = int(os.environ.get("VERBFLOW_CONTRACT_BYTES", 256 << 20))
PATIENCE = 60.0
KIB, MIB = 1 << 10, 1 << 20


def soon() -> Deadline:
    """The deadline of something that should just work."""
    return Deadline.after(PATIENCE)


def bytes_spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), np.dtype(np.uint8))


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs (greedy; the same ones every time)."""
    names = list(factors)
    generator = random.Random(seed)
    wanted = {
        (left, i, right, j)
        for left, right in itertools.combinations(names, 2)
        for i in range(len(factors[left]))
        for j in range(len(factors[right]))
    }
    rows = []
    while wanted:
        left, i, right, j = min(wanted)
        best: dict[str, int] = {}
        gain = -1
        for _ in range(20):
            row = {name: generator.randrange(len(factors[name])) for name in names} | {left: i, right: j}
            hits = sum((a, row[a], b, row[b]) in wanted for a, b in itertools.combinations(names, 2))
            if hits > gain:
                best, gain = row, hits
        wanted -= {(a, best[a], b, best[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: factors[name][at] for name, at in best.items()})
    return rows


def laid_out(spec: TensorSpec, layout: str, seed: int, arena: Arena | None) -> np.ndarray:
    """A source tensor of ``spec``; ``transposed`` and ``strided`` ones are not contiguous where their shape allows."""
    if layout == "transposed":
        flipped = TensorSpec(spec.shape[::-1], spec.dtype)
        return pattern_tensor(flipped, seed, arena).T
    if layout == "strided" and spec.shape:
        wider = TensorSpec((spec.shape[0] * 2, *spec.shape[1:]), spec.dtype)
        return pattern_tensor(wider, seed, arena)[::2]
    return pattern_tensor(spec, seed, arena)


def check_tensors(name: str) -> None:
    """Every dtype, shape, layout and home of memory; asked for before and after production."""
    rows = pairwise(
        {
            "dtype": list(DTYPES.values()),
            "shape": [(), (0,), (1,), (7, 5), (3, 0, 2), (2, 3, 4, 5, 1, 2), (257, 33)],
            "layout": ["contiguous", "transposed", "strided"],
            "source": ["arena", "heap"],
            "destination": ["fresh", "arena", "heap"],
            "order": ["produced first", "asked first"],
        }
    )
    with pair(name) as (client, server):
        for at, row in enumerate(rows):
            spec = TensorSpec(row["shape"], row["dtype"])
            tensor = laid_out(spec, row["layout"], at, server.arena if row["source"] == "arena" else None)
            guarded = None
            if row["destination"] != "fresh":
                guarded = Guarded(spec, client.arena if row["destination"] == "arena" else None)
            into = None if guarded is None else guarded.array
            key = f"tensor {at}"
            if row["order"] == "produced first":
                server.source.put(key, tensor)
            fetched = client.channel.fetch(key, into, deadline=soon())
            if row["order"] == "asked first":
                assert eventually(lambda key=key: server.source.asked(key)), row
                server.source.put(key, tensor)
            result = fetched.result(soon())
            assert same_bytes(result, tensor), row
            assert result.flags.c_contiguous and result.flags.writeable, row
            if guarded is not None:
                assert result is into and guarded.intact(), row
        assert eventually(lambda: server.source.leased == 0), "a lease was never released"


def sizes(largest: int) -> list[int]:
    """Sizes around every boundary that a protocol may have: slots, chunks, pages, thresholds."""
    edges = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
    around = [edge + off for edge in edges for off in (-1, 0, 1)]
    return [n for n in [0, 1, 7, 8, 1000, *around, 16 * MIB + 3, 64 * MIB, 256 * MIB, 1024 * MIB] if n <= largest]


def check_sizes(name: str) -> None:
    """From nothing to the largest size, into given memory; neighbours of the destination stay as they are."""
    _check_sizes(name, sizes(min(LARGEST, 256 * MIB)))


def check_gibibyte(name: str) -> None:
    """One tensor of 1 GiB."""
    _check_sizes(name, [1024 * MIB])


def _check_sizes(name: str, lengths: list[int]) -> None:
    with pair(name, arena_bytes=2 * lengths[-1] + 32 * MIB) as (client, server):
        for at, nbytes in enumerate(lengths):
            tensor = pattern_tensor(bytes_spec(nbytes), at, server.arena)
            server.source.put("size", tensor)
            guarded = Guarded(bytes_spec(nbytes), client.arena if at % 2 else None)
            client.channel.fetch("size", guarded.array, deadline=soon()).result(soon())
            assert np.array_equal(guarded.array, tensor), f"{nbytes} bytes differ"
            assert guarded.intact(), f"memory beside a destination of {nbytes} bytes was written to"
        counters = client.channel.counters
        assert counters.fetches == len(lengths)
        assert counters.bytes_in == sum(lengths)


def check_many_keys_at_once(name: str) -> None:
    """300 fetches of mixed sizes in flight from several threads, half of them before production; none gets another's."""
    count = 300
    lengths = [(8, 1000, 30 * KIB, 300 * KIB)[at % 4] + at for at in range(count)]
    tensors = [pattern(lengths[at], at) for at in range(count)]
    futures: dict[int, Any] = {}
    with pair(name, arena_bytes=128 * MIB) as (client, server):

        def ask(first: int) -> None:
            for at in range(first, count, 3):
                futures[at] = client.channel.fetch(f"key {at}", deadline=soon())

        for at in range(0, count, 2):
            server.source.put(f"key {at}", tensors[at])
        threads = [threading.Thread(target=ask, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for at in reversed(range(1, count, 2)):
            server.source.put(f"key {at}", tensors[at])
        for thread in threads:
            thread.join()
        for at in random.Random(1).sample(range(count), count):
            assert np.array_equal(futures[at].result(soon()), tensors[at]), f"key {at} has other content"


def check_both_directions(name: str) -> None:
    """Both ends fetch from each other at the same time."""
    with pair(name, arena_bytes=128 * MIB) as ends:
        tensors = [pattern(3 * MIB + rank, rank) for rank in range(2)]
        for rank in range(2):
            ends[rank].source.put("mine", tensors[rank])
        for _ in range(5):
            fetched = [end.channel.fetch("mine", deadline=soon()) for end in ends]
            for rank in range(2):
                assert np.array_equal(fetched[rank].result(soon()), tensors[1 - rank])


def check_callbacks_without_a_waiter(name: str) -> None:
    """A future completes, and calls back, also if nobody ever waits for it."""
    with pair(name) as (client, server):
        for at, nbytes in enumerate((8, 100 * KIB, 3 * MIB)):
            tensor = pattern(nbytes, at)
            server.source.put(f"key {at}", tensor)
            called = threading.Event()
            fetched = client.channel.fetch(f"key {at}", deadline=soon())
            fetched.add_done_callback(lambda _, called=called: called.set())
            assert called.wait(PATIENCE)
            assert np.array_equal(fetched.result(soon()), tensor)
            polled = client.channel.fetch(f"key {at}", deadline=soon())
            assert eventually(polled.done, PATIENCE)


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


def check_settings(name: str) -> None:
    """An unknown setting is refused with the known ones; so is a value of another type."""
    with contextlib.closing(Arena(1 << 16)) as arena:
        with pytest.raises(ConfigError, match="nonsense"):
            open_transport(name, Options(params={"nonsense": 1}), arena)


def check_keys(name: str) -> None:
    """Long keys and any characters are fine, too long ones refused."""
    with pair(name) as (client, server):
        for at, key in enumerate(["", " ", "a;b;c", "тензор 張量", "k" * MAX_KEY_BYTES, "k" * (MAX_KEY_BYTES - 1)]):
            server.source.put(key, pattern(100, at))
            assert np.array_equal(client.channel.fetch(key, deadline=soon()).result(soon()), pattern(100, at))
        with pytest.raises(ConfigError):
            client.channel.fetch("k" * (MAX_KEY_BYTES + 1), deadline=soon()).result(soon())


def check_borrow(name: str) -> None:
    """A borrowed tensor is a read-only view with the content, and the owner gets its memory back on release."""
    with pair(name) as (client, server):
        for at, nbytes in enumerate((0, 8, 70 * KIB, 3 * MIB)):
            tensor = pattern_tensor(bytes_spec(nbytes), at, server.arena if at % 2 else None)
            server.source.put(f"key {at}", tensor)
            lease = client.channel.borrow(f"key {at}", deadline=soon()).result(soon())
            assert np.array_equal(lease.array, tensor)
            assert not lease.array.flags.writeable
            lease.release()
            lease.release()
            with client.channel.borrow(f"key {at}", deadline=soon()).result(soon()) as view:
                assert np.array_equal(view, tensor)
        assert isinstance(client.channel.borrow("none", deadline=Deadline.after(0.1)).exception(soon()), DeadlineError)
        assert eventually(lambda: server.source.leased == 0)


def check_counters(name: str) -> None:
    """Counters of both ends agree with the bytes that were moved, also after the channel is closed."""
    with pair(name) as (client, server):
        lengths = [0, 8, 10_000, 3 * MIB]
        for at, nbytes in enumerate(lengths):
            server.source.put(f"key {at}", pattern(nbytes))
            client.channel.fetch(f"key {at}", deadline=soon()).result(soon())
        client.channel.close()
        received = client.transport.totals()
        assert (received.fetches, received.bytes_in) == (len(lengths), sum(lengths))
        assert eventually(
            lambda: (
                (server.transport.totals().served, server.transport.totals().bytes_out) == (len(lengths), sum(lengths))
            )
        ), server.transport.totals()


def check_connecting_again_and_again(name: str) -> None:
    """Channels come and go on one listener; what they leave behind, the fixture of the test sees."""
    with pair(name) as (client, server):
        server.source.put("key", pattern(5000))
        for at in range(10):
            channel = client.transport.connect(server.address, peer=f"visit {at}", deadline=soon())
            assert np.array_equal(channel.fetch("key", deadline=soon()).result(soon()), pattern(5000))
            channel.close()


def check_two_processes(name: str) -> None:
    """Two real processes: sizes into given memory both ways, and a content check on each side."""
    spawn(2, _rank_that_fetches, name, sizes(min(LARGEST, 16 * MIB + 3)), timeout=120)


def _rank_that_fetches(rank: Rank, name: str, lengths: list[int]) -> None:
    with rank.connect(name, arena_bytes=128 * MIB) as end:
        for at, nbytes in enumerate(lengths):
            tensor = pattern_tensor(bytes_spec(nbytes), 2 * at + rank.rank, end.arena if at % 2 else None)
            end.source.put(f"size {at}", tensor)
            guarded = Guarded(bytes_spec(nbytes), end.arena if at % 2 else None)
            end.channel.fetch(f"size {at}", guarded.array, deadline=rank.deadline).result(rank.deadline)
            assert np.array_equal(guarded.array, pattern(nbytes, 2 * at + 1 - rank.rank)), nbytes
            assert guarded.intact()
        rank.barrier()


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
                error = end.channel.fetch("key", deadline=Deadline.after(seconds)).exception(Deadline.after(10))
                assert isinstance(error, (DeadlineError, PeerLostError)), repr(error)
            end.channel.close()
        finally:
            os.kill(peer, signal.SIGKILL)


def check_static_edges(name: str) -> None:
    """Generations arrive complete in their slot, one after another, and only after the credit of the one before."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        specs = {
            1: TensorSpec((), np.dtype(np.float64)),
            2: TensorSpec((0,), np.dtype(np.uint8)),
            3: bytes_spec(3 * MIB),
            4: TensorSpec((33, 5), np.dtype(np.float32)),
        }
        guarded = {edge: Guarded(spec, consumer.arena) for edge, spec in specs.items()}
        offer = consumer.transport.offer({edge: g.array for edge, g in guarded.items()})
        producer.channel.prepare(offer)
        for generation in range(6):
            arrivals = {edge: consumer.transport.arrival(edge, generation) for edge in specs}
            sources = {
                edge: pattern_tensor(spec, 10 * generation + edge, producer.arena if (edge + generation) % 2 else None)
                for edge, spec in specs.items()
            }
            pushes = [producer.channel.push(edge, generation, sources[edge], deadline=soon()) for edge in specs]
            for edge in specs:
                arrivals[edge].result(soon())
                assert same_bytes(guarded[edge].array, sources[edge]), (edge, generation)
                assert guarded[edge].intact(), (edge, generation)
            for push in pushes:
                push.result(soon())
            for edge in specs:
                consumer.transport.release(edge, generation)
        consumer.transport.withdraw(list(specs), StepAbortedError("done"))


def check_static_credit(name: str) -> None:
    """A push ahead of its credit waits, and does not touch the slot until the consumer has released it."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        slot = Guarded(bytes_spec(100 * KIB), consumer.arena)
        producer.channel.prepare(consumer.transport.offer({5: slot.array}))
        first, second = pattern(100 * KIB, 1), pattern(100 * KIB, 2)
        producer.channel.push(5, 0, first, deadline=soon()).result(soon())
        consumer.transport.arrival(5, 0).result(soon())
        ahead = producer.channel.push(5, 1, second, deadline=soon())
        arrival = consumer.transport.arrival(5, 1)
        with pytest.raises(DeadlineError):
            arrival.result(Deadline.after(0.2))
        assert np.array_equal(slot.array, first)
        consumer.transport.release(5, 0)
        arrival.result(soon())
        ahead.result(soon())
        assert np.array_equal(slot.array, second) and slot.intact()


def check_static_withdraw(name: str) -> None:
    """Withdrawn edges fail their arrivals with the reason, their slots are not written to, and new edges work."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        slot = Guarded(bytes_spec(1000), consumer.arena)
        producer.channel.prepare(consumer.transport.offer({7: slot.array}))
        arrival = consumer.transport.arrival(7, 0)
        reason = StepAbortedError("the graph is gone")
        consumer.transport.withdraw([7], reason)
        assert arrival.exception(soon()) is reason
        late = producer.channel.push(7, 0, pattern(1000), deadline=Deadline.after(1.0))
        late.exception(soon())
        assert slot.untouched()
        producer.channel.prepare(consumer.transport.offer({8: slot.array}))
        producer.channel.push(8, 0, pattern(1000, 3), deadline=soon())
        consumer.transport.arrival(8, 0).result(soon())
        assert np.array_equal(slot.array, pattern(1000, 3))


def check_static_in_two_processes(name: str) -> None:
    """A hundred generations of several edges between two real processes, each verified by its consumer."""
    _needs_static(name)
    spawn(2, _rank_with_static_edges, name, timeout=120)


def _rank_with_static_edges(rank: Rank, name: str) -> None:
    lengths = {1: 8, 2: 5000, 3: 300 * KIB}
    with rank.connect(name) as end:
        slots = {edge: Guarded(bytes_spec(nbytes), end.arena) for edge, nbytes in lengths.items()}
        offers = rank.exchange(end.transport.offer({edge: slot.array for edge, slot in slots.items()}))
        end.channel.prepare(offers[1 - rank.rank])
        for generation in range(100):
            for edge, nbytes in lengths.items():
                tensor = pattern(nbytes, 1000 * edge + 2 * generation + rank.rank)
                end.channel.push(edge, generation, tensor, deadline=rank.deadline).result(rank.deadline)
            for edge, nbytes in lengths.items():
                end.transport.arrival(edge, generation).result(rank.deadline)
                expected = pattern(nbytes, 1000 * edge + 2 * generation + 1 - rank.rank)
                assert np.array_equal(slots[edge].array, expected), (edge, generation)
                assert slots[edge].intact()
                end.transport.release(edge, generation)
        rank.barrier()


def _needs_static(name: str) -> None:
    if not transport_class(name).supports_static:
        pytest.skip(f"{name} has no static edges")


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


CHECKS = {label: check for label, check in list(globals().items()) if label.startswith("check_")}
