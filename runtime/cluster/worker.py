"""Worker: what one task does for its masters. A plain object; ``service`` puts it on the network, and a master in the same
process calls it directly."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from runtime.cluster.client import WorkerClient
from runtime.cluster.health import HealthMonitor, Watch
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.registered import RegisteredGraph, resident_bytes
from runtime.cluster.routes import TransportSet
from runtime.cluster.rpc import CONTROL_VERSION, Tls
from runtime.deadline import Deadline
from runtime.errors import (
    ArenaFullError,
    ConfigError,
    GraphError,
    PeerLostError,
    ProtocolMismatchError,
    StepAbortedError,
    UnknownGraphError,
)
from runtime.execution.compile import compile_partition
from runtime.execution.resources import Resources
from runtime.execution.step import RendezvousManager
from runtime.graph.partition import Partition
from runtime.graph.serialize import load_graph
from runtime.memory.arena import Arena
from runtime.memory.plan import Place
from runtime.trace import Tracer

_LOG = logging.getLogger("verbflow.cluster")
# A master that was not heard of for so long is dead, and the memory of its graphs is wanted.
LEASE_S = 120.0


class Worker:
    """Any thread may call any method. ``close`` ends it."""

    def __init__(
        self,
        task: str,
        *,
        arena: Arena,
        transport: str,
        token: str,
        bind: str,
        threads: int,
        tls: Tls | None = None,
        params: Mapping[str, Mapping[str, object]] | None = None,
        settings: Mapping[str, str] | None = None,
        health: HealthMonitor | None = None,
        poison: bool = False,
    ) -> None:
        self.task = task
        # Never zero, and positive as a signed 64-bit number, so that every tool can hold it.
        self.incarnation = secrets.randbits(62) | 1 << 62
        self.arena = arena
        self.tracer = Tracer()
        self.resources = Resources(arena)
        self.health = health or HealthMonitor()
        self.rendezvous = RendezvousManager(task, self.incarnation, peer_state=self.health.describe)
        self.transports = TransportSet(
            transport,
            source=self.rendezvous,
            arena=arena,
            tracer=self.tracer,
            task=task,
            token=token,
            bind=bind,
            params=params,
        )
        self._token, self._tls = token, tls
        self._threads = threads
        self._poison = poison
        self._settings = dict(settings or {})
        self._guard = threading.Lock()
        self._graphs: dict[str, RegisteredGraph] = {}
        self._heard: dict[int, float] = {}  # session -> when, monotonic seconds
        self._clients: dict[tuple[str, str], WorkerClient] = {}
        self._next_wire = 1
        self._shutdown: Callable[[], None] = lambda: None
        self._closed = False

    # The masters' view: registration.

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        if request.version != CONTROL_VERSION:
            raise ProtocolMismatchError(f"{self.task} speaks control protocol {CONTROL_VERSION}, not {request.version}")
        if request.task and request.task != self.task:
            raise ConfigError(
                f"this is {self.task}, not {request.task}; is the cluster description the same everywhere?"
            )
        if request.open_transports:
            self.transports.open()
        return pb.StatusReply(
            version=CONTROL_VERSION,
            task=self.task,
            incarnation=self.incarnation,
            transport=self.transports.policy,
            addresses=self.transports.addresses,
            unavailable=self.transports.unavailable,
            host=self.transports.host,
            memory=self.memory(),
            settings=self._settings,
        )

    def resolve(self, request: pb.ResolveRequest) -> pb.ResolveReply:
        self.transports.open()
        return pb.ResolveReply(by_peer={peer.task: self.transports.candidates(peer) for peer in request.peers})

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """Compile a partition; its static edges' slots are offered to their producers."""
        if request.master != self.task:  # a master in this very process sends no heartbeats, and needs none
            self._renew(request.session)
        self._drop_dead_sessions()
        part = Partition.of(self.task, load_graph(request.partition), request.fetches)
        if set(part.feeds) != set(request.feeds):
            raise GraphError(
                f"graph {request.handle} reads {', '.join(part.feeds)} and is fed {', '.join(request.feeds)}"
            )
        try:
            executor = compile_partition(
                part.graph,
                list(part.fetches.values()),
                edges=[*part.sends, *part.recvs],
                resources=self.resources,
                arena=self.arena,
                threads=self._threads,
                tracer=self.tracer,
                poison=self._poison,
            )
        except ArenaFullError as error:
            raise ArenaFullError(f"{self.task}: {error}") from error
        graph = RegisteredGraph(
            request.handle,
            request.session,
            request.master,
            executor,
            part.sends,
            part.recvs,
            list(request.feeds),
            peers={peer.task: peer for peer in request.peers},
            transports={route.peer: route.transport for route in request.routes},
        )
        try:
            offers = graph.offer_slots(self.transports, self._wire)
            with self._guard:
                if self._closed:
                    raise StepAbortedError(f"{self.task} is shutting down")
                if graph.handle in self._graphs:
                    raise GraphError(f"graph {graph.handle} is registered already at {self.task}")
                self._graphs[graph.handle] = graph
        except BaseException as error:
            self._drop_graph(graph, error)
            raise
        return pb.RegisterReply(offers=offers, plan_bytes=executor.resident_bytes)

    def bind(self, request: pb.BindRequest, deadline: Deadline) -> None:
        """Connect a registered partition to its peers, who have all registered theirs."""
        graph = self._graph(request.handle)
        graph.connect(self.transports, request.offers, deadline)
        graph.watches = [self._watch(peer) for peer in graph.peers.values()]
        # It may have been dropped meanwhile, when there was nothing to unwatch yet.
        if self._graphs.get(graph.handle) is not graph:
            for watch in graph.watches:
                self.health.unwatch(watch)

    # The masters' view: steps.

    def run(
        self, handle: str, step: int, generation: int, feeds: list[np.ndarray], deadline: Deadline
    ) -> list[np.ndarray]:
        """One step of a registered partition, on this thread. The fetches are the caller's own."""
        graph = self._graph(handle)
        if len(feeds) != len(graph.feeds):
            raise GraphError(
                f"graph {handle} reads {', '.join(graph.feeds) or 'no feeds'} and was fed {len(feeds)} tensors"
            )
        if not graph.guard.acquire(blocking=False):
            raise GraphError(f"graph {handle} already runs step {graph.running:#x} at {self.task}")
        try:
            for watch in graph.watches:
                if watch.lost is not None:
                    raise watch.lost
            graph.running = step
            self._graph(handle)  # whoever drops the graph from here on sees that the step runs, and aborts it
            graph.steps.append(step)
            rendezvous = self.rendezvous.begin(step, graph.routes, generation=generation, deadline=deadline)
            try:
                return graph.executor.run(step, rendezvous, dict(zip(graph.feeds, feeds)), deadline)
            except BaseException as error:
                self.abort(step, error)
                lost = error.__cause__ if isinstance(error, StepAbortedError) else error
                if isinstance(lost, PeerLostError):
                    _LOG.warning("%s: step %#x failed: %s", self.task, step, lost)
                raise
        finally:
            graph.running = 0
            graph.guard.release()

    def abort(self, step: int, reason: BaseException) -> None:
        """Give a step up: its waits here fail, and it cannot begin any more."""
        self.rendezvous.abort(step, reason)
        self.resources.cancel(step, reason)

    def cleanup(self, steps: list[int]) -> None:
        for step in steps:
            self.rendezvous.cleanup(step)

    def deregister(self, session: int, handles: list[str]) -> None:
        """Drop partitions; all of the session if none is named. Steps that still run are aborted first."""
        with self._guard:
            gone = [
                graph
                for graph in self._graphs.values()
                if graph.session == session and (not handles or graph.handle in handles)
            ]
            for graph in gone:
                del self._graphs[graph.handle]
            if not handles:
                self._heard.pop(session, None)
        for graph in gone:
            self._drop_graph(graph, StepAbortedError(f"graph {graph.handle} was deregistered at {self.task}"))

    def ping(self, request: pb.PingRequest) -> pb.PingReply:
        if request.session:
            self._renew(request.session)
            self._drop_dead_sessions()
        return pb.PingReply(incarnation=self.incarnation, active_steps=len(self.rendezvous.running()))

    # Variables, figures, and the end.

    def variables(self, container: str) -> dict[str, int]:
        """Initialised variables and their bytes."""
        return {name: array.nbytes for name, array in self.resources.variables(container).items()}

    def save(self, container: str, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Copies of variables, all taken at one moment between Apply ops; of all if no names are given."""
        copies = self.resources.snapshot(container, names or None)
        for name in names or sorted(copies):
            if name not in copies:
                raise GraphError(f"{self.task} has no variable {name!r} in container {container!r}")
            yield name, copies.pop(name)

    def restore(self, values: Mapping[str, np.ndarray], container: str) -> None:
        """Set variables, made if they do not exist yet, all at one moment between Apply ops."""
        self.resources.restore(values, container)

    def memory(self) -> pb.Memory:
        resident, peak = resident_bytes()
        return pb.Memory(
            arena_bytes=self.arena.nbytes,
            arena_used_bytes=self.arena.used_bytes,
            arena_peak_bytes=self.arena.peak_bytes,
            variable_bytes=sum(self.variables("").values()),
            plan_bytes=self._plan_bytes(),
            resident_bytes=resident,
            peak_resident_bytes=peak,
        )

    def _plan_bytes(self) -> int:
        graphs = list(self._graphs.values())
        if not graphs:
            return 0
        # Graphs share the variables; everything else is each one's own.
        own = sum(graph.executor.resident_bytes - graph.executor.plan.bytes_of(Place.VARIABLE) for graph in graphs)
        return own + sum(self.variables("").values())

    def trace(self, request: pb.TraceRequest) -> pb.TraceReply:
        spans, names = self.tracer.spans()
        reply = pb.TraceReply(
            spans=spans.tobytes(),
            names=names,
            dropped=self.tracer.dropped,
            monotonic_ns=time.monotonic_ns(),
            counters=self.transports.counters(),
        )
        if request.clear:
            self.tracer.clear()
        if request.enable != pb.TraceRequest.KEEP:
            self.tracer.enabled = request.enable == pb.TraceRequest.ON
        return reply

    def on_shutdown(self, callback: Callable[[], None]) -> None:
        """What a Shutdown call does; it must not block."""
        self._shutdown = callback

    def request_shutdown(self) -> None:
        self._shutdown()

    def close(self) -> None:
        """Abort what runs, drop all graphs, close the transports. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            graphs = list(self._graphs.values())
            self._graphs.clear()
        reason = PeerLostError(f"{self.task} is shutting down")
        self.rendezvous.close(reason)
        self.resources.abort(reason)
        for graph in graphs:
            self._drop_graph(graph, reason)
        self.health.close()
        self.transports.close()
        with self._guard:
            clients = list(self._clients.values())
        for client in clients:
            client.close()

    # Peers.

    def _watch(self, peer: pb.Peer) -> Watch:
        with self._guard:
            if self._closed:  # the control server is stopped last, so a BindEdges may still be under way
                raise StepAbortedError(f"{self.task} is shutting down")
            key = (peer.task, peer.address)
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = WorkerClient(peer.task, peer.address, self._token, self._tls)
        return self.health.watch(client, peer.incarnation, self._peer_lost)

    def _peer_lost(self, task: str, error: PeerLostError) -> None:
        _LOG.warning("%s: %s", self.task, error)
        orphans: dict[int, list[str]] = {}
        for graph in list(self._graphs.values()):
            step = graph.running
            if task in graph.peers and step:
                self.abort(step, error)
            if graph.master == task:
                orphans.setdefault(graph.session, []).append(graph.handle)
        self.transports.drop(task, error)
        if orphans:
            # Waits for the steps to leave, which the health monitor's thread must not.
            threading.Thread(target=self._drop_orphans, args=(orphans,), name="verbflow-orphans", daemon=True).start()

    def _drop_orphans(self, orphans: Mapping[int, list[str]]) -> None:
        for session, handles in orphans.items():
            self.deregister(session, handles)

    def _wire(self) -> int:
        with self._guard:
            wire = self._next_wire
            self._next_wire += 1
        return wire

    def _graph(self, handle: str) -> RegisteredGraph:
        graph = self._graphs.get(handle)
        if graph is None:
            raise UnknownGraphError(f"{self.task} knows no graph {handle}; it may have been restarted")
        return graph

    def _renew(self, session: int) -> None:
        self._heard[session] = time.monotonic()

    def _drop_dead_sessions(self) -> None:
        now = time.monotonic()
        for session, heard in list(self._heard.items()):
            if now - heard > LEASE_S:
                _LOG.warning(
                    "%s: session %016x was not heard of for %.0f s; its graphs go", self.task, session, now - heard
                )
                self.deregister(session, [])

    def _drop_graph(self, graph: RegisteredGraph, reason: BaseException) -> None:
        if graph.running:
            self.abort(graph.running, reason)
        for watch in graph.watches:
            self.health.unwatch(watch)
        with graph.guard:  # the step that was aborted has left
            self.cleanup(list(graph.steps))
            # Peers must be unable to write to the slots before their memory can be given to somebody else.
            for name, wires in graph.wires.items():
                self.transports.transport(name).withdraw(wires, reason)
            graph.executor.close()
