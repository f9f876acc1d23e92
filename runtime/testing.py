"""What tests and benchmarks of the transports stand on: connected ends, real processes, and content that shows any misrouting.

Part of the runtime and not of its tests, because the harness and users who write a transport need it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, byte_view
from runtime.trace import Tracer
from runtime.transport.base import Channel, Lease, Options, Reply, TensorSource, Transport
from runtime.transport.registry import open_transport

GUARD_BYTES = 64
_GUARD = 0xA5
_PR_SET_PDEATHSIG = 1


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    """``nbytes`` bytes of which every aligned 8 differ from every other 8 of the same seed, so that a piece that went
    to the wrong place, or belongs to another tensor, shows."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words += np.uint64((seed * 0x9E3779B97F4A7C15 + 0x1234567) & 0xFFFFFFFFFFFFFFFF)
    words *= np.uint64(0xD1342543DE82EF95)  # odd, so the product is a permutation
    return words.view(np.uint8)[:nbytes]


def pattern_tensor(spec: TensorSpec, seed: int = 0, arena: Arena | None = None) -> np.ndarray:
    """A tensor of the pattern's bytes (truth values for bool), in ``arena`` memory if one is given."""
    content = pattern(spec.nbytes, seed)
    if spec.dtype == np.bool_:
        content &= 1
    array = np.empty(spec.shape, spec.dtype) if arena is None else arena.tensor(spec, f"pattern {seed}")
    byte_view(array)[...] = content
    return array


def same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal in dtype, shape and every byte (so NaN equals itself)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(byte_view(np.ascontiguousarray(left)), byte_view(np.ascontiguousarray(right)))


class Guarded:
    """A destination between guard bytes: ``array`` filled with 0xEE, and ``intact`` tells whether anybody wrote beside it."""

    def __init__(self, spec: TensorSpec, arena: Arena | None = None) -> None:
        total = spec.nbytes + 2 * GUARD_BYTES
        memory = TensorSpec((total,), np.dtype(np.uint8))
        self._whole = np.empty(total, np.uint8) if arena is None else arena.tensor(memory, "guarded")
        self._end = GUARD_BYTES + spec.nbytes
        self._whole.fill(_GUARD)
        self._whole[GUARD_BYTES : self._end] = 0xEE
        self.array = self._whole[GUARD_BYTES : self._end].view(spec.dtype).reshape(spec.shape)

    def intact(self) -> bool:
        """The guard bytes on both sides are what they were."""
        return bool((self._whole[:GUARD_BYTES] == _GUARD).all() and (self._whole[self._end :] == _GUARD).all())

    def untouched(self) -> bool:
        """Nobody has written to the destination either."""
        return self.intact() and bool((self._whole[GUARD_BYTES : self._end] == 0xEE).all())


class Shelf:
    """A TensorSource to put tensors on: before they are asked for, or after. They stay until the shelf goes.

    ``leased`` counts leases that a transport has taken and not yet released.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._answers: dict[str, np.ndarray | BaseException] = {}
        self._waiting: dict[str, list[Reply]] = {}
        self.leased = 0
        self.taken = 0

    def put(self, key: str, answer: np.ndarray | BaseException) -> None:
        """Give the tensor, or an error, to whoever asked and whoever will ask."""
        with self._guard:
            self._answers[key] = answer
            waiting = self._waiting.pop(key, [])
        for reply in waiting:
            self._give(answer, reply)

    def take(self, key: str, reply: Reply) -> None:
        with self._guard:
            self.taken += 1
            answer = self._answers.get(key)
            if answer is None:
                self._waiting.setdefault(key, []).append(reply)
        if answer is not None:
            self._give(answer, reply)

    def asked(self, key: str) -> bool:
        """Somebody waits for the key."""
        with self._guard:
            return key in self._waiting

    def _give(self, answer: np.ndarray | BaseException, reply: Reply) -> None:
        if isinstance(answer, BaseException):
            reply(answer)
            return
        with self._guard:
            self.leased += 1
        reply(Lease(answer, self._released))

    def _released(self) -> None:
        with self._guard:
            self.leased -= 1


class faulty:
    """A TensorSource that answers ``delay`` seconds late, and never for a key that ``drop`` says yes to.

    A context manager: on leaving, answers that are still under way are dropped and their threads are gone.
    """

    def __init__(self, source: TensorSource, delay: float = 0.0, drop: Callable[[str], bool] | None = None) -> None:
        self._source = source
        self._delay = delay
        self._drop = drop
        self._timers: list[threading.Timer] = []

    def take(self, key: str, reply: Reply) -> None:
        if self._drop is not None and self._drop(key):
            return

        def late(answer: Lease | BaseException) -> None:
            timer = threading.Timer(self._delay, reply, (answer,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

        self._source.take(key, late if self._delay > 0 else reply)

    def __enter__(self) -> faulty:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()


@dataclass
class End:
    """One end of a connected group: its transport, what it serves, and a channel to every other end by rank."""

    transport: Transport
    source: Any
    arena: Arena
    channels: dict[int, Channel] = field(default_factory=dict)
    address: bytes = b""

    def listen(self) -> bytes:
        """Begin to serve; the address, which ``address`` keeps."""
        self.address = self.transport.listen(self.source)
        return self.address

    @property
    def channel(self) -> Channel:
        """The channel to the other end of a pair."""
        (channel,) = self.channels.values()
        return channel

    def close(self) -> None:
        self.transport.close()
        self.arena.close()


def open_end(
    name: str,
    source: TensorSource | None = None,
    *,
    arena_bytes: int = 64 << 20,
    params: Mapping[str, object] | None = None,
    token: str = "a run's token",
    task: str = "",
    tracer: Tracer | None = None,
) -> End:
    """A transport of our own, not connected yet; serves ``source``, by default a new Shelf, once ``listen`` is called."""
    arena = Arena(arena_bytes, shared=True, poison=True)
    try:
        transport = open_transport(name, Options(token=token, task=task, params=params or {}), arena, tracer)
    except BaseException:
        arena.close()
        raise
    return End(transport, Shelf() if source is None else source, arena)


@contextlib.contextmanager
def pair(
    name: str, sources: Sequence[TensorSource | None] = (None, None), *, timeout: float = 30.0, **options: Any
) -> Iterator[tuple[End, End]]:
    """Two ends in this process, each listening and connected to the other; see ``open_end`` for the options.

    For two real processes see ``spawn`` and ``Rank.connect``.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for rank, source in enumerate(sources):
            end = open_end(name, source, task=f"/job:test/task:{rank}", **options)
            stack.callback(end.close)
            ends.append(end)
        addresses = [end.listen() for end in ends]
        for rank, end in enumerate(ends):
            other = 1 - rank
            end.channels[other] = end.transport.connect(
                addresses[other], peer=f"/job:test/task:{other}", deadline=Deadline.after(timeout)
            )
        yield ends[0], ends[1]


