"""The command line: ``verbflow COMMAND``. Every command takes ``--json``.

Exit codes: 0 done; 1 an error, told in a sentence; 2 wrong usage; 3 done, but some trials failed (their errors are kept);
4 nothing could be measured here; 5 measured, but not what the definition expects (``run --check``); 130 interrupted, resume
with ``verbflow run NAME --resume``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from harness import units
from harness.errors import HarnessError

EXIT_ERROR, EXIT_SOME_FAILED, EXIT_NOTHING, EXIT_UNEXPECTED, EXIT_INTERRUPTED = 1, 3, 4, 5, 130


def _told(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn errors into sentences and exit codes. A traceback is a bug."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        from runtime.errors import VerbflowError

        as_json = bool(kwargs.get("as_json"))
        try:
            code = command(*args, **kwargs) or 0
        except (HarnessError, VerbflowError) as error:
            code = EXIT_ERROR
            _complain(str(error), as_json)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            _complain("interrupted; what was measured is kept, continue with --resume", as_json)
        except BrokenPipeError:
            code = 0
        except OSError as error:
            code = EXIT_ERROR
            where = f" ({error.filename})" if error.filename else ""
            _complain(f"the system refused{where}: {error.strerror or error}", as_json)
        sys.exit(code)

    return run


def _complain(text: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": text}))
    for line in text.splitlines():
        click.echo(f"verbflow: {line}", err=True)


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def _emit(value: Any) -> None:
    click.echo(json.dumps(_finite(value), indent=1, default=str))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise click.UsageError(f"--set takes AXIS=VALUE or AXIS=VALUE,VALUE, not {pair!r}")
        settings[name] = [item.strip() for item in value.split(",")]
    return settings


def _table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, markup=False, highlight=False).print(table)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Exit codes: 0 done, 1 error, 2 usage, "
             "3 some trials failed, 4 nothing could be measured, 5 not as expected, 130 interrupted.")  # fmt: skip
@click.version_option(package_name="verbflow")
def main() -> None:
    """What does RDMA buy a distributed training job, and where does the time go?"""


@main.command("list")
@_json_option
@_told
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
        _emit(rows)
        return
    _table(
        ["experiment", "profiles", "runs", "what it asks"],
        [[row["name"], ", ".join(row["profiles"]), str(row["runs"]), row["title"] or row["error"]] for row in rows],
    )


_profile_option = click.option("--profile", help="full, quick, soft-roce or what the definition names.")
_set_option = click.option("--set", "pairs", multiple=True, metavar="AXIS=VALUE[,VALUE]", help="Replace an axis.")
_rounds_option = click.option("--rounds", type=click.IntRange(1, 1000), help="Repetitions in fresh processes.")


@main.command()
@click.argument("name")
@_profile_option
@_set_option
@_rounds_option
@_json_option
@_told
def plan(name: str, profile: str | None, pairs: tuple[str, ...], rounds: int | None, as_json: bool) -> None:
    """Show the cells of an experiment, and what they will take, before anything runs."""
    from harness import campaign

    experiment, place, note = _resolve(name, profile, forgiving=True)
    made = campaign.make_plan(experiment, _settings(pairs), place, rounds)
    cells = experiment.cells(_settings(pairs))
    estimate = campaign.estimate(made, place.where)
    if as_json:
        _emit(
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
        _table(
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


@main.command()
@click.argument("name")
@_profile_option
@_set_option
@_rounds_option
@click.option("--resume", is_flag=True, help="Continue the newest unfinished run of this experiment and profile.")
@click.option("--check", is_flag=True, help="Exit with 5 unless the ratios that the definition expects were found.")
@_json_option
@_told
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

    experiment, place, note = _resolve(name, profile, forgiving=True)
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
            _complain(f"interrupted; continue with: verbflow run {name} --resume", as_json)
            return EXIT_INTERRUPTED
        outcome = campaign.finish(folder)
    if as_json:
        _emit(_outcome_json(outcome))
    else:
        _show(outcome)
    if check and not all(item.met for item in outcome.expectations):
        return EXIT_UNEXPECTED
    return _code(counts)


@main.command()
@click.argument("name", required=False)
@_json_option
@_told
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
        _emit(rows)
        return
    if not rows:
        click.echo("no runs are stored yet")
        return
    _table(
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


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--margin", default=0.03, show_default=True, help="Differences below it count as the same.")
@click.option(
    "--about",
    type=click.Choice(["latency", "bandwidth", "training", "overhead"]),
    default="latency",
    show_default=True,
)
@_json_option
@_told
def compare(a: str, b: str, margin: float, about: str, as_json: bool) -> None:
    """Compare run B with run A, cell by cell: faster, slower, same within the margin, or cannot tell."""
    from harness import store
    from harness.analysis import compare as comparing

    try:
        found = comparing.compare(store.load(a), store.load(b), margin, about)
    except ValueError as error:
        raise HarnessError(str(error)) from error
    if as_json:
        _emit([item.to_json() for item in found])
        return
    if not found:
        click.echo("the two runs have no cell in common")
        return
    _table(
        ["sweep", "cell", "verdict", "ratio of times", "95 % interval", "first", "second"],
        [
            [
                item.sweep,
                ", ".join(
                    f"{key}={units.format_bytes(value) if key.endswith('bytes') else value}"
                    for key, value in item.setting.items()
                ),
                item.verdict,
                f"{item.ratio.value:.3g}",
                f"{item.ratio.low:.3g} to {item.ratio.high:.3g}",
                units.format_ns(item.baseline_ns),
                units.format_ns(item.contender_ns),
            ]
            for item in found
        ],
    )
    click.echo("The two runs were not interleaved: a drift of the machine between them counts as a difference.")


@main.command()
@click.argument("name")
@_json_option
@_told
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
        _emit(_outcome_json(outcome))
    else:
        _show(outcome)


@main.command()
@_json_option
@_told
def doctor(as_json: bool) -> None:
    """What can run here and what cannot, why, and the command that would change it."""
    from harness import doctor as diagnosing

    checks = diagnosing.examine()
    if as_json:
        _emit([vars(check) for check in checks])
        return
    for check in checks:
        click.echo(f"{check.state:4}  {check.name}: {check.finding}")
        if check.remedy:
            click.echo(f"      -> {check.remedy}")


@main.command()
@click.argument("name")
@click.option("--table", type=click.Choice(["runs", "samples", "spans", "counters", "cells", "trials", "trace"]),
              default="cells", show_default=True)  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default: stdout.")
@_json_option
@_told
def export(name: str, table: str, output: Path | None, as_json: bool) -> None:
    """Print a table of a stored run as CSV, or as JSON with --json; ``trace`` is a Chrome trace of its spans."""
    from harness import store
    from harness.analysis import frames
    from harness.plots import timeline

    results = store.load(name)
    if table == "trace":
        first = (
            results.spans[results.spans["run_id"] == results.spans["run_id"].iloc[0]] if len(results.spans) else None
        )
        if first is None:
            raise HarnessError(f"run {name} has no spans")
        text = json.dumps(timeline.chrome_trace(first))
    else:
        frame = getattr(frames, table)(results) if table in ("cells", "trials") else getattr(results, table)
        text = frame.to_json(orient="records", indent=1) if as_json else frame.to_csv(index=False)
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        output.write_text(text)


@main.command()
@click.argument("name")
@click.argument("label")
@_json_option
@_told
def publish(name: str, label: str, as_json: bool) -> None:
    """Copy a run's tables and pictures to results/published under LABEL (date-host), for git."""
    from harness import store

    target = store.publish(store.find_run(name), label)
    if as_json:
        _emit({"folder": str(target)})
    else:
        click.echo(f"published in {target}")


