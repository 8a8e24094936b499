"""Layout strings against index arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numerics import from_plain, to_plain
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.layout import Axis, axis_index, channel_vector_shape, parse_layout, spread, transform


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("NCHW", "N C H W"),
        ("OHWI", "O H W I"),
        ("OI", "O I"),
        ("NCHW16c", "N C H W 16c"),
        ("OIHW4i128o", "O I H W 4i 128o"),
        ("OIHW4i16o4i", "O I H W 4i 16o 4i"),
    ],
)
def test_parse_layout(layout, axes):
    wanted = [Axis(token[-1].upper(), int(token[:-1] or 0)) for token in axes.split()]
    assert parse_layout(layout) == tuple(wanted)


BROKEN = ["", "nchw", "NCHWc", "NCHW16", "NC HW", "16", "NCHW-4c", "NCHW0c", "NCHWC", "NHW4c"]


@pytest.mark.parametrize("layout", BROKEN)
def test_not_a_layout(layout):
    with pytest.raises(UsageError, match="not a layout"):
        parse_layout(layout)


@pytest.mark.parametrize(
    ("layout", "letter", "index"),
    [("NCHW", "C", 1), ("NHWC", "C", 3), ("NCHW4c", "C", None), ("NCHW4c", "W", 3), ("NCHW", "O", None)],
)
def test_axis_index(layout, letter, index):
    assert axis_index(layout, letter) == index


@pytest.mark.parametrize(
    ("layout", "letter", "shape", "wanted"),
    [
        ("NCHW", "C", (2, 4, 4, 4), (1, 4, 1, 1)),
        ("NHWC", "C", (4, 4, 4, 4), (1, 1, 1, 4)),
        ("NCHW4c", "C", (1, 2, 5, 5, 4), (1, 2, 1, 1, 4)),
        ("OIHW4i2o", "O", (3, 1, 1, 1, 4, 2), (3, 1, 1, 1, 1, 2)),
        ("NCHW", "C", ("n", 4, "h", "w"), (1, 4, 1, 1)),
        ("NCHW", "C", (4, 4, 4), None),
        ("NCHW", "O", (4, 4, 4, 4), None),
        ("4cNCHW", "C", (4, 1, 2, 5, 5), None),
        ("NCHW4c", "C", (1, 2, 5, 5, 8), None),
    ],
)
def test_channel_vector_shape(layout, letter, shape, wanted):
    assert channel_vector_shape(layout, letter, shape) == wanted


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NCHW2c", "NHWC4c", "NC2cHW"])
def test_spread_puts_each_number_on_its_channel(layout):
    vector = np.arange(8.0)
    plain = np.zeros((2, 8, 3, 3)) + vector.reshape(8, 1, 1)
    blocked = from_plain(plain, "NCHW", layout)
    got = spread(vector, layout, "C", blocked.shape)
    np.testing.assert_array_equal(np.broadcast_to(got, blocked.shape), blocked)
    assert np.shares_memory(got, vector)


@pytest.mark.parametrize(
    ("size", "shape"), [(3, (1, 4, 2, 2)), (8, (1, 4, 2, 2)), (1, ("n", "c", 2, 2)), (4, (1, 4, 2))], ids=str
)
def test_spread_of_a_vector_that_does_not_fit(size, shape):
    assert spread(np.zeros(size), "NCHW", "C", shape) is None


LAYOUTS = ["OIHW", "HWIO", "OHWI", "HWOI", "OIHW2i4o", "OIHW4i4o", "IOHW4o2i", "O2oHWI"]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_transform_against_index_arithmetic(source, target):
    plain = np.arange(8 * 4 * 3 * 2).reshape(8, 4, 3, 2)
    got = transform(from_plain(plain, "OIHW", source), source, target)
    np.testing.assert_array_equal(got, from_plain(plain, "OIHW", target))
    np.testing.assert_array_equal(to_plain(got, target, "OIHW"), plain)
    assert got.flags.c_contiguous


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("OIHW4i2o2i", (4, 2, 1, 3, 4, 2, 2)), ("OIHW2i2o2i", (4, 4, 1, 3, 2, 2, 2))],
    ids=["different blocks", "equal blocks"],
)
def test_transform_with_two_blocks_of_one_axis(layout, shape):
    plain = np.arange(8 * 16 * 3).reshape(8, 16, 1, 3)
    packed = from_plain(plain, "OIHW", layout, shape)
    np.testing.assert_array_equal(transform(plain, "OIHW", layout), packed)
    np.testing.assert_array_equal(transform(packed, layout, "OIHW"), plain)


def test_transform_with_a_block_before_its_axis():
    plain = np.arange(8 * 3).reshape(8, 3)
    packed = transform(plain, "OI", "2oOI")
    for o, i in np.ndindex(8, 3):
        assert packed[o % 2, o // 2, i] == plain[o, i]
    np.testing.assert_array_equal(transform(packed, "2oOI", "OI"), plain)


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [((4, 4), "OI", "OIHW"), ((4, 4, 1), "OI", "IO"), ((6, 4), "OI", "OI4o"), ((4, 4), "OI", "NC")],
    ids=str,
)
def test_transform_that_cannot_be(shape, source, target):
    with pytest.raises(UsageError):
        transform(np.zeros(shape), source, target)
