"""Tensors inside control messages: feeds and fetches of a master that is no task of the cluster, and variables in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.rpc import MAX_MESSAGE_BYTES
from runtime.errors import ConfigError, CorruptMessageError, ShapeError
from runtime.tensor import DTYPE_CODES, DTYPES_BY_CODE, TensorSpec, byte_view

CHUNK_BYTES = 4 << 20


def pack(array: np.ndarray) -> pb.Tensor:
    """A tensor as a message; one copy."""
    return pb.Tensor(dtype=DTYPE_CODES[array.dtype.name], shape=array.shape, content=array.tobytes())


def unpack(message: pb.Tensor) -> np.ndarray:
    """The tensor of a message, read-only, sharing its memory; CorruptMessageError if its parts do not fit together."""
    spec = _spec(message.dtype, message.shape)
    if len(message.content) != spec.nbytes:
        raise CorruptMessageError(f"a tensor {spec} came with {len(message.content)} bytes instead of {spec.nbytes}")
    return np.frombuffer(message.content, spec.dtype).reshape(spec.shape)


def check_size(arrays: Iterable[np.ndarray], what: str) -> None:
    """ConfigError if tensors do not fit into one control message."""
    total = sum(array.nbytes for array in arrays)
    if total > MAX_MESSAGE_BYTES - (1 << 20):
        raise ConfigError(
            f"{what} of {total} bytes do not fit into one control message of {MAX_MESSAGE_BYTES} bytes; run the session "
            f"in a task's own process (Session(graph, server)), where they need no message"
        )


def chunks(container: str, name: str, array: np.ndarray) -> Iterator[pb.VariableChunk]:
    """A variable as messages of at most CHUNK_BYTES; one even where it is empty. ``array`` must not change meanwhile."""
    content = byte_view(array)
    head = {"container": container, "name": name, "dtype": DTYPE_CODES[array.dtype.name], "shape": array.shape}
    for offset in range(0, max(1, array.nbytes), CHUNK_BYTES):
        end = min(offset + CHUNK_BYTES, array.nbytes)
        yield pb.VariableChunk(**head, offset=offset, content=content[offset:end].tobytes(), last=end == array.nbytes)


def variables(messages: Iterable[pb.VariableChunk]) -> Iterator[tuple[str, str, np.ndarray]]:
    """(container, name, array) for each variable of a stream of chunks, as soon as it is complete.

    CorruptMessageError if chunks are missing, out of order, or beyond the tensor's size.
    """
    array: np.ndarray | None = None
    spec: TensorSpec | None = None
    current = ("", "")
    filled = 0
    for message in messages:
        if array is None:
            spec, current, filled = _spec(message.dtype, message.shape), (message.container, message.name), 0
            array = np.empty(spec.shape, spec.dtype)
        assert spec is not None
        if (message.container, message.name) != current or message.offset != filled:
            raise CorruptMessageError(f"a chunk of variable {message.name!r} at {message.offset} is out of order")
        end = filled + len(message.content)
        if end > spec.nbytes or message.last != (end == spec.nbytes):
            raise CorruptMessageError(f"chunks of variable {message.name!r} do not make up {spec}: {end} bytes so far")
        if message.content:
            byte_view(array)[filled:end] = np.frombuffer(message.content, np.uint8)
        filled = end
        if message.last:
            yield (*current, array)
            array = None
    if array is not None:
        raise CorruptMessageError(f"variable {current[1]!r} ended after {filled} bytes of {spec}")


def _spec(dtype: int, shape: Iterable[int]) -> TensorSpec:
    if dtype not in DTYPES_BY_CODE:
        raise CorruptMessageError(f"dtype code {dtype} is unknown")
    try:
        spec = TensorSpec(tuple(shape), DTYPES_BY_CODE[dtype])
    except ShapeError as error:
        raise CorruptMessageError(f"a tensor message: {error}") from None
    if spec.nbytes > 1 << 40:
        raise CorruptMessageError(f"a tensor {spec} of {spec.nbytes} bytes is absurd")
    return spec
