"""Palette: one colour a transport and a phase, the same in every picture; fit for colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

from pathlib import Path

STYLE = str(Path(__file__).with_name("style.mplstyle"))

TRANSPORTS = {
    "verbs": "#D55E00",
    "shm": "#009E73",
    "grpc": "#0072B2",
    "grpc_proto": "#56B4E9",
    "inproc": "#8C8C8C",
    "null": "#BBBBBB",
    "perftest": "#F0A060",
    "tensorflow": "#CC79A7",
    "gloo": "#E69F00",
    "mpi4py": "#6A51A3",
}
NAMES = {
    "verbs": "RDMA (verbs)",
    "grpc": "TCP (gRPC, bytes)",
    "grpc_proto": "TCP (gRPC, protobuf)",
    "shm": "shared memory",
}
PHASES = {
    "compute": "#BDBDBD",
    "apply": "#969696",
    "serialise": "#CC79A7",
    "copy": "#E69F00",
    "register": "#F0E442",
    "request": "#56B4E9",
    "wire": "#0072B2",
    "complete": "#009E73",
    "queue": "#8172B3",
    "other": "#E8E8E8",
}
_SPARE = ("#A6761D", "#666666", "#1B9E77", "#7570B3", "#E7298A")


def colour(transport: str) -> str:
    """The transport's colour; one it does not know gets a spare one, always the same."""
    return TRANSPORTS.get(transport) or _SPARE[sum(transport.encode()) % len(_SPARE)]


def label(transport: str) -> str:
    """How a transport is called in legends."""
    return NAMES.get(transport, transport)
