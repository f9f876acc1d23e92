"""Runner: executes the trials of a plan, one after another, in fresh processes, and stores each as it ends.

It needs neither pandas nor pydantic nor click, so the same runner works on a laptop, on a cluster, and inside the soft-RoCE
guest (``python -m harness.runner FOLDER``). A trial that fails keeps its error and the rest go on; one that was measured already is
not measured again, so an interrupted run is resumed by running it again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import environment, units
from harness.bench.base import benchmark
from harness.cell import Trial
from harness.errors import HarnessError, RecordError
from harness.launch.base import JobSpec, Launcher, RankOutcome, launcher
from harness.progress import Lines, Progress
from harness.records import RankRecord, TrialRecord, read_rank, read_trial, write_atomically, write_trial
from runtime.deadline import Deadline
from runtime.errors import VerbflowError

# After this many failures of one cell its later rounds are given up: a cell that hangs would cost its time limit each time.
GIVE_UP_AFTER = 2


@dataclass(frozen=True)
class Plan:
    """What is to be executed; ``plan.json`` of a run's folder. ``fidelity`` overrides what transports say, where the
    place decides it (a guest, a shaped network). ``budget_ns`` 0 is no limit."""

    experiment: str
    profile: str
    seed: int
    rounds: int
    code: str
    trials: tuple[Trial, ...]
    launcher: str = "local"
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    fidelity: str = ""
    budget_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "trials": [trial.to_json() for trial in self.trials]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        return cls(**{**data, "trials": tuple(Trial.from_json(trial) for trial in data["trials"])})

    def write(self, folder: Path) -> None:
        write_atomically(folder / "plan.json", json.dumps(self.to_json(), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """RecordError if the folder has no readable plan."""
        try:
            return cls.from_json(json.loads((folder / "plan.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder / 'plan.json'} cannot be read ({error}); start a new run") from error


def trial_path(folder: Path, trial: Trial) -> Path:
    return folder / "raw" / f"{trial.run_id}.npz"


def finished(folder: Path, plan: Plan) -> dict[str, str]:
    """run_id -> status of the plan's trials that are stored already. Damaged files count as not stored."""
    known = {}
    for trial in plan.trials:
        path = trial_path(folder, trial)
        if path.exists():
            try:
                known[trial.run_id] = read_trial(path).status
            except RecordError:
                path.unlink()
    return known


def execute(folder: Path, plan: Plan, progress: Progress) -> dict[str, int]:
    """Run every trial that is not stored as ok or skipped; the answer counts statuses.

    KeyboardInterrupt ends the running trial's processes and leaves everything measured in place.
    """
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    stored = finished(folder, plan)
    done = {run_id for run_id, status in stored.items() if status in ("ok", "skipped")}
    write_atomically(folder / "environment.json", json.dumps(environment.describe(), indent=1).encode())
    place = launcher(plan.launcher, plan.launcher_options)
    reason = place.available()
    if reason:
        raise HarnessError(f"launcher {plan.launcher} cannot be used here: {reason}")
    failures: Tally[str] = Tally()
    unusable: dict[str, str] = {}
    counts: Tally[str] = Tally(stored[run_id] for run_id in done)
    limit = Deadline.after(plan.budget_ns * 1e-9) if plan.budget_ns else None
    labels = _labels(plan)
    progress.begin(len(plan.trials), len(done))
    try:
        for trial in plan.trials:
            if trial.run_id in done:
                continue
            if limit is not None and limit.expired():
                counts["left out"] += 1
                continue
            if trial.key in unusable:
                record = _unmeasured(trial, "skipped", unusable[trial.key])
            elif failures[trial.key] >= GIVE_UP_AFTER:
                record = _unmeasured(trial, "failed", f"given up: it failed {GIVE_UP_AFTER} times in this run")
            else:
                record = _run(folder, trial, place, plan.fidelity or place.fidelity)
            write_trial(trial_path(folder, trial), record)
            counts[record.status] += 1
            if record.status == "skipped":
                unusable[trial.key] = record.error
            elif record.status != "ok":
                failures[trial.key] += 1
            progress.trial(f"{labels[trial.key]} round {trial.round}", record.status, record.error, record.wall_ns)
    finally:
        place.close()
        progress.end()
    return dict(counts)


