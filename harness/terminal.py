"""What every command of the command line does alike: options, errors as sentences, JSON, tables, exit codes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from harness.errors import HarnessError

EXIT_ERROR, EXIT_SOME_FAILED, EXIT_NOTHING, EXIT_UNEXPECTED, EXIT_INTERRUPTED = 1, 3, 4, 5, 130


def told(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn errors into sentences and exit codes. A traceback is a bug."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        from runtime.errors import VerbflowError

        as_json = bool(kwargs.get("as_json"))
        try:
            code = command(*args, **kwargs) or 0
        except (HarnessError, VerbflowError) as error:
            code = EXIT_ERROR
            complain(str(error), as_json)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            complain("interrupted; what was measured is kept, continue with --resume", as_json)
        except BrokenPipeError:
            code = 0
        except OSError as error:
            code = EXIT_ERROR
            where = f" ({error.filename})" if error.filename else ""
            complain(f"the system refused{where}: {error.strerror or error}", as_json)
        sys.exit(code)

    return run


def complain(text: str, as_json: bool) -> None:
    """Say what is wrong on stderr, and on stdout too where a program reads that."""
    if as_json:
        click.echo(json.dumps({"error": text}))
    for line in text.splitlines():
        click.echo(f"verbflow: {line}", err=True)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def emit(value: Any) -> None:
    """Print a JSON document."""
    click.echo(json.dumps(_finite(value), indent=1, default=str))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print rows below their headings, as wide as they need."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, markup=False, highlight=False).print(table)
