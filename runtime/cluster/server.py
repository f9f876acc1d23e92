"""Server: a task of the cluster inside this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from runtime.cluster.routes import check_policy, wants_shared_arena
from runtime.cluster.rpc import Tls
from runtime.cluster.service import ControlServer
from runtime.cluster.spec import ClusterSpec, check_address
from runtime.cluster.worker import Worker
from runtime.errors import ConfigError
from runtime.kernels import blas
from runtime.memory import memcpy
from runtime.memory.arena import DEFAULT_BYTES, Arena

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_RECORDED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", memcpy.VARIABLE)


class Server:
    """Listens as soon as it is made, as TensorFlow's ``tf.train.Server`` does; a context manager.

    ``transport``: "auto" or the name of the one to use for every pair. ``token``: the run's secret, the same in all tasks; an
    empty one is allowed on loopback only. ``bind``: the address to listen on, by default the host of the cluster's address.
    ``threads``: how many a kernel may use, by default all cores. With ``hold_blas``, more than one means one BLAS thread for the
    whole process from then on, closing included, since kernels that share the cores themselves would be slowed down by BLAS's
    doing so too; a program that needs both runs the server in a process of its own. False leaves BLAS as it is: right where its
    threads were chosen before numpy loaded, as ``python -m runtime.cluster`` does. ``settings["blas"]`` says what was done.
    ``params``: options of transports by name. ``arena_bytes``: memory
    for variables and for tensors that cross processes, with ``touch`` made present now and not at its first use. ``poison``
    overwrites memory as soon as its content is used up, so that a use after that shows (for tests).
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Any],
        job: str,
        task: int,
        *,
        transport: str = "auto",
        token: str = "",
        arena_bytes: int = DEFAULT_BYTES,
        threads: int | None = None,
        hold_blas: bool = True,
        bind: str = "",
        params: Mapping[str, Mapping[str, object]] | None = None,
        tls: Tls | None = None,
        touch: bool = False,
        poison: bool = False,
    ) -> None:
        self.cluster = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec(cluster)
        self.name = self.cluster.task(job, task)
        self.address = self.cluster.address(self.name)
        self.token = token
        self.tls = tls
        host, port = check_address(self.address, self.name)
        bind = bind or host
        if not token and bind not in _LOOPBACK:
            raise ConfigError(f"{self.name} would listen on {bind} without a token; set VERBFLOW_TOKEN or pass token=")
        check_policy(transport)
        threads = threads or os.cpu_count() or 1
        held = blas.set_threads(1) if hold_blas and threads > 1 else f"left at {blas.threads() or 'its own number'}"
        self.settings = {
            "threads": str(threads),
            "blas": held,
            **{name: os.environ.get(name, "") for name in _RECORDED},
        }
        self._ended = threading.Event()
        self._closed = False
        arena = Arena(arena_bytes, shared=wants_shared_arena(transport), poison=poison)
        try:
            if touch:
                arena.touch()
            self.worker = Worker(
                self.name,
                arena=arena,
                transport=transport,
                token=token,
                bind=bind,
                threads=threads,
                tls=tls,
                params=params,
                settings=self.settings,
                poison=poison,
            )
        except BaseException:
            arena.close()
            raise
        self.worker.on_shutdown(self._ended.set)
        try:
            self._control = ControlServer(self.worker, f"{bind}:{port}", token, tls)
        except BaseException:
            self.worker.close()
            arena.close()
            raise

    @property
    def incarnation(self) -> int:
        """This start's random number: a restarted task has another."""
        return self.worker.incarnation

    def ready_line(self) -> dict[str, Any]:
        """What ``python -m runtime.cluster`` prints when it is ready."""
        return {
            "ready": True,
            "task": self.name,
            "address": self.address,
            "incarnation": f"{self.incarnation:016x}",
            "pid": os.getpid(),
            "transport": self.worker.transports.policy,
            "settings": self.settings,
        }

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """Also call ``callback`` when somebody asks this task to end; it must not block."""

        def end() -> None:
            self._ended.set()
            callback()

        self.worker.on_shutdown(end)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody asks this task to end (the Shutdown call); False if nobody did in time."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Stop serving and free everything; waits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        self.worker.close()
        self._control.close()
        self.worker.arena.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
