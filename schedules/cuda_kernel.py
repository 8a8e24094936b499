"""What all CUDA schedules share: a kernel as declaration plus schedule, and the stages around an anchor.

An anchor's kernel ends in one store of the fused group's result::

    product -> bias_add -> relu          everything between the anchor and the result is inlined,
                                         the anchor's sum stays in a register
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable

from tvm import te

__all__ = ["Kernel", "Schedule", "computations", "find_stage", "inline_all_but"]


class Schedule(str, Enum):
    """Kinds of kernels."""

    BLOCKED = "blocked product"
    NARROW = "one warp a result"
    DEPTHWISE = "depthwise stencil"
    JOINED = "several reductions"
    GENERIC = "one element a thread"
    TVM = "TVM's own"


@dataclass(frozen=True)
class Kernel:
    """An operator's computation and the schedule that fits it.

    Args:
        kind: What kind of kernel.
        compute: The operator's tensors -> its result.
        schedule: The result of the fused group -> its schedule.
    """

    kind: Schedule
    compute: Callable[..., Any]
    schedule: Callable[[Any], te.Schedule]


def find_stage(output: Any, name: str) -> Any:
    """The tensor of a stage, by the name of its operation.

    Args:
        output: The result tensor of a fused group.
        name: Name of a stage that the result is computed from.

    Returns:
        The tensor.
    """
    waiting, seen = [output], set()
    while True:
        tensor = waiting.pop()
        if tensor.op.name == name:
            return tensor
        if tensor.op not in seen and isinstance(tensor.op, te.ComputeOp):
            seen.add(tensor.op)
            waiting.extend(tensor.op.input_tensors)


def computations(output: Any) -> list[Any]:
    """All computations that a tensor needs, each after those it reads."""
    found: dict[Any, None] = {}

    def visit(tensor: Any) -> None:
        if isinstance(tensor.op, te.ComputeOp) and tensor.op not in found:
            for source in tensor.op.input_tensors:
                visit(source)
            found[tensor.op] = None

    visit(output)
    return list(found)


def inline_all_but(schedule: te.Schedule, *kept: Any) -> None:
    """Inline every computation but those of the given tensors."""
    operations = {schedule[tensor].op for tensor in kept}  # after cache_write, not the tensor's own
    for stage in schedule.stages:
        if isinstance(stage.op, te.ComputeOp) and stage.op not in operations:
            stage.compute_inline()
