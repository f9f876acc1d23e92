"""Cluster description, task processes, and the control plane's manners towards strangers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from runtime.cluster.client import WorkerClient
from runtime.cluster.launcher import LocalCluster, free_addresses
from runtime.cluster.messages import CHUNK_BYTES, chunks, pack, unpack, variables
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.registered import RegisteredGraph
from runtime.cluster.rpc import CONTROL_VERSION, credentials
from runtime.cluster.server import Server
from runtime.cluster.spec import ClusterSpec, parse_task, task_name
from runtime.deadline import Deadline
from runtime.errors import (
    ArenaFullError,
    CheckpointError,
    ConfigError,
    CorruptMessageError,
    GraphError,
    PeerLostError,
    ProtocolMismatchError,
    StepAbortedError,
    TransportError,
    UnauthenticatedError,
    UnknownGraphError,
)
from runtime.graph.graph import Graph
from runtime.graph.serialize import dump_graph
from runtime.kernels import blas
from runtime.testing import pattern

TOKEN = "a-token-of-this-run"
SECONDS = 20.0


def soon() -> Deadline:
    return Deadline.after(SECONDS)


# The description.


def test_tasks_have_names_and_addresses(tmp_path: Path) -> None:
    spec = ClusterSpec({"ps": ["a:1"], "worker": ["b:2", "[::1]:3"]})
    assert spec.tasks == ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"]
    assert spec.address("/job:worker/task:1") == "[::1]:3"
    assert spec.task_count("worker") == 2
    assert parse_task(task_name("worker", 1)) == ("worker", 1)
    file = tmp_path / "cluster.json"
    file.write_text(spec.to_json())
    assert ClusterSpec.load(str(file)) == ClusterSpec.load(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({}, "mapping from job names"),
        ({"ps": "a:1"}, "must be a list"),
        ({"ps": []}, "must be a list"),
        ({"ps": ["a"]}, r"/job:ps/task:0: address 'a' is not host:port"),
        ({"ps": ["a:0"]}, "not host:port with a port from 1 to 65535"),
        ({"ps": ["a:70000"]}, "not host:port"),
        ({"ps": ["a:1", "a:1"]}, "given to both /job:ps/task:0 and /job:ps/task:1"),
        ({"p/s": ["a:1"]}, "job name 'p/s' must match"),
        ({"ps": [7]}, "address 7 is not host:port"),
    ],
)
def test_an_impossible_cluster_is_refused(jobs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSpec(jobs)  # type: ignore[arg-type]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"ps": [')
    with pytest.raises(ConfigError, match=r"cluster\.json is not JSON"):
        ClusterSpec.load(str(file))
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        ClusterSpec.load(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"no task '/job:ps/task:9'; known: /job:ps/task:0"):
        ClusterSpec({"ps": ["a:1"]}).address("/job:ps/task:9")
    with pytest.raises(ConfigError, match=r"no job 'worker'; known: ps"):
        ClusterSpec({"ps": ["a:1"]}).task("worker", 0)


# Tensors in messages.


def test_tensors_survive_messages() -> None:
    for array in (
        np.array(3.5, np.float32),
        np.zeros((0, 3), np.int64),
        pattern(4096).view(np.float32).reshape(32, 32),
    ):
        back = unpack(pb.Tensor.FromString(pack(array).SerializeToString()))
        assert back.dtype == array.dtype and back.shape == array.shape
        assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "message",
    [
        pb.Tensor(dtype=99, shape=[1], content=b"1234"),
        pb.Tensor(dtype=11, shape=[2], content=b"1234"),
        pb.Tensor(dtype=11, shape=[1 << 40, 1 << 40], content=b""),
        pb.Tensor(dtype=11, shape=[1] * 100, content=b"1234"),
    ],
)
def test_an_impossible_tensor_is_refused(message: pb.Tensor) -> None:
    with pytest.raises(CorruptMessageError):
        unpack(message)


def test_variables_travel_in_chunks() -> None:
    large = pattern(2 * CHUNK_BYTES + 100)
    sent = [
        *chunks("c", "large", large),
        *chunks("c", "empty", np.zeros(0, np.float32)),
        *chunks("c", "one", large[:8]),
    ]
    assert len(sent) == 5
    back = {name: array for _, name, array in variables(sent)}
    assert back["large"].tobytes() == large.tobytes()
    assert back["empty"].shape == (0,) and back["one"].tobytes() == large[:8].tobytes()
    for broken in (sent[:2], sent[1:], [sent[0], sent[0]], [sent[0], sent[3]]):
        with pytest.raises(CorruptMessageError):
            list(variables(broken))


# A server in this process.


@pytest.fixture
def server() -> Iterator[Server]:
    spec = ClusterSpec({"ps": free_addresses(1)})
    with Server(spec, "ps", 0, transport="inproc", token=TOKEN, arena_bytes=1 << 20) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[WorkerClient]:
    made = WorkerClient(server.name, server.address, TOKEN)
    yield made
    made.close()


def status(client: WorkerClient, **changes: object) -> pb.StatusReply:
    request = pb.StatusRequest(**{"version": CONTROL_VERSION, "task": client.task, **changes})  # type: ignore[arg-type]
    reply: pb.StatusReply = client.call("GetStatus", request, soon())
    return reply


def test_a_task_says_who_it_is(server: Server, client: WorkerClient) -> None:
    reply = status(client, open_transports=True)
    assert (reply.task, reply.incarnation, reply.transport) == (server.name, server.incarnation, "inproc")
    assert list(reply.addresses) == ["inproc"]
    assert reply.memory.arena_bytes == 1 << 20
    assert reply.settings["threads"]


@pytest.mark.parametrize("token", ["", "another", TOKEN + "x"])
def test_a_stranger_is_refused_and_the_server_lives_on(server: Server, client: WorkerClient, token: str) -> None:
    stranger = WorkerClient(server.name, server.address, token)
    try:
        for method, request in (
            ("GetStatus", pb.StatusRequest(version=CONTROL_VERSION)),
            ("Shutdown", pb.ShutdownRequest(reason="mischief")),
            ("RegisterGraph", pb.RegisterRequest(handle="h")),
        ):
            with pytest.raises(UnauthenticatedError, match=r"/job:ps/task:0 was shown (no|a wrong) token"):
                stranger.call(method, request, soon())
        with pytest.raises(UnauthenticatedError):
            stranger.open_steps().start(pb.RunRequest(handle="h", step=1)).result(soon())
    finally:
        stranger.close()
    assert status(client).task == server.name
    assert not server.join(0)


def test_a_token_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"printable ASCII"):
        WorkerClient("/job:ps/task:0", "127.0.0.1:2222", "secret\n")


def test_another_version_is_refused(server: Server, client: WorkerClient) -> None:
    with pytest.raises(ProtocolMismatchError, match=r"speaks control protocol 1, not 99"):
        status(client, version=99)
    old = WorkerClient(server.name, server.address, TOKEN)
    old._metadata = (("verbflow-token", TOKEN), ("verbflow-version", "0"))
    with pytest.raises(ProtocolMismatchError, match=r"start all tasks from the same version"):
        status(old)
    old.close()


def test_the_wrong_task_is_refused(client: WorkerClient) -> None:
    with pytest.raises(ConfigError, match=r"this is /job:ps/task:0, not /job:ps/task:7"):
        status(client, task="/job:ps/task:7")


def test_malformed_and_absurd_messages_do_no_harm(server: Server, client: WorkerClient) -> None:
    with grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel:
        raw = channel.unary_unary("/verbflow.control.Worker/RegisterGraph")
        with pytest.raises(grpc.RpcError) as garbage:
            raw(b"\xff" * 100, metadata=credentials(TOKEN), timeout=SECONDS)
        assert garbage.value.code() == grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.RpcError) as absent:
            channel.unary_unary("/verbflow.control.Worker/Nonsense")(b"", metadata=credentials(TOKEN), timeout=SECONDS)
        assert absent.value.code() == grpc.StatusCode.UNIMPLEMENTED
        # A stranger's large message is refused before it is read.
        with pytest.raises(grpc.RpcError) as unread:
            raw(bytes(64 << 20), metadata=credentials("wrong"), timeout=SECONDS)
        assert unread.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(GraphError, match=r"not a serialised graph"):
        client.call("RegisterGraph", pb.RegisterRequest(handle="h", partition=b"\xff\xff\xff"), soon())
    with pytest.raises(UnknownGraphError, match=r"knows no graph nonsense"):
        client.open_steps().start(pb.RunRequest(handle="nonsense", step=1, timeout_s=1)).result(soon())
    assert status(client).task == server.name


def test_a_partition_larger_than_any_memory_and_a_step_with_too_few_feeds_are_refused(
    server: Server, client: WorkerClient
) -> None:
    for size in (1 << 45, 2):
        graph = Graph()
        graph.add("Placeholder", name="x", device=server.name, shape=(size,), dtype=np.dtype(np.float32))
        request = pb.RegisterRequest(handle=f"h{size}", partition=dump_graph(graph), feeds=["x"], fetches=["x:0"])
        if size == 2:
            client.call("RegisterGraph", request, soon())
        else:
            with pytest.raises(ArenaFullError, match=r"bytes of memory cannot be had"):
                client.call("RegisterGraph", request, soon())
    with pytest.raises(GraphError, match=r"graph h2 reads x and was fed 0 tensors"):
        client.open_steps().start(pb.RunRequest(handle="h2", step=1, timeout_s=1)).result(soon())


def test_an_error_in_what_is_sent_is_raised_as_it_is(client: WorkerClient) -> None:
    def broken() -> Iterator[pb.VariableChunk]:
        yield from chunks("", "v", np.zeros(2, np.float32))
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        client.upload("RestoreVariables", broken(), soon())
    assert not client.call("ListVariables", pb.VariablesRequest(), soon()).nbytes


def test_a_closed_client_says_so(client: WorkerClient) -> None:
    client.close()
    for call in (
        lambda: client.call("Ping", pb.PingRequest(), soon()),
        lambda: client.start("Ping", pb.PingRequest(), soon()).result(soon()),
        lambda: list(client.stream("SaveVariables", pb.SaveRequest(), soon())),
        lambda: client.upload("RestoreVariables", iter([]), soon()),
    ):
        with pytest.raises(ConfigError, match=r"at /job:ps/task:0: .*closed"):
            call()
    with pytest.raises(StepAbortedError, match=r"/job:ps/task:0 .* was closed"):
        client.open_steps()


def test_who_binds_edges_while_the_task_closes_leaves_no_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    graph.add("Placeholder", name="x", device=server.name, shape=(2,), dtype=np.dtype(np.float32))
    peer = pb.Peer(task="/job:worker/task:0", incarnation=1, address="127.0.0.1:1")
    server.worker.register(
        pb.RegisterRequest(handle="h", partition=dump_graph(graph), feeds=["x"], fetches=["x:0"], peers=[peer])
    )
    monkeypatch.setattr(RegisteredGraph, "connect", lambda *_: server.worker.close())
    with pytest.raises(StepAbortedError, match=r"/job:ps/task:0 is shutting down"):
        server.worker.bind(pb.BindRequest(handle="h"), soon())
    assert not server.worker._clients


def test_a_channel_that_is_connected_while_the_task_closes_is_closed(server: Server) -> None:
    transports = server.worker.transports
    closed: list[str] = []

    def connect(address: bytes, *, peer: str, deadline: Deadline) -> SimpleNamespace:
        transports.close()
        return SimpleNamespace(close=lambda: closed.append(peer))

    transports._transports["inproc"] = SimpleNamespace(connect=connect, close=lambda: None)  # type: ignore[assignment]
    peer = pb.Peer(task="/job:worker/task:0", incarnation=1, transports={"inproc": b"somewhere"})
    for _ in range(2):
        with pytest.raises(StepAbortedError, match=r"/job:ps/task:0 is shutting down"):
            transports.channel(peer, "inproc", soon())
        assert closed == [peer.task], "the second attempt must not connect at all"


def test_a_server_that_cannot_be_made_leaves_nothing(server: Server) -> None:
    with pytest.raises(ConfigError, match="options for an unknown transport 'pigeon'"):
        Server(server.cluster, "ps", 0, token=TOKEN, arena_bytes=1 << 20, params={"pigeon": {}})


def test_a_message_beyond_the_limit_is_refused(
    server: Server, client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.cluster.rpc.MAX_MESSAGE_BYTES", 1 << 16)
    spec = ClusterSpec({"ps": free_addresses(1)})
    with Server(spec, "ps", 0, transport="inproc", token=TOKEN, arena_bytes=1 << 20) as small:
        other = WorkerClient(small.name, small.address, TOKEN)
        with pytest.raises(TransportError, match=r"resource_exhausted"):
            other.call("RegisterGraph", pb.RegisterRequest(handle="h", partition=bytes(1 << 20)), soon())
        assert status(other).task == small.name
        other.close()


def test_a_port_in_use_is_an_error(server: Server) -> None:
    with pytest.raises(TransportError, match=r"/job:ps/task:0 cannot listen on .* is it in use"):
        Server(server.cluster, "ps", 0, transport="inproc", token=TOKEN, arena_bytes=1 << 20)


def test_no_token_only_on_loopback() -> None:
    with pytest.raises(ConfigError, match=r"would listen on 192\.0\.2\.1 without a token"):
        Server({"ps": ["192.0.2.1:2222"]}, "ps", 0, arena_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"unknown transport 'carrier-pigeon'; known: auto, "):
        Server({"ps": ["127.0.0.1:2222"]}, "ps", 0, transport="carrier-pigeon", arena_bytes=1 << 20)


def test_nobody_there_is_a_lost_peer() -> None:
    (address,) = free_addresses(1)
    client = WorkerClient("/job:ps/task:0", address, TOKEN)
    with pytest.raises(PeerLostError, match=r"GetStatus at /job:ps/task:0 \(127\.0\.0\.1:\d+\)"):
        status(client)
    client.close()


def test_tls_keeps_those_out_who_have_no_certificate(tmp_path: Path) -> None:
    from runtime.cluster.rpc import Tls

    files = make_certificates(tmp_path)
    if files is None:
        pytest.skip("there is no openssl command here to make certificates with")
    tls = Tls(*files)
    spec = ClusterSpec({"ps": [free_addresses(1)[0].replace("127.0.0.1", "localhost")]})
    with Server(spec, "ps", 0, transport="inproc", token=TOKEN, arena_bytes=1 << 20, tls=tls) as server:
        client = WorkerClient(server.name, server.address, TOKEN, tls)
        assert status(client).task == server.name
        client.close()
        plain = WorkerClient(server.name, server.address, TOKEN)
        with pytest.raises(PeerLostError):
            status(plain)
        plain.close()
    with pytest.raises(ConfigError, match=r"TLS file .*absent: No such file"):
        Tls(str(tmp_path / "absent"), *files[1:]).server_credentials()


def make_certificates(folder: Path) -> tuple[str, str, str] | None:
    """Certificate, key and authority (the certificate signs itself) for localhost."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(certificate), str(key), str(certificate)


