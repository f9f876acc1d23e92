"""Campaign: one run of an experiment, from the plan to tables, pictures, report and verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import runner, store
from harness.bench.base import benchmark
from harness.cell import Cell, code_version, schedule
from harness.definition import Experiment
from harness.errors import HarnessError, RecordError
from harness.launch import vm
from harness.progress import Progress
from harness.records import write_atomically
from harness.runner import Plan
from runtime.errors import UnavailableError

if TYPE_CHECKING:
    from harness.analysis.compare import Comparison, Expectation

# Start of fresh processes, import, connect, verify; measured, per rank that a processor has to start.
_START_NS = 500_000_000
_START_IN_GUEST_NS = 12_000_000_000
_BOOTS = 4


@dataclass
class Outcome:
    """What a campaign leaves: where, how its trials ended, and what follows from them."""

    folder: Path
    counts: dict[str, int]
    comparisons: list[Comparison] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)
    report: Path | None = None
    sentence: str = ""
    place: str = ""


@dataclass(frozen=True)
class Place:
    """Where trials run: ``here`` or ``guest``, which fidelity that forces on every row, and why it was chosen."""

    where: str
    fidelity: str
    reason: str
    choice: vm.Choice | None = None


def choose_place(experiment: Experiment) -> Place:
    """Here, unless the profile asks for the guest; says which and why. UnavailableError where the guest cannot be had."""
    if experiment.place != "guest":
        return Place("here", "", "this machine")
    choice = vm.choose()
    if choice.where == "host":
        soft = str(choice.fidelity) == "soft-roce"
        return Place("here", "soft-roce" if soft else "", choice.reason, choice)
    return Place("guest", str(choice.fidelity), choice.reason, choice)


def profile_for(names: Mapping[str, Any], needs_rdma: bool, asked: str | None) -> tuple[str, str]:
    """The profile to use, and a sentence if it was chosen for the reader: ``soft-roce`` where an experiment needs RDMA, has
    that profile, and this machine has no device."""
    if asked:
        return asked, ""
    if needs_rdma and "soft-roce" in names:
        try:
            choice = vm.choose()
        except UnavailableError as error:
            return "soft-roce", str(error)
        if choice.where == "guest":
            return "soft-roce", f"profile soft-roce, in a guest: {choice.reason}"
        return "full", f"profile full, here: {choice.reason}"
    return "full", ""


def make_plan(
    experiment: Experiment, settings: Mapping[str, Any] | None, place: Place, rounds: int | None = None
) -> Plan:
    """The trials of an experiment in the order in which they will run."""
    cells = experiment.cells(settings)
    count = rounds or experiment.rounds
    code = code_version()
    name, options = experiment.launcher
    seed = experiment.definition.seed
    return Plan(
        experiment=experiment.name,
        profile=experiment.profile,
        seed=seed,
        rounds=count,
        code=code,
        trials=tuple(schedule(cells, count, seed, code)),
        launcher=name,
        launcher_options=options,
        fidelity=place.fidelity,
        budget_ns=experiment.budget_ns,
    )


def estimate(plan: Plan, where: str) -> dict[str, float]:
    """Seconds and bytes that a plan will take, roughly: two processors share the start of the ranks."""
    start = _START_IN_GUEST_NS if where == "guest" else _START_NS
    seconds = 0.0
    moved = 0.0
    for trial in plan.trials:
        cell = trial.cell
        bench = benchmark(cell.bench)
        p = bench.Params(**cell.params)
        ns = start * max(1, bench.ranks(p) / 2) + cell.measure.warmup_time_ns + cell.measure.min_time_ns * 1.1
        seconds += ns * 1e-9
        # At 2 GB/s, for want of a measurement.
        per_iteration = bench.bytes_per_iteration(p)
        fastest = max(per_iteration / 2e9, 2e-6)
        iterations = max(
            cell.measure.min_iterations, min(cell.measure.max_iterations, cell.measure.min_time_ns * 1e-9 / fastest)
        )
        moved += per_iteration * iterations
        seconds += max(0.0, per_iteration * iterations / 2e9 - cell.measure.min_time_ns * 1e-9)
    if plan.budget_ns:
        seconds = min(seconds, plan.budget_ns * 1e-9)
    return {"seconds": seconds, "bytes": moved, "trials": len(plan.trials)}


def open_run(plan: Plan, resume: bool) -> tuple[Path, bool]:
    """The folder to work in, and whether it is an interrupted run taken up again.

    With ``resume`` that is the newest unfinished run of the same experiment and profile which nobody else works on; its plan is
    replaced by ``plan``, and what was measured under keys that still hold is kept.
    """
    if resume:
        for folder in reversed(store.runs_of(plan.experiment)):
            try:
                before = Plan.read(folder)
            except RecordError:
                continue
            if before.profile == plan.profile and not (folder / "verdict.json").exists() and not _busy(folder):
                plan.write(folder)
                return folder, True
    folder = store.new_run(plan.experiment)
    plan.write(folder)
    return folder, False


def perform(folder: Path, plan: Plan, place: Place, progress: Progress) -> dict[str, int]:
    """Execute the plan where ``place`` says. A guest that died is booted again for the rest."""
    if place.where == "here":
        return runner.execute(folder, plan, progress)
    assert place.choice is not None
    for boot in range(_BOOTS):
        before = len(runner.finished(folder, plan))
        try:
            seconds = max(600.0, 1.5 * plan.budget_ns * 1e-9) if plan.budget_ns else 3600.0
            outcome = vm.run(
                [sys.executable, "-m", "harness.runner", str(folder)],
                choice=place.choice,
                timeout=seconds,
                writable=[folder],
                # The runner's own numpy is what its forks inherit.
                environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                echo=_echo,
            )
        except vm.GuestError as error:
            print(f"verbflow: {error}", file=sys.stderr)
            stored = len(runner.finished(folder, plan))
            if stored == len(plan.trials):
                break
            if stored == before and boot > 0:
                raise
            continue
        if outcome.returncode not in (0, 3):
            raise HarnessError(
                f"the runner in the guest ended with code {outcome.returncode}:\n{outcome.output[-2000:]}"
            )
        break
    return _tally(folder, plan)


def describe(folder: Path, plan: Plan, experiment: Experiment, place: Place) -> None:
    """Write what the run is about into its folder, so that it can be reported whatever becomes of the definition."""
    info = {
        "experiment": plan.experiment,
        "title": experiment.definition.title,
        "question": experiment.definition.question,
        "profile": plan.profile,
        "place": place.reason,
        "code": plan.code,
        "seed": plan.seed,
        "rounds": plan.rounds,
        "launcher": plan.launcher,
        "launcher_options": dict(plan.launcher_options),
        "definition": experiment.definition.model_dump(mode="json", exclude_none=True),
    }
    write_atomically(folder / "about.json", json.dumps(info, indent=1).encode())


def finish(folder: Path) -> Outcome:
    """Tables, conclusions, pictures and report from what a run has measured, complete or not."""
    try:
        info = json.loads((folder / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder / 'about.json'} cannot be read ({error}); run the experiment anew") from error
    plan = Plan.read(folder)
    info |= {"counts": _tally(folder, plan), "planned": len(plan.trials)}
    store.compact(folder, info, {trial.run_id for trial in plan.trials})
    return conclude(folder)


def conclude(folder: Path) -> Outcome:
    """Conclusions, pictures and report of a stored run; also for runs measured long ago or elsewhere."""
    from harness.analysis import compare
    from harness.plots import figures
    from harness.report import build

    results = store.load(folder)
    info = results.info[0]
    tally = dict(info.get("counts", {}))
    outcome = Outcome(folder, tally, place=info.get("place", ""))
    if (results.runs["status"] == "ok").any():
        outcome.comparisons = compare.conclude(results, info["definition"].get("conclude", []))
        outcome.expectations = compare.expectations(results, info["definition"].get("expect", []))
        outcome.pictures = figures.draw_all(results, outcome.comparisons, folder / "pictures")
    outcome.sentence = _sentence(results, outcome.comparisons, bool(info["definition"].get("conclude")))
    outcome.report = build.write(
        results, outcome.comparisons, outcome.pictures, outcome.sentence, folder / "report.html"
    )
    content = {
        "sentence": outcome.sentence,
        "counts": tally,
        "comparisons": [item.to_json() for item in outcome.comparisons],
        "expectations": [vars(item) for item in outcome.expectations],
    }
    write_atomically(folder / "verdict.json", json.dumps(content, indent=1).encode())
    return outcome


def cells_of(plan: Plan) -> list[Cell]:
    """Every cell of a plan once."""
    return list({trial.key: trial.cell for trial in plan.trials}.values())


def _tally(folder: Path, plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for status in runner.finished(folder, plan).values():
        counts[status] = counts.get(status, 0) + 1
    return counts


def _sentence(results: store.Results, comparisons: list[Comparison], asked: bool) -> str:
    from harness.analysis import compare

    runs = results.runs
    bad = runs[runs["status"] != "ok"]
    if len(bad) and len(bad) == len(runs):
        return f"Nothing was measured: {bad['error'].iloc[0]}."
    text = compare.summary(comparisons) if asked else "Measured; the experiment asks for no comparison."
    if len(bad):
        reasons = bad.drop_duplicates("error")
        text += f" {len(bad)} of {len(runs)} trials gave nothing ({reasons['error'].iloc[0].splitlines()[0][:200]})."
    left_out = results.info[0].get("planned", len(runs)) - len(runs)
    if left_out > 0:
        text += f" {left_out} planned trials were not measured (time budget, or interrupted)."
    suspects = int((runs["suspect"] != "").sum())
    if suspects:
        text += f" {suspects} trials are suspect: their byte counts do not agree with what was timed."
    return text


def _busy(folder: Path) -> bool:
    try:
        with store.locked(folder):
            return False
    except HarnessError:
        return True


def _echo(piece: bytes) -> None:
    sys.stderr.buffer.write(piece)
    sys.stderr.buffer.flush()
