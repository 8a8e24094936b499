"""Register pressure of a chain, estimated, and the places where a chain can be cut in two.

Without a compiler::

    registers = 40 + numbers * (sums + live values + 16 * (operands - 1))      numbers: 2 for float64, else 1

40 are addresses, loop counters and operands of a blocked product, and a thread has at most 32 sums
(``cuda_tiles.py``). A value after the anchor is live from where it is computed to its last reader; ptxas
works through the elements of a thread one after another, so live values count once. Of what is computed
while the anchor reads, a thread loads about 16 elements ahead, from every operand. When to load ahead and
when to spill is up to ptxas: the estimate is a guess. A group is *suspicious*, and worth a compilation, long
before: when it holds on to many values or reads many operands, or when TVM, which computes an operator again
for each of its readers, makes much code of it.

A cut stands between two steps, or between what is computed before the anchor and the anchor: the part without
the anchor is computed element by element by a kernel of its own. The cheapest cut moves the fewest bytes; of
equals, the most even one.
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

_BASE_REGISTERS, _MOST_SUMS, _LOADED_AHEAD = 40, 32, 16
#: More live values, operands before the anchor, or evaluations for one element are worth a compilation.
_MOST_LIVE, _MOST_OPERANDS, _MOST_EVALUATIONS = 5, 4, 32


@dataclass(frozen=True)
class Pressure:
    """What a chain keeps and computes for one element.

    Args:
        live_values: Most values that are needed at one time.
        operands: Tensors that are read by what is computed before the anchor.
        evaluations: Operators computed, one for each reader of its result.
        registers: Estimated registers of a thread.
    """

    live_values: int
    operands: int
    evaluations: int
    registers: int


@dataclass(frozen=True)
class Cut:
    """A group in two parts.

    Args:
        first: What is computed first: the anchor and the steps before the cut, or what is before the anchor.
        rest: What follows.
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
    operands = _count_operands(graph, group)
    loaded = _LOADED_AHEAD * max(0, operands - 1)
    return Pressure(live, operands, inner, _BASE_REGISTERS + numbers * (sums + live + loaded))


def _count_operands(graph: Graph, group: FusionGroup) -> int:
    """Tensors from outside that a prologue reads; numbers and views count nothing."""
    inside = frozenset(group.nodes)
    sources = {source for node in group.prologue for source in graph.nodes[node].inputs} - inside
    return sum(1 for source in sources if graph.nodes[source].output.shape)


def is_suspicious(graph: Graph, group: FusionGroup) -> bool:
    """Whether a group may need many more registers than its anchor: compiling it is worth the time."""
    if group.absorbed or not (group.steps or group.prologue):
        return False
    pressure = estimate_pressure(graph, group)
    return (
        pressure.live_values > _MOST_LIVE
        or pressure.operands > _MOST_OPERANDS
        or pressure.evaluations > _MOST_EVALUATIONS
        or pressure.registers > MOST_REGISTERS
    )


def find_cuts(graph: Graph, group: FusionGroup) -> tuple[Cut, ...]:
    """All cuts of a group's chain, the cheapest first.

    Args:
        graph: The graph.
        group: A group with an anchor and nothing absorbed; others have no cut.

    Returns:
        A cut before each step, and one before the anchor where one value enters it from a prologue.
    """
    if group.anchor is None or group.absorbed:
        return ()
    whole = group_cost(graph, Parts(group.nodes, group.anchor)).dram_bytes
    steps = len(group.steps)
    cuts = [_cut(graph, group, index, whole) for index in range(steps)]
    cuts.sort(key=lambda cut: abs(len(cut.first.steps) * 2 - steps))
    before = _cut_before(graph, group, whole)
    return tuple(sorted([*cuts, *before], key=lambda cut: cut.extra_bytes))


def _cut_before(graph: Graph, group: FusionGroup, whole_bytes: int) -> tuple[Cut, ...]:
    front, inside = frozenset(group.prologue), frozenset(group.nodes)
    entering = {node for node in front if inside.difference(front).intersection(graph.readers(node))}
    if len(entering) != 1 or group.recomputed:
        return ()
    after = tuple(node for node in group.nodes if node not in front)
    first = make_group(graph, None, group.prologue, entering.pop())
    rest = make_group(graph, group.anchor, after, group.result, group.steps, end=group.end)
    return (_made(graph, group, first, rest, whole_bytes),)


def _cut(graph: Graph, group: FusionGroup, index: int, whole_bytes: int) -> Cut:
    assert group.anchor is not None
    rest = tuple(node for step in group.steps[index:] for node in step.nodes)
    front = tuple(node for node in group.nodes if node not in rest)
    result = group.steps[index - 1].result if index else group.anchor
    first = make_group(
        graph, group.anchor, front, result, group.steps[:index], group.prologue, group.absorbed,
        recomputed=group.recomputed,
    )  # fmt: skip
    second = make_group(graph, None, rest, group.result, end=group.end)
    return _made(graph, group, first, second, whole_bytes)


def _made(graph: Graph, group: FusionGroup, first: FusionGroup, rest: FusionGroup, whole_bytes: int) -> Cut:
    parts = (Parts(part.nodes, part.anchor) for part in (first, rest))
    extra = sum(group_cost(graph, part).dram_bytes for part in parts) - whole_bytes
    return Cut(replace(first, id=group.id), rest, extra)
