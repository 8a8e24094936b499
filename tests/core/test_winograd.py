"""Winograd's matrices: the identity that they must satisfy, and how much rounding costs."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.winograd import TILES, make_winograd

RANDOM = np.random.default_rng(0)


def matrices(tile):
    made = make_winograd(tile)
    return tuple(np.array(matrix) for matrix in (made.data, made.weight, made.result))


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_is_the_sliding_sum(tile):
    data, weight, result = matrices(tile)
    pixels, kernel = RANDOM.standard_normal(tile + 2), RANDOM.standard_normal(3)
    got = result @ ((weight @ kernel) * (data @ pixels))
    np.testing.assert_allclose(got, np.correlate(pixels, kernel, "valid"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", TILES)
def test_what_is_computed_at_run_time_is_exact_in_float32(tile):
    data, _, result = matrices(tile)
    for matrix in (data, result):
        np.testing.assert_array_equal(matrix.astype("float32").astype("float64"), matrix)


@pytest.mark.parametrize("tile", TILES)
def test_weights_of_every_block(tile):
    weights = RANDOM.standard_normal((2, 3, 3, 3, 4, 5)).astype("float32")
    got = make_winograd(tile).transform_weights(weights)
    assert got.shape == (tile + 2, tile + 2, 2, 3, 4, 5)
    assert got.dtype == np.float32
    _, matrix, _ = matrices(tile)
    want = matrix @ weights[1, 2, :, :, 3, 4].astype("float64") @ matrix.T
    np.testing.assert_allclose(got[:, :, 1, 2, 3, 4], want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("tile", "bound"), [(2, 6e-7), (4, 2e-6)])
def test_rounding_stays_within_what_is_said(tile, bound):
    data, weight, result = matrices(tile)
    channels = 256
    pixels = np.maximum(RANDOM.standard_normal((channels, 32, tile + 2, tile + 2)), 0).astype("float32")
    kernels = (RANDOM.standard_normal((4, channels, 3, 3)) / np.sqrt(9 * channels)).astype("float32")
    values = np.einsum(
        "ai,ctij,bj->ctab", data.astype("f4"), pixels, data.astype("f4"), optimize=True
    ).astype("f4")
    weights = np.einsum("ai,ocij,bj->ocab", weight, kernels.astype("f8"), weight, optimize=True).astype("f4")
    sums = np.einsum("ctab,ocab->otab", values, weights)
    got = np.einsum("ia,otab,jb->otij", result.astype("f4"), sums, result.astype("f4"), optimize=True)
    want = sum(
        np.einsum(
            "ctij,oc->otij",
            pixels[:, :, y : y + tile, x : x + tile].astype("f8"),
            kernels[:, :, y, x].astype("f8"),
        )
        for y in range(3)
        for x in range(3)
    )
    assert np.sqrt(np.mean((got - want) ** 2)) < bound
