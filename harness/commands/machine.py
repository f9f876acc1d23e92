"""Commands on this machine: doctor, rxe."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness import units
from harness.errors import HarnessError
from harness.terminal import (
    emit,
    json_option,
    told,
)


@click.command()
@json_option
@told
def doctor(as_json: bool) -> None:
    """What can run here and what cannot, why, and the command that would change it."""
    from harness import doctor as diagnosing

    checks = diagnosing.examine()
    if as_json:
        emit([vars(check) for check in checks])
        return
    for check in checks:
        click.echo(f"{check.state:4}  {check.name}: {check.finding}")
        if check.remedy:
            click.echo(f"      -> {check.remedy}")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--writable", type=click.Path(path_type=Path), multiple=True, help="Folder the command may write to.")
@click.option("--timeout", default="1h", show_default=True, help="Time limit with the boot.")
@json_option
@told
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
        emit({"place": str(choice), "code": outcome.returncode, "output": outcome.output, "seconds": outcome.seconds})
    return outcome.returncode
