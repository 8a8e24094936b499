"""Elementwise kernels that read one value: side by side in one kernel, which reads it once.

::

    apart:    x -> [tanh] -> a        x is read twice, two launches
              x -> [relu] -> b
    together: x -> [tanh, relu] -> a, b

Kernels join where each computes a result of one shape, element by element, from a tensor at least as large
that they share, where none needs another, and where ``PlanOptions.accept`` says that it pays. Values are
looked at in the order of the graph, the kernels that read one in the order of their results; each joins the
one before or starts another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm_fuse.core.capabilities import Capability, capability_of
from tvm_fuse.core.families import ELEMENTWISE
from tvm_fuse.core.flops import count_elements
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, VIEW_KINDS, Graph, Kind
from tvm_fuse.core.group import FusionGroup, count_arguments, make_group
from tvm_fuse.core.order import Levels
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.reason import Code, Decision, Reason, Stage
from tvm_fuse.core.refusals import Refusal, end_of
from tvm_fuse.core.region import count_evaluations, takes_no_tuple

__all__ = ["RULE", "join_readers"]

RULE = "parallel"


def join_readers(
    graph: Graph, groups: Sequence[FusionGroup], options: PlanOptions, most: int
) -> tuple[list[FusionGroup], list[Decision]]:
    """Join elementwise kernels that read one value.

    Args:
        graph: The graph.
        groups: Its groups so far, each with one result; operators in none are kernels, too.
        options: What the target can do, and what pays on it.
        most: Most operators, and most evaluations of operators, of a kernel.

    Returns:
        All groups, and why kernels that could be one are not.
    """
    kernels = tuple(_find_kernels(graph, groups))
    joiner = _Joiner(graph, groups, kernels, options, most)
    readers = _readers_of(graph, kernels)
    for source in sorted(readers):
        joiner.join(source, readers[source])
    joined = {kernel.nodes: kernel for kernel in joiner.now.values() if kernel.also}
    inside = {node for nodes in joined for node in nodes}
    refused = [decision for decisions in joiner.refused.values() for decision in decisions]
    return [*(group for group in groups if group.result not in inside), *joined.values()], refused


def _find_kernels(graph: Graph, groups: Iterable[FusionGroup]) -> Iterable[FusionGroup]:
    """What computes one element of its result from the elements at one position, in the order of results."""
    kinds = ELEMENTWISE_KINDS | VIEW_KINDS
    found = {group.result: group for group in groups}
    taken = {node for group in groups for node in group.nodes}
    for node in graph.nodes:
        group = found.get(node.id)
        if group is not None and group.anchor is None:
            if all(graph.nodes[member].kind in kinds for member in group.nodes):
                yield group
        elif node.id not in taken and node.kind in ELEMENTWISE_KINDS and takes_no_tuple(graph, node):
            if ELEMENTWISE.check(graph, node) is None:
                yield make_group(graph, None, (node.id,), node.id, end=end_of(graph, node.id))


def _readers_of(graph: Graph, kernels: Iterable[FusionGroup]) -> dict[tuple[int, object], list[FusionGroup]]:
    """Value and shape of results -> the kernels, where there are two; the value is as large as a result."""
    readers: dict[tuple[int, object], list[FusionGroup]] = {}
    for kernel in kernels:
        info = graph.nodes[kernel.result].output
        sources = {source for node in kernel.nodes for source in graph.nodes[node].inputs}
        for source in sources.difference(kernel.nodes):
            value = graph.nodes[source]
            is_tensor = value.kind not in (Kind.CONSTANT, Kind.TUPLE) and value.output.is_static
            if is_tensor and info.shape and count_elements(value.output) >= count_elements(info):
                readers.setdefault((source, info.shape), []).append(kernel)
    return {key: found for key, found in readers.items() if len(found) > 1}


class _Joiner:
    """The kernels so far, and why some are not one."""

    def __init__(
        self,
        graph: Graph,
        groups: Sequence[FusionGroup],
        kernels: Iterable[FusionGroup],
        options: PlanOptions,
        most: int,
    ) -> None:
        self.graph, self.options, self.most = graph, options, most
        self.capability: Capability = capability_of(options.target)
        self.levels = Levels(graph, groups)
        self.now = {kernel.result: kernel for kernel in kernels}
        self.refused: dict[tuple[int, int], list[Decision]] = {}

    def join(self, key: tuple[int, object], kernels: Iterable[FusionGroup]) -> None:
        """Join kernels that read one value, each with the one before where that is possible."""
        last: FusionGroup | None = None
        for kernel in dict.fromkeys(self.now[kernel.result] for kernel in kernels):
            joined = None if last is None else self._join(key[0], last, kernel)
            last = joined or kernel

    def _join(self, source: int, first: FusionGroup, second: FusionGroup) -> FusionGroup | None:
        graph, nodes = self.graph, {*first.nodes, *second.nodes}
        *also, result = sorted({*first.results, *second.results})
        made = make_group(graph, None, nodes, result, end=end_of(graph, result), also=tuple(also))
        refused = self._check(source, first, second, made)
        if refused is not None:
            results = (graph.nodes[kernel.result] for kernel in (first, second))
            decisions = [Decision(RULE, str(n), *refused, node=n.id, matched=2) for n in results]
            self.refused.setdefault((first.result, second.result), decisions)
            return None
        if not self.levels.join(first.nodes, second.nodes):
            return None
        self.now.update(dict.fromkeys(made.results, made))
        return made

    def _check(
        self, source: int, first: FusionGroup, second: FusionGroup, made: FusionGroup
    ) -> Refusal | None:
        graph, value, capability = self.graph, self.graph.nodes[source], self.capability
        evaluations = count_evaluations(graph, made.nodes, made.results)
        arguments = len(made.results) + count_arguments(graph, made.nodes)
        limits = (
            (Code.SEVERAL_RESULTS, "results", capability.most_results, len(made.results)),
            (Code.CHAIN_TOO_LONG, "operators", self.most, max(evaluations, len(made.nodes))),
            (Code.TOO_MANY_ARGUMENTS, "tensors", capability.most_arguments, arguments),
        )
        for code, what, limit, got in limits:
            if got > limit:
                wanted = f"at most {limit} {what} of a kernel"
                return Stage.CONDITION, Reason(code, str(value), wanted, str(got))
        if self.options.accept is None:
            return None
        candidate = Candidate(Extension.PARALLEL, "elementwise", None, first.nodes, second.nodes)
        reason = self.options.accept(graph, candidate)
        return None if reason is None else (Stage.COST, reason)
