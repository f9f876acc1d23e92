"""Slots: the receiver's table of static edges, and the offer that tells a sender of them.

A slot is one destination array. It is written only after a credit that names its edge and generation, the first time too: a
sender binds the edge (showing the offer's nonce) and gets the credit for its first generation, so a slot that was
withdrawn before anybody bound it can never be written to.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import ConfigError, CorruptMessageError, TransportError
from runtime.future import Future
from runtime.tensor import TensorSpec
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import Region

if TYPE_CHECKING:
    from runtime.transport.onesided.serving import ServingEndpoint

_MAGIC = b"VBSL"
_VERSION = 1
_OFFER = struct.Struct("<4sHQI")
_ENTRY = struct.Struct("<QIQQIB")


@dataclass(frozen=True, slots=True)
class Offered:
    """One slot of an offer, as the sender sees it."""

    edge: int
    index: int
    nonce: int
    region: Region
    spec: TensorSpec


@dataclass(slots=True, eq=False)
class _Slot:
    edge: int
    index: int
    nonce: int
    spec: TensorSpec
    memory: np.ndarray
    owner: ServingEndpoint | None = None
    expected: int = 0  # the generation that may arrive next
    credited: bool = False  # ... and whether it may
    arrived: int = -1
    waiting: dict[int, Future[None]] = field(default_factory=dict)


class Slots:
    """Any thread may call anything. Its lock is taken inside an endpoint's lock, never the other way round."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._by_edge: dict[int, _Slot] = {}
        self._by_index: dict[int, _Slot] = {}
        self._next_index = 0

    def offer(self, slots: Mapping[int, np.ndarray], export: Callable[[np.ndarray], Region]) -> bytes:
        """Enter slots (edge id -> destination) and describe them for ``decode_offer``. ``export`` names their memory."""
        nonce = secrets.randbits(64)
        entries = []
        with self._guard:
            known = [edge for edge in slots if edge in self._by_edge]
            if known:
                raise ConfigError(f"edges {known[:5]} are offered already; withdraw them first")
            for edge, array in slots.items():
                spec = TensorSpec.of(array)
                region = export(array)
                while self._next_index in self._by_index:
                    self._next_index = (self._next_index + 1) & messages.MAX_EDGE_INDEX
                index = self._next_index
                self._next_index = (index + 1) & messages.MAX_EDGE_INDEX
                slot = _Slot(edge, index, nonce, spec, array)
                self._by_edge[edge] = self._by_index[index] = slot
                spec_bytes = messages.encode_spec(spec)
                entries.append(_ENTRY.pack(edge, index, region.addr, region.nbytes, region.key, len(spec_bytes)))
                entries.append(spec_bytes)
        return _OFFER.pack(_MAGIC, _VERSION, nonce, len(slots)) + b"".join(entries)

    def arrival(self, edge: int, generation: int, future: Future[None]) -> Future[None]:
        """``future``, or an earlier one of the same generation; set when that lies in the slot."""
        with self._guard:
            slot = self._by_edge.get(edge)
            if slot is None:
                raise ConfigError(f"edge {edge} was not offered")
            if slot.owner is not None and slot.owner.reason is not None and slot.arrived < generation:
                future.set_exception(slot.owner.reason)
                return future
            if slot.arrived < generation:
                return slot.waiting.setdefault(generation, future)
        future.set_result(None)
        return future

    def bind(self, owner: ServingEndpoint, index: int, nonce: int, generation: int) -> bool:
        """``owner``'s peer is the producer of this edge. False if there is no such slot (any more)."""
        with self._guard:
            slot = self._by_index.get(index)
            if slot is None or slot.nonce != nonce:
                return False
            if slot.owner is not None:
                raise CorruptMessageError(f"{owner.peer} binds edge {slot.edge}, which {slot.owner.peer} produces")
            slot.owner = owner
            slot.expected = generation
            slot.credited = True
            slot.arrived = generation - 1
            return True

    def landed(self, owner: ServingEndpoint, imm: int) -> tuple[Future[None] | None, int]:
        """An edge's immediate came from ``owner``'s peer: (the future to set, bytes that came). CorruptMessageError if that
        peer had no credit to write there."""
        index, low = messages.split_immediate(imm)
        with self._guard:
            slot = self._by_index.get(index)
            if slot is None or slot.owner is not owner:
                raise CorruptMessageError(f"{owner.peer} wrote to edge index {index}, which it does not produce")
            if not slot.credited or low != messages.low_bits(slot.expected):
                raise CorruptMessageError(
                    f"{owner.peer} wrote generation ...{low} of edge {slot.edge} without a credit for it "
                    f"(expected {slot.expected}, credit {'given' if slot.credited else 'not given'})"
                )
            slot.credited = False
            slot.arrived = slot.expected
            slot.expected += 1
            return slot.waiting.pop(slot.arrived, None), slot.spec.nbytes

    def release(self, edge: int, generation: int) -> tuple[ServingEndpoint, int, int] | None:
        """(whom to send a credit, index, generation that it allows), or None if the edge has been withdrawn."""
        with self._guard:
            slot = self._by_edge.get(edge)
            if slot is None or slot.owner is None:
                return None
            if slot.arrived != generation or slot.credited:
                raise TransportError(f"release of generation {generation} of edge {edge}, which holds {slot.arrived}")
            slot.credited = True
            return slot.owner, slot.index, slot.expected

    def withdraw(self, edges: list[int], reason: BaseException) -> dict[ServingEndpoint, list[int]]:
        """Forget edges; pending arrivals fail. The answer says which producers may be writing to which indices: those stay
        reserved until ``settled``."""
        failed: list[Future[None]] = []
        bound: dict[ServingEndpoint, list[int]] = {}
        with self._guard:
            for edge in edges:
                slot = self._by_edge.pop(edge, None)
                if slot is None:
                    continue
                failed += slot.waiting.values()
                slot.waiting.clear()
                if slot.owner is None:
                    del self._by_index[slot.index]
                else:
                    bound.setdefault(slot.owner, []).append(slot.index)
        for future in failed:
            future.set_exception(reason)
        return bound

    def settled(self, indices: list[int]) -> None:
        """No write to these withdrawn slots can come any more."""
        with self._guard:
            for index in indices:
                self._by_index.pop(index, None)

    def owner_failed(self, owner: ServingEndpoint, reason: BaseException) -> list[Future[None]]:
        """The arrivals that will never come because their producer is gone."""
        with self._guard:
            futures: list[Future[None]] = []
            for slot in self._by_edge.values():
                if slot.owner is owner:
                    futures += slot.waiting.values()
                    slot.waiting.clear()
            return futures


def decode_offer(offer: bytes) -> list[Offered]:
    """The slots of an offer; CorruptMessageError if it is none."""
    try:
        magic, version, nonce, count = _OFFER.unpack_from(offer)
        if magic != _MAGIC or version != _VERSION:
            raise CorruptMessageError(f"{magic!r} version {version} is no offer of slots")
        at = _OFFER.size
        slots = []
        for _ in range(count):
            edge, index, addr, nbytes, key, spec_size = _ENTRY.unpack_from(offer, at)
            at += _ENTRY.size
            spec = messages.decode_spec(bytes(offer[at : at + spec_size]))
            at += spec_size
            if spec.nbytes != nbytes or index > messages.MAX_EDGE_INDEX:
                raise CorruptMessageError(f"offer of {spec} in {nbytes} bytes, index {index}")
            slots.append(Offered(edge, index, nonce, Region(addr, key, nbytes), spec))
    except struct.error as error:
        raise CorruptMessageError("an offer of slots that ends too early") from error
    if at != len(offer):
        raise CorruptMessageError(f"{len(offer) - at} bytes follow an offer of slots")
    return slots
