"""The fusion plan: which operators become one kernel, and why the others do not.

Anchors are visited from the last to the first, so that of two producers of one residual add
the later one takes it (the earlier result is in memory by then). The same graph always gives
the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_fuse.core.chain import Chain, Step, grow_chain
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import ANCHOR_KINDS, Graph, Node
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined

__all__ = ["FusionGroup", "FusionPlan", "check_plan", "plan_chains"]

RULE = "chain"


@dataclass(frozen=True)
class FusionGroup:
    """One fused kernel: some operators, of which one gives the result.

    Args:
        name: Family and steps, such as ``conv2d_bias_relu``.
        family: What the kernel is built around, such as ``conv2d``.
        anchor: Id of the operator whose schedule the kernel gets; None for elementwise operators alone.
        nodes: Ids of all operators, in topological order.
        result: Id of the one node whose value leaves the group.
        steps: What is computed after the anchor, in order.
        prologue: Ids of operators computed while the anchor reads its operands.
        absorbed: Ids of earlier heavy operators computed inside this kernel.
        end: Why the group ends where it does.
        anchor_name: Where the anchor came from.
        operators: The front end's names of the operators, in topological order.
    """

    name: str
    family: str
    anchor: int | None
    nodes: tuple[int, ...]
    result: int
    steps: tuple[Step, ...]
    prologue: tuple[int, ...] = ()
    absorbed: tuple[int, ...] = ()
    end: Reason | None = None
    anchor_name: str = ""
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusionPlan:
    """Groups in topological order of their anchors, and one decision for every anchor."""

    groups: tuple[FusionGroup, ...]
    decisions: tuple[Decision, ...]


def plan_chains(graph: Graph, options: PlanOptions | None = None) -> FusionPlan:
    """Decide the fused kernels of a graph.

    Args:
        graph: The graph, after folding and in its final layout.
        options: What the target can do, and what the user wants.

    Returns:
        The plan. Groups are disjoint, and only a group's last value is read outside it.
    """
    groups: list[FusionGroup] = []
    decisions: list[Decision] = []
    taken: set[int] = set()
    for anchor in reversed(graph.of_kind(*ANCHOR_KINDS)):
        chain = grow_chain(graph, anchor.id, taken)
        reason = _check_static(anchor) or _check_epilogue(chain)
        if reason is not None:
            decisions.append(declined(RULE, str(anchor), reason))
            continue
        group = _make_group(graph, chain)
        taken.update(chain.nodes)
        groups.append(group)
        decisions.append(applied(RULE, str(anchor), f"{group.name}; ends: {chain.end}"))
    plan = FusionPlan(tuple(reversed(groups)), tuple(reversed(decisions)))
    check_plan(graph, plan)
    return plan


def _make_group(graph: Graph, chain: Chain) -> FusionGroup:
    anchor = graph.nodes[chain.anchor]
    return FusionGroup(
        name="_".join((anchor.kind.value, *chain.epilogue)),
        family=anchor.kind.value,
        anchor=anchor.id,
        nodes=chain.nodes,
        result=chain.result,
        steps=chain.steps,
        end=chain.end,
        anchor_name=str(anchor),
        operators=tuple(graph.nodes[node].op for node in chain.nodes),
    )


def _check_static(anchor: Node) -> Reason | None:
    if anchor.output.is_static:
        return None
    return Reason(Code.CHAIN_DYNAMIC_SHAPE, str(anchor), "a static shape", str(anchor.output))


def _check_epilogue(chain: Chain) -> Reason | None:
    if chain.steps or chain.end is None:
        return None
    end = chain.end
    if end.code is Code.READER_NOT_ELEMENTWISE:
        return Reason(Code.CHAIN_NO_EPILOGUE, end.at, end.wanted, end.got)
    return end


def check_plan(graph: Graph, plan: FusionPlan) -> None:
    """Verify a plan's promises.

    Raises:
        InternalError: Two groups share an operator, or an inner result is read outside its group.
    """
    owner: dict[int, str] = {}
    for group in plan.groups:
        nodes = frozenset(group.nodes)
        for node in nodes:
            if node in owner:
                raise InternalError(f"node {node} is in two groups: {owner[node]} and {group.name}")
            owner[node] = group.name
        for node in nodes - {group.result}:
            outside = [reader for reader in graph.readers(node) if reader not in nodes]
            if outside or graph.is_output(node):
                raise InternalError(f"inner result {graph.nodes[node]} of {group.name} is read outside it")
