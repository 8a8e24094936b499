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

With slices (sliced-K), for a long depth and few results, several groups of threads share a block's results::

        for d in chunk's part of the slice: sums[4][4] += left[., d] * right[d, .]
      shared parts[slice] = sums                     in place of a chunk
      result = epilogue(sum of parts)                every thread has as many results as any other

Alignment: TVM declares shared arrays of floats, which a compiler need not align to a vector. Rows of the left
chunk have a multiple of four floats, and so has the right chunk wherever vectors are used, so every array
begins at a multiple of 16 bytes in whatever order they are laid out.

Shapes: rows, columns and depth are rounded up to the tile; the views are zero beyond the true sizes and
are not read there. Numerics: float32 sums in the order of depth, as TVM's own; with slices the order of depth
within a slice, and then the slices' sums in their order.
Source: the textbook blocked product and CUTLASS' sliced-K; the rule for the tile is in ``cuda_tiles.py``.

A chunk has one buffer. TE can give it two (``double_buffer``), yet in ptxas' code every thread still stores
the next chunk before it multiplies the current one, and so waits for global memory as before: the gain is one
of two barriers, the price twice the shared memory. To load the next chunk into registers would hide the wait,
but TE cannot bound what one thread loads of a chunk that all load together.
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

    def multiply(g: Any, r: Any, column: Sequence[Any], term: Any) -> Any:
        return left_view[g, r, term] * right_view[(g, term // taps, term % taps, *column)]

    shape, slices = (product.groups, rows, *columns), 1 if tile is None else tile.slices
    if slices == 1:
        term = te.reduce_axis((0, depth * taps), name="term")
        return te.compute(shape, lambda g, r, *c: te.sum(multiply(g, r, c, term), term), name="product")
    terms = tile.slice_terms(taps)
    chunk, term = (
        te.reduce_axis((0, depth // tile.depth), name="chunk"),
        te.reduce_axis((0, terms), name="term"),
    )
    parts = te.compute(
        (slices, *shape),
        lambda s, g, r, *c: te.sum(multiply(g, r, c, (chunk * slices + s) * terms + term), [chunk, term]),
        name="product_parts",
    )
    part = te.reduce_axis((0, slices), name="slice")
    return te.compute(shape, lambda *index: te.sum(parts[(part, *index)], part), name="product")


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
    total = find_stage(output, "product")
    sums = find_stage(output, "product_parts") if tile.slices > 1 else total
    left, right = sums.op.input_tensors
    inline_all_but(schedule, output, total, sums, left, right)
    result = schedule[output]
    block, row, columns = _bind_blocks(result, product, tile, axes)
    if tile.slices > 1:
        result, sums = schedule[sums], schedule.cache_write(sums, "local")
        row, columns = _add_slices(schedule, output, block, (row, *columns), tile)
        left, right = sums.op.input_tensors
    left_row = schedule.cache_read(left, "local", [sums])
    thread = _bind_threads(result, row, columns, tile)
    chunk, vector = _sum_in_registers(schedule[sums], result, thread, product, tile)
    _read_vectors(schedule[left_row], schedule[sums], vector)
    for operand in (left, right):
        schedule[operand].set_scope("shared")
        schedule[operand].compute_at(schedule[sums], chunk)
    schedule[left].storage_align(left.op.axis[1], 2 * _VECTOR, _VECTOR)
    is_vector = tile.depth * product.taps % _VECTOR == 0
    _load_together(schedule[left], tile, product.left_vector if is_vector else 1)
    _load_together(schedule[right], tile, product.right_vector if tile.columns % _VECTOR == 0 else 1)
    return schedule


def _bind_blocks(stage: te.Stage, product: Product, tile: Tile, result: Axes) -> tuple[Any, Any, list[Any]]:
    """Loops over the result's blocks; returns the innermost, and a block's loops over rows and columns."""
    axes = list(stage.op.axis)
    row = axes[result.row]
    if result.group is not None:
        group = axes[result.group]
    else:
        group, row = stage.split(row, factor=product.rows)
    row_block, row = stage.split(row, factor=tile.rows)
    groups, blocks, columns = [group], [], []
    phases = result.phases or (1,) * len(result.columns)
    for index, phase, part in zip(result.columns, phases, tile.box):
        column = axes[index]
        if phase > 1:
            column, own_phase = stage.split(column, factor=phase)
            groups.append(own_phase)
        block, column = stage.split(column, factor=part)
        blocks.append(block)
        columns.append(column)
    stage.reorder(*groups, row_block, *blocks, row, *columns)
    block = stage.fuse(*blocks)
    stage.bind(stage.fuse(*groups), te.thread_axis("blockIdx.z"))
    stage.bind(row_block, te.thread_axis("blockIdx.y"))
    stage.bind(block, te.thread_axis("blockIdx.x"))
    return block, row, columns


def _add_slices(
    schedule: te.Schedule, output: Any, block: Any, inside: Sequence[Any], tile: Tile
) -> tuple[Any, list[Any]]:
    """All threads of a block add the sums of slices, which lie in shared memory; returns loops over these."""
    parts, total, stage = find_stage(output, "product_parts"), find_stage(output, "product"), schedule[output]
    rest, thread = _bind_all(stage, stage.fuse(*inside), tile)
    stage.unroll(rest)
    schedule[total].set_scope("local")
    schedule[total].compute_at(stage, thread)
    schedule[total].unroll(schedule[total].op.reduce_axis[0])
    schedule[parts].set_scope("shared")
    schedule[parts].compute_at(stage, block)
    part, _, row, *columns = schedule[parts].op.axis
    schedule[parts].bind(part, te.thread_axis("threadIdx.z"))
    return row, columns


def _bind_threads(stage: te.Stage, row: Any, columns: Sequence[Any], tile: Tile) -> Any:
    """A slice's threads have neighbouring rows, and columns as virtual threads."""
    thread_row, own_row = stage.split(row, factor=tile.row_register)
    owns, threads = [], []
    for column, part, own in zip(columns, tile.box, tile.own):
        own_column, thread = stage.split(column, factor=part // own)
        owns.append(own_column)
        threads.append(thread)
    stage.reorder(*owns, thread_row, *threads, own_row)
    thread_column = stage.fuse(*threads)
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
    terms, axes = tile.slice_terms(product.taps), list(stage.op.axis)
    width = _VECTOR if terms % _VECTOR == 0 else 1
    if tile.slices > 1:
        chunk, term = stage.op.reduce_axis
    else:
        chunk, term = stage.split(stage.op.reduce_axis[0], factor=terms)
    vector, term = stage.split(term, factor=width)
    outer, vector = stage.split(vector, factor=_unrolled(terms // width, _UNROLL // width))
    stage.reorder(chunk, outer, vector, term, *axes)
    for axis in (vector, term, axes[-1 - len(tile.box)]):
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
    rest, _ = _bind_all(stage, fused, tile)
    stage.unroll(rest)
    if vector > 1:
        stage.vectorize(lanes)


def _bind_all(stage: te.Stage, fused: Any, tile: Tile) -> tuple[Any, Any]:
    """Share a loop among all threads of a block; returns the loop that is left, and the innermost thread."""
    rest, thread_column = stage.split(fused, factor=tile.thread_columns)
    rest, thread_row = stage.split(rest, factor=tile.thread_rows)
    stage.bind(thread_row, te.thread_axis("threadIdx.y"))
    stage.bind(thread_column, te.thread_axis("threadIdx.x"))
    if tile.slices > 1:
        rest, part = stage.split(rest, factor=tile.slices)
        stage.bind(part, te.thread_axis("threadIdx.z"))
    return rest, thread_column


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
