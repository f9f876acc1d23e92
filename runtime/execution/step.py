"""The rendezvous of a distributed step: how each cut edge travels, and what this task serves to its peers.

As in TensorFlow (core/distributed_runtime/base_rendezvous_mgr.h) there is one rendezvous a step id, found or made by whoever
comes first: the step itself, or a peer that asks for a tensor before this task was told of the step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ConfigError, GraphError, StepAbortedError, UnknownGraphError
from runtime.execution.rendezvous import (
    Edge,
    Rendezvous,
    detached,
    make_key,
    parse_key,
    step_aborted,
)
from runtime.future import Future
from runtime.transport.base import Channel, Lease, Reply, Transport

TOMBSTONES = 4096
MAX_STEPS = 4096


class Table:
    """Tensors that one step of this task offers, by key; each is offered once and taken once. Any thread; never blocks."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._guard = threading.Lock()
        self._waiting: dict[str, Lease | Reply] = {}
        self._offered: set[str] = set()
        self._taken: set[str] = set()
        self._reason: BaseException | None = None

    def offer(self, key: str, tensor: np.ndarray, release: Callable[[], None] | None) -> None:
        """Give ``tensor`` to the peer that asked or will ask; raises what the table was aborted with."""
        lease = Lease(tensor, release)
        with self._guard:
            if self._reason is not None:
                raise step_aborted(self.step, self._reason)
            if key in self._offered:
                raise GraphError(f"{key} was sent twice in step {self.step:#x}")
            self._offered.add(key)
            reply = self._waiting.pop(key, None)
            if reply is None:
                self._waiting[key] = lease
        if reply is not None:
            assert callable(reply)
            reply(lease)

    def take(self, key: str, reply: Reply) -> None:
        """Answer ``reply`` with the tensor's lease, now or when it is offered, or with an error."""
        answer: Lease | BaseException | None
        with self._guard:
            if self._reason is not None:
                answer = step_aborted(self.step, self._reason)
            elif key in self._taken:
                answer = GraphError(f"{key} was asked for twice in step {self.step:#x}")
            else:
                self._taken.add(key)
                found = self._waiting.pop(key, None)
                answer = found if isinstance(found, Lease) else None
                if answer is None:
                    self._waiting[key] = reply
        if answer is not None:
            reply(answer)

    def abort(self, reason: BaseException) -> None:
        """Fail all who wait or come later, and release what nobody took. The first reason wins."""
        with self._guard:
            if self._reason is not None:
                return
            self._reason = reason
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for entry in waiting:
            if isinstance(entry, Lease):
                entry.release()
            else:
                entry(step_aborted(self.step, reason))


class Route:
    """How one cut edge travels, seen from one of its ends. Made once when a graph is registered, used every step.

    A route that sends overrides ``send``; one that receives ``recv`` and, if the producer waits for it, ``consumed``.
    """

    transport: str = ""

    def send(self, step: StepRendezvous, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None) -> None:
        raise GraphError(f"{edge.tensor} is not sent from here: its route {self!r} receives")

    def recv(self, step: StepRendezvous, edge: Edge, into: np.ndarray) -> Future:
        raise GraphError(f"{edge.tensor} is not received here: its route {self!r} sends")

    def consumed(self, step: StepRendezvous) -> None:
        """The received tensor is used up; most routes have nobody to tell."""


@dataclass(frozen=True, slots=True)
class PushRoute(Route):
    """Sender of a static edge: written into the peer's slot as soon as it exists. ``wire`` is the edge's id on the channel."""

    channel: Channel
    wire: int
    transport: str = ""

    def send(self, step: StepRendezvous, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None) -> None:
        def pushed(future: Future[None]) -> None:
            error = future.exception(step.deadline)
            if release is not None:
                release()
            if error is not None:
                step.abort(error)

        self.channel.push(self.wire, step.generation, tensor, deadline=step.deadline).add_done_callback(pushed)


@dataclass(frozen=True, slots=True)
class SlotRoute(Route):
    """Receiver of a static edge: the executor's destination is the slot that the peer writes to."""

    receiver: Transport
    wire: int
    transport: str = ""

    def recv(self, step: StepRendezvous, edge: Edge, into: np.ndarray) -> Future:
        return self.receiver.arrival(self.wire, step.generation)

    def consumed(self, step: StepRendezvous) -> None:
        self.receiver.release(self.wire, step.generation)


@dataclass(frozen=True, slots=True)
class ServeRoute(Route):
    """Sender of a fetched edge: waits in this task's table until the consumer asks (TensorFlow's passive Send)."""

    transport: str = ""

    def send(self, step: StepRendezvous, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None) -> None:
        step.table.offer(make_key(edge, step.incarnation, step.step), tensor, release)


@dataclass(frozen=True, slots=True)
class FetchRoute(Route):
    """Receiver of a fetched edge. ``incarnation`` is the producer task's when the graph was registered."""

    channel: Channel
    incarnation: int
    transport: str = ""

    def recv(self, step: StepRendezvous, edge: Edge, into: np.ndarray) -> Future:
        key = make_key(edge, self.incarnation, step.step)
        return self.channel.fetch(key, into=into, deadline=step.deadline)


