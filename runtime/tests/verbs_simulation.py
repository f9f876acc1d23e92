"""A device that exists only in this process, as strict as a real one: so that the link's own logic is tested everywhere.

Requests are carried out when they are posted. Keys, bounds, access rights, states and receives are checked, and failures
end as they do on an adapter: an error completion, the queue pair in ERR, and everything that was posted flushed.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import TransportError
from runtime.transport.verbs import binding, transport
from runtime.transport.verbs.binding import (
    RECV,
    RECV_IMM,
    REMOTE_READ,
    REMOTE_WRITE,
    SIGNALED,
    Device,
    DeviceLimits,
    MemoryRegion,
    Opcode,
    PathTo,
    PortLimits,
    QpState,
    QueuePair,
    Status,
)
from runtime.transport.verbs.device import Gid, Place

PLACE = Place("sim0", 1, "Ethernet", Gid(1, bytes(10) + b"\xff\xff\x0a\x4d\x00\x01", "RoCE v2"), "simulated")
_guard = threading.RLock()
_pairs: dict[int, SimulatedPair] = {}
_regions: dict[int, SimulatedRegion] = {}
_numbers = itertools.count(100)


class SimulatedRegion(MemoryRegion):
    def __init__(self, address: int, nbytes: int, access: int) -> None:
        self.address, self.nbytes, self.access = address, nbytes, access
        self.lkey = self.rkey = next(_numbers)
        _regions[self.lkey] = self

    def close(self) -> None:
        _regions.pop(self.lkey, None)


def allows(key: int, address: int, nbytes: int, access: int) -> bool:
    """May ``nbytes`` at ``address`` be touched under ``key``?"""
    region = _regions.get(key)
    return (
        region is not None
        and region.access & access == access
        and region.address <= address
        and address + nbytes <= region.address + region.nbytes
    )


class SimulatedPair(QueuePair):
    def __init__(self, send_depth: int, recv_depth: int, inline: int) -> None:
        if inline > 256:
            raise TransportError(errno.EINVAL, "Invalid argument")
        self.number = next(_numbers)
        self.max_inline = inline
        self.fd: int | None = os.eventfd(0, os.EFD_NONBLOCK)
        self._send_depth, self._recv_depth = send_depth, recv_depth
        self._state = int(QpState.RESET)
        self._destination = 0
        self._groups: list[list[tuple[int, int]]] = []
        self._slot_bytes = self._slot_key = 0
        self._receives: deque[tuple[int, int]] = deque()
        self._completions: deque[Any] = deque()
        self._armed = False
        _pairs[self.number] = self

    def modify(self, attributes: dict[str, int], path: PathTo | None = None) -> None:
        assert attributes.keys() <= binding.ATTRIBUTE_MASKS.keys()
        with _guard:
            wanted = attributes["qp_state"]
            if wanted == QpState.ERR:
                self._break()
                return
            if wanted != self._state + 1 or (wanted == QpState.RTR) != (path is not None):
                raise TransportError(errno.EINVAL, "Invalid argument")
            self._state = wanted
            self._destination = attributes.get("dest_qp_num", self._destination)

    def state(self) -> int:
        return self._state

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
        with _guard:
            if self._state < QpState.RTS:
                raise TransportError(errno.EINVAL, "Invalid argument")
            status = Status.WR_FLUSH_ERR if self._state == QpState.ERR else self._carry_out(
                opcode, address, nbytes, lkey, remote_address, rkey, imm
            )  # fmt: skip
            if status or flags & SIGNALED:
                self._complete(wr_id, status, 0, nbytes, 0)
            if status and self._state != QpState.ERR:
                self._break()

    def _carry_out(
        self, opcode: int, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int, imm: int
    ) -> int:
        if not allows(lkey, address, nbytes, binding.LOCAL_WRITE):
            return Status.LOC_PROT_ERR
        peer = _pairs.get(self._destination)
        if peer is None or peer._state not in (QpState.RTR, QpState.RTS):
            return Status.RETRY_EXC_ERR
        if opcode != Opcode.SEND and nbytes:
            needed = REMOTE_READ if opcode == Opcode.READ else REMOTE_WRITE
            if not allows(rkey, remote_address, nbytes, needed):
                return Status.REM_ACCESS_ERR
            target, source = (address, remote_address) if opcode == Opcode.READ else (remote_address, address)
            ctypes.memmove(target, source, nbytes)
        if opcode in (Opcode.SEND, Opcode.WRITE_IMM):
            if not peer._receives:
                return Status.RNR_RETRY_EXC_ERR
            receive_id, slot = peer._receives.popleft()
            if opcode == Opcode.SEND:
                if nbytes > peer._slot_bytes:
                    return Status.REM_OP_ERR
                ctypes.memmove(slot, address, nbytes)
            peer._complete(receive_id, 0, RECV if opcode == Opcode.SEND else RECV_IMM, nbytes, imm)
        return Status.SUCCESS

    def _complete(self, wr_id: int, status: int, opcode: int, nbytes: int, imm: int) -> None:
        self._completions.append(
            SimpleNamespace(wr_id=wr_id, status=int(status), opcode=opcode, byte_len=nbytes, imm_data=imm)
        )
        assert len(self._completions) <= self._send_depth + self._recv_depth, "the completion queue overran"
        if self._armed and self.fd is not None:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def _break(self) -> None:
        self._state = int(QpState.ERR)
        while self._receives:
            self._complete(self._receives.popleft()[0], Status.WR_FLUSH_ERR, 0, 0, 0)

    def prepare_receives(self, first_id: int, addresses: Sequence[int], nbytes: int, lkey: int, group: int) -> None:
        slots = [(first_id + index, address) for index, address in enumerate(addresses)]
        assert all(allows(lkey, address, nbytes, binding.LOCAL_WRITE) for _, address in slots)
        self._groups = [slots[start : start + group] for start in range(0, len(slots), group)]
        self._slot_bytes, self._slot_key = nbytes, lkey

    def post_receives(self, group: int) -> None:
        with _guard:
            self._receives.extend(self._groups[group])
            assert len(self._receives) <= self._recv_depth, "more receives than the queue holds"
            if self._state == QpState.ERR:
                self._break()

    def poll(self, count: int) -> Sequence[Any]:
        with _guard:
            return [self._completions.popleft() for _ in range(min(count, len(self._completions)))]

    def request_notification(self) -> None:
        self._armed = True

    def take_event(self) -> bool:
        try:
            return self.fd is not None and os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        with _guard:
            if _pairs.pop(self.number, None) is not None and self.fd is not None:
                os.close(self.fd)


class SimulatedDevice(Device):
    name = "sim0"

    def limits(self) -> DeviceLimits:
        return DeviceLimits(max_qp_wr=16384, max_cqe=32767, max_rd_atomic=16)

    def port(self, number: int) -> PortLimits:
        return PortLimits(binding.PORT_ACTIVE, binding.LINK_LAYER_ETHERNET, 0, 5, 1 << 23)

    def register(self, address: int, nbytes: int, access: int) -> MemoryRegion:
        return SimulatedRegion(address, nbytes, access)

    def queue_pair(self, send_depth: int, recv_depth: int, inline: int) -> QueuePair:
        return SimulatedPair(send_depth, recv_depth, inline)

    def async_events(self) -> list[int]:
        return []

    def close(self) -> None:
        return


def objects() -> tuple[int, int]:
    """Queue pairs and regions that exist."""
    return len(_pairs), len(_regions)


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the verbs transport find this device and no other."""
    library = SimpleNamespace(name="simulated", open=lambda name: SimulatedDevice())
    monkeypatch.setattr(transport, "load_binding", lambda name="auto": library)
    monkeypatch.setattr(transport, "choose_place", lambda *_: PLACE)
    monkeypatch.setattr(transport, "why_unavailable", lambda: None)
