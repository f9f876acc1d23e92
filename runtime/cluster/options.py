"""The command line of every program that is a task of a cluster, and what must happen before numpy is imported."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.cluster.server import Server

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_ADDRESS, EXIT_LOST = 0, 1, 2, 3, 4, 5
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_GRACE_S = 5.0
_GRPC = ("auto", "grpc", "grpc_proto")


class Ending:
    """The wish that this process ends, said by a signal's handler or by any thread.

    An Event would not do: its ``set`` takes a lock that the main thread, which runs the handler, may hold in ``wait`` at that
    moment. ``SimpleQueue.put`` is made for that (Python library reference, ``queue``).
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask(self) -> None:
        self._asked.put(None)

    def wait(self) -> None:
        """Until somebody has asked; one call takes one asking."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._asked.get(timeout=1.0)  # bounded, so that signals are handled
                return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which task this is and how it communicates."""
    parser.add_argument("--cluster", required=True, help="JSON text or a file: job names to lists of host:port")
    parser.add_argument("--job", required=True)
    parser.add_argument("--task", required=True, type=int)
    parser.add_argument("--transport", default="auto", help="auto, or the name of the one to use for every pair")
    parser.add_argument(
        "--arena-mib", type=int, default=1024, help="memory for variables and tensors that cross processes"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of this task's kernels")
    parser.add_argument("--blas-threads", type=int, default=1, help="threads of BLAS inside each of them")
    parser.add_argument("--bind", default="", help="address to listen on; by default the host of the cluster's address")
    parser.add_argument("--params", default="{}", help='JSON: options of transports, {"grpc": {"chunk_bytes": 65536}}')
    parser.add_argument("--tls", nargs=3, metavar=("CERTIFICATE", "KEY", "AUTHORITY"), help="PEM files")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--token-fd", type=int, help="inherited descriptor from which the run's token is read")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")


def log_to_stderr(level: str) -> None:
    """One line a message on stderr; Verbflow's own from ``level`` on, other libraries' warnings."""
    # At once, because some bindings configure logging when they are imported unless it is configured already.
    logging.basicConfig(level=logging.WARNING, format="verbflow: %(message)s", stream=sys.stderr)
    logging.getLogger("verbflow").setLevel(level.upper())


def set_threads(count: int) -> None:
    """BLAS reads these once, when numpy loads. An explicit setting of the user's wins."""
    if "numpy" in sys.modules:
        raise RuntimeError("thread counts must be set before numpy loads")
    for variable in _BLAS_VARIABLES:
        os.environ.setdefault(variable, str(count))


def read_token(fd: int | None) -> str:
    """The run's token; it is taken out of the environment, so that no child inherits it."""
    if fd is not None:
        with os.fdopen(fd, "r", encoding="utf-8") as stream:
            return stream.read().strip()
    return os.environ.pop("VERBFLOW_TOKEN", "")


def end_with_stdin() -> None:
    """End this process when its standard input closes: by SIGTERM, then for certain."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        # A step may be deep in a kernel, or the main thread stuck: an orphan must not stay.
        threading.Event().wait(_GRACE_S)
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, name="verbflow-stdin", daemon=True).start()


def open_server(arguments: argparse.Namespace, token: str) -> Server:
    """The Server that the command line describes."""
    try:
        params = json.loads(arguments.params)
    except ValueError as error:
        params = error
    if arguments.transport in _GRPC and not _keeps_allocator(params, arguments.transport):
        # Threads take an arena each when they are made, and the control plane makes some.
        from runtime.transport.grpc.allocator import tune

        tune()
    from runtime.cluster.rpc import Tls
    from runtime.cluster.server import Server
    from runtime.cluster.spec import ClusterSpec
    from runtime.errors import ConfigError

    if isinstance(params, ValueError):
        raise ConfigError(f"--params is not JSON: {params}")
    if not isinstance(params, dict) or not all(isinstance(own, dict) for own in params.values()):
        raise ConfigError(f'--params is not of the form {{"TRANSPORT": {{"OPTION": VALUE}}}}: {arguments.params}')
    return Server(
        ClusterSpec.load(arguments.cluster),
        arguments.job,
        arguments.task,
        transport=arguments.transport,
        token=token,
        arena_bytes=arguments.arena_mib << 20,
        threads=arguments.threads,
        hold_blas=False,  # set_threads has chosen, and an explicit setting of the user's wins
        bind=arguments.bind,
        params=params,
        tls=Tls(*arguments.tls) if arguments.tls else None,
    )


def _keeps_allocator(params: object, transport: str) -> bool:
    name = "grpc" if transport == "auto" else transport
    own = params.get(name) if isinstance(params, dict) else None
    return isinstance(own, dict) and own.get("allocator") == "default"


def exit_code(error: BaseException, opening: bool = False) -> int:
    """The documented exit code for an error, which is printed as one line on stderr. ``opening``: of ``open_server``."""
    from runtime.errors import ConfigError, DeadlineError, PeerLostError, TransportError, UnavailableError

    print(f"verbflow: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if isinstance(error, UnavailableError):
        return EXIT_UNAVAILABLE
    if opening and isinstance(error, TransportError):
        return EXIT_ADDRESS
    if isinstance(error, PeerLostError | DeadlineError):
        return EXIT_LOST
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_FAILED
