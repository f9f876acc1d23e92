"""Control messages of the one-sided protocols: compact, and decoded strictly.

``runtime.wire``'s header serves streams at 104 bytes and about 2 us a message; a shared-memory fetch as a whole has 5 us,
so messages here are as short as their kind allows. All little endian; every one begins with 8 bytes::

    0  kind     u8
    1  flags    u8   bit 0: credits are there
    2  credits  u16  messages and immediates polled since the last report: the receiver of this may send so many more
    4  request  u32  the fetch it belongs to (below 2**31), or a static edge's index (below 2**20), or 0

A tensor's shape travels as ``spec``: dtype code u8, rank u8, rank * u64. Decoders check length, range and consistency and
raise CorruptMessageError; after that the connection is given up.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime.errors import CorruptMessageError
from runtime.tensor import DTYPE_CODES, DTYPES_BY_CODE, MAX_RANK, TensorSpec
from runtime.transport.base import MAX_KEY_BYTES
from runtime.transport.onesided.link import NO_REGION, Region, make_region
from runtime.wire import MAX_ERROR_BYTES, MAX_TENSOR_BYTES

Buffer = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is; "->" from the fetching (connecting) end, "<-" from the serving (listening) end."""

    FETCH = 1  # -> give me the tensor of this key
    AGAIN = 2  # -> here is a destination of the right size (after METADATA or READY)
    RELEASE = 3  # -> read or viewed: the memory may be reused ("finish")
    EAGER = 4  # <- bytes of the tensor
    METADATA = 5  # <- shape and dtype; ask again with a destination
    OFFER = 6  # <- where the tensor (or a part of it) lies: read it
    ERROR = 7  # <- the fetch failed
    BIND = 8  # -> I am the producer of this static edge and begin at this generation
    EDGE_CREDIT = 9  # <- this generation of the edge is used up
    WITHDRAW = 10  # <- write to these edges no more
    WITHDRAWN = 11  # -> no write to these edges is under way
    CREDIT = 12  # <> nothing but credits
    BYE = 13  # <> I close; stop using my memory
    BYE_ACK = 14  # <> I have stopped


class Mode(enum.IntEnum):
    """How a FETCH wants its bytes."""

    EAGER = 1
    READ = 2
    WRITE = 3
    BORROW = 4
    PAPER_READ = 5
    PAPER_WRITE = 6


_FETCH_KIND = int(Kind.FETCH)
_OFFER_KIND = int(Kind.OFFER)
HEADER_BYTES = 8
MAX_REQUEST = (1 << 31) - 1
MAX_EDGE_INDEX = (1 << 20) - 1
_GENERATION_MASK = (1 << 11) - 1
_EDGE_BIT = 1 << 31
MAX_SPEC_BYTES = 2 + 8 * MAX_RANK

_HEADER = struct.Struct("<BBHI")
_FETCH = struct.Struct("<BBHIQQIIIBBH")  # addr, nbytes, key; eager limit; chunk; mode, spec bytes, key bytes
_AGAIN = struct.Struct("<BBHIQQI")
_EAGER = struct.Struct("<BBHIQB")  # offset, spec bytes
_METADATA = struct.Struct("<BBHIB")
_OFFER = struct.Struct("<BBHIQQIQB")  # addr, nbytes, key; offset in the tensor; spec bytes
_BIND = struct.Struct("<BBHIQQ")  # offer's nonce, generation
_EDGE_CREDIT = struct.Struct("<BBHIQ")
_EDGES = struct.Struct("<BBHIQ")  # offer's nonce; then u32 an edge

FETCH_BYTES = _FETCH.size
EAGER_BYTES = _EAGER.size
pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack
pack_fetch = _FETCH.pack
pack_eager = _EAGER.pack


class Fetch(NamedTuple):
    """A decoded FETCH. ``spec_bytes`` are the destination's, empty if the fetching end has none."""

    request: int
    mode: Mode
    into: Region
    eager_limit: int
    chunk_bytes: int
    spec_bytes: bytes
    key: str


def return_credits(message: bytes | bytearray, credits: int) -> bytearray:
    """The message with ``credits`` in its header."""
    patched = bytearray(message)
    patched[1] |= 1
    patched[2:4] = credits.to_bytes(2, "little")
    return patched


@functools.lru_cache(maxsize=8192)
def encode_spec(spec: TensorSpec) -> bytes:
    return struct.pack(f"<BB{len(spec.shape)}Q", DTYPE_CODES[spec.dtype.name], len(spec.shape), *spec.shape)


@functools.lru_cache(maxsize=8192)
def spec_nbytes(data: bytes) -> int:
    """Bytes of the tensor that ``data`` describes; CorruptMessageError as ``decode_spec``."""
    return decode_spec(data).nbytes


