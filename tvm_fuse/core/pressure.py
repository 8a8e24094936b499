"""Register pressure of a chain, estimated, and the places where a chain can be cut in two.

Without a compiler::

    registers = 40 + numbers * (sums of a thread + live values)        numbers: 2 for float64, else 1

40 are addresses, loop counters and operands of a blocked product, and a thread has at most 32 sums
(``cuda_tiles.py``). A value of the chain is live from where it is computed to its last reader; ptxas works
through the elements of a thread one after another, so live values count once. The estimate leaves out what
ptxas does to hide latency: a chain above the limit spills, one below it may. A chain is *suspicious*, and
worth a compilation, long before: when it holds on to many values, or when TVM, which computes an operator
again for each of its readers, makes much code of it.

A cut stands between two steps: the first part keeps the anchor, the rest is computed element by element by a
kernel of its own. The cheapest cut moves the fewest bytes; of equals, the most even one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_fuse.core.cost import Parts, group_cost
from tvm_fuse.core.dtypes import size_bytes
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup, make_group

__all__ = ["MOST_REGISTERS", "Cut", "Pressure", "estimate_pressure", "find_cuts", "is_suspicious"]

#: Of a thread, on every architecture (CUDA C++ Programming Guide).
MOST_REGISTERS = 255

_BASE_REGISTERS, _MOST_SUMS = 40, 32
#: More live values, or more evaluations of operators for one element, are worth a compilation.
_MOST_LIVE, _MOST_EVALUATIONS = 5, 32


@dataclass(frozen=True)
class Pressure:
    """What a chain keeps and computes for one element.

    Args:
        live_values: Most values that are needed at one time.
        evaluations: Operators computed, one for each reader of its result.
        registers: Estimated registers of a thread.
    """

    live_values: int
    evaluations: int
    registers: int


@dataclass(frozen=True)
class Cut:
    """A group in two parts.

    Args:
        first: The anchor and the steps before the cut.
        rest: What follows, elementwise.
        extra_bytes: Bytes of device memory that two kernels move more than one.
    """

    first: FusionGroup
    rest: FusionGroup
    extra_bytes: int


def estimate_pressure(graph: Graph, group: FusionGroup) -> Pressure:
    """The register pressure of a group, without a compiler; the formula is at the top of the file."""
    members = frozenset(group.nodes)
    last = {node: max((r for r in graph.readers(node) if r in members), default=node) for node in group.nodes}
    evaluations = {group.result: 1}
    for node in reversed(group.nodes):
        evaluations.setdefault(node, sum(evaluations.get(reader, 0) for reader in graph.readers(node)))
    after = group.nodes if group.anchor is None else tuple(n for n in group.nodes if n >= group.anchor)
    live = max(sum(1 for value in after if value <= node < last[value]) for node in (*after, group.result))
    numbers = max(1, size_bytes(graph.nodes[group.result].output.dtype) // 4)
    sums = 0 if group.anchor is None else _MOST_SUMS
    inner = sum(count for node, count in evaluations.items() if node != group.anchor)
    return Pressure(live, inner, _BASE_REGISTERS + numbers * (sums + live))


def is_suspicious(graph: Graph, group: FusionGroup) -> bool:
    """Whether a group may need many more registers than its anchor: compiling it is worth the time."""
    if not group.steps:
        return False
    pressure = estimate_pressure(graph, group)
    return (
        pressure.live_values > _MOST_LIVE
        or pressure.evaluations > _MOST_EVALUATIONS
        or pressure.registers > MOST_REGISTERS
    )


def find_cuts(graph: Graph, group: FusionGroup) -> tuple[Cut, ...]:
    """All cuts of a group's chain, the cheapest first.

    Args:
        graph: The graph.
        group: A group with an anchor; one without steps has no cut.

    Returns:
        A cut before each step.
    """
    if group.anchor is None:
        return ()
    whole = group_cost(graph, Parts(group.nodes, group.anchor)).dram_bytes
    cuts = [_cut(graph, group, index, whole) for index in range(len(group.steps))]
    return tuple(sorted(cuts, key=lambda cut: (cut.extra_bytes, abs(len(cut.first.steps) * 2 - len(cuts)))))


def _cut(graph: Graph, group: FusionGroup, index: int, whole_bytes: int) -> Cut:
    assert group.anchor is not None
    rest = tuple(node for step in group.steps[index:] for node in step.nodes)
    front = tuple(node for node in group.nodes if node not in rest)
    result = group.steps[index - 1].result if index else group.anchor
    first = make_group(
        graph, group.anchor, front, result, group.steps[:index], group.prologue, group.absorbed
    )
    second = make_group(graph, None, rest, group.result, end=group.end)
    parts = Parts(front, group.anchor), Parts(second.nodes)
    extra = sum(group_cost(graph, part).dram_bytes for part in parts) - whole_bytes
    return Cut(replace(first, id=group.id), second, extra)
