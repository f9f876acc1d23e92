"""Commands on experiments: list, plan, run, status, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness import units
from harness.errors import HarnessError
from harness.terminal import (
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    EXIT_SOME_FAILED,
    EXIT_UNEXPECTED,
    complain,
    emit,
    json_option,
    show_table,
    told,
)

_profile_option = click.option("--profile", help="full, quick, soft-roce or what the definition names.")
_set_option = click.option("--set", "pairs", multiple=True, metavar="AXIS=VALUE[,VALUE]", help="Replace an axis.")
_rounds_option = click.option("--rounds", type=click.IntRange(1, 1000), help="Repetitions in fresh processes.")


@click.command("list")
@json_option
@told
def list_command(as_json: bool) -> None:
    """The experiments, and the runs stored of each."""
    from harness import store
    from harness.definition import experiment_paths, parse_definition

    rows: list[dict[str, Any]] = []
    for name, path in experiment_paths().items():
        row: dict[str, Any] = {"name": name, "title": "", "profiles": [], "runs": len(store.runs_of(name)), "error": ""}
        try:
            definition = parse_definition(path)
            row |= {"title": definition.title, "profiles": list(dict.fromkeys(["full", *definition.profile]))}
        except HarnessError as error:
            row["error"] = str(error)
        rows.append(row)
    if as_json:
        emit(rows)
        return
    show_table(
        ["experiment", "profiles", "runs", "what it asks"],
        [[row["name"], ", ".join(row["profiles"]), str(row["runs"]), row["title"] or row["error"]] for row in rows],
    )


@click.command()
@click.argument("name")
@_profile_option
@_set_option
@_rounds_option
@json_option
@told
def plan(name: str, profile: str | None, pairs: tuple[str, ...], rounds: int | None, as_json: bool) -> None:
    """Show the cells of an experiment, and what they will take, before anything runs."""
    from harness import campaign

    experiment, place, note = _resolve(name, profile)
    made = campaign.make_plan(experiment, _settings(pairs), place, rounds)
    cells = experiment.cells(_settings(pairs))
    estimate = campaign.estimate(made, place.where)
    if as_json:
        emit(
            {
                "experiment": made.experiment,
                "profile": made.profile,
                "place": place.where,
                "rounds": made.rounds,
                "estimate": estimate,
                "cells": [{**cell.to_json(), "key": cell.key(made.code)} for cell in cells],
            }
        )
        return
    for sweep in dict.fromkeys(cell.sweep for cell in cells):
        own = [cell for cell in cells if cell.sweep == sweep]
        names = [key for key in own[0].params if len({cell.params[key] for cell in own}) > 1 or key == "transport"]
        click.echo(f"{sweep} ({own[0].bench}), {len(own)} cells:")
        show_table(
            names or ["cell"],
            [
                [
                    units.format_bytes(cell.params[key]) if key.endswith("bytes") else str(cell.params[key])
                    for key in names
                ]
                or [cell.bench]
                for cell in own
            ],
        )
    click.echo(
        f"{len(cells)} cells x {made.rounds} rounds = {estimate['trials']} trials in random order of seed {made.seed}; "
        f"about {units.format_ns(estimate['seconds'] * 1e9)}, {units.format_bytes(round(estimate['bytes'], -6))} moved"
    )
    click.echo(f"where: {place.reason}" + (f" ({note})" if note and note != place.reason else ""))


@click.command()
@click.argument("name")
@_profile_option
@_set_option
@_rounds_option
@click.option("--resume", is_flag=True, help="Continue the newest unfinished run of this experiment and profile.")
@click.option("--check", is_flag=True, help="Exit with 5 unless the ratios that the definition expects were found.")
@json_option
@told
def run(
    name: str,
    profile: str | None,
    pairs: tuple[str, ...],
    rounds: int | None,
    resume: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Run an experiment; ends with a table, pictures, a report and a verdict."""
    import signal

    from harness import campaign, store
    from harness.progress import Silent, for_stream

    # Somebody's `kill` or a time limit must take the ranks and the guest down too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    experiment, place, note = _resolve(name, profile)
    if check and experiment.place == "guest" and place.where == "here" and place.choice is None:
        click.echo(f"verbflow: nothing is checked: {note}", err=True)
        return 0
    made = campaign.make_plan(experiment, _settings(pairs), place, rounds)
    folder, resumed = campaign.open_run(made, resume)
    if not as_json:
        estimate = campaign.estimate(made, place.where)
        click.echo(f"{experiment.definition.title}")
        click.echo(f"where: {note or place.reason}")
        click.echo(
            f"{'resuming' if resumed else 'running'} {estimate['trials']} trials of {len(campaign.cells_of(made))} cells, "
            f"about {units.format_ns(estimate['seconds'] * 1e9)}; run {folder.name}"
        )
    with store.locked(folder):
        campaign.describe(folder, made, experiment, place)
        try:
            counts = campaign.perform(folder, made, place, Silent() if as_json else for_stream())
        except KeyboardInterrupt:
            complain(f"interrupted; continue with: verbflow run {name} --resume", as_json)
            return EXIT_INTERRUPTED
        outcome = campaign.finish(folder)
    if as_json:
        emit(_outcome_json(outcome))
    else:
        _show(outcome)
    if check and not all(item.met for item in outcome.expectations):
        return EXIT_UNEXPECTED
    return _code(counts)


