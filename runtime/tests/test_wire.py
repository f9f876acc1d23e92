"""The wire header: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import wire
from runtime.errors import (
    CorruptMessageError,
    ProtocolMismatchError,
    StepAbortedError,
    TransportError,
    VerbflowError,
)
from runtime.tensor import DTYPES, MAX_RANK, TensorSpec
from runtime.wire import HEADER_BYTES, Kind

U32, U64 = 2**32 - 1, 2**64 - 1
specs = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 12), max_size=MAX_RANK).map(tuple),
    st.sampled_from(list(DTYPES.values())),
)


@given(
    kind=st.sampled_from(Kind),
    tag=st.integers(0, U64),
    spec=st.none() | specs,
    flags=st.integers(0, U32),
    extra=st.binary(max_size=200),
    data=st.data(),
)
def test_round_trip(
    kind: Kind, tag: int, spec: TensorSpec | None, flags: int, extra: bytes, data: st.DataObject
) -> None:
    nbytes = spec.nbytes if spec is not None else data.draw(st.integers(0, wire.MAX_TENSOR_BYTES))
    offset = data.draw(st.integers(0, nbytes))
    fields = {"nbytes": nbytes, "offset": offset, "extra": len(extra), "flags": flags}
    message = wire.encode(kind, tag, spec, **fields) + extra
    header = wire.decode(message)
    assert header == (kind, tag, spec, nbytes, offset, len(extra), flags)
    assert wire.extra_bytes(message, header) == extra
    assert len(wire.payload(message, header)) == 0


@given(st.binary(max_size=3 * HEADER_BYTES), st.integers(-5, 3 * HEADER_BYTES))
def test_garbage_is_refused(garbage: bytes, at: int) -> None:
    with pytest.raises(CorruptMessageError):
        wire.decode(garbage, at)


@given(specs, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_is_refused_or_still_consistent(spec: TensorSpec, at: int, change: int) -> None:
    message = bytearray(wire.encode(Kind.TENSOR, 7, spec, extra=4) + b"abcd")
    message[at] ^= change
    try:
        header = wire.decode(message)
    except (CorruptMessageError, ProtocolMismatchError):
        return
    if header.spec is not None:
        assert header.spec.nbytes == header.nbytes
        assert np.dtype(header.spec.dtype).itemsize
    assert header.offset <= header.nbytes <= wire.MAX_TENSOR_BYTES
    assert HEADER_BYTES + header.extra <= len(message)


@given(specs, st.binary(max_size=64), st.integers(0, 300))
def test_truncated_is_refused(spec: TensorSpec, extra: bytes, keep: int) -> None:
    message = wire.encode(Kind.REQUEST, 1, spec, extra=len(extra)) + extra
    if keep < len(message):
        with pytest.raises(CorruptMessageError):
            wire.decode(message[:keep])
    else:
        wire.decode(message)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 300))
def test_payload_never_exceeds_the_tensor(nbytes: int, offset: int, sent: int) -> None:
    if offset > nbytes:
        offset = nbytes
    spec = TensorSpec((nbytes,), np.dtype(np.uint8))
    message = wire.encode(Kind.TENSOR, 1, spec, offset=offset) + bytes(range(256))[:sent] * 1
    header = wire.decode(message)
    length = len(message) - HEADER_BYTES
    if offset + length > nbytes:
        with pytest.raises(CorruptMessageError, match="do not fit"):
            wire.payload(message, header)
    else:
        assert wire.payload(message, header) == message[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("at", "value", "error", "text"),
    [
        (0, b"HTTP", CorruptMessageError, "do not begin a message"),
        (4, b"\x63", ProtocolMismatchError, "version 99"),
        (5, b"\xfe", CorruptMessageError, "kind 254"),
        (6, b"\xfe", CorruptMessageError, "dtype code 254"),
        (6, b"\x00", CorruptMessageError, "without a dtype"),
        (7, b"\x09", CorruptMessageError, "rank 9"),
        (7, b"\x01", CorruptMessageError, "does not fit the dimensions"),
        (12, b"\xff\xff\xff\xff", CorruptMessageError, "extra bytes"),
        (24, b"\xff" * 8, CorruptMessageError, "out of range"),
        (32, b"\xff" * 8, CorruptMessageError, "out of range"),
        (32, b"\x01", CorruptMessageError, "the header says"),
        (40, b"\xff" * 16, CorruptMessageError, "larger than"),
        (40, b"\x00" * 8 + b"\xff" * 8, CorruptMessageError, "larger than"),
    ],
)
def test_each_field_is_checked(at: int, value: bytes, error: type[Exception], text: str) -> None:
    message = bytearray(wire.encode(Kind.TENSOR, 1, TensorSpec((3, 4), np.dtype(np.float32))))
    message[at : at + len(value)] = value
    with pytest.raises(error, match=text):
        wire.decode(message)


def test_text_that_is_not_utf8_is_refused() -> None:
    message = wire.encode(Kind.REQUEST, 1, extra=2) + b"\xff\xfe"
    with pytest.raises(CorruptMessageError, match="UTF-8"):
        wire.extra_text(message, wire.decode(message))


@given(st.text(max_size=6000))
def test_errors_travel_as_themselves(text: str) -> None:
    raw = wire.error_text(StepAbortedError(text))
    assert len(raw) <= wire.MAX_ERROR_BYTES
    back = wire.error_from_text(raw.decode(), "/job:ps/task:0")
    assert type(back) is StepAbortedError
    assert str(back).endswith("(reported by /job:ps/task:0)")
    foreign = wire.error_from_text(wire.error_text(ZeroDivisionError(text)).decode(), "/job:ps/task:0")
    assert type(foreign) is TransportError and "ZeroDivisionError" in str(foreign)


@given(st.text())
def test_any_error_text_makes_an_error(text: str) -> None:
    assert isinstance(wire.error_from_text(text, "peer"), VerbflowError)
