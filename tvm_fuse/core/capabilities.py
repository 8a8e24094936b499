"""What the schedules of a target can compute in one kernel, beside an anchor and what follows it.

A table, not a rule: the planner looks up here whether an extension of a group (``plan_options.Extension``)
may be tried at all; whether it pays is for ``PlanOptions.accept``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import (
    ELEMENTWISE_KINDS,
    INJECTIVE_KINDS,
    VIEW_KINDS,
    ConvAttrs,
    DenseAttrs,
    Graph,
    Kind,
    Node,
)

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


_BLOCKED = re.compile(r"NCHW[0-9]+c")
_PACKED = re.compile(r"OI[0-9]+o")


@dataclass(frozen=True)
class Capability:
    """What one kind of target can do.

    Args:
        prologue: Family -> kinds that it can compute while it reads its operands.
        joined: Names of the families that may have further heavy operators inside (``gate``,
            ``normalization``).
        most_arguments: Most tensors that a kernel takes, results included.
        most_results: Most results of one kernel of elementwise operators.
        requires: Family -> what an anchor must be for a prologue; a family that is not named: anything.
    """

    prologue: Mapping[str, frozenset[Kind]]
    joined: frozenset[str]
    most_arguments: int
    most_results: int
    requires: Mapping[str, Callable[[Graph, Node], bool]] = field(default_factory=dict)

    def prologue_of(self, family: str, graph: Graph, anchor: Node) -> frozenset[Kind]:
        """Kinds that can be computed while an anchor of a family reads its operands."""
        requires = self.requires.get(family)
        if requires is not None and not requires(graph, anchor):
            return frozenset()
        return self.prologue.get(family, frozenset())


def is_blocked_conv2d(graph: Graph, node: Node) -> bool:
    """Whether a schedule of ours computes a convolution on a CPU: it copies the rows that it reads."""
    attrs = node.attrs
    if node.kind is not Kind.CONV2D or not isinstance(attrs, ConvAttrs):
        return False
    if not _is_static_float32(graph, node):
        return False
    layouts = (attrs.data_layout, attrs.out_layout or attrs.data_layout)
    if any(_BLOCKED.fullmatch(layout) is None for layout in layouts):
        return False
    data = graph.nodes[node.inputs[0]].output.shape
    return attrs.groups == 1 or attrs.groups == int(data[1]) * int(data[4]) == attrs.channels


def is_packed_dense(graph: Graph, node: Node) -> bool:
    """Whether a schedule of ours computes a dense layer on a CPU: it copies its rows, which are few."""
    is_dense = node.kind is Kind.DENSE and isinstance(node.attrs, DenseAttrs)
    return is_dense and bool(_PACKED.fullmatch(node.attrs.kernel_layout)) and _is_static_float32(graph, node)


def _is_static_float32(graph: Graph, node: Node) -> bool:
    tensors = (*(graph.nodes[source].output for source in node.inputs[:2]), node.output)
    return all(tensor.dtype == "float32" and tensor.is_static for tensor in tensors)


#: TVM's own schedules of reductions inline what is read, on every target.
_REDUCED = {"reduce": INJECTIVE_KINDS | {Kind.TUPLE}}

#: What our schedules for CPUs compute while they copy what they read.
_COPIED = CHEAP_KINDS | VIEW_KINDS | {Kind.LAYOUT_TRANSFORM, Kind.PAD, Kind.SLICE}

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
        "cpu": Capability(
            MappingProxyType(
                {
                    **_REDUCED,
                    "conv": _COPIED,
                    "matrix": _COPIED,
                }
            ),
            frozenset(),
            512,
            MOST_TOGETHER,
            MappingProxyType({"conv": is_blocked_conv2d, "matrix": is_packed_dense}),
        ),
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
