"""Partition: one graph a device, with a Send and a Recv for every cut edge.

A cut edge is sent once to each device and shared by all its readers there. Control edges cross as empty messages, one for
each set of nodes that something on another device waits for. Small constants are not sent but repeated.

The order of the nodes in a partition's graph is also a proposal of priorities: a tensor is sent where it is made, a
variable where its first reader needs it, and so pulls come in the order of the forward pass.

Variables are shared memory, so reads and writes of one in a step must not race: this module puts them, by control edges, into
the order in which the nodes were added to the whole graph.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import GraphError
from runtime.execution.rendezvous import Edge
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.state_ops import Variable
from runtime.graph.transfer_ops import CONTROL_SPEC, Recv, Send, edge_of
from runtime.tensor import TensorSpec

REPEATED_BYTES = 4096  # a constant of up to so many bytes is cheaper to have twice than to send each step


@dataclass(slots=True)
class Partition:
    """What one device runs of a step: all nodes of ``graph``, no more.

    ``fetches`` maps names of fetched outputs (``node:index``, of the whole graph) to outputs here, ``feeds`` names of
    placeholders to nodes here. ``sends`` and ``recvs`` are the cut edges that begin and end here, in the graph's order.
    """

    device: str
    graph: Graph = field(default_factory=Graph)
    fetches: dict[str, Output] = field(default_factory=dict)
    feeds: dict[str, Node] = field(default_factory=dict)
    sends: list[Edge] = field(default_factory=list)
    recvs: list[Edge] = field(default_factory=list)

    @classmethod
    def of(cls, device: str, graph: Graph, fetches: Iterable[str]) -> Partition:
        """A partition whose graph came from elsewhere. GraphError if it is no partition of ``device``."""
        found = cls(device, graph, {name: graph.output(name) for name in fetches})
        for node in graph.nodes:
            if node.device != device:
                raise GraphError(f"node {node.name} is on {node.device or 'no device'}, not on {device}")
            found.note(node)
        ids = [edge.id for edge in (*found.sends, *found.recvs)]
        if len(ids) != len(set(ids)):
            raise GraphError(f"the partition of {device} has two ends of one edge")
        return found

    def note(self, node: Node) -> None:
        """Enter a node of ``graph`` into the tables."""
        if node.op.name == "Placeholder":
            self.feeds[node.name] = node
        elif node.op is Send:
            self.sends.append(self._own(edge_of(node), "src"))
        elif node.op is Recv:
            self.recvs.append(self._own(edge_of(node), "dst"))

    def _own(self, edge: Edge, end: str) -> Edge:
        if getattr(edge, end) != self.device or edge.src == edge.dst:
            raise GraphError(f"edge {edge.id} from {edge.src} to {edge.dst} does not end at {self.device}")
        return edge


def check_feeds(feeds: Iterable[Output]) -> list[Node]:
    """The placeholders that are fed; GraphError names the first that is none."""
    nodes = []
    for value in feeds:
        if value.node.op.name != "Placeholder":
            raise GraphError(f"{value.name} is the output of {value.node.op.name}; only a placeholder can be fed")
        nodes.append(value.node)
    return nodes


def ancestors(roots: Iterable[Node]) -> set[Node]:
    """All nodes that must run for ``roots`` to run, themselves included."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [value.node for value in node.inputs]
            stack += node.control
    return found


def partition(
    graph: Graph,
    placement: Mapping[Node, str],
    fetches: Sequence[Output] = (),
    targets: Sequence[Node] = (),
    first_edge: int = 0,
) -> dict[str, Partition]:
    """Cut what ``fetches`` and ``targets`` need into one partition a device, of those that have nodes.

    Edge ids count from ``first_edge``. The result depends on the arguments alone, so every process comes to the same one.
    A NoOp among the targets is replaced by what it waits for, which saves its control edges.
    """
    for wanted in [*(value.node for value in fetches), *targets]:
        if wanted.graph is not graph:
            raise GraphError(f"{wanted.name} belongs to another graph and cannot be fetched from this one")
    return _Cutter(graph, placement, first_edge).run(fetches, targets)


Access = tuple[str, str, str]  # device, container and name of a variable


@dataclass(slots=True)
class _Item:
    """A node to be added to a partition: ``key`` is its place in the order, ``node`` the original, ``edge`` a Send's or Recv's."""

    key: tuple[int, int, int]
    node: Node | None = None
    edge: Edge | None = None
    value: Output | None = None
    waits: list[Node | _Item] = field(default_factory=list)
    made: Node | None = None


