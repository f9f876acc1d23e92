"""The contract of every transport, as ``check_*(name)`` functions over its name.

A new transport is right when these pass. They state what base.py promises, and nothing about how it is done. Largest
size: VERBFLOW_CONTRACT_BYTES (default 256 MiB).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import (
    ConfigError,
    DeadlineError,
)
from runtime.memory.arena import Arena
from runtime.tensor import DTYPES, TensorSpec
from runtime.testing import (
    Guarded,
    Rank,
    eventually,
    pair,
    pattern,
    pattern_tensor,
    same_bytes,
    spawn,
)
from runtime.tests.pairwise import pairwise
from runtime.transport.base import MAX_KEY_BYTES, Options
from runtime.transport.registry import open_transport

LARGEST = int(os.environ.get("VERBFLOW_CONTRACT_BYTES", 256 << 20))
PATIENCE = 60.0
KIB, MIB = 1 << 10, 1 << 20


def soon() -> Deadline:
    """The deadline of something that should just work."""
    return Deadline.after(PATIENCE)


def bytes_spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), np.dtype(np.uint8))


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
                assert eventually(partial(server.source.asked, key)), row
                server.source.put(key, tensor)
            result = fetched.result(soon())
            assert same_bytes(result, tensor), row
            assert result.flags.c_contiguous and result.flags.writeable, row
            if guarded is not None:
                assert result is into and guarded.intact(), row
        assert eventually(lambda: server.source.leased == 0), "a lease was never released"


def sizes(largest: int) -> list[int]:
    """Sizes around every boundary that a protocol may have: slots, chunks, pages, thresholds."""
    edges = [KIB, 4 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
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


def _set(event: threading.Event, _: object) -> None:
    event.set()


def check_callbacks_without_a_waiter(name: str) -> None:
    """A future completes, and calls back, also if nobody ever waits for it."""
    with pair(name) as (client, server):
        for at, nbytes in enumerate((8, 100 * KIB, 3 * MIB)):
            tensor = pattern(nbytes, at)
            server.source.put(f"key {at}", tensor)
            called = threading.Event()
            fetched = client.channel.fetch(f"key {at}", deadline=soon())
            fetched.add_done_callback(partial(_set, called))
            assert called.wait(PATIENCE)
            assert np.array_equal(fetched.result(soon()), tensor)
            polled = client.channel.fetch(f"key {at}", deadline=soon())
            assert eventually(polled.done, PATIENCE)


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
    """Counters of both ends agree with the bytes that were moved, also after the channel is closed; a fetch is counted before
    anybody learns that it is done."""
    with pair(name) as (client, server):
        lengths = [0, 8, 10_000, 3 * MIB, 3 * MIB, 0, 8, 10_000, 3 * MIB]
        counted: SimpleQueue[int] = SimpleQueue()
        for at, nbytes in enumerate(lengths):
            if at % 2:
                server.source.put(f"key {at}", pattern(nbytes))
            future = client.channel.fetch(f"key {at}", deadline=soon())
            future.add_done_callback(lambda _: counted.put(client.transport.totals().bytes_in))
            if not at % 2:
                server.source.put(f"key {at}", pattern(nbytes))
            future.result(soon())
            assert counted.get(timeout=PATIENCE) == sum(lengths[: at + 1])
        client.channel.close()
        received = client.transport.totals()
        assert (received.fetches, received.bytes_in) == (len(lengths), sum(lengths))
        assert eventually(
            lambda: (
                (server.transport.totals().served, server.transport.totals().bytes_out) == (len(lengths), sum(lengths))
            )
        ), server.transport.totals()


def check_connecting_again_and_again(name: str) -> None:
    """Channels come and go on one listener, and take with them what they opened at both ends."""
    with pair(name) as (client, server):
        server.source.put("key", pattern(5000))

        def visit(times: int) -> None:
            for _ in range(times):
                channel = client.transport.connect(server.address, peer="the server", deadline=soon())
                assert np.array_equal(channel.fetch("key", deadline=soon()).result(soon()), pattern(5000))
                channel.close()

        visit(3)
        after_three = len(os.listdir("/proc/self/fd"))
        visit(12)
        # What the last visitors opened may be on its way out; what each of the twelve left would not be.
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= after_three + 6)


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
