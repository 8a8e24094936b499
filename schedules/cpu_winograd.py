"""3x3 convolutions with stride 1 on a CPU by Winograd's F(m x m, 3 x 3), in blocked layout.

Three loops, each shared by the threads::

    parallel for block of channels, row of tiles:
        staged = the padded rows that are read
        for tile:  v[:, :, c, tile] = B^T d B                         unrolled, in registers
    parallel for i, j of the (m + 2)^2 products of a tile:
        m[i, j, o, tile] = sum over c of v[i, j, c, tile] * u[i, j, o, c]        a matrix product
    parallel for block of result channels, row of tiles:
        for tile:  out[tile] = what follows(A^T m A)                  unrolled, in registers

The weights ``u`` are transformed when the model is built, and are read once by each thread in all.
Layouts: data and result ``NCHW{c}c``. Numerics: see ``tvm_fuse/core/winograd.py``. Source: Lavin and Gray,
arXiv 1509.09308, algorithm 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from tvm import te, tir

from tvm_fuse.core.winograd import TILES, Winograd, make_winograd
from tvm_fuse_schedules.cpu_conv2d import BlockedConv
from tvm_fuse_schedules.cpu_stages import copy_by_vectors, inline_around, pad_pixels
from tvm_fuse_schedules.cpu_tiles import ConvShape, Cpu, choose_conv_tile
from tvm_fuse_schedules.cuda_kernel import find_stage

__all__ = ["WinogradKernel", "make_kernel", "plan_winograd"]

_KERNEL = 3
_BYTES = 4
#: Bytes a clock that weights come at where no cache holds them, for all threads together.
_BYTES_A_CLOCK = 8
#: Clocks that two more loops for all threads cost: some microseconds each, to hand over and to meet again.
_HAND_OVER = 30_000
#: The algorithm must promise to take less than this share of the direct sum's time.
_WORTH = 0.9


@dataclass(frozen=True)
class WinogradKernel:
    """A convolution by Winograd's algorithm.

    Args:
        conv: The convolution; its weight has shape ``(O, C, 3, 3, c, o)``.
        winograd: The matrices.
        blocks: Blocks of result channels in registers; divides their number.
        tiles: Tiles in registers; divides their number.
    """

    conv: BlockedConv
    winograd: Winograd
    blocks: int
    tiles: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Images, rows and columns of tiles."""
        images, _, height, width, _ = self.conv.result
        return images, math.ceil(height / self.winograd.tile), math.ceil(width / self.winograd.tile)

    def estimate(self, cpu: Cpu) -> float:
        """Clocks: one multiply-add of vectors a clock and thread, weights at their rate, and handing over."""
        products, tiles = self.winograd.reads**2, math.prod(self.grid)
        depth, lanes, blocks = self.conv.data[1], self.conv.data[4], self.conv.result[1]
        sums = products * tiles * depth * lanes * blocks
        transforms = 4 * products * tiles * (depth + blocks)
        weights = _BYTES * products * math.prod(self.conv.weight) / _KERNEL**2
        return (sums + transforms) / cpu.threads + weights / _BYTES_A_CLOCK + _HAND_OVER

    def compute(self, data: Any, weight: Any) -> Any:
        """The convolution.

        Args:
            data: Shape ``(N, C, H, W, c)``.
            weight: Transformed, shape ``(m + 2, m + 2, O, C, c, o)``.

        Returns:
            Shape ``(N, O, OH, OW, o)``.
        """
        conv, (tile, reads) = self.conv, (self.winograd.tile, self.winograd.reads)
        (images, rows, columns), (_, blocks, _, _, lanes) = self.grid, conv.result
        top, left = conv.padding[:2]
        staged = pad_pixels(data, (top, left), (rows * tile + 2, columns * tile + 2))
        values = self._transform_data(staged)
        outer, inner = te.reduce_axis((0, conv.data[1]), "c"), te.reduce_axis((0, conv.data[4]), "ci")
        sums = te.compute(
            (reads, reads, blocks, images * rows * columns, lanes),
            lambda i, j, o, t, lane: te.sum(
                values[i, j, outer, t, inner] * weight[i, j, o, outer, inner, lane], axis=[outer, inner]
            ),
            name="winograd_sums",
        )
        results = self._transform_result(sums)
        return te.compute(conv.result, lambda *index: results(*index), name="winograd", tag="tvm_fuse_conv2d")

    def _transform_data(self, staged: Any) -> Any:
        """``B^T d B``: shape ``(m + 2, m + 2, C, tiles, c)``."""
        (images, rows, columns), tile, reads = self.grid, self.winograd.tile, self.winograd.reads
        blocks, lanes = self.conv.data[1], self.conv.data[4]
        down, across = te.reduce_axis((0, reads), "down"), te.reduce_axis((0, reads), "across")
        halves = te.compute(
            (blocks, images * rows * columns, reads, reads, lanes),
            lambda c, t, i, x, lane: te.sum(
                _at(self.winograd.data, i, down.var)
                * staged[
                    t // (rows * columns),
                    c,
                    t // columns % rows * tile + down,
                    t % columns * tile + x,
                    lane,
                ],
                axis=down,
            ),
            name="winograd_half_data",
        )
        return te.compute(
            (reads, reads, blocks, images * rows * columns, lanes),
            lambda i, j, c, t, lane: te.sum(
                halves[c, t, i, across, lane] * _at(self.winograd.data, j, across.var), axis=across
            ),
            name="winograd_data",
        )

    def _transform_result(self, sums: Any) -> Any:
        """``A^T m A``: shape ``(N, O, rows * m, columns * m, o)``."""
        (images, rows, columns), tile, reads = self.grid, self.winograd.tile, self.winograd.reads
        blocks, lanes = self.conv.result[1], self.conv.result[4]
        down, across = te.reduce_axis((0, reads), "down"), te.reduce_axis((0, reads), "across")
        halves = te.compute(
            (images, blocks, rows, columns, tile, reads, lanes),
            lambda n, o, ty, tx, y, j, lane: te.sum(
                _at(self.winograd.result, y, down.var)
                * sums[down, j, o, (n * rows + ty) * columns + tx, lane],
                axis=down,
            ),
            name="winograd_half_result",
        )
        return te.compute(
            (images, blocks, rows * tile, columns * tile, lanes),
            lambda n, o, y, x, lane: te.sum(
                halves[n, o, y // tile, x // tile, y % tile, across, lane]
                * _at(self.winograd.result, x % tile, across.var),
                axis=across,
            ),
            name="winograd_result",
        )

    def schedule(self, output: Any) -> te.Schedule:
        """Schedule the convolution and what is fused with it.

        Args:
            output: The result tensor of the group.

        Returns:
            The schedule.
        """
        find = functools.partial(find_stage, output)
        names = ("staged", "half_data", "data", "sums", "half_result", "result")
        stages = {name: find(name if name == "staged" else f"winograd_{name}") for name in names}
        schedule = te.create_schedule(output.op)
        stored = inline_around(schedule, output, find("winograd"), *stages.values())
        self._schedule_data(schedule, stages)
        self._schedule_sums(schedule, stages["sums"])
        self._schedule_result(schedule, stored, stages)
        return schedule

    def _schedule_data(self, schedule: te.Schedule, stages: dict[str, Any]) -> None:
        values = schedule[stages["data"]]
        i, j, c, t, _ = values.op.axis
        row, column = values.split(t, factor=self.grid[2])
        lane = values.op.axis[-1]
        (across,) = values.op.reduce_axis
        values.reorder(c, row, column, i, j, across, lane)
        values.parallel(values.fuse(c, row))
        _unroll(values, i, j, across)
        values.vectorize(lane)
        halves = schedule[stages["half_data"]]
        halves.compute_at(values, column)
        *outer, lane = halves.op.axis
        (down,) = halves.op.reduce_axis
        halves.reorder(*outer, down, lane)
        _unroll(halves, *outer, down)
        halves.vectorize(lane)
        copy_by_vectors(schedule[stages["staged"]])
        schedule[stages["staged"]].compute_at(values, values.leaf_iter_vars[0])

    def _schedule_sums(self, schedule: te.Schedule, sums: Any) -> None:
        local = schedule.cache_write(sums, "local")
        stage = schedule[sums]
        i, j, o, t, lane = stage.op.axis
        outer, block = stage.split(o, factor=self.blocks)
        tiles, tile = stage.split(t, factor=self.tiles)
        stage.reorder(i, j, outer, tiles, block, tile, lane)
        stage.parallel(stage.fuse(i, j, outer) if self.conv.result[1] > 8 * self.blocks else stage.fuse(i, j))
        _unroll(stage, block, tile)
        stage.vectorize(lane)
        inner = schedule[local]
        inner.compute_at(stage, tiles)
        i, j, o, t, lane = inner.op.axis
        inner.reorder(*inner.op.reduce_axis, i, j, t, o, lane)
        _unroll(inner, i, j, t, o)
        inner.vectorize(lane)

    def _schedule_result(self, schedule: te.Schedule, stored: Any, stages: dict[str, Any]) -> None:
        stage, tile = schedule[stored], self.winograd.tile
        n, o, y, x, lane = stage.op.axis
        rows, row = stage.split(y, factor=tile)
        columns, column = stage.split(x, factor=tile)
        stage.reorder(n, o, rows, columns, row, column, lane)
        stage.parallel(stage.fuse(n, o, rows))
        _unroll(stage, row, column)
        stage.vectorize(lane)
        for name in ("result", "half_result"):
            inner = schedule[stages[name]]
            inner.compute_at(stage, columns)
            *outer, lane = inner.op.axis
            inner.reorder(*outer, *inner.op.reduce_axis, lane)
            _unroll(inner, *outer, *inner.op.reduce_axis)
            inner.vectorize(lane)


def _at(matrix: tuple[tuple[float, ...], ...], row: Any, column: Any) -> Any:
    """An element of a constant matrix; where row and column are unrolled a number is left."""
    value: Any = tir.const(0.0, "float32")
    for i, numbers in enumerate(matrix):
        for j, number in enumerate(numbers):
            if number:
                value = tir.Select(tir.all(row == i, column == j), tir.const(number, "float32"), value)
    return value


def _unroll(stage: te.Stage, *axes: Any) -> None:
    for axis in axes:
        stage.unroll(axis)


def plan_winograd(conv: BlockedConv, cpu: Cpu) -> WinogradKernel | None:
    """Choose the tile that takes least by the estimate below.

    Args:
        conv: The convolution, without groups.
        cpu: Where it runs.

    Returns:
        The kernel; None where the algorithm does not apply, or the direct sum is estimated to be as fast.
    """
    if conv.weight[2:4] != (_KERNEL, _KERNEL) or {*conv.strides, *conv.dilation} != {1}:
        return None
    kernels = [make_kernel(conv, tile, cpu) for tile in TILES]
    fastest = min(kernels, key=lambda kernel: kernel.estimate(cpu))
    images, _, height, width, _ = conv.result
    products = images * height * width * math.prod(conv.weight[:5])
    direct = products / cpu.threads + _BYTES * math.prod(conv.weight) / _BYTES_A_CLOCK
    return fastest if fastest.estimate(cpu) < _WORTH * direct else None


def make_kernel(conv: BlockedConv, tile: int, cpu: Cpu) -> WinogradKernel:
    """The kernel for a size of tiles, with what fits in registers.

    Args:
        conv: The convolution.
        tile: One of ``tvm_fuse.core.winograd.TILES``.
        cpu: Where it runs.
    """
    count = math.prod(WinogradKernel(conv, make_winograd(tile), 1, 1).grid)
    shape = ConvShape(
        images=1,
        depth=conv.data[1] * conv.data[4],
        blocks=conv.weight[0],
        lanes=conv.weight[5],
        rows=(tile + 2) ** 2,
        columns=count,
        taps=1,
        data_bytes=0,
        weight_bytes=0,
    )
    chosen = choose_conv_tile(shape, cpu, only_whole=True)
    return WinogradKernel(conv, make_winograd(tile), chosen.blocks, chosen.pixels)
