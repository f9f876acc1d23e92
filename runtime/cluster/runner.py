"""Runners: what turns a signature (fetches, targets, feeds) into a function that runs its step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from runtime.cluster.master import Master, Registration
from runtime.deadline import Deadline
from runtime.errors import ConfigError, GraphError
from runtime.execution.local import LocalEngine
from runtime.execution.resources import Resources
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.optimize import optimise
from runtime.graph.partition import Partition, partition
from runtime.graph.placement import place
from runtime.graph.state_ops import Variable

# Above this a fetch from another task costs less over a transport than in the answer to RunGraph.
FETCHED_BYTES = 64 << 10

Step = Callable[[list[np.ndarray], Deadline], list[np.ndarray]]


class Runner(Protocol):
    @property
    def resources(self) -> Resources:
        """The variables, if they are in this process; ConfigError otherwise."""

    def prepare(self, outputs: Sequence[Output], targets: Sequence[Node], feeds: Sequence[Node]) -> Step:
        """A function that takes the feeds' arrays and gives the outputs'. Any thread; one step at a time."""

    def close(self) -> None: ...


class LocalRunner:
    """Everything in this process, as one task, whatever devices nodes name."""

    def __init__(self, graph: Graph, threads: int | None) -> None:
        self._engine = LocalEngine(graph, threads=threads)

    @property
    def resources(self) -> Resources:
        return self._engine.resources

    def prepare(self, outputs: Sequence[Output], targets: Sequence[Node], feeds: Sequence[Node]) -> Step:
        engine = self._engine
        fetches: list[Output | Node] = [*outputs, *targets]
        fed = [node.out for node in feeds]
        count = len(outputs)
        engine.executor(fetches)  # compiled now, so that what cannot be run is refused before a step

        def step(values: list[np.ndarray], deadline: Deadline) -> list[np.ndarray]:
            results = engine.run(fetches, dict(zip(fed, values)), deadline)
            return results[:count]  # type: ignore[return-value]  # outputs come first and are never None

        return step

    def close(self) -> None:
        """Free the compiled plans' memory."""
        self._engine.close()


class ClusterRunner:
    """Over a cluster. ``home``: where nodes without a device run."""

    def __init__(self, graph: Graph, master: Master, home: str, local: bool) -> None:
        self._graph = graph
        self._master = master
        self._home = home
        self._local = local

    @property
    def resources(self) -> Resources:
        raise ConfigError("the variables of a cluster are at its tasks")

    def prepare(self, outputs: Sequence[Output], targets: Sequence[Node], feeds: Sequence[Node]) -> Step:
        rewrite = optimise(self._graph, outputs, targets, feeds)
        placement = place(rewrite.graph, self._home)
        outputs, targets = [rewrite.outputs[value] for value in outputs], [rewrite.nodes[node] for node in targets]
        if self._local:
            outputs = [self._brought_home(value, rewrite.graph, placement) for value in outputs]
        parts = partition(rewrite.graph, placement, outputs, targets)
        check_fed(parts, feeds)
        feed_names = [node.name for node in feeds]
        fetch_names = [value.name for value in outputs]
        guard = threading.Lock()
        current: list[Registration] = []

        def step(values: list[np.ndarray], deadline: Deadline) -> list[np.ndarray]:
            with guard:
                if not current or current[0].broken:
                    current[:] = [self._master.register(parts, feed_names, fetch_names)]
                return self._master.run(current[0], values, deadline)

        return step

    def _brought_home(self, value: Output, graph: Graph, placement: dict[Node, str]) -> Output:
        """What to fetch instead of a large output of another task: its copy here, which a transport brings."""
        if value.spec.nbytes < FETCHED_BYTES or placement[value.node] == self._home:
            return value
        root = value
        while root.node.op.alias and root.index == 0:
            root = root.node.inputs[0]
        if root.node.op is Variable and any(node.op.mutates for node in graph.nodes):
            return value  # it is fetched as of its own place among the step's updates
        with graph.root_scope():
            copy = graph.add("Identity", value, device=self._home, colocate="")
        placement[copy] = self._home
        return copy.out

    def close(self) -> None:
        """Registrations are the master's to drop."""


def check_fed(parts: dict[str, Partition], feeds: Sequence[Node]) -> None:
    """GraphError unless all placeholders are fed that the step reads."""
    missing = {name for part in parts.values() for name in part.feeds} - {node.name for node in feeds}
    if missing:
        raise GraphError(f"placeholders must be fed and were not: {', '.join(sorted(missing))}")
