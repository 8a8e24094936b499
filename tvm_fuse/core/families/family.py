"""A family: anchors that are grouped by the same rules, and the conditions they must meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.core.reason import Code, Reason

__all__ = ["Condition", "Family", "result_is_one_tensor", "result_is_static"]

#: Named as the statement that must hold; the reason says why it does not.
Condition = Callable[[Graph, Node], "Reason | None"]


@dataclass(frozen=True)
class Family:
    """Anchors of one kind.

    Args:
        name: Also the key of ``Capability.prologue``.
        kinds: Kinds of the anchors.
        require: Conditions on an anchor, tried in order.
        has_epilogue: Whether what follows elementwise may join.
        entries: Operands of the anchor that may be computed while it reads them.
        rule: Name of the rule in decisions.
    """

    name: str
    kinds: frozenset[Kind]
    require: tuple[Condition, ...]
    has_epilogue: bool = False
    entries: tuple[int, ...] = ()
    rule: str = ""

    def check(self, graph: Graph, node: Node) -> Reason | None:
        """The first condition that an anchor does not meet."""
        for condition in self.require:
            reason = condition(graph, node)
            if reason is not None:
                return reason
        return None


def result_is_static(graph: Graph, node: Node) -> Reason | None:
    """Every size of the result is a number."""
    if node.output.is_static:
        return None
    return Reason(Code.CHAIN_DYNAMIC_SHAPE, str(node), "a static shape", str(node.output))


def result_is_one_tensor(graph: Graph, node: Node) -> Reason | None:
    """The operator gives one tensor, no tuple."""
    if len(node.outputs) == 1:
        return None
    return Reason(Code.OPERATOR_OPAQUE, str(node), "one result", f"{len(node.outputs)} results")
