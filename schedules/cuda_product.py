"""A blocked matrix product on a CUDA GPU, with everything that follows it in one kernel.

::

    out[g, r, *c] = sum over d of left[g, r, d] * right[g, d, *c]

Convolutions, dense layers and batched products are written as this product of two *views*: functions from an
index to a value, so neither padding nor the patches of a convolution lie in global memory.

After::

    block (g, block of rows, box of columns):
      for chunk of depth:
        shared left  = view of the block's rows      all threads together, four floats at a time
        shared right = view of the block's columns   all threads together, neighbours next to each other
        for d in chunk: sums[4][4] += left[., d] * right[d, .]        in registers
      result = epilogue(sums)                        one store; guarded at the edges

Alignment: TVM declares shared arrays of floats, which a compiler need not align to a vector. Rows of the left
chunk have a multiple of four floats, and so has the right chunk wherever vectors are used, so every array
begins at a multiple of 16 bytes in whatever order they are laid out.

Shapes: rows, columns and depth are rounded up to the tile; the views are zero beyond the true sizes and
are not read there. Numerics: float32 sums in the order of depth, as TVM's own.
Source: the textbook blocked product; the rule for the tile is in ``cuda_tiles.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from tvm import te, tir

from tvm_fuse_schedules.cuda_kernel import find_stage, inline_all_but
from tvm_fuse_schedules.cuda_tiles import Product, Tile

__all__ = ["Axes", "compute_product", "schedule_product"]

#: Floats in a vector load, and the gap between rows of the left chunk: vectors stay aligned, and rows
#: begin in other banks.
_VECTOR = 4
#: Most terms of a chunk that are unrolled.
_UNROLL = 16

#: ``(group, row, term)`` -> value.
LeftView = Callable[[Any, Any, Any], Any]
#: ``(group, step of depth, tap, *column)`` -> value.
RightView = Callable[..., Any]


@dataclass(frozen=True)
class Axes:
    """Which axes of the result are which of the product.

    Args:
        row: The rows, or groups and rows together.
        columns: The columns, in the product's order.
        group: The groups, when they are an axis of their own.
        phases: Neighbours along each column axis that belong to different groups, as in a transposed
            convolution: the index of such a group is the group's, then the phases.
    """

    row: int
    columns: tuple[int, ...]
    group: int | None = None
    phases: tuple[int, ...] = ()


def compute_product(product: Product, tile: Tile | None, left: LeftView, right: RightView, dtype: str) -> Any:
    """Declare a blocked product.

    Args:
        product: The sizes.
        tile: The tile it will be scheduled with; None to round nothing up.
        left: ``(group, row, term)`` -> value, ``term = step * taps + tap``; read inside the sizes only.
        right: ``(group, step, tap, *column)`` -> value; read inside the sizes only.
        dtype: Type of the sums.

    Returns:
        The tensor ``product`` of shape (groups, rows, *columns), all but the groups rounded up to the tile.
    """
    rows, columns, depth, taps = product.rows, product.columns, product.depth, product.taps
    if tile is not None:
        rows, depth = _round_up(rows, tile.rows), _round_up(depth, tile.depth)
        columns = tuple(_round_up(size, part) for size, part in zip(columns, tile.box))

    def inside(value: Any, *bounds: tuple[Any, int, int]) -> Any:
        checks = [index < size for index, size, rounded in bounds if size != rounded]
        zero = tir.const(0, dtype)
        return (
            tir.if_then_else(tir.all(*checks), value.astype(dtype), zero) if checks else value.astype(dtype)
        )

    def column_bounds(column: Sequence[Any]) -> list[tuple[Any, int, int]]:
        return list(zip(column, product.columns, columns))

    left_view = te.compute(
        (product.groups, rows, depth * taps),
        lambda g, r, t: inside(
            left(g, r, t), (r, product.rows, rows), (t, product.depth * taps, depth * taps)
        ),
        name="product_left",
    )
    right_view = te.compute(
        (product.groups, depth, taps, *columns),
        lambda g, d, tap, *c: inside(right(g, d, tap, *c), (d, product.depth, depth), *column_bounds(c)),
        name="product_right",
    )
    term = te.reduce_axis((0, depth * taps), name="term")
    return te.compute(
        (product.groups, rows, *columns),
        lambda g, r, *c: te.sum(left_view[g, r, term] * right_view[(g, term // taps, term % taps, *c)], term),
        name="product",
    )


def schedule_product(output: Any, product: Product, tile: Tile, axes: Axes) -> te.Schedule:
    """Schedule a product and the elementwise operators after it.

    Args:
        output: The result tensor of the fused group.
        product: The sizes.
        tile: The tile that the product was declared with.
        axes: What the axes of the result are in the product.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    sums = find_stage(output, "product")
    left, right = sums.op.input_tensors
    terms = tile.depth * product.taps
    inline_all_but(schedule, output, sums, left, right)
    row = schedule.cache_read(left, "local", [sums])
    thread = _bind_result(schedule[output], product, tile, axes)
    chunk, vector = _sum_in_registers(schedule[sums], schedule[output], thread, product, tile)
    _read_vectors(schedule[row], schedule[sums], vector)
    for operand in (left, right):
        schedule[operand].set_scope("shared")
        schedule[operand].compute_at(schedule[sums], chunk)
    schedule[left].storage_align(left.op.axis[1], 2 * _VECTOR, _VECTOR)
    _load_together(schedule[left], tile, product.left_vector if terms % _VECTOR == 0 else 1)
    _load_together(schedule[right], tile, product.right_vector if tile.columns % _VECTOR == 0 else 1)
    return schedule


