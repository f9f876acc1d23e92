"""Rendezvous: the table where a step's producers and consumers of cut edges meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.errors import ConfigError, StepAbortedError
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
        """Fail every pending and later call with a StepAbortedError caused by ``reason``; the first reason wins."""

    def describe(self, edge: Edge) -> str:
        """What a wait for ``edge`` waits for, for messages: tensor, producer and path."""
        return f"Recv of {edge.tensor} from {edge.src}"

    def peer_state(self, edge: Edge) -> str:
        """What is known of the producer when a wait for it was in vain, for example its last heartbeat; or \"\"."""
        return ""


def step_aborted(step: int, reason: BaseException) -> StepAbortedError:
    """A StepAbortedError of ``step`` with ``reason`` as its cause; a reason that is one already keeps its first cause."""
    cause = reason.__cause__ if isinstance(reason, StepAbortedError) and reason.__cause__ is not None else reason
    error = StepAbortedError(f"step {step:#x} was given up: {cause}")
    error.__cause__ = cause
    return error


def detached(error: BaseException) -> BaseException:
    """The same error without its traceback, which would keep every array of the frames where it passed; to be kept."""
    cause = error.__cause__
    try:
        twin = type(error)(*error.args)
    except Exception:
        twin = StepAbortedError(f"{type(error).__name__}: {error}")
    if isinstance(error, StepAbortedError) and cause is not None:
        twin.__cause__ = detached(cause)
    return twin
