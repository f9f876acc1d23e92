"""VerbsLink over a simulated device, and over a real one (marker rxe: inside the soft-RoCE guest, by `make test-rxe`)."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError, CorruptMessageError, PeerLostError, TransportError
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec
from runtime.testing import Rank, eventually, pattern, spawn
from runtime.tests.verbs_simulation import PLACE, SimulatedDevice, objects
from runtime.transport.base import Counters
from runtime.transport.onesided.link import Completion, Op, Region
from runtime.transport.verbs.binding import NAMES, Device, QpState, load_binding
from runtime.transport.verbs.device import Place, choose_place, why_unavailable
from runtime.transport.verbs.link import VerbsLink
from runtime.transport.verbs.memory import Memory
from runtime.transport.verbs.qp import QpAttributes

MIB = 1 << 20
REAL = [
    pytest.mark.rxe,
    pytest.mark.skipif(why_unavailable() is not None, reason="needs an RDMA device: make test-rxe"),
]


def real(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that only a real device can pass."""
    for mark in REAL:
        test = mark(test)
    return test


@dataclass
class Side:
    """An open device with a registered arena, from which links are made."""

    device: Device
    place: Place
    arena: Arena
    memory: Memory
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def open(cls, binding: str = "auto", arena_bytes: int = 4 * MIB) -> Side:
        place = PLACE if binding == "simulated" else choose_place()
        device = SimulatedDevice() if binding == "simulated" else load_binding(binding).open(place.device)
        arena = Arena(arena_bytes)
        counters = Counters()
        return cls(device, place, arena, Memory(device, arena, counters, 64 * MIB, 64), counters)

    def link(self, attributes: QpAttributes | None = None, **options: int) -> VerbsLink:
        gid = self.place.gid
        return VerbsLink(
            self.device, self.memory, port=self.place.port, gid=gid.raw, gid_index=gid.index,
            attributes=attributes or QpAttributes(timeout=10, retry_count=3),
            **{"depth": 64, "message_bytes": 2048, "send_depth": 64, **options},
        )  # fmt: skip

    def array(self, nbytes: int, seed: int | None = None) -> np.ndarray:
        array = self.arena.tensor(TensorSpec((nbytes,), np.dtype(np.uint8)))
        array[...] = 0xEE if seed is None else pattern(nbytes, seed)
        return array

    def close(self) -> None:
        self.memory.close()
        self.device.close()
        self.arena.close()


def join(left: VerbsLink, right: VerbsLink) -> None:
    """Connect two links of this process."""
    controls = socket.socketpair()
    descriptions = left.describe(), right.describe()
    left.connect(descriptions[1], "/job:test/task:1")
    right.connect(descriptions[0], "/job:test/task:0")
    left.adopt(controls[0])
    right.adopt(controls[1])


def readable(fd: int | None, seconds: float) -> bool:
    """Does the descriptor become readable in time?"""
    assert fd is not None
    return bool(select.select([fd], [], [], seconds)[0])


def collect(link: VerbsLink, count: int, seconds: float = 20.0) -> list[Completion]:
    """``count`` completions; payloads are copied."""
    deadline = Deadline.after(seconds)
    found: list[Completion] = []
    while len(found) < count:
        for item in link.poll():
            found.append(item if item.payload is None else item._replace(payload=memoryview(bytes(item.payload))))
        deadline.check(f"{count} completions, {len(found)} came")
    return found


@pytest.fixture(params=["simulated", *(pytest.param(name, marks=REAL) for name in NAMES)])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    if request.param == "ibverbs":
        pytest.importorskip("ibverbs", reason="the ibverbs wheel is not installed (pip install 'verbflow[ibverbs]')")
    opened = Side.open(request.param)
    yield opened
    opened.close()


@pytest.fixture
def links(side: Side) -> Iterator[tuple[VerbsLink, VerbsLink]]:
    pair = side.link(), side.link()
    join(*pair)
    yield pair
    for link in pair:
        link.close()


