"""What the user wants of a plan: groups kept, groups left out, or none at all.

A group that is left out must not come back through TVM's FuseOps, so each of its operators becomes a group of
its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.families import family_of
from tvm_fuse.core.graph import VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.group import FusionGroup, make_group
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Decision, Reason, Stage
from tvm_fuse.core.region import takes_no_tuple

__all__ = ["leave_alone", "leave_out"]

_Outcome = tuple[tuple[FusionGroup, ...], tuple[FusionGroup, ...], tuple[Decision, ...]]


def leave_out(graph: Graph, groups: tuple[FusionGroup, ...], options: PlanOptions) -> _Outcome:
    """Split groups into those that the user keeps and operators to leave alone.

    Args:
        graph: The graph.
        groups: All groups of the plan, with their ids.
        options: ``fuse``, ``only`` and ``skip`` count.

    Returns:
        The groups kept, one group for each operator left alone, and a decision for each of these.

    Raises:
        UsageError: A pattern fits no group.
    """
    for option, patterns in (("only", options.only), ("skip", options.skip)):
        for pattern in patterns:
            _check_pattern(option, pattern, groups)
    if options.fuse == "none":
        everything = (node.id for node in graph.nodes)
        alone = leave_alone(graph, everything)
        return (), alone, tuple(_by_user(group, "--fuse all", "--fuse none") for group in alone)
    kept = tuple(group for group in groups if _is_kept(group, options))
    out = [group for group in groups if group not in kept]
    alone = leave_alone(graph, {node for group in out for node in group.nodes})
    wanted, got = (
        ("a group that --only names", "--only " + " ".join(options.only)) if options.only else ("", "")
    )
    if options.skip:
        wanted, got = "a group that --skip does not name", "--skip " + " ".join(options.skip)
    return kept, alone, tuple(_by_user(group, wanted, got) for group in alone)


def leave_alone(graph: Graph, nodes: Iterable[int]) -> tuple[FusionGroup, ...]:
    """A group of its own for every operator that TVM might otherwise fuse with others."""
    return tuple(
        make_group(graph, _anchor(node), (*_tuples(graph, node), node.id), node.id)
        for node in map(graph.nodes.__getitem__, sorted(nodes))
        if _can_be_alone(graph, node)
    )


def _can_be_alone(graph: Graph, node: Node) -> bool:
    family = family_of(node.kind)
    if family is None or node.kind in VIEW_KINDS or not takes_no_tuple(graph, node):
        return False
    return family.check(graph, node) is None


def _anchor(node: Node) -> int | None:
    family = family_of(node.kind)
    return None if family is None or family.name == "elementwise" else node.id


def _tuples(graph: Graph, node: Node) -> tuple[int, ...]:
    return tuple(source for source in node.inputs if graph.nodes[source].kind is Kind.TUPLE)


def _by_user(group: FusionGroup, wanted: str, got: str) -> Decision:
    reason = Reason(Code.LEFT_OUT_BY_USER, group.anchor_name, wanted, got)
    rule = "chain" if group.is_layer else group.family
    return Decision(rule, group.anchor_name, Stage.CONDITION, reason, node=group.result, matched=1)


def _is_kept(group: FusionGroup, options: PlanOptions) -> bool:
    is_wanted = not options.only or any(_fits(pattern, group) for pattern in options.only)
    return is_wanted and not any(_fits(pattern, group) for pattern in options.skip)


def _names(group: FusionGroup) -> tuple[str, ...]:
    return group.id, group.name, group.anchor_name


def _fits(pattern: str, group: FusionGroup) -> bool:
    return any(fnmatchcase(name, pattern) for name in _names(group))


def _check_pattern(option: str, pattern: str, groups: tuple[FusionGroup, ...]) -> None:
    if any(_fits(pattern, group) for group in groups):
        return
    known = list(dict.fromkeys(name for group in groups for name in _names(group)))
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)
    raise UsageError(
        f"{option}: {pattern!r} fits none of the {len(groups)} groups",
        f"the nearest: {', '.join(near)}" if near else "the plan has no groups",
    )
