"""Outcome: what became of a step that several tasks run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from runtime.cluster.tasks import Task
from runtime.deadline import Deadline
from runtime.errors import StepAbortedError, VerbflowError
from runtime.future import Future


class Outcome:
    """A step's first error, and the news of it to all other tasks (TensorFlow's ExecutorBarrier)."""

    def __init__(self, step: int, tasks: Sequence[Task]) -> None:
        self.step = step
        self.tasks = list(tasks)
        self.error: VerbflowError | None = None
        self._guard = threading.Lock()

    def report(self, task: Task, done: Future[list[np.ndarray]]) -> None:
        error = done.exception(Deadline.after(0))
        if error is not None:
            assert isinstance(error, VerbflowError)
            self.fail(task, error)

    def fail(self, task: Task | None, error: VerbflowError) -> None:
        """``task`` failed with ``error``; None: the step must be given up for a reason from outside."""
        with self._guard:
            first = self.error is None
            # An abort only says that somebody else failed; what explains it may come a moment later.
            if self.error is None or (
                isinstance(self.error, StepAbortedError) and not isinstance(error, StepAbortedError)
            ):
                self.error = error
        if first:
            for other in self.tasks:
                if other is not task:
                    other.abort(self.step, error)
