"""TensorSpec: the shape and dtype of a tensor, and views of an array as bytes."""

from __future__ import annotations

import ctypes
import math
import zlib
from dataclasses import dataclass

import numpy as np

from runtime.errors import ShapeError

# The wire's dtype codes. Append only: they are part of the protocol and of stored graphs.
_DTYPE_NAMES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _DTYPE_NAMES}
DTYPE_CODES: dict[str, int] = {name: code for code, name in enumerate(_DTYPE_NAMES, start=1)}
DTYPES_BY_CODE: dict[int, np.dtype] = {code: DTYPES[name] for name, code in DTYPE_CODES.items()}
MAX_RANK = 8
_addressof, _view_memory = ctypes.addressof, ctypes.c_char.from_buffer


def dtype_of(value: object) -> np.dtype:
    """The numpy dtype named by ``value``; ShapeError lists the known ones on a miss. Byte order is the machine's."""
    try:
        dtype = np.dtype(value).newbyteorder("=")  # type: ignore[call-overload]
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in DTYPES:
        raise ShapeError(f"dtype {value!r} is not supported; known: {', '.join(DTYPES)}")
    return DTYPES[dtype.name]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (fully known, in elements) and dtype of a tensor, both checked when made."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        if len(shape) > MAX_RANK or any(size < 0 for size in shape):
            raise ShapeError(f"shape {self.shape} is not a shape of rank 0 to {MAX_RANK} with sizes from 0")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @classmethod
    def of(cls, array: np.ndarray) -> TensorSpec:
        return cls(array.shape, array.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


def address_of(array: np.ndarray) -> int:
    """Where the first element of an array lies."""
    try:
        return _addressof(_view_memory(array))  # type: ignore[arg-type]  # a quarter of the time of the array interface, which is a dictionary
    except (TypeError, ValueError):  # read-only, not contiguous, or empty
        return int(array.__array_interface__["data"][0])


def byte_view(array: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array as a flat uint8 view, without a copy; ShapeError if it is not contiguous."""
    if not array.flags.c_contiguous:
        raise ShapeError(f"array {TensorSpec.of(array)} with strides {array.strides} is not C-contiguous")
    return array.reshape(-1).view(np.uint8)


def checksum(array: np.ndarray) -> int:
    """CRC-32 (zlib, ISO 3309) of the array's bytes in C order."""
    return zlib.crc32(byte_view(np.ascontiguousarray(array)).data)
