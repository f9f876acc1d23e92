"""``python -m harness.bench.cluster_peers``: our cluster runtime against TensorFlow's, taking turns on one machine.

Two comparisons: ``session.run`` of one op that lives in another process, and asynchronous training of the single-tower
AlexNet (batch 32) by one parameter server and two workers. All jobs are up for the whole time and only one of them works
at a time; training takes about 14 GiB of memory. TensorFlow is looked for in the interpreter that VERBFLOW_PEER_PYTHON
names, or in this one; without it our own figures are printed.

=================  ===============================================================================================
contender          what
=================  ===============================================================================================
grpc, shm          our runtime over that transport
alone              our workers with the variables in their own processes: what computing costs (training only)
tensorflow         TensorFlow's distributed runtime as it comes: gRPC over TCP
tensorflow tuned   the same with the settings of malloc and memcpy that make its transfers quickest (training only)
=================  ===============================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from harness.bench.peers.program import peer_python
from harness.cell import ROOT
from runtime.cluster.launcher import LocalCluster, TaskProcess, free_addresses
from runtime.deadline import Deadline
from runtime.memory import memcpy

_PATIENCE_S = 600.0
# One malloc arena that keeps what it has; without these settings every transfer maps and touches fresh pages.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# (what, workers, batch, steps) -> the job, while it is up.
Start = Callable[[str, int, int, int], contextlib.AbstractContextManager["Contender"]]


class Contender:
    """The workers of a job, each a process that runs a round for a line on its standard input and answers with the nanoseconds."""

    def __init__(self, workers: Sequence[TaskProcess]) -> None:
        self._workers = list(workers)

    def round(self) -> list[list[int]]:
        """One round on all workers at the same time."""
        for worker in self._workers:
            assert worker.process.stdin is not None
            worker.process.stdin.write(b"go\n")
            worker.process.stdin.flush()
        deadline = Deadline.after(_PATIENCE_S)
        return [worker.read_line(deadline) for worker in self._workers]


@contextlib.contextmanager
def ours(transport: str, what: str, workers: int, batch: int, steps: int) -> Iterator[Contender]:
    """Our job; ``alone`` has no parameter server."""
    alone = transport == "alone"
    program = ["-m", "harness.bench.peers.verbflow_job", "--what", what, "--batch", str(batch), "--steps", str(steps)]
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    options = ["--transport", "grpc" if alone else transport, "--arena-mib", "1024", "--threads", str(threads)]
    tasks = {"worker": workers} if alone else {"ps": 1, "worker": workers}
    with LocalCluster(
        tasks, programs={"worker": program}, options=[*options, "--log-level", "warning"], ready_s=_PATIENCE_S
    ) as job:
        yield Contender([job.task(name) for name in job.spec if "/job:worker" in name])


@contextlib.contextmanager
def tensorflow(settings: Mapping[str, str], what: str, workers: int, batch: int, steps: int) -> Iterator[Contender]:
    """The same job in TensorFlow, its processes with ``settings`` in their environment."""
    address, *others = free_addresses(1 + workers)
    cluster = {"ps": [address], "worker": others}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERBFLOW_")}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT), **settings}
    with contextlib.ExitStack() as stack:
        tasks = []
        for job, index in (("ps", 0), *(("worker", index) for index in range(workers))):
            options = {"cluster": cluster, "job": job, "task": index, "what": what}
            options |= {"batch": batch, "steps": steps, "warmup": 3}
            command = [peer_python(), "-m", "harness.bench.peers.tensorflow_job", json.dumps(options)]
            tasks.append(TaskProcess(f"TensorFlow's {job} {index}", command, environment))
            stack.callback(tasks[-1].close, 0)
        deadline = Deadline.after(_PATIENCE_S)
        for task in tasks:
            task.wait_ready(deadline)
        yield Contender(tasks[1:])


def has_tensorflow() -> bool:
    found = subprocess.run(
        [peer_python(), "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('tensorflow'))"], check=False
    )
    return found.returncode == 0


def contenders(what: str) -> dict[str, Start]:
    """By name, how to start each contender of a comparison."""
    found: dict[str, Start] = {"grpc": partial(ours, "grpc"), "shm": partial(ours, "shm")}
    if what == "alexnet":
        found["alone"] = partial(ours, "alone")
    if has_tensorflow():
        found["tensorflow"] = partial(tensorflow, {})
        if what == "alexnet":
            found["tensorflow tuned"] = partial(tensorflow, _ALLOCATOR | memcpy.environment())
    return found


def compare(what: str, workers: int, batch: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Contender -> seconds a step (the mean over workers of each one's median), one a round, in turns."""
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(start(what, workers, batch, steps)) for name, start in contenders(what).items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, job in jobs.items():
                medians = [statistics.median(times) for times in job.round()]
                seconds[name].append(statistics.mean(medians) * 1e-9)
    return seconds


def report(what: str, workers: int, batch: int, seconds: dict[str, list[float]]) -> Iterator[str]:
    """A line a contender, then a line a ratio: the median of the rounds' own, and the rounds."""
    for name, rounds in seconds.items():
        middle = statistics.median(rounds)
        figure = f"{middle * 1e6:.0f} us" if what == "op" else f"{workers * batch / middle:.1f} images/s"
        yield f"{what}: {name} {figure}"
    for own in ("grpc", "shm"):
        for other in seconds:
            if other not in ("grpc", "shm"):
                ratios = [theirs / mine for mine, theirs in zip(seconds[own], seconds[other])]
                listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                yield f"{what}: {own} is {statistics.median(ratios):.2f} times as fast as {other} (rounds: {listed})"
    if "tensorflow" not in seconds:
        yield f"{what}: no TensorFlow to compare with in {peer_python()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--what", choices=("op", "alexnet", "both"), default="both")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="a round; by default 500 ops, 6 training steps")
    chosen = parser.parse_args()
    for what in ("op", "alexnet") if chosen.what == "both" else (chosen.what,):
        workers = 2 if what == "alexnet" else 1
        steps = chosen.steps or (500 if what == "op" else 6)
        seconds = compare(what, workers, chosen.batch, steps, chosen.rounds)
        for line in report(what, workers, chosen.batch, seconds):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
