"""Commands that judge: check paper, check costmodel, and paper, which also measures."""

from __future__ import annotations

import math
from typing import Any

import click

from harness.errors import HarnessError
from harness.terminal import (
    EXIT_NOTHING,
    EXIT_SOME_FAILED,
    emit,
    json_option,
    show_table,
    told,
)


@click.group()
def check() -> None:
    """Judge stored results: published claims, or the cost model's predictions."""


_stored_option = click.option("--stored", type=click.Choice(["newest", "published"]), default="newest", show_default=True,
                              help="Which stored runs: newest takes scratch runs before published ones.")  # fmt: skip


@check.command("paper")
@_stored_option
@json_option
@told
def check_paper(stored: str, as_json: bool) -> int:
    """Judge every claim of experiments/paper/claims.toml by stored runs and the simulation.

    Exit codes: 0 every claim that could be judged is reproduced; 3 some are not; 4 none could be judged.
    """
    from harness import paper
    from harness.analysis import claims

    found = paper.collect(("published",) if stored == "published" else ("scratch", "published"))
    if as_json:
        emit(found.judged.to_dict(orient="records"))
    else:
        _show_claims(found.judged)
    verdicts = set(found.judged["verdict"])
    if claims.NOT_REPRODUCED in verdicts:
        return EXIT_SOME_FAILED
    return 0 if claims.REPRODUCED in verdicts else EXIT_NOTHING


@check.command("costmodel")
@click.argument("name", default="paper/costmodel")
@json_option
@told
def check_costmodel(name: str, as_json: bool) -> int:
    """Predicted beside measured training steps of a stored run.

    Exit codes: 0 every prediction is within 15 %; 3 some are not; 4 there is nothing to compare.
    """
    from harness import store
    from harness.analysis import validate

    table = validate.validate(store.load(name))
    if as_json:
        emit(table.to_dict(orient="records"))
    else:
        show_table(
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


@click.command()
@click.option("--profile", type=click.Choice(["full", "quick"]), default="full", show_default=True,
              help="full is published; quick is for a check of everything.")  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Run these of its experiments, then rebuild all.")
@click.option("--rebuild", is_flag=True, help="Run nothing: rebuild tables and notebook from what is stored.")
@json_option
@told
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
        emit({"trials": counts, "claims": found.judged.to_dict(orient="records")})
    else:
        _show_claims(found.judged)
        if counts:
            click.echo("trials: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return EXIT_SOME_FAILED if counts.get("failed") or counts.get("timeout") else 0


def _show_claims(judged: Any) -> None:
    def number(value: Any) -> str:
        return "" if value is None or value != value else f"{value:.2f}"

    def claimed(row: Any) -> str:
        low, high = row["claimed_low"], row["claimed_high"]
        if math.isinf(high):
            return f"from {low:.3g}"
        return f"to {high:.3g}" if math.isinf(low) else f"{low:.3g} to {high:.3g}"

    show_table(
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
