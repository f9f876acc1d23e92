"""The one-sided protocols over two Links: shared memory, and a loop that is as awkward as hardware."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import (
    ConfigError,
    CorruptMessageError,
    PeerLostError,
    ShapeError,
    StepAbortedError,
    TransportError,
)
from runtime.tensor import TensorSpec
from runtime.testing import eventually, pair, pattern, pattern_tensor, same_bytes
from runtime.tests.loop_link import Loop, loop
from runtime.transport.onesided import messages
from runtime.transport.onesided.endpoint import Endpoint
from runtime.transport.onesided.messages import Kind
from runtime.transport.onesided.settings import PROTOCOLS
from runtime.transport.onesided.slots import decode_offer

PAPER = [
    {"protocol": protocol, "message_reuse": message, "tensor_reuse": tensor, "pool": pool}
    for protocol in ("paper_read", "paper_write")
    for message, tensor, pool in itertools.product((True, False), repeat=3)
]
SIZES = (0, 1, 8, 1000, 4096, 5000, 70_000)


def soon() -> Deadline:
    return Deadline.after(30)


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape, np.dtype(np.float32))


def serving(transport: Any) -> Endpoint:
    """The serving endpoint of a transport of ``pair``, where there is one peer."""
    assert eventually(lambda: any(type(e).__name__ == "ServingEndpoint" for e in transport._endpoints))
    return next(e for e in transport._endpoints if type(e).__name__ == "ServingEndpoint")


def describe(params: dict[str, Any]) -> str:
    off = [name for name, value in params.items() if value is False]
    return "-".join([params["protocol"], *(f"no_{name}" for name in off)])


@pytest.mark.parametrize("params", [*({"protocol": p} for p in PROTOCOLS[:4]), *PAPER], ids=describe)
@pytest.mark.parametrize("over", ["shm", "loop"])
def test_every_protocol_from_and_to_any_memory(over: str, params: dict[str, Any]) -> None:
    with _ends(over, params) as (channel, shelf, client, server):
        for at, nbytes in enumerate(SIZES):
            spec = TensorSpec((nbytes,), np.dtype(np.uint8))
            strided = np.stack([pattern(nbytes, at + 9), pattern(nbytes, at + 8)], axis=1)[:, 0]
            sources = pattern_tensor(spec, at), pattern_tensor(spec, at, server.arena), strided
            for number, source in enumerate(sources):
                key = f"tensor {nbytes} {number};1"
                shelf.put(key, source)
                for into in (None, np.empty(nbytes, np.uint8), client.arena.tensor(spec)):
                    array = channel.fetch(key, into, deadline=soon()).result(soon())
                    assert into is None or array is into
                    assert same_bytes(array, source)
                with channel.borrow(key, deadline=soon()).result(soon()) as view:
                    assert same_bytes(view, source)
        assert eventually(lambda: shelf.leased == 0)
        totals = client.totals()
        assert totals.fetches == server.totals().served
        assert totals.bytes_in == server.totals().bytes_out
        assert eventually(lambda: client.totals().messages_in == server.totals().messages_out)


def _ends(over: str, params: dict[str, Any]) -> Any:
    import contextlib

    @contextlib.contextmanager
    def make() -> Iterator[tuple[Any, Any, Any, Any]]:
        if over == "shm":
            with pair("shm", params=params) as (a, b):
                yield a.channels[1], b.source, a.transport, b.transport
        else:
            with loop(**params) as ends:
                yield ends.channel, ends.shelf, ends.client, ends.server

    return make()


@pytest.mark.parametrize(
    ("protocol", "messages_a_fetch"),
    [("eager", 2), ("read", 3), ("write", 1), ("paper_read", 3), ("paper_write", 4)],
)
def test_messages_a_fetch_in_the_steady_state(protocol: str, messages_a_fetch: int) -> None:
    """As many as the literature counts; nothing allocated, registered or copied but what the protocol says."""
    fetches = 20
    # Credits beyond what is sent here, so that no CREDIT message is counted.
    with pair("shm", params={"protocol": protocol, "depth": 4096}) as (a, b):
        spec = floats(1000)
        b.source.put("v;1", pattern_tensor(spec, 3, b.arena))
        into = a.arena.tensor(spec)
        a.channels[1].fetch("v;1", into, deadline=soon()).result(soon())
        assert eventually(lambda: b.source.leased == 0)
        before = a.transport.totals(), b.transport.totals()
        for _ in range(fetches):
            a.channels[1].fetch("v;1", into, deadline=soon()).result(soon())
        assert eventually(lambda: b.source.leased == 0)
        after = a.transport.totals(), b.transport.totals()
    counted = sum(now.messages_out - then.messages_out for now, then in zip(after, before, strict=True))
    assert counted == messages_a_fetch * fetches
    copies = sum(now.copies - then.copies for now, then in zip(after, before, strict=True))
    assert copies == {"eager": 2, "paper_read": 2, "paper_write": 2}.get(protocol, 0) * fetches
    for name in ("allocations", "registrations", "metadata_misses"):
        assert all(getattr(now, name) == getattr(then, name) for now, then in zip(after, before, strict=True)), name


@pytest.mark.parametrize("over", ["read", "write"])
def test_foreign_memory_is_registered_once(over: str) -> None:
    with loop(over, eager_threshold=100) as ends:
        source, into = pattern(5000, 1), np.zeros(5000, np.uint8)
        ends.shelf.put("k", source)
        for _ in range(10):
            ends.channel.fetch("k", into, deadline=soon()).result(soon())
        assert np.array_equal(into, source)
        assert ends.client.totals().registrations == 1
        assert ends.server.totals().registrations == 1
        assert ends.client.totals().copies == ends.server.totals().copies == 0


def test_a_shape_that_changes_costs_one_more_question() -> None:
    with pair("shm", params={"protocol": "write"}) as (a, b):
        channel = a.channels[1]
        for step, shape in enumerate([(10, 10), (10, 10), (20, 10), (10, 20), (10, 20), (5,)]):
            tensor = pattern_tensor(floats(*shape), step)
            b.source.put(f"gradient;{step}", tensor)
            assert same_bytes(channel.fetch(f"gradient;{step}", deadline=soon()).result(soon()), tensor)
        assert channel.counters.metadata_misses == 4
        with pytest.raises(ShapeError, match=r"float32\[5\]"):
            channel.fetch("gradient;5", np.empty(6, np.float32), deadline=soon()).result(soon())
        assert eventually(lambda: b.source.leased == 0)


@pytest.mark.parametrize("over", ["shm", "loop"])
@pytest.mark.parametrize("protocol", ["auto", "eager", "write"])
def test_many_fetches_share_few_credits(over: str, protocol: str) -> None:
    """Far more in flight than the ring holds, answered in another order, some from memory that must be staged."""
    count = 300
    with _ends(over, {"protocol": protocol, "depth": 16, "inflight": 50}) as (channel, shelf, _, server):
        generator = random.Random(7)
        sizes = [generator.choice([0, 8, 900, 6000, 40_000]) for _ in range(count)]
        tensors = [
            pattern_tensor(TensorSpec((size,), np.dtype(np.uint8)), at, server.arena if at % 3 else None)
            for at, size in enumerate(sizes)
        ]
        for at in range(0, count, 2):
            shelf.put(f"key {at}", tensors[at])
        futures = [channel.fetch(f"key {at}", deadline=soon()) for at in range(count)]
        later = list(range(1, count, 2))
        generator.shuffle(later)
        for at in later:
            shelf.put(f"key {at}", tensors[at])
        for future, tensor in zip(futures, tensors, strict=True):
            assert same_bytes(future.result(soon()), tensor)
        assert eventually(lambda: shelf.leased == 0)


def test_transfers_are_cut_to_what_the_link_takes() -> None:
    for protocol in ("read", "write"):
        with loop(protocol=protocol, chunk_bytes=300) as ends:
            tensor = pattern_tensor(floats(5000), 1, ends.server.arena)
            ends.shelf.put("k", tensor)
            into = ends.client.arena.tensor(floats(5000))
            for _ in range(3):
                into[:] = 0
                assert same_bytes(ends.channel.fetch("k", into, deadline=soon()).result(soon()), tensor)


def test_staging_is_read_piece_by_piece() -> None:
    with pair("shm", params={"protocol": "read", "chunk_bytes": 4096}) as (a, b):
        tensor = pattern(50_000, 5)
        b.source.put("k", tensor)
        before = a.channels[1].counters.messages_in
        assert np.array_equal(a.channels[1].fetch("k", deadline=soon()).result(soon()), tensor)
        assert a.channels[1].counters.messages_in - before >= 13
        assert eventually(lambda: b.arena.used_bytes == 0)


def test_a_source_larger_than_the_arena_is_an_error_of_the_fetch() -> None:
    with pair("shm", arena_bytes=1 << 20) as (a, b):
        b.source.put("large", pattern(2 << 20))
        b.source.put("small", pattern(10))
        with pytest.raises(Exception, match="arena"):
            a.channels[1].fetch("large", np.empty(2 << 20, np.uint8), deadline=soon()).result(soon())
        assert np.array_equal(a.channels[1].fetch("small", deadline=soon()).result(soon()), pattern(10))


# Static edges


def push_all(channel: Any, tensors: dict[int, np.ndarray], generation: int) -> None:
    for future in [channel.push(edge, generation, tensor, deadline=soon()) for edge, tensor in tensors.items()]:
        future.result(soon())


@pytest.mark.parametrize("over", ["shm", "loop"])
def test_a_step_over_static_edges_is_one_write_an_edge(over: str) -> None:
    steps, edges = 30, 12
    with _ends(over, {"depth": 16}) as (channel, _, client, server):
        slots = {edge: server.arena.tensor(floats(edge * 40)) for edge in range(edges)}
        channel.prepare(server.offer(slots))
        source = {edge: client.arena.tensor(floats(edge * 40)) for edge in range(edges)}
        for step in range(5, 5 + steps):
            for edge, tensor in source.items():
                tensor[:] = pattern_tensor(tensor_spec(tensor), step * 100 + edge)
            arrivals = [server.arrival(edge, step) for edge in range(edges)]
            push_all(channel, source, step)
            for edge, arrival in enumerate(arrivals):
                arrival.result(soon())
                assert same_bytes(slots[edge], pattern_tensor(floats(edge * 40), step * 100 + edge))
                server.release(edge, step)
        totals = client.totals()
        assert totals.pushes == steps * edges
        assert totals.copies == totals.allocations == totals.registrations == 0
        assert totals.bytes_out == server.totals().bytes_in


def tensor_spec(array: np.ndarray) -> TensorSpec:
    return TensorSpec.of(array)


def test_a_slot_is_written_only_after_its_credit() -> None:
    with pair("shm") as (a, b):
        slot = b.arena.tensor(floats(100))
        a.channels[1].prepare(b.transport.offer({7: slot}))
        first, second = np.full(100, 1, np.float32), np.full(100, 2, np.float32)
        a.channels[1].push(7, 0, first, deadline=soon()).result(soon())
        b.transport.arrival(7, 0).result(soon())
        waiting = a.channels[1].push(7, 1, second, deadline=soon())
        pending = b.transport.arrival(7, 1)
        assert not eventually(lambda: pending.done() or waiting.done(), 0.05)
        assert (slot == 1).all()
        b.transport.release(7, 0)
        pending.result(soon())
        waiting.result(soon())
        assert (slot == 2).all()


def test_pushes_that_cannot_be_are_refused() -> None:
    with pair("shm") as (a, b):
        channel = a.channels[1]
        channel.prepare(b.transport.offer({1: b.arena.tensor(floats(4))}))
        assert isinstance(channel.push(2, 0, np.zeros(4, np.float32), deadline=soon()).exception(soon()), ConfigError)
        for wrong in (np.zeros(5, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32)):
            assert isinstance(channel.push(1, 0, wrong, deadline=soon()).exception(soon()), ShapeError)
        channel.push(1, 5, np.zeros(4, np.float32), deadline=soon()).result(soon())
        assert isinstance(channel.push(1, 7, np.zeros(4, np.float32), deadline=soon()).exception(soon()), ConfigError)
        with pytest.raises(ConfigError):
            b.transport.offer({1: b.arena.tensor(floats(4))})
        with pytest.raises(ValueError, match="arena"):
            b.transport.offer({9: np.zeros(4, np.float32)})
        with pytest.raises(TransportError):
            b.transport.release(1, 4)
        with pytest.raises(CorruptMessageError):
            channel.prepare(b"nonsense")


def test_a_withdrawn_edge_is_not_written_and_its_slot_can_be_used_again() -> None:
    with pair("shm") as (a, b):
        channel = a.channels[1]
        slot = b.arena.tensor(floats(100))
        channel.prepare(b.transport.offer({1: slot, 2: b.arena.tensor(floats(1))}))
        channel.push(1, 0, np.ones(100, np.float32), deadline=soon()).result(soon())
        waiting = channel.push(1, 1, np.full(100, 2, np.float32), deadline=soon())
        arrival = b.transport.arrival(1, 1)
        b.transport.withdraw([1, 2], StepAbortedError("the step was given up"))
        with pytest.raises(StepAbortedError, match="given up"):
            arrival.result(soon())
        with pytest.raises(StepAbortedError, match="withdrawn"):
            waiting.result(soon())
        slot[:] = 3
        # Edge 2 was never bound: the sender learns it when it tries.
        with pytest.raises(StepAbortedError):
            channel.push(2, 0, np.zeros(1, np.float32), deadline=soon()).result(soon())
        assert (slot == 3).all()
        channel.prepare(b.transport.offer({1: slot}))
        channel.push(1, 9, np.full(100, 4, np.float32), deadline=soon()).result(soon())
        b.transport.arrival(1, 9).result(soon())
        assert (slot == 4).all()


def test_a_lost_producer_fails_its_arrivals() -> None:
    with pair("shm") as (a, b):
        a.channels[1].prepare(b.transport.offer({1: b.arena.tensor(floats(1))}))
        a.channels[1].push(1, 0, np.zeros(1, np.float32), deadline=soon()).result(soon())
        b.transport.arrival(1, 0).result(soon())
        pending = b.transport.arrival(1, 1)
        a.channels[1].abort(PeerLostError("test"))
        with pytest.raises(PeerLostError):
            pending.result(soon())
        with pytest.raises(PeerLostError):
            b.transport.arrival(1, 1).result(soon())
        b.transport.withdraw([1], StepAbortedError("over"))  # does not wait for who is gone


# Peers that break the rules: the connection fails with CorruptMessageError, nothing else happens.


def break_rules(channel: Any, message: bytes) -> None:
    with channel._lock:
        channel.link.post_send(message)


def test_writes_to_slots_are_checked_by_owner_credit_and_generation() -> None:
    forged = [
        lambda slot: messages.edge_immediate(slot.index + 1, 0),  # no such slot
        lambda slot: messages.edge_immediate(slot.index, 0),  # not bound
        lambda slot: 5,  # answers a request that only the other end may make
    ]
    for forge in forged:
        with pair("shm") as (a, b):
            memory = b.arena.tensor(floats(10))
            memory[:] = 9
            slot = decode_offer(b.transport.offer({1: memory}))[0]
            channel = a.channels[1]
            with channel._lock:
                channel.link.post_write(np.empty(0, np.uint8), messages.NO_REGION, imm=forge(slot))
            assert eventually(lambda channel=channel: channel.reason is not None)
            assert isinstance(channel.reason, PeerLostError)


def test_a_generation_without_credit_ends_the_connection() -> None:
    for generation in (0, 1, 2):  # again, the next one without credit, one out of turn
        with pair("shm") as (a, b):
            channel = a.channels[1]
            offer = b.transport.offer({1: b.arena.tensor(floats(10))})
            slot = decode_offer(offer)[0]
            channel.prepare(offer)
            channel.push(1, 0, np.zeros(10, np.float32), deadline=soon()).result(soon())
            b.transport.arrival(1, 0).result(soon())
            endpoint = serving(b.transport)
            with channel._lock:
                channel.link.post_write(
                    np.empty(0, np.uint8), messages.NO_REGION, imm=messages.edge_immediate(slot.index, generation)
                )
            assert eventually(lambda endpoint=endpoint: endpoint.reason is not None)
            assert isinstance(endpoint.reason, CorruptMessageError)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00",
        bytes(8),
        bytes([255] * 40),
        messages.pack_header(Kind.BYE_ACK, 0, 0, 0),
        messages.pack_header(Kind.CREDIT, 1, 60_000, 0),
        messages.pack_header(Kind.CREDIT, 2, 1, 0),
        messages.pack_header(Kind.RELEASE, 0, 0, 5),
        messages.encode_again(5, messages.NO_REGION),
        messages.encode_edges(Kind.WITHDRAWN, 77, [1]),
        messages.encode_metadata(0, messages.encode_spec(floats(1))),
        messages.encode_fetch(1, messages.Mode.READ, messages.NO_REGION, 0, 0, b"", b"k")[:-3],
    ],
)
def test_a_client_that_breaks_the_protocol_is_cut_off(message: bytes) -> None:
    with pair("shm") as (a, b):
        endpoint = serving(b.transport)
        break_rules(a.channels[1], message)
        assert eventually(lambda: endpoint.reason is not None and a.channels[1].reason is not None)
        assert isinstance(endpoint.reason, CorruptMessageError)
        assert isinstance(a.channels[1].reason, PeerLostError)
        # Others are served on.
        with pytest.raises(PeerLostError):
            a.channels[1].fetch("k", deadline=soon()).result(soon())


SPEC = messages.encode_spec(floats(100))


@pytest.mark.parametrize("protocol", ["read", "write"])
@pytest.mark.parametrize(
    "message",
    [
        messages.encode_offer(0, messages.Region(0, 0xDEAD, 400), 0, SPEC),  # a key that was never given
        messages.encode_offer(0, messages.Region(1 << 63, 0xDEAD, 400), 0, SPEC),
        messages.encode_offer(1, messages.Region(0, 1, 400), 0, SPEC),  # a request that is not pending
        messages.encode_offer(0, messages.Region(0, 1, 300), 100, SPEC),  # a piece out of turn
        messages.encode_metadata(7, SPEC),
        messages.encode_edge_credit(3, 4)[:-1],
        messages.pack_eager(Kind.EAGER, 0, 0, 0, 8, len(SPEC)) + SPEC + bytes(8),
        messages.pack_eager(Kind.EAGER, 0, 0, 0, 0, len(SPEC)) + SPEC + bytes(401),
    ],
)
def test_a_server_that_breaks_the_protocol_is_cut_off(message: bytes, protocol: str) -> None:
    with pair("shm", params={"protocol": protocol}) as (a, b):
        future = a.channels[1].fetch("never", a.arena.tensor(floats(100)), deadline=soon())
        assert eventually(lambda: b.source.asked("never"))
        break_rules(serving(b.transport), message)
        error = future.exception(soon())
        assert isinstance(error, CorruptMessageError), repr(error)


@pytest.mark.parametrize("past_the_end", [True, False])
def test_an_address_outside_the_area_is_never_followed(past_the_end: bool) -> None:
    """The right key with addresses beyond the area, as one would craft them to reach other memory."""
    with pair("shm", params={"protocol": "read"}) as (a, b):
        into = a.arena.tensor(floats(100))
        into[:] = 9
        future = a.channels[1].fetch("never", into, deadline=soon())
        assert eventually(lambda: b.source.asked("never"))
        addr = b.arena.nbytes - 399 if past_the_end else (1 << 64) - 200
        key = b.transport._arena_key
        break_rules(serving(b.transport), messages.encode_offer(0, messages.Region(addr, key, 400), 0, SPEC))
        assert isinstance(future.exception(soon()), CorruptMessageError)
        assert (into == 9).all()


def test_a_destination_outside_the_area_is_never_written() -> None:
    with pair("shm", params={"protocol": "write"}) as (a, b):
        b.source.put("k", pattern_tensor(floats(100), 1, b.arena))
        region = messages.Region(a.arena.nbytes - 399, a.transport._arena_key, 400)
        endpoint = serving(b.transport)
        break_rules(a.channels[1], messages.encode_fetch(9, messages.Mode.WRITE, region, 0, 0, SPEC, b"k"))
        assert eventually(lambda: endpoint.reason is not None)
        assert isinstance(endpoint.reason, CorruptMessageError)
        assert eventually(lambda: b.source.leased == 0)


# Ends


def test_leases_are_held_until_the_peer_has_stopped() -> None:
    """The server gives memory back only when the client can no longer read it."""
    with pair("shm", params={"protocol": "read"}) as (a, b):
        tensor = pattern_tensor(floats(10_000), 1, b.arena)
        b.source.put("k", tensor)
        lease = a.channels[1].borrow("k", deadline=soon()).result(soon())
        assert b.source.leased == 1
        a.channels[1].close()
        assert eventually(lambda: b.source.leased == 0)
        assert same_bytes(lease.array, tensor)  # mapped as long as somebody looks
        lease.release()


def test_memory_of_an_abandoned_fetch_is_held_until_the_peer_answers() -> None:
    with pair("shm", params={"protocol": "write"}) as (a, b):
        channel = a.channels[1]
        b.source.put("k;1", pattern(9000))
        channel.fetch("k;1", deadline=soon()).result(soon())  # so that the shape is known
        future = channel.fetch("k;2", deadline=Deadline.after(0.01))
        assert future.exception(soon()) is not None
        assert a.arena.used_bytes > 0  # the peer was told to write there
        b.source.put("k;2", pattern(9000))
        assert eventually(lambda: a.arena.used_bytes == 0)


def test_an_aborted_channel_holds_memory_until_the_peer_hangs_up() -> None:
    with pair("shm", params={"protocol": "write"}) as (a, b):
        channel = a.channels[1]
        b.source.put("k;1", pattern(9000))
        channel.fetch("k;1", deadline=soon()).result(soon())
        future = channel.fetch("k;2", deadline=soon())
        assert eventually(lambda: b.source.asked("k;2"))
        channel.abort(StepAbortedError("given up"))
        assert isinstance(future.exception(soon()), StepAbortedError)
        assert eventually(lambda: a.arena.used_bytes == 0)
        b.source.put("k;2", pattern(9000))  # answers nobody
        assert eventually(lambda: b.source.leased == 0)


def test_memory_of_a_write_that_is_cut_short_is_held_until_the_link_is_closed() -> None:
    """Pieces were posted and nothing will tell of them. The loop notices memory that is given up too early."""
    with loop(protocol="write", chunk_bytes=300) as ends:
        link = ends.links[1]
        link.max_inflight = 0  # so that the last piece, which would give a completion, cannot be posted
        strided = np.stack([pattern(9000, 1), pattern(9000, 2)], axis=1)[:, 0]
        ends.shelf.put("k", strided)
        future = ends.channel.fetch("k", ends.client.arena.tensor(TensorSpec.of(strided)), deadline=soon())
        assert eventually(lambda: len(link.unheard) == 29)
        ends.serving.abort(StepAbortedError("given up"))
        ends.channel.abort(StepAbortedError("given up"))
        assert isinstance(future.exception(soon()), StepAbortedError)


def test_loop_ends_say_goodbye(capsys: pytest.CaptureFixture[str]) -> None:
    ends: Loop
    with loop() as ends:
        future = ends.channel.fetch("never", deadline=soon())
        ends.client.close()
        assert future.exception(soon()) is not None
        assert ends.serving.reason is not None


@pytest.mark.parametrize(
    "params",
    [{"protocol": "carrier pigeon"}, {"depth": 3}, {"eager_threshold": -1}, {"inflight": 0}, {"protocol": 3}],
)
def test_settings_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError), pair("shm", params=params):
        pass
