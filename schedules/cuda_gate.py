"""Two products of a few values in one CUDA kernel: squeeze-and-excite gates.

::

    hidden = act(W1 x + b1)        32 to 2000 values -> 8 to 100
    out = act(W2 hidden + b2)      and back

After::

    block of 16 warps = image, slice of the results:
        warp: hidden[i] = act(sum over c of W1[i, c] * x[c] + b1[i])         every i, to shared memory
        warp: out[o]    = act(sum over i of W2[o, i] * hidden[i] + b2[o])    the slice

Every block computes all of the hidden values: reading W1 from the L2 cache again costs less than the launch
of a kernel, as long as W1 is small (``core/capabilities.py`` has the limit). The image is not pooled here as
well: each block would read all of it.

Shapes: any number of images; each operand's axes but the first are one vector. Numerics: float32 sums of 32
parts. Source: the textbook warp reduction.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_kernel import computations, inline_all_but

__all__ = ["find_gate", "schedule_gate"]

_LANES = 32
_WARPS = 16
#: Blocks an image: the second product is split so that its part takes no longer than the first product.
_SLICES = 16


def find_gate(output: Any) -> tuple[Any, Any] | None:
    """The two products of a gate.

    Args:
        output: The result tensor of a fused group.

    Returns:
        The sums of the first product and those of the second; None when the group is something else.
    """
    sums = [op.output(0) for op in computations(output) if op.reduce_axis]
    hidden = _hidden(*sums) if len(sums) == 2 else []
    if len(hidden) != 1 or not all(map(_is_vector, (*sums, *hidden, output))):
        return None
    first, second = sums
    keeps_size = _size(first.shape) == _size(hidden[0].shape) and _size(second.shape) == _size(output.shape)
    return (first, second) if keeps_size else None


def schedule_gate(output: Any, gate: tuple[Any, Any]) -> te.Schedule:
    """Schedule a gate and the elementwise operators before, between and after its products.

    Args:
        output: The result tensor, shape ``(N, C)`` or ``(N, C, 1, ...)``.
        gate: What `find_gate` returned for it.

    Returns:
        The schedule.
    """
    schedule = te.create_schedule(output.op)
    first, second = gate
    (hidden,) = _hidden(first, second)
    if second.op == output.op:
        second = schedule.cache_write(second, "")
    if first.op == hidden.op:
        first = schedule.cache_write(first, "")
    inline_all_but(schedule, output, second, hidden, first)

    warp, lane = te.thread_axis((0, _WARPS), "threadIdx.y"), te.thread_axis((0, _LANES), "threadIdx.x")
    stage = schedule[output]
    image, *rest = stage.op.axis
    each = math.ceil(_size(output.shape[1:]) / (_SLICES * _WARPS))
    slice_, own = stage.split(stage.fuse(*rest), factor=each * _WARPS)
    block = stage.fuse(image, slice_)
    stage.bind(block, te.thread_axis("blockIdx.x"))
    _sum_by_warps(schedule, output, own, second, warp, lane)

    stage = schedule[hidden]
    stage.set_scope("shared")
    stage.compute_at(schedule[output], block)
    _sum_by_warps(schedule, hidden, stage.fuse(*stage.op.axis[1:]), first, warp, lane)
    return schedule


def _sum_by_warps(schedule: te.Schedule, result: Any, axis: Any, sums: Any, warp: Any, lane: Any) -> None:
    """Compute a result from sums, each of which is one warp's."""
    stage = schedule[result]
    _, own = stage.split(axis, factor=_WARPS)
    stage.bind(own, warp)
    stage.set_store_predicate(lane.var.equal(0))
    _, part = schedule[sums].split(schedule[sums].fuse(*schedule[sums].op.reduce_axis), factor=_LANES)
    parts = schedule.rfactor(sums, part)
    schedule[sums].compute_at(stage, own)
    schedule[sums].bind(schedule[sums].op.reduce_axis[0], lane)
    schedule[parts].compute_at(schedule[sums], schedule[sums].op.reduce_axis[0])


def _hidden(first: Any, second: Any) -> list[Any]:
    """What the second product reads that is computed from the first."""
    return [tensor for tensor in second.op.input_tensors if first.op in computations(tensor)]


def _is_vector(tensor: Any) -> bool:
    return len(tensor.shape) > 1 and _size(tensor.shape[1:]) == int(tensor.shape[1])


def _size(shape: Any) -> int:
    return math.prod(int(extent) for extent in shape)
