"""LocalCluster: the tasks of a cluster as processes of this machine, for tests, experiments and single-host training."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from runtime.cluster.spec import ClusterSpec, parse_task
from runtime.deadline import Deadline
from runtime.errors import ConfigError, DeadlineError, PeerLostError
from runtime.memory import memcpy

READY_S = 60.0
# Below the kernel's ephemeral range (32768 and up), so that no outgoing connection can sit on a task's port while the task
# is being restarted.
_PORTS = (16000, 32000)


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """Addresses on which nobody listens now. Somebody else may take one before we do; the task then says so and ends."""
    found: list[str] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            address = f"{host}:{port}"
            if address not in found:
                found.append(address)
    return found


class TaskProcess:
    """One task's process. It ends when this process does, however that ends: its standard input is our pipe."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        # A file, not a pipe: nobody has to read it, and it can be quoted when the task fails.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
        )
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, deadline: Deadline) -> dict[str, Any]:
        """The task's ready line; see ``read_line``."""
        ready: dict[str, Any] = self.read_line(deadline)
        self.ready = ready
        return ready

    def read_line(self, deadline: Deadline) -> Any:
        """The value of the next line of JSON that the task prints.

        PeerLostError with its last words if it ended; DeadlineError if it says nothing, and then it is killed.
        """
        line: list[bytes] = []
        assert self.process.stdout is not None
        stdout = self.process.stdout
        reader = threading.Thread(target=lambda: line.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(deadline.remaining())
        if reader.is_alive():
            self.kill()
            reader.join()
            raise deadline.error(f"a line from {self.name}")
        if not line[0]:
            code = self.wait(Deadline.after(10))
            raise PeerLostError(f"{self.name} ended with code {code}: {self.errors() or 'silent'}")
        return json.loads(line[0])

    def errors(self) -> str:
        """The last 4000 bytes of its standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, deadline: Deadline) -> int:
        """Its exit code; DeadlineError if it still runs."""
        try:
            return self.process.wait(deadline.remaining())
        except subprocess.TimeoutExpired:
            raise deadline.error(f"end of {self.name}") from None

    def close(self, grace_s: float = 10.0) -> int:
        """Ask it to end, wait, and kill it if it does not; its exit code. Idempotent."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(OSError):
                    stream.close()
        return self.process.returncode


class LocalCluster:
    """Starts ``counts`` of each job (``{"ps": 1, "worker": 2}``); a context manager.

    ``programs`` gives jobs a program of their own as arguments for Python (``["-m", "runtime.training.replica", ...]``), to which
    the options of ``runtime.cluster.options`` are added; the others run ``runtime.cluster``. ``jobs_started`` limits which are
    started here (the rest is somebody else's, for example this very process). ``restart`` names jobs whose tasks are
    started again when they end by a signal.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        *,
        options: Sequence[str] = (),
        programs: Mapping[str, Sequence[str]] | None = None,
        jobs_started: Sequence[str] | None = None,
        restart: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        token: str | None = None,
        ready_s: float = READY_S,
    ) -> None:
        addresses = iter(free_addresses(sum(counts.values())))
        self.spec = ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in counts.items()})
        self.token = secrets.token_hex(16) if token is None else token
        self.tasks: dict[str, TaskProcess] = {}
        self.restarts: dict[str, int] = {}
        self._options = list(options)
        self._programs = dict(programs or {})
        inherited = {**os.environ, **(environment or {})}
        self._environment = {**inherited, **memcpy.environment(inherited), "VERBFLOW_TOKEN": self.token}
        self._ready_s = ready_s
        self._restart = set(restart)
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._keeper: threading.Thread | None = None
        started = set(counts if jobs_started is None else jobs_started)
        try:
            names = [name for name in self.spec if parse_task(name)[0] in started]
            for name in names:
                self.tasks[name] = self._start(name)
            deadline = Deadline.after(ready_s)
            for name in names:
                self.tasks[name].wait_ready(deadline)
        except BaseException:
            self.close(grace_s=0)
            raise
        if self._restart:
            self._keeper = threading.Thread(target=self._keep, name="verbflow-launcher", daemon=True)
            self._keeper.start()

    def command(self, name: str) -> list[str]:
        """The command line of a task."""
        job, index = parse_task(name)
        program = self._programs.get(job, ["-m", "runtime.cluster"])
        own = ["--cluster", self.spec.to_json(), "--job", job, "--task", str(index), "--end-with-stdin"]
        return [sys.executable, *program, *own, *self._options]

    def task(self, name: str) -> TaskProcess:
        if name not in self.tasks:
            raise ConfigError(f"{name} was not started here; started: {', '.join(self.tasks)}")
        return self.tasks[name]

    def kill(self, name: str) -> None:
        """SIGKILL a task, as a crash would."""
        self.task(name).kill()

    def restart(self, name: str) -> TaskProcess:
        """Start a task that has ended again, at its old address, and wait until it is ready."""
        with self._guard:
            old = self.task(name)
            old.close(grace_s=0)
            if self._closed.is_set():
                return old
            fresh = self.tasks[name] = self._start(name)
            self.restarts[name] = self.restarts.get(name, 0) + 1
        fresh.wait_ready(Deadline.after(self._ready_s))
        return fresh

    def wait(self, job: str, deadline: Deadline) -> dict[str, int]:
        """Wait until every task of ``job`` has ended; their exit codes."""
        return {name: task.wait(deadline) for name, task in self.tasks.items() if parse_task(name)[0] == job}

    def close(self, grace_s: float = 10.0) -> None:
        """End all tasks; none is left when this returns. Idempotent."""
        self._closed.set()
        with self._guard:
            tasks = list(self.tasks.values())
        for task in tasks:
            if task.process.poll() is None and grace_s:
                with contextlib.suppress(OSError):
                    task.signal(signal.SIGTERM)
        # A restart that is under way ends with its task, so the keeper does too.
        if self._keeper is not None:
            self._keeper.join()
        for task in tasks:
            task.close(grace_s)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, name: str) -> TaskProcess:
        return TaskProcess(name, self.command(name), self._environment)

    def _keep(self) -> None:
        while not self._closed.wait(0.1):
            for name, task in list(self.tasks.items()):
                code = task.process.poll()
                if parse_task(name)[0] in self._restart and code is not None and code < 0:
                    with contextlib.suppress(PeerLostError, DeadlineError):
                        self.restart(name)
