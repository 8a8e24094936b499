"""What all CUDA schedules share: a kernel as declaration plus schedule, and the stages around an anchor.

An anchor's kernel ends in one store of the fused group's result::

    product -> bias_add -> relu          everything between the anchor and the result is inlined,
                                         the anchor's sum stays in a register
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from tvm import te

__all__ = ["Kernel", "find_stage", "inline_all_but"]


@dataclass(frozen=True)
class Kernel:
    """An operator's computation and the schedule that fits it.

    Args:
        compute: The operator's tensors -> its result.
        schedule: The result of the fused group -> its schedule.
    """

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


def inline_all_but(schedule: te.Schedule, *kept: Any) -> None:
    """Inline every computation but those of the given tensors."""
    operations = {schedule[tensor].op for tensor in kept}  # after cache_write, not the tensor's own
    for stage in schedule.stages:
        if isinstance(stage.op, te.ComputeOp) and stage.op not in operations:
            stage.compute_inline()
