"""Look at all batch norms of a graph before any of them is folded.

Three questions, in this order: is the epsilon the one that the source, a training config or the user
names; can the statistics be right; and is there something that is legal and yet hardly meant?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm_fuse.core.epsilon import EpsilonCheck, ExpectedEpsilon, check_epsilon, measure_impact
from tvm_fuse.core.fold import BatchNorm, read_batch_norm
from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.statistics import audit_channels, collect_warnings

__all__ = ["Audit", "audit_graph", "compare_epsilons", "mismatch"]


@dataclass(frozen=True)
class Audit:
    """What is wrong with the numbers of batch norms, and what is suspicious."""

    problems: tuple[Reason, ...]
    warnings: tuple[Reason, ...]


def audit_graph(graph: Graph) -> Audit:
    """Check the statistics of every batch norm with constant parameters."""
    norms = (read_batch_norm(graph, node) for node in graph.of_kind(Kind.BATCH_NORM))
    problems = tuple(reason for bn in norms if isinstance(bn, BatchNorm) for reason in audit_channels(bn))
    return Audit(problems, collect_warnings(graph))


def compare_epsilons(
    graph: Graph, expected: Mapping[str, ExpectedEpsilon], *, align: bool
) -> dict[int, EpsilonCheck]:
    """Compare each batch norm's epsilon with the expected one.

    Args:
        graph: The graph.
        expected: Name of a batch norm -> what its epsilon should be; the graph is believed about others.
        align: Whether the expected value replaces the graph's.

    Returns:
        Id of each batch norm -> the comparison, with its impact where the values differ.
    """
    return {
        node.id: _compare(graph, node, expected.get(str(node)), align=align)
        for node in graph.of_kind(Kind.BATCH_NORM)
    }


def _compare(graph: Graph, node: Node, expected: ExpectedEpsilon | None, *, align: bool) -> EpsilonCheck:
    check = check_epsilon(str(node), node.attrs.epsilon, expected, align=align)
    bn = read_batch_norm(graph, node)
    if check.matches or isinstance(bn, Reason):
        return check
    return replace(check, impact=measure_impact(bn.gamma, bn.variance, check.in_graph, check.expected))


def mismatch(check: EpsilonCheck) -> Reason:
    """The reason for a comparison that does not match: both values, and what the difference does."""
    wanted = f"epsilon {check.expected:.9g} ({check.origin.value})"
    impact = "" if check.impact is None else f"; {check.impact}"
    return Reason(Code.BN_EPSILON_MISMATCH, check.name, wanted, f"{check.in_graph:.9g} in the graph{impact}")
