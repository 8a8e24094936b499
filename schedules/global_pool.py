"""Global pooling in a blocked layout on a CPU.

Before (TVM's schedule): one parallel loop sums, a second one divides; the sum's two loops over
height and width are unrolled completely by LLVM when they are short, which takes it many seconds
for a 3 x 96 image.

After::

    parallel for n, C:                      one block of channels a task
        for r in height * width:            one loop, too long to be unrolled
            vectorized for c: sum[c] += x[n, C, r, c]
        vectorized for c: out[n, C, 0, 0, c] = sum[c] / (height * width)

Layout: ``NCHW{c}c``, any c. Conditions: rank 5; the result is one element a channel.
Source: the textbook reduction; measured in ``benchmarks/results/global_pool.json``.
"""

from __future__ import annotations

from typing import Any

from tvm import te
from tvm.topi import tag

__all__ = ["find_global_pool", "schedule_global_pool"]


def find_global_pool(output: Any) -> Any | None:
    """The pooling stage of a computation, when this schedule fits it.

    Args:
        output: The result tensor of a pooling operator and what is fused after it.

    Returns:
        The tensor of sums (or maxima), or None when the layout is not blocked or the result has
        more than one element a channel.
    """
    tensor = output
    while tag.is_injective(tensor.op.tag):
        producers = [source for source in tensor.op.input_tensors if isinstance(source.op, te.ComputeOp)]
        if len(producers) != 1:
            return None
        tensor = producers[0]
    shape = [int(dim) for dim in tensor.shape]
    is_global = len(shape) == 5 and shape[2:4] == [1, 1] and tensor.op.tag.startswith("adaptive_pool")
    return tensor if is_global and len(tensor.op.reduce_axis) == 2 and len(output.shape) == 5 else None


def schedule_global_pool(output: Any, pool: Any) -> te.Schedule:
    """Schedule a global pool and the injective operators after it.

    Args:
        output: The result tensor, shape ``(N, C, 1, 1, c)``.
        pool: What ``find_global_pool`` returned.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    batch, channel, _, _, lane = schedule[output].op.axis
    task = schedule[output].fuse(batch, channel)
    schedule[output].parallel(task)
    schedule[output].vectorize(lane)
    if not pool.op.same_as(output.op):
        _inline_between(schedule, output, pool)
        schedule[pool].compute_at(schedule[output], task)
        _sum_in_one_loop(schedule[pool])
    return schedule


def _inline_between(schedule: te.Schedule, output: Any, pool: Any) -> None:
    tensor = output
    while not tensor.op.same_as(pool.op):
        if not tensor.op.same_as(output.op):
            schedule[tensor].compute_inline()
        tensor = next(source for source in tensor.op.input_tensors if isinstance(source.op, te.ComputeOp))


def _sum_in_one_loop(stage: te.Stage) -> None:
    lane = stage.op.axis[-1]
    pixel = stage.fuse(*stage.op.reduce_axis)
    stage.reorder(pixel, lane)
    stage.vectorize(lane)
