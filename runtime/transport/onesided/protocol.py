"""How one fetch moves its bytes: the choice of the protocol, and the memory that takes part in a transfer.

=========  =================================================================  ================================
protocol   steady state                                                       needs
=========  =================================================================  ================================
eager      FETCH -> EAGER with the bytes, copied through the ring             nothing; one copy more at each end
read       FETCH -> OFFER {addr, key}, one READ, RELEASE                      source exported
write      FETCH {addr, key, shape} -> one WRITE_WITH_IMM                     destination exported, shape known
borrow     FETCH -> OFFER, a view of the peer's memory, RELEASE               shared memory
paper      see ``paper.py``
=========  =================================================================  ================================

``auto`` is eager up to the threshold and then what the link prefers. ``write`` without a destination takes the shape from
the metadata cache; on a miss the sender answers METADATA, the receiver allocates and asks again.

Which memory a peer may name: only the arena (and, on links that register, buffers acquired for one transfer), under
keys that are random or the adapter's; a link checks every remote address against its bounds before it is used, and
the protocol matches every answer with a fetch that is pending, its shape with the shape asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from runtime.errors import ShapeError
from runtime.tensor import TensorSpec, byte_view
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import Link
from runtime.transport.onesided.messages import Mode
from runtime.transport.onesided.settings import Settings

NO_EAGER = 0
ALWAYS_EAGER = (1 << 32) - 1


def choose(settings: Settings, link: Link) -> tuple[Mode, int]:
    """(mode of a fetch, bytes up to which the sender answers eagerly all the same)"""
    protocol = settings.protocol
    if protocol == "auto":
        return Mode.READ if link.prefers == "read" else Mode.WRITE, settings.eager_threshold
    if protocol == "eager":
        return Mode.EAGER, ALWAYS_EAGER
    return Mode[protocol.upper()], NO_EAGER


def family(key: str) -> str:
    """What the metadata cache remembers a key by: all before its last semicolon, because a rendezvous key ends with the
    step, which says nothing about the shape. The whole key where there is no semicolon."""
    return key.rpartition(";")[0] or key


@functools.lru_cache(maxsize=8192)
def _spec_bytes(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    spec = TensorSpec(shape, dtype)
    if spec.dtype != dtype:  # the bytes travel as they lie
        raise ShapeError(f"{spec} is not in this machine's byte order; convert it, or give a destination that is")
    return messages.encode_spec(spec)


def spec_bytes(array: np.ndarray) -> bytes:
    """The array's shape and dtype as they travel; ShapeError if it cannot. Cached, because TensorSpec checks what it is made of."""
    return _spec_bytes(array.shape, array.dtype)


def flat(array: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array as a flat uint8 view."""
    return byte_view(array)


def flat_memory(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous, not empty array as a memoryview: cheaper than numpy for small copies."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # complex: memoryview knows no such format
        return byte_view(array).data


class Release:
    """Something to give back once, whoever comes first; a callback without arguments."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _: object = None) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()
