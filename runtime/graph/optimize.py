"""Rewriting a graph before it is placed or cut: pruning, common subexpressions, constant folding.

All of them give a new graph and leave the old one as it is. Results stay the same bit for bit: nothing is reassociated,
and a folded constant is made by the very kernel that would have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import GraphError, VerbflowError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.ops import KernelContext
from runtime.graph.partition import ancestors

FOLDED_BYTES = 1 << 20  # a folded constant travels with the graph, so it must not be large


@dataclass(slots=True)
class Rewrite:
    """A new graph, and what became of each output and node of the old one that is still needed."""

    graph: Graph
    outputs: dict[Output, Output]
    nodes: dict[Node, Node]

    def then(self, later: Rewrite) -> Rewrite:
        """This rewrite followed by ``later``, which is of this one's graph."""
        return Rewrite(
            later.graph,
            {old: later.outputs[new] for old, new in self.outputs.items() if new in later.outputs},
            {old: later.nodes[new] for old, new in self.nodes.items() if new in later.nodes},
        )


def optimise(
    graph: Graph, fetches: Sequence[Output], targets: Sequence[Node] = (), keep: Sequence[Node] = ()
) -> Rewrite:
    """Only what ``fetches``, ``targets`` and ``keep`` (fed placeholders) need, each value computed once, constants folded.

    Devices, colocation and names are kept; where two nodes become one, it has the name of the first.
    """
    pruned = prune(graph, fetches, targets, keep)

    def now(rewrite: Rewrite) -> tuple[Graph, list[Output], list[Node], list[Node]]:
        return (
            rewrite.graph,
            [rewrite.outputs[value] for value in fetches],
            [rewrite.nodes[node] for node in targets],
            [rewrite.nodes[node] for node in keep],
        )

    folded = pruned.then(_Folder(pruned.graph).run())
    return folded.then(prune(*now(folded)))


def prune(graph: Graph, fetches: Sequence[Output], targets: Sequence[Node] = (), keep: Sequence[Node] = ()) -> Rewrite:
    """Only the nodes that ``fetches``, ``targets`` and ``keep`` need."""
    for node in [*(value.node for value in fetches), *targets, *keep]:
        if node.graph is not graph:
            raise GraphError(f"{node.name} belongs to another graph and cannot be fetched from this one")
    needed = ancestors([*(value.node for value in fetches), *targets, *keep])
    copy = GraphCopy()
    for node in graph.nodes:
        if node in needed:
            copy.add(node)
    return copy.rewrite


class GraphCopy:
    """A graph that grows from another's nodes."""

    def __init__(self) -> None:
        self.rewrite = Rewrite(Graph(), {}, {})
        # A group of colocated nodes is named after one of them; where that one is gone, the first that is left stands for it.
        self._groups: dict[str, str] = {}

    def add(self, node: Node, value: np.ndarray | None = None) -> Node:
        """Copy a node, as a constant if its ``value`` is known."""
        op, inputs, attrs = node.op.name, self.inputs(node), node.attrs
        if value is not None:
            op, inputs, attrs = "Constant", [], {"value": value}
        group = node.colocate or node.name
        head = self._groups.setdefault(group, node.name)
        made = self.rewrite.graph.add(
            op,
            *inputs,
            name=node.name,
            device=node.device,
            control=self.control(node),
            colocate="" if head == node.name else head,
            **attrs,
        )
        self.becomes(node, made)
        return made

    def becomes(self, node: Node, made: Node) -> None:
        self.rewrite.nodes[node] = made
        for before, after in zip(node.outputs, made.outputs, strict=True):
            self.rewrite.outputs[before] = after

    def inputs(self, node: Node) -> list[Output]:
        return [self.rewrite.outputs[value] for value in node.inputs]

    def control(self, node: Node) -> list[Node]:
        return [self.rewrite.nodes[before] for before in node.control]


class _Folder:
    """One pass that merges equal nodes and computes constant ones, over a pruned graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._copy = GraphCopy()
        self._seen: dict[Any, Node] = {}
        self._values: dict[Output, np.ndarray] = {}
        self._writes: dict[Output, int] = {}

    def run(self) -> Rewrite:
        for node in self._graph.nodes:
            self._visit(node)
        return self._copy.rewrite

    def _visit(self, node: Node) -> None:
        op = node.op
        for index in op.mutates:
            root = memory_of(node.inputs[index])
            self._writes[root] = self._writes.get(root, 0) + 1
        if op.stateful or op.asynchronous or op.mutates or not node.specs:
            self._copy.add(node)
            return
        value = self._fold(node)
        key = self._key(node, value)
        same = self._seen.get(key)
        if same is not None:
            self._copy.becomes(node, same)
        else:
            self._seen[key] = self._copy.add(node, value if not op.resident else None)
        if value is not None:
            self._values[node.out] = value

    def _key(self, node: Node, value: np.ndarray | None) -> Any:
        where = (node.device, node.colocate)
        control = frozenset(before.index for before in self._copy.control(node))
        if value is not None and not node.op.resident:
            return ("Constant", (), (("value", _hashable(value)),), control, *where)
        # What reads a variable's memory before and after a write are different expressions.
        versions = tuple(self._writes.get(memory_of(value), 0) for value in node.inputs)
        inputs = (self._copy.inputs(node), versions)
        attrs = tuple(sorted((key, _hashable(value)) for key, value in node.attrs.items() if value is not None))
        return (node.op.name, (tuple(inputs[0]), inputs[1]) if node.inputs else (), attrs, control, *where)

    def _fold(self, node: Node) -> np.ndarray | None:
        """The value of a node that has only constant inputs, if it is small; None otherwise."""
        if len(node.specs) != 1 or node.specs[0].nbytes > FOLDED_BYTES:
            return None
        if node.op.resident:
            return node.op.memory(node.attrs, None)[0]
        if not node.inputs or any(value not in self._values for value in node.inputs):
            return None
        return _evaluate(node, [self._values[value] for value in node.inputs])


def memory_of(value: Output) -> Output:
    """The output whose memory ``value`` is."""
    while value.node.op.alias and value.index == 0:
        value = value.node.inputs[0]
    return value


def _evaluate(node: Node, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    spec = node.specs[0]
    if node.op.alias:
        return inputs[0].reshape(spec.shape)
    out = np.empty(spec.shape, spec.dtype)
    workspace = np.empty(node.op.workspace([value.spec for value in node.inputs], node.attrs, 1), np.uint8)
    try:
        with np.errstate(all="ignore"):
            call = node.op.compile(inputs, [out], node.attrs, KernelContext(workspace, None, 1, node.name, None))
            if call is not None:
                call()
    except VerbflowError:
        return None  # as an index outside of its table: the step, not the rewriting, shall fail
    out.flags.writeable = False
    return out


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    # 0.0 equals -0.0 and 1 equals True, but they are different attributes.
    return (type(value).__name__, repr(value))
