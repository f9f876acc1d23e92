"""StepCounter: the global step as a barrier, where replicas wait until it passes their own.

It stands in for the token queue of TensorFlow's SyncReplicasOptimizer. A token is one old step number for whoever comes
next, so a straggler may draw tokens that are stale already; here everyone who waits learns the newest step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.future import Future, completed, failed


@dataclass(slots=True)
class _Waiter:
    local_step: int
    out: np.ndarray
    step: int
    future: Future[None]


class StepCounter:
    """Guards the memory of one int64 scalar variable. Any thread; nothing blocks."""

    def __init__(self, name: str, value: np.ndarray) -> None:
        self.name = name
        self._value = value
        self._guard = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._reason: BaseException | None = None

    def wait_past(self, local_step: int, out: np.ndarray, step: int) -> Future[None]:
        """Done when the counter is greater than ``local_step``; ``out`` then holds it. ``step`` is for ``cancel``."""
        with self._guard:
            if self._reason is not None:
                return failed(self._reason)
            if self._value > local_step:
                np.copyto(out, self._value)
                return completed(None)
            future: Future[None] = Future(f"{self.name} to pass {local_step}")
            self._waiters.append(_Waiter(local_step, out, step, future))
            return future

    def advance(self, by: int = 1) -> None:
        """Count on and wake those whose step is passed."""
        self.change(lambda: np.add(self._value, by, self._value))

    def change(self, write: Callable[[], Any]) -> None:
        """Run ``write``, which sets the counter's memory, and wake those whose step is passed."""
        with self._guard:
            write()
            passed = [waiter for waiter in self._waiters if self._value > waiter.local_step]
            self._waiters = [waiter for waiter in self._waiters if self._value <= waiter.local_step]
            for waiter in passed:
                np.copyto(waiter.out, self._value)
        for waiter in passed:
            waiter.future.set_result(None)

    def cancel(self, step: int, reason: BaseException) -> None:
        """Fail the waits of the aborted step ``step``; their memory is not written afterwards."""
        self._fail([waiter for waiter in self._waiters if waiter.step == step], reason)

    def abort(self, reason: BaseException) -> None:
        """Fail all who wait or come later. The first reason wins."""
        with self._guard:
            if self._reason is None:
                self._reason = reason
        self._fail(list(self._waiters), reason)

    def _fail(self, waiters: list[_Waiter], reason: BaseException) -> None:
        with self._guard:
            gone = [waiter for waiter in self._waiters if any(waiter is other for other in waiters)]
            self._waiters = [waiter for waiter in self._waiters if not any(waiter is other for other in waiters)]
        for waiter in gone:
            waiter.future.set_exception(reason)
