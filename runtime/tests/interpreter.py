"""A reference interpreter of graphs: one node after the other, every output in fresh memory, nothing planned.

What the executor, the optimiser and the partition do is right if it gives the same bits as this.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.execution.resources import Resources
from runtime.future import Future
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.ops import KernelContext
from runtime.graph.partition import Partition
from runtime.graph.transfer_ops import edge_of

POISON = 0xDB


class Run:
    """One step of one graph on one device. ``wire`` carries the cut edges' tensors by edge id."""

    def __init__(
        self,
        graph: Graph,
        feeds: Mapping[str, Any],
        resources: Resources | None = None,
        wire: dict[int, np.ndarray] | None = None,
        step: int = 1,
    ) -> None:
        self.values: dict[Output, np.ndarray] = {}
        self.left = list(graph.nodes)
        self._feeds = feeds
        self._resources = resources if resources is not None else Resources()
        self._wire = wire if wire is not None else {}
        self._step = SimpleNamespace(id=step, deadline=Deadline.after(10))
        self._done: set[Node] = set()
        self._waiting: dict[Node, Future] = {}

    def ready(self) -> list[Node]:
        """Nodes that could run now."""
        for node, future in list(self._waiting.items()):
            if future.done():
                future.result(self._step.deadline)
                del self._waiting[node]
                self._done.add(node)
        return [
            node
            for node in self.left
            if all(value.node in self._done for value in node.inputs)
            and all(before in self._done for before in node.control)
            and (node.op.name != "Recv" or edge_of(node).id in self._wire)
        ]

    @property
    def over(self) -> bool:
        return not self.left and not self._waiting

    def step(self, node: Node) -> None:
        self.left.remove(node)
        inputs = [self.values[value] for value in node.inputs]
        if node.op.name == "Send":
            edge = edge_of(node)
            assert edge.id not in self._wire, f"edge {edge.id} was sent twice"
            self._wire[edge.id] = inputs[0].copy() if inputs else np.empty(edge.spec.shape, edge.spec.dtype)
        elif node.op.name == "Recv":
            self.values[node.out] = self._wire[edge_of(node).id]
        elif node.op.name == "Placeholder":
            self.values[node.out] = np.array(self._feeds[node.name], node.specs[0].dtype)
            assert self.values[node.out].shape == node.specs[0].shape
        elif node.op.resident:
            self.values.update(zip(node.outputs, node.op.memory(node.attrs, self._resources), strict=True))
        elif (future := self._kernel(node, inputs)) is not None:
            self._waiting[node] = future
            return
        self._done.add(node)

    def _kernel(self, node: Node, inputs: list[np.ndarray]) -> Future | None:
        op = node.op
        if op.alias and op.mutates:
            outputs = [inputs[0]]
        elif op.alias:
            outputs = [inputs[0].reshape(node.specs[0].shape).copy()]
        else:
            outputs = [
                np.full(spec.nbytes, POISON, np.uint8).view(spec.dtype).reshape(spec.shape) for spec in node.specs
            ]
        nbytes = op.workspace([value.spec for value in node.inputs], node.attrs, 1)
        context = KernelContext(np.empty(nbytes, np.uint8), self._resources, 1, node.name, self._step)
        call = op.compile(inputs, outputs, node.attrs, context)
        self.values.update(zip(node.outputs, outputs, strict=True))
        answer = call() if call is not None else None
        return answer if op.asynchronous else None


def evaluate(
    graph: Graph,
    fetches: Sequence[Output],
    feeds: Mapping[str, Any] | None = None,
    resources: Resources | None = None,
    step: int = 1,
) -> list[np.ndarray]:
    """Run all nodes of ``graph`` in their order and return copies of ``fetches``."""
    run = Run(graph, feeds or {}, resources, step=step)
    for node in graph.nodes:
        assert node in run.ready(), f"{node} waits for what no step of this graph does"
        run.step(node)
    return [run.values[value].copy() for value in fetches]


def evaluate_partitions(
    parts: Mapping[str, Partition],
    feeds: Mapping[str, Any] | None = None,
    resources: Mapping[str, Resources] | None = None,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Run partitions side by side, in their nodes' order, or with a ``seed`` in a random order that their edges allow."""
    wire: dict[int, np.ndarray] = {}
    runs = {device: Run(part.graph, feeds or {}, (resources or {}).get(device), wire) for device, part in parts.items()}
    dice = random.Random(seed)
    while not all(run.over for run in runs.values()):
        choices = [(run, node) for run in runs.values() for node in run.ready()]
        if not choices:
            assert not any(run.left for run in runs.values()), [run.left for run in runs.values()]
            continue
        run, node = choices[0] if seed is None else dice.choice(choices)
        run.step(node)
    return {
        name: runs[device].values[value].copy()
        for device, part in parts.items()
        for name, value in part.fetches.items()
    }