class StepRendezvous(Rendezvous):
    """One step of one registered graph on this task. Made by ``RendezvousManager.begin``; any thread may call it.

    ``generation`` counts the steps of the registered graph from 0 and names static slots' contents.
    """

    def __init__(
        self,
        table: Table,
        routes: Mapping[int, Route],
        *,
        incarnation: int,
        generation: int,
        deadline: Deadline,
        peer_state: Callable[[str], str] | None = None,
    ) -> None:
        self.step = table.step
        self.table = table
        self.incarnation = incarnation
        self.generation = generation
        self.deadline = deadline
        self._routes = routes
        self._peer_state = peer_state
        self._guard = threading.Lock()
        self._pending: list[Future] = []
        self._reason: BaseException | None = None

    def send(self, edge: Edge, tensor: np.ndarray, release: Callable[[], None] | None = None) -> None:
        if self._reason is not None:
            raise step_aborted(self.step, self._reason)
        self._route(edge).send(self, edge, tensor, release)

    def recv(self, edge: Edge, into: np.ndarray) -> Future:
        if self._reason is not None:
            raise step_aborted(self.step, self._reason)
        future = self._route(edge).recv(self, edge, into)
        if not future.done():
            with self._guard:
                self._pending.append(future)
                reason = self._reason
            if reason is not None:
                future.set_exception(step_aborted(self.step, reason))
        return future

    def consumed(self, edge: Edge) -> None:
        self._route(edge).consumed(self)

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self._reason is not None:
                return
            self._reason = reason
            pending, self._pending = self._pending, []
        self.table.abort(reason)
        # A completion may race with this; whichever sets the future first is right, and the other is ignored.
        for future in pending:
            if not future.done():
                future.set_exception(step_aborted(self.step, reason))

    def describe(self, edge: Edge) -> str:
        return f"Recv of {edge.tensor} from {edge.src} over {self._route(edge).transport or 'an unnamed transport'}"

    def peer_state(self, edge: Edge) -> str:
        return self._peer_state(edge.src) if self._peer_state is not None else ""

    def _route(self, edge: Edge) -> Route:
        route = self._routes.get(edge.id)
        if route is None:
            raise GraphError(f"edge {edge.id} ({edge.tensor} from {edge.src} to {edge.dst}) has no route")
        return route


class RendezvousManager:
    """All steps of one task, and the TensorSource that its transports serve. Any thread; never blocks.

    Steps that ended are remembered for a while (``TOMBSTONES``), so that a late question gets an error at once and not a
    wait. ``incarnation`` is this task's random number; keys made for an earlier one are refused.
    """

    def __init__(self, task: str, incarnation: int, peer_state: Callable[[str], str] | None = None) -> None:
        self.task = task
        self.incarnation = incarnation
        self._peer_state = peer_state
        self._guard = threading.Lock()
        self._tables: dict[int, Table] = {}
        self._steps: dict[int, StepRendezvous] = {}
        self._ended: OrderedDict[int, BaseException | None] = OrderedDict()
        self._closed: BaseException | None = None

    def begin(self, step: int, routes: Mapping[int, Route], *, generation: int, deadline: Deadline) -> StepRendezvous:
        """The rendezvous of a step that starts here. StepAbortedError if it was given up before it began."""
        with self._guard:
            table = self._table(step)
            if step in self._steps:
                raise GraphError(f"step {step:#x} runs on {self.task} already")
            rendezvous = StepRendezvous(
                table,
                routes,
                incarnation=self.incarnation,
                generation=generation,
                deadline=deadline,
                peer_state=self._peer_state,
            )
            self._steps[step] = rendezvous
        return rendezvous

    def take(self, key: str, reply: Reply) -> None:
        """TensorSource: answer a peer that asks for ``key``."""
        try:
            src, incarnation, _, _, step = parse_key(key)
            if src != self.task:
                raise ConfigError(f"{key} was asked of {self.task}, which is not its producer")
            if incarnation != self.incarnation:
                raise UnknownGraphError(
                    f"{key} names incarnation {incarnation:016x} of {self.task}; this is {self.incarnation:016x}: "
                    f"the task was restarted, register the graph again"
                )
            with self._guard:
                table = self._table(step)
        except Exception as error:  # every failure is the asking peer's to see, and none may end the serving thread
            reply(error)
            return
        table.take(key, reply)

    def abort(self, step: int, reason: BaseException) -> None:
        """Give a step up, running or not: its waits here and its peers' questions fail. The first reason wins."""
        self._end(step, reason)

    def cleanup(self, step: int) -> None:
        """Forget a step that all tasks have finished; what nobody asked for is released. Idempotent."""
        self._end(step, None)

    def running(self) -> list[int]:
        """Ids of the steps that have begun here and were not cleaned up."""
        with self._guard:
            return list(self._steps)

    def close(self, reason: BaseException) -> None:
        """Abort every step and refuse new ones with ``reason``. Idempotent."""
        with self._guard:
            if self._closed is None:
                self._closed = reason
            steps = list(self._tables)
        for step in steps:
            self._end(step, reason)

    def _table(self, step: int) -> Table:
        # The caller holds the guard.
        if self._closed is not None:
            raise step_aborted(step, self._closed)
        if step in self._ended:
            reason = self._ended[step]
            if reason is None:
                raise StepAbortedError(f"step {step:#x} is over on {self.task}")
            raise step_aborted(step, reason)
        table = self._tables.get(step)
        if table is None:
            if len(self._tables) >= MAX_STEPS:
                raise ConfigError(f"{self.task} holds {len(self._tables)} unfinished steps, no room for {step:#x}")
            table = self._tables[step] = Table(step)
        return table

    def _end(self, step: int, reason: BaseException | None) -> None:
        with self._guard:
            table = self._tables.pop(step, None)
            rendezvous = self._steps.pop(step, None)
            if step not in self._ended:
                self._ended[step] = None if reason is None else detached(reason)
                if len(self._ended) > TOMBSTONES:
                    self._ended.popitem(last=False)
        over = reason if reason is not None else StepAbortedError(f"step {step:#x} is over on {self.task}")
        if rendezvous is not None:
            rendezvous.abort(over)
        if table is not None:
            table.abort(over)
