"""The rule that chooses tiles, without TVM."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tvm_fuse_schedules.cuda_tiles import (
    Product,
    Tile,
    choose_tile,
    device_of,
    estimate_cycles,
    largest_part,
)

PRODUCTS = [
    Product(1, 64, (1, 56, 56), 64, 9, left_vector=4),
    Product(1, 64, (1, 112, 112), 3, 49),
    Product(1, 2048, (1, 7, 7), 512, 1, left_vector=4),
    Product(1, 16, (1, 112, 112), 32, 1, left_vector=4, right_vector=4),
    Product(32, 4, (1, 28, 28), 4, 9, left_vector=4, is_joined=True),
    Product(1, 1000, (64,), 2048, left_vector=4),
    Product(12, 128, (64,), 128, left_vector=4, right_vector=4),
    Product(1, 7, (3, 5, 11), 5, 6),
    Product(1, 1, (1, 1, 997), 1),
]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_999"])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_tile_fits_a_block(product, arch):
    tile = choose_tile(product, device_of(arch))
    assert 64 <= tile.threads <= 256
    assert tile.rows % tile.row_register == 0
    assert all(part % own == 0 for part, own in zip(tile.box, tile.own))
    assert tile.sums <= 32
    assert tile.sums % tile.slices == 0
    assert tile.depth * product.taps % tile.slices == 0
    assert tile.shared_bytes(product.taps) <= 32 * 1024
    assert not product.is_joined or tile.rows == product.rows


def test_too_few_columns_have_no_tile():
    assert choose_tile(Product(1, 5, (1, 1, 1), 3), device_of("sm_80")) is None


def test_joined_rows_that_no_tile_holds():
    assert choose_tile(Product(2, 1021, (1, 8, 8), 8, is_joined=True), device_of("sm_80")) is None


@pytest.mark.parametrize("product", PRODUCTS[:4], ids=str)
def test_a_large_product_fills_the_gpu(product):
    device = device_of("sm_80")
    tile = choose_tile(product, device)
    boxes = math.prod(-(-size // part) for size, part in zip(product.columns, tile.box))
    assert boxes * -(-product.rows // tile.rows) >= device.multiprocessors


def test_a_huge_product_gets_a_tile_that_reuses_what_it_reads():
    huge, small = Product(1, 4096, (1, 512, 512), 512), Product(1, 64, (1, 14, 14), 512)
    device = device_of("sm_80")
    assert choose_tile(huge, device).flops_per_byte > 2 * choose_tile(small, device).flops_per_byte


def test_estimate_grows_with_the_depth_and_falls_with_the_gpu():
    product, tile = PRODUCTS[0], Tile(64, 8, (1, 1, 8), (1, 1, 1), 4)
    cycles = estimate_cycles(tile, product, device_of("sm_80"))
    assert estimate_cycles(tile, replace(product, depth=128), device_of("sm_80")) == pytest.approx(2 * cycles)
    assert estimate_cycles(tile, product, device_of("sm_75")) > cycles


def test_a_thread_has_no_loads_without_number():
    """By cycles alone 64 threads would load 16 x 100 weights and 100 x 56 pixels: 95 loads each."""
    product, device = Product(1, 1000, (1, 28, 28), 32, 25, left_vector=4), device_of("sm_90")
    crowded = Tile(16, 4, (1, 2, 28), (1, 1, 7), 4, 2)
    chosen = choose_tile(product, device)
    assert (chosen.rows + 4 * chosen.columns) * chosen.depth * 25 / 4 / chosen.threads <= 72
    assert estimate_cycles(crowded, product, device) < estimate_cycles(chosen, product, device)


def test_a_kernel_with_very_many_taps_has_a_tile():
    assert choose_tile(Product(1, 64, (1, 32, 32), 8, 19 * 19), device_of("sm_80")) is not None


@pytest.mark.parametrize(
    ("axis", "room", "part"), [(7, 8, 7), (56, 32, 28), (112, 56, 56), (61, 32, 32), (9, 1, 1)]
)
def test_largest_part(axis, room, part):
    assert largest_part(axis, room) == part
