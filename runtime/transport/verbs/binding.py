"""Binding: the one seam to an RDMA library. Everything else in this package speaks only to the classes here.

Two libraries stand behind it: pyverbs, which distributions ship, and ibverbs (a wheel on PyPI), which releases the GIL. The
numbers below are libibverbs' ABI and the InfiniBand specification's; they do not change, whereas pyverbs moved their
names from ``pyverbs.enums`` to ``pyverbs.libibverbs_enums`` in version 59. So nothing is looked up by name.

Errors of either library become TransportError with ``errno``, once, here.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.errors import ConfigError, UnavailableError


class Opcode(enum.IntEnum):
    """What a send request does (ibv_wr_opcode)."""

    WRITE = 0
    WRITE_IMM = 1
    SEND = 2
    READ = 4


class QpState(enum.IntEnum):
    """ibv_qp_state"""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class Status(enum.IntEnum):
    """ibv_wc_status, those that RC queue pairs give."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    REM_ABORT_ERR = 16
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class AsyncEvent(enum.IntEnum):
    """ibv_event_type, those that say why a link died."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    GID_CHANGE = 18


RECV = 128  # ibv_wc_opcode of a received message
RECV_IMM = 129  # and of a peer's write with immediate

SIGNALED = 1 << 1  # ibv_send_flags
INLINE = 1 << 3

LOCAL_WRITE = 1  # ibv_access_flags
REMOTE_WRITE = 1 << 1
REMOTE_READ = 1 << 2

QPT_RC = 2
LINK_LAYER_INFINIBAND = 1
LINK_LAYER_ETHERNET = 2
PORT_ACTIVE = 4

# ibv_qp_attr_mask, by the name that both libraries give the attribute.
ATTRIBUTE_MASKS = {
    "qp_state": 1 << 0,
    "qp_access_flags": 1 << 3,
    "pkey_index": 1 << 4,
    "port_num": 1 << 5,
    "path_mtu": 1 << 8,
    "timeout": 1 << 9,
    "retry_cnt": 1 << 10,
    "rnr_retry": 1 << 11,
    "rq_psn": 1 << 12,
    "max_rd_atomic": 1 << 13,
    "min_rnr_timer": 1 << 15,
    "sq_psn": 1 << 16,
    "max_dest_rd_atomic": 1 << 17,
    "dest_qp_num": 1 << 20,
}
ADDRESS_VECTOR_MASK = 1 << 7


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device can do, as it says itself."""

    max_qp_wr: int
    max_cqe: int
    max_rd_atomic: int


@dataclass(frozen=True, slots=True)
class PortLimits:
    """State of a port; ``active_mtu`` is ibv_mtu's code (5: 4096 bytes), ``max_msg_sz`` in bytes."""

    state: int
    link_layer: int
    lid: int
    active_mtu: int
    max_msg_sz: int

    @classmethod
    def of(cls, found: Any) -> PortLimits:
        """From what both libraries answer."""
        return cls(
            int(found.state), int(found.link_layer), int(found.lid), int(found.active_mtu), int(found.max_msg_sz)
        )


@dataclass(frozen=True, slots=True)
class PathTo:
    """The address vector to a peer. ``gid`` None: a LID route without global header (one InfiniBand subnet)."""

    port: int
    lid: int
    gid: bytes | None
    sgid_index: int
    hop_limit: int
    service_level: int
    traffic_class: int


class WorkCompletion(Protocol):
    """A completion as both libraries give it."""

    wr_id: int
    status: int
    opcode: int
    byte_len: int
    imm_data: int


class MemoryRegion(ABC):
    """Registered memory. The caller keeps the memory alive and closes the region before it frees it."""

    lkey: int
    rkey: int

    @abstractmethod
    def close(self) -> None:
        """Deregister. Idempotent."""


class LibraryRegion(MemoryRegion):
    """Registered memory as both libraries give it. ``translated`` is the library's own translation of its errors: a context
    manager that is told what is being done."""

    def __init__(self, region: Any, translated: Callable[[str], AbstractContextManager[None]]) -> None:
        self._region = region
        self._translated = translated
        self.lkey = int(region.lkey)
        self.rkey = int(region.rkey)

    def close(self) -> None:
        with self._translated("deregistering memory"):
            self._region.close()


