"""From a partition to an Executor: memory is laid out, kernels are bound to it, and the order is cut into segments.

A segment is a run of instructions that wait for the same events. Segments run in their order unless one still waits;
then the next one that can runs first. Inside a segment there is nothing but calls without arguments.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import GraphError
from runtime.execution.executor import Executor
from runtime.execution.rendezvous import Edge
from runtime.execution.schedule import Event, Kind, Schedule, Work, schedule
from runtime.execution.segment import Arrival, Label, Segment
from runtime.execution.state import StepState
from runtime.future import Future
from runtime.graph.graph import Graph, Output
from runtime.graph.ops import Call, KernelContext
from runtime.graph.transfer_ops import Recv, Send, edge_of
from runtime.memory.arena import POISON, Arena, Block
from runtime.memory.plan import Buffer, MemoryPlan, Place, Tensor, plan_memory
from runtime.tensor import TensorSpec
from runtime.trace import Phase, Tracer


def compile_partition(
    graph: Graph,
    fetches: Sequence[Output] = (),
    *,
    edges: Sequence[Edge] | None = None,
    resources: Any = None,
    arena: Arena | None = None,
    threads: int = 1,
    tracer: Tracer | None = None,
    poison: bool = False,
) -> Executor:
    """Compile all nodes of ``graph`` (prune it before) into an Executor that returns ``fetches``.

    Tensors of cut edges get slots in ``arena``, or ordinary memory without one; ``edges`` are those that the caller has
    routes for (by default those that the Send and Recv nodes state). ``threads``: how many a kernel may use. ``poison``
    overwrites memory as soon as its content is used up, so that a use after that shows in the results.
    """
    return _Compiler(graph, fetches, edges, resources, arena, threads, tracer or Tracer(capacity=1), poison).run()


@dataclass(slots=True)
class _Cut:
    """A segment while it is being filled."""

    waits: int
    works: list[Work] = field(default_factory=list)
    events: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)


class _Compiler:
    def __init__(
        self,
        graph: Graph,
        fetches: Sequence[Output],
        edges: Sequence[Edge] | None,
        resources: Any,
        arena: Arena | None,
        threads: int,
        tracer: Tracer,
        poison: bool,
    ) -> None:
        self._graph = graph
        self._fetches = fetches
        if edges is None:
            edges = [edge_of(node) for node in graph.nodes if node.op in (Send, Recv)]
        self._edges = {edge.id: edge for edge in edges}
        self._resources = resources
        self._arena = arena
        self._threads = threads
        self._tracer = tracer
        self._poison = poison
        self._state = StepState()
        self._roots: dict[Tensor, np.ndarray] = {}
        self._blocks: list[Block] = []
        self._slots: dict[Buffer, np.ndarray] = {}
        # One array object a buffer and spec: numpy sees at once that an operand and the result are the same.
        self._views: dict[tuple[Buffer, TensorSpec], np.ndarray] = {}

    def run(self) -> Executor:
        order = schedule(self._graph, self._fetches, self._edges, self._threads)
        instructions = [work.instruction for work in order.order if work.instruction is not None]
        plan = plan_memory(instructions)
        heap = Arena(max(mmap.PAGESIZE, plan.block_bytes + plan.workspace))
        try:
            return self._build(order, plan, heap)
        except BaseException:
            for block in self._blocks:
                assert self._arena is not None
                self._arena.free(block)
            raise

    def _build(self, order: Schedule, plan: MemoryPlan, heap: Arena) -> Executor:
        heap.touch()
        self._heap = heap.memory
        self._workspace = heap.memory[plan.block_bytes : plan.block_bytes + plan.workspace]
        for work in order.order:
            self._bind(work)
        segments = self._segments(order, plan)
        return Executor(
            segments=segments,
            state=self._state,
            arrivals=[
                Arrival(number, work.edge, self._array(work.writes[0]))
                for number, (event, work) in enumerate(order.events)
                if event is Event.ARRIVAL and work.edge is not None
            ],
            event_names=[work.name for _, work in order.events],
            finishes=[number for number, (event, _) in enumerate(order.events) if event is Event.FINISH],
            kept=[work.edge for work in order.kept_recvs if work.edge is not None],
            feeds={work.name: self._array(work.writes[0]) for work in order.order if work.kind is Kind.FEED},
            fetches=[(tensor.name, self._array(tensor)) for tensor in order.fetches],
            plan=plan,
            heap=heap,
            arena=self._arena,
            blocks=self._blocks,
            tracer=self._tracer,
            poison=heap.memory[: plan.block_bytes] if self._poison else None,
            cancel=None if self._resources is None else self._resources.cancel,
        )

    # Memory

    def _bind(self, work: Work) -> None:
        if work.kind is Kind.RESIDENT:
            assert work.node is not None
            arrays = work.node.op.memory(work.node.attrs, self._resources)
            for tensor, array in zip(work.writes, arrays, strict=True):
                self._roots[tensor] = array
            return
        for tensor in work.writes:
            if tensor.alias is None:
                self._roots[tensor] = self._allocate(tensor)

    def _allocate(self, tensor: Tensor) -> np.ndarray:
        buffer, spec = tensor.buffer, tensor.spec
        assert buffer is not None
        view = self._views.get((buffer, spec))
        if view is None:
            view = self._views[buffer, spec] = self._view(buffer, spec)
        return view

    def _view(self, buffer: Buffer, spec: TensorSpec) -> np.ndarray:
        if buffer.place is Place.BLOCK:
            return _tensor(self._heap[buffer.offset :], spec)
        if buffer not in self._slots:
            # One byte at least: a transport asks where a slot lies, also one of a tensor without elements.
            self._slots[buffer] = self._slot(max(1, buffer.nbytes), f"{buffer.name} ({buffer.place.value})")
        return _tensor(self._slots[buffer], spec)

    def _slot(self, nbytes: int, label: str) -> np.ndarray:
        if self._arena is None:
            return np.zeros(nbytes, np.uint8)
        block = self._arena.allocate(nbytes, label)
        self._blocks.append(block)
        block.memory[:: mmap.PAGESIZE] = 0  # its pages are wanted now, not in the first step
        return block.memory

    def _array(self, tensor: Tensor) -> np.ndarray:
        array = self._roots[tensor.root]
        return array if tensor.root is tensor or array.shape == tensor.spec.shape else array.reshape(tensor.spec.shape)

    # Calls

    def _call(self, work: Work) -> Call | None:
        node, state = work.node, self._state
        if work.kind is Kind.KERNEL:
            assert node is not None
            context = KernelContext(self._workspace, self._resources, self._threads, work.name, state)
            inputs = [self._array(tensor) for tensor in work.reads]
            outputs = [self._array(tensor) for tensor in work.writes]
            call = node.op.compile(inputs, outputs, node.attrs, context)
            if call is None or work.event is None:
                return call
            return partial(_start, state, work.event, call)
        if work.kind is Kind.COPY:
            return partial(np.copyto, self._array(work.writes[0]), self._array(work.reads[0]))
        if work.kind is Kind.SEND:
            return self._send(work)
        if work.kind is Kind.CONSUMED:
            assert work.edge is not None
            slot = self._array(work.reads[0])
            return partial(_consume, state, work.edge, slot.reshape(-1).view(np.uint8) if self._poison else None)
        return None

    def _send(self, work: Work) -> Call:
        """A tensor is sent from where it lies. Copied first: what the sender's plan does not own (a received tensor), and
        resident memory outside the arena, from which a one-sided transport could not send; a constant only once."""
        assert work.edge is not None
        if not work.reads:
            return partial(_send, self._state, work.edge, np.empty(work.edge.spec.shape, work.edge.spec.dtype), None)
        tensor = work.reads[0]
        array, place = self._array(tensor), tensor.root.place
        if array.shape != work.edge.spec.shape or array.dtype != work.edge.spec.dtype:
            raise GraphError(f"{work.name} sends {tensor.spec} along edge {work.edge.tensor} of {work.edge.spec}")
        outside = self._arena is not None and self._arena.offset_of(array) is None
        if array.nbytes and (place is Place.RECV or (outside and place in (Place.CONSTANT, Place.VARIABLE))):
            slot = self._slot(array.nbytes, f"{work.name} (copy to send)").view(array.dtype).reshape(array.shape)
            np.copyto(slot, array)
            source = None if place is Place.CONSTANT else array
            return partial(_copy_and_send, self._state, work.edge, slot, source, work.event)
        return partial(_send, self._state, work.edge, array, work.event)

    # Segments

    def _segments(self, schedule: Schedule, plan: MemoryPlan) -> list[Segment]:
        cuts: list[_Cut] = []
        home: dict[Work, int] = {}
        positions: list[int] = []
        for work in schedule.order:
            assert work.instruction is not None
            waits = work.instruction.waits
            bare = work.kind in (Kind.FEED, Kind.RECV)
            if not bare and (not cuts or cuts[-1].waits != waits):
                cuts.append(_Cut(waits))
            positions.append(max(0, len(cuts) - 1) if not bare else -1)
            if bare:
                continue
            home[work] = len(cuts) - 1
            cut = cuts[-1]
            cut.works.append(work)
            for before in _prerequisites(work):
                if before.event is not None and before.kind in (Kind.RECV, Kind.KERNEL):
                    cut.events.add(before.event)
                elif before in home:
                    cut.before.add(home[before])
            cut.events.update(send.event for send in work.released if send.event is not None)
        for buffer, position in plan.handovers:
            later = positions[position]
            cuts[later].before.update(positions[user] for user in buffer.users if 0 <= user < position)
        expiring = self._expiring(schedule, plan, cuts, positions)
        return [self._segment(cut, cut.before - {number, -1}, expiring) for number, cut in enumerate(cuts)]

    def _expiring(
        self, schedule: Schedule, plan: MemoryPlan, cuts: list[_Cut], positions: list[int]
    ) -> dict[Work, list[Buffer]]:
        """For poison: which buffers of the block are used up after a work, whatever the run-time order."""
        expiring: dict[Work, list[Buffer]] = {}
        if not self._poison:
            return expiring
        for buffer in plan.buffers:
            if buffer.place is not Place.BLOCK or not buffer.nbytes or not 0 <= buffer.last < len(positions):
                continue
            work = schedule.order[buffer.last]
            if positions[buffer.last] < 0 or (work.instruction and buffer.until & ~work.instruction.waits):
                continue
            cuts[positions[buffer.last]].before.update(positions[user] for user in buffer.users if user >= 0)
            expiring.setdefault(work, []).append(buffer)
        return expiring

    def _segment(self, cut: _Cut, before: set[int], expiring: dict[Work, list[Buffer]]) -> Segment:
        calls: list[Call] = []
        labels: list[Label] = []
        for work in cut.works:
            call = self._call(work)
            if call is not None:
                calls.append(call)
                labels.append(_label(work))
            for buffer in expiring.get(work, ()):
                calls.append(partial(self._heap[buffer.offset : buffer.offset + buffer.nbytes].fill, POISON))
                labels.append(Label(Phase.OTHER, f"poison {buffer.name}", 0))
        return Segment(calls, labels, sorted(before), sorted(cut.events))


def _tensor(memory: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return np.ndarray(spec.shape, spec.dtype, memory.data)


def _prerequisites(work: Work) -> set[Work]:
    """What must have happened before ``work``; a Recv starts with the step, so what comes before it is for its readers."""
    found: set[Work] = set()
    stack = list(work.deps)
    while stack:
        before = stack.pop()
        if before not in found:
            found.add(before)
            if before.kind in (Kind.FEED, Kind.RECV):
                stack.extend(before.deps)
    return found


def _label(work: Work) -> Label:
    phase = Phase.COMPUTE
    if work.kind is Kind.COPY:
        phase = Phase.COPY
    elif work.kind is Kind.SEND:
        phase = Phase.QUEUE
    elif work.kind is Kind.CONSUMED:
        phase = Phase.COMPLETE
    elif work.node is not None and work.node.op.mutates:
        phase = Phase.APPLY
    tensors = work.writes or work.reads
    return Label(phase, work.name, sum(tensor.spec.nbytes for tensor in tensors))


def _start(state: StepState, event: int, call: Call) -> None:
    future = call()
    assert isinstance(future, Future)
    state.watch(event, future)


def _send(state: StepState, edge: Edge, array: np.ndarray, event: int | None) -> None:
    release = state.sending()
    if event is not None:
        state.watch(event, release)
    assert state.rendezvous is not None
    state.rendezvous.send(edge, array, release)


def _copy_and_send(
    state: StepState, edge: Edge, slot: np.ndarray, source: np.ndarray | None, event: int | None
) -> None:
    if source is not None:
        np.copyto(slot, source)
    _send(state, edge, slot, event)


def _consume(state: StepState, edge: Edge, slot: np.ndarray | None) -> None:
    if slot is not None:
        slot.fill(POISON)
    assert state.rendezvous is not None
    state.rendezvous.consumed(edge)
