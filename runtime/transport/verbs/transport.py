"""VerbsTransport: RDMA between processes, over InfiniBand, RoCE or soft-RoCE, also within one host."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, TransportError, UnavailableError
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Availability, Options
from runtime.transport.onesided.link import Link, Region
from runtime.transport.onesided.settings import Settings
from runtime.transport.onesided.transport import OneSidedTransport
from runtime.transport.verbs import bootstrap
from runtime.transport.verbs.binding import load_binding
from runtime.transport.verbs.bootstrap import Address
from runtime.transport.verbs.device import INFINIBAND, choose_place, why_unavailable
from runtime.transport.verbs.fidelity import SYSFS, fidelity_of
from runtime.transport.verbs.link import VerbsLink
from runtime.transport.verbs.memory import Memory
from runtime.transport.verbs.qp import QpAttributes
from runtime.wire import Kind

_HANDSHAKE_S = 10.0
_BACKLOG = 128
# Header, shape and key of a message beside its payload.
_MESSAGE_OVERHEAD = 192
_MIN_MESSAGE_BYTES = 1408  # a FETCH with the longest key
_MAX_MESSAGE_BYTES = 64 << 10  # larger eager tensors go in pieces


@dataclass(frozen=True, slots=True)
class VerbsSettings(Settings):
    """The one-sided settings, and those of verbs.

    binding            "pyverbs", "ibverbs", or "auto": the first that there is
    device, port, gid_index   instead of the choice by address
    send_depth         requests that may be outstanding on a queue pair
    timeout ... pkey_index    see QpAttributes
    """

    binding: str = "auto"
    device: str = ""
    port: int = 0
    gid_index: int = -1
    send_depth: int = 512
    timeout: int = 14
    retry_count: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    max_rd_atomic: int = 16
    service_level: int = 0
    traffic_class: int = 0
    pkey_index: int = 0

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a second class, which the closure does not know.
        Settings.__post_init__(self)
        if not 8 <= self.send_depth <= 1 << 15:
            raise ConfigError(f"send_depth = {self.send_depth} is not in 8..{1 << 15}")
        self.attributes()

    def attributes(self) -> QpAttributes:
        return QpAttributes(
            timeout=self.timeout,
            retry_count=self.retry_count,
            rnr_retry=self.rnr_retry,
            min_rnr_timer=self.min_rnr_timer,
            max_rd_atomic=self.max_rd_atomic,
            service_level=self.service_level,
            traffic_class=self.traffic_class,
            pkey_index=self.pkey_index,
        )


class VerbsTransport(OneSidedTransport):
    """See Transport. Opening it opens the device and registers the arena; the listener and every connection being set
    up have a thread, established ones none of their own."""

    name: ClassVar[str] = "verbs"
    settings_class: ClassVar[type[Settings]] = VerbsSettings
    settings: VerbsSettings

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        super().__init__(options, arena, tracer)
        settings = self.settings
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._arriving: dict[socket.socket, threading.Thread] = {}  # peers that are being set up
        self._stopping = False
        self._attributes = settings.attributes()
        with contextlib.ExitStack() as opened:  # what a failure has to close again
            opened.callback(self.progress.close)
            if self._fabric is not None:
                opened.callback(self._fabric.close)
            binding = load_binding(settings.binding)
            self.binding = binding.name
            self.place = choose_place(options.bind, settings.device, settings.port, settings.gid_index)
            self._device = binding.open(self.place.device)
            opened.callback(self._device.close)
            self._memory = Memory(
                self._device, arena, self.counters, settings.registration_bytes, settings.registration_entries
            )
            opened.pop_all()
        self.registrations = self._memory.cache

    @classmethod
    def probe(cls) -> Availability:
        try:
            load_binding()
        except UnavailableError as error:
            return Availability(False, str(error))
        reason = why_unavailable()
        if reason is not None:
            return Availability(False, reason)
        place = choose_place()
        return Availability(True, place.reason, fidelity_of(place.device))

    def reaches(self, address: bytes) -> bool:
        try:
            there = Address.decode(address)
        except ConfigError:
            return False
        here = self.place
        if there.machine == bootstrap.machine_id():
            return there.link_layer == here.link_layer
        if there.isolated or _isolated(here.device):
            return False
        if here.link_layer == INFINIBAND:
            return there.link_layer == INFINIBAND and bytes.fromhex(there.gid)[:8] == here.gid.raw[:8]
        return there.link_layer == here.link_layer

    def _listen(self) -> bytes:
        host = self.options.bind
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, 0))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise TransportError(f"cannot listen on {host}: {error.strerror}") from error
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="verbflow-verbs-accept", daemon=True
        )
        self._acceptor.start()
        port = listener.getsockname()[1]
        place = self.place
        return Address(
            self._reachable(host),
            port,
            place.link_layer,
            place.gid.raw.hex(),
            bootstrap.machine_id(),
            _isolated(place.device),
        ).encode()

    def _dial(self, address: bytes, peer: str, deadline: Deadline) -> Link:
        there = Address.decode(address)
        try:
            control = socket.create_connection((there.host, there.port), timeout=max(deadline.remaining(), 1e-3))
        except TimeoutError as error:
            raise deadline.error(f"connecting to {peer} at {there.host}:{there.port}") from error
        except OSError as error:
            raise PeerLostError(f"{peer} does not listen at {there.host}:{there.port} ({error.strerror})") from error
        link: VerbsLink | None = None
        try:
            link = self._make_link()
            theirs = bootstrap.ask(
                control, link.describe(), token=self.options.token, task=self.options.task, peer=peer, deadline=deadline
            )
            link.connect(theirs, peer)
            bootstrap.send(control, Kind.WELCOME, b"", peer, deadline)
        except BaseException:
            control.close()
            if link is not None:
                link.close()
            raise
        link.adopt(control)
        return link

    def _export(self, array: np.ndarray) -> Region:
        if array.nbytes and self.arena.offset_of(array) is None:
            raise ValueError(f"{array.nbytes} bytes lie outside the arena")
        return self._memory.region(array)

    def _stop_listening(self) -> None:
        with self._guard:
            self._stopping = True
            controls = list(self._arriving)
        listener, self._listener = self._listener, None
        if listener is not None:
            _hang_up(listener)  # wakes the accepting thread, which a close would not
            listener.close()
        for control in controls:
            _hang_up(control)

    def _release_resources(self) -> None:
        if self._acceptor is not None:
            self._acceptor.join()
        for thread in list(self._arriving.values()):
            thread.join()
        self._memory.close()
        self._device.close()

    def _accept(self, listener: socket.socket) -> None:
        """A thread a peer while it is being set up, so that a slow one does not hold up the others."""
        while True:
            try:
                control, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._welcome, args=(control,), name="verbflow-verbs-welcome", daemon=True)
            with self._guard:
                if self._stopping:
                    control.close()
                    return
                self._arriving[control] = thread
            thread.start()

    def _welcome(self, control: socket.socket) -> None:
        deadline = Deadline.after(_HANDSHAKE_S)
        link: VerbsLink | None = None
        try:
            task, described = bootstrap.answer(control, token=self.options.token, deadline=deadline)
            link = self._make_link()
            link.connect(described, task)
            bootstrap.send(control, Kind.WELCOME, link.describe(), task, deadline)
            bootstrap.receive(control, task, deadline)  # the peer is ready, so what is sent now arrives
        except Exception as error:  # the peer learns of it; a listener lives on whatever a peer does
            bootstrap.refuse(control, error)
            control.close()
            if link is not None:
                link.close()
        else:
            link.adopt(control)
            self.accepted(link, task)
        finally:
            with self._guard:
                del self._arriving[control]

    def _make_link(self) -> VerbsLink:
        settings, place = self.settings, self.place
        wanted = max(settings.eager_threshold + _MESSAGE_OVERHEAD, _MIN_MESSAGE_BYTES)
        return VerbsLink(
            self._device,
            self._memory,
            port=place.port,
            gid=place.gid.raw,
            gid_index=place.gid.index,
            attributes=self._attributes,
            depth=settings.depth,
            message_bytes=min(wanted, _MAX_MESSAGE_BYTES),
            send_depth=settings.send_depth,
        )

    def _reachable(self, host: str) -> str:
        """What peers shall dial: the device's own address where we listen on all."""
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        address = self.place.gid.address
        return str(address) if address.version == 4 else socket.gethostname()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _isolated(device: str) -> bool:
    """Does the device lie on an interface that leads nowhere (soft-RoCE on a dummy or the loopback)?"""
    try:
        return (SYSFS / device / "parent").read_text().startswith(("dummy", "lo"))
    except OSError:
        return False
