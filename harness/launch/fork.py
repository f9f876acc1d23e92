"""Fork launcher: every rank a fork of the runner, which has imported already what ranks need.

Inside an emulated guest an interpreter that imports numpy and grpc takes 10 s to start, a fork a tenth of a second. The price is
that ranks share the runner's memory layout, so that layout's luck is not resampled; elsewhere use ``local``. The runner has
no threads and has opened no connection when it forks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import traceback
from pathlib import Path

from harness.bench.base import benchmark
from harness.bench.rank import EXIT_FAILED, run_rank
from harness.launch.base import Job, JobSpec, RankSpec
from harness.launch.local import LocalLauncher
from runtime.errors import ConfigError
from runtime.transport.registry import transport_class


class Forked:
    """A rank's process, with the part of ``subprocess.Popen`` that a job needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Block until it ended."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkLauncher(LocalLauncher):
    """Like ``local``, without the start of an interpreter."""

    name = "fork"

    def start(self, job: JobSpec) -> Job:
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate())
            raise ConfigError(f"a process with threads ({names}) must not fork ranks; use the local launcher")
        _preload(job)
        specs = self.specs(job)
        self.describe(job, specs)
        token = secrets.token_hex(16)
        ranks: list[Forked] = []
        logs: list[Path] = []
        try:
            for spec in specs:
                logs.append(job.logs / f"rank-{spec.rank}.log")
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    _become(spec, token, logs[-1])
                ranks.append(Forked(pid))
        except BaseException:
            Job(ranks, logs).kill()
            raise
        return Job(ranks, logs)


def _preload(job: JobSpec) -> None:
    benchmark(job.cell.bench)
    name = job.cell.params.get("transport")
    if name:
        # A transport that does not load here is the rank's to report.
        with contextlib.suppress(ConfigError, ImportError):
            transport_class(name)


def _become(spec: RankSpec, token: str, log: Path) -> None:
    """The child: never returns."""
    code = EXIT_FAILED
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(spec.environment, VERBFLOW_TOKEN=token)
        if spec.cpus:
            os.sched_setaffinity(0, spec.cpus)
        code = run_rank(spec.folder, spec.rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the runner's own clean-up must not run here.
        os._exit(code)
