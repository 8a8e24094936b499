"""A plan in parts, each a plan of its own that holds more than the one before: the rungs of a ladder.

By step: first every operator alone, then anchors with their bias, then with their activation too, and so on.
By chain: the groups of the plan one slice after another. What is in no group of a rung is a kernel of its
own, so that two rungs differ in what the second one fuses; only the whole plan leaves the rest to TVM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tvm_fuse.core.chain import StepKind
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup, make_group
from tvm_fuse.core.plan import FusionPlan, decide_groups
from tvm_fuse.core.steer import leave_alone

__all__ = ["Rung", "partial_plan", "rungs_by_chain", "rungs_by_step"]

NOTHING = "folded, nothing fused"

#: What each rung adds to the one before.
_STEPS = (
    ("bias", StepKind.BIAS),
    ("activation", StepKind.ACTIVATION),
    ("residual", StepKind.RESIDUAL),
    ("elementwise", StepKind.ELEMENTWISE),
)


@dataclass(frozen=True)
class Rung:
    """A part of a plan.

    Args:
        name: What it adds.
        plan: All that is fused in it.
        added: Ids of the groups that it adds or makes larger.
    """

    name: str
    plan: FusionPlan
    added: tuple[str, ...]


def rungs_by_step(graph: Graph, plan: FusionPlan) -> tuple[Rung, ...]:
    """The plan by kinds of steps.

    Args:
        graph: The graph.
        plan: Its plan.

    Returns:
        ``folded, nothing fused`` first and the whole plan last; a rung that would add nothing is left out.
    """
    rungs = [Rung(NOTHING, partial_plan(graph, ()), ())]
    allowed: set[StepKind] = set()
    before: dict[str, frozenset[int]] = {}
    for name, kind in _STEPS:
        allowed.add(kind)
        groups = [short for group in plan.groups for short in _shortened(graph, group, allowed)]
        now = {group.id: frozenset(group.nodes) for group in groups}
        added = tuple(label for label, nodes in now.items() if before.get(label) != nodes)
        if added:
            rungs.append(Rung(f"+ {name}", partial_plan(graph, groups), added))
            before = now
    rest = tuple(group.id for group in plan.groups if before.get(group.id) != frozenset(group.nodes))
    return (*rungs, Rung("whole plan", plan, rest))


def _shortened(graph: Graph, group: FusionGroup, allowed: set[StepKind]) -> Iterable[FusionGroup]:
    """A group up to the first step that is not allowed, without what comes before its anchor."""
    if group.anchor is None:
        if StepKind.ELEMENTWISE in allowed:
            yield group
        return
    if group.absorbed:
        return
    steps = []
    for step in group.steps:
        if step.kind not in allowed:
            break
        steps.append(step)
    if not steps:
        return
    nodes = {group.anchor, *(node for step in steps for node in step.nodes)}
    short = make_group(graph, group.anchor, nodes, steps[-1].result, tuple(steps))
    yield replace(short, id=group.id)


def rungs_by_chain(graph: Graph, plan: FusionPlan, slices: int) -> tuple[Rung, ...]:
    """The plan by its groups.

    Args:
        graph: The graph.
        plan: Its plan.
        slices: In how many rungs at most the groups are added.

    Returns:
        ``folded, nothing fused`` first, then a rung for each slice.
    """
    rungs = [Rung(NOTHING, partial_plan(graph, ()), ())]
    size = -(-len(plan.groups) // slices)
    for start in range(0, len(plan.groups), max(1, size)):
        added = plan.groups[start : start + size]
        ids = tuple(group.id for group in added)
        name = f"+ {ids[0]}" if len(ids) == 1 else f"+ {ids[0]} to {ids[-1]}"
        rungs.append(Rung(name, partial_plan(graph, plan.groups[: start + size]), ids))
    return tuple(rungs)


def partial_plan(graph: Graph, groups: Iterable[FusionGroup]) -> FusionPlan:
    """A plan with some groups, every other operator alone."""
    groups = tuple(groups)
    taken = {node for group in groups for node in group.owned}
    alone = leave_alone(graph, (node.id for node in graph.nodes if node.id not in taken))
    return FusionPlan(groups, decide_groups(graph, groups), alone)
