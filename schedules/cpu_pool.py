"""Pooling by windows on a CPU in blocked layout: some pixels of a row in registers.

::

    parallel for image, block of channels, some rows:
        for row, pixels:
            acc[pixel] = 0 (or the least number)              in registers
            unrolled for ky, kx:
                acc[pixel] += padded[y * sy + ky, x * sx + kx]        (or the larger one)
            out[pixel] = what follows(acc / pixels that count)

Padding is no copy: TVM proves for most of the unrolled pixels that they are inside, and leaves a test in the
others. Staged rows, as convolutions have them, were slower (142 to 57 us, one thread, 3x3 with stride 2 of
64x112x112): each element is read too few times.

Layout: ``NCHW{c}c``. Any window, strides, padding and dilation. Numerics: float32 sums in the order ky, kx,
times the reciprocal of their number. Source: the textbook stencil; what counts as in ONNX's ``AveragePool``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cpu_conv2d import BlockedConv
from tvm_fuse_schedules.cpu_stages import LEAST_BYTES, inline_around, pad_pixels, share
from tvm_fuse_schedules.cpu_tiles import Cpu, choose_pixels
from tvm_fuse_schedules.cuda_kernel import find_stage

__all__ = ["Pool", "PoolKernel", "plan_pool"]

_BYTES = 4
#: What a task reads: some of the second cache of a core.
_TASK_BYTES = 128 << 10
#: Taps that are unrolled.
_MOST_UNROLLED = 25


@dataclass(frozen=True)
class Pool:
    """What a pooling computes.

    Args:
        window: As a convolution; its padding below and to the right reaches to the end of the last window.
        is_max: The largest element, not the mean.
        counted: Rows and columns of padding that count for a mean: top, left, bottom, right.
    """

    window: BlockedConv
    is_max: bool
    counted: tuple[int, ...] = (0, 0, 0, 0)

    def count(self, y: Any, x: Any) -> Any:
        """Elements that a mean is over, as float32."""
        counts = [self._count(axis, place) for axis, place in enumerate((y, x))]
        return tir.Cast("float32", counts[0] * counts[1])

    def _count(self, axis: int, place: Any) -> Any:
        window = self.window
        size, dilation = window.weight[2 + axis], window.dilation[axis]
        start = place * window.strides[axis] - window.padding[axis]
        low, high = -self.counted[axis], window.data[2 + axis] + self.counted[2 + axis]
        first = te.max(0, (low - start + dilation - 1) // dilation)
        last = te.min(size, (high - start + dilation - 1) // dilation)
        return te.max(1, last - first)

    @property
    def is_whole(self) -> bool:
        """Whether every window lies in what counts."""
        window, (height, width) = self.window, self.window.read(*self.window.result[2:4])
        ends = (height - window.padding[0], width - window.padding[1])
        return all(
            window.padding[axis] <= self.counted[axis]
            and ends[axis] <= window.data[2 + axis] + self.counted[2 + axis]
            for axis in range(2)
        )


@dataclass(frozen=True)
class PoolKernel:
    """A pooling with its tile.

    Args:
        pool: What it computes.
        pixels: Pixels of a row in registers; the row is computed to a multiple of it.
        rows: Rows of a task.
        is_parallel: Whether threads pay.
    """

    pool: Pool
    pixels: int
    rows: int
    is_parallel: bool

    def compute(self, data: Any) -> Any:
        """The pooling; rows are computed to a multiple of `pixels`."""
        window, (images, blocks, rows, columns, lanes) = self.pool.window, self.pool.window.result
        wide = math.ceil(columns / self.pixels) * self.pixels
        outside = float(tir.min_value("float32").value) if self.pool.is_max else 0.0
        sizes = window.read(rows, wide)
        padded = pad_pixels(data, (window.padding[0], window.padding[1]), sizes, outside)
        ky, kx = (te.reduce_axis((0, size), name) for size, name in zip(window.weight[2:4], ("ky", "kx")))
        (sy, sx), (dy, dx) = window.strides, window.dilation
        combine = te.max if self.pool.is_max else te.sum
        sums = te.compute(
            (images, blocks, rows, wide, lanes),
            lambda n, c, y, x, lane: combine(
                padded[n, c, y * sy + ky * dy, x * sx + kx * dx, lane], axis=[ky, kx]
            ),
            name="pool_sums",
        )

        def value(n: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
            total = sums[n, c, y, x, lane]
            if self.pool.is_max:
                return total
            if self.pool.is_whole:
                return total * tir.const(1 / math.prod(window.weight[2:4]), "float32")
            return total * (tir.const(1, "float32") / self.pool.count(y, x))

        return te.compute(window.result, value, name="pool", tag="tvm_fuse_pool")

    def schedule(self, output: Any) -> te.Schedule:
        """Schedule the pooling and what is fused with it.

        Args:
            output: The result tensor of the group.

        Returns:
            The schedule.
        """
        result, sums = find_stage(output, "pool"), find_stage(output, "pool_sums")
        schedule = te.create_schedule(output.op)
        stage = schedule[inline_around(schedule, output, result, sums)]
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
        return schedule

    def _keep_in_registers(self, stage: te.Stage) -> None:
        *places, lane = stage.op.axis
        taps = stage.op.reduce_axis
        stage.reorder(*taps, *places, lane)
        is_small = math.prod(self.pool.window.weight[2:4]) <= _MOST_UNROLLED
        for axis in (*places, *(taps if is_small else ())):
            stage.unroll(axis)
        stage.vectorize(lane)


def plan_pool(pool: Pool, cpu: Cpu) -> PoolKernel:
    """Choose the tile of a float32 pooling.

    Args:
        pool: What it computes.
        cpu: Where it runs.

    Returns:
        The kernel.
    """
    window, (images, blocks, height, width, _) = pool.window, pool.window.result
    data_bytes = _BYTES * math.prod(window.data) // (images * blocks)
    parts = min(height, max(math.ceil(data_bytes / _TASK_BYTES), math.ceil(cpu.threads / (images * blocks))))
    moved = _BYTES * (math.prod(window.data) + math.prod(window.result) * math.prod(window.weight[2:4]))
    pixels = choose_pixels(width, 14 if cpu.registers >= 32 else 7)
    return PoolKernel(pool, pixels, math.ceil(height / parts), moved >= LEAST_BYTES)
