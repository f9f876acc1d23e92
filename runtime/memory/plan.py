"""The memory plan: which tensors of a compiled partition share which bytes, decided before its first step.

Every output has its memory beforehand; tensors whose lifetimes do not meet share bytes of one block (greedy by size, best
fit, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020). What crosses a cut edge
has memory of its own, because a peer reads or writes it at times that this plan does not know.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.memory.arena import ALIGNMENT
from runtime.tensor import TensorSpec


class Place(enum.Enum):
    """Where a buffer lives. BLOCK is shared by lifetimes; SEND and RECV lie in the arena, one slot each; the memory of
    CONSTANT and VARIABLE exists already."""

    BLOCK = "activations"
    SEND = "sent"
    RECV = "received"
    CONSTANT = "constants"
    VARIABLE = "variables"


class Tensor:
    """A tensor to be placed. ``alias``: the tensor whose memory it is under another shape. ``keep``: it is read after the
    last instruction (a fetch)."""

    __slots__ = ("alias", "buffer", "keep", "name", "place", "spec")

    def __init__(
        self, name: str, spec: TensorSpec, place: Place = Place.BLOCK, alias: Tensor | None = None, keep: bool = False
    ) -> None:
        self.name = name
        self.spec = spec
        self.place = place
        self.alias = alias
        self.keep = keep
        self.buffer: Buffer | None = None

    @property
    def root(self) -> Tensor:
        """The tensor whose memory this one is, itself if it is no alias."""
        tensor = self
        while tensor.alias is not None:
            tensor = tensor.alias
        return tensor

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.spec} {self.place.name}>"


class Instruction:
    """One entry of the execution order, as the plan sees it.

    ``waits`` is the set (bits of an int) of asynchronous events that must have happened before it may run, directly or
    through others; ``until`` those after which its reads are over: the same, and its own end if it is asynchronous itself.
    ``inplace`` pairs (read, write) may share memory. ``before_step``: its writes happen before the first instruction
    (feeds). ``workspace``: bytes of temporary memory.
    """

    __slots__ = ("before_step", "inplace", "name", "reads", "until", "waits", "workspace", "writes")

    def __init__(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        inplace: Sequence[tuple[int, int]] = (),
        waits: int = 0,
        until: int | None = None,
        workspace: int = 0,
        before_step: bool = False,
    ) -> None:
        self.name = name
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.inplace = tuple(inplace)
        self.waits = waits
        self.until = waits if until is None else until
        self.workspace = workspace
        self.before_step = before_step


class Buffer:
    """Bytes that one or several tensors share. ``first`` and ``last`` are positions in the order, both inclusive; ``users``
    all positions that read or write it. ``offset`` is into the block, for ``Place.BLOCK`` only."""

    __slots__ = ("first", "last", "name", "nbytes", "offset", "place", "until", "users", "waits")

    def __init__(self, name: str, nbytes: int, place: Place, first: int, waits: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.place = place
        self.first = first
        self.last = first
        self.waits = waits  # of the instruction that writes it first
        self.until = waits  # of all its users together
        self.users: set[int] = {first} if first >= 0 else set()
        self.offset = 0

    def __repr__(self) -> str:
        return f"<Buffer {self.name} {self.nbytes} B {self.place.name} [{self.first}, {self.last}] at {self.offset}>"


@dataclass(slots=True)
class MemoryPlan:
    """The result: buffers, bytes of the block, bytes of temporary memory shared by all kernels, and ``handovers``: a pair
    (buffer, position) says that all users of the buffer before that position must have run when the instruction there does,
    because it overwrites their bytes."""

    buffers: list[Buffer]
    block_bytes: int
    workspace: int
    handovers: list[tuple[Buffer, int]] = field(default_factory=list)

    def bytes_of(self, place: Place) -> int:
        if place is Place.BLOCK:
            return self.block_bytes
        return sum(_aligned(buffer.nbytes) for buffer in self.buffers if buffer.place is place)

    @property
    def total_bytes(self) -> int:
        """Everything a step touches: block, workspace, arena slots, constants and variables."""
        return self.workspace + sum(self.bytes_of(place) for place in Place)

    @property
    def unshared_bytes(self) -> int:
        """What the block would take if no two tensors shared memory."""
        return sum(_aligned(buffer.nbytes) for buffer in self.buffers if buffer.place is Place.BLOCK)

    def describe(self) -> dict[str, int]:
        """Bytes by class, for reports."""
        return {**{place.value: self.bytes_of(place) for place in Place}, "workspace": self.workspace}


def plan_memory(order: Sequence[Instruction]) -> MemoryPlan:
    """Place every tensor that the instructions write; afterwards ``tensor.root.buffer`` says where.

    ``order`` is the static one. Instructions whose events differ may run in another order at run time, so memory passes
    from one to another only where the later waits for all that the earlier waits for: reuse never adds a wait, and so
    can neither slow a step nor make tasks wait for each other in a circle.
    """
    last_read = _last_reads(order)
    buffers: list[Buffer] = []
    handovers: list[tuple[Buffer, int]] = []
    for position, instruction in enumerate(order):
        shared = _inplace_buffers(position, instruction, last_read)
        for tensor in instruction.reads:
            _use(tensor, position, instruction.until)
        for index, tensor in enumerate(instruction.writes):
            if tensor.alias is not None:
                _use(tensor, position, instruction.until)
                continue
            buffer = shared.get(index)
            if buffer is not None:
                handovers.append((buffer, position))
                if tensor.place is Place.SEND:
                    buffer.place = Place.SEND
            else:
                first = -1 if instruction.before_step else position
                buffer = Buffer(tensor.name, tensor.spec.nbytes, tensor.place, first, instruction.waits)
                buffers.append(buffer)
            tensor.buffer = buffer
            _use(tensor, position, instruction.until)
        for tensor in (*instruction.reads, *instruction.writes):
            if tensor.keep:
                buffer = tensor.root.buffer
                assert buffer is not None
                buffer.last = len(order)
    block = [buffer for buffer in buffers if buffer.place is Place.BLOCK]
    end = _place(block)
    handovers.extend(_reuse(block))
    workspace = _aligned(max((instruction.workspace for instruction in order), default=0))
    return MemoryPlan(buffers, end, workspace, handovers)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _use(tensor: Tensor, position: int, until: int) -> None:
    buffer = tensor.root.buffer
    assert buffer is not None, f"{tensor!r} is read before it is written"
    buffer.users.add(position)
    buffer.last = max(buffer.last, position)
    buffer.until |= until


def _last_reads(order: Sequence[Instruction]) -> dict[Tensor, int]:
    """Root tensor -> the last position that touches it, or the end of the step."""
    last: dict[Tensor, int] = {}
    for position, instruction in enumerate(order):
        for tensor in (*instruction.reads, *instruction.writes):
            root = tensor.root
            last[root] = len(order) if tensor.keep else max(position, last.get(root, 0))
    return last


def _inplace_buffers(position: int, instruction: Instruction, last_read: dict[Tensor, int]) -> dict[int, Buffer]:
    """Which writes take over the memory of a read: index of the write -> buffer."""
    shared: dict[int, Buffer] = {}
    for read, write in instruction.inplace:
        source, target = instruction.reads[read], instruction.writes[write]
        buffer = source.root.buffer
        if (
            write in shared
            or buffer is None
            or buffer in shared.values()
            or target.alias is not None
            or buffer.place is not Place.BLOCK
            or target.place not in (Place.BLOCK, Place.SEND)
            or source.spec != target.spec
            or source.spec.nbytes != buffer.nbytes
            or last_read[source.root] != position
            or buffer.until & ~instruction.waits
        ):
            continue
        # Another read of the same bytes must be safe to overwrite element by element as well.
        others = [index for index, tensor in enumerate(instruction.reads) if tensor.root.buffer is buffer]
        if all((index, write) in instruction.inplace for index in others):
            shared[write] = buffer
    return shared


def _place(buffers: Sequence[Buffer]) -> int:
    """Set the offsets, greedy by size with best fit; returns the bytes that the block needs."""
    ordered = sorted((buffer for buffer in buffers if buffer.nbytes), key=lambda buffer: -buffer.nbytes)
    count = len(ordered)
    classes, subset = _wait_classes(ordered)
    first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
    until, waits = np.zeros(count, np.int64), np.zeros(count, np.int64)
    offset, size = np.zeros(count, np.int64), np.zeros(count, np.int64)
    end = 0
    for index, buffer in enumerate(ordered):
        mine_until, mine_waits = classes[buffer.until], classes[buffer.waits]
        before = (last[:index] < buffer.first) & subset[until[:index], mine_waits]
        after = (buffer.last < first[:index]) & subset[mine_until, waits[:index]]
        rivals = np.flatnonzero(~(before | after))
        need = _aligned(buffer.nbytes)
        best, best_gap, cursor = -1, -1, 0
        for rival in rivals[np.argsort(offset[rivals], kind="stable")].tolist():
            gap = int(offset[rival]) - cursor
            if gap >= need and (best_gap < 0 or gap < best_gap):
                best, best_gap = cursor, gap
            cursor = max(cursor, int(offset[rival] + size[rival]))
        buffer.offset = cursor if best < 0 else best
        end = max(end, buffer.offset + need)
        first[index], last[index], offset[index], size[index] = buffer.first, buffer.last, buffer.offset, need
        until[index], waits[index] = mine_until, mine_waits
    return end


def _wait_classes(buffers: Iterable[Buffer]) -> tuple[dict[int, int], np.ndarray]:
    """Numbers for the event sets that occur, and the matrix that says which is a subset of which."""
    sets = list(dict.fromkeys(events for buffer in buffers for events in (buffer.waits, buffer.until)))
    subset = np.array([[small & ~large == 0 for large in sets] for small in sets], bool).reshape(len(sets), len(sets))
    return {events: number for number, events in enumerate(sets)}, subset


def _reuse(buffers: Sequence[Buffer]) -> list[tuple[Buffer, int]]:
    """(buffer, first writer of one that took over some of its bytes), where the static order alone does not ensure it."""
    placed = [buffer for buffer in buffers if buffer.nbytes]
    if all(buffer.waits == buffer.until == placed[0].until for buffer in placed):
        return []  # one group of instructions, which run in the static order anyway
    start = np.array([buffer.offset for buffer in placed])
    stop = start + np.array([buffer.nbytes for buffer in placed])
    last = np.array([buffer.last for buffer in placed])
    return [
        (placed[index], later.first)
        for later in placed
        for index in np.flatnonzero(
            (start < later.offset + later.nbytes) & (later.offset < stop) & (last < later.first)
        ).tolist()
    ]
