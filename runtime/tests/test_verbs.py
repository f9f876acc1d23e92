"""The parts of the verbs transport that need no device: choices, handshake, errors."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ConfigError,
    CorruptMessageError,
    DeadlineError,
    PeerLostError,
    ProtocolMismatchError,
    TransportError,
    UnauthenticatedError,
    UnavailableError,
    VerbflowError,
)
from runtime.transport.base import Options
from runtime.transport.verbs import binding, bootstrap, device
from runtime.transport.verbs.binding import AsyncEvent, Status
from runtime.transport.verbs.bootstrap import Address
from runtime.transport.verbs.device import Gid, Port, choose_place, list_ports
from runtime.transport.verbs.qp import EndPoint, QpAttributes, path_to, translate
from runtime.transport.verbs.transport import VerbsSettings, VerbsTransport

LINK_LOCAL = bytes.fromhex("fe80000000000000025056fffeaabbcc")
MAPPED = bytes.fromhex("00000000000000000000ffff0a4d0001")
OTHER = bytes.fromhex("00000000000000000000ffffc0a80105")
GLOBAL = bytes.fromhex("20010db8000000000000000000000001")
V1, V2 = "IB/RoCE v1", "RoCE v2"


def roce(name: str, *gids: tuple[int, bytes, str], active: bool = True) -> Port:
    return Port(name, 1, active, "Ethernet", tuple(Gid(*gid) for gid in gids))


# Device, port and GID


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        ([(0, LINK_LOCAL, V1), (1, LINK_LOCAL, V2), (2, MAPPED, V1), (5, MAPPED, V2)], 5),
        ([(0, LINK_LOCAL, V2), (1, GLOBAL, V2)], 1),
        ([(0, LINK_LOCAL, V1), (3, LINK_LOCAL, V2)], 3),
    ],
)
def test_the_gid_is_chosen_by_what_it_is_not_by_its_index(gids: list[Any], expected: int) -> None:
    assert choose_place(ports=[roce("rxe0", *gids)]).gid.index == expected


def test_the_port_that_owns_the_address_is_taken() -> None:
    ports = [roce("mlx5_0", (3, MAPPED, V2)), roce("mlx5_1", (2, OTHER, V1), (7, OTHER, V2))]
    place = choose_place("192.168.1.5", ports=ports)
    assert (place.device, place.gid.index) == ("mlx5_1", 7)
    assert "owns 192.168.1.5" in place.reason
    for elsewhere in ("127.0.0.1", "0.0.0.0", "::", "10.0.0.99", "a-name"):
        assert choose_place(elsewhere, ports=ports).device == "mlx5_0"


def test_an_override_beats_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [roce("mlx5_0", (0, LINK_LOCAL, V2), (3, MAPPED, V2)), roce("mlx5_1", (7, OTHER, V2))]
    assert choose_place(device="mlx5_1", ports=ports).device == "mlx5_1"
    assert choose_place(gid_index=0, ports=ports).gid.raw == LINK_LOCAL
    monkeypatch.setenv("VERBFLOW_RDMA_DEVICE", "mlx5_1")
    assert choose_place(ports=ports).device == "mlx5_1"


def test_infiniband_needs_no_roce_gid() -> None:
    gid = bytes.fromhex("fe80000000000000b8599f0300d4f0a0")
    place = choose_place(ports=[Port("ibp1", 2, True, "InfiniBand", (Gid(0, gid, V1),))])
    assert (place.port, place.gid.raw, place.link_layer) == (2, gid, "InfiniBand")


@pytest.mark.parametrize(
    ("ports", "arguments", "words"),
    [
        ([], {}, "modprobe rdma_rxe"),
        ([roce("rxe0", active=False)], {}, "rxe0/1 are down"),
        ([roce("rxe0", (0, MAPPED, V1))], {}, "no port of rxe0/1 has a RoCE v2 GID"),
        ([roce("rxe0", (1, MAPPED, V2))], {"device": "mlx4_0"}, "no RDMA device mlx4_0.*rxe0/1"),
        ([roce("rxe0", (1, MAPPED, V2))], {"port": 2}, "port 2"),
        ([roce("rxe0", (1, MAPPED, V2))], {"gid_index": 4}, "GID at index 4"),
    ],
)
def test_no_place_is_a_sentence_that_helps(ports: list[Port], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        choose_place(ports=ports, **arguments)


def test_ports_are_read_from_sysfs_with_holes_in_the_table(tmp_path: Path) -> None:
    port = tmp_path / "rxe0/ports/1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    for index in range(64):
        raw = {0: LINK_LOCAL, 2: MAPPED, 30: OTHER}.get(index, bytes(16))
        (port / "gids" / str(index)).write_text(":".join(raw[at : at + 2].hex() for at in range(0, 16, 2)) + "\n")
        if any(raw):
            (port / "gid_attrs/types" / str(index)).write_text("RoCE v2\n")
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    down, up = list_ports(tmp_path)
    assert not down.active and down.gids == ()
    assert [(gid.index, gid.raw, gid.kind) for gid in up.gids] == [
        (0, LINK_LOCAL, V2),
        (2, MAPPED, V2),
        (30, OTHER, V2),
    ]
    assert str(up.gids[1].address) == "10.77.0.1"
    assert list_ports(tmp_path / "absent") == []


def test_too_little_locked_memory_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(device, "_has_capability", lambda _: False)
    device.check_locked_memory(1 << 20)
    with pytest.raises(UnavailableError, match=r"8192 KiB of the 65536 KiB.*ulimit -l unlimited"):
        device.check_locked_memory(64 << 20)
    monkeypatch.setattr(device, "_has_capability", lambda _: True)
    device.check_locked_memory(64 << 20)


def test_probe_never_raises_and_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "list_ports", list)
    answer = VerbsTransport.probe()
    assert not answer.ok and answer.reason
    monkeypatch.setattr(binding, "NAMES", ())
    assert "no RDMA library" in VerbsTransport.probe().reason


# Settings, queue pairs and errors


def test_settings_are_checked() -> None:
    settings = Options(params={"timeout": 10, "device": "rxe0", "eager_threshold": 100}).settings(
        "verbs", VerbsSettings
    )
    assert isinstance(settings, VerbsSettings) and settings.attributes().timeout == 10
    for wrong in ({"retry_count": 7}, {"send_depth": 1}, {"depth": 1}, {"timeout": 0}, {"nonsense": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(params=wrong).settings("verbs", VerbsSettings)


def test_the_defaults_give_a_lost_peer_up_within_a_second() -> None:
    assert 0.1 < QpAttributes().patience_s < 1.0


def end_point(**changes: Any) -> EndPoint:
    fields: dict[str, Any] = {
        "number": 17, "psn": 0xABCDEF, "lid": 5, "gid": MAPPED, "mtu": 5, "link_layer": 2, "max_rd_atomic": 16,
        "depth": 256, "message_bytes": 4288,
    }  # fmt: skip
    return EndPoint(**(fields | changes))


def test_an_end_point_survives_the_wire() -> None:
    assert EndPoint.unpack(end_point().pack()) == end_point()


@pytest.mark.parametrize(
    "wrong", [{"number": 1 << 24}, {"psn": 1 << 31}, {"mtu": 0}, {"mtu": 6}, {"link_layer": 3}, {"max_rd_atomic": 0},
              {"depth": 0}, {"message_bytes": 8}, {"message_bytes": 1 << 30}]
)  # fmt: skip
def test_an_end_point_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(CorruptMessageError):
        EndPoint.unpack(end_point(**wrong).pack())
    with pytest.raises(CorruptMessageError):
        EndPoint.unpack(end_point().pack()[:-1])


def test_infiniband_within_a_subnet_needs_no_global_header() -> None:
    near, far = bytes.fromhex("fe80" + "00" * 6 + "11" * 8), bytes.fromhex("fec0" + "00" * 6 + "22" * 8)
    attributes = QpAttributes(service_level=3, traffic_class=106)
    ours = end_point(link_layer=1, gid=near)
    same = path_to(ours, end_point(link_layer=1, gid=near, lid=9), 1, 0, attributes)
    assert (same.lid, same.gid, same.service_level) == (9, None, 3)
    assert path_to(ours, end_point(link_layer=1, gid=far), 1, 0, attributes).gid == far
    roce_path = path_to(end_point(), end_point(gid=OTHER), 1, 4, attributes)
    assert (roce_path.gid, roce_path.sgid_index, roce_path.traffic_class) == (OTHER, 4, 106)


@pytest.mark.parametrize(
    ("status", "events", "kind", "words"),
    [
        (Status.RETRY_EXC_ERR, [], PeerLostError, "acknowledges nothing.*6 retries"),
        (Status.RNR_RETRY_EXC_ERR, [], PeerLostError, "not posted a receive"),
        (Status.REM_ACCESS_ERR, [], CorruptMessageError, "refuses access"),
        (Status.LOC_PROT_ERR, [], TransportError, "not registered"),
        (Status.WR_FLUSH_ERR, [AsyncEvent.QP_FATAL], PeerLostError, "broken.*QP_FATAL"),
        (Status.LOC_QP_OP_ERR, [AsyncEvent.PORT_ERR], PeerLostError, "port went down"),
        (Status.WR_FLUSH_ERR, [AsyncEvent.DEVICE_FATAL], PeerLostError, "device failed"),
        (99, [77], PeerLostError, "status 99"),
    ],
)
def test_every_failed_completion_names_peer_and_reason(
    status: int, events: list[int], kind: type[VerbflowError], words: str
) -> None:
    error = translate(status, "/job:ps/task:0", QpAttributes(), events)
    assert type(error) is kind
    with pytest.raises(kind, match=f"(?s)/job:ps/task:0.*{words}|{words}.*/job:ps/task:0"):
        raise error


# Addresses and the handshake


def test_an_address_survives_and_nonsense_does_not() -> None:
    address = Address("10.77.0.1", 4711, "Ethernet", MAPPED.hex(), "a-machine", False)
    assert Address.decode(address.encode()) == address
    for nonsense in (
        b"",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b'[1,"h",99999,"Ethernet","00","m",false]',
        address.encode()[:-3],
    ):
        with pytest.raises(ConfigError, match="no address of a verbs listener"):
            Address.decode(nonsense)


class Listener(threading.Thread):
    """The listening end of one handshake, on a thread."""

    def __init__(self, control: socket.socket, token: str) -> None:
        super().__init__()
        self._control, self._token = control, token
        self.result: Any = None
        self.start()

    def run(self) -> None:
        deadline = Deadline.after(5)
        try:
            self.result = bootstrap.answer(self._control, token=self._token, deadline=deadline)
            bootstrap.send(self._control, wire.Kind.WELCOME, b"my queue pair", "peer", deadline)
        except VerbflowError as error:
            self.result = error
            bootstrap.refuse(self._control, error)
            self._control.close()


@pytest.fixture
def controls() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def ask(control: socket.socket, token: str, seconds: float = 5) -> bytes:
    return bootstrap.ask(
        control, end_point().pack(), token=token, task="/job:worker/task:3", peer="ps", deadline=Deadline.after(seconds)
    )


def test_handshake(controls: tuple[socket.socket, socket.socket]) -> None:
    listener = Listener(controls[1], "secret")
    assert ask(controls[0], "secret") == b"my queue pair"
    listener.join()
    assert listener.result == ("/job:worker/task:3", end_point().pack())


def test_a_wrong_token_is_refused_on_both_ends(controls: tuple[socket.socket, socket.socket]) -> None:
    listener = Listener(controls[1], "secret")
    with pytest.raises(UnauthenticatedError, match="token"):
        ask(controls[0], "guess")
    listener.join()
    assert isinstance(listener.result, UnauthenticatedError)


def test_another_version_is_named(
    controls: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = Deadline.after(5)
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 99)
    bootstrap.send(controls[1], wire.Kind.HELLO, bytes(32), "peer", deadline)
    monkeypatch.undo()
    with pytest.raises(ProtocolMismatchError, match=r"99.*1"):
        ask(controls[0], "secret")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" + bytes(100), wire.encode(wire.Kind.CREDIT), bytes(104)])
def test_something_else_that_answers_is_refused(controls: tuple[socket.socket, socket.socket], noise: bytes) -> None:
    controls[1].sendall(noise)
    with pytest.raises(CorruptMessageError):
        ask(controls[0], "secret")


def test_a_peer_that_says_nothing_or_leaves_is_not_waited_for(controls: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(DeadlineError, match="ps"):
        ask(controls[0], "secret", seconds=0.1)
    controls[1].close()
    with pytest.raises(PeerLostError, match="ps"):
        ask(controls[0], "secret")
