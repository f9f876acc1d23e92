"""Our verbs against perftest, gRPC and a bare ping-pong, on one device.

    make rxe CMD='.venv/bin/python -m harness.bench.verbs_peers'

Two real processes. Within a round the variants take turns, so drift hits all alike; reported are medians over the rounds and
ratios of medians. On emulated soft-RoCE only the ratios mean anything.

====================  ==========================================  =======================================================
ours                  against                                     what
====================  ==========================================  =======================================================
Link write, read      perftest ib_write_bw, ib_read_bw            bandwidth, many outstanding
channel fetch         ib_write_bw at the same size                bandwidth, 4 to 16 fetches outstanding (perftest: all)
channel fetch         gRPC fetch; write-with-immediate ping-pong  latency of one small tensor, one at a time
====================  ==========================================  =======================================================
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, address_of
from runtime.testing import End, Rank, pattern_tensor, spawn
from runtime.transport.base import Counters
from runtime.transport.onesided.link import Op, Region
from runtime.transport.verbs.binding import SIGNALED, Opcode, load_binding
from runtime.transport.verbs.device import Place, choose_place
from runtime.transport.verbs.fidelity import fidelity_of
from runtime.transport.verbs.link import VerbsLink
from runtime.transport.verbs.memory import Memory
from runtime.transport.verbs.qp import QpAttributes

KIB, MIB = 1 << 10, 1 << 20
RAW_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
FETCH_SIZES = (MIB, 4 * MIB, 16 * MIB)
SMALL_SIZES = (8, 256, KIB, 4 * KIB)
_OUTSTANDING = 64
_SIGNALLED = 16
_WINDOW_BYTES = 16 * MIB
_LEAST_WINDOW = 4
_PERFTEST_BYTES = 24 * MIB
_TIMEOUT_S = 1500
# A figure: (what, variant, bytes) -> one value a round. Bandwidths in bytes a second, latencies in seconds.
Figures = dict[tuple[str, str, int], list[float]]


def bytes_spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), np.dtype(np.uint8))


def iterations(nbytes: int) -> int:
    return max(8, _PERFTEST_BYTES // nbytes)


# perftest


def perftest(rank: Rank, place: Place, tool: str, nbytes: int) -> float | None:
    """Bandwidth of a perftest tool between two processes, at rank 0; None at the other. Collective."""
    command = [
        tool, "-d", place.device, "-i", str(place.port), "-x", str(place.gid.index),
        "-s", str(nbytes), "-n", str(iterations(nbytes)), "-F",
    ]  # fmt: skip
    port = rank.exchange(_free_port() if rank.rank == 1 else None)[1]
    command += ["-p", str(port)]
    if rank.rank == 1:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as server:
            _wait_for_listener(port)
            rank.barrier()
            server.wait(120)
        return None
    rank.barrier()
    finished = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=120)
    for line in finished.stdout.splitlines():
        # bytes, iterations, peak and average in MiB/s, messages a second
        if match := re.match(rf"\s*{nbytes}\s+\d+\s+[\d.]+\s+([\d.]+)", line):
            return float(match[1]) * MIB
    raise RuntimeError(f"{tool} gave no figure: {finished.stdout[-500:]} {finished.stderr[-500:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait_for_listener(port: int) -> None:
    """perftest's server takes exactly one connection, so it must not be tried; the kernel's table tells."""
    wanted = f":{port:04X} "
    deadline = Deadline.after(60)
    while True:
        tables = [Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()]
        if any(wanted in line and " 0A " in line for table in tables for line in table.splitlines()):
            return
        deadline.check("perftest's server")
        time.sleep(0.02)


# The Link and the bare ping-pong


class Bare:
    """A connected VerbsLink without protocol, transport or threads above it."""

    def __init__(self, rank: Rank, place: Place, largest: int) -> None:
        self.rank = rank
        self.device = load_binding("pyverbs").open(place.device)  # ping_pong uses its objects
        self.arena = Arena(2 * largest + MIB)
        self.memory = Memory(self.device, self.arena, Counters(), MIB, 4)
        self.link = VerbsLink(
            self.device, self.memory, port=place.port, gid=place.gid.raw, gid_index=place.gid.index,
            attributes=QpAttributes(), depth=64, message_bytes=2048, send_depth=2 * _OUTSTANDING,
        )  # fmt: skip
        self.local = pattern_tensor(bytes_spec(largest), rank.rank, self.arena)
        exported = pattern_tensor(bytes_spec(largest), 10 + rank.rank, self.arena)
        mine = (self.link.describe(), self.link.region(exported))
        described, self.remote = rank.exchange(mine)[1 - rank.rank]
        self.exported = exported
        self.link.connect(described, f"rank {1 - rank.rank}")
        rank.barrier()

    def transfer(self, op: Op, nbytes: int, count: int) -> float:
        """Seconds for ``count`` transfers of ``nbytes`` with many outstanding, one in ``_SIGNALLED`` of which gives a
        completion, as perftest's do (one in 100 there)."""
        link, local, remote = self.link, self.local[:nbytes], Region(self.remote.addr, self.remote.key, nbytes)
        posted = done = 0
        started = time.perf_counter()
        while done < count:
            while posted < count and posted - done < _OUTSTANDING:
                posted += 1
                told = posted % _SIGNALLED == 0 or posted == count
                if op is Op.READ:
                    link.post_read(local, remote, tag=posted, signalled=told)
                else:
                    link.post_write(local, remote, tag=posted, signalled=told)
            for completion in link.poll():
                if completion.error is not None:
                    raise completion.error
                done = completion.tag
        return time.perf_counter() - started

    def ping_pong(self, count: int) -> float:
        """Seconds a round trip of 8-byte writes with immediate; both ends spin. Collective.

        Nothing but the library's own calls: requests are made before and only posted. It takes receives without posting
        them again, so ``count`` is at most the receives that the link has posted and has not used.
        """
        queue, completions = self.link._pair._qp, self.link._pair._cq  # type: ignore[attr-defined]
        pair = self.link._pair
        own, theirs = self.local[:8], self.remote
        address = address_of(own)
        lkey = self.memory.keys(address, own).lkey
        self.rank.barrier()
        pair.post(Opcode.WRITE_IMM, 0, address, 8, lkey, SIGNALED, theirs.addr, theirs.key, 1)
        request = pair._requests[Opcode.WRITE_IMM][0]  # type: ignore[attr-defined]
        poll, post = completions.poll, queue.post_send
        # Each end waits for its own completion and the peer's immediate; the first one was posted above by both.
        _await(poll, 2)
        self.rank.barrier()
        started = time.perf_counter()
        if self.rank.rank == 0:
            for _ in range(count):
                post(request)
                _await(poll, 2)
        else:
            for turn in range(count):
                _await(poll, 1 if turn == 0 else 2)
                post(request)
            _await(poll, 1)
        return (time.perf_counter() - started) / count

    def close(self) -> None:
        self.rank.barrier()
        self.link.close()
        self.memory.close()
        self.device.close()
        self.arena.close()


