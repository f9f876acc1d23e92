"""From the nodes of a partition to the one order in which its instructions are listed.

The order serves three aims, in this sequence: what waits for few arrivals comes before what waits for many, so that work
at hand hides transfers; a tensor that a peer waits for is made and sent before anything else that could run; updates of
variables run as soon as they may, so that a gradient's memory is soon free. Ties keep the order of the graph.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.errors import GraphError
from runtime.execution.rendezvous import Edge
from runtime.graph.array_ops import Placeholder
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.state_ops import Variable
from runtime.graph.transfer_ops import Recv, Send
from runtime.memory.plan import Instruction, Place, Tensor

# Nanoseconds a FLOP and a byte, to compare distances with; their absolute values do not matter.
_FLOP_NS, _BYTE_NS = 0.005, 0.1


class Kind(enum.Enum):
    """What an instruction does when its turn comes. The first four have no call: their memory is filled by others."""

    FEED = "feed"
    RESIDENT = "resident"
    RECV = "recv"
    ALIAS = "alias"
    KERNEL = "kernel"
    COPY = "copy"
    SEND = "send"
    CONSUMED = "consumed"


class Event(enum.Enum):
    """What an instruction may have to wait for, beside other instructions."""

    ARRIVAL = "arrival"  # of a Recv's tensor
    FINISH = "finish"  # of an asynchronous kernel
    RELEASE = "release"  # of memory that a Send of this step still reads


class Work:
    """A node, or a copy or release that its memory needs, before and after it has its place in the order."""

    __slots__ = ("deps", "edge", "event", "index", "instruction", "kind", "name", "node", "reads", "released", "writes")

    def __init__(self, index: int, kind: Kind, name: str, node: Node | None = None, edge: Edge | None = None) -> None:
        self.index = index
        self.kind = kind
        self.name = name
        self.node = node
        self.edge = edge
        self.deps: set[Work] = set()
        self.released: set[Work] = set()  # Sends whose memory must be free before this may run
        self.event: int | None = None  # that its own end is: index into Schedule.events
        self.reads: list[Tensor] = []
        self.writes: list[Tensor] = []
        self.instruction: Instruction | None = None

    def __repr__(self) -> str:
        return f"<Work {self.kind.value} {self.name}>"


@dataclass(slots=True)
class Schedule:
    """The order, the events that its works wait for (kind and the work that causes each), and the fetched tensors."""

    order: list[Work]
    events: list[tuple[Event, Work]]
    fetches: list[Tensor]
    kept_recvs: list[Work] = field(default_factory=list)


def schedule(graph: Graph, fetches: Sequence[Output], edges: Mapping[int, Edge], threads: int = 1) -> Schedule:
    """Order all nodes of ``graph``. GraphError if an edge is unknown or the nodes' order would be circular."""
    return _Scheduler(graph, fetches, edges, threads).run()