class QueuePair(ABC):
    """An RC queue pair with one completion queue of its own for both directions, and the completion channel.

    One thread at a time posts and polls; ``request_notification``, ``take_event``, ``state`` and ``modify`` may be called by
    another meanwhile.
    """

    number: int
    max_inline: int
    fd: int | None  # readable when a requested notification came; None where the library hides it

    @abstractmethod
    def modify(self, attributes: dict[str, int], path: PathTo | None = None) -> None:
        """Set attributes (keys of ATTRIBUTE_MASKS) and, given ``path``, the address vector."""

    @abstractmethod
    def state(self) -> int:
        """The state now, asked of the device."""

    @abstractmethod
    def post(
        self,
        opcode: int,
        wr_id: int,
        address: int,
        nbytes: int,
        lkey: int,
        flags: int,
        remote_address: int = 0,
        rkey: int = 0,
        imm: int = 0,
    ) -> None:
        """Post one send request of one piece of memory."""

    @abstractmethod
    def prepare_receives(self, first_id: int, addresses: Sequence[int], nbytes: int, lkey: int, group: int) -> None:
        """Make the receive requests for the slots at ``addresses``, in groups of ``group`` that are posted together. The
        id of a slot's completion is ``first_id`` plus its index."""

    @abstractmethod
    def post_receives(self, group: int) -> None:
        """Post all receives of one group."""

    @abstractmethod
    def poll(self, count: int) -> Sequence[WorkCompletion]:
        """At most ``count`` completions; never blocks."""

    @abstractmethod
    def request_notification(self) -> None:
        """Let ``fd`` become readable at the next completion."""

    @abstractmethod
    def take_event(self) -> bool:
        """Take the event that made ``fd`` readable, without blocking; False if there was none."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the queue pair, then its completion queue and channel. Idempotent."""


class Device(ABC):
    """An open device with one protection domain."""

    name: str

    @abstractmethod
    def limits(self) -> DeviceLimits: ...

    @abstractmethod
    def port(self, number: int) -> PortLimits: ...

    @abstractmethod
    def register(self, address: int, nbytes: int, access: int) -> MemoryRegion:
        """Register memory for this device."""

    @abstractmethod
    def queue_pair(self, send_depth: int, recv_depth: int, inline: int) -> QueuePair:
        """A queue pair in RESET; ``inline`` bytes are asked for and less may be granted."""

    @abstractmethod
    def async_events(self) -> list[int]:
        """Events of the device and its objects since the last call (ibv_event_type); never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Close domain and device; regions and queue pairs must be closed. Idempotent."""


class Binding(ABC):
    """One RDMA library."""

    name: str

    @abstractmethod
    def open(self, device: str) -> Device:
        """Open a device by name."""


NAMES = ("pyverbs", "ibverbs")


def load_binding(name: str = "auto") -> Binding:
    """Import an RDMA library: "pyverbs", "ibverbs", or "auto" for the first that there is. UnavailableError says how to get
    one."""
    if name not in ("auto", *NAMES):
        raise ConfigError(f"unknown binding {name!r}; known: auto, {', '.join(NAMES)}")
    reasons = []
    for candidate in NAMES if name == "auto" else (name,):
        try:
            if candidate == "pyverbs":
                from runtime.transport.verbs.pyverbs_binding import PyverbsBinding

                return PyverbsBinding()
            from runtime.transport.verbs.ibverbs_binding import IbverbsBinding

            return IbverbsBinding()
        except ImportError as error:
            reasons.append(f"{candidate}: {error}")
    hints = {
        "pyverbs": "pyverbs comes with the distribution: make setup (package python3-pyverbs)",
        "ibverbs": "ibverbs comes from PyPI: pip install 'verbflow[ibverbs]'",
    }
    hint = hints.get(name, "; ".join(hints.values()))
    raise UnavailableError(f"no RDMA library can be loaded ({'; '.join(reasons)}); {hint}")
