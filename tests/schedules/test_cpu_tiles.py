"""Tiles of convolutions on a CPU: what fits in registers, what threads share, and who goes round what."""

from __future__ import annotations

import math

import pytest

from tvm_fuse_schedules.cpu_tiles import ConvShape, Cpu, choose_conv_tile, choose_pixels, shares

AVX512 = Cpu(lanes=16, registers=32, threads=2)
AVX2 = Cpu(lanes=8, registers=16, threads=2)
SSE = Cpu(lanes=4, registers=16, threads=1)


def shape(depth, channels, rows, columns, kernel=1, lanes=16):
    return ConvShape(
        images=1,
        depth=depth,
        blocks=channels // lanes,
        lanes=lanes,
        rows=rows,
        columns=columns,
        taps=kernel * kernel,
        data_bytes=4 * depth * rows * columns,
        weight_bytes=4 * depth * channels * kernel * kernel,
    )


@pytest.mark.parametrize("cpu", [AVX512, AVX2, SSE], ids=["avx512", "avx2", "sse"])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 13, 14, 31, 37, 56, 112])
@pytest.mark.parametrize("channels", [16, 48, 80, 112, 512])
def test_sums_and_weights_fit_in_registers(cpu, size, channels):
    tile = choose_conv_tile(shape(64, channels, size, size), cpu)
    assert tile.blocks * tile.pixels + tile.blocks < cpu.registers
    assert (channels // 16) % tile.blocks == 0
    assert size % tile.rows == 0


@pytest.mark.parametrize("width", [7, 14, 28, 56, 112])
def test_no_pixel_is_wasted_where_sevens_divide(width):
    tile = choose_conv_tile(shape(64, 64, width, width), AVX512)
    assert width % tile.pixels == 0
    assert tile.blocks * tile.pixels >= 2 * 4  # two units, four clocks


@pytest.mark.parametrize(
    ("layer", "by_rows"),
    [
        (shape(64, 64, 56, 56, kernel=3), True),
        (shape(64, 256, 56, 56), True),
        (shape(512, 2048, 7, 7), False),
        (shape(512, 512, 7, 7, kernel=3), False),
    ],
    ids=["many pixels", "many pixels, 1x1", "many weights", "many weights, 3x3"],
)
def test_what_is_larger_is_walked_once(layer, by_rows):
    assert choose_conv_tile(layer, AVX512).by_rows is by_rows


def test_seven_rows_are_no_even_share_for_two():
    assert not choose_conv_tile(shape(160, 960, 7, 7), AVX512).by_rows
    assert shares(7, 2) == pytest.approx(8 / 7)
    assert shares(8, 2) == 1


def test_a_small_layer_stays_in_one_thread():
    assert not choose_conv_tile(shape(96, 32, 1, 1), AVX512).is_parallel
    assert choose_conv_tile(shape(64, 64, 56, 56), AVX512).is_parallel


@pytest.mark.parametrize(("columns", "most"), [(14, 14), (31, 14), (13, 14), (1, 7), (112, 14), (15, 7)])
def test_pixels_waste_least(columns, most):
    pixels = choose_pixels(columns, most)

    def waste(count):
        return math.ceil(columns / count) * count

    assert pixels <= most
    assert all(waste(pixels) <= waste(other) for other in range(1, min(columns, most) + 1))
