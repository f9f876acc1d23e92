"""Shared memory: what is handed over, who may connect, and that nothing is left when processes and connections end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ConfigError,
    CorruptMessageError,
    PeerLostError,
    ProtocolMismatchError,
    ShapeError,
    TransportError,
    UnauthenticatedError,
)
from runtime.leaks import LeakWatch
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec
from runtime.testing import End, Rank, Shelf, eventually, open_end, pair, pattern, pattern_tensor, spawn
from runtime.transport.base import Lease, Reply
from runtime.transport.onesided.link import Op, Region
from runtime.transport.onesided.serving import ServingEndpoint
from runtime.transport.shm import area, hello
from runtime.transport.shm.hello import Hello
from runtime.transport.shm.link import ShmLink
from runtime.transport.shm.ring import _HEAD, Receiver
from runtime.transport.shm.transport import ShmTransport

MIB = 1 << 20


def soon() -> Deadline:
    return Deadline.after(30)


def bytes_spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), np.dtype(np.uint8))


# The raw Link


@contextlib.contextmanager
def linked(arena_bytes: int = MIB) -> Iterator[tuple[ShmLink, ShmLink, Arena, Arena]]:
    """Two raw links of this process, connected."""
    arenas = [Arena(arena_bytes, shared=True) for _ in range(2)]
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    halves = []
    for key, arena in enumerate(arenas, start=1):
        receiver = Receiver(128, 2048)
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        halves.append((receiver, bell, key, arena))
    links = []
    for at in range(2):
        receiver, bell, key, arena = halves[at]
        other_receiver, other_bell, other_key, other = halves[1 - at]
        fds = tuple(os.dup(fd) for fd in (other_receiver.fd, other_bell, other.fd))
        theirs = Hello(128, 2048, 64, other.nbytes, other_key, 0, "", "", fds)  # type: ignore[arg-type]
        links.append(ShmLink(f"peer {at}", sockets[at], receiver, bell, arena, key, theirs))
    try:
        yield links[0], links[1], arenas[0], arenas[1]
    finally:
        for link in links:
            link.close()
        for arena in arenas:
            arena.close()


def test_link_writes_reads_and_says_so_in_order() -> None:
    with linked() as (left, right, near, far):
        source = pattern_tensor(bytes_spec(5000), 1, near)
        target = far.tensor(bytes_spec(5000))
        region = right.region(target)
        left.post_write(source, region, imm=77, tag=5)
        left.post_send(b"behind it", tag=6, signalled=True)
        assert [(c.op, c.tag) for c in left.poll()] == [(Op.WRITTEN, 5), (Op.SENT, 6)]
        immediate, message = right.poll()
        assert (immediate.op, immediate.imm) == (Op.IMMEDIATE, 77)
        assert (message.op, bytes(message.payload)) == (Op.MESSAGE, b"behind it")
        assert np.array_equal(target, source)
        back = np.zeros(100, np.uint8)
        left.post_read(back, region.slice(1000, 100), tag=9)
        assert [(c.op, c.tag) for c in left.poll()] == [(Op.READ, 9)]
        assert np.array_equal(back, source[1000:1100])


def test_link_follows_no_address_outside_the_area() -> None:
    with linked() as (left, _, near, far):
        local = near.tensor(bytes_spec(64))
        bad = [
            Region(far.nbytes - 63, 2, 64),
            Region(1 << 63, 2, 64),
            Region((1 << 64) - 32, 2, 64),
            Region(0, 1, 64),
            Region(0, 3, 64),
        ]
        for region in bad:
            for act in (left.post_write, left.post_read):
                with pytest.raises(CorruptMessageError):
                    act(local, region)
            with pytest.raises(CorruptMessageError):
                left.map(region, bytes_spec(region.nbytes))
        assert left.poll() == []
        for region in (Region(0, 2, 63), Region(0, 2, 65)):
            with pytest.raises(ValueError, match="of"):
                left.post_write(local, region)
        with pytest.raises(ValueError, match="arena"):
            left.region(np.zeros(8, np.uint8))


def test_link_lends_memory_read_only() -> None:
    with linked() as (left, right, _, far):
        tensor = pattern_tensor(bytes_spec(100), 1, far)
        view = left.map(right.region(tensor), bytes_spec(100))
        assert np.array_equal(view, tensor)
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            view.flags.writeable = True


def test_link_rings_who_sleeps() -> None:
    with linked() as (left, right, _, _):
        bell = right.arm()
        assert bell == right.arm()
        left.post_send(b"x")
        assert os.eventfd_read(bell) == 1
        right.acknowledge()  # nothing to take: does not block
        left.abort(PeerLostError("test"))
        assert isinstance(right.lost(), PeerLostError)
        assert left.lost() is None
        right.abort(PeerLostError("test"))
        assert isinstance(left.lost(), PeerLostError)


def test_link_exports_buffers_made_for_one_use() -> None:
    with linked() as (left, right, near, _):
        local = pattern_tensor(bytes_spec(5000), 3, near)
        for _ in range(20):
            buffer = right.allocate(5000)
            region = right.region(buffer)
            left.post_write(local, region)
            assert np.array_equal(buffer, local)
            right.free(buffer)
        assert left.lost() is None  # takes what came over the socket
        with pytest.raises(CorruptMessageError):
            left.post_write(local, region)


def test_a_buffer_that_comes_while_the_link_closes_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress thread reads the socket; what it is just taking must not outlive the link."""
    taking, go_on = threading.Event(), threading.Event()
    check = area.check

    def slowly(fd: int, nbytes: int) -> None:
        taking.set()
        assert go_on.wait(30)
        check(fd, nbytes)

    with linked() as (left, right, _, _):
        buffer = right.allocate(5000)
        monkeypatch.setattr(area, "check", slowly)
        reader = threading.Thread(target=left.lost)
        reader.start()
        assert taking.wait(30)
        closer = threading.Thread(target=left.close)
        closer.start()
        closer.join(0.1)
        go_on.set()
        reader.join(30)
        closer.join(30)
        right.free(buffer)
        assert not left._areas  # and no descriptor is left: see conftest.py


