"""The one binary header of every message that Verbflow's data path sends, whatever carries it.

Layout, little endian, 104 bytes, all fields naturally aligned::

    0  magic    4s   b"VBFL"
    4  version  u8   PROTOCOL_VERSION of the sender
    5  kind     u8   Kind
    6  dtype    u8   tensor.DTYPE_CODES, 0 where the message is about no tensor
    7  rank     u8   0 to MAX_RANK
    8  flags    u32  meaning belongs to the kind
   12  extra    u32  bytes that follow the header and belong to it: a key, an error text, a token
   16  tag      u64  request id, or edge and generation: what the answer names
   24  offset   u64  where in the tensor's bytes this message's payload begins
   32  nbytes   u64  bytes of the whole tensor (dtype given), else of the payload that follows
   40  dims     8 * u64, zero beyond rank

The decoder trusts nothing: bytes from a peer are checked against the buffer's length, the enumeration, the dtype table
and each other before anybody allocates or slices by them.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from typing import NamedTuple

from runtime import errors
from runtime.errors import CorruptMessageError, ProtocolMismatchError, TransportError, VerbflowError
from runtime.tensor import DTYPE_CODES, DTYPES_BY_CODE, MAX_RANK, TensorSpec

MAGIC = b"VBFL"
PROTOCOL_VERSION = 1
MAX_EXTRA_BYTES = 8192
MAX_ERROR_BYTES = 4096
MAX_TENSOR_BYTES = 1 << 42

_LAYOUT = struct.Struct(f"<4sBBBBIIQQQ{MAX_RANK}Q")
HEADER_BYTES = _LAYOUT.size
_NO_DIMS = (0,) * MAX_RANK


class Kind(enum.IntEnum):
    """What a message is. Append only: the numbers are the protocol, and one that was given (11) is not given again."""

    HELLO = 1  # connecting end: here is my token (extra)
    WELCOME = 2  # accepting end: token and version are right
    REQUEST = 3  # give me the tensor of this key (extra)
    TENSOR = 4  # bytes of a tensor, from offset on; the first one may be the only one
    ERROR = 5  # the request failed: "Class: text" (extra)
    METADATA = 6  # dtype and shape only; ask again with a destination
    CANCEL = 7  # the asking end has given this request up
    CREDIT = 8  # the slot of this edge and generation may be written to again
    RELEASE = 9  # the memory that this request borrowed or read is no longer needed
    SLOTS = 10  # destination slots of static edges
    LATER = 12  # the request is known; its tensor comes by another way when it is there


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """A decoded header. ``spec`` is None where the message is about no tensor."""

    kind: Kind
    tag: int
    spec: TensorSpec | None
    nbytes: int
    offset: int
    extra: int
    flags: int


def encode(
    kind: Kind, tag: int = 0, spec: TensorSpec | None = None, *,
    nbytes: int | None = None, offset: int = 0, extra: int = 0, flags: int = 0,
) -> bytes:  # fmt: skip
    """The header's bytes. ``nbytes`` is the spec's where there is one. struct.error if a number does not fit its field."""
    if spec is None:
        return _LAYOUT.pack(
            MAGIC, PROTOCOL_VERSION, kind, 0, 0, flags, extra, tag, offset, nbytes or 0, *_NO_DIMS
        )  # fmt: skip
    code, rank, total, dims = _fields(spec)
    return _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, kind, code, rank, flags, extra, tag, offset, total, *dims)


def decode(buffer: bytes | bytearray | memoryview, at: int = 0) -> Header:
    """The header at ``at``, with everything checked that can be checked without the payload.

    CorruptMessageError if it is none; ProtocolMismatchError if it is one of another version. ``extra`` bytes are known
    to lie inside the buffer, the payload is not: see ``payload``.
    """
    if at < 0 or len(buffer) - at < HEADER_BYTES:
        raise CorruptMessageError(f"{len(buffer) - at} bytes are no message; a header has {HEADER_BYTES}")
    magic, version, kind, code, rank, flags, extra, tag, offset, nbytes, *dims = _LAYOUT.unpack_from(buffer, at)
    if magic != MAGIC:
        raise CorruptMessageError(f"bytes {magic!r} do not begin a message ({MAGIC!r} would)")
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the peer speaks protocol version {version}, this end version {PROTOCOL_VERSION}; run one release everywhere"
        )
    known = _KINDS.get(kind)
    if known is None:
        raise CorruptMessageError(f"message kind {kind} is unknown; known: {', '.join(k.name for k in Kind)}")
    if extra > MAX_EXTRA_BYTES or extra > len(buffer) - at - HEADER_BYTES:
        raise CorruptMessageError(
            f"{known.name}: {extra} extra bytes announced, {len(buffer) - at - HEADER_BYTES} are there, "
            f"{MAX_EXTRA_BYTES} are allowed"
        )
    if nbytes > MAX_TENSOR_BYTES or offset > nbytes:
        raise CorruptMessageError(f"{known.name}: offset {offset} in {nbytes} bytes is out of range")
    if code == 0:
        if rank or any(dims):
            raise CorruptMessageError(f"{known.name}: a shape of rank {rank} without a dtype")
        return Header(known, tag, None, nbytes, offset, extra, flags)
    spec = _spec(code, rank, tuple(dims))
    if spec.nbytes != nbytes:
        raise CorruptMessageError(f"{known.name}: {spec} has {spec.nbytes} bytes, the header says {nbytes}")
    return Header(known, tag, spec, nbytes, offset, extra, flags)


def extra_bytes(buffer: bytes | bytearray | memoryview, header: Header, at: int = 0) -> bytes:
    """A copy of the ``extra`` bytes of the header decoded at ``at``."""
    start = at + HEADER_BYTES
    return bytes(memoryview(buffer)[start : start + header.extra])


def extra_text(buffer: bytes | bytearray | memoryview, header: Header, at: int = 0) -> str:
    """The ``extra`` bytes as text (UTF-8); CorruptMessageError if they are none."""
    try:
        return extra_bytes(buffer, header, at).decode()
    except UnicodeDecodeError as error:
        raise CorruptMessageError(f"{header.kind.name}: its text is not UTF-8") from error


def payload(buffer: bytes | bytearray | memoryview, header: Header, at: int = 0) -> memoryview:
    """What follows header and extra, up to the buffer's end, as a view.

    CorruptMessageError if it is longer than what the tensor still has room for from ``offset`` on.
    """
    view = memoryview(buffer)[at + HEADER_BYTES + header.extra :]
    if header.offset + len(view) > header.nbytes:
        raise CorruptMessageError(
            f"{header.kind.name}: {len(view)} bytes at offset {header.offset} of {header.nbytes} do not fit"
        )
    return view


def error_text(error: BaseException) -> bytes:
    """An error as the ``extra`` of an ERROR message: class name, text, cut at MAX_ERROR_BYTES (whole characters)."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace")
    return text if len(text) <= MAX_ERROR_BYTES else text[:MAX_ERROR_BYTES].decode(errors="ignore").encode()


