"""Accumulator: where N of M workers' gradients of one variable meet and are averaged (TensorFlow's ConditionalAccumulator).

Differences from TensorFlow, both for the sake of bit-identical results over every transport: gradients are summed in the
order of their workers' numbers, not of arrival; and exactly N are averaged, the first to arrive, while the other M - N are
late and dropped. A gradient is not copied: it stays where it is (a Recv's destination) until it is summed or dropped, and
the future of its ``apply`` says when that is.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from runtime.errors import GraphError
from runtime.future import Future, completed, failed
from runtime.tensor import TensorSpec

CHUNK_BYTES = 1 << 18  # stays in the second-level cache between the operations on it


@dataclass(slots=True)
class _Entry:
    step: int
    future: Future[None]


@dataclass(slots=True)
class _Held(_Entry):
    worker: int
    gradient: np.ndarray
    local_step: int


@dataclass(slots=True)
class _Take(_Entry):
    count: int
    out: np.ndarray


class Accumulator:
    """Any thread may call it; nothing blocks, except for the sum itself, which runs on the thread that completes it.

    ``step`` is the global step that gradients are collected for: 0 at first, and one more than the newest averaged
    gradient's after each take. ``applied``, ``dropped`` (stale) and ``taken`` only ever grow.
    """

    def __init__(self, name: str, spec: TensorSpec) -> None:
        if spec.dtype.kind not in "fc":
            raise GraphError(f"accumulator {name} averages gradients; {spec.dtype.name} is not a floating dtype")
        self.name = name
        self.spec = spec
        self.step = 0
        self.applied = 0
        self.dropped = 0
        self.taken = 0
        self._guard = threading.Lock()
        self._held: list[_Held] = []
        self._takes: list[_Take] = []
        self._reason: BaseException | None = None

    def apply(self, worker: int, gradient: np.ndarray, local_step: int, step: int) -> Future[None]:
        """Give a gradient that ``worker`` computed from the variables of ``local_step``.

        Done when the memory of ``gradient`` is no longer needed: at once if it is stale, else when it was averaged or turned
        out late. ``step`` is the running step's id, for ``cancel``.
        """
        with self._guard:
            if self._reason is not None:
                return failed(self._reason)
            if local_step < self.step:
                self.dropped += 1
                return completed(None)
            self.applied += 1
            future: Future[None] = Future()
            self._held.append(_Held(step, future, worker, gradient, local_step))
            finished = self._match()
            self._describe()
        for done in finished:
            done.set_result(None)
        return future

    def take(self, count: int, out: np.ndarray, step: int) -> Future[None]:
        """Done when ``out`` holds the mean of the first ``count`` gradients of one global step."""
        with self._guard:
            if self._reason is not None:
                return failed(self._reason)
            future: Future[None] = Future()
            self._takes.append(_Take(step, future, count, out))
            finished = self._match()
            self._describe()
        for done in finished:
            done.set_result(None)
        return future

    def cancel(self, step: int, reason: BaseException) -> None:
        """Withdraw what the aborted step ``step`` gave or waits for. Afterwards its memory is not read or written here."""
        with self._guard:
            gone = [entry.future for entry in self._entries() if entry.step == step]
            self._held = [entry for entry in self._held if entry.step != step]
            self._takes = [entry for entry in self._takes if entry.step != step]
        for future in gone:
            future.set_exception(reason)

    def abort(self, reason: BaseException) -> None:
        """Fail all who wait or come later. The first reason wins."""
        with self._guard:
            if self._reason is None:
                self._reason = reason
            gone = [entry.future for entry in self._entries()]
            self._held, self._takes = [], []
        for future in gone:
            future.set_exception(reason)

    def reset(self, reason: BaseException) -> None:
        """Forget gradients and the step, as after variables were restored; those who wait fail with ``reason``."""
        with self._guard:
            gone = [entry.future for entry in self._entries()]
            self._held, self._takes = [], []
            self.step = 0
        for future in gone:
            future.set_exception(reason)

    def _match(self) -> list[Future[None]]:
        # The caller holds the guard, which also keeps ``cancel`` out while memory of other steps is being read.
        finished: list[Future[None]] = []
        while self._takes and len(self._held) >= self._takes[0].count:
            take = self._takes.pop(0)
            chosen, late = self._held[: take.count], self._held[take.count :]
            newest = max(self.step, *(entry.local_step for entry in chosen))
            chosen.sort(key=lambda entry: entry.worker)
            mean_into(take.out, [entry.gradient for entry in chosen])
            self.step = newest + 1
            self.taken += 1
            self._held = [entry for entry in late if entry.local_step >= self.step]
            self.dropped += len(late) - len(self._held)
            finished += [entry.future for entry in chosen]
            finished += [entry.future for entry in late if entry.local_step < self.step]
            finished.append(take.future)
        return finished

    def _describe(self) -> None:
        workers = sorted(entry.worker for entry in self._held)
        wanted = self._takes[0].count if self._takes else "an unknown number"
        state = f"gradients of {self.name} for step {self.step}: {len(workers)} of {wanted} are here, from workers {workers}"
        for entry in self._entries():
            entry.future.what = state

    def _entries(self) -> list[_Entry]:
        return [*self._held, *self._takes]


def mean_into(out: np.ndarray, gradients: list[np.ndarray]) -> None:
    """Mean of arrays of one spec, added from left to right, chunk by chunk so that memory is passed over once."""
    flat = out.reshape(-1)
    parts = [gradient.reshape(-1) for gradient in gradients]
    # Multiplying by the reciprocal is exact for a power of two, and several times faster than dividing.
    exact = len(parts) & (len(parts) - 1) == 0
    scale = flat.dtype.type(1 / len(parts) if exact else len(parts))
    finish = np.multiply if exact else np.true_divide
    size = max(1, CHUNK_BYTES // flat.itemsize)
    for at in range(0, flat.size, size):
        chunk = flat[at : at + size]
        if len(parts) == 1:
            np.copyto(chunk, parts[0][at : at + size])
            continue
        np.add(parts[0][at : at + size], parts[1][at : at + size], chunk)
        for part in parts[2:]:
            np.add(chunk, part[at : at + size], chunk)
        finish(chunk, scale, chunk)