@main.group()
def check() -> None:
    """Judge stored results: published claims, or the cost model's predictions."""


_stored_option = click.option("--stored", type=click.Choice(["newest", "published"]), default="newest", show_default=True,
                              help="Which stored runs: newest takes scratch runs before published ones.")  # fmt: skip


@check.command("paper")
@_stored_option
@_json_option
@_told
def check_paper(stored: str, as_json: bool) -> int:
    """Judge every claim of experiments/paper/claims.toml by stored runs and the simulation.

    Exit codes: 0 every claim that could be judged is reproduced; 3 some are not; 4 none could be judged.
    """
    from harness import paper
    from harness.analysis import claims

    found = paper.collect(("published",) if stored == "published" else ("scratch", "published"))
    if as_json:
        _emit(found.judged.to_dict(orient="records"))
    else:
        _show_claims(found.judged)
    verdicts = set(found.judged["verdict"])
    if claims.NOT_REPRODUCED in verdicts:
        return EXIT_SOME_FAILED
    return 0 if claims.REPRODUCED in verdicts else EXIT_NOTHING


@check.command("costmodel")
@click.argument("name", default="paper/costmodel")
@_json_option
@_told
def check_costmodel(name: str, as_json: bool) -> int:
    """Predicted beside measured training steps of a stored run.

    Exit codes: 0 every prediction is within 15 %; 3 some are not; 4 there is nothing to compare.
    """
    from harness import store
    from harness.analysis import validate

    table = validate.validate(store.load(name))
    if as_json:
        _emit(table.to_dict(orient="records"))
    else:
        _table(
            ["transport", "workers", "measured steps/s", "predicted", "error in time", "bottleneck"],
            [
                [
                    row.transport,
                    str(row.workers),
                    f"{row.measured:.3g}",
                    f"{row.predicted:.3g}",
                    f"{row.error:+.0%}",
                    row.bottleneck,
                ]
                for row in table.itertuples()
            ],
        )
    if table.empty:
        return EXIT_NOTHING
    return EXIT_SOME_FAILED if (table["error"].abs() > validate.MARGIN).any() else 0


