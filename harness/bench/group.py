"""Group: the ranks of one trial, which agree on things before and after the timed iterations, never inside them.

A star around rank 0 over one socket a rank: a unix socket where all ranks are on one host (it also crosses network
namespaces), TCP otherwise. Where rank 0 listens is written to a file in the trial's folder that all ranks see.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, UnauthenticatedError, VerbflowError

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 1 << 28


class GroupError(VerbflowError):
    """Another rank of the trial failed; the message is its error."""


class Group:
    """One rank's membership. One thread. Every operation is collective: all ranks call the same ones in the same order."""

    def __init__(
        self, rank: int, size: int, folder: Path, token: str, deadline: Deadline, host: str = "", port: int = 0
    ) -> None:
        """Join; returns when all ranks have. ``host`` is where rank 0 listens on TCP; empty means a unix socket on this host.
        With a ``port`` the ranks need no common folder; without one rank 0 writes into it where it listens."""
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not belong to a group of {size}")
        self.rank = rank
        self.size = size
        self._deadline = deadline
        self._peers: dict[int, socket.socket] = {}
        self._failed = False
        if size == 1:
            return
        try:
            if rank == 0:
                self._gather_members(folder, token, host, port)
            else:
                self._join(folder, token, host, port)
        except TimeoutError as error:
            missing = sorted(set(range(1, size)) - set(self._peers)) if rank == 0 else [0]
            self.close()
            names = ", ".join(map(str, missing))
            raise PeerLostError(
                f"rank {rank} waited {deadline.elapsed():.1f} s in vain for rank {names} to join"
            ) from error
        except BaseException:
            self.close()
            raise

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank. Raises GroupError if a rank failed, PeerLostError if it is gone."""
        if self.size == 1:
            return [value]
        if self.rank:
            with contextlib.suppress(PeerLostError):  # it may have said why before it left: that is read next
                self._send(0, {"value": value})
            reply = self._receive(0)
            if "error" in reply:
                raise GroupError(reply["error"])
            return reply["value"]
        values = [value] + [None] * (self.size - 1)
        errors = []
        for rank in range(1, self.size):
            try:
                message = self._receive(rank)
            except PeerLostError as error:
                message = {"error": str(error)}
            if "error" in message:
                errors.append(f"rank {rank}: {message['error']}")
            values[rank] = message.get("value")
        answer: dict[str, Any] = {"error": "; ".join(errors)} if errors else {"value": values}
        for rank in range(1, self.size):
            try:
                self._send(rank, answer)
            except PeerLostError:  # it is in ``errors``, or its next exchange fails
                continue
        if errors:
            self._failed = True
            raise GroupError(answer["error"])
        return values

    def exchange_bytes(self, value: bytes) -> list[bytes]:
        """Like ``exchange``, for opaque bytes such as transport addresses."""
        return [bytes.fromhex(text) for text in self.exchange(value.hex())]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Rank ``root``'s value, at every rank."""
        return self.exchange(value)[root]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.exchange(None)

    def abort(self, reason: str) -> None:
        """Tell the others that this rank failed: whatever they wait for ends with GroupError. Never raises."""
        if self._failed:
            return
        self._failed = True
        for rank in list(self._peers):
            try:
                self._send(rank, {"error": reason})
            except (OSError, VerbflowError):
                continue

    def close(self) -> None:
        """Leave. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _gather_members(self, folder: Path, token: str, host: str, port: int) -> None:
        family = socket.AF_INET if host else socket.AF_UNIX
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port) if host else str(folder / "group"))
            listener.listen(self.size)
            address = list(listener.getsockname()) if host else listener.getsockname()
            temporary = folder / ".group.json"
            temporary.write_text(json.dumps(address))
            os.replace(temporary, folder / "group.json")
            while len(self._peers) < self.size - 1:
                listener.settimeout(max(0.001, self._deadline.remaining()))
                connection, _ = listener.accept()
                self._tune(connection)
                try:
                    hello = self._receive_from(connection, "a joining rank")
                    rank = int(hello.get("rank", -1))
                except (PeerLostError, ValueError, TypeError, AttributeError):  # no rank of ours speaks like that
                    connection.close()
                    continue
                if not hmac.compare_digest(str(hello.get("token", "")), token) or rank not in range(1, self.size):
                    connection.close()
                    continue
                self._peers[rank] = connection
        for rank in self._peers:
            self._send(rank, {"value": "joined"})

    def _join(self, folder: Path, token: str, host: str, port: int) -> None:
        published = folder / "group.json"
        while True:
            if self._deadline.expired():
                raise TimeoutError
            address = (host, port) if port else json.loads(published.read_text()) if published.exists() else None
            if address is None:
                time.sleep(0.002)
                continue
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(max(0.001, self._deadline.remaining()))
            try:
                connection.connect(address if isinstance(address, str) else tuple(address))
                break
            except ConnectionRefusedError:  # rank 0 is not that far yet
                connection.close()
                time.sleep(0.05)
            except OSError:
                connection.close()
                raise
        self._tune(connection)
        self._peers[0] = connection
        self._send(0, {"rank": self.rank, "token": token})
        if "value" not in self._receive(0):
            raise UnauthenticatedError("rank 0 refused this rank")

    def _tune(self, connection: socket.socket) -> None:
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        peer = self._peers.get(rank)
        if peer is None:
            raise PeerLostError(f"rank {rank} left the group")
        try:
            peer.settimeout(max(0.001, self._deadline.remaining()))
            peer.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise PeerLostError(f"rank {rank} is gone ({error})") from error

    def _receive(self, rank: int) -> dict[str, Any]:
        peer = self._peers.get(rank)
        if peer is None:
            raise PeerLostError(f"rank {rank} left the group")
        return self._receive_from(peer, f"rank {rank}")

    def _receive_from(self, connection: socket.socket, who: str) -> dict[str, Any]:
        try:
            (length,) = _LENGTH.unpack(self._exactly(connection, _LENGTH.size))
            if length > _MAX_FRAME:
                raise PeerLostError(f"{who} sent a frame of {length} bytes, which is not this protocol")
            message: dict[str, Any] = json.loads(self._exactly(connection, length))
            return message
        except TimeoutError as error:
            raise PeerLostError(f"{who} did not answer within {self._deadline.elapsed():.1f} s") from error
        except (OSError, EOFError) as error:
            raise PeerLostError(f"{who} ended early ({error or 'end of stream'}); see its log") from error

    def _exactly(self, connection: socket.socket, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            connection.settimeout(max(0.001, self._deadline.remaining()))
            piece = connection.recv(count - len(content))
            if not piece:
                raise EOFError("end of stream")
            content += piece
        return bytes(content)
