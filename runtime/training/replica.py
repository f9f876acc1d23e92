"""``python -m runtime.training.replica``: one worker of a training job, as a process that a harness can start.

It is a task of the cluster and its own master. It builds a model of the catalog with the variables on the job "ps" (on this task,
if the cluster has none), trains for so many steps, and writes what it measured: integers in nanoseconds and bytes, in one
numpy archive (``--output``, see ``Report``). All options of ``runtime.cluster`` apply.

Exit codes: 0 all steps done; 5 a lost peer or a deadline; 2, 3, 4, 1 as ``python -m runtime.cluster``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from runtime.cluster.options import (
    EXIT_OK,
    Ending,
    add_arguments,
    end_with_stdin,
    exit_code,
    log_to_stderr,
    open_server,
    read_token,
    set_threads,
)

if TYPE_CHECKING:
    from runtime.cluster.server import Server

ASYNC, SYNC = "async", "sync"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m runtime.training.replica", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(made)
    made.add_argument("--model", default="mlp_digits", help="a name of the catalog")
    made.add_argument("--model-options", default="{}", help='JSON: options of the model, {"seconds": 0.1}')
    made.add_argument("--batch", type=int, default=32, help="examples a step of this worker")
    made.add_argument("--steps", type=int, default=20, help="measured steps of this worker")
    made.add_argument("--global-steps", type=int, help="stop when the global step has reached this, as well")
    made.add_argument("--warmup", type=int, default=2, help="steps before those, not measured")
    made.add_argument("--sync", choices=(ASYNC, SYNC), default=ASYNC)
    made.add_argument("--aggregate", type=int, help="gradients that make a synchronous step; by default all workers'")
    made.add_argument("--optimizer", default="sgd")
    made.add_argument("--rate", type=float, default=0.01)
    made.add_argument("--placement", choices=("round-robin", "bytes"), default="bytes", help="of variables on servers")
    made.add_argument("--data", choices=("random", "digits"), default="random")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--trace", action="store_true", help="record spans of the measured steps")
    made.add_argument("--step-s", type=float, default=120.0, help="deadline of a step")
    made.add_argument("--startup-s", type=float, default=60.0, help="how long to wait for tasks that are not up")
    made.add_argument("--checkpoint-dir", help="worker 0 saves and restores here")
    made.add_argument("--checkpoint-s", type=float, default=60.0, help="seconds between checkpoints")
    made.add_argument("--checkpoint-steps", type=int, help="global steps between checkpoints, as well")
    made.add_argument(
        "--recover-s", type=float, default=0.0, help="how long a lost task is waited for; 0: give up at once"
    )
    made.add_argument("--linger", action="store_true", help="stay up after the last step until told to end")
    made.add_argument("--output", help="the report's file")
    return made


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    log_to_stderr(arguments.log_level)
    set_threads(arguments.blas_threads)
    token = read_token(arguments.token_fd)

    done, told = threading.Event(), Ending()

    def on_signal(number: int, frame: FrameType | None) -> None:
        told.ask()
        if not done.is_set():
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, on_signal)
    if arguments.end_with_stdin:
        end_with_stdin()
    from runtime.errors import VerbflowError

    try:
        server = open_server(arguments, token)
    except (VerbflowError, OSError) as error:
        return exit_code(error, opening=True)
    try:
        with server:
            print(json.dumps(server.ready_line()), flush=True)
            _train(arguments, server, done, told)
    except (VerbflowError, OSError) as error:
        return exit_code(error)
    return EXIT_OK


def _train(arguments: argparse.Namespace, server: Server, done: threading.Event, told: Ending) -> None:
    from runtime.training.job import Job
    from runtime.training.report import write_report

    job = Job(arguments, server)
    try:
        report = job.run()
        if arguments.output:
            write_report(Path(arguments.output), report)
        done.set()
        print(json.dumps(report.summary()), flush=True)
        if arguments.linger:
            told.wait()
    finally:
        done.set()
        job.close()


if __name__ == "__main__":
    sys.exit(main())