@main.command()
@click.option("--profile", type=click.Choice(["full", "quick"]), default="full", show_default=True,
              help="full is published; quick is for a check of everything.")  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Run these of its experiments, then rebuild all.")
@click.option("--rebuild", is_flag=True, help="Run nothing: rebuild tables and notebook from what is stored.")
@_json_option
@_told
def paper(profile: str, only: tuple[str, ...], rebuild: bool, as_json: bool) -> int:
    """Run the paper's experiments that can run here; rebuild published results, verdicts and notebook."""
    import signal

    from harness import paper as papers
    from harness.progress import Silent, for_stream
    from runtime.errors import VerbflowError

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    unknown = sorted(set(only) - set(papers.PARTS["full"]))
    if unknown:
        raise HarnessError(
            f"the paper has no experiment {', '.join(unknown)}; it has {', '.join(papers.PARTS['full'])}"
        )

    def tell(text: str) -> None:
        if not as_json:
            click.echo(text)

    counts: dict[str, int] = {}
    for name in () if rebuild else only or papers.PARTS[profile]:
        tell(f"== {name}")
        try:
            for status, count in papers.perform(name, profile, Silent() if as_json else for_stream()).items():
                counts[status] = counts.get(status, 0) + count
        except (HarnessError, VerbflowError) as error:
            tell(f"not run: {error}")
            counts["skipped"] = counts.get("skipped", 0) + 1
    found = papers.rebuild(profile, tell)
    if as_json:
        _emit({"trials": counts, "claims": found.judged.to_dict(orient="records")})
    else:
        _show_claims(found.judged)
        if counts:
            click.echo("trials: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return EXIT_SOME_FAILED if counts.get("failed") or counts.get("timeout") else 0


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--writable", type=click.Path(path_type=Path), multiple=True, help="Folder the command may write to.")
@click.option("--timeout", default="1h", show_default=True, help="Time limit with the boot.")
@_json_option
@_told
def rxe(command: tuple[str, ...], writable: tuple[Path, ...], timeout: str, as_json: bool) -> int:
    """Run a command where an RDMA device is: here, or in the soft-RoCE guest. Exit code is the command's."""
    from harness.launch import vm

    if not command:
        raise HarnessError("name a command after --, for example: verbflow rxe -- ibv_devinfo")
    choice = vm.choose()

    def echo(piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    limit = units.parse_duration(timeout) * 1e-9
    if not as_json:
        click.echo(f"verbflow: {choice}", err=True)
    outcome = vm.run(list(command), choice=choice, timeout=limit, writable=writable, echo=None if as_json else echo)
    if as_json:
        _emit({"place": str(choice), "code": outcome.returncode, "output": outcome.output, "seconds": outcome.seconds})
    return outcome.returncode


def _resolve(name: str, profile: str | None, forgiving: bool) -> tuple[Any, Any, str]:
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
        if not forgiving:
            raise
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
        _table(table["columns"], table["rows"])
    click.echo()
    for picture in outcome.pictures:
        click.echo(f"picture: {picture}")
    for item in outcome.expectations:
        click.echo(f"expected: {item.sentence()}")
    click.echo(f"report:  {outcome.report}")
    click.echo(f"verdict: {outcome.sentence}")


def _show_claims(judged: Any) -> None:
    def number(value: Any) -> str:
        return "" if value is None or value != value else f"{value:.2f}"

    def claimed(row: Any) -> str:
        low, high = row["claimed_low"], row["claimed_high"]
        if math.isinf(high):
            return f"from {low:.3g}"
        return f"to {high:.3g}" if math.isinf(low) else f"{low:.3g} to {high:.3g}"

    _table(
        ["claim", "printed", "accepted", "ours", "by", "verdict", "because"],
        [
            [
                row["id"],
                number(row["printed"]),
                claimed(row),
                number(row["ours"]),
                row["way"] if isinstance(row["way"], str) else "",
                row["verdict"],
                row["reason"],
            ]
            for row in judged.to_dict(orient="records")
        ],
    )
    tally = judged["verdict"].value_counts()
    click.echo(f"{len(judged)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in tally.items()))


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


if __name__ == "__main__":
    main()
