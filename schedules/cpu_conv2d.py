"""conv2d on a CPU in blocked layout: a tile of results in registers, what follows it computed there.

::

    parallel for some rows (or some blocks of channels):
        staged = the padded rows that are read               where there is padding, or a prologue
        for block, row, pixels:
            acc[block, pixel] = 0                             in registers
            for c, ky, kx, lane of c:
                acc[block, pixel] += staged[c, y * sy + ky, x * sx + kx, lane] * weight[...]
            out[block, pixel] = what follows(acc)             in registers

Layouts: data ``NCHW{i}c``, weight ``OIHW{i}i{o}o``, result ``NCHW{o}c``. Any strides, padding and dilation;
no groups. Numerics: float32 sums in the order c, ky, kx, lane. Source: see ``cpu_tiles.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te

from tvm_fuse_schedules.cpu_stages import copy_by_vectors, inline_around, pad_pixels, share
from tvm_fuse_schedules.cpu_tiles import ConvShape, ConvTile, Cpu, choose_conv_tile
from tvm_fuse_schedules.cuda_kernel import find_stage

__all__ = ["BlockedConv", "plan_conv2d"]

_BYTES = 4


@dataclass(frozen=True)
class BlockedConv:
    """A convolution in blocked layout.

    Args:
        data: Shape ``(N, C, H, W, c)``.
        weight: Shape ``(O, C, KH, KW, c, o)``; of a depthwise one ``(C, 1, KH, KW, 1, c)``.
        strides: Of height and width.
        padding: Top, left, bottom, right.
        dilation: Of height and width.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)

    @property
    def result(self) -> tuple[int, int, int, int, int]:
        """Shape ``(N, O, OH, OW, o)``."""
        height, width = (
            (self.data[2 + i] + self.padding[i] + self.padding[2 + i] - self.reach[i]) // self.strides[i] + 1
            for i in range(2)
        )
        return self.data[0], self.weight[0], height, width, self.weight[5]

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that one result reads."""
        height, width = ((self.weight[2 + i] - 1) * self.dilation[i] + 1 for i in range(2))
        return height, width

    def read(self, rows: int, columns: int) -> tuple[int, int]:
        """Height and width of the pixels that so many rows and columns of results read."""
        sizes = zip((rows, columns), self.strides, self.reach)
        height, width = ((size - 1) * stride + reach for size, stride, reach in sizes)
        return height, width

    def stage(self, data: Any, rows: int, columns: int) -> Any:
        """The data that so many rows and columns of results read: itself, or padded rows of it.

        Args:
            data: The tensor, or what a prologue computes.
            rows: Of the results; they may be more than there are.
            columns: Likewise.

        Returns:
            A tensor whose first pixel the first result reads.
        """
        sizes = self.read(rows, columns)
        reads_beyond = any(size > have for size, have in zip(sizes, self.data[2:]))
        if not any(self.padding) and not reads_beyond and isinstance(data.op, te.PlaceholderOp):
            return data
        return pad_pixels(data, (self.padding[0], self.padding[1]), sizes)


@dataclass(frozen=True)
class Conv2dKernel:
    """A convolution with its tile."""

    conv: BlockedConv
    tile: ConvTile

    def compute(self, data: Any, weight: Any) -> Any:
        """The convolution; rows are computed to a multiple of the tile's pixels."""
        conv, (images, blocks, rows, columns, lanes) = self.conv, self.conv.result
        columns = math.ceil(columns / self.tile.pixels) * self.tile.pixels
        data = conv.stage(data, rows, columns)
        outer, inner = te.reduce_axis((0, conv.data[1]), "c"), te.reduce_axis((0, conv.data[4]), "lane")
        ky, kx = (te.reduce_axis((0, size), name) for size, name in zip(conv.weight[2:4], ("ky", "kx")))
        (sy, sx), (dy, dx) = conv.strides, conv.dilation
        sums = te.compute(
            (images, blocks, rows, columns, lanes),
            lambda n, o, y, x, lane: te.sum(
                data[n, outer, y * sy + ky * dy, x * sx + kx * dx, inner]
                * weight[o, outer, ky, kx, inner, lane],
                axis=[outer, ky, kx, inner],
            ),
            name="conv2d_sums",
        )
        return te.compute(conv.result, lambda *index: sums(*index), name="conv2d", tag="tvm_fuse_conv2d")

    def schedule(self, output: Any) -> te.Schedule:
        """Schedule the convolution and what is fused with it.

        Args:
            output: The result tensor of the group.

        Returns:
            The schedule.
        """
        tile = self.tile
        result, sums = find_stage(output, "conv2d"), find_stage(output, "conv2d_sums")
        data, _ = sums.op.input_tensors
        staged = [data] if data.op.name == "staged" else []
        schedule = te.create_schedule(output.op)
        stored = inline_around(schedule, output, result, sums, *staged)
        n, o, y, x, lane = schedule[stored].op.axis
        stage = schedule[stored]
        blocks, block = stage.split(o, factor=tile.blocks)
        pixels, pixel = stage.split(x, factor=tile.pixels)
        if tile.by_rows:
            rows, row = stage.split(y, factor=tile.rows)
            stage.reorder(n, rows, blocks, row, pixels, block, pixel, lane)
            task = stage.fuse(n, rows)
        else:
            stage.reorder(n, blocks, y, pixels, block, pixel, lane)
            task = stage.fuse(n, blocks)
        share(stage, task, tile.is_parallel)
        for axis in (block, pixel):
            stage.unroll(axis)
        stage.vectorize(lane)
        schedule[sums].compute_at(stage, pixels)
        _keep_in_registers(schedule[sums])
        for tensor in staged:
            copy_by_vectors(schedule[tensor])
            if tile.by_rows:
                schedule[tensor].compute_at(stage, task)
            else:
                share(
                    schedule[tensor], schedule[tensor].fuse(*schedule[tensor].op.axis[:3]), tile.is_parallel
                )
        return schedule


def _keep_in_registers(stage: te.Stage) -> None:
    n, o, y, x, lane = stage.op.axis
    stage.reorder(*stage.op.reduce_axis, n, y, x, o, lane)
    for axis in (n, o, y, x):
        stage.unroll(axis)
    stage.vectorize(lane)


def plan_conv2d(conv: BlockedConv, cpu: Cpu) -> Conv2dKernel:
    """Choose the tile of a float32 convolution without groups.

    Args:
        conv: The convolution.
        cpu: Where it runs.

    Returns:
        The kernel.
    """
    images, blocks, rows, columns, lanes = conv.result
    shape = ConvShape(
        images=images,
        depth=conv.data[1] * conv.data[4],
        blocks=blocks,
        lanes=lanes,
        rows=rows,
        columns=columns,
        taps=math.prod(conv.weight[2:4]),
        data_bytes=_BYTES * math.prod(conv.data),
        weight_bytes=_BYTES * math.prod(conv.weight),
    )
    return Conv2dKernel(conv, choose_conv_tile(shape, cpu))
