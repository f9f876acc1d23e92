"""What both gRPC transports share: settings, server and channels with the same options, how a channel ends, the gate that
checks token and version, and the one translation of gRPC's errors into ours."""

from __future__ import annotations

import hmac
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import (
    ChannelClosedError,
    ConfigError,
    PeerLostError,
    ProtocolMismatchError,
    TransportError,
    UnauthenticatedError,
    VerbflowError,
)
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Availability, Channel, Counters, Options, TensorSource, Transport
from runtime.transport.channels import OpenChannels
from runtime.transport.grpc import allocator
from runtime.transport.pending import Pending
from runtime.transport.watch import Watch

SERVICE = "verbflow.TensorService"
MAX_CHUNK_BYTES = 64 << 20
_MAX_REQUEST_BYTES = 64 << 10
_HELLO = "verbflow-hello-bin"
_TOKEN = "verbflow-token-bin"

Metadata = tuple[tuple[str, str | bytes], ...]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """chunk_bytes: longest piece of a tensor in one message; 1 MiB takes a tenth more processor time a byte, 16 MiB a fifth,
    because gRPC copies a message several times and should find it in cache. max_channels: peers served at once, two threads each.
    max_requests (grpc_proto): unanswered fetches served at once, a thread each. keepalive_s: a peer whose machine is
    silent is lost after twice this. allocator: ``tuned`` or ``default`` (see allocator.py). advertise: the host that peers
    connect to where it is not the bound address. tls_*: PEM files; own certificate and key, and the authority that peers'
    certificates are checked against."""

    chunk_bytes: int = 2 << 20
    max_channels: int = 64
    max_requests: int = 512
    keepalive_s: float = 10.0
    allocator: str = "tuned"
    advertise: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes = {self.chunk_bytes} is not between 1 KiB and {MAX_CHUNK_BYTES}")
        if self.max_channels < 1 or self.max_requests < 1 or self.keepalive_s <= 0:
            raise ConfigError("max_channels, max_requests and keepalive_s must be positive")
        if self.allocator not in ("tuned", "default"):
            raise ConfigError(f"allocator {self.allocator!r} is neither 'tuned' nor 'default'")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together")


def _common_options(settings: GrpcSettings) -> list[tuple[str, int]]:
    keepalive_ms = int(settings.keepalive_s * 1000)
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
        # A proxy from the environment would carry the traffic of a loopback address too.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def translate(error: BaseException, peer: str) -> VerbflowError:
    """A grpc.RpcError as ours; the caller raises it ``from`` the original."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = (error.details() if isinstance(error, grpc.Call) else None) or str(error) or type(error).__name__
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(f"{peer} refuses this run's token: {details}")
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return ProtocolMismatchError(f"{peer} refuses: {details}")
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return TransportError(f"{peer} refuses: {details}")
    return PeerLostError(f"{peer} is lost: {details}")


class _Gate(grpc.ServerInterceptor):
    """Refuses every call that does not show this run's token in this protocol version, before any handler sees it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        shown = dict(handler_call_details.invocation_metadata)
        if not hmac.compare_digest(shown.get(_TOKEN, b""), self._token):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "the token is not this run's")
        try:
            wire.decode(shown.get(_HELLO, b""))
        except ProtocolMismatchError as mismatch:
            return _refusal(grpc.StatusCode.FAILED_PRECONDITION, str(mismatch))
        except TransportError as corrupt:
            return _refusal(grpc.StatusCode.INVALID_ARGUMENT, str(corrupt))
        return continuation(handler_call_details)


