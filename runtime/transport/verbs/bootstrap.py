"""Bootstrap: how two ends find each other over TCP before they have a queue pair.

::

    connecting end                          listening end
    HELLO {task, queue pair, proof}    ->   (after) CHALLENGE {random bytes}
    <- WELCOME {queue pair} or ERROR {text}
    WELCOME                            ->   both are ready

The proof is a keyed hash of the challenge, so the run's token never crosses the network. Messages are ``runtime.wire``
headers, which carry the protocol version. The connection stays open: see ``VerbsLink.control``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from dataclasses import dataclass

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import ConfigError, CorruptMessageError, PeerLostError, TransportError, UnauthenticatedError
from runtime.transport.verbs.qp import EndPoint
from runtime.wire import Kind

_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_MAX_TASK_BYTES = 512
_SIZES = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Address:
    """A listener's address: where it accepts, and on which kind of fabric, subnet and machine its device is."""

    host: str
    port: int
    link_layer: str
    gid: str
    machine: str
    isolated: bool

    def encode(self) -> bytes:
        return json.dumps([1, self.host, self.port, self.link_layer, self.gid, self.machine, self.isolated]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """ConfigError if the bytes are no address of this transport."""
        try:
            version, host, port, link_layer, gid, machine, isolated = json.loads(data)
            if version != 1 or not 0 < port < 1 << 16 or len(bytes.fromhex(gid)) != 16:
                raise ValueError("fields out of range")
            return cls(str(host), int(port), str(link_layer), str(gid), str(machine), bool(isolated))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{data[:80]!r} is no address of a verbs listener: {error}") from error


def machine_id() -> str:
    """Names this machine until it boots again."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def ask(control: socket.socket, described: bytes, *, token: str, task: str, peer: str, deadline: Deadline) -> bytes:
    """The connecting end's part, up to the peer's queue pair. Raises what ``Transport.connect`` raises."""
    header, challenge = receive(control, peer, deadline)
    if header.kind is not Kind.HELLO or len(challenge) != _CHALLENGE_BYTES:
        raise CorruptMessageError(f"{peer} begins with {header.kind.name}, not with a challenge")
    name = task.encode()[:_MAX_TASK_BYTES]
    extra = _proof(token, challenge) + _SIZES.pack(len(name)) + name + described
    send(control, Kind.HELLO, extra, peer, deadline)
    header, answer = receive(control, peer, deadline)
    if header.kind is not Kind.WELCOME:
        raise CorruptMessageError(f"{peer} answers {header.kind.name} to a HELLO")
    return answer


def answer(control: socket.socket, *, token: str, deadline: Deadline) -> tuple[str, bytes]:
    """The listening end's part: (task of the peer, its queue pair) of a peer that has shown the token."""
    peer = "a connecting peer"
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    send(control, Kind.HELLO, challenge, peer, deadline)
    header, extra = receive(control, peer, deadline)
    if header.kind is not Kind.HELLO or len(extra) < _PROOF_BYTES + _SIZES.size:
        raise CorruptMessageError(f"{peer} begins with {header.kind.name} of {len(extra)} bytes")
    if not hmac.compare_digest(extra[:_PROOF_BYTES], _proof(token, challenge)):
        raise UnauthenticatedError("the connecting peer does not know this run's token")
    (size,) = _SIZES.unpack_from(extra, _PROOF_BYTES)
    start = _PROOF_BYTES + _SIZES.size
    if size > _MAX_TASK_BYTES or len(extra) != start + size + EndPoint.NBYTES:
        raise CorruptMessageError(f"HELLO of {len(extra)} bytes announces a task name of {size}")
    task = extra[start : start + size].decode(errors="replace")
    return task or "an unnamed peer", extra[start + size :]


def send(control: socket.socket, kind: Kind, extra: bytes, peer: str, deadline: Deadline) -> None:
    """Send one message whole."""
    control.settimeout(max(deadline.remaining(), 1e-3))
    try:
        control.sendall(wire.encode(kind, extra=len(extra)) + extra)
    except TimeoutError as error:
        raise deadline.error(f"connecting with {peer}") from error
    except OSError as error:
        raise PeerLostError(f"connecting with {peer}: the control connection broke ({error.strerror})") from error


def receive(control: socket.socket, peer: str, deadline: Deadline) -> tuple[wire.Header, bytes]:
    """Receive one message; an ERROR is raised as the peer's error."""
    # The header says how long the message is, but is decoded only whole: its check wants all extra bytes at hand.
    head = _exactly(control, wire.HEADER_BYTES, peer, deadline)
    extra_size = int.from_bytes(head[12:16], "little")
    if head[:4] != wire.MAGIC or extra_size > wire.MAX_EXTRA_BYTES:
        raise CorruptMessageError(f"{peer} speaks something else: {head[:16]!r}")
    message = head + _exactly(control, extra_size, peer, deadline)
    header = wire.decode(message)
    if header.kind is Kind.ERROR:
        raise wire.error_from_text(wire.extra_text(message, header), peer)
    return header, wire.extra_bytes(message, header)


def refuse(control: socket.socket, error: BaseException) -> None:
    """Tell the peer why it is refused, if it still listens."""
    try:
        send(control, Kind.ERROR, wire.error_text(error), "the refused peer", Deadline.after(1.0))
    except TransportError:
        return


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.new(token.encode(), b"verbflow verbs" + challenge, hashlib.sha256).digest()


def _exactly(control: socket.socket, size: int, peer: str, deadline: Deadline) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        control.settimeout(max(deadline.remaining(), 1e-3))
        try:
            piece = control.recv(size - len(pieces))
        except TimeoutError as error:
            raise deadline.error(f"connecting with {peer}") from error
        except OSError as error:
            raise PeerLostError(f"connecting with {peer}: the control connection broke ({error.strerror})") from error
        if not piece:
            raise PeerLostError(f"{peer} closed the connection while it was being set up")
        pieces += piece
    return bytes(pieces)
