"""TensorQueue: a bounded first-in first-out queue of tensors of one spec, shared by all sessions of a task."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.errors import GraphError
from runtime.future import Future, failed
from runtime.tensor import TensorSpec


@dataclass(slots=True)
class _Waiter:
    tensor: np.ndarray
    step: int
    future: Future[None]


class TensorQueue:
    """Any thread; nothing blocks: a full or an empty queue gives a future that is not done yet. Tensors are copied in."""

    def __init__(self, name: str, spec: TensorSpec, capacity: int) -> None:
        if capacity < 1:
            raise GraphError(f"queue {name}: capacity {capacity} is not at least 1")
        self.name = name
        self.spec = spec
        self.capacity = capacity
        self._guard = threading.Lock()
        self._items: deque[np.ndarray] = deque()
        self._putters: deque[_Waiter] = deque()
        self._getters: deque[_Waiter] = deque()
        self._reason: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, tensor: np.ndarray, step: int) -> Future[None]:
        """Done when ``tensor`` was copied in. ``step`` is the running step's id, for ``cancel``."""
        return self._enter(self._putters, tensor, step, "room in")

    def get(self, out: np.ndarray, step: int) -> Future[None]:
        """Done when ``out`` holds the oldest tensor, which is then gone from the queue."""
        return self._enter(self._getters, out, step, "a tensor in")

    def cancel(self, step: int, reason: BaseException) -> None:
        """Fail the waits of the aborted step ``step``; their memory is not touched afterwards."""
        with self._guard:
            gone = [waiter for waiter in (*self._putters, *self._getters) if waiter.step == step]
            self._putters = deque(waiter for waiter in self._putters if waiter.step != step)
            self._getters = deque(waiter for waiter in self._getters if waiter.step != step)
        for waiter in gone:
            waiter.future.set_exception(reason)

    def abort(self, reason: BaseException) -> None:
        """Fail all who wait or come later. The first reason wins."""
        with self._guard:
            if self._reason is None:
                self._reason = reason
            gone = [*self._putters, *self._getters]
            self._putters.clear()
            self._getters.clear()
        for waiter in gone:
            waiter.future.set_exception(reason)

    def _enter(self, line: deque[_Waiter], tensor: np.ndarray, step: int, wanted: str) -> Future[None]:
        with self._guard:
            if self._reason is not None:
                return failed(self._reason)
            waiter = _Waiter(tensor, step, Future(f"{wanted} queue {self.name}"))
            line.append(waiter)
            finished = self._move()
        for done in finished:
            done.set_result(None)
        return waiter.future

    def _move(self) -> list[Future[None]]:
        finished: list[Future[None]] = []
        while True:
            if self._getters and self._items:
                getter = self._getters.popleft()
                np.copyto(getter.tensor, self._items.popleft())
                finished.append(getter.future)
            elif self._putters and len(self._items) < self.capacity:
                putter = self._putters.popleft()
                self._items.append(putter.tensor.copy())
                finished.append(putter.future)
            else:
                return finished
