"""What is said of a tensor: its bytes, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.errors import ShapeError
from runtime.tensor import DTYPES, address_of, byte_view
from runtime.transport.base import Lease


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_an_address_is_that_of_the_first_element(dtype):
    base = np.zeros(24, dtype)
    frozen = base[5:]
    frozen.setflags(write=False)
    for view, first in ((base, 0), (base[3:], 3), (frozen, 5), (base[::-2], 23), (base.reshape(4, 6)[1:, 2], 8)):
        assert address_of(view) == base.ctypes.data + first * dtype.itemsize
    assert address_of(base[7:7]) == base[7:7].ctypes.data


def test_asking_for_an_address_keeps_no_hold_of_the_memory():
    array = np.zeros(8)
    address_of(array)
    array.resize(16, refcheck=True)  # refuses where somebody else refers to the memory


def test_the_bytes_of_an_array_are_its_own():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    byte_view(array)[:4] = 0xFF
    assert np.isnan(array[0, 0])
    with pytest.raises(ShapeError, match="not C-contiguous"):
        byte_view(array.T)


def test_a_leased_view_is_read_only_and_released_once():
    given = []
    array = np.arange(4)
    lease = Lease(array, lambda: given.append(1))
    with lease as view:
        assert view is lease.array and lease.lent is array
        assert np.shares_memory(view, array)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    lease.release()
    assert given == [1] and array.flags.writeable
