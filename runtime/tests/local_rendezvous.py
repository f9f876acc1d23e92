"""LocalRendezvous: executors of several partitions in one process, without transports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.errors import GraphError
from runtime.execution.rendezvous import Edge, Rendezvous, step_aborted
from runtime.future import Future
from runtime.tensor import TensorSpec


@dataclass(slots=True)
class _Offer:
    tensor: np.ndarray
    release: Callable[[], None] | None


@dataclass(slots=True)
class _Demand:
    into: np.ndarray
    future: Future[None]


class LocalRendezvous(Rendezvous):
    """Edges whose two ends are in this process: whoever comes second copies the tensor, then the sender's memory is released."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._guard = threading.Lock()
        self._waiting: dict[int, _Offer | _Demand] = {}
        self._sent: set[int] = set()
        self._received: set[int] = set()
        self._reason: BaseException | None = None

    def send(self, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None = None) -> None:
        with self._guard:
            self._enter(edge, self._sent, "sent")
            demand = self._waiting.pop(edge.id, None)
            if demand is None:
                self._waiting[edge.id] = _Offer(tensor, release)
        if isinstance(demand, _Demand):
            self._deliver(edge, tensor, release, demand.into, demand.future)

    def recv(self, edge: Edge, into: np.ndarray) -> Future[None]:
        with self._guard:
            self._enter(edge, self._received, "received")
            offer = self._waiting.pop(edge.id, None)
            if offer is None:
                future: Future[None] = Future(self.describe(edge))
                self._waiting[edge.id] = _Demand(into, future)
                return future
        assert isinstance(offer, _Offer)
        future = Future(self.describe(edge))
        self._deliver(edge, offer.tensor, offer.release, into, future)
        return future

    def consumed(self, edge: Edge) -> None:
        """Nothing to do: the next step has a table of its own."""

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self._reason is not None:
                return
            self._reason = reason
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for entry in waiting:
            if isinstance(entry, _Demand):
                entry.future.set_exception(step_aborted(self._step, reason))
            elif entry.release is not None:
                entry.release()

    def _enter(self, edge: Edge, seen: set[int], verb: str) -> None:
        if self._reason is not None:
            raise step_aborted(self._step, self._reason)
        if edge.id in seen:
            raise GraphError(f"edge {edge.tensor} to {edge.dst} was {verb} twice in step {self._step:#x}")
        seen.add(edge.id)

    @staticmethod
    def _deliver(
        edge: Edge,
        tensor: np.ndarray,
        release: Callable[[], None] | None,
        into: np.ndarray,
        future: Future[None],
    ) -> None:
        # Never raises: the sender must not fail for what the receiver asked, nor the other way round.
        if tensor.shape != into.shape or tensor.dtype != into.dtype:
            future.set_exception(
                GraphError(f"edge {edge.tensor}: sent {TensorSpec.of(tensor)}, received into {TensorSpec.of(into)}")
            )
        else:
            np.copyto(into, tensor)
            future.set_result(None)
        if release is not None:
            release()
