"""A step of parameter-server training as a dataflow for ``simulate``: weights there, compute, gradients back.

Pure, as the simulation is: times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.simulation import Operation, Transfer


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's parameters (bytes) and its share of the step's compute (floating-point operations of a forward pass)."""

    name: str
    nbytes: int
    flops: float


def training_step(
    worker: str,
    servers: Sequence[str],
    layers: Sequence[Layer],
    forward_seconds: float,
    backward_seconds: float,
    apply_seconds_per_byte: float = 0.0,
    overlap: bool = True,
    sessions: bool = False,
    piece_bytes: int | None = None,
) -> list[Operation | Transfer]:
    """One worker's step of parameter-server training as items for ``simulate``.

    Weights are pulled in the order of the layers, a layer's forward pass starts when its weights are there, gradients leave
    as soon as their layer's backward pass has made them, and the server applies each on arrival. A layer's compute is its
    share of FLOPs. Servers take the layers' tensors greedily, largest first, each to the least loaded. With ``overlap``
    False all weights come first, then all compute, then all gradients: the lower end of what a runtime does.

    ``sessions``: a server works for each worker on a thread of its own. ``piece_bytes``: transfers go in pieces of at most so
    many bytes, so that sender, wire and receiver work on one tensor at the same time.
    """
    home = _greedy(servers, [layer.nbytes for layer in layers])
    flops = sum(layer.flops for layer in layers) or 1.0
    step: list[Operation | Transfer] = []

    def thread(server: str) -> str:
        return f"{server}/{worker}" if sessions else server

    def move(src: str, dst: str, nbytes: int, after: tuple[int, ...], sender: str) -> tuple[int, ...]:
        first = len(step)
        for begin in range(0, max(nbytes, 1), piece_bytes or max(nbytes, 1)):
            step.append(Transfer(src, dst, min(nbytes - begin, piece_bytes or nbytes), after, sender))
        return tuple(range(first, len(step)))

    pulls = [move(server, worker, layer.nbytes, (), thread(server)) for layer, server in zip(layers, home, strict=True)]
    before: tuple[int, ...] = () if overlap else tuple(index for pull in pulls for index in pull)
    for layer, pull in zip(layers, pulls, strict=True):
        step.append(Operation(worker, forward_seconds * layer.flops / flops, (*before, *pull) if overlap else before))
        before = (len(step) - 1,)
    gradients = []
    for layer, server in reversed(list(zip(layers, home, strict=True))):
        step.append(Operation(worker, backward_seconds * layer.flops / flops, before))
        before = (len(step) - 1,)
        gradients.append((server, layer.nbytes, before))
    for server, nbytes, ready in gradients:
        arrived = move(worker, server, nbytes, ready if overlap else before, worker)
        step.append(Operation(thread(server), apply_seconds_per_byte * nbytes, arrived))
    return step


def _greedy(servers: Sequence[str], sizes: Sequence[int]) -> list[str]:
    load = dict.fromkeys(servers, 0)
    home = [""] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        server = min(load, key=lambda name: load[name])
        home[index] = server
        load[server] += sizes[index]
    return home