def _labels(plan: Plan) -> dict[str, str]:
    """Cell key -> what tells the cell from the others of its sweep."""
    values: dict[tuple[str, str], set[Any]] = {}
    for trial in plan.trials:
        for name, value in trial.cell.params.items():
            values.setdefault((trial.cell.sweep, name), set()).add(value)
    labels = {}
    for trial in plan.trials:
        cell = trial.cell
        parts = [cell.sweep]
        for name, value in cell.params.items():
            if len(values[cell.sweep, name]) > 1 or name == "transport":
                parts.append(f"{name}={units.format_bytes(value) if name.endswith('bytes') else value}")
        labels[trial.key] = " ".join(parts)
    return labels


def _run(folder: Path, trial: Trial, place: Launcher, fidelity: str) -> TrialRecord:
    cell = trial.cell
    started_ns, start = time.time_ns(), time.monotonic_ns()
    shared = folder / "shared" if place.spread else None
    if shared is not None:
        shared.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verbflow-", dir=shared))
    try:
        bench = benchmark(cell.bench)
        p = bench.Params(**cell.params)
        size = bench.ranks(p)
        place.open(size)
        logs = folder / "logs" / f"{trial.order:05d}-{trial.run_id}"
        spec = JobSpec(cell, size, scratch, logs, bench.environment(p))
        job = place.start(spec)
        try:
            outcomes = job.wait(Deadline.after(cell.measure.timeout_ns * 1e-9))
        finally:
            job.kill()
        place.collect(spec)
        ranks = [_rank_record(scratch, outcome, cell.measure.timeout_ns) for outcome in outcomes]
    except (VerbflowError, HarnessError, OSError) as failure:
        return _unmeasured(trial, "failed", f"{type(failure).__name__}: {failure}", time.monotonic_ns() - start)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    status, error = _judge(ranks, outcomes)
    if status == "ok":
        shutil.rmtree(logs, ignore_errors=True) if not any(path.stat().st_size for path in logs.iterdir()) else None
    return TrialRecord(
        run_id=trial.run_id,
        key=trial.key,
        round=trial.round,
        order=trial.order,
        sweep=cell.sweep,
        bench=cell.bench,
        params=cell.params,
        status=status,
        error=error,
        started_ns=started_ns,
        wall_ns=time.monotonic_ns() - start,
        fidelity=fidelity or next((rank.fidelity for rank in ranks if rank.fidelity), ""),
        ranks=ranks,
    )


def _rank_record(scratch: Path, outcome: RankOutcome, timeout_ns: int) -> RankRecord:
    path = scratch / f"rank-{outcome.rank}.npz"
    if path.exists():
        return read_rank(path)
    if outcome.exit_code is None:
        why = f"still running after {timeout_ns * 1e-9:.0f} s, killed"
    elif outcome.exit_code < 0:
        why = f"killed by signal {-outcome.exit_code}"
    else:
        why = f"ended with code {outcome.exit_code} before it could store anything"
    last = _last_line(outcome.log) if outcome.exit_code is not None else ""
    if outcome.exit_code is None:
        why += "; its log shows where it was"
    return RankRecord(outcome.rank, status="failed", error=f"{why}{f'; its log ends: {last}' if last else ''}")


def _judge(ranks: Iterable[RankRecord], outcomes: Iterable[RankOutcome]) -> tuple[str, str]:
    """The trial's status and every rank's own error; what a rank only heard from another is left out."""
    bad = [rank for rank in ranks if rank.status != "ok"]
    if not bad:
        return "ok", ""
    own = [rank for rank in bad if not rank.error.startswith("GroupError")] or bad
    skipped = [rank for rank in own if rank.status == "skipped"]
    if skipped:
        return "skipped", skipped[0].error
    timeout = any(outcome.exit_code is None for outcome in outcomes)
    return "timeout" if timeout else "failed", "; ".join(f"rank {rank.rank}: {rank.error}" for rank in own)


def _unmeasured(trial: Trial, status: str, error: str, wall_ns: int = 0) -> TrialRecord:
    cell = trial.cell
    return TrialRecord(
        trial.run_id, trial.key, trial.round, trial.order, cell.sweep, cell.bench, cell.params,
        status, error, time.time_ns(), wall_ns,
    )  # fmt: skip


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1].strip()[:300] if lines else ""


def main(argv: list[str] | None = None) -> int:
    """Execute the plan of a folder in this place; 0 if no trial failed, 3 if some did, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m harness.runner FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        counts = execute(folder, Plan.read(folder), Lines())
    except (HarnessError, VerbflowError) as error:
        print(f"verbflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 3 if counts.get("failed") or counts.get("timeout") else 0


if __name__ == "__main__":
    sys.exit(main())