def test_a_server_with_several_threads_holds_blas_to_one() -> None:
    before = blas.threads()
    if before is None:
        pytest.skip("numpy's BLAS does not say how many threads it takes")
    spec = ClusterSpec({"ps": free_addresses(1)})
    options: dict[str, Any] = {"transport": "inproc", "arena_bytes": 1 << 20}
    try:
        blas.set_threads(2)
        for threads, hold in ((1, True), (2, False)):
            with Server(spec, "ps", 0, **options, threads=threads, hold_blas=hold) as server:
                assert (blas.threads(), server.settings["blas"]) == (2, "left at 2")
        with Server(spec, "ps", 0, **options, threads=2) as server:
            assert blas.threads() == 1 and server.settings["blas"].startswith("1 by ")
            assert (
                server.worker.status(pb.StatusRequest(version=CONTROL_VERSION)).settings["blas"]
                == server.settings["blas"]
            )
    finally:
        blas.set_threads(before)


# Tasks as processes.


def test_a_task_process_starts_answers_and_ends_on_request() -> None:
    with LocalCluster({"ps": 1}, options=["--transport", "grpc", "--arena-mib", "8"]) as cluster:
        task = cluster.task("/job:ps/task:0")
        assert task.ready["task"] == "/job:ps/task:0" and task.ready["pid"] == task.pid
        assert task.ready["settings"]["OPENBLAS_NUM_THREADS"] == "1"
        assert task.ready["settings"]["blas"].startswith("left at ")
        command_line = Path(f"/proc/{task.pid}/cmdline").read_bytes().decode()
        assert cluster.token not in command_line
        client = WorkerClient(task.name, cluster.spec.address(task.name), cluster.token)
        assert f"{status(client).incarnation:016x}" == task.ready["incarnation"]
        client.call("Shutdown", pb.ShutdownRequest(reason="the test is over"), soon())
        client.close()
        assert task.wait(soon()) == 0
        assert task.errors() == "verbflow: /job:ps/task:0: shutdown asked for: the test is over"