def test_a_connected_link_is_ready_and_knows_its_limits(links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    assert left.state() == right.state() == QpState.RTS
    assert left.max_inline >= 64
    assert left.max_transfer >= MIB
    assert left.depth == 64 and left.max_message == 2048


def test_messages_arrive_whole_and_in_order_inline_and_not(links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    sizes = [0, 1, 8, 511, 512, 513, 2047, 2048]
    for at, size in enumerate(sizes):
        left.post_send(pattern(size, at).tobytes(), tag=at, signalled=True)
    received = collect(right, len(sizes))
    assert [item.op for item in received] == [Op.MESSAGE] * len(sizes)
    for at, size in enumerate(sizes):
        assert received[at].payload == pattern(size, at).tobytes()
    assert [(item.op, item.tag) for item in collect(left, len(sizes))] == [(Op.SENT, at) for at in range(len(sizes))]
    with pytest.raises(ValueError, match="longer than 2048"):
        left.post_send(bytes(2049))


def test_a_message_in_two_parts_arrives_as_one(links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    sizes = [0, 1, 511, 512, 513, 2048]
    for at, size in enumerate(sizes):
        whole = pattern(size, at).tobytes()
        left.post_gathered(whole[: size // 3], memoryview(whole)[size // 3 :])
    received = collect(right, len(sizes))
    assert [bytes(item.payload or b"") for item in received] == [pattern(s, at).tobytes() for at, s in enumerate(sizes)]
    with pytest.raises(ValueError, match="longer than 2048"):
        left.post_gathered(bytes(2), memoryview(bytes(2047)))


def test_many_messages_go_round_the_ring(links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    total, sent, received = 1000, 0, 0
    deadline = Deadline.after(60)
    while received < total:
        while sent < total and sent - received < left.depth:
            try:
                left.post_send(sent.to_bytes(4, "little") * (1 + sent % 300))
            except BlockingIOError:
                break
            sent += 1
        assert left.poll() == []  # unsignalled: what the link signals for itself it keeps to itself
        for item in right.poll():
            assert item.payload == received.to_bytes(4, "little") * (1 + received % 300)
            received += 1
        deadline.check("the messages")


def test_messages_are_taken_in_order_with_what_is_no_message(side: Side, links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    assert not right.peek() and right.take() is None and right.poll() == []
    left.post_unsignalled(b"first")
    left.post_write(side.array(8, seed=1), right.region(side.array(8)), imm=5)
    left.post_unsignalled(b"second")
    assert eventually(lambda: bool(right.peek()))
    assert bytes(right.take() or b"") == b"first"
    assert eventually(lambda: bool(right.peek()))
    assert right.take() is None, "an immediate is no message"
    assert [item.imm for item in right.poll(1)] == [5]
    assert eventually(lambda: bool(right.peek()))
    assert bytes(right.take() or b"") == b"second"
    for at in range(100):  # more than are posted together
        left.post_unsignalled(at.to_bytes(2, "little") * 300)
        left.poll()
        while (message := right.take()) is None:
            left.poll()
        assert message == at.to_bytes(2, "little") * 300


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 65536 + 1, MIB])
def test_writes_and_reads_put_every_byte_in_its_place(
    side: Side, links: tuple[VerbsLink, VerbsLink], nbytes: int
) -> None:
    left, right = links
    source, target = side.array(nbytes, seed=nbytes), side.array(nbytes + 128)
    inside = target[64 : 64 + nbytes]
    left.post_write(source, right.region(inside), imm=0xFEDCBA98, tag=7)
    assert [(item.op, item.imm) for item in collect(right, 1)] == [(Op.IMMEDIATE, 0xFEDCBA98)]
    assert [(item.op, item.tag, item.error) for item in collect(left, 1)] == [(Op.WRITTEN, 7, None)]
    assert np.array_equal(inside, source)
    assert (target[:64] == 0xEE).all() and (target[64 + nbytes :] == 0xEE).all()

    back = side.array(nbytes + 128)
    left.post_read(back[64 : 64 + nbytes], right.region(inside), tag=9)
    assert [(item.op, item.tag) for item in collect(left, 1)] == [(Op.READ, 9)]
    assert np.array_equal(back[64 : 64 + nbytes], source)
    assert (back[:64] == 0xEE).all() and (back[64 + nbytes :] == 0xEE).all()


def test_reads_before_a_signalled_one_are_complete_with_it(side: Side, links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    source, back = side.array(256 << 10, seed=6), side.array(256 << 10)
    for at in range(0, len(source), 32 << 10):
        piece = slice(at, at + (32 << 10))
        left.post_read(back[piece], right.region(source[piece]), tag=at, signalled=piece.stop == len(source))
    assert [(item.op, item.tag) for item in collect(left, 1)] == [(Op.READ, 224 << 10)]
    assert np.array_equal(back, source)


def test_a_message_comes_after_all_writes_posted_before_it(side: Side, links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    source, target = side.array(256 << 10, seed=5), side.array(256 << 10)
    for at in range(0, len(source), 32 << 10):
        left.post_write(
            source[at : at + (32 << 10)], right.region(target[at : at + (32 << 10)]), tag=1, signalled=False
        )
    left.post_send(b"there")
    assert collect(right, 1)[0].payload == b"there"
    assert np.array_equal(target, source)


def test_a_full_queue_says_so_and_empties(side: Side) -> None:
    left, right = side.link(send_depth=8), side.link()
    join(left, right)
    source, target = side.array(64, seed=1), side.array(64)
    remote = right.region(target)
    accepted = 0
    deadline = Deadline.after(30)
    while accepted < 200:
        try:
            left.post_write(source, remote, tag=accepted, signalled=False)
            accepted += 1
        except BlockingIOError:
            assert left.poll() == []
        deadline.check("room in the queue")
    left.close()
    right.close()


def test_memory_that_is_not_registered_is_refused_here(side: Side, links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    heap = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match="no registered memory"):
        left.region(heap)
    with pytest.raises(ValueError, match="no registered memory"):
        left.post_write(heap, right.region(side.array(100)))
    assert left.region(np.empty(0, np.float32)) == Region(0, 0, 0)
    entry = side.memory.cache.acquire(heap)
    heap[...] = pattern(100, 3)
    target = side.array(100)
    left.post_write(heap, right.region(target))
    collect(left, 1)
    assert np.array_equal(target, pattern(100, 3))
    assert left.region(heap).key != left.region(target).key
    side.memory.cache.release(entry)


def test_fresh_memory_for_one_use(side: Side, links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    before = side.counters.registrations
    fresh = right.allocate(10_000)
    assert side.counters.registrations == before + 1
    left.post_write(side.array(10_000, seed=2), right.region(fresh))
    collect(left, 1)
    assert np.array_equal(fresh, pattern(10_000, 2))
    right.free(fresh)
    with pytest.raises(ValueError, match="no registered memory"):
        right.region(fresh)


@pytest.mark.parametrize("harm", ["key", "bounds"])
def test_the_device_refuses_memory_that_was_not_exported(
    side: Side, links: tuple[VerbsLink, VerbsLink], harm: str
) -> None:
    left, right = links
    target = side.array(4096)
    honest = right.region(target)
    forged = (
        Region(honest.addr, honest.key ^ 0x5A5A, 64)
        if harm == "key"
        else Region(side.arena.address - 64, honest.key, 64)
    )
    left.post_write(side.array(64, seed=1), forged, tag=3)
    [completion] = collect(left, 1)
    assert isinstance(completion.error, CorruptMessageError)
    assert "/job:test/task:1" in str(completion.error) and "REM_ACCESS_ERR" in str(completion.error)
    assert (target == 0xEE).all()
    assert left.state() == QpState.ERR
    assert left.poll() == []
    with pytest.raises(CorruptMessageError):
        left.post_send(b"more")


def test_a_peer_that_is_not_there_any_more_is_named_with_the_reason(side: Side) -> None:
    left, right = side.link(QpAttributes(timeout=8, retry_count=2)), side.link()
    join(left, right)
    right.close()
    for tag in range(3):
        left.post_write(side.array(64, seed=1), Region(side.arena.address, 1, 64), tag=tag)
    ended = collect(left, 3)
    assert [item.tag for item in ended] == [0, 1, 2]
    assert all(isinstance(item.error, PeerLostError) for item in ended)
    assert "RETRY_EXC_ERR" in str(ended[0].error) and "2 retries" in str(ended[0].error)
    left.close()


def test_abort_ends_what_is_pending_and_the_peer_hears_why(links: tuple[VerbsLink, VerbsLink], side: Side) -> None:
    left, right = links
    reason = TransportError("step 7 was given up")
    assert right.lost() is None
    right.post_read(side.array(64), left.region(side.array(MIB)).slice(0, 64), tag=5)
    right.abort(reason)
    right.abort(TransportError("another reason"))
    [completion] = collect(right, 1)
    assert completion.tag == 5 and completion.error is reason
    assert right.poll() == [] and right.state() == QpState.ERR
    assert readable(left.control, 10)
    assert "step 7 was given up" in str(left.lost())
    assert isinstance(left.lost(), PeerLostError)  # then the end of the connection


def test_close_is_final_and_harmless_twice(side: Side) -> None:
    left, right = side.link(), side.link()
    join(left, right)
    left.close()
    left.close()
    assert readable(right.control, 10)
    assert "gone" in str(right.lost())
    with pytest.raises(ChannelClosedError):
        left.post_send(b"x")
    left.arm()
    left.acknowledge()
    left.disarm()
    left.abort(TransportError("late"))
    assert left.lost() is None
    right.close()


def test_a_sleeper_is_woken_by_a_completion(links: tuple[VerbsLink, VerbsLink]) -> None:
    left, right = links
    for at in range(5):
        bell = right.arm()
        assert bell is not None and right.poll() == []
        assert not readable(bell, 0)
        left.post_send(b"wake %d" % at)
        assert readable(bell, 10)
        right.acknowledge()
        assert not readable(bell, 0)
        assert collect(right, 1)[0].payload == b"wake %d" % at


def test_connecting_and_closing_leaks_no_descriptor_and_no_memory(side: Side) -> None:
    def resources() -> tuple[int, dict[str, str]]:
        with open("/proc/self/maps") as maps:
            mapped = sum("uverbs" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), {
            "mapped": str(mapped),
            "simulated": str(objects()),
            **kernel_objects(),
        }

    def cycle(seed: int) -> None:
        left, right = side.link(), side.link()
        join(left, right)
        source, target = side.array(1000, seed=seed), side.array(1000)
        left.post_write(source, right.region(target), imm=seed)
        collect(right, 1)
        assert np.array_equal(source, target)
        left.close()
        right.close()

    cycle(0)
    before = resources()
    for seed in range(1, 500):
        cycle(seed)
    assert resources() == before


def kernel_objects() -> dict[str, str]:
    """Queue pairs, regions and queues that this process holds, as the kernel counts them."""
    import re
    import subprocess

    found = {}
    for kind in ("qp", "mr", "cq", "pd"):
        shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True).stdout
        found[kind] = str(len(re.findall(rf"\bpid {os.getpid()}\b", shown)))
    return found


def two_processes(body: Callable[..., object], *args: object, may_die: tuple[int, ...] = ()) -> list[object]:
    return spawn(2, body, *args, timeout=120, may_die=may_die)


def connected(rank: Rank, side: Side, attributes: QpAttributes | None = None) -> VerbsLink:
    """This rank's link with the other rank, over a TCP control connection."""
    link = side.link(attributes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = rank.exchange((server.getsockname()[1], link.describe()))
        if rank.rank == 0:
            control = socket.create_connection(("127.0.0.1", ports[1][0]))
        else:
            control, _ = server.accept()
        rank.barrier()
    link.connect(ports[1 - rank.rank][1], f"/job:test/task:{1 - rank.rank}")
    link.adopt(control)
    rank.barrier()
    return link


def rank_that_transfers(rank: Rank, sizes: list[int]) -> None:
    side = Side.open(arena_bytes=3 * max(sizes))
    link = connected(rank, side)
    for at, nbytes in enumerate(sizes):
        source, target = side.array(nbytes, seed=2 * at + rank.rank), side.array(nbytes)
        remote = rank.exchange(link.region(target))[1 - rank.rank]
        pieces = range(0, nbytes, link.max_transfer)
        for start in pieces:
            size = min(link.max_transfer, nbytes - start)
            last = start + size == nbytes
            link.post_write(
                source[start : start + size], remote.slice(start, size), imm=at if last else None, tag=start
            )
        found = collect(link, len(pieces) + 1, seconds=60)
        assert sorted(item.op for item in found) == [Op.WRITTEN] * len(pieces) + [Op.IMMEDIATE]
        assert np.array_equal(target, pattern(nbytes, 2 * at + 1 - rank.rank)), nbytes
        rank.barrier()
    link.close()
    side.close()


@real
def test_two_processes_exchange_up_to_64_mib() -> None:
    two_processes(rank_that_transfers, [8, 65_536, 3 * MIB + 5, 64 * MIB])


def rank_whose_peer_dies(rank: Rank, idle: bool) -> str:
    side = Side.open()
    link = connected(rank, side, QpAttributes(timeout=10, retry_count=2))
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert readable(link.control, 20), "the control connection is still open"
    error = link.lost()
    if not idle:
        link.post_write(side.array(64), Region(side.arena.address, 1, 64))
        error = collect(link, 1)[0].error
    link.close()
    side.close()
    assert isinstance(error, PeerLostError)
    return str(error)


@real
@pytest.mark.parametrize(("idle", "reason"), [(True, "its process ended"), (False, "RETRY_EXC_ERR")])
def test_a_killed_peer_is_noticed_idle_or_in_a_transfer(idle: bool, reason: str) -> None:
    message = two_processes(rank_whose_peer_dies, idle, may_die=(1,))[0]
    assert "/job:test/task:1" in str(message) and reason in str(message)
