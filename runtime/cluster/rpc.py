"""How the control plane speaks gRPC: credentials, limits, and errors that keep their class across processes.

Every call carries the run's token and the protocol version in its metadata. Both are checked before a byte of the message
is read, so a stranger cannot make a task allocate memory.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Connections that end are ours to report, with the peer's name; gRPC's own lines would go to stderr beside them. It reads
# this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from runtime import errors
from runtime.errors import ConfigError, VerbflowError

_LOG = logging.getLogger("verbflow.cluster")

CONTROL_VERSION = 1
# Feeds and fetches of a master outside the cluster are the only large messages; protobuf itself ends at 2 GiB.
MAX_MESSAGE_BYTES = 1 << 30
_TOKEN, _VERSION, _ERROR = "verbflow-token", "verbflow-version", "verbflow-error"
# Metadata has its own limit (8 KiB by default in gRPC), and a reason is in it.
_MAX_DETAIL = 3000

_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (errors.UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.ProtocolMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnavailableError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnknownGraphError, grpc.StatusCode.ABORTED),
    (errors.StepAbortedError, grpc.StatusCode.ABORTED),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ArenaFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.TransportError, grpc.StatusCode.UNAVAILABLE),
    (errors.GraphError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (VerbflowError, grpc.StatusCode.ABORTED),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. A task shows ``certificate`` and proves it by ``key``; whoever calls checks it against ``authority``, and
    is asked for a certificate of the same authority in turn."""

    certificate: str
    key: str
    authority: str

    def _read(self) -> tuple[bytes, bytes, bytes]:
        contents = []
        for path in (self.certificate, self.key, self.authority):
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise ConfigError(f"TLS file {path}: {error.strerror}") from error
        return contents[0], contents[1], contents[2]

    def server_credentials(self) -> grpc.ServerCredentials:
        certificate, key, authority = self._read()
        return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        certificate, key, authority = self._read()
        return grpc.ssl_channel_credentials(authority, key, certificate)


def channel_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A restarted task must be found again within a second, not after gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # By default two servers share a port in silence.
        ("grpc.so_reuseport", 0),
    ]


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel to a control plane; connects at the first call."""
    if tls is None:
        return grpc.insecure_channel(address, channel_options())
    return grpc.secure_channel(address, tls.channel_credentials(), channel_options())


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that every call carries. ConfigError if the token has characters that a header cannot carry."""
    if not token.isascii() or not (token.isprintable() or not token):
        raise ConfigError("the run's token must be printable ASCII")
    return ((_TOKEN, token), (_VERSION, str(CONTROL_VERSION)))


class Gate(grpc.ServerInterceptor):
    """Refuses calls without this run's token or of another protocol version, unread."""

    def __init__(self, token: str, task: str) -> None:
        self._token = token.encode()
        self._task = task

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        shown, version = b"", ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == _TOKEN:
                shown = value.encode() if isinstance(value, str) else value
            elif key == _VERSION:
                version = value
        if not hmac.compare_digest(shown, self._token):
            what = "a wrong token" if shown else "no token"
            return _refusal(errors.UnauthenticatedError(f"{self._task} was shown {what} of this run"))
        if version != str(CONTROL_VERSION):
            return _refusal(
                errors.ProtocolMismatchError(
                    f"{self._task} speaks control protocol {CONTROL_VERSION}, the caller {version or 'none'}; "
                    f"start all tasks from the same version"
                )
            )
        return continuation(handler_call_details)


def _refusal(error: VerbflowError) -> grpc.RpcMethodHandler:
    # As a stream handler nothing is read from the call; as a unary one gRPC would first receive the whole message.
    def refuse(_: Any, context: grpc.ServicerContext) -> Any:
        abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def described(error: BaseException) -> tuple[str, str]:
    """(class name, text) of an error for another process, to be raised there by ``error_named``."""
    if isinstance(error, VerbflowError):
        return type(error).__name__, str(error)[:_MAX_DETAIL]
    _LOG.error("unexpected error in a control call", exc_info=error)
    return VerbflowError.__name__, f"{type(error).__name__}: {error}"[:_MAX_DETAIL]


def abort(context: grpc.ServicerContext, error: BaseException) -> None:
    """End a call with ``error`` so that the caller can raise the same class again. Always raises."""
    code = next((code for cls, code in _CODES if isinstance(error, cls)), grpc.StatusCode.INTERNAL)
    name, text = described(error)
    context.set_trailing_metadata(((_ERROR, name),))
    context.abort(code, text)


def error_named(name: str, text: str) -> VerbflowError:
    """The error of that class name in ``runtime.errors``; VerbflowError if there is none."""
    cls = getattr(errors, name, VerbflowError)
    if not (isinstance(cls, type) and issubclass(cls, VerbflowError)):
        cls = VerbflowError
    return cls(text)


def translate(error: grpc.RpcError, what: str, task: str, address: str, waited_s: float) -> VerbflowError:
    """A failed call as an error of ours; to be raised ``from error``. ``what`` reads like "RunGraph"."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    detail = (error.details() if isinstance(error, grpc.Call) else str(error)) or "no detail"
    for key, value in (error.trailing_metadata() if isinstance(error, grpc.Call) else None) or ():
        if key == _ERROR:
            return error_named(str(value), detail)
    where = f"{what} at {task} ({address})"
    if code == grpc.StatusCode.UNAVAILABLE:
        return errors.PeerLostError(f"{where}: lost after {waited_s:.1f} s: {detail}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineError(f"{where}: no answer for {waited_s:.1f} s")
    if code == grpc.StatusCode.CANCELLED:
        return errors.StepAbortedError(f"{where}: cancelled after {waited_s:.1f} s")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolMismatchError(f"{where}: {detail}; does a control plane of Verbflow listen there?")
    return errors.TransportError(f"{where}: {code.name.lower()}: {detail}")
