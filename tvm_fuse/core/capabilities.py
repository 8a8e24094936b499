"""What the schedules of a target can compute in one kernel, beside an anchor and what follows it.

A table, not a rule: the planner looks up here whether an extension of a group (``plan_options.Extension``)
may be tried at all; whether it pays is for ``PlanOptions.accept``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, INJECTIVE_KINDS, VIEW_KINDS, Kind

__all__ = ["CAPABILITIES", "CHEAP_KINDS", "MOST_TOGETHER", "Capability", "capability_of"]

#: Most results of one kernel (``schedules/together.py``).
MOST_TOGETHER = 8

#: Elementwise kinds of one or two instructions: computing them again for each read costs little.
CHEAP_KINDS = frozenset(
    {
        Kind.ADD,
        Kind.BIAS_ADD,
        Kind.CAST,
        Kind.CLIP,
        Kind.LEAKY_RELU,
        Kind.MAXIMUM,
        Kind.MINIMUM,
        Kind.MULTIPLY,
        Kind.NEGATIVE,
        Kind.RELU,
        Kind.SUBTRACT,
    }
)


@dataclass(frozen=True)
class Capability:
    """What one kind of target can do.

    Args:
        prologue: Family -> kinds that it can compute while it reads its operands.
        joined: Names of the families that may have further heavy operators inside (``gate``,
            ``normalization``).
        most_arguments: Most tensors that a kernel takes, results included.
        most_results: Most results of one kernel of elementwise operators.
    """

    prologue: Mapping[str, frozenset[Kind]]
    joined: frozenset[str]
    most_arguments: int
    most_results: int


#: TVM's own schedules of reductions inline what is read, on every target.
_REDUCED = {"reduce": INJECTIVE_KINDS | {Kind.TUPLE}}

#: Kind of target -> what its schedules can do.
CAPABILITIES: Mapping[str, Capability] = MappingProxyType(
    {
        # 4 KiB of parameters (CUDA C++ Programming Guide, "Function Parameters"), 8 bytes a pointer.
        # Our schedules read operands through views.
        "cuda": Capability(
            MappingProxyType(
                {
                    **_REDUCED,
                    "conv": CHEAP_KINDS | VIEW_KINDS | {Kind.SLICE},
                    "matrix": CHEAP_KINDS | VIEW_KINDS | {Kind.SLICE},
                    "pool": CHEAP_KINDS | {Kind.SLICE},
                    "softmax": ELEMENTWISE_KINDS | VIEW_KINDS | {Kind.SLICE},
                }
            ),
            frozenset({"gate", "normalization"}),
            512,
            MOST_TOGETHER,
        ),
        "cpu": Capability(MappingProxyType(_REDUCED), frozenset(), 512, MOST_TOGETHER),
        # Schedules of others. Metal takes 31 arguments, the fewest of TVM's targets.
        "other": Capability(MappingProxyType(_REDUCED), frozenset(), 31, 1),
    }
)


def capability_of(target: str) -> Capability:
    """Look up a kind of target.

    Raises:
        UsageError: It is none of ``CAPABILITIES``.
    """
    if target not in CAPABILITIES:
        raise UsageError(f"kind of target: wanted one of {', '.join(CAPABILITIES)}, got {target!r}")
    return CAPABILITIES[target]
