"""What must hold for a group to be one kernel with the right numbers, whoever made the group.

A plan may come from a file that somebody has edited; these rules keep any plan from changing values:
groups can be put in an order, only results are read outside, and there is one heavy operator that everything
else is computed before or after. Elementwise operators alone may give several results. Operators that are
computed again may be in several groups, and read outside; any other one is in one group at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm_fuse.core.capabilities import Capability, capability_of
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.families import ELEMENTWISE, Family, family_of
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, LEAF_KINDS, Graph, Kind, Node
from tvm_fuse.core.group import FusionGroup
from tvm_fuse.core.joins import check_join
from tvm_fuse.core.order import sort_nodes
from tvm_fuse.core.region import MOST_EVALUATIONS, count_evaluations, takes_no_tuple

__all__ = ["Fault", "check_groups", "find_fault", "find_faults"]


@dataclass(frozen=True)
class Fault:
    """A rule that a group breaks."""

    group: str
    wanted: str
    got: str

    def __str__(self) -> str:
        return f"group {self.group}: wanted {self.wanted}, got {self.got}"


def check_groups(graph: Graph, groups: Iterable[FusionGroup], target: str = "other") -> None:
    """Refuse groups that would not be one kernel each, or would change values.

    Args:
        graph: The graph they are of.
        groups: Any groups; their names, steps and reasons do not count.
        target: Kind of target, a key of ``CAPABILITIES``.

    Raises:
        ModelError: With the group, what was wanted and what was there.
    """
    for fault in find_faults(graph, tuple(groups), capability_of(target)):
        raise ModelError(f"the fusion plan cannot be carried out: {fault}", "undo the edit, or plan again")


def find_faults(graph: Graph, groups: tuple[FusionGroup, ...], capability: Capability) -> Iterator[Fault]:
    """What is wrong with groups; their order is looked at where each of them is sound."""
    faults = [
        _find_overlap(groups),
        _find_hidden(graph, groups),
        *(find_fault(graph, group, capability) for group in groups),
    ]
    yield from filter(None, faults)
    if not any(faults) and any(group.also for group in groups):  # one result comes after all that it needs
        order = sort_nodes(graph, groups)
        if isinstance(order, FusionGroup):
            got = "a result that it needs itself, by way of others"
            yield Fault(str(order), "groups that can be put in an order", got)


def _find_overlap(groups: Iterable[FusionGroup]) -> Fault | None:
    """An operator that is in two groups."""
    owner: dict[int, FusionGroup] = {}
    for group in groups:
        for node in group.owned:
            if node in owner:
                return Fault(
                    str(group), "operators of its own", f"node {node}, which is in two groups: {owner[node]}"
                )
            owner[node] = group
    return None


def _find_hidden(graph: Graph, groups: Iterable[FusionGroup]) -> Fault | None:
    """An operand of what is computed again that is in no memory: an inner value of another group."""
    groups = tuple(groups)
    inner = {node for group in groups for node in set(group.owned).difference(group.results)}
    for group in groups:
        known = [node for node in group.recomputed if 0 <= node < len(graph.nodes)]
        for source in (source for node in known for source in graph.nodes[node].inputs):
            if source in inner and source not in group.nodes:
                wanted = "operands in memory for what is computed again"
                return Fault(str(group), wanted, f"node {source}, an inner value of another group")
    return None


def find_fault(graph: Graph, group: FusionGroup, capability: Capability) -> Fault | None:
    """The first rule that a group breaks; None for a sound one."""
    rule = _check_elementwise if group.anchor is None else _check_anchored
    reason = (
        _check_nodes(graph, group)
        or _check_results(graph, group, capability)
        or _check_recomputed(graph, group)
        or _check_leaving(graph, group)
        or rule(graph, group, capability)
    )
    return None if reason is None else Fault(str(group), *reason)


def _check_nodes(graph: Graph, group: FusionGroup) -> tuple[str, str] | None:
    """Known operators with static shapes."""
    members = frozenset(group.nodes)
    if not members or not all(0 <= node < len(graph.nodes) for node in members):
        return "operators of the model", f"nodes {list(group.nodes)} of {len(graph.nodes)}"
    if tuple(sorted(members)) != group.nodes:
        return "each operator once, in order", f"nodes {list(group.nodes)}"
    if group.result not in members or not (group.anchor is None or group.anchor in members):
        return "an anchor and a result among its operators", f"anchor {group.anchor}, result {group.result}"
    for node in map(graph.nodes.__getitem__, group.nodes):
        if node.kind in LEAF_KINDS or (len(node.outputs) != 1 and node.kind is not Kind.TUPLE):
            return "operators with one result", f"{node} ({node.op})"
        if not all(output.is_static for output in node.outputs):
            return "static shapes", f"{node} {node.output}"
        if not takes_no_tuple(graph, node) or not _has_its_tuples(graph, node, members):
            return "tensors as operands", f"a tuple that {node} reads"
        if node.kind is Kind.TUPLE and not members.intersection(graph.readers(node.id)):
            return "operators", f"{node}, a tuple that is no operand in it"
    return None


def _check_results(graph: Graph, group: FusionGroup, capability: Capability) -> tuple[str, str] | None:
    """Several results have one shape; each thread computes one element of each."""
    if not group.also:
        return None
    if not set(group.results) <= set(group.nodes) or list(group.results) != sorted(set(group.results)):
        return "results among its operators, the last one in the end", f"{list(group.results)}"
    if group.anchor is not None or len(group.results) > capability.most_results:
        wanted = f"one result, or at most {capability.most_results} of elementwise operators alone"
        return wanted, f"{len(group.results)} results"
    shape = graph.nodes[group.result].output.shape
    for node in map(graph.nodes.__getitem__, group.results):
        if node.kind is Kind.TUPLE or not shape or node.output.shape != shape:
            return f"tensors of one shape as results, {list(shape)}", f"{node} {node.output}"
    return None


def _check_recomputed(graph: Graph, group: FusionGroup) -> tuple[str, str] | None:
    """What is computed again is read here, needs nothing that this kernel alone computes, is no result."""
    again = set(group.recomputed)
    if not again:
        return None
    if tuple(sorted(again)) != group.recomputed or not again <= set(group.nodes):
        return "operators of its own to compute again, in order", f"{list(group.recomputed)}"
    if not again.isdisjoint((group.anchor, *group.absorbed, *group.results)):
        return "neither anchors nor results computed again", f"{list(group.recomputed)}"
    for node in map(graph.nodes.__getitem__, group.recomputed):
        if not set(node.inputs).intersection(group.nodes) <= again:
            return "operands from outside, or computed again as well", f"those of {node}"
        if not set(graph.readers(node.id)).intersection(group.nodes):
            return "what it reads to be computed again", f"node {node.id} ({node}), which it does not read"
    return None


def _check_leaving(graph: Graph, group: FusionGroup) -> tuple[str, str] | None:
    """No value leaves but the results; what is computed again, others compute for themselves."""
    for node in group.owned:
        outside = set(graph.readers(node)).difference(group.nodes)
        if node not in group.results and (outside or graph.is_output(node)):
            wanted = f"{len(group.results)} values that are read outside: node"
            results = ", ".join(map(str, group.results))
            return f"{wanted} {results}", f"node {node} ({graph.nodes[node]}) is read outside it"
    return None


def _has_its_tuples(graph: Graph, node: Node, members: frozenset[int]) -> bool:
    return all(source in members for source in node.inputs if graph.nodes[source].kind is Kind.TUPLE)


def _check_elementwise(graph: Graph, group: FusionGroup, capability: Capability) -> tuple[str, str] | None:
    for node in map(graph.nodes.__getitem__, group.nodes):
        if node.kind not in ELEMENTWISE.kinds and node.kind is not Kind.TUPLE:
            return "an anchor, or elementwise operators alone", f"{node} ({node.op})"
    if group.prologue or group.absorbed:
        return "no prologue without an anchor", f"nodes {[*group.prologue, *group.absorbed]}"
    return _check_evaluations(graph, group.nodes, group.results)


def _check_anchored(graph: Graph, group: FusionGroup, capability: Capability) -> tuple[str, str] | None:
    assert group.anchor is not None
    anchor = graph.nodes[group.anchor]
    family = family_of(anchor.kind)
    if family is None or family is ELEMENTWISE:
        return "an anchor that kernels are built around", f"{anchor} ({anchor.op})"
    if group.absorbed or (anchor.kind is Kind.REDUCE and group.result != anchor.id):
        return _check_joined(graph, group, capability)
    after = _computed_from(graph, group.nodes, anchor.id)
    before = tuple(node for node in group.nodes if node not in after and node != anchor.id)
    if before != group.prologue:
        return f"the operators before the anchor as prologue: {list(before)}", f"{list(group.prologue)}"
    return (
        _check_after(graph, family, anchor, sorted(after))
        or _check_before(graph, family, anchor, before, after, capability)
        or _check_evaluations(graph, after, group.results)
    )


def _check_joined(graph: Graph, group: FusionGroup, capability: Capability) -> tuple[str, str] | None:
    assert group.anchor is not None
    family = "normalization" if graph.nodes[group.anchor].kind is Kind.REDUCE else "gate"
    if family not in capability.joined:
        inner = [str(graph.nodes[node]) for node in group.absorbed]
        return f"a target that joins a {family}", f"{', '.join(inner) or 'what follows'} in one kernel"
    return check_join(graph, group)


def _computed_from(graph: Graph, nodes: tuple[int, ...], anchor: int) -> frozenset[int]:
    after = {anchor}
    for node in nodes:
        if after.intersection(graph.nodes[node].inputs):
            after.add(node)
    return frozenset(after - {anchor})


def _check_after(graph: Graph, family: Family, anchor: Node, after: list[int]) -> tuple[str, str] | None:
    for node in map(graph.nodes.__getitem__, after):
        if not family.has_epilogue or node.kind not in ELEMENTWISE_KINDS:
            return f"elementwise operators after {anchor.op}", f"{node} ({node.op})"
        if node.output.shape != anchor.output.shape:
            return f"results of the shape of {anchor}: {anchor.output}", f"{node} {node.output}"
    return None


def _check_before(
    graph: Graph,
    family: Family,
    anchor: Node,
    before: tuple[int, ...],
    after: frozenset[int],
    capability: Capability,
) -> tuple[str, str] | None:
    kinds, members = capability.prologue_of(family.name, graph, anchor), frozenset(before)
    for node in map(graph.nodes.__getitem__, before):
        if node.kind not in kinds and node.kind is not Kind.TUPLE:
            return f"operators before {anchor.op} that the target can compute with it", f"{node} ({node.op})"
    for index, source in enumerate(anchor.inputs):
        if source in members and index not in family.entries:
            return f"{anchor.op} to read operand {index} from memory", str(graph.nodes[source])
    reached = {anchor.id}
    for node_id in reversed(before):
        is_slice = graph.nodes[node_id].kind is Kind.SLICE and after.issuperset(graph.readers(node_id))
        if reached.isdisjoint(graph.readers(node_id)) and not is_slice:
            return f"operators before or after {anchor}", f"{graph.nodes[node_id]}, which is beside it"
        reached.add(node_id)
    return None


def _check_evaluations(
    graph: Graph, nodes: Iterable[int], results: tuple[int, ...]
) -> tuple[str, str] | None:
    """TVM computes an operator again for each reader: the code must not explode."""
    total = count_evaluations(graph, nodes, results)
    if total <= MOST_EVALUATIONS:
        return None
    return f"at most {MOST_EVALUATIONS} evaluations of operators for an element", str(total)
