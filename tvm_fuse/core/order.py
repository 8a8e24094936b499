"""Kernels in an order in which each finds what it reads.

A kernel with one result can stand where that result is computed. One with several may have a result before
and another after what a third kernel computes, and two such kernels may each need the other::

    a -> c      with the kernels {a, d} and {b, c}, neither can come first
    b -> d
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup

__all__ = ["Levels", "sort_nodes"]


def sort_nodes(graph: Graph, groups: Iterable[FusionGroup]) -> tuple[int, ...] | FusionGroup:
    """All nodes, those of a group together, after everything that any of them reads from outside.

    Args:
        graph: The graph.
        groups: Groups; only what is computed again is in several.

    Returns:
        Ids in the order of execution; or a group that needs itself, by way of others.
    """
    kernels = {group.result: group for group in groups}
    unit = list(range(len(graph.nodes)))
    for group in kernels.values():
        for node in group.owned:
            unit[node] = group.result
    waits = dict.fromkeys(unit, 0)
    readers: dict[int, set[int]] = {}
    for then in waits:
        members = kernels[then].nodes if then in kernels else (then,)
        sources = {source for node in members for source in graph.nodes[node].inputs}.difference(members)
        for first in {unit[source] for source in sources}:
            readers.setdefault(first, set()).add(then)
            waits[then] += 1
    ready = [last for last, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        last = heapq.heappop(ready)
        del waits[last]
        order += kernels[last].owned if last in kernels else (last,)
        for then in readers.get(last, ()):
            waits[then] -= 1
            if waits[then] == 0:
                heapq.heappush(ready, then)
    return kernels[next(last for last in waits if last in kernels)] if waits else tuple(order)


class Levels:
    """For each kernel a number above those of all kernels that it reads; they change as kernels are joined.

    Args:
        graph: The graph.
        groups: Disjoint groups that can be put in an order; any other node is by itself.
    """

    def __init__(self, graph: Graph, groups: Iterable[FusionGroup]) -> None:
        self._graph = graph
        owner = {node: group.nodes for group in groups for node in group.nodes}
        self._members = {node.id: owner.get(node.id, (node.id,)) for node in graph.nodes}
        self._level: dict[tuple[int, ...], int] = {}
        for node in graph.nodes:
            members = self._members[node.id]
            if members[-1] == node.id:
                sources = {self._members[s] for m in members for s in graph.nodes[m].inputs} - {members}
                self._level[members] = 1 + max((self._level[source] for source in sources), default=0)

    def join(self, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
        """Make one kernel of two, unless one needs the other; whether that was done.

        Only what comes after them and has no higher level yet is looked at.
        """
        level = max(self._level[first], self._level[second])
        raised = {first: level, second: level}
        pending = [(self._level[members], members) for members in raised]
        heapq.heapify(pending)
        while pending:
            _, members = heapq.heappop(pending)
            for reader in {self._members[r] for m in members for r in self._graph.readers(m)} - {members}:
                if reader in (first, second):
                    return False
                if reader not in raised and self._level[reader] <= raised[members]:
                    heapq.heappush(pending, (self._level[reader], reader))
                if self._level[reader] <= raised[members]:
                    raised[reader] = max(raised.get(reader, 0), raised[members] + 1)
        joined = tuple(sorted({*first, *second}))
        self._level.update(raised)
        self._level[joined] = level
        self._members.update(dict.fromkeys(joined, joined))
        return True