@functools.lru_cache(maxsize=8192)
def decode_spec(data: bytes) -> TensorSpec:
    """A spec whose bytes are exactly ``data``."""
    if len(data) < 2 or data[1] > MAX_RANK or len(data) != 2 + 8 * data[1]:
        raise CorruptMessageError(f"{len(data)} bytes are no tensor shape")
    dtype = DTYPES_BY_CODE.get(data[0])
    if dtype is None:
        raise CorruptMessageError(f"dtype code {data[0]} is unknown")
    shape = struct.unpack_from(f"<{data[1]}Q", data, 2)
    # numpy refuses a shape by its sizes other than zero, even where the array would be empty.
    if math.prod(size or 1 for size in shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise CorruptMessageError(f"shape {shape} of {dtype.name} is larger than {MAX_TENSOR_BYTES} bytes")
    return TensorSpec(shape, dtype)


def encode_fetch(
    request: int, mode: Mode, into: Region, eager_limit: int, chunk_bytes: int, spec_bytes: bytes, key: bytes
) -> bytes:
    addr, region_key, nbytes = into
    head = _FETCH.pack(
        _FETCH_KIND, 0, 0, request, addr, nbytes, region_key, eager_limit, chunk_bytes, mode, len(spec_bytes), len(key)
    )
    return head + spec_bytes + key


def decode_fetch(message: memoryview) -> Fetch:
    data = bytes(message)
    size = len(data)
    if size < FETCH_BYTES:
        raise CorruptMessageError(f"FETCH of {size} bytes is shorter than {FETCH_BYTES}")
    _, _, _, request, addr, nbytes, key, limit, chunk, mode, spec_size, key_size = _FETCH.unpack_from(data)
    spec_end = FETCH_BYTES + spec_size
    if spec_end + key_size != size or key_size > MAX_KEY_BYTES:
        raise CorruptMessageError(f"FETCH of {size} bytes announces {spec_size} of shape and {key_size} of key")
    if not 1 <= mode <= 6 or request > MAX_REQUEST:
        raise CorruptMessageError(f"FETCH of mode {mode}, request {request}")
    spec_bytes = data[FETCH_BYTES:spec_end]
    if spec_size:
        decode_spec(spec_bytes)
    elif nbytes:
        raise CorruptMessageError("FETCH with a destination of no shape")
    try:
        text = data[spec_end:].decode()
    except UnicodeDecodeError as error:
        raise CorruptMessageError("FETCH of a key that is not UTF-8") from error
    into = Region(addr, key, nbytes) if nbytes else NO_REGION
    return _fetch((request, _MODES[mode], into, limit, chunk, spec_bytes, text))


def encode_again(request: int, into: Region) -> bytes:
    return _AGAIN.pack(Kind.AGAIN, 0, 0, request, into.addr, into.nbytes, into.key)


def decode_again(message: memoryview) -> tuple[int, Region]:
    """(request, destination)"""
    _exactly(message, _AGAIN, "AGAIN")
    _, _, _, request, addr, nbytes, key = _AGAIN.unpack_from(message)
    return request, Region(addr, key, nbytes)


def decode_request(message: memoryview) -> int:
    """The request of a message that is only a header."""
    if len(message) != HEADER_BYTES:
        raise CorruptMessageError(f"a message of {len(message)} bytes; it has {HEADER_BYTES}")
    return _unpack_header(message)[3]


def decode_eager(message: memoryview) -> tuple[int, int, bytes, int, int]:
    """(request, offset, spec bytes, where the payload begins, bytes of the tensor); the payload lies inside the tensor."""
    size = len(message)
    if size < EAGER_BYTES:
        raise CorruptMessageError(f"EAGER of {size} bytes is shorter than {EAGER_BYTES}")
    _, _, _, request, offset, spec_size = _EAGER.unpack_from(message)
    start = EAGER_BYTES + spec_size
    if start > size:
        raise CorruptMessageError(f"EAGER of {size} bytes announces {spec_size} of shape")
    spec_bytes = bytes(message[EAGER_BYTES:start])
    nbytes = spec_nbytes(spec_bytes)
    if offset + size - start > nbytes:
        raise CorruptMessageError(f"EAGER: {size - start} bytes at {offset} lie outside the tensor")
    return request, offset, spec_bytes, start, nbytes


def encode_metadata(request: int, spec_bytes: bytes) -> bytes:
    return _METADATA.pack(Kind.METADATA, 0, 0, request, len(spec_bytes)) + spec_bytes


def decode_metadata(message: memoryview) -> tuple[int, TensorSpec]:
    if len(message) < _METADATA.size:
        raise CorruptMessageError(f"METADATA of {len(message)} bytes is shorter than {_METADATA.size}")
    request, spec_size = _METADATA.unpack_from(message)[3:]
    if _METADATA.size + spec_size != len(message):
        raise CorruptMessageError(f"METADATA of {len(message)} bytes announces {spec_size} of shape")
    return request, decode_spec(bytes(message[_METADATA.size :]))


def encode_offer(request: int, source: Region, offset: int, spec_bytes: bytes) -> bytes:
    addr, key, nbytes = source
    return _OFFER.pack(_OFFER_KIND, 0, 0, request, addr, nbytes, key, offset, len(spec_bytes)) + spec_bytes


def decode_offer(message: memoryview) -> tuple[int, Region, int, bytes, int]:
    """(request, where to read, offset of that in the tensor, spec bytes, bytes of the tensor); what is read lies inside."""
    if len(message) < _OFFER.size:
        raise CorruptMessageError(f"OFFER of {len(message)} bytes is shorter than {_OFFER.size}")
    _, _, _, request, addr, nbytes, key, offset, spec_size = _OFFER.unpack_from(message)
    spec_bytes = bytes(message[_OFFER.size :])
    if len(spec_bytes) != spec_size:
        raise CorruptMessageError(f"OFFER of {len(message)} bytes announces {spec_size} of shape")
    whole = spec_nbytes(spec_bytes)
    if offset + nbytes > whole:
        raise CorruptMessageError(f"OFFER: {nbytes} bytes at {offset} lie outside a tensor of {whole}")
    return request, make_region((addr, key, nbytes)), offset, spec_bytes, whole


def encode_error(request: int, text: bytes, room: int) -> bytes:
    """``text`` cut to what a message of ``room`` bytes holds, at a whole character."""
    limit = min(MAX_ERROR_BYTES, room - HEADER_BYTES)
    if len(text) > limit:
        text = text[:limit].decode(errors="ignore").encode()
    return _HEADER.pack(Kind.ERROR, 0, 0, request) + text


def decode_error(message: memoryview) -> tuple[int, str]:
    if not HEADER_BYTES <= len(message) <= HEADER_BYTES + MAX_ERROR_BYTES:
        raise CorruptMessageError(f"ERROR of {len(message)} bytes")
    return _HEADER.unpack_from(message)[3], str(message[HEADER_BYTES:], "utf-8", "replace")


def encode_bind(index: int, nonce: int, generation: int) -> bytes:
    return _BIND.pack(Kind.BIND, 0, 0, index, nonce, generation)


def decode_bind(message: memoryview) -> tuple[int, int, int]:
    """(edge index, nonce of the offer, first generation)"""
    _exactly(message, _BIND, "BIND")
    index, nonce, generation = _BIND.unpack_from(message)[3:]
    return index, nonce, generation


def encode_edge_credit(index: int, generation: int) -> bytes:
    return _EDGE_CREDIT.pack(Kind.EDGE_CREDIT, 0, 0, index, generation)


def decode_edge_credit(message: memoryview) -> tuple[int, int]:
    """(edge index, generation)"""
    _exactly(message, _EDGE_CREDIT, "EDGE_CREDIT")
    index, generation = _EDGE_CREDIT.unpack_from(message)[3:]
    return index, generation


def encode_edges(kind: Kind, ticket: int, indices: list[int]) -> bytes:
    """WITHDRAW or its answer WITHDRAWN; ``ticket`` names the withdrawal."""
    return _EDGES.pack(kind, 0, 0, len(indices), ticket) + struct.pack(f"<{len(indices)}I", *indices)


def decode_edges(message: memoryview) -> tuple[int, list[int]]:
    """(ticket, edge indices)"""
    if len(message) < _EDGES.size:
        raise CorruptMessageError(f"a list of edges in {len(message)} bytes")
    count, ticket = _EDGES.unpack_from(message)[3:]
    if len(message) != _EDGES.size + 4 * count:
        raise CorruptMessageError(f"{count} edges in {len(message)} bytes")
    return ticket, list(struct.unpack_from(f"<{count}I", message, _EDGES.size))


def edges_per_message(room: int) -> int:
    return (room - _EDGES.size) // 4


def edge_immediate(index: int, generation: int) -> int:
    """The immediate of a static write: top bit, 11 bits of generation, 20 of index. Below 2**31 it is a request."""
    return _EDGE_BIT | (generation & _GENERATION_MASK) << 20 | index


def split_immediate(imm: int) -> tuple[int, int]:
    """(edge index, low bits of the generation) of an edge's immediate."""
    return imm & MAX_EDGE_INDEX, imm >> 20 & _GENERATION_MASK


def low_bits(generation: int) -> int:
    return generation & _GENERATION_MASK


def _exactly(message: memoryview, layout: struct.Struct, name: str) -> None:
    if len(message) != layout.size:
        raise CorruptMessageError(f"{name} of {len(message)} bytes; it has {layout.size}")


# NamedTuple's own constructor is a Python function of 0.2 us.
_fetch: Callable[[tuple[Any, ...]], Fetch] = functools.partial(tuple.__new__, Fetch)  # type: ignore[arg-type]
_MODES = [Mode.EAGER, *Mode]  # by number; 0 never looked up
