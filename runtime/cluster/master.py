"""Master: registers a graph's signatures with the tasks of a cluster, and issues their steps.

As in TensorFlow the first step of a signature (which tensors are fed, which are fetched) prunes, optimises, places and
partitions the graph and registers the parts everywhere; from then on a step is one RunGraph a task, all in parallel, and the
tasks exchange tensors among themselves.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from runtime.cluster.health import HealthMonitor, Watch
from runtime.cluster.outcome import Outcome
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.route_table import RouteTable
from runtime.cluster.rpc import CONTROL_VERSION
from runtime.cluster.tasks import LocalTask, RemoteTask, Task
from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, StepAbortedError, VerbflowError
from runtime.future import Future
from runtime.graph.partition import Partition
from runtime.graph.serialize import dump_graph

_LOG = logging.getLogger("verbflow.cluster")
# A task ends a step at the step's deadline by itself; only one that hangs is waited for longer.
_GRACE_S = 5.0
# After the first failure of a step the other tasks are told to give up, and get so long for it.
_ABORTED_S = 3.0
_REGISTER_S = 60.0


@dataclass
class _Part:
    """One task's share of a registered signature. ``feeds`` and ``fetches`` are positions in the signature's lists."""

    task: Task
    feeds: list[int]
    fetches: list[int]


@dataclass
class Registration:
    """A signature as it is registered now. Steps of it are sequential: ``guard`` is held for each."""

    handle: str
    parts: list[_Part]
    fetch_count: int
    generation: int = 0
    broken: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Other:
    """A watched task that no step runs on. ``told``: a step has failed with its loss."""

    watch: Watch
    fatal: bool
    told: bool = False


class Master:
    """Any thread may call it. ``startup_s``: how long to wait for a task that is not up (yet, or again)."""

    def __init__(self, tasks: Mapping[str, Task], health: HealthMonitor, *, startup_s: float) -> None:
        self.session = secrets.randbits(62) | 1 << 62
        self._tasks = dict(tasks)
        self._home = next((name for name, task in tasks.items() if isinstance(task, LocalTask)), "")
        self._health = health
        self._startup_s = startup_s
        self._steps = itertools.count(1)
        self._graphs = itertools.count(1)
        self._guard = threading.Lock()
        self._watches: dict[str, Watch] = {}
        self._others: list[_Other] = []
        self._finished: dict[str, list[int]] = {name: [] for name in tasks}
        self._running: dict[int, Outcome] = {}
        self._routes = RouteTable(self._all)

    def register(self, parts: Mapping[str, Partition], feeds: Sequence[str], fetches: Sequence[str]) -> Registration:
        """Register the parts of a partitioned graph with their tasks.

        ``feeds`` and ``fetches`` are distinct names (placeholders and outputs). The first error of any task is raised, and nothing
        stays registered.
        """
        handle = f"{self.session:016x}.{next(self._graphs)}"
        names = list(parts)
        deadline = Deadline.after(max(self._startup_s, 1.0))
        status = self._status(names, deadline)
        deadline = Deadline.after(_REGISTER_S)
        peers = {name: self._peer(name, status[name]) for name in names}
        pairs = {frozenset((edge.src, edge.dst)) for part in parts.values() for edge in part.sends}
        routes = self._routes.of(pairs, peers, {name: status[name].transport for name in names}, deadline)
        requests = {name: self._request(handle, name, parts, routes, peers) for name in names}
        try:
            answers = self._all("RegisterGraph", requests, deadline)
            offers: dict[str, dict[str, pb.Offer]] = {name: {} for name in names}
            for consumer, answer in answers.items():
                for producer, offer in answer.offers.items():
                    offers[producer][consumer] = offer
            binds = {name: pb.BindRequest(handle=handle, offers=offers[name]) for name in names}
            self._all("BindEdges", binds, deadline)
        except BaseException:
            self._forget(handle, names)
            raise
        self._watch(names, status)
        registered = [
            _Part(
                self._tasks[name],
                [feeds.index(feed) for feed in parts[name].feeds],
                [fetches.index(fetch) for fetch in parts[name].fetches],
            )
            for name in names
        ]
        return Registration(handle, registered, len(fetches))

    def run(self, registration: Registration, feeds: Sequence[np.ndarray], deadline: Deadline) -> list[np.ndarray]:
        """One step. After a failure the registration is broken: register again.

        The error is the one that explains most: a lost peer before a step that was merely aborted because of it.
        """
        with registration.guard:
            if registration.broken:
                raise StepAbortedError("an earlier step of this signature failed; it must be registered again")
            step = (self.session & 0xFFFF_FFFF) << 31 | next(self._steps)
            outcome = Outcome(step, [part.task for part in registration.parts])
            with self._guard:
                self._running[step] = outcome
                names = {task.name for task in outcome.tasks}
                lost = [watch.lost for name, watch in self._watches.items() if watch.lost is not None and name in names]
                # News that came between two steps, or while a graph was being registered.
                lost += [
                    other.watch.lost for other in self._others if other.fatal and not other.told and other.watch.lost
                ]
            try:
                if lost:
                    raise lost[0]
                return self._run(registration, step, outcome, feeds, deadline)
            except BaseException as error:
                registration.broken = True
                with self._guard:
                    for other in self._others:
                        other.told = other.told or other.watch.lost is error
                self._forget(registration.handle, [part.task.name for part in registration.parts])
                raise
            finally:
                registration.generation += 1
                with self._guard:
                    del self._running[step]
                    for part in registration.parts:
                        self._finished[part.task.name].append(step)

    def _run(
        self, registration: Registration, step: int, outcome: Outcome, feeds: Sequence[np.ndarray], deadline: Deadline
    ) -> list[np.ndarray]:
        def share(part: _Part) -> tuple[str, int, int, list[np.ndarray], Deadline, list[int]]:
            own = [feeds[index] for index in part.feeds]
            finished = self._take_finished(part.task.name)
            return registration.handle, step, registration.generation, own, deadline, finished

        waiting: list[tuple[_Part, Future[list[np.ndarray]]]] = []
        local: _Part | None = None
        results: list[np.ndarray | None] = [None] * registration.fetch_count
        for part in registration.parts:
            if isinstance(part.task, LocalTask):
                local = part
                continue
            future = part.task.start_step(*share(part))
            future.add_done_callback(partial(outcome.report, part.task))
            waiting.append((part, future))
        if local is not None:
            assert isinstance(local.task, LocalTask)
            try:
                _put(results, local, local.task.run_step(*share(local)))
            except VerbflowError as error:
                outcome.fail(local.task, error)
            except BaseException as error:
                outcome.fail(local.task, StepAbortedError(f"{local.task.name}: {type(error).__name__}: {error}"))
                raise
        for part, future in waiting:
            self._await(part, future, outcome, deadline)
        if outcome.error is not None:
            raise outcome.error
        for part, future in waiting:
            _put(results, part, future.result(deadline))
        return results  # type: ignore[return-value]  # every fetch belongs to one part

    def _await(self, part: _Part, future: Future[list[np.ndarray]], outcome: Outcome, deadline: Deadline) -> None:
        """Wait until a task's part has ended, one way or the other."""
        end = Deadline.after(deadline.remaining() + _GRACE_S)
        while not future.done():
            patience = Deadline.after(_ABORTED_S) if outcome.error is not None else end
            try:
                future.exception(Deadline.after(min(patience.remaining(), 1.0)) if outcome.error is None else patience)
            except VerbflowError:
                if not patience.expired():
                    continue
                silence = PeerLostError(f"{future.what}: no answer for {deadline.elapsed():.1f} s; {self._age(part)}")
                outcome.fail(part.task, silence)
                part.task.lose(silence)
                return

    def _age(self, part: _Part) -> str:
        return self._health.describe(part.task.name) or "it is not watched"

    # Registration.

    def _status(self, names: Sequence[str], deadline: Deadline) -> dict[str, pb.StatusReply]:
        for name in names:
            if name not in self._tasks:
                raise ConfigError(f"nodes are placed on {name}, but the cluster has only {', '.join(self._tasks)}")
        requests = {
            name: pb.StatusRequest(version=CONTROL_VERSION, task=name, open_transports=len(names) > 1) for name in names
        }
        answers: dict[str, pb.StatusReply] = self._all("GetStatus", requests, deadline, wait_for_ready=True)
        return answers

    def _peer(self, name: str, status: pb.StatusReply) -> pb.Peer:
        return pb.Peer(
            task=name,
            incarnation=status.incarnation,
            address=self._tasks[name].address,
            host=status.host,
            transports=status.addresses,
        )

    def _request(
        self,
        handle: str,
        name: str,
        parts: Mapping[str, Partition],
        routes: Mapping[frozenset[str], tuple[str, str]],
        peers: Mapping[str, pb.Peer],
    ) -> pb.RegisterRequest:
        part = parts[name]
        others = sorted({*(edge.dst for edge in part.sends), *(edge.src for edge in part.recvs)})
        return pb.RegisterRequest(
            session=self.session,
            handle=handle,
            partition=dump_graph(part.graph),
            feeds=list(part.feeds),
            fetches=list(part.fetches),
            peers=[peers[other] for other in others],
            master=self._home,
            routes=[
                pb.Route(
                    peer=other,
                    transport=routes[frozenset((name, other))][0],
                    reason=routes[frozenset((name, other))][1],
                )
                for other in others
            ],
        )

    def _all(
        self, method: str, requests: Mapping[str, Any], deadline: Deadline, *, wait_for_ready: bool = False
    ) -> dict[str, Any]:
        """The call at every task, at the same time; the first error in the order of the tasks is raised after all are done."""
        remote = [name for name in requests if isinstance(self._tasks[name], RemoteTask)]
        local = [name for name in requests if name not in remote]
        futures = {
            name: self._tasks[name].start(method, requests[name], deadline, wait_for_ready=wait_for_ready)
            for name in (*remote, *local)
        }
        end = Deadline.after(deadline.remaining() + _GRACE_S)
        errors = [error for name in requests if (error := futures[name].exception(end)) is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, PeerLostError)), errors[0])
        return {name: futures[name].result(end) for name in requests}

    def _forget(self, handle: str, names: Sequence[str]) -> None:
        """Deregister, as far as tasks can be reached; only this process's own part is waited for."""
        request = pb.DeregisterRequest(session=self.session, handles=[handle])
        for name in names:
            self._tasks[name].start("DeregisterGraph", request, Deadline.after(_GRACE_S))

    # Health.

    def _watch(self, names: Sequence[str], status: Mapping[str, pb.StatusReply]) -> None:
        for name in names:
            task = self._tasks[name]
            if not isinstance(task, RemoteTask):
                continue
            with self._guard:
                watch = self._watches.get(name)
                if watch is not None and watch.lost is None and watch.incarnation == status[name].incarnation:
                    continue
            if watch is not None:
                self._health.unwatch(watch)
            fresh = self._health.watch(task.client, status[name].incarnation, self._lost, self.session)
            with self._guard:
                self._watches[name] = fresh

    def _lost(self, name: str, error: PeerLostError) -> None:
        _LOG.warning("%s", error)
        with self._guard:
            running = list(self._running.values())
        for outcome in running:
            if any(task.name == name for task in outcome.tasks):
                outcome.fail(self._tasks[name], error)
        self._tasks[name].lose(error)

    def watch_others(self, names: Sequence[str], fatal: bool, deadline: Deadline) -> None:
        """See ``Session.watch``."""
        status = self._status(names, deadline)

        def lost(name: str, error: PeerLostError) -> None:
            _LOG.warning("%s", error)
            if fatal:
                with self._guard:
                    if any(other.told and other.watch.lost is error for other in self._others):
                        return  # a step has begun and failed with it since; the next one need not
                    running = list(self._running.values())
                for outcome in running:
                    outcome.fail(None, error)

        for name in names:
            task = self._tasks[name]
            if isinstance(task, RemoteTask):
                with self._guard:  # so that a step which begins now either sees the loss or is seen by ``lost``
                    watch = self._health.watch(task.client, status[name].incarnation, lost)
                    self._others.append(_Other(watch, fatal))

    @property
    def routes(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Pairs of tasks -> the transport between them, and why that one."""
        return self._routes.known()

    def _take_finished(self, name: str) -> list[int]:
        with self._guard:
            finished, self._finished[name] = self._finished[name], []
        return finished

    def task(self, name: str) -> Task:
        """A task of the cluster; ConfigError lists the known ones on a miss."""
        if name not in self._tasks:
            raise ConfigError(f"the cluster has no task {name!r}; known: {', '.join(self._tasks)}")
        return self._tasks[name]

    def call(self, task: str, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Any:
        """One control call at one task."""
        future = self.task(task).start(method, request, deadline, wait_for_ready=wait_for_ready)
        return future.result(Deadline.after(deadline.remaining() + _GRACE_S))

    def status(self, task: str, deadline: Deadline) -> pb.StatusReply:
        """A task's status; waits for one that is not up yet."""
        request = pb.StatusRequest(version=CONTROL_VERSION, task=task)
        reply: pb.StatusReply = self.call(task, "GetStatus", request, deadline, wait_for_ready=True)
        return reply

    def close(self) -> None:
        """Drop everything of this session at the tasks that can be reached, and the connections. Idempotent."""
        with self._guard:
            watches, self._watches = list(self._watches.values()), {}
            others, self._others = self._others, []
            used = {watch.task for watch in watches if watch.lost is None}
            running = list(self._running.values())
        for watch in (*watches, *(other.watch for other in others)):
            self._health.unwatch(watch)
        for outcome in running:
            outcome.fail(None, StepAbortedError("the session was closed"))
        request = pb.DeregisterRequest(session=self.session)
        deadline = Deadline.after(_GRACE_S)
        gone: list[Future[Any]] = []
        for name, task in self._tasks.items():
            if name in used or isinstance(task, LocalTask):
                finished = pb.CleanupRequest(steps=self._take_finished(name))
                gone += [
                    task.start("CleanupGraph", finished, deadline),
                    task.start("DeregisterGraph", request, deadline),
                ]
        for future in gone:
            future.exception(Deadline.after(deadline.remaining() + 1.0))
        for task in self._tasks.values():
            task.close()


def _put(results: list[np.ndarray | None], part: _Part, arrays: Sequence[np.ndarray]) -> None:
    for index, array in zip(part.fetches, arrays, strict=True):
        results[index] = array