def error_from_text(text: str, peer: str) -> VerbflowError:
    """The peer's error again: of its own class where that is one of ours, TransportError otherwise."""
    name, separator, message = text.partition(": ")
    cls = getattr(errors, name, None) if separator else None
    if isinstance(cls, type) and issubclass(cls, VerbflowError):
        return cls(f"{message} (reported by {peer})")
    return TransportError(f"{peer} reports {text}")


@functools.lru_cache(maxsize=4096)
def _fields(spec: TensorSpec) -> tuple[int, int, int, tuple[int, ...]]:
    rank = len(spec.shape)
    return DTYPE_CODES[spec.dtype.name], rank, spec.nbytes, spec.shape + _NO_DIMS[rank:]


@functools.lru_cache(maxsize=4096)
def _spec(code: int, rank: int, dims: tuple[int, ...]) -> TensorSpec:
    dtype = DTYPES_BY_CODE.get(code)
    if dtype is None:
        raise CorruptMessageError(f"dtype code {code} is unknown")
    if rank > MAX_RANK or any(dims[rank:]):
        raise CorruptMessageError(f"rank {rank} does not fit the dimensions {dims}")
    # numpy refuses a shape by its sizes other than zero, even where the array would be empty.
    if math.prod(size or 1 for size in dims[:rank]) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise CorruptMessageError(f"shape {dims[:rank]} of {dtype.name} is larger than {MAX_TENSOR_BYTES} bytes")
    return TensorSpec(dims[:rank], dtype)
