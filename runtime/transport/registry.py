"""Transports by name. A transport's module is imported only when it is asked for, so that nobody pays for grpc or
pyverbs without using them."""

from __future__ import annotations

from importlib import import_module

from runtime.errors import ConfigError, UnavailableError
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Options, Transport

_CLASSES = {
    "inproc": "runtime.transport.inproc:InprocTransport",
    "null": "runtime.transport.null:NullTransport",
    "grpc": "runtime.transport.grpc.bytes:GrpcTransport",
    "grpc_proto": "runtime.transport.grpc.proto:GrpcProtoTransport",
    "shm": "runtime.transport.shm.transport:ShmTransport",
    "verbs": "runtime.transport.verbs.transport:VerbsTransport",
}


def known() -> list[str]:
    """Names that ``open_transport`` takes."""
    return list(_CLASSES)


def transport_class(name: str) -> type[Transport]:
    """The class of a transport; ConfigError lists the known names."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown transport {name!r}; known: {', '.join(_CLASSES)}")
    module, attribute = _CLASSES[name].split(":")
    cls: type[Transport] = getattr(import_module(module), attribute)
    return cls


def open_transport(name: str, options: Options, arena: Arena, tracer: Tracer | None = None) -> Transport:
    """Open a transport by name. UnavailableError says why it cannot run here; there is no silent fallback."""
    cls = transport_class(name)
    availability = cls.probe()
    if not availability.ok:
        raise UnavailableError(f"transport {name} cannot run here: {availability.reason}")
    return cls(options, arena, tracer)
