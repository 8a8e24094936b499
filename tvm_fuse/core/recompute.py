"""Cheap values that several kernels read: computed again in each of them, instead of once into memory.

::

    written:  x -> [relu] -> r -> [conv] -> a        three launches; r is written, and read twice
                             r -> [conv] -> b
    again:    x -> [relu, conv] -> a                 two launches; x is read twice
              x -> [relu, conv] -> b

A value is cheap where its kernel is a few elementwise operators of one or two instructions. Every kernel that
reads it must be able to compute it while it reads, as ``legality.py`` and the target's capabilities say, and
for each of them ``PlanOptions.accept`` must say that it pays: the value is gone only where none needs it.
Values are looked at from the last to the first: what is computed again may need other values that are.

Where one kernel with several results is the only reader, the value is computed in it, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_fuse.core.capabilities import CHEAP_KINDS, capability_of
from tvm_fuse.core.chain import MOST_OPERATORS
from tvm_fuse.core.families import ELEMENTWISE, family_of
from tvm_fuse.core.graph import VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.group import FusionGroup, count_arguments, make_group
from tvm_fuse.core.legality import find_fault
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.reason import Code, Decision, Reason, Stage
from tvm_fuse.core.refusals import Refusal, end_of
from tvm_fuse.core.region import takes_no_tuple

__all__ = ["RULE", "recompute_values"]

RULE = "recompute"

#: Operators of a value that is computed again, views not counted.
_MOST_AGAIN = 4

_KINDS = CHEAP_KINDS | VIEW_KINDS | {Kind.BROADCAST_TO}


def recompute_values(
    graph: Graph, groups: Sequence[FusionGroup], options: PlanOptions, most: int
) -> tuple[list[FusionGroup], list[Decision]]:
    """Move values into the kernels that read them.

    Args:
        graph: The graph.
        groups: Its groups so far; operators in none are kernels, too.
        options: What the target can do, and what pays on it.
        most: Most operators of a kernel.

    Returns:
        All groups, and why values that several kernels read are written.
    """
    mover = _Mover(graph, groups, options, most)
    for node in reversed(graph.nodes):
        mover.move(node)
    made = {kernel.result: kernel for kernel in mover.kernels.values()}
    known = {group.result for group in groups}
    kept = [made[group.result] for group in groups if group.result in made]
    new = [kernel for result, kernel in made.items() if result not in known and len(kernel.nodes) > 1]
    return [*kept, *new], mover.refused


class _Mover:
    """The kernels so far, by each of their operators that no other one computes."""

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], options: PlanOptions, most: int) -> None:
        self.graph, self.options, self.most = graph, options, most
        self.capability = capability_of(options.target)
        self.kernels = {node: group for group in groups for node in group.nodes}
        for node in graph.nodes:
            if node.id not in self.kernels and _is_kernel(graph, node):
                anchor = None if family_of(node.kind) is ELEMENTWISE else node.id
                end = end_of(graph, node.id)
                self.kernels[node.id] = make_group(graph, anchor, (node.id,), node.id, end=end)
        #: Operator that is computed again -> results of the kernels that do it.
        self.again: dict[int, tuple[int, ...]] = {}
        self.refused: list[Decision] = []

    def move(self, node: Node) -> None:
        """Compute a value in the kernels that read it, or say why not."""
        kernel = self.kernels.get(node.id)
        if kernel is None or kernel.anchor is not None or kernel.results != (node.id,):
            return
        readers = self._readers(node)
        if readers is None or not (len(readers) > 1 or any(reader.also for reader in readers)):
            return
        made = [self._with(kernel, reader, len(readers) > 1) for reader in readers]
        refused = self._check(kernel, readers, made)
        if refused is not None:
            self.refused.append(Decision(RULE, str(node), *refused, node=node.id, matched=len(readers)))
            return
        for member in kernel.nodes:
            del self.kernels[member]
            if len(readers) > 1:
                self.again[member] = tuple(group.result for group in made)
        for group in made:
            self.kernels.update(dict.fromkeys(group.owned, group))

    def _readers(self, node: Node) -> list[FusionGroup] | None:
        """The kernels that read a value; None where it is needed in memory whatever they do."""
        if self.graph.is_output(node.id):
            return None
        results: set[int] = set()
        for reader in self.graph.readers(node.id):
            if reader in self.again:
                results.update(self.again[reader])
            elif reader in self.kernels:
                results.add(self.kernels[reader].result)
            else:
                return None
        return [self.kernels[result] for result in sorted(results)]

    def _with(self, kernel: FusionGroup, reader: FusionGroup, is_again: bool) -> FusionGroup:
        nodes = {*kernel.nodes, *reader.nodes}
        added = nodes.difference(reader.nodes)
        again = {*reader.recomputed, *(kernel.nodes if is_again else ())}
        prologue = () if reader.anchor is None else tuple(sorted({*reader.prologue, *added}))
        made = make_group(
            self.graph, reader.anchor, nodes, reader.result, reader.steps, prologue, reader.absorbed,
            reader.end, reader.also, tuple(sorted(again)),
        )  # fmt: skip
        return replace(made, id=reader.id)

    def _check(
        self, kernel: FusionGroup, readers: list[FusionGroup], made: list[FusionGroup]
    ) -> Refusal | None:
        at = str(self.graph.nodes[kernel.result])
        is_shared = len(readers) > 1
        operators = [node for node in map(self.graph.nodes.__getitem__, kernel.nodes) if _computes(node)]
        costly = [f"{node} ({node.op})" for node in operators if node.kind not in _KINDS]
        if is_shared and (costly or len(operators) > _MOST_AGAIN):
            wanted = f"at most {_MOST_AGAIN} operators of one or two instructions, for {len(readers)} kernels"
            got = costly[0] if costly else f"{len(operators)}"
            return Stage.CONDITION, Reason(Code.VALUE_WRITTEN, at, wanted, got)
        for group in made:
            problem = self._find_problem(group)
            if problem is not None:
                wanted = f"{len(readers)} kernels that can compute it while they read it"
                got = f"{group.anchor_name}, which {problem}"
                return Stage.CONDITION, Reason(Code.VALUE_WRITTEN, at, wanted, got)
        if not is_shared or self.options.accept is None:
            return None
        for reader, group in zip(readers, made):
            added = tuple(node for node in group.nodes if node not in reader.nodes)
            candidate = Candidate(
                Extension.RECOMPUTE, reader.family, reader.anchor, reader.nodes, added,
                recomputed=reader.recomputed, kernels=len(readers),
            )  # fmt: skip
            reason = self.options.accept(self.graph, candidate)
            if reason is not None:
                return Stage.COST, reason
        return None

    def _find_problem(self, group: FusionGroup) -> str | None:
        """What stops a kernel from computing what it was given."""
        most = min(self.most, MOST_OPERATORS) if group.is_layer else self.most
        if len(group.nodes) > most:
            return f"would have {len(group.nodes)} operators, more than {most}"
        arguments = len(group.results) + count_arguments(self.graph, group.nodes)
        if arguments > self.capability.most_arguments:
            return f"would take {arguments} tensors, more than {self.capability.most_arguments}"
        fault = find_fault(self.graph, group, self.capability)
        return None if fault is None else f"needs {fault.wanted}, not {fault.got}"


def _is_kernel(graph: Graph, node: Node) -> bool:
    """Whether an operator that is in no group is a kernel that others can be computed in."""
    family = family_of(node.kind)
    if family is None or node.kind in VIEW_KINDS or not takes_no_tuple(graph, node):
        return False
    return family.check(graph, node) is None


def _computes(node: Node) -> bool:
    return node.kind not in VIEW_KINDS and node.kind is not Kind.TUPLE
