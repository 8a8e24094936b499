"""A product with few columns on a CUDA GPU: one warp a result.

For dense layers of small batches and convolutions of one pixel, such as squeeze-and-excite gates: every
weight is used once or a few times, so the time is that of reading the weights.

After::

    block of 8 warps, warp = element of the result:
        lane l: part = sum over i of left[r, 32 * i + l] * right[32 * i + l, c]    neighbours read neighbours
        sum  = parts of all lanes                                                  by shuffles, in registers
        result = epilogue(sum)                                                     stored by lane 0

Shapes: any. Numerics: float32; a result is the sum of 32 partial sums, so the order differs from TVM's.
Source: the textbook warp reduction.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_kernel import find_stage, inline_all_but

__all__ = ["schedule_narrow"]

_LANES = 32
_WARPS = 8


def schedule_narrow(output: Any) -> te.Schedule:
    """Schedule a product and the elementwise operators after it.

    Args:
        output: The result tensor of the fused group, from ``compute_product`` without a tile.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    sums = find_stage(output, "product")
    inline_all_but(schedule, output, sums)
    _, lane = schedule[sums].split(schedule[sums].op.reduce_axis[0], factor=_LANES)
    parts = schedule.rfactor(sums, lane)
    lane_axis = te.thread_axis((0, _LANES), "threadIdx.x")

    stage = schedule[output]
    block, warp = stage.split(stage.fuse(*stage.op.axis), factor=_WARPS)
    stage.bind(block, te.thread_axis("blockIdx.x"))
    stage.bind(warp, te.thread_axis("threadIdx.y"))
    stage.set_store_predicate(lane_axis.var.equal(0))
    schedule[sums].compute_at(stage, warp)
    schedule[sums].bind(schedule[sums].op.reduce_axis[0], lane_axis)
    schedule[parts].compute_at(schedule[sums], schedule[sums].op.reduce_axis[0])
    return schedule
