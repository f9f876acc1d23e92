"""Runners: what turns a signature (fetches, targets, feeds) into a function that runs its step."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from runtime.cluster.master import Master, Registration
from runtime.deadline import Deadline
from runtime.errors import ConfigError, GraphError
from runtime.execution.compile import compile_partition
from runtime.execution.executor import Executor
from runtime.execution.resources import Resources
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.optimize import optimise
from runtime.graph.partition import Partition, partition
from runtime.graph.placement import place

Step = Callable[[list[np.ndarray], Deadline], list[np.ndarray]]
LOCAL = "/job:local/task:0"


class Runner(Protocol):
    """``resources``: the variables, where they are in this process."""

    resources: Resources

    def prepare(self, outputs: Sequence[Output], targets: Sequence[Node], feeds: Sequence[Node]) -> Step:
        """A function that takes the feeds' arrays and gives the outputs'. Any thread; one step at a time."""

    def close(self) -> None: ...


class LocalRunner:
    """Everything in this process, as one task, whatever devices nodes name."""

    def __init__(self, graph: Graph, threads: int | None) -> None:
        self.resources = Resources()
        self._graph = graph
        self._threads = threads or os.cpu_count() or 1
        self._steps = itertools.count(1)
        self._executors: list[Executor] = []

    def prepare(self, outputs: Sequence[Output], targets: Sequence[Node], feeds: Sequence[Node]) -> Step:
        rewrite = optimise(self._graph, outputs, targets, feeds)
        outputs, targets = [rewrite.outputs[value] for value in outputs], [rewrite.nodes[node] for node in targets]
        parts = partition(rewrite.graph, dict.fromkeys(rewrite.graph.nodes, LOCAL), outputs, targets)
        part = parts.get(LOCAL) or Partition(LOCAL)
        check_fed(parts, feeds)
        executor = compile_partition(
            part.graph,
            [part.fetches[value.name] for value in outputs],
            resources=self.resources,
            threads=self._threads,
        )
        self._executors.append(executor)
        names = [node.name for node in feeds]
        guard, steps = threading.Lock(), self._steps

        def step(values: list[np.ndarray], deadline: Deadline) -> list[np.ndarray]:
            with guard:
                return executor.run(next(steps), None, dict(zip(names, values)), deadline)

        return step

    def close(self) -> None:
        """Free the executors' memory."""
        for executor in self._executors:
            executor.close()


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

    def close(self) -> None:
        """Registrations are the master's to drop."""


def check_fed(parts: dict[str, Partition], feeds: Sequence[Node]) -> None:
    """GraphError unless exactly the placeholders are fed that the step reads."""
    read = {name for part in parts.values() for name in part.feeds}
    given = {node.name for node in feeds}
    if read - given:
        raise GraphError(f"placeholders must be fed and were not: {', '.join(sorted(read - given))}")
    if given - read:
        raise GraphError(f"fed, but not read by what is fetched: {', '.join(sorted(given - read))}")
