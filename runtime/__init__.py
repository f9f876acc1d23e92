"""Verbflow's runtime: a compact distributed dataflow runtime with exchangeable transports.

The public names below are imported when they are first used, so that ``python -m runtime.cluster`` can set thread counts before
numpy loads, and nobody pays for gRPC without using it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime import models
    from runtime.cluster.server import Server
    from runtime.cluster.session import Session
    from runtime.cluster.spec import ClusterSpec
    from runtime.graph.gradients import gradients
    from runtime.graph.graph import Graph
    from runtime.transport.registry import open_transport

_HOMES = {
    "ClusterSpec": "runtime.cluster.spec",
    "Graph": "runtime.graph.graph",
    "Server": "runtime.cluster.server",
    "Session": "runtime.cluster.session",
    "gradients": "runtime.graph.gradients",
    "open_transport": "runtime.transport.registry",
}
__all__ = ["ClusterSpec", "Graph", "Server", "Session", "gradients", "models", "open_transport"]


def __getattr__(name: str) -> Any:
    if name == "models":
        return import_module("runtime.models")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
