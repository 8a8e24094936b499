"""Reductions along rows on a CUDA GPU, with everything before, between and after them in one kernel.

For softmax, layer and instance norms, means, sums and global pooling: each result needs one or more
reductions over the row it lies in::

    mean = sum(x[row]) / n;  variance = sum((x[row] - mean) ** 2) / n;  out = (x - mean) * rsqrt(variance + e)

After::

    block = row, one warp to sixteen:
        shared x = prologue(...)                   only what several of the next lines read
        r1 = reduction over x                      a part in each thread, then shuffles
        shared e = f(x, r1)
        r2 = reduction over e
        out = epilogue(e, r2)                      neighbours store neighbours

What several lines read is computed once: an ``exp`` that a sum and the result read, the input of a layer norm
with its residual add. The rest is inlined. An input that nothing comes before is read again from the caches.

Shapes: any number of leading axes that are rows; the row is the rest of the axes. A row that is kept must fit
the shared memory of a block, else it is computed again where it is read. Numerics: float32 sums of one part
per thread, so the order differs from TVM's.
Source: the textbook block reduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cuda_kernel import computations, inline_all_but

__all__ = ["Rows", "find_rows", "schedule_rows"]

_LANES = 32
#: Elements of a row for each thread at least, and the most warps for a row.
_ELEMENTS = 4
_MOST_WARPS = 16
#: Bytes of rows in shared memory: what every GPU gives a block without asking, less the reductions' own.
_SHARED_BYTES = 44 * 1024


@dataclass(frozen=True)
class Rows:
    """How a result is split into rows.

    Args:
        axes: So many leading axes of the result are rows; the rest is the row.
        count: Rows.
        length: The longest extent that the threads of a row share: of a reduction, or of the result.
    """

    axes: int
    count: int
    length: int

    @property
    def warps(self) -> int:
        """Warps that work on one row."""
        wanted = 1 << max(0, self.length // (_ELEMENTS * _LANES)).bit_length()
        return min(max(wanted // 2, 1), _MOST_WARPS)


def find_rows(output: Any) -> Rows | None:
    """The rows of a group.

    Args:
        output: The result tensor of a fused group.

    Returns:
        The rows; None when the reductions do not all lie in rows of the result, or there is none.
    """
    sums = [op for op in computations(output) if op.reduce_axis]
    counts = {_size(op.output(0).shape) for op in sums}
    extents = [[axis.dom.extent for axis in op.reduce_axis] for op in sums]
    if len(counts) != 1 or not all(isinstance(extent, tir.IntImm) for some in extents for extent in some):
        return None
    (count,) = counts
    shape = [int(dim) for dim in output.shape]
    axes = next((n for n in range(len(shape) + 1) if math.prod(shape[:n]) == count), None)
    if axes is None:
        return None
    # Axes of one element behind the rows are theirs: a mean that keeps its axes.
    while axes < len(shape) and shape[axes] == 1:
        axes += 1
    return Rows(axes, count, max(*map(_size, extents), math.prod(shape[axes:])))


def schedule_rows(output: Any, rows: Rows) -> te.Schedule:
    """Schedule the reductions of a group and all that is fused with them.

    Args:
        output: The result tensor.
        rows: What `find_rows` returned for it.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    sums = [op.output(0) for op in computations(output) if op.reduce_axis]
    if output.op.reduce_axis:
        sums = [tensor for tensor in sums if tensor.op != output.op]
        sums.append(schedule.cache_write(output, "local"))
    kept = _rows_to_keep(schedule, output, rows)
    inline_all_but(schedule, output, *sums, *kept)

    threads = te.thread_axis((0, rows.warps), "threadIdx.y"), te.thread_axis((0, _LANES), "threadIdx.x")
    stage = schedule[output]
    axes = list(stage.op.axis)
    block = stage.fuse(*axes[: rows.axes])
    stage.bind(block, te.thread_axis("blockIdx.x"))
    if axes[rows.axes :]:
        _share(stage, axes[rows.axes :], threads)
    else:
        stage.set_store_predicate(te.all(*(axis.var.equal(0) for axis in threads)))
    for tensor in sums:
        _reduce(schedule, tensor, threads, stage, block)
    for tensor in kept:
        schedule[tensor].set_scope("shared")
        schedule[tensor].compute_at(stage, block)
        _share(schedule[tensor], schedule[tensor].op.axis[rows.axes :], threads)
    return schedule


def _reduce(schedule: te.Schedule, sums: Any, threads: Any, stage: Any, block: Any) -> None:
    """A part in each thread, one sum a warp by shuffles, and the sum of these in every thread.

    TVM's own reduction over several warps calls a shuffle from lanes that its mask leaves out.
    """
    warps, lanes = threads
    size = int(warps.dom.extent) * _LANES
    _, own = schedule[sums].split(schedule[sums].fuse(*schedule[sums].op.reduce_axis), factor=size)
    parts = schedule.rfactor(sums, own)
    warp, _ = schedule[sums].split(schedule[sums].op.reduce_axis[0], factor=_LANES)
    of_warps = schedule.rfactor(sums, warp)
    (lane,) = schedule[of_warps].op.reduce_axis
    schedule[sums].set_scope("local")
    schedule[sums].compute_at(stage, block)
    schedule[of_warps].set_scope("shared")
    schedule[of_warps].compute_at(stage, block)
    schedule[of_warps].bind(schedule[of_warps].op.axis[0], warps)
    schedule[of_warps].bind(lane, lanes)
    schedule[parts].set_scope("local")
    schedule[parts].compute_at(schedule[of_warps], lane)


def _share(stage: Any, axes: Any, threads: Any) -> None:
    """Give neighbouring threads neighbouring elements."""
    warps, lanes = threads
    _, own = stage.split(stage.fuse(*axes), factor=int(warps.dom.extent) * _LANES)
    warp, lane = stage.split(own, factor=_LANES)
    stage.bind(warp, warps)
    stage.bind(lane, lanes)


def _rows_to_keep(schedule: te.Schedule, output: Any, rows: Rows) -> list[Any]:
    """Elementwise stages as long as the rows that several kept stages read, as far as shared memory goes."""
    free = _SHARED_BYTES
    stages = [stage.op for stage in schedule.stages if isinstance(stage.op, te.ComputeOp)]
    whole = max(_size(op.output(0).shape) for op in stages)
    readers: dict[Any, set[Any]] = {}
    kept = []
    for op in reversed(stages):
        is_kept = op == schedule[output].op or bool(op.reduce_axis)
        size = _size(op.output(0).shape)
        bytes_needed = (size // rows.count) * _bytes(op.output(0).dtype)
        if not is_kept and len(readers[op]) > 1 and size == whole and bytes_needed <= free:
            is_kept, free = True, free - bytes_needed
            kept.append(op.output(0))
        for source in op.input_tensors:
            readers.setdefault(source.op, set()).update({op} if is_kept else readers[op])
    return kept


def _size(shape: Any) -> int:
    return math.prod(int(extent) for extent in shape)


def _bytes(dtype: str) -> int:
    return max(1, int("".join(filter(str.isdigit, dtype))) // 8)
