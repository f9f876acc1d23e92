"""What the two gRPC transports promise beyond the contract: turns, limits, refusals, phases, TLS, allocator."""

from __future__ import annotations

import contextlib
import itertools
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import ConfigError, CorruptMessageError, PeerLostError, ShapeError, TransportError
from runtime.tensor import TensorSpec
from runtime.testing import End, Shelf, eventually, open_end, pair, pattern
from runtime.trace import Phase, Tracer
from runtime.transport.base import Counters, Lease
from runtime.transport.grpc import allocator
from runtime.transport.grpc.connection import SERVICE, GrpcTransportBase
from runtime.transport.grpc.proto import spec_of, to_proto
from runtime.transport.grpc.serving import Session
from runtime.transport.grpc.tensor_pb2 import TensorProto
from runtime.wire import Kind


def soon() -> Deadline:
    return Deadline.after(30)


def transport_of(end: End) -> GrpcTransportBase:
    assert isinstance(end.transport, GrpcTransportBase)
    return end.transport


def session(source: Shelf, chunk_bytes: int = 1000) -> Session:
    return Session(source, chunk_bytes, Counters(), threading.Lock(), Tracer(1))


def requests(*keys: str) -> Iterator[bytes]:
    for tag, key in enumerate(keys, start=1):
        yield wire.encode(Kind.REQUEST, tag, extra=len(key)) + key.encode()


def test_small_tensors_are_answered_at_once_and_long_ones_in_order() -> None:
    shelf = Shelf()
    for key, nbytes in {"long": 5000, "longer": 7000, "small": 10}.items():
        shelf.put(key, pattern(nbytes))
    served = session(shelf)
    answers = list(served.answers(requests("long", "small", "late", "longer"), None))  # type: ignore[arg-type]
    assert [wire.decode(answer).kind for answer in answers] == [
        Kind.WELCOME, Kind.LATER, Kind.TENSOR, Kind.LATER, Kind.LATER,
    ]  # fmt: skip
    shelf.put("late", pattern(20))
    bulk = served.bulk()
    headers = [wire.decode(message) for message in itertools.islice(bulk, 1 + 5 + 7 + 1)]
    order = [(header.tag, header.offset) for header in headers[1:]]
    assert order[0] == (3, 0), "what fits into one message overtakes the long ones"
    assert order[1:] == [*((1, 1000 * at) for at in range(5)), *((4, 1000 * at) for at in range(7))]
    assert shelf.leased == 0
    served.end()
    assert list(bulk) == []


def test_a_cancelled_or_ended_request_gives_its_memory_back() -> None:
    shelf = Shelf()
    served = session(shelf)
    cancel = wire.encode(Kind.CANCEL, 2)
    list(served.answers(itertools.chain(requests("a", "b", "c"), [cancel]), None))  # type: ignore[arg-type]
    for key in "ab":
        shelf.put(key, pattern(5000))
    assert shelf.leased == 1
    bulk = served.bulk()
    assert [wire.decode(message).tag for message in itertools.islice(bulk, 3)] == [0, 1, 1]
    served.end()
    assert shelf.leased == 0
    shelf.put("c", pattern(5000))
    assert shelf.leased == 0