def _refusal(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    def refuse(requests: object, context: grpc.ServicerContext) -> None:
        context.abort(code, text)

    # As a stream of requests, so that the refusal does not wait for the first of them.
    return grpc.stream_stream_rpc_method_handler(refuse)


class GrpcTransportBase(Transport):
    """Server and channels of a gRPC transport; subclasses give the handlers and the channels."""

    max_reply_bytes = -1

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        super().__init__(options, arena, tracer)
        self.settings = options.settings(self.name, GrpcSettings)
        self.allocator = allocator.tune() if self.settings.allocator == "tuned" else {}
        self.served = Counters()
        self.guard = threading.Lock()
        self.watch = Watch(f"{self.name}-watch", self._expire)
        self._server: grpc.Server | None = None
        self._pool: futures.ThreadPoolExecutor | None = None
        self.channels: OpenChannels[GrpcChannelBase[Any]] = OpenChannels()

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "gRPC over TCP is always available")

    @abstractmethod
    def handlers(self, source: TensorSource) -> dict[str, grpc.RpcMethodHandler]:
        """The service's methods."""

    @abstractmethod
    def threads(self) -> int:
        """Threads that the server may use, and calls that it serves at once."""

    @abstractmethod
    def channel(self, connection: grpc.Channel, peer: str) -> GrpcChannelBase[Any]:
        """A channel of this transport's kind, not connected yet."""

    def connect(self, address: bytes, *, peer: str, deadline: Deadline) -> Channel:
        channel = self.channel(self.dial(address), peer)
        self.channels.add(channel)
        try:
            channel.connect(deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def listen(self, source: TensorSource) -> bytes:
        if self._server is not None:
            raise TransportError("this transport listens already")
        self._pool = futures.ThreadPoolExecutor(self.threads(), thread_name_prefix=f"{self.name}-serve")
        server = grpc.server(
            self._pool,
            interceptors=[_Gate(self.options.token)],
            options=[
                *_common_options(self.settings),
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=self.threads(),
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self.handlers(source)),))
        host = f"[{self.options.bind}]" if ":" in self.options.bind else self.options.bind
        try:
            port = self._bind(server, f"{host}:0")
        except RuntimeError as error:
            raise TransportError(f"cannot listen at {host}: {error}") from error
        server.start()
        self._server = server
        wildcard = self.options.bind in ("0.0.0.0", "::")
        return f"{self.settings.advertise or (socket.gethostname() if wildcard else host)}:{port}".encode()

    def _bind(self, server: grpc.Server, address: str) -> int:
        if not self.settings.tls_cert:
            return server.add_insecure_port(address)
        identity = (Path(self.settings.tls_key).read_bytes(), Path(self.settings.tls_cert).read_bytes())
        authority = Path(self.settings.tls_ca).read_bytes() if self.settings.tls_ca else None
        credentials = grpc.ssl_server_credentials([identity], authority, require_client_auth=authority is not None)
        return server.add_secure_port(address, credentials)

    def dial(self, address: bytes) -> grpc.Channel:
        """A gRPC channel with a TCP connection of its own, not connected yet."""
        options: list[tuple[str, int]] = [
            *_common_options(self.settings),
            ("grpc.max_receive_message_length", self.max_reply_bytes),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        try:
            target = address.decode("ascii")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{address!r} is not an address of transport {self.name}") from error
        if not self.settings.tls_ca:
            return grpc.insecure_channel(target, options)
        own = self.settings.tls_cert
        credentials = grpc.ssl_channel_credentials(
            Path(self.settings.tls_ca).read_bytes(),
            Path(self.settings.tls_key).read_bytes() if own else None,
            Path(own).read_bytes() if own else None,
        )
        return grpc.secure_channel(target, credentials, options)

    def credentials(self) -> Metadata:
        """What every call shows to the peer's gate."""
        return ((_HELLO, wire.encode(wire.Kind.HELLO)), (_TOKEN, self.options.token.encode()))

    def totals(self) -> Counters:
        total = self.channels.totals()
        with self.guard:
            total.add(self.served)
        return total

    def close(self) -> None:
        self.channels.close()
        self.watch.close()
        if self._server is not None:
            self._server.stop(None).wait()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _expire(self, now_ns: int) -> int | None:
        moments = [moment for channel in self.channels if (moment := channel.expire(now_ns)) is not None]
        return min(moments, default=None)


class GrpcChannelBase(Channel, Generic[K]):
    """A connection to one peer and the fetches that wait for it, each under a key of the subclass's own. ``_guard`` is
    held by who changes ``_pending``, ``_broken`` (why the channel is of no use any more) or the counters."""

    def __init__(self, transport: GrpcTransportBase, connection: grpc.Channel, peer: str) -> None:
        self.peer = peer
        self.counters = Counters()
        self._transport = transport
        self._tracer = transport.tracer
        self._grpc = connection
        self._guard = threading.Lock()
        self._pending: dict[K, Pending] = {}
        self._broken: BaseException | None = None

    @abstractmethod
    def connect(self, deadline: Deadline) -> None:
        """Reach the peer; raises what ``Transport.connect`` promises."""

    def expire(self, now_ns: int) -> int | None:
        """Fail fetches past their deadline; when the next one comes, or None. On the watch's thread."""
        return None

    def close(self) -> None:
        self.abort(ChannelClosedError(f"the channel to {self.peer} was closed"))
        self._join()
        self._grpc.close()
        self._transport.channels.remove(self)

    def abort(self, reason: BaseException) -> None:
        with self._guard:
            if self._broken is not None:
                return
            self._broken = reason
            pending, self._pending = self._pending, {}
        for fetch in pending.values():
            fetch.fail(reason)
        self._stop(reason, list(pending))

    @abstractmethod
    def _stop(self, reason: BaseException, given_up: Sequence[K]) -> None:
        """End the calls to the peer, without waiting; ``given_up``: keys of the fetches that failed. Called once."""

    def _join(self) -> None:
        """Wait for what ``_stop`` ended."""
