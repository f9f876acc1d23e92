"""Graph: append-only named nodes on TensorFlow-style devices, shapes inferred as they are added."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from runtime.errors import GraphError
from runtime.graph.ops import Attrs, Op, normal_attrs, op_class
from runtime.tensor import TensorSpec

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
_DEVICE = re.compile(r"(/job:[A-Za-z][A-Za-z0-9_-]*/task:\d+)?")
_current = threading.local()


class Node:
    """One operation in a graph. Made by ``Graph.add`` only, never changed afterwards.

    ``device`` is a task name as ``/job:ps/task:0``, or "" where placement decides. ``control`` nodes run before this one.
    ``colocate`` names the node (of the same graph) on whose device this one must be, or is "". ``index`` is the position in
    ``graph.nodes``; all inputs and control inputs have smaller ones.
    """

    __slots__ = ("attrs", "colocate", "control", "device", "graph", "index", "inputs", "name", "op", "specs")

    def __init__(
        self,
        graph: Graph,
        index: int,
        name: str,
        op: type[Op],
        inputs: tuple[Output, ...],
        control: tuple[Node, ...],
        device: str,
        colocate: str,
        attrs: Attrs,
        specs: tuple[TensorSpec, ...],
    ) -> None:
        self.graph = graph
        self.index = index
        self.name = name
        self.op = op
        self.inputs = inputs
        self.control = control
        self.device = device
        self.colocate = colocate
        self.attrs = attrs
        self.specs = specs

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(Output(self, index) for index in range(len(self.specs)))

    @property
    def out(self) -> Output:
        """The only output; GraphError if there is not exactly one."""
        if len(self.specs) != 1:
            raise GraphError(f"node {self.name} ({self.op.name}) has {len(self.specs)} outputs, not one")
        return Output(self, 0)

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name} -> {', '.join(map(str, self.specs)) or 'nothing'}>"


class Output:
    """One output of a node; what ops take as inputs and sessions fetch. Compares by node and index.

    ``+ - * / @`` and unary ``-`` build nodes; a number or array at the other side becomes a constant of this dtype.
    """

    __slots__ = ("index", "node")
    __array_ufunc__: ClassVar[None] = None  # numpy leaves `array + output` to __radd__

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.index = index

    @property
    def spec(self) -> TensorSpec:
        return self.node.specs[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self.spec.dtype

    @property
    def graph(self) -> Graph:
        return self.node.graph

    @property
    def name(self) -> str:
        """``node:index``, as TensorFlow names tensors."""
        return f"{self.node.name}:{self.index}"

    def __add__(self, other: Any) -> Output:
        return self._binary("Add", self, other)

    def __radd__(self, other: Any) -> Output:
        return self._binary("Add", other, self)

    def __sub__(self, other: Any) -> Output:
        return self._binary("Sub", self, other)

    def __rsub__(self, other: Any) -> Output:
        return self._binary("Sub", other, self)

    def __mul__(self, other: Any) -> Output:
        return self._binary("Mul", self, other)

    def __rmul__(self, other: Any) -> Output:
        return self._binary("Mul", other, self)

    def __truediv__(self, other: Any) -> Output:
        return self._binary("Div", self, other)

    def __rtruediv__(self, other: Any) -> Output:
        return self._binary("Div", other, self)

    def __matmul__(self, other: Any) -> Output:
        return self._binary("MatMul", self, other)

    def __rmatmul__(self, other: Any) -> Output:
        return self._binary("MatMul", other, self)

    def __neg__(self) -> Output:
        return self.graph.add("Neg", self).out

    def _binary(self, op: str, left: Any, right: Any) -> Output:
        return self.graph.add(op, self.graph.as_output(left, self.dtype), self.graph.as_output(right, self.dtype)).out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Output) and other.node is self.node and other.index == self.index

    def __hash__(self) -> int:
        return hash((id(self.node), self.index))

    def __repr__(self) -> str:
        return f"<Output {self.name} {self.spec}>"


class Graph:
    """Nodes in the order in which they were added, which is a topological one: a node takes only what exists already, so
    a cycle cannot be built. Not safe for building from several threads."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_name: dict[str, Node] = {}
        self._device: list[str] = [""]
        self._colocate: list[str] = [""]
        self._scope: list[str] = [""]
        self._control: list[tuple[Node, ...]] = [()]
        self._choosers: list[Callable[[TensorSpec], str] | None] = [None]
        self._name_counts: dict[str, int] = {}

    def add(
        self,
        op: str,
        *inputs: Output | Node,
        name: str | None = None,
        device: str | None = None,
        control: Sequence[Node | Output] = (),
        colocate: str | None = None,
        **attrs: Any,
    ) -> Node:
        """Append a node. Its shape is inferred now; ShapeError names the node and the shapes, GraphError what else cannot be.

        Without ``name`` one is made from the op's (``MatMul``, ``MatMul_1``); a given one must be free. ``device`` "" leaves the
        choice to placement; None takes the ``device`` block around. ``colocate`` None likewise takes that of the
        ``colocate_with`` block around. Attributes are those that the op states, with values that ``normal_attrs`` admits.
        """
        cls = op_class(op)
        if name is None:
            full = self._free_name(self.scoped_name(cls.name))
        else:
            full = self.scoped_name(name)
            if full in self._by_name:
                raise GraphError(f"node name {full!r} is taken by {self._by_name[full]!r}")
        if not _NAME.fullmatch(full):
            raise GraphError(f"node name {full!r} must match {_NAME.pattern}")
        where = self._device[-1] if device is None else _checked_device(device)
        if unknown := [key for key in attrs if key not in cls.attributes]:
            known = f"its attributes are {', '.join(cls.attributes)}" if cls.attributes else "it takes none"
            raise GraphError(f"node {full} ({cls.name}): no such attribute: {', '.join(map(repr, unknown))}; {known}")
        taken = tuple(self._own(full, value) for value in inputs)
        before = (*self._control[-1], *_nodes(control))
        for node in before:
            if node.graph is not self:
                raise GraphError(f"node {full}: control input {node.name} belongs to another graph")
        try:
            values = normal_attrs(attrs)
            specs = tuple(cls.infer([value.spec for value in taken], values))
        except GraphError as error:
            shapes = ", ".join(f"{value.name} {value.spec}" for value in taken) or "no inputs"
            raise type(error)(f"node {full} ({cls.name}) with inputs {shapes}: {error}") from None
        except KeyError as error:
            raise GraphError(f"node {full} ({cls.name}) lacks the attribute {error}") from None
        except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            # An op's shape rule trusts the kinds of its attributes; wrong ones break it in all these ways.
            raise GraphError(f"node {full} ({cls.name}) has attributes that its op cannot use: {error}") from error
        node = Node(
            self,
            len(self.nodes),
            full,
            cls,
            taken,
            tuple(dict.fromkeys(before)),
            where,
            self._colocate[-1] if colocate is None else colocate,
            values,
            specs,
        )
        self.nodes.append(node)
        self._by_name[full] = node
        return node

    def node(self, name: str) -> Node:
        """The node called ``name``; GraphError with near matches on a miss."""
        node = self._by_name.get(name)
        if node is None:
            near = difflib.get_close_matches(name, self._by_name, 3)
            raise GraphError(f"no node is called {name!r}" + (f"; near: {', '.join(near)}" if near else ""))
        return node

    def output(self, name: str) -> Output:
        """The output called ``node:index`` or, for a node with one output, ``node``."""
        stem, _, index = name.partition(":")
        node = self.node(stem)
        if not index:
            return node.out
        if not index.isdigit() or int(index) >= len(node.specs):
            raise GraphError(f"node {stem} has {len(node.specs)} outputs, no output {index!r}")
        return Output(node, int(index))

    def as_output(self, value: Any, dtype: Any = None) -> Output:
        """An output as it is, a node's only output, and anything else as a constant (of ``dtype`` if given)."""
        if isinstance(value, Output):
            return value
        if isinstance(value, Node):
            return value.out
        return self.add("Constant", value=np.array(value, dtype=dtype)).out

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self.nodes)

    @contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Make this the graph of the functions that build nodes without naming one (those that take no input)."""
        before = getattr(_current, "graph", None)
        _current.graph = self
        try:
            yield self
        finally:
            _current.graph = before

    @contextmanager
    def device(self, device: str) -> Iterator[None]:
        """Nodes added inside are placed on ``device``, for example ``/job:worker/task:1``."""
        self._device.append(_checked_device(device))
        try:
            yield
        finally:
            self._device.pop()

    @contextmanager
    def colocate_with(self, node: Node | Output) -> Iterator[None]:
        """Nodes added inside are placed where ``node`` is, whatever placement decides for it."""
        (node,) = _nodes([node])
        self._colocate.append(node.colocate or node.name)
        self._device.append(node.device)
        try:
            yield
        finally:
            self._device.pop()
            self._colocate.pop()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names added inside get the prefix ``name/``; scopes nest."""
        self._scope.append(self.scoped_name(name))
        try:
            yield
        finally:
            self._scope.pop()

    @contextmanager
    def control_dependencies(self, nodes: Sequence[Node | Output]) -> Iterator[None]:
        """Nodes added inside run after ``nodes``."""
        self._control.append((*self._control[-1], *_nodes(nodes)))
        try:
            yield
        finally:
            self._control.pop()

    @contextmanager
    def variable_devices(self, choose: Callable[[TensorSpec], str]) -> Iterator[None]:
        """Variables added inside are placed on ``choose(spec)``, whatever device block is around (see ``placement``)."""
        self._choosers.append(choose)
        try:
            yield
        finally:
            self._choosers.pop()

    def variable_device(self, spec: TensorSpec) -> str:
        """Where a new variable goes: what the innermost ``variable_devices`` says, or the ``device`` block around."""
        choose = self._choosers[-1]
        return self._device[-1] if choose is None else _checked_device(choose(spec))

    @contextmanager
    def root_scope(self) -> Iterator[None]:
        """Names added inside are taken as they are, whatever scopes are around."""
        self._scope.append("")
        try:
            yield
        finally:
            self._scope.pop()

    def scoped_name(self, name: str) -> str:
        """The full name that ``name`` has in the scopes around."""
        scope = self._scope[-1]
        return f"{scope}/{name}" if scope else name

    def _free_name(self, stem: str) -> str:
        # Counting on from the last one keeps building linear: a thousand adds would look up half a million names.
        name, count = stem, self._name_counts.get(stem, 0)
        while name in self._by_name:
            count += 1
            name = f"{stem}_{count}"
        self._name_counts[stem] = count
        return name

    def _own(self, consumer: str, value: Output | Node) -> Output:
        if isinstance(value, Node):
            value = value.out
        if not isinstance(value, Output):
            raise GraphError(f"node {consumer}: input {value!r} is not a graph output; wrap numbers with constant()")
        if value.node.graph is not self:
            raise GraphError(f"node {consumer}: input {value.name} belongs to another graph")
        return value


def current_graph() -> Graph:
    """The graph of the innermost ``as_default`` block of this thread."""
    graph = getattr(_current, "graph", None)
    if graph is None:
        raise GraphError("no graph is current; build inside `with graph.as_default():`")
    assert isinstance(graph, Graph)
    return graph


def _nodes(values: Sequence[Node | Output]) -> tuple[Node, ...]:
    """Nodes as they are, outputs' nodes; GraphError for anything else."""
    nodes = tuple(value.node if isinstance(value, Output) else value for value in values)
    for node in nodes:
        if not isinstance(node, Node):
            raise GraphError(f"{node!r} is neither a node nor an output of a graph")
    return nodes


def _checked_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise GraphError(f"device {device!r} is not of the form /job:NAME/task:N")
    return device
