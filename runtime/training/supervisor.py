"""Supervisor: keeps a training job going over the loss and the restart of its tasks.

One worker is the chief. It restores the newest checkpoint (or leaves the initial values), tells the others that the variables are
ready, and saves by interval in the background. When a parameter server is lost, every worker's step fails; whoever restarts
the server (a launcher, Slurm, a person), all workers wait for it here, the chief restores, and training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from runtime.cluster.session import Session
from runtime.deadline import Deadline
from runtime.errors import (
    ChannelClosedError,
    DeadlineError,
    PeerLostError,
    StepAbortedError,
    UnknownGraphError,
    VerbflowError,
)
from runtime.graph.state_ops import GLOBAL_STEP
from runtime.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    keep_last,
    latest_checkpoint,
    write_checkpoint,
)

_LOG = logging.getLogger("verbflow.training")
_READY = "supervisor"
_POLL_S = 0.1
_CALL_S = 120.0
# What a lost, restarted or hung task looks like from here. Anything else is a mistake that a retry would only repeat.
RECOVERABLE = (PeerLostError, ChannelClosedError, UnknownGraphError, StepAbortedError, DeadlineError)

T = TypeVar("T")


class Supervisor:
    """``session`` is the worker's. Saved and restored are the variables of its graph that are not on its own task (all of
    them, if it has no cluster). ``recover_s``: for how long a lost task is waited for.

    Only the chief writes, and only if there is a ``folder``. One thread calls ``prepare`` and ``run``; a context manager, whose
    end writes a last checkpoint if all went well.
    """

    def __init__(
        self,
        session: Session,
        *,
        chief: bool,
        folder: Path | str | None = None,
        every_s: float = 60.0,
        every_steps: int | None = None,
        keep: int = 3,
        recover_s: float = 120.0,
    ) -> None:
        self.session = session
        self.chief = chief
        self.folder = Path(folder) if folder is not None else None
        self.recoveries = 0
        self.saved: list[int] = []
        self.restored: int | None = None
        self._every_s = every_s
        self._every_steps = every_steps
        self._keep = keep
        self._recover_s = recover_s
        self._specs = session.variables_elsewhere()
        self._saving = threading.Lock()
        self._stop = threading.Event()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_step = 0

    def prepare(self) -> int:
        """Make the variables ready, or wait until the chief has; the global step to begin with (0 without one)."""
        deadline = Deadline.after(self._recover_s)
        self.session.wait_for(self._specs, deadline)
        if self.chief:
            self._restore(deadline)
            for task in self._specs:
                self.session.restore_variables(task, {"ready": np.zeros((), np.uint8)}, deadline, container=_READY)
            if self.folder is not None and self._thread is None:
                self._thread = threading.Thread(target=self._save_by_interval, name="verbflow-saver", daemon=True)
                self._thread.start()
        else:
            while not all("ready" in self.session.variable_bytes(task, deadline, _READY) for task in self._specs):
                deadline.check("the chief's variables")
                time.sleep(_POLL_S)
        self._last_step = self._global_step(deadline)
        return self._last_step

    @property
    def global_step(self) -> int:
        """The newest global step that this worker knows of."""
        return self._last_step

    def run(self, step: Callable[[], T], recovered: Callable[[], None] | None = None) -> T:
        """Call ``step`` (which runs the session) until it succeeds, recovering in between, after which ``recovered`` is called.

        Errors that a restart would not cure are raised at once, and so is the last one when recovery takes too long.
        """
        deadline: Deadline | None = None
        while True:
            try:
                return step()
            except RECOVERABLE as error:
                _LOG.warning("step failed: %s", error)
                deadline = deadline or Deadline.after(self._recover_s)
                if deadline.expired():
                    raise
                self._recover(error, deadline)
                if recovered is not None:
                    recovered()

    def _recover(self, cause: BaseException, deadline: Deadline) -> None:
        while True:
            try:
                self.prepare()
                self.recoveries += 1
                return
            except RECOVERABLE as error:
                _LOG.warning("not yet: %s", error)
                if deadline.expired():
                    raise error from cause
                time.sleep(_POLL_S)

    def stepped(self, global_step: int) -> None:
        """Tell the global step after a step, so that the chief can save by steps."""
        if self._every_steps and global_step // self._every_steps > self._last_step // self._every_steps:
            self._due.set()
        self._last_step = global_step

    # Saving and restoring.

    def save(self) -> Path | None:
        """Write a checkpoint now, on this thread; its path. None without a folder."""
        if self.folder is None:
            return None
        with self._saving:
            deadline = Deadline.after(_CALL_S)
            specs = {name: spec for task in self._specs.values() for name, spec in task.items()}
            step = self._global_step(deadline)
            path = checkpoint_path(self.folder, step)
            write_checkpoint(path, step, specs, self._all_variables(deadline))
            keep_last(self.folder, self._keep)
            self.saved.append(step)
            return path

    def _all_variables(self, deadline: Deadline) -> Iterator[tuple[str, np.ndarray]]:
        for task, specs in self._specs.items():
            yield from self.session.save_variables(task, list(specs), deadline)

    def _restore(self, deadline: Deadline) -> None:
        path = latest_checkpoint(self.folder) if self.folder is not None else None
        if path is None:
            return
        with self._saving, Checkpoint(path) as checkpoint:
            checkpoint.check_model({name: spec for task in self._specs.values() for name, spec in task.items()})
            for task, specs in self._specs.items():
                values = ((name, checkpoint.read(name)) for name in specs)
                self.session.restore_variables(task, values, deadline)
            self.restored = checkpoint.step
        _LOG.info("restored %s", path)

    def _save_by_interval(self) -> None:
        while not self._stop.is_set():
            self._due.wait(self._every_s)
            if self._stop.is_set():
                return
            self._due.clear()
            try:
                self.save()
            except (VerbflowError, OSError) as error:
                # A server that is just being restarted cannot be saved; a full disk may be emptied. Training goes on.
                _LOG.warning("no checkpoint: %s", error)

    def _global_step(self, deadline: Deadline) -> int:
        for task, specs in self._specs.items():
            # Variables come to be when the first graph is registered with them.
            if GLOBAL_STEP in specs and GLOBAL_STEP in self.session.variable_bytes(task, deadline):
                return int(dict(self.session.save_variables(task, [GLOBAL_STEP], deadline))[GLOBAL_STEP])
        return 0

    def close(self, save: bool = True) -> None:
        """Stop saving by interval; the chief writes a last checkpoint if ``save`` and there is anything to save. Idempotent."""
        self._stop.set()
        self._due.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            if save and self._begun(Deadline.after(_CALL_S)):
                self.save()

    def _begun(self, deadline: Deadline) -> bool:
        """Does any of the variables exist?"""
        # They come to be when the first graph is registered with them, so before the first step there may be none.
        return any(
            self.session.variable_bytes(task, deadline).keys() & specs.keys() for task, specs in self._specs.items()
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(save=kind is None)