class _Cutter:
    def __init__(self, graph: Graph, placement: Mapping[Node, str], first_edge: int) -> None:
        self._graph = graph
        self._placement = placement
        self._next_edge = first_edge
        self._items: dict[str, list[_Item]] = {}
        self._own: dict[Node, _Item] = {}
        self._repeated: dict[tuple[Node, str], _Item] = {}
        self._received: dict[tuple[Output, str, int], _Item] = {}
        self._signals: dict[tuple[tuple[Node, ...], str], _Item] = {}
        self._live: dict[Output, tuple[Access, int | None]] = {}
        self._writes: dict[Access, list[int]] = {}
        self._inputs: dict[tuple[Node, int], _Item] = {}

    def run(self, fetches: Sequence[Output], targets: Sequence[Node]) -> dict[str, Partition]:
        roots = [value.node for value in fetches]
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node.op.name == "NoOp":
                stack += node.control
            else:
                roots.append(node)
        needed = sorted(ancestors(roots), key=lambda node: node.index)
        for node in needed:
            if node not in self._placement:
                raise GraphError(f"node {node.name} ({node.op.name}) has no place")
        fetched = {value.node for value in fetches}
        self._find_variables(needed)
        for node in needed:
            self._own[node] = _Item((node.index, 1, 0), node)
        for node in needed:
            self._cut(node)
        repeated = {node for node, _ in self._repeated}
        used = {
            value.node for node in needed for value in node.inputs if self._device(value.node) == self._device(node)
        }
        for node in needed:
            # A repeated constant stays at its own place only if somebody there wants it.
            if node not in repeated or node in used or node in fetched:
                self._items.setdefault(self._device(node), []).append(self._own[node])
        return self._build(fetches)

    def _device(self, node: Node) -> str:
        return self._placement[node]

    # Variables: who reads and writes them, in which order

    def _find_variables(self, needed: Sequence[Node]) -> None:
        for node in needed:
            if node.op is Variable:
                access = (self._device(node), node.attrs.get("container", ""), node.attrs["variable"])
                self._live[node.out] = (access, None)
            elif (found := self._live.get(node.inputs[0]) if node.op.alias else None) and found[0][0] == self._device(
                node
            ):
                access, since = found
                # An alias that changes nothing stands for the value at its own place; the executor copies where it must.
                fixed = None if node.op.mutates else node.index if since is None else since
                self._live[Output(node, 0)] = (access, fixed)
            for index in node.op.mutates:
                live = self._live.get(node.inputs[index])
                if live is None:
                    raise GraphError(
                        f"node {node.name} ({node.op.name}) changes {node.inputs[index].name}, no variable"
                    )
                if live[0][0] != self._device(node):
                    raise GraphError(
                        f"node {node.name} on {self._device(node)} changes variable {live[0][2]} on {live[0][0]}; "
                        f"colocate them"
                    )
                writes = self._writes.setdefault(live[0], [])
                if not writes or writes[-1] != node.index:
                    writes.append(node.index)

    def _order_access(self, item: _Item, value: Output, at: int) -> None:
        """``item`` reads ``value`` beside its variable at place ``at``: after earlier writes, and later ones after it."""
        live = self._live.get(value)
        writes = self._writes.get(live[0]) if live is not None else None
        if live is None or not writes:
            return
        since = at if live[1] is None else live[1]
        before = bisect.bisect_left(writes, since)
        if before:
            item.waits.append(self._graph.nodes[writes[before - 1]])
        after = bisect.bisect_right(writes, since)
        if after < len(writes) and item.key < (writes[after], 1, 0):
            self._own[self._graph.nodes[writes[after]]].waits.append(item)

    def _version(self, value: Output, at: int) -> int:
        """How many writes of its variable precede what a reader at place ``at`` sees; 0 for what is no variable."""
        live = self._live.get(value)
        if live is None or live[1] is not None:
            return 0
        return bisect.bisect_left(self._writes.get(live[0], []), at)

    # Cutting

    def _cut(self, node: Node) -> None:
        item, device = self._own[node], self._device(node)
        for index, value in enumerate(node.inputs):
            if self._device(value.node) == device:
                self._order_access(item, value, node.index)
            elif _repeatable(value.node):
                self._inputs[node, index] = self._repeat(value.node, device, node.index)
            else:
                self._inputs[node, index] = self._receive(value, device, node.index)
        elsewhere: dict[str, list[Node]] = {}
        for before in node.control:
            if self._device(before) == device:
                item.waits.append(before)
            elif not _repeatable(before):
                elsewhere.setdefault(self._device(before), []).append(before)
        for group in elsewhere.values():
            group.sort(key=lambda source: source.index)
            item.waits.append(self._signal(tuple(group), device, node.index))

    def _repeat(self, node: Node, device: str, at: int) -> _Item:
        item = self._repeated.get((node, device))
        if item is None:
            item = self._repeated[node, device] = _Item((at, -1, node.index), node)
            self._items.setdefault(device, []).append(item)
        return item

    def _receive(self, value: Output, device: str, at: int) -> _Item:
        version = self._version(value, at)
        item = self._received.get((value, device, version))
        if item is None:
            src = self._device(value.node)
            name = f"{value.name}@{version}" if version else value.name
            edge = self._edge(name, src, device, value.spec)
            live = self._live.get(value)
            key = (at, 0, edge.id) if live is not None and live[1] is None else (value.node.index, 2, edge.id)
            send = _Item(key, edge=edge, value=value)
            self._order_access(send, value, at)
            item = self._received[value, device, version] = self._ends(send, edge, at)
        return item

    def _signal(self, sources: tuple[Node, ...], device: str, at: int) -> _Item:
        item = self._signals.get((sources, device))
        if item is None:
            src = self._device(sources[0])
            last = sources[-1]
            name = "^" + last.name + (f"+{len(sources) - 1}" if len(sources) > 1 else "")
            edge = self._edge(name, src, device, CONTROL_SPEC)
            send = _Item((last.index, 2, edge.id), edge=edge, waits=list(sources))
            item = self._signals[sources, device] = self._ends(send, edge, at)
        return item

    def _ends(self, send: _Item, edge: Edge, at: int) -> _Item:
        recv = _Item((at, 0, edge.id), edge=edge)
        self._items.setdefault(edge.src, []).append(send)
        self._items.setdefault(edge.dst, []).append(recv)
        return recv

    def _edge(self, name: str, src: str, dst: str, spec: TensorSpec) -> Edge:
        edge = Edge(self._next_edge, name, src, dst, spec)
        self._next_edge += 1
        return edge

    # Building

    def _build(self, fetches: Sequence[Output]) -> dict[str, Partition]:
        parts: dict[str, Partition] = {}
        for device in sorted(self._items):
            part = parts[device] = Partition(device)
            for item in sorted(self._items[device], key=lambda item: item.key):
                item.made = self._add(part.graph, item, device)
                part.note(item.made)
        for value in fetches:
            made = self._own[value.node].made
            assert made is not None
            parts[self._device(value.node)].fetches[value.name] = Output(made, value.index)
        return parts

    def _add(self, graph: Graph, item: _Item, device: str) -> Node:
        control = [made for made in (self._made(wait) for wait in item.waits) if made is not None]
        if item.node is not None:
            node = item.node
            inputs = [self._input(node, index) for index in range(len(node.inputs))]
            name = node.name
            return graph.add(node.op.name, *inputs, name=name, device=device, control=control, **node.attrs)
        edge = item.edge
        assert edge is not None
        ends: dict[str, Any] = {"edge": edge.id, "tensor": edge.tensor, "src": edge.src, "dst": edge.dst}
        if device == edge.dst:
            name = self._end_name("recv", edge)
            ends.update(shape=edge.spec.shape, dtype=edge.spec.dtype)
            return graph.add("Recv", name=name, device=device, control=control, **ends)
        name = self._end_name("send", edge)
        sent = [] if item.value is None else [Output(self._node(item.value.node), item.value.index)]
        return graph.add("Send", *sent, name=name, device=device, control=control, **ends)

    def _end_name(self, kind: str, edge: Edge) -> str:
        name = f".{kind}/{edge.id}"
        while name in self._graph:
            name += "_"
        return name

    def _input(self, node: Node, index: int) -> Output:
        value = node.inputs[index]
        item = self._inputs.get((node, index))
        if item is None:
            return Output(self._node(value.node), value.index)
        assert item.made is not None
        return Output(item.made, value.index if item.node is not None else 0)

    def _node(self, node: Node) -> Node:
        made = self._own[node].made
        assert made is not None
        return made

    def _made(self, wait: Node | _Item) -> Node | None:
        return (self._own[wait] if isinstance(wait, Node) else wait).made


def _repeatable(node: Node) -> bool:
    return (
        node.op.resident
        and not node.op.stateful
        and not node.control
        and sum(spec.nbytes for spec in node.specs) <= REPEATED_BYTES
    )
