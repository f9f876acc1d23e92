"""Launcher: how the ranks of a trial are started, on which host, and how they end together.

``command`` is pure, so a launcher is tested by comparing argument lists. Starting, waiting and killing are the same for all of
them: one process group a rank, every rank's outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from harness.cell import ROOT, Cell
from runtime.deadline import Deadline
from runtime.errors import ConfigError
from runtime.memory import memcpy

_CLASSES = {
    "local": "harness.launch.local:LocalLauncher",
    "fork": "harness.launch.fork:ForkLauncher",
    "netns": "harness.launch.netns:NetnsLauncher",
    "slurm": "harness.launch.slurm:SlurmLauncher",
    "mpi": "harness.launch.mpi:MpiLauncher",
    "ssh": "harness.launch.ssh:SshLauncher",
}
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank to start: where, with which variables, on which CPUs (empty: any)."""

    rank: int
    size: int
    folder: Path
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: Sequence[int] = ()

    def program(self) -> list[str]:
        """The rank itself, without what a launcher puts before it."""
        return [sys.executable, "-m", "harness.bench.rank", str(self.folder), str(self.rank)]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a rank ended: its exit code (negative: the signal), or None if it was killed at the time limit."""

    rank: int
    exit_code: int | None
    log: Path


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A trial to start: the folder that its ranks share, and where their logs go."""

    cell: Cell
    size: int
    folder: Path
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Process(Protocol):
    """What a job needs of ``subprocess.Popen``."""

    pid: int
    returncode: Any

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Job:
    """Ranks that run. Every rank has its own process group, so that what it started dies with it."""

    def __init__(self, processes: Sequence[Process], logs: Sequence[Path], ranks_are_children: bool = True) -> None:
        """``ranks_are_children``: the processes are the ranks themselves, not programs that start them elsewhere."""
        self._processes = list(processes)
        self._logs = list(logs)
        self._ranks_are_children = ranks_are_children

    def wait(self, deadline: Deadline) -> list[RankOutcome]:
        """Every rank's outcome. When one fails the others get a few seconds to say why, then all are killed."""
        open_files = {os.pidfd_open(process.pid): process for process in self._processes if process.poll() is None}
        poll = select.poll()
        for descriptor in open_files:
            poll.register(descriptor, select.POLLIN)
        limit = deadline
        expired = False
        try:
            while open_files:
                ready = poll.poll(limit.remaining() * 1000 + 1)
                if not ready and limit.expired():
                    expired = limit is deadline
                    break
                for descriptor, _ in ready:
                    process = open_files.pop(descriptor)
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    if process.wait() != 0 and limit is deadline and deadline.remaining() > _GRACE_S:
                        limit = Deadline.after(_GRACE_S)
        finally:
            for descriptor in open_files:
                os.close(descriptor)
            late = {process.pid for process in open_files.values()}
            if expired and self._ranks_are_children:
                self._ask_where(late)
            self.kill()
        return [
            RankOutcome(rank, None if expired and process.pid in late else process.returncode, log)
            for rank, (process, log) in enumerate(zip(self._processes, self._logs))
        ]

    def _ask_where(self, late: set[int]) -> None:
        """Let each rank that is not done write its threads' stacks into its log."""
        for pid in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def kill(self) -> None:
        """End every rank and whatever it started, now. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + 1.0
            while any(process.poll() is None for process in self._processes) and time.monotonic() < end:
                time.sleep(0.005)
        for process in self._processes:
            process.wait()


class Launcher(ABC):
    """Starts the ranks of a trial. ``options`` are those of the definition's ``[launcher]`` table."""

    name: ClassVar[str]
    # Ranks on several hosts find each other over TCP in a folder that all hosts see; on one host by a unix socket in /tmp.
    spread: ClassVar[bool] = False
    fidelity: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.settings = dict(options or {})
        unknown = sorted(set(self.settings) - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise ConfigError(f"launcher {self.name} has no option {', '.join(unknown)}; known: {known}")

    @abstractmethod
    def command(self, rank: RankSpec) -> list[str]:
        """The argument list that starts ``rank``. Pure."""

    def available(self) -> str:
        """Empty if it can be used here, else a sentence why not and what would change it."""
        return ""

    def open(self, size: int) -> None:  # noqa: B027  not every place needs preparing
        """Prepare the places for ``size`` ranks; called before every trial, keeps what is there already."""

    def close(self) -> None:  # noqa: B027  likewise
        """Take down what ``open`` made."""

    def host(self, rank: int) -> str:
        """The address that rank's transports bind to."""
        return "127.0.0.1"

    def specs(self, job: JobSpec) -> list[RankSpec]:
        """The ranks of a job. Pure."""
        environment = {**job.environment, "VERBFLOW_PARENT_DEATH": "0" if self.spread else "1"}
        if memcpy.VARIABLE in os.environ:  # a choice goes to other hosts too; ours is of this host only, see ``start``
            environment[memcpy.VARIABLE] = os.environ[memcpy.VARIABLE]
        return [
            RankSpec(rank, job.size, job.folder, self.host(rank), environment, self._cpus(rank, job.size))
            for rank in range(job.size)
        ]

    def start(self, job: JobSpec) -> Job:
        """Start all ranks. If one cannot be started, those that were are killed."""
        specs = self.specs(job)
        self.describe(job, specs)
        token = secrets.token_hex(16)
        processes: list[subprocess.Popen] = []
        logs: list[Path] = []
        try:
            for spec in specs:
                log = job.logs / f"rank-{spec.rank}.log"
                environment = {**os.environ, **spec.environment, "VERBFLOW_TOKEN": token, "PYTHONUNBUFFERED": "1"}
                if not self.spread:  # another host has other caches
                    environment |= memcpy.environment(environment)
                # Unset for benchmarks: pinned kernels make the same step 1.6 times slower.
                for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
                    environment.pop(name, None)
                with log.open("wb") as stream:
                    processes.append(
                        subprocess.Popen(
                            self.command(spec),
                            cwd=ROOT,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=stream,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
                logs.append(log)
        except BaseException:
            Job(processes, logs).kill()
            raise
        return Job(processes, logs, ranks_are_children=not self.spread)

    def describe(self, job: JobSpec, specs: Sequence[RankSpec]) -> None:
        """Write what the ranks read, and make the place for their logs."""
        (job.folder / "job.json").write_text(json.dumps(self.content(job, specs)))
        job.logs.mkdir(parents=True, exist_ok=True)

    def content(self, job: JobSpec, specs: Sequence[RankSpec]) -> dict[str, Any]:
        """What ``job.json`` says. Pure."""
        return {
            "cell": job.cell.to_json(),
            "size": job.size,
            "hosts": [spec.host for spec in specs],
            "spread": self.spread,
        }

    def collect(self, job: JobSpec) -> None:  # noqa: B027  most ranks write into the common folder by themselves
        """After the ranks have ended: bring their records into the job's folder."""

    def _cpus(self, rank: int, size: int) -> tuple[int, ...]:
        """``cpus`` = [[0], [1]] pins rank 0 to CPU 0 and rank 1 to CPU 1, and begins anew after the last; "split" gives each
        rank of a host an equal part."""
        sets = self.settings.get("cpus") or ()
        if isinstance(sets, str):
            if sets != "split":
                raise ConfigError(f'cpus = {sets!r} is neither "split" nor a list of lists of processors')
            sets = split_cpus(by_core(os.sched_getaffinity(0)), size)
        return tuple(sets[rank % len(sets)]) if sets else ()


def by_core(cpus: Iterable[int]) -> list[int]:
    """Processors in an order in which the threads of a core are neighbours."""

    def core(cpu: int) -> tuple[int, int]:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            return int(re.split("[,-]", siblings)[0]), cpu
        except (OSError, ValueError):
            return cpu, cpu

    return sorted(cpus, key=core)


def split_cpus(cpus: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """An equal part of ``cpus`` for each rank; none, where there are fewer processors than ranks or only one rank: any processor
    is as good then."""
    share = len(cpus) // ranks
    return [cpus[share * rank : share * (rank + 1)] for rank in range(ranks)] if ranks > 1 and share else []


def pinned(rank: RankSpec, command: list[str]) -> list[str]:
    """``command`` restricted to the rank's CPUs, if it has any."""
    return ["taskset", "--cpu-list", ",".join(map(str, rank.cpus)), *command] if rank.cpus else command


def known_launchers() -> list[str]:
    """Names that ``launcher`` takes; ``vm`` is not among them, for the runner itself goes into the guest."""
    return list(_CLASSES)


def launcher(name: str, options: Mapping[str, Any] | None = None) -> Launcher:
    """The launcher called ``name``; ConfigError lists the known ones."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown launcher {name!r}; known: {', '.join(_CLASSES)}")
    module, attribute = _CLASSES[name].split(":")
    made: Launcher = getattr(import_module(module), attribute)(options)
    return made
