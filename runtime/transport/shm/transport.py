"""ShmTransport: one-sided transfers between processes of one host.

Memory comes from memfds that are handed over a unix socket, so no name can be left in /dev/shm, and they are sealed, so no
peer can shrink one under us. The socket's name lies in the abstract namespace and vanishes with the listener; it stays
connected, and its end tells at once that a process died.

A peer maps the whole arena (its transfer area; nothing else of the process). Within it the checks are those of the protocol,
made by the end that copies: bounds and a key for every remote address, and for static slots edge and generation. Whoever
shows the run's token and belongs to the same user is trusted with the area's content, as with threads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, TransportError, VerbflowError
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Availability, Options
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import NO_REGION, Link, Region
from runtime.transport.onesided.settings import Settings
from runtime.transport.onesided.transport import OneSidedTransport
from runtime.transport.shm import hello
from runtime.transport.shm.hello import Hello
from runtime.transport.shm.link import ShmLink
from runtime.transport.shm.ring import Receiver

# poll() hands out up to 64 messages whose credits are already on their way back (Link.depth).
_SPARE_SLOTS = 64
_HANDSHAKE_S = 10.0
_MAX_STRANGERS = 256
_PREFIX = b"shm:"


@dataclass(frozen=True, slots=True)
class ShmSettings(Settings):
    """The one-sided settings, with a higher ``eager_threshold``: two copies through the ring cost less than an offer and its
    release up to 32 KiB, about the same at 64 KiB (measured on Zen 3, 2.4 GHz). A ring has room for twice ``depth`` such messages
    a direction, 4 MiB by default; a slot's memory comes when it is first used."""

    eager_threshold: int = 32 << 10


