"""pyverbs (rdma-core's Python package, 44 to 65) behind the seam.

What it does differently from its documentation, and what follows:

- It never releases the GIL, so a blocking call stops every thread of the process. Descriptors are made non-blocking and
  nothing that could block is called otherwise.
- Before 57 a completion channel does not show its descriptor, and the device's never shows; they are found by looking at
  which ``[infinibandevent]`` descriptor came into being.
- A SendWR or SGE costs 0.6-0.9 us to make and leaks 64 bytes (its destructor's name is misspelt); after
  ``wr.sg_list = sge`` both own the same memory and closing both aborts the process. So pairs are made once, kept in a
  pool for the life of the process, and only their fields are set.
- ``QP.qp_state`` is a cached value; the state is queried.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

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

_EVENT_LINK = "anon_inode:[infinibandevent]"
_opening = threading.Lock()  # two objects made at once would each find the other's descriptor
_idle_requests: list[dict[int, tuple[Any, Any]]] = []


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        raise TransportError(getattr(error, "error_code", 0) or 0, f"{what}: {error}") from error


def _event_descriptors() -> set[int]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}") == _EVENT_LINK:
                found.add(int(entry))
    return found


def _make_with_descriptor(make: Callable[[], Any]) -> tuple[Any, int | None]:
    """Make an object that opens an event descriptor; (object, descriptor, non-blocking, or None if it was not found)."""
    with _opening:
        before = _event_descriptors()
        made = make()
        fd = getattr(made, "fd", None)
        if fd is None:
            new = _event_descriptors() - before
            fd = new.pop() if len(new) == 1 else None
    if fd is not None:
        os.set_blocking(fd, False)
    return made, fd


def _requests() -> dict[int, tuple[Any, Any]]:
    """A send request and its memory element for each opcode, new or used before."""
    if _idle_requests:
        return _idle_requests.pop()
    pairs = {}
    for opcode in Opcode:
        sge = SGE(0, 0, 0)
        request = SendWR(opcode=int(opcode), num_sge=1, sg=[sge])
        request.close()  # frees its copy of the element, in whose place comes the element itself
        request.sg_list = sge
        pairs[int(opcode)] = (request, sge)
    return pairs


class PyverbsQueuePair(QueuePair):
    def __init__(self, context: Any, domain: Any, send_depth: int, recv_depth: int, inline: int) -> None:
        self._channel, self.fd = _make_with_descriptor(lambda: CompChannel(context))
        try:
            self._cq = CQ(context, send_depth + recv_depth, None, self._channel, 0)
            capacity = QPCap(max_send_wr=send_depth, max_recv_wr=recv_depth, max_inline_data=inline)
            wanted = QPInitAttr(qp_type=QPT_RC, scq=self._cq, rcq=self._cq, cap=capacity, sq_sig_all=0)
            self._qp = QP(domain, wanted)
        except PyverbsError:
            self._channel.close()  # and with it the queue
            raise
        self.number = int(self._qp.qp_num)
        self.max_inline = int(wanted.max_inline_data)
        self._requests = _requests()
        self._receives: list[Any] = []
        self._group = 1
        self._open = True

    def modify(self, attributes: dict[str, int], path: PathTo | None = None) -> None:
        wanted = QPAttr()
        mask = 0
        for name, value in attributes.items():
            setattr(wanted, name, value)
            mask |= ATTRIBUTE_MASKS[name]
        if path is not None:
            mask |= ADDRESS_VECTOR_MASK
            route = None
            if path.gid is not None:
                route = GlobalRoute(
                    dgid=GID(_colons(path.gid)),
                    sgid_index=path.sgid_index,
                    hop_limit=path.hop_limit,
                    traffic_class=path.traffic_class,
                )
            wanted.ah_attr = AHAttr(
                dlid=path.lid, sl=path.service_level, port_num=path.port, is_global=int(route is not None), gr=route
            )
        with _translated(f"modifying queue pair {self.number}"):
            self._qp.modify(wanted, mask)

    def state(self) -> int:
        with _translated(f"querying queue pair {self.number}"):
            attributes, _ = self._qp.query(ATTRIBUTE_MASKS["qp_state"])
        return int(attributes.qp_state)

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
        request, sge = self._requests[opcode]
        sge.addr = address
        sge.length = nbytes
        sge.lkey = lkey
        request.wr_id = wr_id
        request.send_flags = flags
        if opcode != 2:
            request.set_wr_rdma(rkey, remote_address)
            if opcode == 1:
                request.imm_data = imm
        try:
            self._qp.post_send(request)
        except PyverbsError as error:
            raise TransportError(getattr(error, "error_code", 0) or 0, f"posting to a queue pair: {error}") from error

    def prepare_receives(self, first_id: int, addresses: Sequence[int], nbytes: int, lkey: int, group: int) -> None:
        self._group = group
        for index in reversed(range(len(addresses))):
            sge = SGE(addresses[index], nbytes, lkey)
            # A group is a chain that ends with its last slot; the library cannot cut a chain once it is made.
            last = (index + 1) % group == 0 or index + 1 == len(addresses)
            following = None if last else self._receives[-1]
            self._receives.append(RecvWR(wr_id=first_id + index, num_sge=1, sg=[sge], next_wr=following))
            sge.close()  # the request has a copy
        self._receives.reverse()

    def post_receives(self, group: int) -> None:
        with _translated("posting receives"):
            self._qp.post_recv(self._receives[group * self._group])

    def poll(self, count: int) -> Sequence[WorkCompletion]:
        try:
            return self._cq.poll(count)[1]
        except PyverbsError as error:
            raise TransportError(f"polling a completion queue: {error}") from error

    def request_notification(self) -> None:
        if self._open:
            with _translated("requesting a notification"):
                self._cq.req_notify()

    def take_event(self) -> bool:
        # Only where the descriptor is known, so non-blocking: a wait here would stop every thread.
        if self.fd is None or not self._open:
            return False
        try:
            self._channel.get_cq_event(self._cq)
        except PyverbsError:
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
        for request in self._receives:
            request.close()
        self._receives.clear()
        _idle_requests.append(self._requests)


class PyverbsDevice(Device):
    def __init__(self, name: str) -> None:
        self.name = name
        with _translated(f"opening RDMA device {name}"):
            self._context, self._event_fd = _make_with_descriptor(lambda: Context(name=name))
            self._domain = PD(self._context)

    def limits(self) -> DeviceLimits:
        with _translated(f"querying {self.name}"):
            found = self._context.query_device()
        return DeviceLimits(
            max_qp_wr=found.max_qp_wr,
            max_cqe=found.max_cqe,
            max_rd_atomic=min(found.max_qp_rd_atom, found.max_qp_init_rd_atom),
        )

    def port(self, number: int) -> PortLimits:
        with _translated(f"querying port {number} of {self.name}"):
            return PortLimits.of(self._context.query_port(number))

    def register(self, address: int, nbytes: int, access: int) -> MemoryRegion:
        with _translated(f"registering {nbytes} bytes with {self.name}"):
            return LibraryRegion(MR(self._domain, nbytes, access, address=address), _translated)

    def queue_pair(self, send_depth: int, recv_depth: int, inline: int) -> QueuePair:
        with _translated(f"creating a queue pair on {self.name}"):
            return PyverbsQueuePair(self._context, self._domain, send_depth, recv_depth, inline)

    def async_events(self) -> list[int]:
        events: list[int] = []
        while self._event_fd is not None:
            try:
                event = self._context.get_async_event()
            except PyverbsError:
                break
            events.append(int(event.event_type))
            event.ack()
        return events

    def close(self) -> None:
        with _translated(f"closing {self.name}"):
            self._domain.close()
            self._context.close()
        self._event_fd = None


class PyverbsBinding(Binding):
    name = "pyverbs"

    def open(self, device: str) -> Device:
        return PyverbsDevice(device)


def _colons(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))
