"""Rendezvous: the table where a step's producers and consumers of cut edges meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.errors import ConfigError
from runtime.future import Future
from runtime.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Edge:
    """A cut edge of a partitioned graph: one Send at the producer and one Recv at the consumer, shared by all consumers there.

    ``id`` is unique and stable in its registered graph. A control edge is an edge of spec uint8[0]. ``src`` and ``dst`` are
    device names; ``tensor`` is the producer's output name.
    """

    id: int
    tensor: str
    src: str
    dst: str
    spec: TensorSpec


def make_key(edge: Edge, incarnation: int, step: int) -> str:
    """``producer;incarnation in hex;consumer;tensor;step in hex``, as TensorFlow's CreateKey (core/framework/rendezvous.h).

    The step id is unique across the sessions that share a parameter server.
    """
    return f"{edge.src};{incarnation:016x};{edge.dst};{edge.tensor};{step:016x}"


def parse_key(key: str) -> tuple[str, int, str, str, int]:
    """(producer, incarnation, consumer, tensor, step) of a key; ConfigError if it is none."""
    parts = key.split(";")
    try:
        src, incarnation, dst, tensor, step = parts
        return src, int(incarnation, 16), dst, tensor, int(step, 16)
    except ValueError:
        raise ConfigError(f"{key!r} is not a rendezvous key (producer;incarnation;consumer;tensor;step)") from None


class Rendezvous(ABC):
    """One step's view of the cut edges. Any thread may call it; each edge is sent once and received once a step."""

    @abstractmethod
    def send(self, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None = None) -> None:
        """Offer a tensor; never blocks. The memory must stay unchanged until ``release`` is called (any thread)."""

    @abstractmethod
    def recv(self, edge: Edge, into: np.ndarray) -> Future[None]:
        """Done when the tensor lies in ``into``. May be asked before or after it is sent."""

    @abstractmethod
    def consumed(self, edge: Edge) -> None:
        """The last consumer of a received edge has run: ``into`` may be written to again. Never blocks."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """Fail every pending and later call with ``reason``; the first reason wins."""
