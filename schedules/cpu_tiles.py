"""What a core of a CPU works on at a time: how many results stay in registers, and who computes which.

A convolution in blocked layout is, for one row of pixels, a product with the weights::

    acc[block, pixel] += data[pixel, term] * weight[term, block]     block: one vector of channels

One step of ``term`` costs, in clocks of a core with two units for multiply-adds and two for loads::

    max(blocks * pixels / 2,  (blocks + pixels) / 2,  latency)  +  blocks / 4

The last term is for weights, which come from the second cache; fitted to what layers of ResNet-50 took.

The tile is the one that costs least for each multiply-add, where what stays in registers fits, all sizes
divide, and the threads get equal shares. Registers were checked in the assembly: with more than
`_FREE_REGISTERS` left out of the count LLVM spills.

Source: the model of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34
(2008), down to the registers; layout and tiles as in Georganas et al., "Anatomy of High-Performance Deep
Learning Convolutions on SIMD Architectures", arXiv 1808.05567.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ConvShape", "ConvTile", "Cpu", "choose_conv_tile", "choose_pixels", "shares"]

#: Clocks from one multiply-add to another that reads its result.
_LATENCY = 4
#: Registers that LLVM 10 needs besides accumulators and weights.
_FREE_REGISTERS = 6
#: Most pixels of a row in registers: each is unrolled.
_MOST_PIXELS = 28
#: A task should do at least so many multiply-adds of vectors: some microseconds.
_LEAST_WORK = 20_000


@dataclass(frozen=True)
class Cpu:
    """What a schedule must know of a CPU.

    Args:
        lanes: Float32 numbers in a vector.
        registers: Vector registers.
        threads: Threads that share a kernel.
        l2_bytes: Cache that a core has for itself.
    """

    lanes: int
    registers: int
    threads: int
    l2_bytes: int = 1 << 20


@dataclass(frozen=True)
class ConvShape:
    """A convolution in blocked layout.

    Args:
        images: N.
        depth: Channels that a result sums over.
        blocks: Blocks of result channels.
        lanes: Channels in a block.
        rows, columns: Pixels of the result.
        taps: KH * KW.
        data_bytes, weight_bytes: Of the operands.
    """

    images: int
    depth: int
    blocks: int
    lanes: int
    rows: int
    columns: int
    taps: int
    data_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class ConvTile:
    """How a convolution is cut.

    Args:
        blocks: Blocks of result channels in registers.
        pixels: Pixels of a row in registers; the row is computed to a multiple of it.
        rows: Rows of a task.
        by_rows: Whether tasks are rows with all channels, not channels with all rows.
        is_parallel: Whether threads pay.
    """

    blocks: int
    pixels: int
    rows: int
    by_rows: bool
    is_parallel: bool


def choose_conv_tile(shape: ConvShape, cpu: Cpu, only_whole: bool = False) -> ConvTile:
    """The tile that costs least by the rule above.

    Args:
        shape: The convolution.
        cpu: Where it runs.
        only_whole: Whether the pixels of a tile must divide a row.

    Returns:
        The tile.
    """
    tiles = [
        (blocks, pixels)
        for blocks in _divisors(shape.blocks)
        for pixels in range(1, min(shape.columns, _MOST_PIXELS) + 1)
        if not (only_whole and shape.columns % pixels)
        if _fit_in_registers(blocks, pixels, cpu) or blocks * pixels == 1
    ]
    by_rows = _prefers_rows(shape, cpu)

    def cost(tile: tuple[int, int]) -> tuple[float, int]:
        blocks, pixels = tile
        step = max(blocks * pixels / 2, (blocks + pixels) / 2, _LATENCY) + blocks / 4
        waste = math.ceil(shape.columns / pixels) * pixels / shape.columns
        tasks = shape.images * (shape.rows if by_rows else shape.blocks // blocks)
        return round(step / (blocks * pixels) * waste * shares(tasks, cpu.threads), 6), -blocks * pixels

    blocks, pixels = min(tiles, key=cost)
    work = shape.images * shape.rows * shape.columns * shape.blocks * shape.depth * shape.taps
    return ConvTile(blocks, pixels, _rows_of_task(shape, cpu, by_rows), by_rows, work >= _LEAST_WORK)


def choose_pixels(columns: int, most: int) -> int:
    """Pixels of a row at a time: those that waste least, of these the most."""
    return min(
        range(1, min(columns, most) + 1),
        key=lambda pixels: (math.ceil(columns / pixels) * pixels, -pixels),
    )


def shares(tasks: int, threads: int) -> float:
    """How much longer a thread works than if the tasks were shared evenly; 1 or more."""
    return math.ceil(tasks / threads) * threads / tasks


def _fit_in_registers(blocks: int, pixels: int, cpu: Cpu) -> bool:
    """Whether LLVM keeps a tile in registers.

    With several blocks it loads all pixels of a step at once, each into a register of its own: 2 blocks of 11
    pixels spill with 32 registers, 2 of 10 do not.
    """
    sums = blocks * pixels + blocks
    return sums + _FREE_REGISTERS <= cpu.registers and (blocks == 1 or sums + pixels <= cpu.registers)


def _prefers_rows(shape: ConvShape, cpu: Cpu) -> bool:
    """Whether all channels for some rows move less from memory than all rows for some channels."""
    room = cpu.l2_bytes // 2
    tasks = shape.images * shape.rows
    again = 1 if shape.weight_bytes <= room else math.ceil(tasks / _rows_that_fit(shape, cpu))
    by_rows = shape.data_bytes + again * shape.weight_bytes
    by_channels = shape.weight_bytes + shape.data_bytes * (
        1 if shape.data_bytes <= room else math.ceil(shape.blocks / 2)
    )
    return by_rows * shares(tasks, cpu.threads) <= by_channels * shares(shape.blocks, cpu.threads)


def _rows_that_fit(shape: ConvShape, cpu: Cpu) -> int:
    return max(1, cpu.l2_bytes // 4 // max(1, shape.data_bytes // (shape.images * shape.rows)))


def _rows_of_task(shape: ConvShape, cpu: Cpu, by_rows: bool) -> int:
    if not by_rows:
        return shape.rows
    fit = min(_rows_that_fit(shape, cpu), math.ceil(shape.rows * shape.images / cpu.threads))
    candidates = [rows for rows in _divisors(shape.rows) if rows <= fit]
    return min(candidates, key=lambda rows: (shares(shape.images * shape.rows // rows, cpu.threads), -rows))


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]