class _Scheduler:
    def __init__(self, graph: Graph, fetches: Sequence[Output], edges: Mapping[int, Edge], threads: int) -> None:
        self._graph = graph
        self._fetches = fetches
        self._edges = edges
        self._threads = threads
        self._works: list[Work] = []
        self._tensors: dict[Output, Tensor] = {}
        self._work_of: dict[int, Work] = {}
        self._mutators: dict[Tensor, list[Work]] = {}
        self._variables: dict[tuple[str, str], Work] = {}
        self._events: list[tuple[Event, Work]] = []

    def run(self) -> Schedule:
        copied = self._aliases_to_copy()
        for node in self._graph.nodes:
            self._add(node, node.index in copied)
        fetched = [self._fetch(output) for output in self._fetches]
        self._sends_before_mutations()
        kept = self._releases_of_received()
        for work in self._works:
            if work.kind is Kind.RECV:
                self._event(Event.ARRIVAL, work)
            elif work.node is not None and work.kind is Kind.KERNEL and work.node.op.asynchronous:
                self._event(Event.FINISH, work)
        order = self._order(self._topological())
        return Schedule(order, self._events, fetched, kept)

    def _event(self, event: Event, work: Work) -> None:
        work.event = len(self._events)
        self._events.append((event, work))

    def _new(self, kind: Kind, name: str, node: Node | None = None, edge: Edge | None = None) -> Work:
        work = Work(len(self._works), kind, name, node, edge)
        self._works.append(work)
        return work

    def _aliases_to_copy(self) -> set[int]:
        """Aliases of a variable that must keep its old value: one of their readers comes after an update that they precede."""
        root: dict[Output, object] = {}  # a variable's memory, by container and name
        last_reader: dict[Output, int] = {}
        mutations: dict[object, list[int]] = {}
        for node in self._graph.nodes:
            for index, value in enumerate(node.inputs):
                if index in node.op.mutates and value in root:
                    mutations.setdefault(root[value], []).append(node.index)
            for output in node.outputs:
                if node.op is Variable:
                    root[output] = (node.attrs.get("container", ""), node.attrs["variable"])
                elif node.op.alias and output.index == 0 and node.inputs[0] in root:
                    root[output] = root[node.inputs[0]]
        if not mutations:
            return set()
        for node in reversed(self._graph.nodes):
            own = last_reader.get(Output(node, 0), -1) if node.op.alias and node.specs else -1
            for value in node.inputs:
                last_reader[value] = max(last_reader.get(value, -1), node.index, own)
        copied = set()
        for output, variable in root.items():
            node = output.node
            if node.op is Variable or node.op.mutates:
                continue
            end = last_reader.get(output, -1)
            if any(node.index < mutation < end for mutation in mutations.get(variable, ())):
                copied.add(node.index)
        return copied

    def _add(self, node: Node, copied: bool) -> None:
        edge = self._edge(node) if node.op in (Send, Recv) else None
        kind = Kind.KERNEL
        if node.op is Placeholder:
            kind = Kind.FEED
        elif node.op is Recv:
            kind = Kind.RECV
        elif node.op is Send:
            kind = Kind.SEND
        elif node.op.resident:
            kind = Kind.RESIDENT
        elif node.op.alias:
            kind = Kind.COPY if copied else Kind.KERNEL if node.op.mutates else Kind.ALIAS
        work = self._new(kind, node.name, node, edge)
        self._work_of[node.index] = work
        work.deps.update(self._work_of[value.node.index] for value in node.inputs)
        work.deps.update(self._work_of[before.index] for before in node.control)
        work.reads = [self._tensors[value] for value in node.inputs]
        place = Place.BLOCK
        if kind is Kind.RECV:
            place = Place.RECV
        elif kind is Kind.RESIDENT:
            place = Place.VARIABLE if node.op.stateful else Place.CONSTANT
        for output in node.outputs:
            alias = work.reads[0] if node.op.alias and not copied and output.index == 0 else None
            if node.op is Variable:
                alias = self._same_variable(work, node)
            tensor = Tensor(output.name, output.spec, place, alias)
            self._tensors[output] = tensor
            work.writes.append(tensor)
        for index in node.op.mutates:
            target = work.reads[index].root
            if target.place is not Place.VARIABLE:
                raise GraphError(f"node {node.name} ({node.op.name}) changes {target.name}, which is no variable")
            self._mutators.setdefault(target, []).append(work)
        if kind is Kind.SEND and work.reads and work.reads[0].root.place is Place.BLOCK:
            work.reads[0].root.place = Place.SEND

    def _same_variable(self, work: Work, node: Node) -> Tensor | None:
        """The tensor of an earlier node for the same variable: their memory is one."""
        first = self._variables.setdefault((node.attrs.get("container", ""), node.attrs["variable"]), work)
        if first is work:
            return None
        work.deps.add(first)
        return first.writes[0]

    def _edge(self, node: Node) -> Edge:
        edge = self._edges.get(node.attrs["edge"])
        if edge is None:
            raise GraphError(f"node {node.name} ({node.op.name}) names edge {node.attrs['edge']}, which is unknown")
        return edge

    def _fetch(self, output: Output) -> Tensor:
        """The tensor to read when the step is over; a copy of it if a variable is changed after the node that is fetched."""
        tensor = self._tensors[output]
        own = self._work_of[output.node.index]
        later = [work for work in self._mutators.get(tensor.root, ()) if work.index > own.index]
        if not later:
            tensor.keep = True
            return tensor
        copy = self._new(Kind.COPY, f"{output.name} fetched")
        copy.deps.add(own)
        copy.reads = [tensor]
        copy.writes = [Tensor(copy.name, output.spec, keep=True)]
        for work in later:
            work.deps.add(copy)
        return copy.writes[0]

    def _sends_before_mutations(self) -> None:
        """A Send of a variable reads its memory until the peer has it, so an update that does not precede it waits for that."""
        if not self._mutators:
            return
        readers: dict[Work, list[Work]] = {}
        for work in self._works:
            for before in work.deps:
                readers.setdefault(before, []).append(work)
        for send in self._works:
            if send.kind is not Kind.SEND or not send.reads:
                continue
            for mutator in self._mutators.get(send.reads[0].root, ()):
                if not _reaches(mutator, send, readers):
                    mutator.deps.add(send)
                    mutator.released.add(send)
                    readers.setdefault(send, []).append(mutator)
                    if send.event is None:
                        self._event(Event.RELEASE, send)

    def _releases_of_received(self) -> list[Work]:
        """After the last use of a received tensor its slot goes back to the sender; fetched ones are kept to the end."""
        users: dict[Tensor, list[Work]] = {}
        for work in self._works:
            for tensor in work.reads:
                if tensor.root.place is Place.RECV:
                    users.setdefault(tensor.root, []).append(work)
        kept = []
        fetched = {tensor.root for tensor in self._tensors.values() if tensor.keep}
        for work in [work for work in self._works if work.kind is Kind.RECV]:
            slot = work.writes[0]
            if slot in fetched:
                kept.append(work)
                continue
            consumed = self._new(Kind.CONSUMED, f"{work.name} consumed", edge=work.edge)
            consumed.deps.update((work, *users.get(slot, ())))
            consumed.reads = [slot]
        return kept

    def _topological(self) -> list[Work]:
        """All works, dependencies first, else in the order of the graph."""
        missing = {work: len(work.deps) for work in self._works}
        readers = self._readers()
        ready = [work.index for work in self._works if not missing[work]]
        heapq.heapify(ready)
        order = []
        while ready:
            work = self._works[heapq.heappop(ready)]
            order.append(work)
            for reader in readers.get(work, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, reader.index)
        if len(order) < len(self._works):
            stuck = next(work for work in self._works if missing[work])
            raise GraphError(f"{stuck.name} waits for itself: a variable's readers and its update need each other")
        return order

    def _readers(self) -> dict[Work, list[Work]]:
        readers: dict[Work, list[Work]] = {}
        for work in self._works:
            for before in work.deps:
                readers.setdefault(before, []).append(work)
        return readers

    def _order(self, works: list[Work]) -> list[Work]:
        readers = self._readers()
        waits: dict[Work, int] = {}
        until: dict[Work, int] = {}
        for work in works:
            events = 0
            for before in work.deps:
                events |= until[before]
            for send in work.released:
                assert send.event is not None
                events |= 1 << send.event
            waits[work] = events
            own = work.event if work.kind is not Kind.SEND else None
            until[work] = events if own is None else events | 1 << own
        to_send = self._distances(works, readers, lambda work: work.kind is Kind.SEND)
        to_update = self._distances(works, readers, lambda work: work.node is not None and bool(work.node.op.mutates))
        missing = {work: len(work.deps) for work in works}

        def key(work: Work) -> tuple[int, int, float, float, int]:
            bare = work.kind in (Kind.FEED, Kind.RESIDENT, Kind.RECV)
            now = 0.0 if work.kind is Kind.CONSUMED else to_send[work]
            return (0 if bare else 1, waits[work].bit_count(), now, to_update[work], work.index)

        ready = [key(work) for work in works if not missing[work]]
        heapq.heapify(ready)
        order = []
        while ready:
            work = self._works[heapq.heappop(ready)[-1]]
            order.append(work)
            work.instruction = self._instruction(work, waits[work], until[work])
            for reader in readers.get(work, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, key(reader))
        return order

    def _instruction(self, work: Work, waits: int, until: int) -> Instruction:
        node = work.node
        inplace: Sequence[tuple[int, int]] = ()
        workspace = 0
        if node is not None and work.kind is Kind.KERNEL:
            if not node.op.asynchronous:
                inplace = node.op.inplace
            workspace = node.op.workspace([value.spec for value in node.inputs], node.attrs, self._threads)
        return Instruction(
            work.name,
            work.reads,
            work.writes,
            inplace=inplace,
            waits=waits,
            until=until,
            workspace=workspace,
            before_step=work.kind is Kind.FEED,
        )

    @staticmethod
    def _distances(
        works: list[Work], readers: dict[Work, list[Work]], goal: Callable[[Work], bool]
    ) -> dict[Work, float]:
        """Estimated time from a work's end to the nearest goal's start; 0 for a goal, infinite without one."""
        distance: dict[Work, float] = {}
        for work in reversed(works):
            if goal(work):
                distance[work] = 0.0
                continue
            distance[work] = min(
                (distance[reader] + (0.0 if goal(reader) else _duration(reader)) for reader in readers.get(work, ())),
                default=math.inf,
            )
        return distance


def _duration(work: Work) -> float:
    node = work.node
    if node is None or work.kind is not Kind.KERNEL:
        return 0.0
    cost = node.op.cost([value.spec for value in node.inputs], node.specs, node.attrs)
    return cost.flops * _FLOP_NS + cost.nbytes * _BYTE_NS


def _reaches(start: Work, goal: Work, readers: Mapping[Work, Sequence[Work]]) -> bool:
    seen, stack = {start}, [start]
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader is goal:
                return True
            if reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return False