def test_a_task_process_ends_by_signal_and_with_its_parent() -> None:
    with LocalCluster({"ps": 2}, options=["--transport", "grpc", "--arena-mib", "8"]) as cluster:
        first, second = cluster.tasks.values()
        first.signal(signal.SIGTERM)
        assert first.wait(soon()) == 0
        assert second.process.stdin is not None
        second.process.stdin.close()  # as the kernel does when the parent dies
        assert second.wait(soon()) == 0


# A child sends the signals, because a process that signals itself holds the GIL in that moment; until its parent is gone.
_SIGNALLED_WHILE_WAITING = """
import os, signal, time
from runtime.cluster.options import Ending
ending, pid = Ending(), os.getpid()
signal.signal(signal.SIGTERM, lambda number, frame: ending.ask())
child = os.fork()
if not child:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGTERM)
        time.sleep(1e-4)
    os._exit(0)
end = time.monotonic() + 3
while time.monotonic() < end:
    ending.wait()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_a_signal_ends_the_wait_whatever_the_waiter_is_doing() -> None:
    # A lock that handler and waiter shared would sooner or later stop both: with an Event, after some thousand signals.
    subprocess.run([sys.executable, "-c", _SIGNALLED_WHILE_WAITING], timeout=60, check=True)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"--cluster": "{"}, 2, "is not JSON"),
        ({"--job": "worker"}, 2, "no job 'worker'; known: ps"),
        ({"--transport": "pigeon"}, 2, "unknown transport 'pigeon'"),
        ({"--params": "[]x"}, 2, "--params is not JSON"),
        ({"--params": '{"grpc": 5}'}, 2, "--params is not of the form"),
        ({"--task": "three"}, 2, "invalid int value"),
    ],
)
def test_exit_codes_and_one_line_of_reason(changes: dict[str, str], code: int, message: str) -> None:
    cluster = json.dumps({"ps": free_addresses(1)})
    options = {"--cluster": cluster, "--job": "ps", "--task": "0", "--transport": "grpc", "--arena-mib": "8", **changes}
    arguments = [text for pair in options.items() for text in pair]
    ended = subprocess.run(
        [sys.executable, "-m", "runtime.cluster", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "VERBFLOW_TOKEN": TOKEN},
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "")
    assert message in ended.stderr and "Traceback" not in ended.stderr


def test_an_address_in_use_has_its_own_exit_code(server: Server) -> None:
    command = [sys.executable, "-m", "runtime.cluster", "--cluster", server.cluster.to_json(), "--job", "ps"]
    command += ["--task", "0", "--transport", "grpc", "--arena-mib", "8"]
    read, write = os.pipe()
    os.write(write, TOKEN.encode())
    os.close(write)
    # Whichever of our modules was imported first has set how much gRPC says.
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(
        [*command, "--token-fd", str(read)], pass_fds=[read], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    os.close(read)
    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1 and "is it in use?" in ended.stderr
