"""Dense layers on a CPU with packed weights: a tile of results in registers, each weight read once.

::

    staged = the rows                                    where there are several, or a prologue
    parallel for blocks of result channels, some rows:
        acc[row, block] = 0                                   in registers
        for k:
            acc[row, block] += staged[row, k] * weight[block, k]
        out[row, block] = what follows(acc)                   in registers

One row is as fast as memory gives weights: a core follows as many streams of them as its tile has blocks.
Staged rows are padded, since rows a power of two apart meet in one set of the cache.

Layouts: data ``(M, K)``, weight ``(N / n, K, n)``, result ``(M, N)``. Numerics: float32 sums in the order of
k. Source: see ``cpu_tiles.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cpu_stages import LEAST_BYTES, inline_around, share
from tvm_fuse_schedules.cpu_tiles import ConvShape, ConvTile, Cpu, choose_conv_tile
from tvm_fuse_schedules.cuda_kernel import find_stage

__all__ = ["DenseKernel", "plan_dense"]

_BYTES = 4
#: Numbers in a line of a cache; a staged row begins one line after a multiple of four of them.
_LINE = 16


@dataclass(frozen=True)
class DenseKernel:
    """A dense layer with its tile.

    Args:
        rows: M.
        depth: K.
        weight: Shape ``(N / n, K, n)``.
        tile: Blocks of result channels and rows (its ``pixels``) in registers.
    """

    rows: int
    depth: int
    weight: tuple[int, ...]
    tile: ConvTile

    def compute(self, data: Any, weight: Any) -> Any:
        """The product; rows are computed to a multiple of the tile's."""
        blocks, _, lanes = self.weight
        rows = math.ceil(self.rows / self.tile.pixels) * self.tile.pixels
        if rows > 1 or not isinstance(data.op, te.PlaceholderOp):
            data = self._stage(data, rows)
        k = te.reduce_axis((0, self.depth), "k")
        sums = te.compute(
            (rows, blocks, lanes),
            lambda m, n, lane: te.sum(data[m, k] * weight[n, k, lane], axis=k),
            name="dense_sums",
        )
        return te.compute(
            (self.rows, blocks * lanes),
            lambda m, n: sums[m, n // lanes, n % lanes],
            name="dense",
            tag="tvm_fuse_dense",
        )

    def _stage(self, data: Any, rows: int) -> Any:
        def value(m: Any, k: Any) -> Any:
            if rows == self.rows:
                return data[m, k]
            return tir.if_then_else(m < self.rows, data[m, k], tir.const(0, data.dtype))

        return te.compute((rows, self.depth), value, name="staged", tag="tvm_fuse_staged")

    def schedule(self, output: Any) -> te.Schedule:
        """Schedule the layer and what is fused with it.

        Args:
            output: The result tensor of the group, shape ``(M, N)``.

        Returns:
            The schedule.
        """
        tile, result, sums = self.tile, find_stage(output, "dense"), find_stage(output, "dense_sums")
        staged = [tensor for tensor in sums.op.input_tensors if tensor.op.name == "staged"]
        schedule = te.create_schedule(output.op)
        stage = schedule[inline_around(schedule, output, result, sums, *staged)]
        m, n = stage.op.axis
        block, lane = stage.split(n, factor=self.weight[2])
        blocks, block = stage.split(block, factor=tile.blocks)
        rows, row = stage.split(m, factor=tile.pixels)
        stage.reorder(blocks, rows, row, block, lane)
        task = stage.fuse(blocks, rows)
        share(stage, task, tile.is_parallel)
        for axis in (row, block):
            stage.unroll(axis)
        stage.vectorize(lane)
        schedule[sums].compute_at(stage, task)
        self._keep_in_registers(schedule[sums])
        for tensor in staged:
            self._copy_rows(schedule[tensor])
        return schedule

    def _keep_in_registers(self, stage: te.Stage) -> None:
        m, n, lane = stage.op.axis
        (k,) = stage.op.reduce_axis
        stage.reorder(k, m, n, lane)
        for axis in (m, n):
            stage.unroll(axis)
        stage.vectorize(lane)

    def _copy_rows(self, stage: te.Stage) -> None:
        row, k = stage.op.axis
        stage.storage_align(row, 4 * _LINE, _LINE)
        if self.depth % _LINE == 0:
            _, lane = stage.split(k, factor=_LINE)
            stage.vectorize(lane)
        share(stage, row, self.tile.is_parallel and _BYTES * self.rows * self.depth >= LEAST_BYTES)


def plan_dense(data: tuple[int, ...], weight: tuple[int, ...], cpu: Cpu) -> DenseKernel:
    """Choose the tile of a float32 dense layer.

    Args:
        data: Shape ``(M, K)``.
        weight: Shape ``(N / n, K, n)``.
        cpu: Where it runs.

    Returns:
        The kernel.
    """
    (rows, depth), (blocks, _, lanes) = data, weight
    shape = ConvShape(
        images=1,
        depth=depth,
        blocks=blocks,
        lanes=lanes,
        rows=1,
        columns=rows,
        taps=1,
        data_bytes=_BYTES * rows * depth,
        weight_bytes=_BYTES * math.prod(weight),
    )
    tile = choose_conv_tile(shape, cpu)
    is_parallel = tile.is_parallel or shape.weight_bytes >= LEAST_BYTES
    return DenseKernel(rows, depth, weight, replace(tile, is_parallel=is_parallel))
