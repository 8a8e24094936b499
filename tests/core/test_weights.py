"""A scale along the output channel of a kernel, in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numerics import from_plain, max_error
from tvm_fuse.core.weights import fold_weight


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_fold_weight_without_a_channel_axis_is_none():
    assert fold_weight(draw(3, 3, 3, 3), np.ones(4), "OIHW") is None
    assert fold_weight(draw(2, 2), np.ones(2), "NC") is None
    assert fold_weight(draw(2, 2, 2, 2), np.ones(2), "OI") is None


@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "OHWI", "OIHW2i4o", "HWOI"])
def test_fold_weight_against_index_arithmetic(layout):
    plain = draw(8, 8, 3, 3)
    scale = draw(8, seed=2)
    wanted = plain.copy()
    for o in range(8):
        wanted[o] *= scale[o]
    got = fold_weight(from_plain(plain, "OIHW", layout), scale, layout)
    assert max_error(got, from_plain(wanted, "OIHW", layout)) == 0


@pytest.mark.parametrize("layout", ["IOHW", "HWIO", "HWOI"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_kernel_against_index_arithmetic(layout, groups):
    """Input channel i belongs to group i // (I / groups), which makes the outputs group * O + o."""
    inputs, outputs = 8, 3
    plain, scale = draw(inputs, outputs, 3, 3), draw(outputs * groups, seed=2)
    wanted = plain.copy()
    for i in range(inputs):
        for o in range(outputs):
            wanted[i, o] *= scale[(i // (inputs // groups)) * outputs + o]
    got = fold_weight(from_plain(plain, "IOHW", layout), scale, layout, groups=groups, transposed=True)
    assert max_error(got, from_plain(wanted, "IOHW", layout)) == 0


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (6, 3), (3, 2)])
def test_transposed_kernel_that_does_not_fit_is_none(channels, groups):
    assert fold_weight(draw(8, 3, 3, 3), np.ones(channels), "IOHW", groups=groups, transposed=True) is None
