"""NumPy views of TVM's tensors: the same numbers, no copy, and memory that lives as long as the view."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import relay, tvm

view = Lazy("tvm_fuse.relay.view")

pytestmark = pytest.mark.relay

DTYPES = ["float16", "float32", "float64", "bool", "int8", "uint8", "int32", "int64"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_as_a_copy(dtype, shape):
    values = np.asarray(np.random.default_rng(0).uniform(0, 3, shape), dtype)
    got = view.view_array(tvm.nd.array(values))
    assert (got.dtype, got.shape) == (values.dtype, shape)
    assert np.array_equal(got, values)


def test_bfloat16_is_seen_as_its_bits():
    bits = np.array([0x3F80, 0x8000, 0x7FC0], "uint16")
    got = view.view_array(tvm.nd.empty((3,), "bfloat16").copyfrom(bits))
    assert got.dtype == "uint16"
    assert np.array_equal(got, bits)


def test_it_is_the_same_memory_and_read_only():
    array = tvm.nd.array(np.zeros((2, 3), "float32"))
    got = view.view_array(array)
    array.copyfrom(np.ones((2, 3), "float32"))
    assert got.tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(ValueError, match="read-only"):
        got[0, 0] = 2


def test_the_view_keeps_the_memory():
    def look():
        return view.view_array(relay.const(np.full(100_000, 7.0, "float32")).data)

    got = look()
    gc.collect()
    others = [relay.const(np.zeros(100_000, "float32")) for _ in range(20)]
    assert (got == 7).all()
    assert len(others) == 20


def aligned(*shape):
    """Zeros where TVM would have put them."""
    size = 4 * int(np.prod(shape))
    raw = np.zeros(size + 64, "uint8")
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view("float32").reshape(shape)


def test_a_view_of_a_part_begins_where_the_part_does():
    values = aligned(3, 16)
    values[:] = np.arange(48).reshape(3, 16)
    got = view.view_array(tvm.nd.from_dlpack(values[1:]))
    assert np.array_equal(got, values[1:])
    assert np.shares_memory(got, values)