def test_nothing_is_copied_before_the_peer_has_room_for_it() -> None:
    """A slow reader costs its tensors' leases, and one message of memory.

    What the two sockets' buffers and HTTP/2's window hold has left before anybody reads: some tensors, but not most.
    """
    with pair("grpc") as (client, server), contextlib.ExitStack() as undo:
        server.source.put("key", pattern(4 << 20))
        credentials = transport_of(client).credentials()
        channel = undo.enter_context(transport_of(client).dial(server.address))
        metadata = (*credentials, ("verbflow-session", "slow reader"))
        bulk = channel.unary_stream(f"/{SERVICE}/Bulk")(b"", metadata=metadata)
        undo.callback(bulk.cancel)
        assert wire.decode(next(bulk)).kind is Kind.WELCOME
        more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        undo.callback(more.put, None)
        asked = itertools.chain(requests(*["key"] * 50), iter(more.get, None))
        ask = channel.stream_stream(f"/{SERVICE}/Ask")(asked, metadata=metadata)
        undo.callback(ask.cancel)
        answers = [wire.decode(message).kind for message in itertools.islice(ask, 1 + 50)]
        assert answers == [Kind.WELCOME, *[Kind.LATER] * 50]
        time.sleep(0.2)
        assert server.transport.totals().bytes_out < 50 << 20
        assert server.source.leased > 40
        undo.close()
        assert eventually(lambda: server.source.leased == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"garbage",
        wire.encode(Kind.TENSOR, 1),
        wire.encode(Kind.REQUEST, 1, extra=2) + b"\xff\xff",
        b"x" * (1 << 20),
    ],
    ids=["empty", "garbage", "no request", "no text", "absurd length"],
)
def test_a_malformed_request_is_refused_and_the_server_lives_on(sent: bytes) -> None:
    with pair("grpc") as (client, server):
        channel = transport_of(client).dial(server.address)
        metadata = (*transport_of(client).credentials(), ("verbflow-session", "mallory"))
        bulk = channel.unary_stream(f"/{SERVICE}/Bulk")(b"", metadata=metadata)
        next(bulk)
        with pytest.raises(grpc.RpcError) as raised:
            for _ in channel.stream_stream(f"/{SERVICE}/Ask")(iter([sent]), metadata=metadata):
                pass
        assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        bulk.cancel()
        channel.close()
        server.source.put("key", pattern(100))
        assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(100))


@pytest.mark.parametrize("name", ["grpc", "grpc_proto"])
def test_calls_without_the_hello_are_refused(name: str) -> None:
    with pair(name) as (client, server):
        channel = transport_of(client).dial(server.address)
        hello, token = transport_of(client).credentials()
        method = channel.unary_unary(f"/{SERVICE}/RecvTensor" if name == "grpc_proto" else f"/{SERVICE}/Bulk")
        for metadata, code in [
            ((hello,), grpc.StatusCode.UNAUTHENTICATED),
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((token,), grpc.StatusCode.INVALID_ARGUMENT),
            ((token, (hello[0], b"nonsense")), grpc.StatusCode.INVALID_ARGUMENT),
        ]:
            with pytest.raises(grpc.RpcError) as raised:
                method(b"", metadata=metadata, timeout=10)
            assert raised.value.code() is code
        channel.close()


