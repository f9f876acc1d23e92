"""Ranks: real processes that run one function together, and everybody's errors at once."""

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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from runtime.deadline import Deadline
from runtime.memory import memcpy
from runtime.testing.ends import End, open_end
from runtime.transport.base import TensorSource

_PR_SET_PDEATHSIG = 1


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
    environment |= memcpy.environment(environment)
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
                            "from runtime.testing.ranks import run_rank; run_rank()",
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
    _die_with_parent(parent)
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


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux), so that no test leaves processes behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