def test_everything_of_a_closed_link_may_be_called() -> None:
    with linked() as (left, right, _, _):
        left.close()
        left.close()
        left.arm()
        left.disarm()
        left.acknowledge()
        left.abort(PeerLostError("test"))
        assert not left.peek()
        assert isinstance(right.lost(), PeerLostError)


# What is handed over


def test_memory_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(ProtocolMismatchError):
            area.check(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        area.check(fd, 8192)
        with pytest.raises(ProtocolMismatchError):
            area.check(fd, 8193)
    finally:
        os.close(fd)
    reader, writer = os.pipe()
    with pytest.raises(ProtocolMismatchError):
        area.check(reader, 1)
    os.close(reader)
    os.close(writer)


def test_nobody_can_resize_an_area() -> None:
    fd = area.create("test", 4096)
    try:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_an_arena_that_cannot_be_shared_is_refused() -> None:
    with contextlib.closing(Arena(1 << 16)) as arena:
        from runtime.transport.base import Options

        with pytest.raises(ConfigError, match="shared=True"):
            ShmTransport(Options(), arena)


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    availability = ShmTransport.probe()
    assert not availability.ok
    assert "aarch64" in availability.reason


# Who may connect


@contextlib.contextmanager
def listening() -> Iterator[tuple[End, bytes]]:
    end = open_end("shm", Shelf(), arena_bytes=MIB)
    try:
        yield end, end.transport.listen(end.source)
    finally:
        end.close()


def stranger(address: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(b"\0" + address.rpartition(b":")[2])
    return sock


def my_hello(token: str = "a run's token", **changes: int) -> Hello:
    fields = {
        "slots": 128,
        "stride": 2048,
        "depth": 64,
        "arena_bytes": 4096,
        "arena_key": 5,
        "arena_used": 0,
        **changes,
    }
    ring = area.create("test", 1 << 20)
    return Hello(**fields, token=token, task="stranger", fds=(ring, os.eventfd(0), area.create("test", 4096)))


def answered(sock: socket.socket) -> Hello | None:
    return hello.receive(sock, hello.WELCOME, "", "the listener")


@given(st.binary(min_size=1, max_size=200))
def test_hello_survives_any_bytes(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(data)
        with pytest.raises((CorruptMessageError, ProtocolMismatchError, TransportError)):
            hello.receive(ours, hello.HELLO, "token", "peer")


@given(st.integers(0, 60), st.integers(0, 255))
def test_hello_survives_damage(at: int, value: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine = my_hello("t")
    with ours, theirs, contextlib.closing(mine):
        hello.send(theirs, hello.HELLO, mine)
        message, fds = hello.receive_fds(ours)
        damaged = bytearray(message)
        damaged[at % len(damaged)] = value
        socket.send_fds(theirs, [bytes(damaged)], fds)
        for fd in fds:
            os.close(fd)
        try:
            received = hello.receive(ours, hello.HELLO, "t", "peer")
        except TransportError:
            return
        assert received is not None
        received.close()


def test_strangers_get_a_reason_and_others_are_served() -> None:
    with listening() as (end, address):
        silent = stranger(address)  # says nothing, ever
        with stranger(address) as sock:
            sock.send(b"GET / HTTP/1.1")
            with pytest.raises(CorruptMessageError):
                answered(sock)
        wrong = [
            (my_hello("another token"), UnauthenticatedError),
            (my_hello(slots=100), ProtocolMismatchError),
            (my_hello(stride=100), ProtocolMismatchError),
            (my_hello(depth=4096), ProtocolMismatchError),
        ]
        for mine, expected in wrong:
            with stranger(address) as sock, contextlib.closing(mine):
                hello.send(sock, hello.HELLO, mine)
                with pytest.raises(expected):
                    answered(sock)
        # Descriptors that are not what they should be: the connection just ends.
        for mine in (my_hello(arena_bytes=1 << 40), my_hello(slots=4096)):
            with stranger(address) as sock, contextlib.closing(mine):
                hello.send(sock, hello.HELLO, mine)
                assert answered(sock) is None
        reader, writer = os.pipe()
        swapped = my_hello()
        with stranger(address) as sock:
            socket.send_fds(sock, [_message_of(swapped)], [swapped.fds[0], writer, swapped.fds[2]])
            assert answered(sock) is None
        for fd in (reader, writer, *swapped.fds):
            os.close(fd)
        end.source.put("k", pattern(10))
        other = open_end("shm", arena_bytes=MIB)
        channel = other.transport.connect(address, peer="the listener", deadline=soon())
        assert np.array_equal(channel.fetch("k", deadline=soon()).result(soon()), pattern(10))
        other.close()
        silent.close()


def _message_of(mine: Hello) -> bytes:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        hello.send(ours, hello.HELLO, mine)
        message, fds = hello.receive_fds(theirs)
        for fd in fds:
            os.close(fd)
    return message


def test_who_is_accepted_while_the_transport_closes_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, closing = threading.Event(), threading.Event()
    accept = socket.socket.accept

    def slowly(sock: socket.socket) -> tuple[socket.socket, object]:
        connection = accept(sock)
        accepted.set()
        assert closing.wait(10)
        return connection

    def refused() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another:
            return another.connect_ex(b"\0" + address.rpartition(b":")[2]) == errno.ECONNREFUSED

    with contextlib.ExitStack() as stack:
        end, address = stack.enter_context(listening())
        monkeypatch.setattr(socket.socket, "accept", slowly)
        sock = stack.enter_context(stranger(address))
        assert accepted.wait(10)
        closer = threading.Thread(target=end.close)
        closer.start()
        assert eventually(refused)
        closing.set()
        closer.join()
        assert sock.recv(1) == b""


def test_the_kernel_names_the_peer() -> None:
    with listening() as (_, address), stranger(address) as sock:
        assert hello.credentials(sock) == (os.getpid(), os.getuid())


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "credentials", lambda sock: (1, os.getuid() + 1))
    with listening() as (_, address):
        other = open_end("shm", arena_bytes=MIB)
        try:
            with pytest.raises(UnauthenticatedError, match="user"):
                other.transport.connect(address, peer="the listener", deadline=soon())
        finally:
            other.close()


def test_an_address_of_another_host_is_not_reached() -> None:
    with listening() as (end, address):
        assert end.transport.reaches(address)
        host, _, name = address.rpartition(b":")
        elsewhere = host[:-1] + b"x:" + name
        assert not end.transport.reaches(elsewhere)
        with pytest.raises(TransportError, match="host"):
            end.transport.connect(elsewhere, peer="elsewhere", deadline=soon())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (_, address):
        mine = my_hello()
        message = bytearray(_message_of(mine))
        message[4] = wire.PROTOCOL_VERSION + 1
        with stranger(address) as sock, contextlib.closing(mine):
            socket.send_fds(sock, [bytes(message)], list(mine.fds))
            with pytest.raises(ProtocolMismatchError):
                answered(sock)


# Ends


def test_a_producer_killed_in_mid_transfer() -> None:
    """SIGKILL while large tensors are on their way, both pulled and pushed: PeerLostError, and whole tensors or none."""
    spawn(2, _killed_in_mid_transfer, may_die=[1])


def _killed_in_mid_transfer(rank: Rank) -> None:
    nbytes = 8 * MIB
    with rank.connect("shm", arena_bytes=64 * MIB) as end:
        if rank.rank == 1:
            end.source.put("k", pattern_tensor(bytes_spec(nbytes), 1, end.arena))
            offer = rank.exchange()[0]
            end.channel.prepare(offer)
            tensor = end.arena.tensor(bytes_spec(nbytes))
            generation = 0
            while True:
                tensor[:] = generation & 0xFF
                end.channel.push(1, generation, tensor, deadline=soon()).result(soon())
                generation += 1
        slot = end.arena.tensor(bytes_spec(nbytes))
        rank.exchange(end.transport.offer({1: slot}))
        peer = hello.credentials(end.channel.link._socket)[0]
        into = end.arena.tensor(bytes_spec(nbytes))
        pulled = pushed = 0
        with pytest.raises(PeerLostError):
            while True:
                end.transport.arrival(1, pushed).result(soon())
                assert (slot == pushed & 0xFF).all()
                end.transport.release(1, pushed)
                pushed += 1
                into[:] = 0
                end.channel.fetch("k", into, deadline=soon()).result(soon())
                assert np.array_equal(into, pattern(nbytes, 1))
                pulled += 1
                if pulled == 5:
                    fetched = [end.channel.fetch("k", into, deadline=soon()) for _ in range(20)]
                    os.kill(peer, signal.SIGKILL)
                    for future in fetched:
                        future.result(soon())
        assert pulled == 5


def _serving(end: End) -> ServingEndpoint:
    """The end of the one connection that others have made to ``end``."""
    (found,) = [e for e in end.transport._endpoints if isinstance(e, ServingEndpoint)]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("nbytes", [8, 20_000, 40_000])
def test_a_peer_that_lies_about_its_ring_is_hung_up_on_and_holds_no_lease(nbytes: int) -> None:
    with pair("shm") as (client, server):
        tensor = pattern_tensor(bytes_spec(nbytes), 1, server.arena)
        server.source.put("k", tensor)
        into = np.empty(nbytes, np.uint8)
        client.channel.fetch("k", into, deadline=soon()).result(soon())
        assert np.array_equal(into, tensor) and eventually(lambda: server.source.leased == 0)
        endpoint = _serving(server)
        receiver = client.channel.link._receiver  # type: ignore[attr-defined]
        receiver._reported = receiver._count  # else the client would put it right
        receiver._words[_HEAD] = 1 << 40
        endpoint.link._sender._room = 0
        with pytest.raises(PeerLostError):
            client.channel.fetch("k", into, deadline=soon()).result(soon())
        assert isinstance(endpoint.reason, CorruptMessageError)
        assert eventually(lambda: server.source.leased == 0)


def test_a_tensor_that_cannot_travel_fails_its_fetch_only() -> None:
    released = threading.Event()
    broken = {
        "times": np.zeros(3, "datetime64[s]"),
        "small": np.arange(3, dtype=">f4"),
        "large": np.zeros(20_000, ">f8"),
    }

    class Broken:
        def take(self, key: str, reply: Reply) -> None:
            reply(Lease(broken.get(key, pattern(100)), released.set))

    with pair("shm", (None, Broken())) as (client, _):
        for key, word in (("times", "M8"), ("small", "byte order"), ("large", "byte order")):
            released.clear()
            with pytest.raises(ShapeError, match=word):
                client.channel.fetch(key, deadline=soon()).result(soon())
            assert released.wait(10)
        with pytest.raises(ShapeError, match="byte order"):
            client.channel.fetch("fine", np.empty(25, ">f4"), deadline=soon())
        assert np.array_equal(client.channel.fetch("fine", deadline=soon()).result(soon()), pattern(100))


@pytest.mark.parametrize(
    ("nbytes", "act", "messages", "copies"),
    [
        (32 << 10, "fetch", 1, 1),  # the message with the bytes
        ((32 << 10) + 1, "fetch", 1, 0),  # an offer; then a release goes back
        (4096, "borrow", 1, 1),
        (4097, "borrow", 1, 0),
    ],
)
def test_what_is_copied_through_the_ring_and_what_is_not(nbytes: int, act: str, messages: int, copies: int) -> None:
    with pair("shm") as (client, server):
        tensor = pattern_tensor(bytes_spec(nbytes), 1, server.arena)
        server.source.put("k", tensor)
        if act == "fetch":
            into = np.empty(nbytes, np.uint8)
            got = client.channel.fetch("k", into, deadline=soon()).result(soon())
            assert np.array_equal(got, tensor)
        else:
            with client.channel.borrow("k", deadline=soon()).result(soon()) as view:
                assert np.array_equal(view, tensor)
        counters, endpoint = client.channel.counters, _serving(server)
        assert (counters.messages_in, counters.copies) == (messages, copies)
        assert eventually(lambda: endpoint.counters.messages_in == 2 - copies)  # the fetch, and a release
        assert (endpoint.counters.copies, endpoint.counters.served) == (copies, 1)


def test_wake_ups_are_never_lost() -> None:
    """Without any spinning every message needs its bell."""
    with pair("shm", params={"spin_us": 0}) as (a, b):
        b.source.put("k", pattern(100))
        into = np.empty(100, np.uint8)
        for _ in range(500):
            a.channels[1].fetch("k", into, deadline=soon()).result(soon())
        assert np.array_equal(into, pattern(100))


def _cycle(cycles: int) -> None:
    """Connect, transfer both ways, close, again and again."""
    with listening() as (end, address):
        end.source.put("small", pattern(100))
        end.source.put("large", pattern(100_000))
        other = open_end("shm", arena_bytes=MIB)
        other.transport.connect(address, peer="the listener", deadline=soon()).close()
        watch = LeakWatch()
        maps = _mappings()
        for _ in range(cycles):
            channel = other.transport.connect(address, peer="the listener", deadline=soon())
            futures = [channel.fetch(key, deadline=soon()) for key in ("small", "large")]
            lease = channel.borrow("large", deadline=soon()).result(soon())
            assert np.array_equal(futures[1].result(soon()), pattern(100_000))
            assert np.array_equal(futures[0].result(soon()), pattern(100))
            lease.release()
            del futures, lease
            channel.close()
        assert not watch.leaks()
        assert eventually(lambda: _mappings() <= maps + 2)
        assert eventually(lambda: end.source.leased == 0)
        assert end.arena.used_bytes == 0
        other.close()


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("verbflow" in line for line in maps)


def test_cycles_leave_nothing_behind() -> None:
    _cycle(300)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ten_thousand_cycles_leave_nothing_behind() -> None:
    _cycle(10_000)


def test_both_ends_close_at_once() -> None:
    for _ in range(20):
        with pair("shm", arena_bytes=MIB) as (a, b):
            pending = [end.channel.fetch("never", deadline=soon()) for end in (a, b)]
            a.channels[1].close()
            b.transport.close()
            assert all(future.exception(soon()) is not None for future in pending)


def test_a_ring_maps_what_it_needs_and_no_more() -> None:
    receiver = Receiver(128, 2048)
    try:
        assert os.fstat(receiver.fd).st_size == mmap.PAGESIZE + 128 * (192 + 2048)
    finally:
        receiver.close()
