"""The last resort on a CUDA GPU: one element of the result a thread.

For anchors that no other schedule of ours fits: other layouts, other dtypes, very odd shapes.

Before (TVM's schedule without a tuning record): one thread a *block*.

After::

    block of 256 threads, thread = element of the result:
        sum = 0
        for d in depth: sum += a[...] * b[...]         in a register, operands from the caches
        result = epilogue(sum)                         one store

Any layout and dtype whose computation TVM can state. Numerics: sums in TVM's own order.
Source: none needed; nothing is tuned here.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_kernel import inline_all_but

__all__ = ["schedule_generic"]

_THREADS = 256


def schedule_generic(output: Any) -> te.Schedule:
    """Schedule an anchor and the elementwise operators after it.

    Args:
        output: The result tensor of the fused group; one of its elements needs one sum.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    sums = [stage.op.output(0) for stage in schedule.stages if _is_sum(stage.op) and stage.op != output.op]
    if _is_sum(output.op):
        sums.append(schedule.cache_write(output, "local"))
    inline_all_but(schedule, output, *sums)
    stage = schedule[output]
    block, thread = stage.split(stage.fuse(*stage.op.axis), factor=_THREADS)
    stage.bind(block, te.thread_axis("blockIdx.x"))
    stage.bind(thread, te.thread_axis("threadIdx.x"))
    for tensor in sums:
        schedule[tensor].set_scope("local")
        schedule[tensor].compute_at(stage, thread)
    return schedule


def _is_sum(operation: Any) -> bool:
    return isinstance(operation, te.ComputeOp) and len(operation.reduce_axis) > 0
