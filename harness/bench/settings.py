"""A transport's own settings as parameters of benchmarks: the same names, meanings and defaults wherever they are taken."""

from __future__ import annotations

from typing import Any

from harness.bench.base import parameter

_NAMES = ("protocol", "eager_threshold", "chunk_bytes", "binding")
# Their defaults are the transport's, which are not "auto" or 0.
_DEFAULTS = {"spin_us": 60, "spin_max_us": 1000, "message_reuse": True, "tensor_reuse": True, "pool": True}


def protocol_parameter() -> Any:
    return parameter(
        "auto",
        "how a one-sided transport moves the bytes of a fetch",
        unit="text",
        choices=("auto", "eager", "read", "write", "paper_read", "paper_write"),
    )


def eager_threshold_parameter() -> Any:
    return parameter(0, "below it payloads travel in the message; 0: the default", unit="bytes")


def chunk_bytes_parameter() -> Any:
    return parameter(0, "largest piece of one operation; 0: the default", unit="bytes")


def binding_parameter() -> Any:
    return parameter("auto", "RDMA binding", unit="text", choices=("auto", "pyverbs", "ibverbs"))


def spin_us_parameter() -> Any:
    return parameter(_DEFAULTS["spin_us"], "how long a waiting thread polls at least before it sleeps", at_most=10_000)


def spin_max_us_parameter() -> Any:
    meaning = "how long it polls at most, where that has been learnt to pay; below spin_us: exactly spin_us"
    return parameter(_DEFAULTS["spin_max_us"], meaning, at_most=10_000)


def transport_params(p: Any) -> dict[str, Any]:
    """The settings among a benchmark's parameters, for the transport; those left at their default are not passed on."""
    params = {name: getattr(p, name) for name in _NAMES}
    chosen = {name: value for name, value in params.items() if value not in ("auto", 0)}
    for name, default in _DEFAULTS.items():
        value = getattr(p, name, default)
        if value != default:
            chosen[name] = value
    return chosen
