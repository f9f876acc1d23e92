"""Hello: what two processes tell each other over a unix socket before memory connects them.

SOCK_SEQPACKET keeps each message whole, with its descriptors. The connecting end sends HELLO, the listening end answers
WELCOME or REFUSED; both memory messages carry three descriptors: the sender's ring, its doorbell, its arena. Afterwards the
socket carries only AREA messages (``ShmLink.allocate``) and, by its end, the news that a process is gone.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass

from runtime import errors, wire
from runtime.errors import CorruptMessageError, ProtocolMismatchError, TransportError, UnauthenticatedError

_HEAD = struct.Struct("<4sBB")  # magic, protocol version, kind: these three never change
_MAGIC = b"VBSH"
_BODY = struct.Struct("<IIIQQQHH")  # slots, stride, depth; arena bytes, key, used; token bytes, task bytes
HELLO, WELCOME, REFUSED, AREA, AREA_GONE = 1, 2, 3, 4, 5
MAX_BYTES = 16 << 10
_FDS = 3
_AREA = struct.Struct("<QQ")  # key, bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """One end: its ring's geometry, its arena, its token and name. ``fds`` are ring, doorbell, arena; whoever received
    them owns them."""

    slots: int
    stride: int
    depth: int
    arena_bytes: int
    arena_key: int
    arena_used: int
    token: str
    task: str
    fds: tuple[int, int, int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def send(sock: socket.socket, kind: int, hello: Hello) -> None:
    """Send HELLO or WELCOME."""
    token, task = hello.token.encode(), hello.task.encode()
    body = _BODY.pack(
        hello.slots, hello.stride, hello.depth, hello.arena_bytes, hello.arena_key, hello.arena_used,
        len(token), len(task),
    )  # fmt: skip
    message = _HEAD.pack(_MAGIC, wire.PROTOCOL_VERSION, kind) + body + token + task
    if len(message) > MAX_BYTES:
        raise TransportError(f"token and task name of {len(token) + len(task)} bytes are too long")
    socket.send_fds(sock, [message], list(hello.fds))


def refuse(sock: socket.socket, error: BaseException) -> None:
    """Send REFUSED with the reason; the peer raises it."""
    with contextlib.suppress(OSError):
        sock.send(_HEAD.pack(_MAGIC, wire.PROTOCOL_VERSION, REFUSED) + wire.error_text(error))


def receive(sock: socket.socket, expected: int, token: str, peer: str) -> Hello | None:
    """The peer's HELLO or WELCOME; None if it hung up.

    Raises what the peer refused with, ProtocolMismatchError, UnauthenticatedError (HELLO only) or CorruptMessageError;
    BlockingIOError or TimeoutError as the socket does. No descriptor is left over then.
    """
    message, fds = receive_fds(sock)
    if not message:
        return None
    try:
        hello = _decode(message, fds, expected, peer)
        # The listening end proves nothing: its address came over the control plane, and the kernel vouches for the user.
        if expected == HELLO and not hmac.compare_digest(hello.token.encode(), token.encode()):
            raise UnauthenticatedError(f"{hello.task or 'a peer'} did not show this run's token")
        if credentials(sock)[1] != os.getuid():
            raise UnauthenticatedError(f"{hello.task or 'a peer'} belongs to user {credentials(sock)[1]}")
        return hello
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def receive_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors (close-on-exec); empty at the end of the connection."""
    space = socket.CMSG_SPACE(_FDS * 4)
    message, ancillary, flags, _ = sock.recvmsg(MAX_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise CorruptMessageError("a handshake message that is too long")
    return message, list(fds)


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def encode_area(kind: int, key: int, nbytes: int) -> bytes:
    """AREA (with the memory's descriptor) or AREA_GONE."""
    return _HEAD.pack(_MAGIC, wire.PROTOCOL_VERSION, kind) + _AREA.pack(key, nbytes)


def decode_area(message: bytes) -> tuple[int, int, int]:
    """(kind, key, bytes)"""
    if len(message) != _HEAD.size + _AREA.size:
        raise CorruptMessageError(f"{len(message)} bytes on a connected socket")
    magic, version, kind = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != wire.PROTOCOL_VERSION or kind not in (AREA, AREA_GONE):
        raise CorruptMessageError(f"message {magic!r} of kind {kind} on a connected socket")
    key, nbytes = _AREA.unpack_from(message, _HEAD.size)
    return kind, key, nbytes


def _decode(message: bytes, fds: list[int], expected: int, peer: str) -> Hello:
    if len(message) < _HEAD.size or message[:4] != _MAGIC:
        raise CorruptMessageError(f"{message[:16]!r} does not begin a handshake")
    _, version, kind = _HEAD.unpack_from(message)
    if kind == REFUSED:
        raise _refusal(message[_HEAD.size :].decode(errors="replace"), peer)
    if version != wire.PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the peer speaks protocol version {version}, this end version {wire.PROTOCOL_VERSION}; "
            f"run one release everywhere"
        )
    body = message[_HEAD.size :]
    if kind != expected or len(body) < _BODY.size or len(fds) != _FDS:
        raise CorruptMessageError(f"handshake of kind {kind} with {len(body)} bytes and {len(fds)} descriptors")
    *numbers, token_size, task_size = _BODY.unpack_from(body)
    if len(body) != _BODY.size + token_size + task_size:
        raise CorruptMessageError(f"handshake of {len(body)} bytes, {token_size} of token and {task_size} of name")
    slots, stride, depth, arena_bytes, arena_key, arena_used = numbers
    if not 16 <= depth <= slots <= 1 << 16 or slots & (slots - 1) or stride % 64 or not 2048 <= stride <= 2 << 20:
        raise ProtocolMismatchError(f"the peer's ring of {slots} slots of {stride} bytes for {depth} messages")
    token_end = _BODY.size + token_size
    return Hello(
        slots, stride, depth, arena_bytes, arena_key, arena_used,
        body[_BODY.size : token_end].decode(errors="replace"), body[token_end:].decode(errors="replace"),
        (fds[0], fds[1], fds[2]),
    )  # fmt: skip


def _refusal(text: str, peer: str) -> errors.VerbflowError:
    return wire.error_from_text(text, peer)