@click.command()
@click.argument("name", required=False)
@json_option
@told
def status(name: str | None, as_json: bool) -> None:
    """Stored runs: how far each came, and how its trials ended."""
    from harness import runner, store
    from harness.definition import experiment_paths, load_experiment

    names = [load_experiment(name).name] if name else list(experiment_paths())
    rows: list[dict[str, Any]] = []
    for experiment in names:
        for folder in store.runs_of(experiment):
            made = runner.Plan.read(folder)
            stored = runner.finished(folder, made)
            counts: dict[str, int] = {}
            for value in stored.values():
                counts[value] = counts.get(value, 0) + 1
            done = (folder / "verdict.json").exists()
            rows.append(
                {
                    "experiment": experiment,
                    "run": folder.name,
                    "profile": made.profile,
                    "trials": len(made.trials),
                    "stored": len(stored),
                    "statuses": counts,
                    "state": "complete" if done else ("running" if _is_locked(folder) else "interrupted"),
                }
            )
    if as_json:
        emit(rows)
        return
    if not rows:
        click.echo("no runs are stored yet")
        return
    show_table(
        ["experiment", "run", "profile", "state", "trials", "how they ended"],
        [
            [
                row["experiment"],
                row["run"],
                row["profile"],
                row["state"],
                f"{row['stored']}/{row['trials']}",
                ", ".join(f"{count} {status}" for status, count in row["statuses"].items()),
            ]
            for row in rows
        ],
    )


@click.command()
@click.argument("name")
@json_option
@told
def report(name: str, as_json: bool) -> None:
    """Rebuild tables, pictures and the HTML report of a stored run (its folder, its name, or an experiment's newest)."""
    from harness import campaign, store
    from harness.errors import RecordError

    try:
        folder = store.find_run(name)
    except RecordError:
        known = store.runs_of(name)
        if not known:
            raise
        folder = known[-1]
    outcome = campaign.finish(folder) if (folder / "raw").is_dir() else campaign.conclude(folder)
    if as_json:
        emit(_outcome_json(outcome))
    else:
        _show(outcome)


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"--set takes AXIS=VALUE or AXIS=VALUE,VALUE, not {pair!r}")
        settings[name] = [item.strip() for item in value.split(",")]
    return settings


def _resolve(name: str, profile: str | None) -> tuple[Any, Any, str]:
    """Experiment, place and a note about how the profile was chosen.

    Where the guest cannot be had, what needs no RDMA runs here all the same, and the note says what is missing.
    """
    from harness import campaign
    from harness.definition import load_experiment
    from runtime.errors import UnavailableError

    first = load_experiment(name)
    chosen, note = campaign.profile_for(first.definition.profile, first.definition.needs_rdma, profile)
    experiment = first if chosen == "full" else load_experiment(name, chosen)
    try:
        place = campaign.choose_place(experiment)
    except UnavailableError as error:
        note = f"here, without RDMA: {error}"
        place = campaign.Place("here", "", note)
    return experiment, place, note


def _outcome_json(outcome: Any) -> dict[str, Any]:
    return {
        "folder": str(outcome.folder),
        "counts": outcome.counts,
        "sentence": outcome.sentence,
        "comparisons": [item.to_json() for item in outcome.comparisons],
        "expectations": [vars(item) for item in outcome.expectations],
        "pictures": [str(path) for path in outcome.pictures],
        "report": str(outcome.report) if outcome.report else None,
    }


def _show(outcome: Any) -> None:
    from harness import store
    from harness.report import build

    for table in build.tables(store.load(outcome.folder)):
        click.echo(f"\n{table['name']}")
        show_table(table["columns"], table["rows"])
    click.echo()
    for picture in outcome.pictures:
        click.echo(f"picture: {picture}")
    for item in outcome.expectations:
        click.echo(f"expected: {item.sentence()}")
    click.echo(f"report:  {outcome.report}")
    click.echo(f"verdict: {outcome.sentence}")


def _is_locked(folder: Path) -> bool:
    from harness import store
    from harness.errors import BusyError

    try:
        with store.locked(folder):
            return False
    except BusyError:
        return True


def _code(counts: dict[str, int]) -> int:
    if counts.get("failed") or counts.get("timeout"):
        return EXIT_SOME_FAILED
    return 0 if counts.get("ok") else EXIT_NOTHING
