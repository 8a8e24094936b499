"""The most multiply-adds that a CPU does in this process: a loop that keeps them in registers.

Each thread adds up ``acc[block, pixel] += weight[k, block] * data[k, pixel]`` over and over: a tile as large
as the registers hold, operands in the first cache, no other memory. What percentages of a peak are of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.cpu_target import cpu_of

te = tvm.te

__all__ = ["TERMS", "Peak"]

_TERMS = 64
_AGAIN = 2000
#: Multiply-adds of one element of the result.
TERMS = _AGAIN * _TERMS


class Peak:
    """The loop, compiled for a target."""

    def __init__(self, target: Any) -> None:
        """Compile.

        Args:
            target: A ``tvm.target.Target`` of kind ``llvm``; its cores are the threads.
        """
        cpu = cpu_of(target)
        blocks, pixels = (4, 6) if cpu.registers == 32 else (2, 5)
        lanes, threads = cpu.lanes, cpu.threads
        self.flops = 2 * threads * TERMS * blocks * pixels * lanes
        data = te.placeholder((_TERMS, pixels), name="data")
        weight = te.placeholder((_TERMS, blocks, lanes), name="weight")
        again, term = (
            te.reduce_axis((0, size), name) for size, name in ((_AGAIN, "again"), (_TERMS, "term"))
        )
        result = te.compute(
            (threads, pixels, blocks, lanes),
            lambda t, p, b, lane: te.sum(data[term, p] * weight[term, b, lane], axis=[again, term]),
            name="result",
        )
        schedule = te.create_schedule(result.op)
        local = schedule.cache_write(result, "local")
        schedule[result].parallel(schedule[result].op.axis[0])
        schedule[local].compute_at(schedule[result], schedule[result].op.axis[0])
        thread, pixel, block, lane = schedule[local].op.axis
        schedule[local].reorder(thread, again, term, pixel, block, lane)
        for axis in (pixel, block):
            schedule[local].unroll(axis)
        schedule[local].vectorize(lane)
        schedule[result].vectorize(schedule[result].op.axis[3])
        self._device = tvm.cpu(0)
        self._arguments = [
            tvm.nd.array(np.ones([int(size) for size in tensor.shape], "float32"), self._device)
            for tensor in (data, weight, result)
        ]
        self._library = tvm.build(schedule, [data, weight, result], target, name="peak")

    @property
    def result(self) -> np.ndarray:
        """What the last run computed: operands are ones, so each element is the number of its terms."""
        return self._arguments[2].numpy()

    def measure(self) -> float:
        """Floating-point operations a second, of the best of three runs."""
        timer = self._library.time_evaluator("peak", self._device, number=1, repeat=3)
        return self.flops / min(timer(*self._arguments).results)
