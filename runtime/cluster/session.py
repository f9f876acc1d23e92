"""Session: runs parts of a graph, in this process or over a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from runtime.cluster.client import WorkerClient
from runtime.cluster.health import HealthMonitor
from runtime.cluster.master import Master
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.rpc import Tls
from runtime.cluster.runner import ClusterRunner, LocalRunner, Runner
from runtime.cluster.server import Server
from runtime.cluster.spec import ClusterSpec, task_name
from runtime.cluster.tasks import LocalTask, RemoteTask, Task
from runtime.deadline import Deadline
from runtime.errors import ConfigError, GraphError
from runtime.execution.executor import fed_array
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.partition import check_feeds
from runtime.graph.placement import place
from runtime.graph.state_ops import variables
from runtime.tensor import TensorSpec
from runtime.trace import SPAN_DTYPE

STEP_S = 300.0
STARTUP_S = 60.0


class Session:
    """Runs steps of ``graph``; a context manager.

    ``target`` None: in this process, whatever devices nodes name, with variables of this session's own. A ``Server``: over its
    cluster, with this process as one of the tasks; nodes without a device run here. A ``ClusterSpec``: over that cluster from
    outside, with the run's ``token``; nodes without a device run on its first worker task (its first task, if it has no job
    "worker").

    ``step_s`` bounds a step unless ``run`` says otherwise, ``startup_s`` the wait for a task that is not up. A step that failed
    leaves the session usable: the next ``run`` registers the graph again, also with tasks that were restarted meanwhile.
    ``threads`` (of a kernel) is for a session without target; tasks have their own.

    Any thread may call ``run``; steps with the same feeds and fetches run one after the other.
    """

    def __init__(
        self,
        graph: Graph,
        target: Server | ClusterSpec | None = None,
        *,
        token: str = "",
        tls: Tls | None = None,
        step_s: float = STEP_S,
        startup_s: float = STARTUP_S,
        threads: int | None = None,
    ) -> None:
        self.graph = graph
        self._step_s = step_s
        self._guard = threading.Lock()
        self._signatures: dict[Hashable, _Signature] = {}
        self._master: Master | None = None
        self._health: HealthMonitor | None = None
        self._closed = False
        if target is None:
            self.task = ""
            self._runner: Runner = LocalRunner(graph, threads)
            return
        if isinstance(target, Server):
            self.task = target.name
            tasks = _tasks(target.cluster, target.token, target.tls, target)
            health = target.worker.health
        elif not isinstance(target, ClusterSpec):
            raise ConfigError(f"a session's target is a Server, a ClusterSpec or None, not {target!r}")
        else:
            self.task = task_name("worker", 0) if "worker" in target.jobs else target.tasks[0]
            tasks = _tasks(target, token, tls, None)
            health = self._health = HealthMonitor()
        self._master = Master(tasks, health, startup_s=startup_s)
        self._runner = ClusterRunner(graph, self._master, self.task, local=isinstance(target, Server))

    def run(
        self,
        fetches: Any,
        feeds: Mapping[Any, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Run what ``fetches`` need, once.

        ``fetches`` is an output, a node, a name of either, or a list, tuple or dict of them; the values come in the same form:
        an array for an output (the caller's own), None for a node without outputs. ``feeds`` gives every placeholder (output,
        node or name) that is needed its value.

        GraphError or ShapeError before anything runs if they do not fit the graph. During the step the first error of any
        task is raised: PeerLostError names a lost task, DeadlineError the tensor and the peer that did not answer.
        """
        key = (_key(fetches), tuple(feeds) if feeds else ())
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._new_signature(key, fetches, feeds or {})
        values = signature.values(feeds) if feeds else []
        deadline = Deadline.after(self._step_s if timeout_s is None else timeout_s)
        return signature.pack(signature.step(values, deadline))

    def _new_signature(self, key: Hashable, fetches: Any, feeds: Mapping[Any, Any]) -> _Signature:
        if self._closed:
            raise ConfigError("this session is closed")
        fresh = _Signature(self.graph, fetches, feeds, self._runner)
        with self._guard:
            return self._signatures.setdefault(key, fresh)

    # Variables on the tasks, for checkpoints.

    def variables_elsewhere(self) -> dict[str, dict[str, TensorSpec]]:
        """Task -> variables of the graph that are placed there, but for the session's own task; a session without target
        has them all under the task "". Names are those of the shared memory."""
        if self._master is None:
            return {"": {node.attrs["variable"]: node.specs[0] for node in _variable_nodes(self.graph)}}
        placement = place(self.graph, self.task)
        found: dict[str, dict[str, TensorSpec]] = {}
        for node in _variable_nodes(self.graph):
            if placement[node] != self.task:
                found.setdefault(placement[node], {})[node.attrs["variable"]] = node.specs[0]
        return found

    def variable_bytes(self, task: str, deadline: Deadline, container: str = "") -> dict[str, int]:
        """Variables that exist at a task, and their bytes."""
        if self._master is None:
            return {name: array.nbytes for name, array in self._runner.resources.variables(container).items()}
        reply = self._master.call(task, "ListVariables", pb.VariablesRequest(container=container), deadline)
        return dict(reply.nbytes)

    def save_variables(
        self, task: str, names: Sequence[str], deadline: Deadline, container: str = ""
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Copies of variables of one task, all taken at one moment between updates."""
        if not names:  # which a task would take for all of its variables
            return iter(())
        if self._master is None:
            copies = self._runner.resources.snapshot(container, names)
            if absent := [name for name in names if name not in copies]:
                raise GraphError(f"this session has no variable {absent[0]!r} in container {container!r} yet")
            return iter([(name, copies[name]) for name in names])
        return self._master.task(task).save(container, list(names), deadline)

    def restore_variables(
        self,
        task: str,
        values: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
        deadline: Deadline,
        container: str = "",
    ) -> None:
        """Set variables of one task, all at one moment between updates; those that do not exist are made."""
        pairs = values.items() if isinstance(values, Mapping) else values
        if self._master is None:
            self._runner.resources.restore(dict(pairs), container)
        else:
            self._master.task(task).restore(container, pairs, deadline)

    # What the tasks report.

    def wait_for(self, tasks: Iterable[str], deadline: Deadline) -> None:
        """Wait until these tasks are up; nothing to do without a target."""
        if self._master is not None:
            for task in tasks:
                self.status(task, deadline)

    def watch(self, tasks: Sequence[str], *, fatal: bool, deadline: Deadline) -> None:
        """Watch tasks that this session's steps do not run on. The loss of one is logged and, if ``fatal``, fails the steps that
        run, or the next one if none does: for steps that wait for another worker without exchanging anything with it."""
        if self._master is not None and tasks:
            self._master.watch_others(tasks, fatal, deadline)

    def routes(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Pairs of tasks -> the transport between them, and why that one."""
        return self._master.routes if self._master is not None else {}

    def status(self, task: str, deadline: Deadline) -> pb.StatusReply:
        """A task's GetStatus: incarnation, transports, memory."""
        if self._master is None:
            raise ConfigError("a session without target has no tasks")
        return self._master.status(task, deadline)

    def trace(
        self, task: str, deadline: Deadline, *, enable: bool | None = None, clear: bool = False
    ) -> tuple[np.ndarray, list[str], dict[str, int]]:
        """(spans, their names, transport counters) of a task; switches its tracing on or off afterwards if ``enable`` is given."""
        if self._master is None:
            raise ConfigError("a session without target has no tasks")
        switch = pb.TraceRequest.KEEP if enable is None else pb.TraceRequest.ON if enable else pb.TraceRequest.OFF
        reply = self._master.call(task, "CollectTrace", pb.TraceRequest(enable=switch, clear=clear), deadline)
        return np.frombuffer(reply.spans, SPAN_DTYPE).copy(), list(reply.names), dict(reply.counters)

    def shutdown(self, task: str, reason: str, deadline: Deadline) -> None:
        """Ask a task to end."""
        if self._master is None:
            raise ConfigError("a session without target has no tasks")
        self._master.call(task, "Shutdown", pb.ShutdownRequest(reason=reason), deadline)

    def close(self) -> None:
        """Drop what is registered and close connections; a target server stays open. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._signatures.clear()
        self._runner.close()
        if self._master is not None:
            self._master.close()
        if self._health is not None:
            self._health.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Signature:
    """What one combination of feeds and fetches means: checked and flattened once."""

    def __init__(self, graph: Graph, fetches: Any, feeds: Mapping[Any, Any], runner: Runner) -> None:
        self._outputs: list[Output] = []
        self._targets: list[Node] = []
        self.pack: Callable[[list[np.ndarray]], Any] = self._flatten(graph, fetches)
        self._feeds = check_feeds([_resolve(graph, key, "feed") for key in feeds])
        if len({node.name for node in self._feeds}) < len(self._feeds):
            raise GraphError("a placeholder is fed twice, under two of its names")
        self.step = runner.prepare(self._outputs, self._targets, self._feeds)

    def values(self, feeds: Mapping[Any, Any]) -> list[np.ndarray]:
        """Feeds in the order of the placeholders; ShapeError if one does not fit."""
        return [fed_array(node.name, value, node.specs[0]) for node, value in zip(self._feeds, feeds.values())]

    def _flatten(self, graph: Graph, fetches: Any) -> Callable[[list[np.ndarray]], Any]:
        if isinstance(fetches, Mapping):
            parts = {key: self._flatten(graph, value) for key, value in fetches.items()}
            return lambda results: {key: part(results) for key, part in parts.items()}
        if isinstance(fetches, list | tuple):
            packs = [self._flatten(graph, value) for value in fetches]
            kind = list if isinstance(fetches, list) else tuple
            return lambda results: kind(pack(results) for pack in packs)
        value = _resolve(graph, fetches, "fetch")
        if isinstance(value, Node):
            self._targets.append(value)
            return lambda results: None
        if value not in self._outputs:
            self._outputs.append(value)
        at = self._outputs.index(value)
        return lambda results: results[at]


def _resolve(graph: Graph, value: Any, what: str) -> Any:
    """An output of the graph, or a node of it that has none (fetches only)."""
    if isinstance(value, str):
        value = graph.output(value) if ":" in value else graph.node(value)
    if not isinstance(value, Output | Node):
        raise GraphError(f"cannot {what} {value!r}: it is no output, node or name")
    if value.graph is not graph:
        raise GraphError(f"cannot {what} {value.name}: it belongs to another graph than this session's")
    if isinstance(value, Node) and (what == "feed" or value.specs):
        return value.out
    return value


def _key(fetches: Any) -> Hashable:
    if isinstance(fetches, list | tuple):
        return (type(fetches), *map(_key, fetches))
    if isinstance(fetches, Mapping):
        return (dict, *((key, _key(value)) for key, value in fetches.items()))
    if isinstance(fetches, Hashable):
        return fetches
    raise GraphError(f"cannot fetch {fetches!r}: it is no output, node or name")


def _variable_nodes(graph: Graph) -> list[Node]:
    return [value.node for value in variables(graph)]


def _tasks(cluster: ClusterSpec, token: str, tls: Tls | None, server: Server | None) -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for name in cluster:
        if server is not None and name == server.name:
            tasks[name] = LocalTask(server.worker, server.address)
        else:
            tasks[name] = RemoteTask(WorkerClient(name, cluster.address(name), token, tls))
    return tasks
