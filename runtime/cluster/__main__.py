"""``python -m runtime.cluster``: one task of a cluster as a process.

Prints one line of JSON on stdout when it is ready, and ends on the Shutdown call, on SIGTERM or SIGINT, or, with
``--end-with-stdin``, when its standard input closes (a parent that dies closes it). The run's token comes from the
environment variable VERBFLOW_TOKEN or from the descriptor ``--token-fd``, never from the command line, which everybody on the
machine can read.

Exit codes: 0 ended on request; 2 wrong arguments or cluster description; 3 the transport cannot be used here; 4 the control
address cannot be bound; 1 anything else; always with one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from types import FrameType

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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.cluster", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    log_to_stderr(arguments.log_level)
    set_threads(arguments.blas_threads)
    token = read_token(arguments.token_fd)
    ending = Ending()

    def on_signal(number: int, frame: FrameType | None) -> None:
        ending.ask()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if arguments.end_with_stdin:
        end_with_stdin()
    from runtime.errors import VerbflowError

    try:
        server = open_server(arguments, token)
    except (VerbflowError, OSError) as error:
        return exit_code(error, opening=True)
    server.on_shutdown(ending.ask)
    print(json.dumps(server.ready_line()), flush=True)
    ending.wait()
    server.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
