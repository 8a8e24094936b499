"""A fused kernel as data: ids of operators of a graph, and what people call it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tvm_fuse.core.chain import Step
from tvm_fuse.core.graph import ANCHOR_KINDS, VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.reason import Reason

__all__ = ["FusionGroup", "count_arguments", "make_group"]

#: On the way into an anchor these move elements and compute nothing: they are in no name.
_UNNAMED = VIEW_KINDS | {Kind.LAYOUT_TRANSFORM}
#: The name of an elementwise group lists up to so many operators.
_MOST_NAMED = 3


@dataclass(frozen=True)
class FusionGroup:
    """One fused kernel: some operators, of which one gives the result; of elementwise ones several may.

    Args:
        name: Family and steps, such as ``conv2d_bias_relu``.
        family: What the kernel is built around, such as ``conv2d``.
        anchor: Id of the operator whose schedule the kernel gets; None for elementwise operators alone.
        nodes: Ids of all operators, in topological order.
        result: Id of the last node whose value leaves the group.
        steps: What is computed after the anchor, in order.
        prologue: Ids of operators computed while the anchor reads its operands.
        absorbed: Ids of earlier heavy operators computed inside this kernel.
        also: Ids of further nodes whose values leave it, of the shape of ``result``; in order.
        recomputed: Ids of elementwise operators that other kernels compute for themselves, too.
        end: Why the group ends where it does.
        anchor_name: Where the anchor (or the last operator) came from.
        operators: The front end's names of the operators, in topological order.
        id: ``chain0``, ``chain1``, ... in the order of the plan.
    """

    name: str
    family: str
    anchor: int | None
    nodes: tuple[int, ...]
    result: int
    steps: tuple[Step, ...]
    prologue: tuple[int, ...] = ()
    absorbed: tuple[int, ...] = ()
    also: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    end: Reason | None = None
    anchor_name: str = ""
    operators: tuple[str, ...] = ()
    id: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether it is built around a convolution or a matrix product."""
        return self.family in _LAYERS

    @property
    def layers(self) -> int:
        """How many convolutions and matrix products it computes; those of a gate are two."""
        return 1 + len(self.absorbed) if self.is_layer else 0

    @property
    def results(self) -> tuple[int, ...]:
        """Ids of all nodes whose values leave it, in order."""
        return (*self.also, self.result)

    @property
    def owned(self) -> tuple[int, ...]:
        """Ids of the operators that no other kernel computes, in topological order."""
        return tuple(node for node in self.nodes if node not in self.recomputed)

    @property
    def center(self) -> int:
        """Id of the operator that it is named after: the anchor, or the result where there is none."""
        return self.result if self.anchor is None else self.anchor

    def __str__(self) -> str:
        return f"{self.id} {self.name} at {self.anchor_name}".strip()


_LAYERS = frozenset(kind.value for kind in ANCHOR_KINDS)


def make_group(
    graph: Graph,
    anchor: int | None,
    nodes: Iterable[int],
    result: int,
    steps: tuple[Step, ...] = (),
    prologue: tuple[int, ...] = (),
    absorbed: tuple[int, ...] = (),
    end: Reason | None = None,
    also: tuple[int, ...] = (),
    recomputed: tuple[int, ...] = (),
) -> FusionGroup:
    """A group with the names that follow from its operators; arguments as in ``FusionGroup``."""
    members = tuple(sorted(nodes))
    center = graph.nodes[result if anchor is None else anchor]
    return FusionGroup(
        name=_name(graph, anchor, members, steps, prologue),
        family="elementwise" if anchor is None else center.kind.value,
        anchor=anchor,
        nodes=members,
        result=result,
        steps=steps,
        prologue=prologue,
        absorbed=absorbed,
        also=also,
        recomputed=recomputed,
        end=end,
        anchor_name=str(center),
        operators=tuple(graph.nodes[node].op for node in members if graph.nodes[node].kind is not Kind.TUPLE),
    )


def _name(
    graph: Graph,
    anchor: int | None,
    nodes: Collection[int],
    steps: tuple[Step, ...],
    prologue: Collection[int],
) -> str:
    if anchor is None:
        return _name_elementwise([graph.nodes[node] for node in nodes])
    before = [graph.nodes[node] for node in prologue if graph.nodes[node].kind not in _UNNAMED]
    center = graph.nodes[anchor]
    label = center.kind.value if center.kind in ANCHOR_KINDS else center.label
    return "_".join((*([_name_elementwise(before)] if before else []), label, *(step.name for step in steps)))


def _name_elementwise(nodes: Iterable[Node]) -> str:
    labels = [node.label for node in nodes if node.kind is not Kind.TUPLE]
    return "_".join(labels) if len(labels) <= _MOST_NAMED else "elementwise"


def count_arguments(graph: Graph, nodes: tuple[int, ...]) -> int:
    """How many tensors a kernel of these operators reads; numbers are part of its code."""
    members = frozenset(nodes)
    sources = {source for node in nodes for source in graph.nodes[node].inputs} - members
    return sum(1 for source in sources if not _is_number(graph, source))


def _is_number(graph: Graph, node: int) -> bool:
    constant = graph.constant(node)
    return constant is not None and constant.ndim == 0