def _await(poll: Any, count: int) -> None:
    while count:
        got, found = poll(1)
        if got:
            if found[0].status:
                raise RuntimeError(f"completion status {found[0].status}")
            count -= 1


# Channels


def fetch_window(end: End, key: str, into: Sequence[np.ndarray], count: int, deadline: Deadline) -> float:
    """Seconds for ``count`` fetches with ``len(into)`` of them outstanding."""
    started = time.perf_counter()
    flying = [end.channel.fetch(key, array, deadline=deadline) for array in into[:count]]
    for at in range(count):
        flying[at % len(into)].result(deadline)
        if at + len(into) < count:
            flying[at % len(into)] = end.channel.fetch(key, into[at % len(into)], deadline=deadline)
    return time.perf_counter() - started


def fetch_latency(end: End, nbytes: int, count: int, deadline: Deadline) -> float:
    """Median seconds of one fetch into given arena memory."""
    into = end.arena.tensor(bytes_spec(nbytes))
    key, channel, times = f"bytes {nbytes}", end.channel, []
    for _ in range(count):
        started = time.perf_counter()
        channel.fetch(key, into, deadline=deadline).result(deadline)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@contextmanager
def serving(rank: Rank, name: str, sizes: Sequence[int]) -> Iterator[End]:
    """This rank's end of a pair over a transport; rank 1 has a tensor of every size."""
    arena_bytes = 2 * sum(sizes) + _LEAST_WINDOW * max(sizes) + 8 * MIB
    # Both ends spin through a fetch, as those of the ping-pong do; waking a thread costs milliseconds under emulation.
    params = {"spin_us": 10_000} if name == "verbs" else {}
    with rank.connect(name, arena_bytes=arena_bytes, params=params) as end:
        if rank.rank == 1:
            for nbytes in sizes:
                end.source.put(f"bytes {nbytes}", pattern_tensor(bytes_spec(nbytes), nbytes, end.arena))
        rank.barrier()
        if rank.rank == 0:
            for nbytes in sizes:
                into = end.arena.tensor(bytes_spec(nbytes))
                end.channel.fetch(f"bytes {nbytes}", into, deadline=rank.deadline).result(rank.deadline)
                if not np.array_equal(into, pattern_tensor(bytes_spec(nbytes), nbytes)):
                    raise RuntimeError(f"{name}: {nbytes} bytes arrived wrong")
        rank.barrier()
        yield end


# The comparison


