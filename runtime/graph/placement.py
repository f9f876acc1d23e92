"""Placement: on which task each node runs.

A node goes where it was told to, with its colocation group; the rest goes to a default. Groups are found by union-find, as in
TensorFlow's placer. Parameters are spread over servers when they are created, by a policy given to
``Graph.variable_devices``, because every worker must come to the same answer without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import GraphError
from runtime.graph.graph import Graph, Node
from runtime.graph.ops import Cost
from runtime.graph.state_ops import variable_node
from runtime.tensor import TensorSpec


class RoundRobin:
    """One server after the other, whatever the variables' sizes (TensorFlow's default)."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = _checked(devices)
        self._next = 0

    def __call__(self, spec: TensorSpec) -> str:
        device = self._devices[self._next % len(self._devices)]
        self._next += 1
        return device


class GreedyByBytes:
    """The server with the fewest bytes of variables so far, the first of them if several have equally few."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._load = dict.fromkeys(_checked(devices), 0)

    def __call__(self, spec: TensorSpec) -> str:
        device = min(self._load, key=self._load.__getitem__)
        self._load[device] += spec.nbytes
        return device


def _checked(devices: Sequence[str]) -> list[str]:
    if not devices:
        raise GraphError("variables need at least one device to be placed on")
    return list(devices)


class _Groups:
    """Union-find over nodes, which remembers each group's device and the node that brought it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._parent = {node: node for node in nodes}
        self._device: dict[Node, tuple[str, Node]] = {node: (node.device, node) for node in nodes if node.device}

    def find(self, node: Node) -> Node:
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def join(self, a: Node, b: Node) -> None:
        first, second = self.find(a), self.find(b)
        if first is second:
            return
        mine, other = self._device.get(first), self._device.get(second)
        if mine and other and mine[0] != other[0]:
            raise GraphError(
                f"node {a.name} must be where node {b.name} is, but {mine[1].name} is on {mine[0]} and "
                f"{other[1].name} on {other[0]}"
            )
        self._parent[second] = first
        if other and not mine:
            self._device[first] = other

    def device(self, node: Node) -> str:
        found = self._device.get(self.find(node))
        return found[0] if found else ""


def place(graph: Graph, default: str = "") -> dict[Node, str]:
    """A device for every node. GraphError if a group is torn between two, or a node has none and there is no default."""
    groups = _Groups(graph.nodes)
    for node in graph.nodes:
        if node.colocate:
            groups.join(graph.node(node.colocate), node)
        for index in node.op.mutates:
            groups.join(variable_node(node.inputs[index]), node)
    placement = {}
    for node in graph.nodes:
        device = groups.device(node) or default
        if not device:
            raise GraphError(f"node {node.name} ({node.op.name}) has no device, and there is no default one")
        placement[node] = device
    return placement


def cost(graph: Graph, placement: dict[Node, str] | None = None) -> dict[str, Cost]:
    """What one step costs on each device, by the ops' own estimates: FLOPs, and bytes read and written.

    Without a placement nodes count under the device that they state, "" if none.
    """
    totals: dict[str, Cost] = {}
    for node in graph.nodes:
        device = node.device if placement is None else placement[node]
        own = node.op.cost([value.spec for value in node.inputs], node.specs, node.attrs)
        before = totals.get(device, Cost(0, 0))
        totals[device] = Cost(before.flops + own.flops, before.nbytes + own.nbytes)
    return totals
