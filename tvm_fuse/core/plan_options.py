"""What a user, a target and a cost model may say about a plan.

``accept`` is the one hook for a cost model: it is asked about every extension of a group that is legal
but not always worth it (see ``Extension``). It answers None to take it, or the reason not to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.reason import Reason

__all__ = ["FUSE_MODES", "Accept", "Candidate", "Extension", "PlanOptions"]

#: ``all`` groups whatever is legal and accepted; ``none`` leaves every operator alone.
FUSE_MODES = ("all", "none")


class Extension(str, Enum):
    """Why a group could be larger than its anchor and what follows."""

    #: Operators computed while the anchor reads its operand, once for each read.
    PROLOGUE = "prologue"
    #: An earlier heavy operator computed inside the group's kernel.
    ABSORBED = "absorbed"
    #: Operators computed again in each kernel that reads them, instead of once into memory.
    RECOMPUTE = "recompute"
    #: Operators side by side on one input, computed by one kernel.
    PARALLEL = "parallel"


@dataclass(frozen=True)
class Candidate:
    """An extension of a group that the rules allow.

    Args:
        extension: What kind of extension it is.
        family: Family of the group, such as ``conv2d``.
        anchor: Id of the group's anchor; None where it has none.
        nodes: Ids of the group's operators without the extension, in topological order.
        added: Ids of the operators that would join, in topological order.
        copied: Ids of results among these that one kernel would write beside others, and another one would
            have to copy from there, because what reads them cannot.
        recomputed: Ids of operators of the group that other kernels compute, too.
        kernels: How many kernels would compute ``added``; they do it all, or none does.
    """

    extension: Extension
    family: str
    anchor: int | None
    nodes: tuple[int, ...]
    added: tuple[int, ...]
    copied: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    kernels: int = 1


Accept = Callable[[Graph, Candidate], "Reason | None"]


@dataclass(frozen=True)
class PlanOptions:
    """How to plan.

    Args:
        target: Kind of target, a key of ``core.capabilities.CAPABILITIES``: which extensions its
            schedules can compute.
        fuse: One of ``FUSE_MODES``.
        only: Glob patterns of groups to keep (their id, name or anchor's name); empty keeps all.
        skip: Glob patterns of groups to leave out.
        max_ops: Most operators of a group; None is the planner's own limit.
        accept: Asked about every ``Candidate``; None accepts what is legal.

    Raises:
        UsageError: ``fuse`` or ``max_ops`` is not one of those.
    """

    target: str = "other"
    fuse: str = "all"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    max_ops: int | None = None
    accept: Accept | None = None

    def __post_init__(self) -> None:
        if self.fuse not in FUSE_MODES:
            raise UsageError(f"fuse: wanted one of {', '.join(FUSE_MODES)}, got {self.fuse!r}")
        if self.max_ops is not None and self.max_ops < 1:
            raise UsageError(f"max_ops: wanted 1 or more, got {self.max_ops}")
