"""Which layers side by side become one: decided before layouts and groups are.

::

    apart:    a kernel for each branch              each reads the value they share
    together: one kernel, and a part for each       read where it lies, or copied from there

A part costs nothing where its one reader can take it from the combined result: the next layer on the way
in (as its prologue); a transpose or concatenation, which is a kernel in any case; the kernel of another
layer that adds it to its result; or the concatenation of all results, which disappears. Elementwise
operators that followed one branch alone are computed by that reader then. Any other part is copied. What
that is worth on a device, ``PlanOptions.accept`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_fuse.core.capabilities import Capability, capability_of
from tvm_fuse.core.families import LAYERS, family_of
from tvm_fuse.core.graph import (
    ELEMENTWISE_KINDS,
    INJECTIVE_KINDS,
    VIEW_KINDS,
    Graph,
    Kind,
    Node,
)
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.reason import Decision, Reason, Stage
from tvm_fuse.core.siblings import Siblings, check_alike, check_layer, find_readers, make_siblings

__all__ = ["RULE", "ParallelPlan", "plan_parallel"]

RULE = "parallel"

#: Operators that move elements and are a kernel in any case: they read a part where it lies.
_MOVES = INJECTIVE_KINDS - ELEMENTWISE_KINDS - VIEW_KINDS


@dataclass(frozen=True)
class ParallelPlan:
    """Layers to combine, and why others are not.

    Args:
        siblings: In topological order of their first layers; no operator is in two.
        decisions: For the layers of every value that two or more read, in order.
    """

    siblings: tuple[Siblings, ...]
    decisions: tuple[Decision, ...]


def plan_parallel(graph: Graph, options: PlanOptions | None = None) -> ParallelPlan:
    """Decide which layers that read one value become one layer.

    Args:
        graph: The graph, after folding and before layouts are decided.
        options: What the target can do, and the cost model; with ``fuse="none"`` nothing is combined.

    Returns:
        The plan.
    """
    options = options or PlanOptions()
    siblings: list[Siblings] = []
    decisions: list[Decision] = []
    for layers in () if options.fuse == "none" else find_readers(graph):
        alike, refused = _sort_out(graph, layers)
        decisions += refused
        for nodes in alike:
            made = make_siblings(graph, [node.id for node in nodes])
            reason = _ask(graph, made, options)
            if reason is None:
                siblings.append(made)
            decisions.append(_decide(graph, made, reason))
    return ParallelPlan(tuple(siblings), tuple(sorted(decisions, key=lambda decision: decision.node or 0)))


def _sort_out(graph: Graph, layers: Sequence[Node]) -> tuple[list[list[Node]], list[Decision]]:
    """Layers of one value by what they have in common; those that are alone, with the reason."""
    alike: list[list[Node]] = []
    reasons: dict[int, Reason] = {}
    for node in layers:
        reason = check_layer(graph, node)
        if reason is not None:
            reasons[node.id] = reason
            continue
        for others in alike:
            reason = check_alike(graph, node, others[0])
            if reason is None:
                others.append(node)
                break
            reasons.setdefault(node.id, reason)
        else:
            alike.append([node])
    for (alone,) in [others for others in alike if len(others) == 1]:
        other = next((others[0] for others in alike if others[0] is not alone), None)
        reason = None if other is None else check_alike(graph, alone, other)
        if reason is not None:
            reasons.setdefault(alone.id, reason)
    found = [others for others in alike if len(others) > 1]
    joined = {node.id for others in found for node in others}
    refused = [
        Decision(RULE, str(graph.nodes[node]), Stage.CONDITION, reason, node=node, matched=1)
        for node, reason in reasons.items()
        if node not in joined
    ]
    return found, refused


def _ask(graph: Graph, siblings: Siblings, options: PlanOptions) -> Reason | None:
    if options.accept is None:
        return None
    first, *others = siblings.branches
    added = tuple(sorted(node for branch in others for node in branch))
    copied: tuple[int, ...] = ()
    if siblings.parts is None:
        reads = _Reads(graph, options, siblings)
        copied = tuple(sorted(result for result in siblings.results if not reads.is_free(result)))
    elif len(graph.nodes[siblings.parts].inputs) == len(siblings.results):
        added += siblings.parts, *graph.readers(siblings.parts)
    family = graph.nodes[first[0]].kind.value
    return options.accept(graph, Candidate(Extension.PARALLEL, family, first[0], first, added, copied))


class _Reads:
    """Whether what reads a value can take it from where it lies among others."""

    def __init__(self, graph: Graph, options: PlanOptions, siblings: Siblings) -> None:
        self.graph, self.options, self.siblings = graph, options, siblings
        self.capability: Capability = capability_of(options.target)

    def is_free(self, value: int) -> bool:
        """Follow the value through what is computed on the way into its one reader."""
        graph, entering = self.graph, [value]
        while True:
            readers = graph.readers(entering[-1])
            if len(readers) != 1 or graph.is_output(entering[-1]):
                return False
            reader = graph.nodes[readers[0]]
            if reader.kind in _MOVES or _is_joined(graph, reader):
                return True
            if reader.kind not in ELEMENTWISE_KINDS | VIEW_KINDS:
                return self._enters(tuple(entering), reader)
            others = [s for s in reader.inputs if s != entering[-1] and s not in graph.constants]
            if others:
                return entering == [value] and self._joins_a_chain(value, others)
            entering.append(reader.id)

    def _joins_a_chain(self, value: int, others: list[int]) -> bool:
        """Whether the other operand comes from another layer, whose kernel reads this one where it lies."""
        graph, inside = self.graph, others
        while len(inside) == 1 and graph.readers(inside[0]) and not graph.is_output(inside[0]):
            node = graph.nodes[inside[0]]
            family = family_of(node.kind)
            if len(graph.readers(node.id)) != 1 or node.output.shape != graph.nodes[value].output.shape:
                return False
            if family in LAYERS:
                kinds = self.capability.prologue_of(family.name, graph, node)
                return node.id not in self.siblings.layers and Kind.SLICE in kinds
            if node.kind not in ELEMENTWISE_KINDS:
                return False
            inside = [source for source in node.inputs if source not in graph.constants]
        return False

    def _enters(self, entering: tuple[int, ...], reader: Node) -> bool:
        """Whether a layer, pooling or softmax can compute this while it reads its operand."""
        graph, family = self.graph, family_of(reader.kind)
        if family is None or entering[-1] not in [reader.inputs[index] for index in family.entries[:1]]:
            return False
        kinds = self.capability.prologue_of(family.name, graph, reader)
        computed = entering[1:]
        if Kind.SLICE not in kinds or not all(graph.nodes[node].kind in kinds for node in computed):
            return False
        if self.options.accept is None or all(graph.nodes[node].kind in VIEW_KINDS for node in computed):
            return True
        nodes = (reader.id,)
        candidate = Candidate(Extension.PROLOGUE, reader.kind.value, reader.id, nodes, computed)
        return family not in LAYERS or self.options.accept(graph, candidate) is None


def _is_joined(graph: Graph, reader: Node) -> bool:
    """Whether a tuple is there for one concatenation."""
    readers = [graph.nodes[node].kind for node in graph.readers(reader.id)]
    return reader.kind is Kind.TUPLE and readers == [Kind.CONCATENATE] and not graph.is_output(reader.id)


def _decide(graph: Graph, siblings: Siblings, reason: Reason | None) -> Decision:
    first = graph.nodes[min(siblings.layers)]
    stage = Stage.APPLIED if reason is None else Stage.COST
    names = ", ".join(str(graph.nodes[layer]) for layer in siblings.layers)
    detail = f"{len(siblings.layers)} layers become one: {names}" if reason is None else ""
    return Decision(RULE, str(first), stage, reason, detail, first.id, len(siblings.layers))
