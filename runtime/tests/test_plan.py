"""The memory plan: no two live tensors share bytes, and memory that is free is used again."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory.arena import ALIGNMENT
from runtime.memory.plan import Instruction, Place, Tensor, plan_memory
from runtime.tensor import TensorSpec


def tensor(name, size=16, **options):
    return Tensor(name, TensorSpec((size,), np.dtype(np.float32)), **options)


def chain(count, inplace=()):
    """t0 -> t1 -> ... -> t_count, each read once."""
    tensors = [tensor(f"t{index}") for index in range(count + 1)]
    order = [Instruction("make t0", [], [tensors[0]])]
    order += [
        Instruction(f"make {after.name}", [before], [after], inplace=inplace)
        for before, after in itertools.pairwise(tensors)
    ]
    return tensors, order


def test_a_chain_needs_two_buffers_and_in_place_one():
    _, order = chain(10)
    assert plan_memory(order).block_bytes == 2 * ALIGNMENT
    tensors, order = chain(10, inplace=[(0, 0)])
    assert plan_memory(order).block_bytes == ALIGNMENT
    assert len({tensor.buffer for tensor in tensors}) == 1


def test_in_place_only_at_the_last_use():
    tensors, order = chain(2, inplace=[(0, 0)])
    order.append(Instruction("late reader", [tensors[0]], [tensor("other")]))
    plan_memory(order)
    assert tensors[0].buffer is not tensors[1].buffer
    assert tensors[1].buffer is tensors[2].buffer


def test_in_place_not_over_another_operand_in_the_same_memory():
    a, out = tensor("a"), tensor("out")
    view = tensor("a viewed", alias=a)
    order = [
        Instruction("make", [], [a]),
        Instruction("view", [a], [view]),
        Instruction("use", [a, view], [out], inplace=[(0, 0)]),
    ]
    plan_memory(order)
    assert out.buffer is not a.buffer
    a, out = tensor("a"), tensor("out")
    plan_memory([Instruction("make", [], [a]), Instruction("use", [a, a], [out], inplace=[(0, 0), (1, 0)])])
    assert out.buffer is a.buffer


@pytest.mark.parametrize("place", [Place.RECV, Place.VARIABLE, Place.CONSTANT, Place.SEND])
def test_never_in_place_on_memory_that_others_read_or_own(place):
    source, out = tensor("source", place=place), tensor("out")
    plan_memory([Instruction("make", [], [source]), Instruction("use", [source], [out], inplace=[(0, 0)])])
    assert out.buffer is not source.buffer


def test_fetched_and_aliased_tensors_stay():
    kept, view = tensor("kept"), tensor("later")
    alias = tensor("alias of kept", alias=kept, keep=True)
    order = [
        Instruction("make", [], [kept]),
        Instruction("alias", [kept], [alias]),
        Instruction("other", [], [view]),
        Instruction("sink", [view], []),
    ]
    plan = plan_memory(order)
    assert kept.buffer.last == len(order)
    assert plan.block_bytes == 2 * ALIGNMENT


def test_cut_edges_have_slots_of_their_own():
    sent = [tensor(f"sent{index}", place=Place.SEND) for index in range(3)]
    order = [Instruction(f"make {each.name}", [], [each]) for each in sent]
    plan = plan_memory(order)
    assert plan.bytes_of(Place.SEND) == 3 * ALIGNMENT
    assert plan.block_bytes == 0
    assert plan.total_bytes == 3 * ALIGNMENT


def test_memory_never_passes_to_one_who_does_not_wait_for_its_last_reader():
    a, b = tensor("a"), tensor("b")
    order = [
        Instruction("make a", [], [a], waits=0b01),
        Instruction("read a", [a], [], waits=0b01),
        Instruction("make b", [], [b], waits=0b10),
        Instruction("read b", [b], [], waits=0b10),
    ]
    assert plan_memory(order).block_bytes == 2 * ALIGNMENT
    c = tensor("c")
    order.append(Instruction("make c", [], [c], waits=0b11))
    plan = plan_memory(order)
    assert plan.block_bytes == 2 * ALIGNMENT
    assert (a.buffer, 4) in plan.handovers or (b.buffer, 4) in plan.handovers


def test_memory_of_an_asynchronous_reader_is_not_reused_before_it_ends():
    a, b = tensor("a"), tensor("b")
    order = [
        Instruction("make a", [], [a]),
        Instruction("ask about a", [a], [], until=0b1),
        Instruction("make b", [], [b]),
    ]
    assert plan_memory(order).block_bytes == 2 * ALIGNMENT
    order[2] = Instruction("make b", [], [b], waits=0b1)
    assert plan_memory(order).block_bytes == ALIGNMENT


def test_a_fed_tensor_is_live_from_the_start():
    fed, early = tensor("fed"), tensor("early")
    order = [
        Instruction("early", [], [early]),
        Instruction("end of early", [early], []),
        Instruction("feed", [], [fed], before_step=True),
        Instruction("use", [fed], []),
    ]
    assert plan_memory(order).block_bytes == 2 * ALIGNMENT


def test_empty_tensors_take_nothing():
    empty = tensor("empty", size=0)
    plan = plan_memory([Instruction("make", [], [empty])])
    assert plan.total_bytes == 0
    assert plan_memory([]).total_bytes == 0


@st.composite
def programs(draw):
    """Random instruction lists whose events follow their data, as the scheduler makes them."""
    tensors, order, until = [], [], {}
    for number in range(draw(st.integers(1, 25))):
        reads = draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else []
        waits = draw(st.integers(0, 7)) if draw(st.booleans()) else 0
        for each in reads:
            waits |= until[each]
        write = Tensor(
            f"t{number}",
            TensorSpec((draw(st.integers(0, 200)),), np.dtype(np.uint8)),
            draw(st.sampled_from([Place.BLOCK] * 6 + [Place.SEND])),
            keep=draw(st.integers(0, 9)) == 0,
        )
        if reads and draw(st.integers(0, 5)) == 0:
            write = Tensor(f"t{number}", reads[0].spec, alias=reads[0])
        pairs = [(index, 0) for index in range(len(reads)) if draw(st.booleans())]
        ends = waits | (8 << number if draw(st.integers(0, 5)) == 0 else 0)
        until[write] = ends
        order.append(
            Instruction(
                f"i{number}",
                reads,
                [write],
                inplace=pairs if ends == waits else (),
                waits=waits,
                until=ends,
                before_step=not reads and waits == 0 and draw(st.integers(0, 5)) == 0,
            )
        )
        tensors.append(write)
    return order


@given(programs())
@settings(max_examples=300, deadline=None)
def test_no_two_live_tensors_share_bytes_in_any_order_that_can_happen(order):
    plan = plan_memory(order)
    block = [buffer for buffer in plan.buffers if buffer.place is Place.BLOCK and buffer.nbytes]
    assert plan.block_bytes <= plan.unshared_bytes
    for buffer in block:
        assert buffer.offset % ALIGNMENT == 0
        assert buffer.offset + buffer.nbytes <= plan.block_bytes
    for index, one in enumerate(block):
        for other in block[:index]:
            if one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes:
                early, late = (one, other) if one.first < other.first else (other, one)
                assert early.last < late.first, (early, late)
                assert early.until & ~late.waits == 0, "the later would have to wait for more than it does"
                same_events = early.until == early.waits == late.waits
                assert same_events or (early, late.first) in plan.handovers
    _check_contents(order)


def _check_contents(order):
    """Run the list with real bytes: every read must see what was written under that name last."""
    memory: dict[object, int] = {}  # buffer -> which root tensor's content it holds
    for position, instruction in enumerate(order):
        for each in instruction.reads:
            assert memory[each.root.buffer] is each.root, f"{each} was overwritten before {instruction.name}"
        for each in instruction.writes:
            if each.alias is None:
                memory[each.buffer] = each
        assert position >= 0
    for instruction in order:
        for each in instruction.writes:
            if each.keep:
                assert memory[each.root.buffer] is each.root
