"""Which optional extensions of a group pay on a device.

::

    apart:    kernel of the group + kernel of what would join    two launches, a value between them in memory
    together: one kernel                                         what joins is computed as often as it is read

An extension is taken when the estimate for one kernel is less than that for two. Estimates are bounds at the
device's peaks (``cost.py``), equally optimistic on both sides; a fusion that saves a launch and nothing else
is taken as long as it does not compute for longer than a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_fuse.core.cost import (
    NO_COST,
    GroupCost,
    Parts,
    find_before,
    group_cost,
    operator_costs,
    side_by_side,
    tensor_bytes,
    time_s,
)
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.kinds import ANCHOR_KINDS, Kind
from tvm_fuse.core.plan import FusionGroup
from tvm_fuse.core.plan_options import Accept, Candidate, Extension
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.targets import Device

__all__ = ["Comparison", "accept_on", "compare_extension", "compare_group"]


@dataclass(frozen=True)
class Comparison:
    """The cost of one kernel, and of the kernels that it replaces; of the copies that it needs, too."""

    together: GroupCost
    apart: tuple[GroupCost, ...]
    copies: tuple[GroupCost, ...] = ()

    def together_s(self, device: Device) -> float:
        """Seconds of the one kernel and of its copies."""
        return sum(time_s(cost, device) for cost in (self.together, *self.copies))

    def apart_s(self, device: Device) -> float:
        """Seconds of the others, one after another."""
        return sum(time_s(cost, device) for cost in self.apart)

    def saved_s(self, device: Device) -> float:
        """Seconds that the one kernel saves; negative where it loses."""
        return self.apart_s(device) - self.together_s(device)


def accept_on(device: Device) -> Accept:
    """The rule of a device for ``PlanOptions.accept``.

    Args:
        device: Where the model will run.

    Returns:
        A function of a graph and a candidate: None to take it, or ``fusion-costs-time`` with both estimates.
    """

    def accept(graph: Graph, candidate: Candidate) -> Reason | None:
        compared = compare_extension(graph, candidate)
        apart, together = compared.apart_s(device), compared.together_s(device)
        if together < apart:
            return None
        at = graph.nodes[candidate.added[-1]]
        again = f"{compared.together.extra_flops / 1e6:.1f} million operations computed again"
        copies = f"{len(compared.copies)} of its results copied from there"
        return Reason(
            Code.FUSION_COSTS_TIME,
            str(at),
            f"less than {1e6 * apart:.1f} us, the estimate for kernels of their own on {device.name}",
            f"{1e6 * together:.1f} us in one kernel, {copies if compared.copies else again}",
        )

    return accept


def compare_extension(graph: Graph, candidate: Candidate) -> Comparison:
    """The cost of a group with and without an extension.

    A value that several kernels would compute again saves each of them its share of the kernel that computes
    it now.

    Args:
        graph: The graph; the shapes of the operators are static.
        candidate: The group and what would join it.
    """
    if candidate.extension is Extension.PARALLEL and candidate.anchor is not None:
        return _compare_layers(graph, candidate)
    nodes = tuple(sorted({*candidate.nodes, *candidate.added}))
    heavy = (node for node in candidate.added if graph.nodes[node].kind in ANCHOR_KINDS)
    absorbed = candidate.added if candidate.extension is Extension.ABSORBED else ()
    own = group_cost(graph, Parts(candidate.added, next(heavy, None)))
    if candidate.extension is Extension.RECOMPUTE:
        again = (*candidate.recomputed, *candidate.added)
        alone = _with_prologue(graph, candidate.anchor, candidate.nodes, candidate.recomputed)
        together = _with_prologue(graph, candidate.anchor, nodes, again)
        return Comparison(
            group_cost(graph, together), (group_cost(graph, alone), _share(own, candidate.kernels))
        )
    prologue = candidate.added if candidate.extension is Extension.PROLOGUE else ()
    together = Parts(nodes, candidate.anchor, prologue, absorbed)
    apart = group_cost(graph, Parts(candidate.nodes, candidate.anchor)), own
    return Comparison(group_cost(graph, together), apart)


def _with_prologue(
    graph: Graph, anchor: int | None, nodes: tuple[int, ...], recomputed: tuple[int, ...]
) -> Parts:
    before = () if anchor is None else find_before(graph, anchor, nodes)
    return Parts(nodes, anchor, before, recomputed=recomputed)


def _compare_layers(graph: Graph, candidate: Candidate) -> Comparison:
    """Layers side by side: together they read their data once, and have as many blocks as all of them.

    A concatenation of all results is no kernel any more.
    """
    anchors = [
        node for node in (*candidate.nodes, *candidate.added) if graph.nodes[node].kind in ANCHOR_KINDS
    ]
    owner = {anchor: anchor for anchor in anchors}
    joining = []
    for node in sorted({*candidate.nodes, *candidate.added}.difference(anchors)):
        owners = {owner[source] for source in graph.nodes[node].inputs if source in owner}
        if len(owners) == 1 and graph.nodes[node].kind is not Kind.TUPLE:
            owner[node] = owners.pop()
        else:
            joining.append(node)
    branches = [
        group_cost(graph, Parts(tuple(node for node in sorted(owner) if owner[node] == anchor), anchor))
        for anchor in anchors
    ]
    copies = (tensor_bytes(graph.nodes[node].output) for node in candidate.copied)
    return Comparison(
        side_by_side(branches, tensor_bytes(graph.nodes[graph.nodes[anchors[0]].inputs[0]].output)),
        (*branches, *([group_cost(graph, Parts(tuple(joining)))] if joining else [])),
        tuple(replace(NO_COST, dram_read_bytes=n, dram_write_bytes=n, launches=1) for n in copies),
    )


def compare_group(graph: Graph, group: FusionGroup, kernels: Mapping[int, int] | None = None) -> Comparison:
    """The cost of a group as one kernel, and as a kernel for each operator.

    Args:
        graph: The graph.
        group: One of its groups.
        kernels: For each operator that is computed again, how many kernels do it: each of them saves its
            share of a kernel for that operator.
    """
    parts = Parts(group.nodes, group.anchor, group.prologue, group.absorbed, group.recomputed)
    again = [
        _share(cost, (kernels or {}).get(node, 1))
        for node in group.recomputed
        for cost in operator_costs(graph, (node,))
    ]
    return Comparison(group_cost(graph, parts), (*again, *operator_costs(graph, group.owned)))


def _share(cost: GroupCost, readers: int) -> GroupCost:
    """One reader's part of a kernel."""
    return replace(
        cost,
        flops=cost.flops // readers,
        dram_read_bytes=cost.dram_read_bytes // readers,
        dram_write_bytes=cost.dram_write_bytes // readers,
        launches=cost.launches / readers,
    )
