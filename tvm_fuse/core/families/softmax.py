"""Softmax and log softmax: what follows joins, and what they read where the target can."""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_static
from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.core.reason import Code, Reason

__all__ = ["SOFTMAX"]


def lies_in_rows(graph: Graph, node: Node) -> Reason | None:
    """The softmax is over the last axis, in float32."""
    last = (len(node.output.shape) - 1,)
    if node.attrs.axes == last and node.output.dtype == "float32":
        return None
    got = f"axis {node.attrs.axes[0]} of {node.output}"
    return Reason(Code.TARGET_CANNOT_JOIN, str(node), "float32, over the last axis", got)


SOFTMAX = Family(
    "softmax",
    frozenset({Kind.SOFTMAX}),
    (result_is_static, lies_in_rows),
    has_epilogue=True,
    entries=(0,),
    rule="softmax",
)
