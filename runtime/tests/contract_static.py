"""The contract of static edges, for transports that have them: ``check_*(name)`` as in contract.py."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import (
    DeadlineError,
    StepAbortedError,
)
from runtime.tensor import TensorSpec
from runtime.testing import (
    Guarded,
    Rank,
    pair,
    pattern,
    pattern_tensor,
    same_bytes,
    spawn,
)
from runtime.tests.contract import KIB, MIB, bytes_spec, soon
from runtime.transport.registry import transport_class


def check_static_edges(name: str) -> None:
    """Generations arrive complete in their slot, one after another, and only after the credit of the one before."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        specs = {
            1: TensorSpec((), np.dtype(np.float64)),
            2: TensorSpec((0,), np.dtype(np.uint8)),
            3: bytes_spec(3 * MIB),
            4: TensorSpec((33, 5), np.dtype(np.float32)),
        }
        guarded = {edge: Guarded(spec, consumer.arena) for edge, spec in specs.items()}
        offer = consumer.transport.offer({edge: g.array for edge, g in guarded.items()})
        producer.channel.prepare(offer)
        for generation in range(6):
            arrivals = {edge: consumer.transport.arrival(edge, generation) for edge in specs}
            sources = {
                edge: pattern_tensor(spec, 10 * generation + edge, producer.arena if (edge + generation) % 2 else None)
                for edge, spec in specs.items()
            }
            pushes = [producer.channel.push(edge, generation, sources[edge], deadline=soon()) for edge in specs]
            for edge in specs:
                arrivals[edge].result(soon())
                assert same_bytes(guarded[edge].array, sources[edge]), (edge, generation)
                assert guarded[edge].intact(), (edge, generation)
            for push in pushes:
                push.result(soon())
            for edge in specs:
                consumer.transport.release(edge, generation)
        consumer.transport.withdraw(list(specs), StepAbortedError("done"))


def check_static_credit(name: str) -> None:
    """A push ahead of its credit waits, and does not touch the slot until the consumer has released it."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        slot = Guarded(bytes_spec(100 * KIB), consumer.arena)
        producer.channel.prepare(consumer.transport.offer({5: slot.array}))
        first, second = pattern(100 * KIB, 1), pattern(100 * KIB, 2)
        producer.channel.push(5, 0, first, deadline=soon()).result(soon())
        consumer.transport.arrival(5, 0).result(soon())
        ahead = producer.channel.push(5, 1, second, deadline=soon())
        arrival = consumer.transport.arrival(5, 1)
        with pytest.raises(DeadlineError):
            arrival.result(Deadline.after(0.2))
        assert np.array_equal(slot.array, first)
        consumer.transport.release(5, 0)
        arrival.result(soon())
        ahead.result(soon())
        assert np.array_equal(slot.array, second) and slot.intact()


def check_static_withdraw(name: str) -> None:
    """Withdrawn edges fail their arrivals with the reason, their slots are not written to, and new edges work."""
    _needs_static(name)
    with pair(name) as (producer, consumer):
        slot = Guarded(bytes_spec(1000), consumer.arena)
        producer.channel.prepare(consumer.transport.offer({7: slot.array}))
        arrival = consumer.transport.arrival(7, 0)
        reason = StepAbortedError("the graph is gone")
        consumer.transport.withdraw([7], reason)
        assert arrival.exception(soon()) is reason
        late = producer.channel.push(7, 0, pattern(1000), deadline=Deadline.after(1.0))
        late.exception(soon())
        assert slot.untouched()
        producer.channel.prepare(consumer.transport.offer({8: slot.array}))
        producer.channel.push(8, 0, pattern(1000, 3), deadline=soon())
        consumer.transport.arrival(8, 0).result(soon())
        assert np.array_equal(slot.array, pattern(1000, 3))


def check_static_in_two_processes(name: str) -> None:
    """A hundred generations of several edges between two real processes, each verified by its consumer."""
    _needs_static(name)
    spawn(2, _rank_with_static_edges, name, timeout=120)


def _rank_with_static_edges(rank: Rank, name: str) -> None:
    lengths = {1: 8, 2: 5000, 3: 300 * KIB}
    with rank.connect(name) as end:
        slots = {edge: Guarded(bytes_spec(nbytes), end.arena) for edge, nbytes in lengths.items()}
        offers = rank.exchange(end.transport.offer({edge: slot.array for edge, slot in slots.items()}))
        end.channel.prepare(offers[1 - rank.rank])
        for generation in range(100):
            for edge, nbytes in lengths.items():
                tensor = pattern(nbytes, 1000 * edge + 2 * generation + rank.rank)
                end.channel.push(edge, generation, tensor, deadline=rank.deadline).result(rank.deadline)
            for edge, nbytes in lengths.items():
                end.transport.arrival(edge, generation).result(rank.deadline)
                expected = pattern(nbytes, 1000 * edge + 2 * generation + 1 - rank.rank)
                assert np.array_equal(slots[edge].array, expected), (edge, generation)
                assert slots[edge].intact()
                end.transport.release(edge, generation)
        rank.barrier()


def _needs_static(name: str) -> None:
    if not transport_class(name).supports_static:
        pytest.skip(f"{name} has no static edges")
