"""The schedule of a CUDA kernel with reductions other than one blocked product.

The first that fits: a gate of two products (``cuda_gate.py``), reductions along rows (``cuda_rows.py``),
one element a thread (``cuda_generic.py``). The last is right for anything, but slow where a reduction
reads another.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_gate import find_gate, schedule_gate
from tvm_fuse_schedules.cuda_generic import schedule_generic
from tvm_fuse_schedules.cuda_kernel import computations
from tvm_fuse_schedules.cuda_rows import find_rows, schedule_rows

__all__ = ["has_sums", "schedule_joined"]

#: A reduction over fewer elements is done by one thread.
_SHORTEST_ROW = 16
#: What threads can hand to each other by shuffles.
_SHUFFLED = ("float32", "int32")


def has_sums(tensor: Any) -> bool:
    """Whether a reduction is part of what a tensor is computed from."""
    return any(op.reduce_axis for op in computations(tensor))


def schedule_joined(output: Any) -> te.Schedule:
    """Schedule a group that has reductions.

    Args:
        output: The result tensor of the fused group.

    Returns:
        The schedule.
    """
    sums = [op for op in computations(output) if op.reduce_axis]
    if all(op.num_outputs == 1 and op.output(0).dtype in _SHUFFLED for op in sums):
        gate = find_gate(output)
        if gate is not None:
            return schedule_gate(output, gate)
        rows = find_rows(output)
        if rows is not None and rows.length >= _SHORTEST_ROW:
            return schedule_rows(output, rows)
    return schedule_generic(output)
