"""ibverbs (a wheel on PyPI, optional extra) behind the seam.

It releases the GIL while it posts, polls and registers, and shows its descriptors. Memory elements are immutable, so a
post makes one (0.2 us); requests are reused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import ibverbs

from runtime.errors import TransportError
from runtime.transport.verbs.binding import (
    ADDRESS_VECTOR_MASK,
    ATTRIBUTE_MASKS,
    QPT_RC,
    Binding,
    Device,
    DeviceLimits,
    LibraryRegion,
    MemoryRegion,
    Opcode,
    PathTo,
    PortLimits,
    QueuePair,
    WorkCompletion,
)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(error.errno or 0, f"{what}: {error.strerror or error}") from error


class IbverbsQueuePair(QueuePair):
    def __init__(self, context: Any, domain: Any, send_depth: int, recv_depth: int, inline: int) -> None:
        self._channel = context.create_comp_channel()
        self.fd = int(self._channel.fd)
        os.set_blocking(self.fd, False)
        self._cq = context.create_cq(send_depth + recv_depth, self._channel)
        self._qp = domain.create_qp(
            ibverbs.QPInitAttr(
                send_cq=self._cq,
                recv_cq=self._cq,
                qp_type=QPT_RC,
                max_send_wr=send_depth,
                max_recv_wr=recv_depth,
                max_inline_data=inline,
            )
        )
        self.number = int(self._qp.qp_num)
        self.max_inline = int(self._qp.query()[1].max_inline_data)
        self._requests = {int(opcode): ibverbs.SendWR(opcode=int(opcode)) for opcode in Opcode}
        self._receives: list[list[Any]] = []
        self._open = True

    def modify(self, attributes: dict[str, int], path: PathTo | None = None) -> None:
        mask = sum(ATTRIBUTE_MASKS[name] for name in attributes)
        vector = None
        if path is not None:
            mask |= ADDRESS_VECTOR_MASK
            vector = ibverbs.AHAttr(
                dgid=path.gid,
                sgid_index=path.sgid_index,
                dlid=path.lid,
                is_global=int(path.gid is not None),
                port_num=path.port,
                hop_limit=path.hop_limit,
                traffic_class=path.traffic_class,
                sl=path.service_level,
            )
        with _translated(f"modifying queue pair {self.number}"):
            self._qp.modify(mask, vector, **attributes)

    def state(self) -> int:
        with _translated(f"querying queue pair {self.number}"):
            return int(self._qp.query()[0]["qp_state"])

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
        request = self._requests[opcode]
        request.sg_list = [ibverbs.SGE(address, nbytes, lkey)]
        request.wr_id = wr_id
        request.send_flags = flags
        if opcode != 2:
            request.remote_addr = remote_address
            request.rkey = rkey
            if opcode == 1:
                request.imm_data = imm
        try:
            self._qp.post_send(request)
        except OSError as error:
            raise TransportError(error.errno or 0, f"posting to a queue pair: {error}") from error

    def prepare_receives(self, first_id: int, addresses: Sequence[int], nbytes: int, lkey: int, group: int) -> None:
        requests = [
            ibverbs.RecvWR(first_id + index, [ibverbs.SGE(address, nbytes, lkey)])
            for index, address in enumerate(addresses)
        ]
        self._receives = [requests[start : start + group] for start in range(0, len(requests), group)]

    def post_receives(self, group: int) -> None:
        with _translated("posting receives"):
            self._qp.post_recv(self._receives[group])

    def poll(self, count: int) -> Sequence[WorkCompletion]:
        try:
            return self._cq.poll(count)
        except OSError as error:
            raise TransportError(error.errno or 0, f"polling a completion queue: {error}") from error

    def request_notification(self) -> None:
        if self._open:
            with _translated("requesting a notification"):
                self._cq.req_notify()

    def take_event(self) -> bool:
        if not self._open:
            return False
        try:
            self._channel.get_cq_event()
        except OSError:
            return False
        self._cq.ack_events(1)
        return True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with _translated("destroying a queue pair"):
            self._qp.close()
            self._cq.close()
            self._channel.close()


class IbverbsDevice(Device):
    def __init__(self, name: str) -> None:
        self.name = name
        with _translated(f"opening RDMA device {name}"):
            found = [device for device in ibverbs.get_device_list() if device.name == name]
            if not found:
                raise TransportError(f"there is no RDMA device {name}")
            self._context = found[0].open()
            os.set_blocking(int(self._context.async_fd), False)
            self._domain = self._context.alloc_pd()
        self._open = True

    def limits(self) -> DeviceLimits:
        with _translated(f"querying {self.name}"):
            found = self._context.query_device()
        return DeviceLimits(max_qp_wr=found.max_qp_wr, max_cqe=found.max_cqe, max_rd_atomic=found.max_qp_rd_atom)

    def port(self, number: int) -> PortLimits:
        with _translated(f"querying port {number} of {self.name}"):
            return PortLimits.of(self._context.query_port(number))

    def register(self, address: int, nbytes: int, access: int) -> MemoryRegion:
        with _translated(f"registering {nbytes} bytes with {self.name}"):
            return LibraryRegion(self._domain.reg_mr(address, nbytes, access), _translated)

    def queue_pair(self, send_depth: int, recv_depth: int, inline: int) -> QueuePair:
        with _translated(f"creating a queue pair on {self.name}"):
            return IbverbsQueuePair(self._context, self._domain, send_depth, recv_depth, inline)

    def async_events(self) -> list[int]:
        events: list[int] = []
        while self._open:
            try:
                event = self._context.get_async_event()
            except OSError:
                break
            events.append(int(event.event_type))
            self._context.ack_async_event(event)
        return events

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with _translated(f"closing {self.name}"):
            self._domain.close()
            self._context.close()


class IbverbsBinding(Binding):
    name = "ibverbs"

    def open(self, device: str) -> Device:
        return IbverbsDevice(device)