def _bind_result(stage: te.Stage, product: Product, tile: Tile, result: Axes) -> Any:
    """Loops over the result: blocks, then threads; a thread's columns are virtual threads."""
    axes = list(stage.op.axis)
    row = axes[result.row]
    if result.group is not None:
        group = axes[result.group]
    else:
        group, row = stage.split(row, factor=product.rows)
    row_block, row = stage.split(row, factor=tile.rows)
    thread_row, own_row = stage.split(row, factor=tile.row_register)
    groups, blocks, owns, threads = [group], [], [], []
    phases = result.phases or (1,) * len(result.columns)
    for index, phase, part, own in zip(result.columns, phases, tile.box, tile.own):
        column = axes[index]
        if phase > 1:
            column, own_phase = stage.split(column, factor=phase)
            groups.append(own_phase)
        block, inner = stage.split(column, factor=part)
        own_column, thread = stage.split(inner, factor=part // own)
        blocks.append(block)
        owns.append(own_column)
        threads.append(thread)
    stage.reorder(*groups, row_block, *blocks, *owns, thread_row, *threads, own_row)
    thread_column = stage.fuse(*threads)
    stage.bind(stage.fuse(*groups), te.thread_axis("blockIdx.z"))
    stage.bind(row_block, te.thread_axis("blockIdx.y"))
    stage.bind(stage.fuse(*blocks), te.thread_axis("blockIdx.x"))
    stage.bind(stage.fuse(*owns), te.thread_axis("vthread"))
    stage.bind(thread_row, te.thread_axis("threadIdx.y"))
    stage.bind(thread_column, te.thread_axis("threadIdx.x"))
    stage.unroll(own_row)
    return thread_column


def _sum_in_registers(
    stage: te.Stage, result: te.Stage, thread: Any, product: Product, tile: Tile
) -> tuple[Any, Any]:
    """A thread's sums are local to it; returns the loops over chunks and over vectors of the depth."""
    stage.set_scope("local")
    stage.compute_at(result, thread)
    group, row, *columns = stage.op.axis
    terms = tile.depth * product.taps
    width = _VECTOR if terms % _VECTOR == 0 else 1
    chunk, term = stage.split(stage.op.reduce_axis[0], factor=terms)
    vector, term = stage.split(term, factor=width)
    outer, vector = stage.split(vector, factor=_unrolled(terms // width, _UNROLL // width))
    stage.reorder(chunk, outer, vector, term, group, row, *columns)
    for axis in (vector, term, row):
        stage.unroll(axis)
    return chunk, vector


def _unrolled(steps: int, most: int) -> int:
    """How many steps of a chunk are unrolled: a divisor."""
    return next(count for count in range(most, 0, -1) if steps % count == 0)


def _read_vectors(stage: te.Stage, sums: te.Stage, vector: Any) -> None:
    """A thread reads its rows from shared memory four terms at a time."""
    stage.compute_at(sums, vector)
    *outer, term = stage.op.axis
    for axis in outer:
        stage.unroll(axis)
    stage.vectorize(term)


def _load_together(stage: te.Stage, tile: Tile, vector: int) -> None:
    """All threads of the block load a chunk, neighbours next to each other."""
    fused, lanes = stage.split(stage.fuse(*stage.op.axis), factor=vector)
    fused, thread_column = stage.split(fused, factor=tile.thread_columns)
    fused, thread_row = stage.split(fused, factor=tile.thread_rows)
    stage.bind(thread_row, te.thread_axis("threadIdx.y"))
    stage.bind(thread_column, te.thread_axis("threadIdx.x"))
    stage.unroll(fused)
    if vector > 1:
        stage.vectorize(lanes)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