class RankFailure(Exception):
    """What one rank of ``spawn`` raised, or how it ended; the text holds its own traceback."""


class Rank:
    """A real process of ``spawn``, seen from inside."""

    def __init__(self, rank: int, size: int, control: Connection, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline = Deadline.after(timeout)
        self._control = control

    def exchange(self, value: Any = None) -> list[Any]:
        """Everybody's value, by rank; waits until all have come here. None for a rank that was allowed to die and did.

        RankFailure if another rank failed, so that nobody waits for it.
        """
        self._control.send(("exchange", value))
        kind, answer = self._control.recv()
        if kind == "broken":
            raise RankFailure(answer)
        return list(answer)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.exchange()

    @contextlib.contextmanager
    def connect(self, name: str, source: TensorSource | None = None, **options: Any) -> Iterator[End]:
        """This rank's end of a group in which every rank listens and is connected to every other."""
        end = open_end(name, source, task=f"/job:test/task:{self.rank}", **options)
        try:
            addresses = self.exchange(end.listen())
            for other, address in enumerate(addresses):
                if other != self.rank:
                    end.channels[other] = end.transport.connect(
                        address, peer=f"/job:test/task:{other}", deadline=self.deadline
                    )
            self.barrier()
            yield end
        finally:
            end.close()


def spawn(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    may_die: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``body(rank: Rank, *args)`` in ``size`` real processes; their results by rank.

    ``body`` is a function of an importable module, arguments and results can be pickled. The errors of all ranks are
    raised together as one ExceptionGroup; a rank in ``may_die`` may end by a signal, its result is None. All processes
    are gone when this returns.
    """
    environment = {**os.environ, **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    processes: list[subprocess.Popen[bytes]] = []
    controls: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = socket.socketpair()
            with theirs:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-c",
                            "from runtime.testing import run_rank; run_rank()",
                            str(theirs.fileno()),
                        ],
                        pass_fds=[theirs.fileno()],
                        env=environment,
                    )
                )
            controls.append(Connection(ours.detach()))
            controls[-1].send((rank, size, timeout, os.getpid(), body.__module__, body.__qualname__, args))
        return _serve_ranks(processes, controls, Deadline.after(timeout), set(may_die))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for control in controls:
            control.close()


def _serve_ranks(
    processes: list[subprocess.Popen[bytes]], controls: list[Connection], deadline: Deadline, may_die: set[int]
) -> list[Any]:
    size = len(processes)
    results: list[Any] = [None] * size
    running = dict(enumerate(controls))
    arrived: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    while running:
        ready = wait(list(running.values()), deadline.remaining())
        if not ready:
            for rank in running:
                failures[rank] = RankFailure(f"rank {rank} has not ended after {deadline.elapsed():.0f} s")
            break
        for rank, control in list(running.items()):
            if control not in ready:
                continue
            try:
                kind, value = control.recv()
            except (EOFError, OSError):
                code = processes[rank].wait()
                if not (rank in may_die and code < 0):
                    failures[rank] = RankFailure(f"rank {rank} ended with exit code {code}")
                kind, value = "gone", None
            if kind == "exchange":
                arrived[rank] = value
                continue
            del running[rank]
            if kind == "result":
                results[rank] = value
            elif kind == "error":
                failures[rank] = RankFailure(f"rank {rank}: {value}")
        # An exchange ends when everybody who can still come has come; who returned or failed cannot.
        if arrived and (failures or arrived.keys() == running.keys()):
            answer = (
                ("broken", f"another rank failed: {next(iter(failures))}")
                if failures
                else ("values", [arrived.get(rank) for rank in range(size)])
            )
            for rank in arrived:
                with contextlib.suppress(OSError):
                    controls[rank].send(answer)
            arrived.clear()
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {size} ranks failed", list(failures.values()))
    return results


def run_rank() -> None:
    """The main function of a process that ``spawn`` started; the control descriptor's number is its only argument."""
    control = Connection(int(sys.argv[1]))
    rank, size, timeout, parent, module, name, args = control.recv()
    die_with_parent(parent)
    faulthandler.dump_traceback_later(timeout * 0.95)
    try:
        body: Any = importlib.import_module(module)
        for part in name.split("."):
            body = getattr(body, part)
        control.send(("result", body(Rank(rank, size, control, timeout), *args)))
    except BaseException:
        control.send(("error", traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    control.close()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux), so that no test leaves processes behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds; False if it does not within the time."""
    deadline = Deadline.after(seconds)
    while not condition():
        if deadline.expired():
            return False
        time.sleep(0.002)
    return True
