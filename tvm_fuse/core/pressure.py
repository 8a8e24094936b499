"""Register pressure of a group, estimated, and the places where a group can be cut in two.

Without a compiler::

    registers = 40 + numbers * (sums + live values + 16 * (operands - 1))      around an anchor
    registers = 10 + numbers * live values                                     elementwise operators alone

numbers: 2 for float64, else 1. 40 are addresses, loop counters and operands of a blocked product, and a
thread has at most 32 sums (``cuda_tiles.py``); 10 is what ptxas used beside the live values of the
elementwise groups that were looked at. A value after the anchor is live from where it is computed to its
last reader, and a tensor with several readers there from the first to the last; ptxas works through the
elements of a thread one after another, so live values count once. Of what is computed while the anchor
reads, a thread loads about 16 elements ahead, from every operand. When to load ahead and when to spill is
up to ptxas: the estimate is a guess. A group is *suspicious*, and worth a compilation, long before: when it
holds on to many values or reads many operands, or when TVM, which computes an operator again for each of
its readers, makes much code of it. Elementwise operators alone have TVM's schedule, of up to 1024 threads a
block, which leaves 64 registers to each.

A cut around an anchor stands between two steps, or between what is computed before the anchor and the
anchor: the part without the anchor is computed element by element by a kernel of its own. Elementwise
operators are cut where a single value passes from one part to the other, and where that is estimated to
save registers. The cheapest cut moves the fewest bytes; of equals, the most even one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tvm_fuse.core.cost import Parts, group_cost
from tvm_fuse.core.dtypes import size_bytes
from tvm_fuse.core.graph import VIEW_KINDS, Graph, Kind
from tvm_fuse.core.group import FusionGroup, make_group

__all__ = [
    "MOST_REGISTERS",
    "Cut",
    "Pressure",
    "estimate_cut",
    "estimate_pressure",
    "find_cuts",
    "is_suspicious",
    "most_registers",
]

#: Of a thread, on every architecture (CUDA C++ Programming Guide).
MOST_REGISTERS = 255
#: Of a block, there as well; and the threads of a block in TVM's schedule of elementwise operators.
_BLOCK_REGISTERS, _BLOCK_THREADS = 65536, 1024

_BASE_REGISTERS, _MOST_SUMS, _LOADED_AHEAD = 40, 32, 16
_ELEMENTWISE_REGISTERS = 10
#: More live values, operands before the anchor, or evaluations for one element are worth a compilation.
_MOST_LIVE, _MOST_OPERANDS, _MOST_EVALUATIONS = 5, 4, 32


@dataclass(frozen=True)
class Pressure:
    """What a group keeps and computes for one element.

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
        first: What is computed first: the anchor and the steps before the cut, what is before the anchor, or
            elementwise operators.
        rest: What follows.
        extra_bytes: Bytes of device memory that two kernels move more than one.
    """

    first: FusionGroup
    rest: FusionGroup
    extra_bytes: int


def estimate_pressure(graph: Graph, group: FusionGroup) -> Pressure:
    """The register pressure of a group, without a compiler; the formula is at the top of the file."""
    evaluations = {group.result: 1}
    for node in reversed(group.nodes):
        evaluations.setdefault(node, sum(evaluations.get(reader, 0) for reader in graph.readers(node)))
    live = _count_live(graph, group)
    numbers = max(1, size_bytes(graph.nodes[group.result].output.dtype) // 4)
    inner = sum(count for node, count in evaluations.items() if node != group.anchor)
    operands = _count_operands(graph, group)
    if group.anchor is None:
        return Pressure(live, operands, inner, _ELEMENTWISE_REGISTERS + numbers * live)
    loaded = _LOADED_AHEAD * max(0, operands - 1)
    return Pressure(live, operands, inner, _BASE_REGISTERS + numbers * (_MOST_SUMS + live + loaded))


def estimate_cut(graph: Graph, cut: Cut) -> int:
    """Estimated registers of a thread in the part that needs more."""
    return max(estimate_pressure(graph, part).registers for part in (cut.first, cut.rest))


def most_registers(graph: Graph, group: FusionGroup) -> int:
    """Registers that a thread of a group's kernel can have."""
    if group.anchor is not None:
        return MOST_REGISTERS
    elements = math.prod(int(dim) for dim in graph.nodes[group.result].output.shape)
    return min(MOST_REGISTERS, _BLOCK_REGISTERS // max(1, min(elements, _BLOCK_THREADS)))


def _count_live(graph: Graph, group: FusionGroup) -> int:
    """Most values at one time that are computed, or read a first time, and needed later."""
    after = [node for node in group.nodes if group.anchor is None or node >= group.anchor]
    readers: dict[int, list[int]] = {}
    for node in after:
        if graph.nodes[node].kind is Kind.TUPLE:  # what reads it takes one of its operands for an element
            continue
        for source in graph.nodes[node].inputs:
            readers.setdefault(source, []).append(node)
    computed = frozenset(after)
    changes = dict.fromkeys(after, 0)
    for value, read_by in readers.items():
        if value in computed or graph.nodes[value].output.shape:  # numbers are part of the code
            changes[value if value in computed else read_by[0]] += 1
            changes[read_by[-1]] -= 1
    return max(itertools.accumulate(changes.values()))


def _count_operands(graph: Graph, group: FusionGroup) -> int:
    """Tensors from outside that a prologue reads; numbers and views count nothing."""
    inside = frozenset(group.nodes)
    sources = {source for node in group.prologue for source in graph.nodes[node].inputs} - inside
    return sum(1 for source in sources if graph.nodes[source].output.shape)


def is_suspicious(graph: Graph, group: FusionGroup) -> bool:
    """Whether a group may need too many registers, and could be cut: compiling it is worth the time."""
    if group.absorbed or group.also:
        return False
    pressure = estimate_pressure(graph, group)
    if group.anchor is None:
        return pressure.registers > most_registers(graph, group) // 2
    if not (group.steps or group.prologue):
        return False
    return (
        pressure.live_values > _MOST_LIVE
        or pressure.operands > _MOST_OPERANDS
        or pressure.evaluations > _MOST_EVALUATIONS
        or pressure.registers > MOST_REGISTERS
    )


def find_cuts(graph: Graph, group: FusionGroup) -> tuple[Cut, ...]:
    """The cuts of a group, the cheapest first.

    Args:
        graph: The graph.
        group: A group; one with something absorbed, or with several results, has no cut.

    Returns:
        Around an anchor a cut before each step, and one before the anchor where one value enters it from a
        prologue. Of elementwise operators, cuts whose worse part is estimated to need fewer registers than
        the whole, and than that of any cheaper cut.
    """
    if group.absorbed or group.also:
        return ()
    if group.anchor is None:
        return _cut_elementwise(graph, group)
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


def _cut_elementwise(graph: Graph, group: FusionGroup) -> tuple[Cut, ...]:
    whole = group_cost(graph, Parts(group.nodes)).dram_bytes
    cuts = []
    for front in _fronts(graph, group):
        rest = tuple(node for node in group.nodes if node not in front)
        if not VIEW_KINDS.issuperset(graph.nodes[node].kind for node in rest):
            parts = (
                make_group(graph, None, front, max(front)),
                make_group(graph, None, rest, group.result, end=group.end),
            )
            cuts.append(_made(graph, group, *parts, whole))
    cuts.sort(key=lambda cut: (cut.extra_bytes, abs(len(cut.first.nodes) - len(cut.rest.nodes))))
    lowest, better = estimate_pressure(graph, group).registers, []
    for cut in cuts:
        registers = estimate_cut(graph, cut)
        if registers < lowest:
            lowest = registers
            better.append(cut)
    return tuple(better)


def _fronts(graph: Graph, group: FusionGroup) -> Iterator[frozenset[int]]:
    """What a value of an elementwise group is computed from, and itself, where nothing else reads that."""
    inside = frozenset(group.nodes)
    for value in group.nodes:
        if value == group.result or graph.nodes[value].kind in VIEW_KINDS | {Kind.TUPLE}:
            continue
        front = {value}
        for node in reversed(group.nodes):
            if node in front:
                front.update(inside.intersection(graph.nodes[node].inputs))
        if all(front.issuperset(graph.readers(node)) for node in front - {value}):
            yield frozenset(front)


def _made(graph: Graph, group: FusionGroup, first: FusionGroup, rest: FusionGroup, whole_bytes: int) -> Cut:
    parts = (Parts(part.nodes, part.anchor) for part in (first, rest))
    extra = sum(group_cost(graph, part).dram_bytes for part in parts) - whole_bytes
    return Cut(replace(first, id=group.id), rest, extra)
