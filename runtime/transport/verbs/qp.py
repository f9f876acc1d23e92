"""RC queue pairs: their attributes, what two ends tell each other, the way to ready, and what errors mean."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from runtime.errors import ConfigError, CorruptMessageError, PeerLostError, ProtocolMismatchError, TransportError
from runtime.transport.verbs.binding import (
    LINK_LAYER_INFINIBAND,
    LOCAL_WRITE,
    REMOTE_READ,
    REMOTE_WRITE,
    AsyncEvent,
    PathTo,
    QpState,
    QueuePair,
    Status,
)


@dataclass(frozen=True, slots=True)
class QpAttributes:
    """Attributes that a network may need changed (IB spec vol. 1, 9.7.5 and 11.2.5). The defaults end: a lost peer is an
    error after about ``retry_count`` times the timeout.

    timeout        waits 4.096 us * 2**timeout for an acknowledgement before it sends again: 14 is 67 ms
    retry_count    how often, to 6 (soft-RoCE takes 7 as for ever)
    rnr_retry      how often a peer that has no receive posted is tried again; 7 is for ever
    min_rnr_timer  code of the pause before that: 12 is 0.64 ms
    max_rd_atomic  reads under way at once; bounded by both devices
    """

    timeout: int = 14
    retry_count: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    max_rd_atomic: int = 16
    service_level: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    pkey_index: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "timeout": (1, 31), "retry_count": (0, 6), "rnr_retry": (0, 7), "min_rnr_timer": (0, 31),
            "max_rd_atomic": (1, 255), "service_level": (0, 15), "traffic_class": (0, 255), "hop_limit": (1, 255),
            "pkey_index": (0, 65535),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} = {getattr(self, name)} is not in {low}..{high}")

    @property
    def patience_s(self) -> float:
        """About how long an unacknowledged request is tried."""
        return 4.096e-6 * 2.0**self.timeout * (self.retry_count + 1)


@dataclass(frozen=True, slots=True)
class EndPoint:
    """What one end tells the other to be connected to: addresses, first packet number, and how much it takes.

    ``depth`` and ``message_bytes``: receives that stay posted for the peer's messages, and their size.
    """

    number: int
    psn: int
    lid: int
    gid: bytes
    mtu: int
    link_layer: int
    max_rd_atomic: int
    depth: int
    message_bytes: int

    _LAYOUT = struct.Struct("<IIH16sBBHII")
    NBYTES = _LAYOUT.size

    def pack(self) -> bytes:
        return self._LAYOUT.pack(
            self.number, self.psn, self.lid, self.gid, self.mtu, self.link_layer,
            self.max_rd_atomic, self.depth, self.message_bytes,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> EndPoint:
        """CorruptMessageError if a field is out of its range."""
        if len(data) != cls.NBYTES:
            raise CorruptMessageError(f"a queue pair's address has {cls.NBYTES} bytes, not {len(data)}")
        end = cls(*cls._LAYOUT.unpack(data))
        if (
            max(end.number, end.psn) >= 1 << 24
            or not 1 <= end.mtu <= 5
            or end.link_layer not in (1, 2)
            or not 1 <= end.max_rd_atomic <= 255
            or not 1 <= end.depth <= 1 << 16
            or not 256 <= end.message_bytes <= 1 << 24
        ):
            raise CorruptMessageError(f"a queue pair's address that cannot be: {end}")
        return end


def random_psn() -> int:
    """A first packet number that packets of an earlier connection are unlikely to fit."""
    return secrets.randbits(24)


def to_init(pair: QueuePair, port: int, attributes: QpAttributes) -> None:
    """RESET to INIT; from then on receives can be posted."""
    pair.modify(
        {
            "qp_state": QpState.INIT,
            "pkey_index": attributes.pkey_index,
            "port_num": port,
            "qp_access_flags": LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ,
        }
    )


def to_ready(
    pair: QueuePair, ours: EndPoint, theirs: EndPoint, port: int, sgid_index: int, attributes: QpAttributes
) -> None:
    """INIT to RTR to RTS: connected to ``theirs``. ProtocolMismatchError if the two cannot be connected."""
    if ours.link_layer != theirs.link_layer:
        raise ProtocolMismatchError(
            "one end is on InfiniBand and the other on Ethernet (RoCE); no queue pair joins them"
        )
    pair.modify(
        {
            "qp_state": QpState.RTR,
            "path_mtu": min(ours.mtu, theirs.mtu),
            "dest_qp_num": theirs.number,
            "rq_psn": theirs.psn,
            "max_dest_rd_atomic": ours.max_rd_atomic,
            "min_rnr_timer": attributes.min_rnr_timer,
        },
        path_to(ours, theirs, port, sgid_index, attributes),
    )
    pair.modify(
        {
            "qp_state": QpState.RTS,
            "sq_psn": ours.psn,
            "timeout": attributes.timeout,
            "retry_cnt": attributes.retry_count,
            "rnr_retry": attributes.rnr_retry,
            "max_rd_atomic": min(ours.max_rd_atomic, theirs.max_rd_atomic),
        }
    )


def path_to(ours: EndPoint, theirs: EndPoint, port: int, sgid_index: int, attributes: QpAttributes) -> PathTo:
    """The address vector. RoCE always has a global header; InfiniBand only between subnets, where it is needed."""
    local = ours.link_layer == LINK_LAYER_INFINIBAND and ours.gid[:8] == theirs.gid[:8]
    return PathTo(
        port=port,
        lid=theirs.lid,
        gid=None if local else theirs.gid,
        sgid_index=sgid_index,
        hop_limit=attributes.hop_limit,
        service_level=attributes.service_level,
        traffic_class=attributes.traffic_class,
    )


def translate(status: int, peer: str, attributes: QpAttributes, events: list[int]) -> TransportError:
    """What a failed completion says about the connection with ``peer``; ``events`` of the device may say why."""
    name = Status(status).name if status in Status._value2member_map_ else f"status {status}"
    happened = [AsyncEvent(event).name for event in events if event in AsyncEvent._value2member_map_]
    why = f"; the device reports {', '.join(happened)}" if happened else ""
    if AsyncEvent.PORT_ERR in events:
        return PeerLostError(f"{peer}: the RDMA port went down ({name}{why})")
    if AsyncEvent.DEVICE_FATAL in events:
        return PeerLostError(f"{peer}: the RDMA device failed ({name}{why})")
    if status == Status.RETRY_EXC_ERR:
        return PeerLostError(
            f"{peer} acknowledges nothing: given up after {attributes.retry_count} retries, about "
            f"{attributes.patience_s:.1f} s ({name}{why})"
        )
    if status == Status.RNR_RETRY_EXC_ERR:
        return PeerLostError(f"{peer} has not posted a receive for {attributes.rnr_retry} retries ({name}{why})")
    if status == Status.REM_ACCESS_ERR:
        return CorruptMessageError(
            f"{peer} refuses access to the memory that was addressed: its region was withdrawn, or the key is wrong "
            f"({name}{why})"
        )
    if status in (Status.LOC_PROT_ERR, Status.LOC_ACCESS_ERR, Status.LOC_LEN_ERR):
        return TransportError(f"own memory of a transfer with {peer} is not registered, or too short ({name}{why})")
    if status == Status.WR_FLUSH_ERR:
        return PeerLostError(f"the connection with {peer} was broken ({name}{why})")
    return PeerLostError(f"the connection with {peer} failed ({name}{why})")