@contextlib.contextmanager
def lying_server(ask: bytes, bulk: Sequence[bytes] = ()) -> Iterator[bytes]:
    """A server that greets well, and answers the first request by these messages on its two streams."""
    asked_for = threading.Event()

    def bulk_handler(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield wire.encode(Kind.WELCOME)
        asked_for.wait(30)
        yield from bulk
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(30)

    def ask_handler(asked: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield wire.encode(Kind.WELCOME)
        next(asked)
        asked_for.set()
        yield ask
        next(asked, None)

    with futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        handlers = {
            "Bulk": grpc.unary_stream_rpc_method_handler(bulk_handler),
            "Ask": grpc.stream_stream_rpc_method_handler(ask_handler),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}".encode()
        finally:
            server.stop(None).wait()


SPEC = TensorSpec((1000,), np.dtype(np.uint8))


@pytest.mark.parametrize(
    "answers",
    [
        [b""],
        [b"garbage" * 100],
        [wire.encode(Kind.REQUEST, 1)],
        [wire.encode(Kind.TENSOR, 1, SPEC) + bytes(1001)],
        [wire.encode(Kind.TENSOR, 1, SPEC, offset=500) + bytes(500)],
        [wire.encode(Kind.TENSOR, 1, SPEC) + bytes(10), wire.encode(Kind.TENSOR, 1, SPEC) + bytes(10)],
        [
            wire.encode(Kind.TENSOR, 1, SPEC) + bytes(10),
            wire.encode(Kind.TENSOR, 1, TensorSpec((999,), SPEC.dtype), offset=10) + bytes(10),
        ],
        [wire.encode(Kind.TENSOR, 1, nbytes=10) + bytes(10)],
    ],
    ids=["empty", "garbage", "no answer", "too long", "hole", "twice", "other tensor", "no dtype"],
)
def test_a_lying_peer_is_found_out(answers: list[bytes]) -> None:
    later = wire.encode(Kind.LATER, 1)
    for ask, bulk in [(later, answers)] + ([(answers[0], [])] if len(answers) == 1 else []):
        with lying_server(ask, bulk) as address, contextlib.closing(open_end("grpc")) as end:
            channel = end.transport.connect(address, peer="mallory", deadline=soon())
            fetched = channel.fetch("key", deadline=soon())
            assert isinstance(fetched.exception(soon()), CorruptMessageError)
            assert isinstance(channel.fetch("key", deadline=soon()).exception(soon()), CorruptMessageError)


def test_answers_to_nothing_are_ignored() -> None:
    stray = wire.encode(Kind.TENSOR, 77, SPEC) + bytes(1000)
    good = wire.encode(Kind.TENSOR, 1, SPEC) + pattern(1000).tobytes()
    with (
        lying_server(wire.encode(Kind.LATER, 1), [stray, good]) as address,
        contextlib.closing(open_end("grpc")) as end,
    ):
        channel = end.transport.connect(address, peer="server", deadline=soon())
        assert np.array_equal(channel.fetch("key", deadline=soon()).result(soon()), pattern(1000))


@pytest.mark.parametrize(
    "proto",
    [
        TensorProto(dtype=99, dims=[1], tensor_content=b"1"),
        TensorProto(dtype=3, dims=[2], tensor_content=b"1"),
        TensorProto(dtype=3, dims=[1] * 9, tensor_content=b"1"),
        TensorProto(dtype=3, dims=[1 << 63, 2], tensor_content=b""),
    ],
)
def test_a_tensor_proto_that_does_not_fit_together_is_refused(proto: TensorProto) -> None:
    with pytest.raises(CorruptMessageError):
        spec_of(proto, proto.tensor_content)


def test_a_tensor_proto_holds_any_tensor() -> None:
    for array in (np.float64(3.5) * np.ones(()), np.arange(12, dtype=np.int16).reshape(3, 4).T, np.zeros((0, 4), bool)):
        proto = TensorProto.FromString(to_proto(array).SerializeToString())
        spec = spec_of(proto, proto.tensor_content)
        assert spec == TensorSpec.of(array)
        assert np.array_equal(np.frombuffer(proto.tensor_content, spec.dtype).reshape(spec.shape), array)


def test_more_peers_than_allowed_are_refused() -> None:
    with pair("grpc", params={"max_channels": 1}) as (client, server):
        with pytest.raises(TransportError, match="refuses"):
            client.transport.connect(server.address, peer="the server", deadline=soon())
        server.source.put("key", pattern(100))
        assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(100))
        client.channel.close()
        again = []

        def connects() -> bool:
            with contextlib.suppress(TransportError):
                again.append(client.transport.connect(server.address, peer="the server", deadline=soon()))
            return bool(again)

        assert eventually(connects), "the place of a closed channel was not given to the next"


def test_more_calls_than_allowed_fail_and_do_not_wait_for_each_other() -> None:
    with pair("grpc_proto", params={"max_requests": 4}) as (client, server):
        waiting = [client.channel.fetch(f"late {at}", deadline=soon()) for at in range(4)]
        assert eventually(lambda: all(server.source.asked(f"late {at}") for at in range(4)))
        with pytest.raises(TransportError, match="refuses"):
            client.channel.fetch("one more", deadline=soon()).result(soon())
        for at, future in enumerate(waiting):
            server.source.put(f"late {at}", pattern(100, at))
            assert np.array_equal(future.result(soon()), pattern(100, at))


@pytest.mark.parametrize("name", ["grpc", "grpc_proto"])
def test_phases_of_a_fetch_do_not_exceed_its_time(name: str) -> None:
    tracer = Tracer(enabled=True)
    with pair(name, tracer=tracer) as (client, server):
        server.source.put("key", pattern(5 << 20))
        client.channel.fetch("key", deadline=soon()).result(soon())
        tracer.clear()
        start = time.monotonic_ns()
        client.channel.fetch("key", deadline=soon()).result(soon())
        elapsed = time.monotonic_ns() - start
    spans, _ = tracer.spans()
    spent = {Phase(phase): spans["elapsed_ns"][spans["phase"] == phase].sum() for phase in np.unique(spans["phase"])}
    assert {Phase.REQUEST, Phase.WIRE, Phase.COPY, Phase.SERIALISE} <= spent.keys()
    assert 0 < spent[Phase.WIRE] + spent[Phase.COPY] <= elapsed
    assert spans["nbytes"][spans["phase"] == Phase.SERIALISE].sum() == 5 << 20


def test_an_address_of_another_host_name() -> None:
    with pair("grpc", params={"advertise": "localhost"}) as (client, server):
        assert server.address.startswith(b"localhost:")
        server.source.put("key", pattern(10))
        assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(10))


