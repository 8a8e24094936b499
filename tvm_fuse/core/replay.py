"""A plan file carried out again: on the same graph, for the same target, whatever was edited in it.

The planner's rules are not asked, so a newer version with other rules makes the same kernels of an old file.
What must hold for any plan (``legality.py``) is.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_fuse.core.chain import MOST_OPERATORS, Step, StepKind, grow_chain
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.families import family_of
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup, make_group
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.plan import FusionPlan, decide_groups
from tvm_fuse.core.plan_file import PlanFile, PlannedGroup, describe_graph
from tvm_fuse.core.steer import leave_alone

__all__ = ["replay"]


def replay(graph: Graph, file: PlanFile, target: str) -> FusionPlan:
    """Make the plan that a file describes.

    Args:
        graph: The graph, after folding and in its final layout.
        file: The plan.
        target: The target string it is to be carried out for.

    Returns:
        The plan, with a decision for every operator.

    Raises:
        ModelError: The graph or the target is not the one of the plan, or a group is not legal.
    """
    if target != file.target:
        raise _stale(f"the target was {file.target}, is {target}", file)
    _check_graph(graph, file)
    groups = tuple(_group(graph, planned) for planned in file.groups)
    alone = leave_alone(graph, (node for node in file.alone if node < len(graph.nodes)))
    check_groups(graph, (*groups, *alone), file.kind)
    return FusionPlan(groups, decide_groups(graph, groups), alone)


def _check_graph(graph: Graph, file: PlanFile) -> None:
    now = describe_graph(graph)
    if now == file.graph:
        return
    before, after = len(file.graph) - 1, len(now) - 1  # the last line is the outputs
    size = "" if before == after else f"; the graph had {before} nodes, has {after}"
    differing = (index for index, (was, got) in enumerate(zip(file.graph, now)) if was != got)
    index = next(differing, min(before, after))
    where = "the end of the graph" if index == min(before, after) else f"node {index}"
    raise _stale(f"{where} was {file.graph[index]}, is {now[index]}{size}", file)


def _stale(what: str, file: PlanFile) -> ModelError:
    return ModelError(f"the fusion plan is stale: {what} (planned by {file.tool})", "plan again")


def _group(graph: Graph, planned: PlannedGroup) -> FusionGroup:
    for node in planned.nodes:
        if node.id >= len(graph.nodes):
            raise _wrong(planned, f"a node of the graph's {len(graph.nodes)}", f"node {node.id}")
        if graph.nodes[node.id].op != node.operator:
            raise _wrong(planned, f"node {node.id} to be {graph.nodes[node.id].op}", node.operator)
    members = planned.members
    named = {*planned.prologue, *planned.absorbed, *planned.also, *planned.recomputed, planned.result}
    named.update(_optional(planned.anchor))
    outside = named.difference(members)
    if not members or outside:
        raise _wrong(planned, "its anchor, result and prologue among its nodes", f"nodes {sorted(outside)}")
    steps = () if planned.anchor is None else _steps(graph, planned.anchor, planned)
    made = make_group(
        graph, planned.anchor, members, planned.result, steps, planned.prologue, planned.absorbed,
        planned.end, planned.also, planned.recomputed,
    )  # fmt: skip
    return replace(made, id=planned.id, name=planned.name, nodes=members)


def _optional(anchor: int | None) -> tuple[int, ...]:
    return () if anchor is None else (anchor,)


def _wrong(planned: PlannedGroup, wanted: str, got: str) -> ModelError:
    return ModelError(f"the fusion plan: group {planned.id} {planned.name}: wanted {wanted}, got {got}")


def _steps(graph: Graph, anchor: int, planned: PlannedGroup) -> tuple[Step, ...]:
    """What follows the anchor, named as the planner would; what it cannot name is one step in the end."""
    family, members = family_of(graph.nodes[anchor].kind), planned.members
    if family is None or not family.has_epilogue:
        return ()
    others = frozenset(range(len(graph.nodes))) - set(members)
    steps = grow_chain(graph, anchor, others, max(MOST_OPERATORS, len(members))).steps
    named = {anchor, *planned.prologue, *(node for step in steps for node in step.nodes)}
    left = tuple(node for node in sorted(members) if node not in named and node > anchor)
    return (*steps, Step(StepKind.ELEMENTWISE, left, StepKind.ELEMENTWISE.value)) if left else steps