class ShmTransport(OneSidedTransport):
    """Needs an arena opened with ``shared=True``. Connects processes of one host and user, or two ends in one process."""

    name = "shm"
    settings_class: ClassVar[type[Settings]] = ShmSettings

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        options.settings(self.name, self.settings_class)  # a wrong setting is the likelier mistake
        if arena.fd is None:
            raise ConfigError("transport shm needs an arena that can be shared: Arena(nbytes, shared=True)")
        super().__init__(options, arena, tracer)
        self._arena_key = secrets.randbits(32)
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, float] = {}  # connected, have not said hello; the progress thread's

    @classmethod
    def probe(cls) -> Availability:
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return Availability(False, "shared memory is handed over as memfds, which only Linux has")
        if platform.machine() != "x86_64":
            return Availability(
                False,
                f"the order of stores that the ring relies on was proven for x86_64 only, this is {platform.machine()}; "
                f"use grpc",
            )
        return Availability(True, "Linux on x86_64: memory is shared by memfd")

    def reaches(self, address: bytes) -> bool:
        return address.startswith(_PREFIX + _host())

    def _listen(self) -> bytes:
        name = b"verbflow-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(b"\0" + name)
        listener.listen(128)
        self._listener = listener
        self.progress.watch(listener.fileno(), self._welcome_strangers)
        return _PREFIX + _host() + b":" + name

    def _stop_listening(self) -> None:
        # Not closed yet, and no stranger dismissed: the progress thread may be about to accept one.
        if self._listener is not None:
            self.progress.unwatch(self._listener.fileno())
            self._listener.shutdown(socket.SHUT_RDWR)

    def _release_resources(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for stranger in self._strangers:
            stranger.close()

    def _export(self, array: np.ndarray) -> Region:
        if not array.nbytes:
            return NO_REGION
        offset = self.arena.offset_of(array)
        if offset is None:
            raise ValueError(f"a slot of {array.nbytes} bytes does not lie in the arena")
        return Region(offset, self._arena_key, array.nbytes)

    def _dial(self, address: bytes, peer: str, deadline: Deadline) -> Link:
        if not self.reaches(address):
            raise TransportError(f"{peer} at {address!r} is not on this host (or in another network namespace)")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        receiver, doorbell, ours = self._prepare()
        try:
            sock.settimeout(max(deadline.remaining(), 1e-6))
            sock.connect(b"\0" + address.rpartition(b":")[2])
            hello.send(sock, hello.HELLO, ours)
            sock.settimeout(max(deadline.remaining(), 1e-6))
            theirs = hello.receive(sock, hello.WELCOME, "", peer)
            if theirs is None:
                raise PeerLostError(f"{peer} hung up during the handshake")
        except VerbflowError as error:
            self._undo(sock, receiver, doorbell)
            raise error
        except TimeoutError as error:
            self._undo(sock, receiver, doorbell)
            raise deadline.error(f"connect to {peer} over shm") from error
        except OSError as error:
            self._undo(sock, receiver, doorbell)
            raise PeerLostError(f"cannot connect to {peer} over shm: {error}") from error
        return ShmLink(peer, sock, receiver, doorbell, self.arena, self._arena_key, theirs)

    def _prepare(self) -> tuple[Receiver, int, Hello]:
        """Our half of a connection: the ring that the peer writes to, the bell that it rings, and what to tell it."""
        if self.arena.fd is None:
            raise TransportError("the arena is closed")
        settings = self.settings
        slots = 1 << (settings.depth + _SPARE_SLOTS - 1).bit_length()
        payload = settings.eager_threshold + messages.EAGER_BYTES + messages.MAX_SPEC_BYTES
        stride = max(2048, -(-payload // 64) * 64)
        receiver = Receiver(slots, stride)
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        used = self.arena.peak_bytes
        ours = Hello(
            slots, stride, settings.depth, self.arena.nbytes, self._arena_key, used, self.options.token,
            self.options.task, (receiver.fd, doorbell, self.arena.fd),
        )  # fmt: skip
        return receiver, doorbell, ours

    def _undo(self, sock: socket.socket, receiver: Receiver, doorbell: int) -> None:
        sock.close()
        receiver.close()
        os.close(doorbell)

    # On the progress thread

    def _welcome_strangers(self) -> None:
        assert self._listener is not None
        now = time.monotonic()
        for stranger, since in list(self._strangers.items()):
            if now - since > _HANDSHAKE_S or len(self._strangers) >= _MAX_STRANGERS:
                self._dismiss(stranger)
        try:
            stranger, _ = self._listener.accept()
        except OSError:
            return
        stranger.setblocking(False)
        self._strangers[stranger] = now
        self.progress.watch(stranger.fileno(), lambda: self._greet(stranger))

    def _dismiss(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self.progress.unwatch(stranger.fileno())
        stranger.close()

    def _greet(self, stranger: socket.socket) -> None:
        try:
            theirs = hello.receive(stranger, hello.HELLO, self.options.token, "a peer")
        except BlockingIOError:
            return
        except (VerbflowError, OSError) as error:
            hello.refuse(stranger, error)
            self._dismiss(stranger)
            return
        if theirs is None:
            self._dismiss(stranger)
            return
        del self._strangers[stranger]
        self.progress.unwatch(stranger.fileno())
        pid, _ = hello.credentials(stranger)
        try:
            receiver, doorbell, ours = self._prepare()
        except (VerbflowError, OSError) as error:
            hello.refuse(stranger, error)
            stranger.close()
            theirs.close()
            return
        try:
            link = ShmLink(
                theirs.task or f"process {pid}", stranger, receiver, doorbell, self.arena, self._arena_key, theirs
            )
        except (VerbflowError, OSError, ValueError):
            return  # it has closed everything; the peer sees the end of the connection
        try:
            hello.send(stranger, hello.WELCOME, ours)
        except OSError:
            link.close()
            return
        self.accepted(link, link.peer)


def _host() -> bytes:
    """Names this boot of this host and this network namespace: abstract sockets reach no further."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}".encode()
    return b"unknown"
