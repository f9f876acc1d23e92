"""Our shared memory against our gRPC and MPI, side by side: python -m harness.bench.shm_peers [--mpi PYTHON ...].

Two real processes of one host. Within a round every variant takes its turn at a size, so drift hits all alike; reported are
medians over the rounds and ratios of medians. A fetch is a request and the tensor in a given array; MPI does the same with a
one-byte Send and a Recv. ``--mpi`` names interpreters that have mpi4py (one for Open MPI, one for MPICH).

=============  ===================================================================================
variant        what
=============  ===================================================================================
fetch          channel fetch, doorbell spinning for 60 us and then blocking on an eventfd (the default)
fetch_blocked  the same with spin_us = 0: every message rings an eventfd
borrow         a view of the peer's memory, and its release
link_read      the raw Link's read: what a memcpy from the peer's memory costs
ring           8 bytes there and back through the Link's rings alone: what `fetch` takes above it is rendezvous in Python
grpc           fetch over our gRPC transport
mpi:...        mpi4py, blocking Send and Recv
=============  ===================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from runtime.deadline import Deadline
from runtime.tensor import TensorSpec
from runtime.testing import End, Rank, pattern_tensor, spawn
from runtime.transport.grpc import allocator
from runtime.transport.onesided.channel import OneSidedChannel
from runtime.transport.onesided.endpoint import Endpoint
from runtime.transport.onesided.link import Op, Region
from runtime.transport.onesided.transport import OneSidedTransport

KIB, MIB = 1 << 10, 1 << 20
_SMALLEST = 8
SIZES = [_SMALLEST, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
ROOT = Path(__file__).resolve().parents[2]
_TURN_S = 0.2
_AT_MOST = 3000
_TIMEOUT_S = 3000.0
Turn = Callable[[], None]
Figures = dict[str, dict[int, list[float]]]  # variant -> bytes -> median seconds of each round


def measure(rank: Rank, sizes: list[int], rounds: int, mpi: list[str]) -> Figures:
    """Rank 0 fetches and measures, rank 1 serves."""
    allocator.tune()
    nbytes = 2 * sizes[-1] + (64 << 20)
    figures: Figures = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        ends = {
            "fetch": stack.enter_context(rank.connect("shm", arena_bytes=nbytes)),
            "fetch_blocked": stack.enter_context(rank.connect("shm", arena_bytes=nbytes, params={"spin_us": 0})),
            "grpc": stack.enter_context(rank.connect("grpc", arena_bytes=nbytes)),
        }
        for _ in range(rounds):
            figures["ring"][_SMALLEST].append(_round_trip(rank, ends["fetch"]))
        for size in sizes:
            spec = TensorSpec((size,), np.dtype(np.uint8))
            regions = None
            if rank.rank == 1:
                content = {name: pattern_tensor(spec, size, end.arena) for name, end in ends.items()}
                for name, end in ends.items():
                    end.source.put("tensor", content[name])
                ours = ends["fetch"].transport
                assert isinstance(ours, OneSidedTransport)
                regions = tuple(ours._export(content["fetch"]))
            theirs = rank.exchange(regions)[1]
            if rank.rank == 0:
                into = {name: end.arena.tensor(spec) for name, end in ends.items()}
                turns = {name: _fetch(end, into[name]) for name, end in ends.items()}
                turns["borrow"] = _borrow(ends["fetch"])
                turns["link_read"] = _link_read(ends["fetch"], into["fetch"], Region(*theirs))
                expected = pattern_tensor(spec, size)
                for name, turn in turns.items():
                    into.get(name, into["fetch"]).fill(0)
                    turn()
                    if name != "borrow" and not np.array_equal(into.get(name, into["fetch"]), expected):
                        raise AssertionError(f"{name} delivered other bytes")
                for _ in range(rounds):
                    for name, turn in turns.items():
                        figures[name][size].append(_median(turn))
                    for python in mpi:
                        count = 2000 if size <= 64 * KIB else max(5, min(300, (1 << 30) // size))
                        name, seconds = _mpi(python, size, count)
                        figures[name][size].append(seconds)
                del into, turns
            rank.barrier()
    return {name: dict(by_size) for name, by_size in figures.items()}


def _fetch(end: End, into: np.ndarray) -> Turn:
    fetch = end.channel.fetch

    def turn() -> None:
        deadline = Deadline.after(60)
        fetch("tensor", into, deadline=deadline).result(deadline)

    return turn


def _borrow(end: End) -> Turn:
    borrow = end.channel.borrow

    def turn() -> None:
        deadline = Deadline.after(60)
        borrow("tensor", deadline=deadline).result(deadline).release()

    return turn


def _link_read(end: End, into: np.ndarray, region: Region) -> Turn:
    channel = end.channel
    assert isinstance(channel, OneSidedChannel)

    def turn() -> None:
        # The channel's lock, because its progress thread polls the same link.
        with channel._lock:
            channel.link.post_read(into, region)
            while not any(completion.op is Op.READ for completion in channel.link.poll()):
                pass

    return turn


def _round_trip(rank: Rank, end: End) -> float:
    """Median seconds of a message of 8 bytes and its echo, both ends spinning. Collective."""
    own = end.transport._endpoints  # type: ignore[attr-defined]
    endpoint = end.channel if rank.rank == 0 else next(one for one in own if one is not end.channel)
    assert isinstance(endpoint, Endpoint)
    post, take = endpoint.link.post_unsignalled, endpoint.link.take
    elapsed: list[int] = []
    with endpoint._lock:  # else its progress thread would take the messages
        endpoint.disarm()
        rank.barrier()
        for _ in range(_AT_MOST):
            start = time.monotonic_ns()
            if rank.rank == 0:
                post(b"8 bytes.")
            while take() is None:
                pass
            if rank.rank == 1:
                post(b"8 bytes.")
            elapsed.append(time.monotonic_ns() - start)
        rank.barrier()
    return statistics.median(elapsed) * 1e-9


def _median(turn: Turn) -> float:
    """Seconds of the median call, out of as many as fit into a turn (at least three), after one that does not count."""
    turn()
    elapsed: list[int] = []
    end = time.monotonic_ns() + int(_TURN_S * 1e9)
    while len(elapsed) < 3 or (time.monotonic_ns() < end and len(elapsed) < _AT_MOST):
        start = time.monotonic_ns()
        turn()
        elapsed.append(time.monotonic_ns() - start)
    return statistics.median(elapsed) * 1e-9


def _mpi(python: str, nbytes: int, count: int) -> tuple[str, float]:
    """(flavour, median seconds) of two ranks under the mpirun beside ``python``."""
    mpirun = str(Path(python).with_name("mpirun"))
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    flavour = "openmpi" if "Open MPI" in version or "open-mpi" in version else "mpich"
    extra = ["--oversubscribe"] if flavour == "openmpi" else []
    if flavour == "openmpi" and os.geteuid() == 0:
        extra.append("--allow-run-as-root")
    command = [mpirun, "-np", "2", *extra, python, "-m", "harness.bench.peers.mpi4py", str(nbytes), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    elapsed = json.loads(done.stdout.strip().splitlines()[-1])
    return f"mpi:{flavour}", statistics.median(elapsed) * 1e-9


def report(figures: Figures) -> str:
    """A line a size: microseconds of each variant (GB/s from 1 MiB), then how many times quicker the fetch is."""
    names = list(figures)
    lines = ["median us (GB/s); doorbell of `fetch`: spin 60 us, then eventfd; `fetch_blocked`: eventfd only"]
    lines.append(f"{'bytes':>10}" + "".join(f"{name:>18}" for name in names))
    medians = {name: {size: statistics.median(values) for size, values in figures[name].items()} for name in names}
    for size in figures["fetch"]:
        cells = [medians[name].get(size) for name in names]
        texts = [f"{s * 1e6:.1f}" + (f" ({size / s / 1e9:.1f})" if size >= MIB else "") if s else "-" for s in cells]
        lines.append(f"{size:>10}" + "".join(f"{text:>18}" for text in texts))
    lines.append(
        "times as quick as (bar): fetch to grpc (20 to 64 KiB, 14 at 1 MiB, 4.5 from 16 MiB); to MPI and link_read"
    )
    for size in figures["fetch"]:
        fetch = medians["fetch"][size]
        others = [name for name in names if name not in ("fetch", "borrow", "fetch_blocked")]
        ratios = "  ".join(f"{name} {medians[name][size] / fetch:.2f}" for name in others if size in medians[name])
        lines.append(f"{size:>10}  {ratios}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", action="append", default=[], metavar="PYTHON", help="an interpreter with mpi4py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES if size <= arguments.largest]
    figures = spawn(2, measure, sizes, arguments.rounds, arguments.mpi, timeout=_TIMEOUT_S)[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
    print(report(figures))


if __name__ == "__main__":
    # As a module of its name, because the ranks import ``measure`` from it.
    from harness.bench import shm_peers

    shm_peers.main()
