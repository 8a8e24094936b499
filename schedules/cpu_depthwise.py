"""Depthwise conv2d on a CPU in blocked layout: some pixels of a row in registers.

::

    parallel for image, block of channels, some rows:
        staged = the padded rows that are read               where there is padding, or a prologue
        for row, pixels:
            acc[pixel] = 0                                    in registers
            unrolled for ky, kx:
                acc[pixel] += staged[y * sy + ky, x * sx + kx] * weight[ky, kx]
            out[pixel] = what follows(acc)                    in registers

Layouts: data and result ``NCHW{c}c``, weight ``OIHW1i{c}o``; one result channel for each channel. Any
strides, padding and dilation. Numerics: float32 sums in the order ky, kx. Source: the textbook stencil.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te

from tvm_fuse_schedules.cpu_conv2d import BlockedConv
from tvm_fuse_schedules.cpu_stages import copy_by_vectors, inline_around, share
from tvm_fuse_schedules.cpu_tiles import Cpu, choose_pixels
from tvm_fuse_schedules.cuda_kernel import find_stage

__all__ = ["plan_depthwise"]

_BYTES = 4
#: Staged rows of a task: some of the first cache of a core.
_STAGED_BYTES = 48 << 10
_LEAST_WORK = 20_000
#: Taps that are unrolled.
_MOST_UNROLLED = 25


@dataclass(frozen=True)
class DepthwiseKernel:
    """A depthwise convolution with its tile.

    Args:
        conv: The convolution.
        pixels: Pixels of a row in registers; the row is computed to a multiple of it.
        rows: Rows of a task.
        is_parallel: Whether threads pay.
    """

    conv: BlockedConv
    pixels: int
    rows: int
    is_parallel: bool

    def compute(self, data: Any, weight: Any) -> Any:
        """The convolution; rows are computed to a multiple of `pixels`."""
        conv, (images, blocks, rows, columns, lanes) = self.conv, self.conv.result
        columns = math.ceil(columns / self.pixels) * self.pixels
        data = conv.stage(data, rows, columns)
        ky, kx = (te.reduce_axis((0, size), name) for size, name in zip(conv.weight[2:4], ("ky", "kx")))
        (sy, sx), (dy, dx) = conv.strides, conv.dilation
        sums = te.compute(
            (images, blocks, rows, columns, lanes),
            lambda n, c, y, x, lane: te.sum(
                data[n, c, y * sy + ky * dy, x * sx + kx * dx, lane] * weight[c, 0, ky, kx, 0, lane],
                axis=[ky, kx],
            ),
            name="depthwise_sums",
        )
        return te.compute(
            conv.result, lambda *index: sums(*index), name="depthwise", tag="tvm_fuse_depthwise"
        )

    def schedule(self, output: Any) -> te.Schedule:
        """Schedule the convolution and what is fused with it.

        Args:
            output: The result tensor of the group.

        Returns:
            The schedule.
        """
        result, sums = find_stage(output, "depthwise"), find_stage(output, "depthwise_sums")
        data, _ = sums.op.input_tensors
        staged = [data] if data.op.name == "staged" else []
        schedule = te.create_schedule(output.op)
        stored = inline_around(schedule, output, result, sums, *staged)
        stage = schedule[stored]
        n, c, y, x, lane = stage.op.axis
        rows, row = stage.split(y, factor=self.rows)
        pixels, pixel = stage.split(x, factor=self.pixels)
        stage.reorder(n, c, rows, row, pixels, pixel, lane)
        task = stage.fuse(n, c, rows)
        share(stage, task, self.is_parallel)
        stage.unroll(pixel)
        stage.vectorize(lane)
        schedule[sums].compute_at(stage, pixels)
        self._keep_in_registers(schedule[sums])
        for tensor in staged:
            copy_by_vectors(schedule[tensor])
            schedule[tensor].compute_at(stage, task)
        return schedule

    def _keep_in_registers(self, stage: te.Stage) -> None:
        n, c, y, x, lane = stage.op.axis
        taps = stage.op.reduce_axis
        stage.reorder(*taps, n, c, y, x, lane)
        unrolled = (n, c, y, x, *(taps if math.prod(self.conv.weight[2:4]) <= _MOST_UNROLLED else ()))
        for axis in unrolled:
            stage.unroll(axis)
        stage.vectorize(lane)


def plan_depthwise(conv: BlockedConv, cpu: Cpu) -> DepthwiseKernel:
    """Choose the tile of a float32 depthwise convolution.

    Args:
        conv: The convolution.
        cpu: Where it runs.

    Returns:
        The kernel.
    """
    images, blocks, height, width, lanes = conv.result
    pixels = choose_pixels(width, 14 if cpu.registers >= 32 else 7)
    row_bytes = _BYTES * lanes * conv.read(1, width)[1]
    fit = max(1, (_STAGED_BYTES // row_bytes - conv.reach[0]) // conv.strides[0] + 1)
    parts = math.ceil(height / fit)
    work = images * blocks * height * width * math.prod(conv.weight[2:4])
    return DepthwiseKernel(conv, pixels, math.ceil(height / parts), work >= _LEAST_WORK)
