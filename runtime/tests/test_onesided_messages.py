"""Control messages: whatever bytes come, a decoder answers with a value inside its bounds or with CorruptMessageError."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import CorruptMessageError
from runtime.tensor import DTYPES, TensorSpec
from runtime.transport.base import MAX_KEY_BYTES
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import Region
from runtime.transport.onesided.messages import Kind, Mode
from runtime.transport.onesided.slots import Slots, decode_offer

DECODERS: list[Callable[[memoryview], object]] = [
    messages.decode_fetch,
    messages.decode_again,
    messages.decode_request,
    messages.decode_eager,
    messages.decode_metadata,
    messages.decode_offer,
    messages.decode_error,
    messages.decode_bind,
    messages.decode_edge_credit,
    messages.decode_edges,
]
requests = st.integers(0, messages.MAX_REQUEST)
u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
specs = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 50), max_size=5).map(tuple),
    st.sampled_from(sorted(DTYPES)).map(DTYPES.__getitem__),
)
regions = st.builds(Region, u64, u32, st.integers(1, 1 << 40))


def valid_messages() -> st.SearchStrategy[bytes]:
    spec_bytes = specs.map(messages.encode_spec)
    return st.one_of(
        st.builds(
            messages.encode_fetch, requests, st.sampled_from(Mode), regions, u32, u32, spec_bytes,
            st.text(max_size=60).map(str.encode),
        ),
        st.builds(messages.encode_again, requests, regions),
        st.builds(messages.encode_metadata, requests, spec_bytes),
        st.builds(messages.encode_offer, requests, regions, st.integers(0, 100), spec_bytes),
        st.builds(messages.encode_error, requests, st.binary(max_size=100), st.just(500)),
        st.builds(messages.encode_bind, requests, u64, u64),
        st.builds(messages.encode_edges, st.just(Kind.WITHDRAW), u64, st.lists(u32, max_size=5)),
    )  # fmt: skip


def decode_all(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(memoryview(data))
        except CorruptMessageError:
            pass


@given(st.binary(max_size=300))
def test_decoders_survive_any_bytes(data: bytes) -> None:
    decode_all(data)


@given(valid_messages(), st.data())
def test_decoders_survive_damaged_messages(message: bytes, data: st.DataObject) -> None:
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decode_all(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    decode_all(bytes(damaged))


@given(requests, st.sampled_from(Mode), regions, u32, u32, specs, st.text(max_size=200))
def test_fetch_goes_round(
    request: int, mode: Mode, into: Region, limit: int, chunk: int, spec: TensorSpec, key: str
) -> None:
    data = messages.encode_spec(spec)
    message = messages.encode_fetch(request, mode, into, limit, chunk, data, key.encode())
    assert messages.decode_fetch(memoryview(message)) == (request, mode, into, limit, chunk, data, key)


@given(st.binary(max_size=100))
def test_a_decoded_spec_is_the_one_that_was_encoded(data: bytes) -> None:
    try:
        spec = messages.decode_spec(data)
    except CorruptMessageError:
        return
    assert messages.encode_spec(spec) == data
    assert messages.spec_nbytes(data) == spec.nbytes


@given(st.binary(max_size=200))
def test_an_eager_payload_lies_inside_the_tensor(data: bytes) -> None:
    try:
        _, offset, spec_bytes, start, nbytes = messages.decode_eager(memoryview(data))
    except CorruptMessageError:
        return
    assert start <= len(data)
    assert offset + len(data) - start <= nbytes == messages.decode_spec(spec_bytes).nbytes


def test_an_offer_beyond_the_tensor_is_refused() -> None:
    spec = messages.encode_spec(TensorSpec((10,), np.dtype(np.uint8)))
    assert messages.decode_offer(memoryview(messages.encode_offer(1, Region(0, 1, 6), 4, spec)))[2:] == (4, spec, 10)
    with pytest.raises(CorruptMessageError):
        messages.decode_offer(memoryview(messages.encode_offer(1, Region(0, 1, 6), 5, spec)))


def test_a_shape_too_large_for_any_memory_is_refused() -> None:
    for shape in ((1 << 62, 4), (0, 1 << 63), (1 << 42,)):
        data = bytes([11, len(shape)]) + b"".join(size.to_bytes(8, "little") for size in shape)
        with pytest.raises(CorruptMessageError):
            messages.decode_spec(data)


def test_a_key_longer_than_allowed_is_refused() -> None:
    message = messages.encode_fetch(1, Mode.READ, messages.NO_REGION, 0, 0, b"", b"k" * (MAX_KEY_BYTES + 1))
    with pytest.raises(CorruptMessageError):
        messages.decode_fetch(memoryview(message))


@given(st.integers(0, messages.MAX_EDGE_INDEX), u64)
def test_edge_immediates(index: int, generation: int) -> None:
    imm = messages.edge_immediate(index, generation)
    assert 1 << 31 <= imm < 1 << 32
    assert messages.split_immediate(imm) == (index, messages.low_bits(generation))


def test_credits_are_patched_into_any_message() -> None:
    message = messages.encode_bind(7, 8, 9)
    patched = messages.return_credits(message, 0x1234)
    assert patched[2] | patched[3] << 8 == 0x1234
    assert messages.decode_bind(memoryview(patched)) == (7, 8, 9)


@given(st.data())
def test_an_offer_of_slots_is_decoded_strictly(data: st.DataObject) -> None:
    arrays = {edge: np.zeros(edge % 5, np.float32) for edge in data.draw(st.sets(u32, max_size=4))}
    offer = Slots().offer(arrays, lambda array: Region(64, 5, array.nbytes))
    assert {slot.edge: slot.spec.nbytes for slot in decode_offer(offer)} == {
        edge: array.nbytes for edge, array in arrays.items()
    }
    damaged = bytearray(offer)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    for candidate in (bytes(damaged), offer[: data.draw(st.integers(0, len(offer) - 1))], offer + b"x"):
        try:
            slots = decode_offer(candidate)
        except CorruptMessageError:
            continue
        assert all(slot.region.nbytes == slot.spec.nbytes for slot in slots)