def compare(rank: Rank, rounds: int, parts: Sequence[str]) -> Figures:
    """Both ranks call it; rank 0 returns the figures."""
    place = choose_place()
    figures: Figures = defaultdict(list)
    if "raw" in parts:
        _raw(rank, place, rounds, figures)
    if "fetch" in parts:
        with serving(rank, "verbs", FETCH_SIZES) as end:
            _fetch(rank, place, rounds, figures, end)
    if "latency" in parts:
        _latency(rank, place, rounds, figures)
    return dict(figures)


def _raw(rank: Rank, place: Place, rounds: int, figures: Figures) -> None:
    bare = Bare(rank, place, max(RAW_SIZES))
    for _ in range(rounds):
        for nbytes in RAW_SIZES:
            for what, op, tool in (("write", Op.WRITTEN, "ib_write_bw"), ("read", Op.READ, "ib_read_bw")):
                if rank.rank == 0:
                    seconds = bare.transfer(op, nbytes, iterations(nbytes))
                    figures[what, "link", nbytes].append(nbytes * iterations(nbytes) / seconds)
                rank.barrier()
                measured = perftest(rank, place, tool, nbytes)
                if measured is not None:
                    figures[what, "perftest", nbytes].append(measured)
                rank.barrier()
    bare.close()


def _fetch(rank: Rank, place: Place, rounds: int, figures: Figures, end: End) -> None:
    for _ in range(rounds):
        for nbytes in FETCH_SIZES:
            if rank.rank == 0:
                window = max(_LEAST_WINDOW, _WINDOW_BYTES // nbytes)
                into = [end.arena.tensor(bytes_spec(nbytes)) for _ in range(window)]
                count = max(window, 2 * _PERFTEST_BYTES // nbytes)
                seconds = fetch_window(end, f"bytes {nbytes}", into, count, rank.deadline)
                figures["fetch", "verbs", nbytes].append(nbytes * count / seconds)
            rank.barrier()
            # A device's longest message is 8 MiB on rxe; longer ones are no faster.
            measured = perftest(rank, place, "ib_write_bw", min(nbytes, 4 * MIB))
            if measured is not None:
                figures["fetch", "perftest", nbytes].append(measured)
            rank.barrier()


def _latency(rank: Rank, place: Place, rounds: int, figures: Figures) -> None:
    for _ in range(rounds):
        # One end at a time: the threads of an idle one wake now and then, which is dear under emulation.
        for name, count in (("verbs", 200), ("grpc", 30)):
            with serving(rank, name, SMALL_SIZES) as end:
                for nbytes in SMALL_SIZES if rank.rank == 0 else ():
                    figures["latency", name, nbytes].append(fetch_latency(end, nbytes, count, rank.deadline))
                rank.barrier()
        bare = Bare(rank, place, 4 * KIB)
        seconds = bare.ping_pong(100)
        bare.close()
        if rank.rank == 0:
            for nbytes in SMALL_SIZES:
                figures["latency", "ping-pong", nbytes].append(seconds)
        rank.barrier()


def rows(figures: Figures) -> list[dict[str, Any]]:
    """Medians, and ours against each peer: above 1 is better for us in bandwidth, below in latency."""
    ours = {"write": "link", "read": "link", "fetch": "verbs", "latency": "verbs"}
    medians = {key: statistics.median(values) for key, values in figures.items()}
    found = []
    for (what, variant, nbytes), value in medians.items():
        if variant != ours[what]:
            mine = medians[what, ours[what], nbytes]
            ratio = value / mine if what == "latency" and variant == "grpc" else mine / value
            found.append(
                {"what": what, "nbytes": nbytes, "ours": mine, "peer": variant, "theirs": value, "ratio": ratio}
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.verbs_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=("raw", "fetch", "latency"), default=["raw", "fetch", "latency"])
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    options = parser.parse_args(arguments)
    if shutil.which("ib_write_bw") is None:
        print("perftest is not installed; run: make setup", file=sys.stderr)
        return 1
    from harness.bench import verbs_peers  # its processes import the module by name, which this one may not have

    figures = spawn(2, verbs_peers.compare, options.rounds, options.parts, timeout=_TIMEOUT_S)[0]
    place = choose_place()
    if options.json:
        print(json.dumps([[*key, values] for key, values in figures.items()]))
    print(f"{place.reason}; {fidelity_of(place.device)}; medians of {options.rounds} interleaved rounds")
    for row in rows(figures):
        latency = row["what"] == "latency"
        scale, unit = (1e6, "us") if latency else (1e-6, "MB/s")
        word = "gRPC takes" if row["peer"] == "grpc" else "ours is"
        print(
            f"{row['what']:8} {row['nbytes']:>9} B  ours {row['ours'] * scale:9.1f} {unit:4}  "
            f"{row['peer']:9} {row['theirs'] * scale:9.1f} {unit:4}  {word} {row['ratio']:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
