"""What can be computed where one value is computed: everything before it that nobody else reads.

::

    a -> b \
            d -> e      the region of e: a, b, c, d
         c /            (b is left out if a reader outside needs it)

A region is walked backwards, from readers to what they read. An operator joins when all its readers have: so
only the last value of a region is read outside it. TVM computes an operator again for each of its readers
in a kernel; ``evaluations`` counts that, and ends the walk where it would explode.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable

from tvm_fuse.core.graph import Graph, Kind, Node

__all__ = ["MOST_EVALUATIONS", "count_evaluations", "find_region", "find_slices", "takes_no_tuple"]

#: Evaluations of one operator for one result element; also the depth at which TVM's FuseOps cuts a group.
MOST_EVALUATIONS = 256


def find_region(
    graph: Graph,
    members: Collection[int],
    entries: Iterable[int],
    joins: Callable[[Node], bool],
    most: int = MOST_EVALUATIONS,
) -> tuple[int, ...]:
    """Walk back from some operators.

    Args:
        graph: The graph.
        members: Ids of the operators that are in the kernel already.
        entries: Ids of the values they read where the walk begins.
        joins: Whether an operator may be computed in the kernel at all.
        most: Most evaluations, all operators of the region together.

    Returns:
        Ids of the operators that join, in topological order.
    """
    evaluations = dict.fromkeys(members, 1)
    waiting = [-source for source in set(entries)]
    heapq.heapify(waiting)
    seen = {-source for source in waiting}
    found: list[int] = []
    total = len(evaluations)
    while waiting:
        node = graph.nodes[-heapq.heappop(waiting)]
        readers = graph.readers(node.id)
        is_private = not graph.is_output(node.id) and all(reader in evaluations for reader in readers)
        if not is_private or not joins(node) or not takes_no_tuple(graph, node):
            continue
        cost = sum(evaluations[reader] for reader in readers)
        if node.kind is not Kind.TUPLE:  # a tuple is no operator, and comes with its reader
            if total + cost > most:
                continue
            total += cost
        evaluations[node.id] = cost
        found.append(node.id)
        for source in node.inputs:
            if source not in seen:
                seen.add(source)
                heapq.heappush(waiting, -source)
    return tuple(sorted(found))


def count_evaluations(graph: Graph, nodes: Iterable[int], results: Collection[int]) -> int:
    """Evaluations of operators for one element of each result: TVM computes one again for each reader.

    Args:
        graph: The graph.
        nodes: Ids of a kernel's operators.
        results: Ids of those whose values leave it.
    """
    evaluations: dict[int, int] = {}
    for node in sorted(nodes, reverse=True):
        inside = sum(evaluations.get(reader, 0) for reader in graph.readers(node))
        evaluations[node] = inside + (node in results)
    return sum(evaluations.values())


def find_slices(graph: Graph, members: Collection[int]) -> tuple[int, ...]:
    """Ids of the slices that these operators read and nobody else, in order."""
    sources = {source for node in members for source in graph.nodes[node].inputs}.difference(members)
    slices = (source for source in sorted(sources) if graph.nodes[source].kind is Kind.SLICE)
    return tuple(
        source
        for source in slices
        if not graph.is_output(source) and all(reader in members for reader in graph.readers(source))
    )


def takes_no_tuple(graph: Graph, node: Node) -> bool:
    """Whether each operand is a tensor, or a tuple that only this operator reads: kernels take no tuples.

    Args:
        graph: The graph.
        node: An operator, or a tuple.
    """
    for source in set(node.inputs):
        operand = graph.nodes[source]
        if operand.kind is Kind.TUPLE and (graph.readers(source) != (node.id,) or graph.is_output(source)):
            return False
        if operand.kind is not Kind.TUPLE and len(operand.outputs) != 1:
            return False
    return True