def test_an_address_that_is_none() -> None:
    with contextlib.closing(open_end("grpc")) as end:
        with pytest.raises(ConfigError):
            end.transport.connect(b"\xff\xfe", peer="nobody", deadline=soon())
        with pytest.raises(PeerLostError, match="nobody"):
            end.transport.connect(b"127.0.0.1:1", peer="nobody", deadline=soon())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_both_ways(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    tls = {"tls_ca": str(certificate), "tls_cert": str(certificate), "tls_key": str(key), "advertise": "localhost"}
    with pair("grpc", params=tls) as (client, server):
        server.source.put("key", pattern(3 << 20))
        assert np.array_equal(client.channel.fetch("key", deadline=soon()).result(soon()), pattern(3 << 20))
        with contextlib.closing(open_end("grpc")) as plain, pytest.raises((PeerLostError, TransportError)):
            plain.transport.connect(server.address, peer="the server", deadline=soon())


def test_the_allocator_is_tuned_once_and_recorded() -> None:
    applied = allocator.tune()
    if not applied:
        pytest.skip("the C library has no mallopt")
    assert applied == allocator.tune()
    assert applied.items() <= allocator.in_force().items()
    script = "from runtime.transport.grpc import allocator; print(allocator.in_force() == allocator.tune())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=allocator.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["inproc", "grpc", "grpc_proto"])
def test_a_tensor_that_cannot_travel_fails_its_fetch_only(name: str) -> None:
    released = threading.Event()

    class Broken:
        def take(self, key: str, reply: object) -> None:
            reply(Lease(np.zeros(3, "datetime64[s]"), released.set))  # type: ignore[operator]

    with pair(name, (None, Broken())) as (client, _):
        with pytest.raises(ShapeError, match="M8"):
            client.channel.fetch("key", deadline=soon()).result(soon())
        assert released.wait(10)


@pytest.mark.parametrize("name", ["grpc", "grpc_proto"])
def test_the_cause_that_a_lost_channel_keeps_holds_no_frames(name: str) -> None:
    with pair(name) as (client, server):
        pending = client.channel.fetch("never", np.empty(8, np.uint8), deadline=soon())
        assert eventually(lambda: server.source.asked("never"))
        server.close()
        assert isinstance(pending.exception(soon()), PeerLostError)
        kept = client.channel._broken  # type: ignore[attr-defined]
        assert isinstance(kept, PeerLostError) and kept.__cause__ is not None
        assert kept.__cause__.__traceback__ is None
