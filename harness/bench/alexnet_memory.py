"""``python -m harness.bench.alexnet_memory``: does full-size AlexNet over parameter servers stay within its memory plan?

Starts one parameter server and two workers as processes (batch 24 of random pixels, as Jia et al., 2018) and prints, for each,
resident memory against what its plan says: the bar is twice the plan's bytes plus what an interpreter with the same
modules needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass

from runtime.cluster.launcher import LocalCluster
from runtime.cluster.session import Session
from runtime.deadline import Deadline
from runtime.graph.graph import Graph

MIB = 1 << 20
BAR = 2.0
_BASELINE = """
import runtime.cluster.session, runtime.training.schemes, runtime.models.catalog, runtime.transport.registry as r, json, psutil
r.transport_class({transport!r})
print(json.dumps(psutil.Process().memory_info().rss))
"""


@dataclass(frozen=True)
class Usage:
    """Bytes of one process: resident at its peak, what its plans, variables and transfers need, and an idle interpreter."""

    task: str
    peak_bytes: int
    planned_bytes: int
    baseline_bytes: int

    @property
    def allowed_bytes(self) -> int:
        return int(BAR * self.planned_bytes) + self.baseline_bytes

    @property
    def within(self) -> bool:
        return self.peak_bytes <= self.allowed_bytes


def baseline_bytes(transport: str) -> int:
    """Resident bytes of an interpreter that has imported what a worker imports."""
    done = subprocess.run(
        [sys.executable, "-c", _BASELINE.format(transport=transport)], capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout))


def measure(transport: str, batch: int, steps: int, workers: int, step_s: float) -> list[Usage]:
    """Train, and ask every task for its memory while all still run."""
    program = ["-m", "runtime.training.replica", "--model", "alexnet", "--batch", str(batch)]
    program += ["--steps", str(steps), "--warmup", "0", "--step-s", str(step_s), "--linger"]
    options = ["--transport", transport, "--arena-mib", "1024", "--threads", "1"]
    baseline = baseline_bytes(transport)
    with LocalCluster({"ps": 1, "worker": workers}, programs={"worker": program}, options=options) as job:
        deadline = Deadline.after(steps * step_s)
        for index in range(workers):
            print(json.dumps(job.task(f"/job:worker/task:{index}").read_line(deadline)), file=sys.stderr, flush=True)
        with Session(Graph(), job.spec, token=job.token) as session:
            memory = {task: session.status(task, deadline).memory for task in job.spec}
    # A session of a graph is registered with all its variables, which the plan counts; transfers lie in the arena.
    return [Usage(task, one.peak_resident_bytes, one.plan_bytes, baseline) for task, one in memory.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--transport", default="grpc")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=120.0)
    chosen = parser.parse_args()
    usages = measure(chosen.transport, chosen.batch, chosen.steps, chosen.workers, chosen.step_s)
    for usage in usages:
        print(
            f"{usage.task}: peak resident {usage.peak_bytes / MIB:.0f} MiB; plan {usage.planned_bytes / MIB:.0f} MiB, "
            f"interpreter {usage.baseline_bytes / MIB:.0f} MiB; allowed {usage.allowed_bytes / MIB:.0f} MiB: "
            f"{'within' if usage.within else 'BEYOND'}"
        )
    return 0 if all(usage.within for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
