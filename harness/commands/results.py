"""Commands on stored results: compare, export, publish."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness import units
from harness.errors import HarnessError
from harness.terminal import (
    emit,
    json_option,
    show_table,
    told,
)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--margin", default=0.03, show_default=True, help="Differences below it count as the same.")
@click.option(
    "--about",
    type=click.Choice(["latency", "bandwidth", "training", "overhead"]),
    default="latency",
    show_default=True,
)
@json_option
@told
def compare(a: str, b: str, margin: float, about: str, as_json: bool) -> None:
    """Compare run B with run A, cell by cell: faster, slower, same within the margin, or cannot tell."""
    from harness import store
    from harness.analysis import compare as comparing

    try:
        found = comparing.compare(store.load(a), store.load(b), margin, about)
    except ValueError as error:
        raise HarnessError(str(error)) from error
    if as_json:
        emit([item.to_json() for item in found])
        return
    if not found:
        click.echo("the two runs have no cell in common")
        return
    show_table(
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


@click.command()
@click.argument("name")
@click.option("--table", type=click.Choice(["runs", "samples", "spans", "counters", "cells", "trials", "trace"]),
              default="cells", show_default=True)  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default: stdout.")
@json_option
@told
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


@click.command()
@click.argument("name")
@click.argument("label")
@json_option
@told
def publish(name: str, label: str, as_json: bool) -> None:
    """Copy a run's tables and pictures to results/published under LABEL (date-host), for git."""
    from harness import store

    target = store.publish(store.find_run(name), label)
    if as_json:
        emit({"folder": str(target)})
    else:
        click.echo(f"published in {target}")
