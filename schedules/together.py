"""One loop, or one CUDA kernel, for several elementwise results of one shape.

After, on a GPU::

    thread = element: a[i] = f(x[i]); b[i] = g(x[i])        x is read once

On a CPU the loop is parallel over its outer part, with 16 elements at a time in the inner one. Any static
shape but that of a number, any dtypes.
Source: none needed; nothing is tuned here.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_kernel import inline_all_but

__all__ = ["schedule_together"]

_THREADS = 256
_LANES = 16


def schedule_together(output: Any, is_gpu: bool) -> te.Schedule:
    """Schedule a computation with several results.

    Args:
        output: One of the results.
        is_gpu: Whether loops become blocks and threads.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    inline_all_but(schedule, output)
    stage = schedule[output]
    outer, inner = stage.split(stage.fuse(*stage.op.axis), factor=_THREADS)
    if is_gpu:
        stage.bind(outer, te.thread_axis("blockIdx.x"))
        stage.bind(inner, te.thread_axis("threadIdx.x"))
    else:
        _, lanes = stage.split(inner, factor=_LANES)
        stage.vectorize(lanes)
        stage.parallel(outer)
    return schedule
