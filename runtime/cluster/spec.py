"""ClusterSpec: which tasks a cluster has and at which address each one's control plane listens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runtime.errors import ConfigError

_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TASK = re.compile(r"/job:([A-Za-z][A-Za-z0-9_-]*)/task:(\d+)")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


def task_name(job: str, index: int) -> str:
    """``/job:NAME/task:N``, which is also the device name of everything placed on the task."""
    return f"/job:{job}/task:{index}"


def parse_task(name: str) -> tuple[str, int]:
    """(job, index) of a task name; ConfigError if it is none."""
    match = _TASK.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a task name (/job:NAME/task:N)")
    return match[1], int(match[2])


class ClusterSpec:
    """Jobs, each a list of ``host:port`` addresses in the order of the task numbers. Immutable; checked when made."""

    def __init__(self, jobs: Mapping[str, Sequence[str]]) -> None:
        if not isinstance(jobs, Mapping) or not jobs:
            raise ConfigError(f"a cluster is a mapping from job names to lists of host:port, not {jobs!r}")
        checked: dict[str, tuple[str, ...]] = {}
        owners: dict[str, str] = {}
        for job, addresses in jobs.items():
            if not isinstance(job, str) or not _JOB.fullmatch(job):
                raise ConfigError(f"job name {job!r} must match {_JOB.pattern}")
            if isinstance(addresses, str) or not isinstance(addresses, Sequence) or not addresses:
                raise ConfigError(f"job {job!r} must be a list of at least one host:port, not {addresses!r}")
            for index, address in enumerate(addresses):
                name = task_name(job, index)
                check_address(address, name)
                if address in owners:
                    raise ConfigError(f"address {address} is given to both {owners[address]} and {name}")
                owners[address] = name
            checked[job] = tuple(addresses)
        self._jobs = checked
        self._addresses = {name: address for address, name in owners.items()}

    @classmethod
    def from_json(cls, text: str, source: str = "cluster description") -> ClusterSpec:
        """From ``{"ps": ["host:port"], "worker": ["host:port", ...]}``; ``source`` is named in messages."""
        try:
            jobs = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        try:
            return cls(jobs)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def load(cls, text_or_path: str) -> ClusterSpec:
        """From JSON text (it begins with ``{``) or from the file of that name."""
        if text_or_path.lstrip().startswith("{"):
            return cls.from_json(text_or_path)
        try:
            text = Path(text_or_path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cluster file {text_or_path}: {error.strerror}") from error
        return cls.from_json(text, f"cluster file {text_or_path}")

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        """A copy: job name to the addresses of its tasks."""
        return dict(self._jobs)

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks, jobs in the order in which they were given."""
        return list(self)

    def task_count(self, job: str) -> int:
        """How many tasks ``job`` has; ConfigError lists the jobs on a miss."""
        return len(self._job(job))

    def address(self, task: str) -> str:
        """The ``host:port`` of a task name; ConfigError lists the known tasks on a miss."""
        address = self._addresses.get(task)
        if address is None:
            raise ConfigError(f"the cluster has no task {task!r}; known: {', '.join(self)}")
        return address

    def task(self, job: str, index: int) -> str:
        """The name of a task that exists; ConfigError otherwise."""
        addresses = self._job(job)
        if not 0 <= index < len(addresses):
            raise ConfigError(f"job {job!r} has tasks 0 to {len(addresses) - 1}, no task {index}")
        return task_name(job, index)

    def to_json(self) -> str:
        return json.dumps({job: list(addresses) for job, addresses in self._jobs.items()})

    def _job(self, job: str) -> tuple[str, ...]:
        if job not in self._jobs:
            raise ConfigError(f"the cluster has no job {job!r}; known: {', '.join(self._jobs)}")
        return self._jobs[job]

    def __iter__(self) -> Iterator[str]:
        for job, addresses in self._jobs.items():
            for index in range(len(addresses)):
                yield task_name(job, index)

    def __contains__(self, task: object) -> bool:
        return task in self._addresses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and other._jobs == self._jobs

    def __hash__(self) -> int:
        return hash(tuple(self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.to_json()})"


def check_address(address: object, owner: str) -> tuple[str, int]:
    """(host, port) of ``host:port``; ConfigError names ``owner``. IPv6 hosts are written in brackets."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{owner}: address {address!r} is not host:port with a port from 1 to 65535")
    return host, int(port)
