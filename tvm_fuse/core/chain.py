"""Chains: one anchor operator and the elementwise operators computed in its kernel.

::

    conv2d -> add(bias) -> add(residual) -> relu        one chain, four operators
       |          |             |
       one reader each, same shape

A chain grows from its anchor one step at a time. A step is the smallest piece of the graph
with one entry (the value so far) and one exit, all of whose results are read inside it: a
single operator, or a diamond such as ``x * sigmoid(x)``. It joins when every operator in it is
elementwise and keeps the shape. The first piece that may not join gives the reason the chain
ends there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from tvm_fuse.core.activations import match_activation
from tvm_fuse.core.graph import (
    ANCHOR_KINDS,
    ELEMENTWISE_KINDS,
    BiasAddAttrs,
    ConvAttrs,
    Dim,
    Graph,
    Kind,
    Node,
)
from tvm_fuse.core.layout import channel_vector_shape
from tvm_fuse.core.quantization import match_quantization
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.weights import output_axes

__all__ = ["MOST_OPERATORS", "Chain", "Step", "StepKind", "grow_chain"]

#: Operators of one chain. Real ones have less than ten. TVM inlines a diamond once for each of its
#: readers, so the size of the code doubles with every nested one: a dozen take minutes to compile.
MOST_OPERATORS = 16


class StepKind(str, Enum):
    """What a step of a chain does."""

    BIAS = "bias"
    RESIDUAL = "residual"
    ACTIVATION = "activation"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True)
class Step:
    """Operators that join a chain together; the last one is the step's result."""

    kind: StepKind
    nodes: tuple[int, ...]
    name: str

    @property
    def result(self) -> int:
        """Id of the node whose value leaves the step."""
        return self.nodes[-1]


@dataclass(frozen=True)
class Chain:
    """An anchor and its steps, in order, with the reason the chain ends where it does."""

    anchor: int
    steps: tuple[Step, ...]
    end: Reason | None

    @property
    def nodes(self) -> tuple[int, ...]:
        """All operators of the chain in topological order."""
        return tuple(sorted({self.anchor, *(node for step in self.steps for node in step.nodes)}))

    @property
    def result(self) -> int:
        """Id of the node whose value leaves the chain."""
        return self.steps[-1].result if self.steps else self.anchor

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Names of the steps, such as ``("bias", "scale", "residual", "relu")``."""
        return tuple(step.name for step in self.steps)


def grow_chain(graph: Graph, anchor: int, taken: Collection[int] = (), most: int = MOST_OPERATORS) -> Chain:
    """Collect the operators that can be computed in the anchor's kernel.

    Args:
        graph: The graph.
        anchor: Id of the anchor (conv2d, dense, ...).
        taken: Ids that belong to other chains.
        most: Most operators of the chain.

    Returns:
        The longest chain; ``steps`` is empty when nothing can join.
    """
    steps: list[Step] = []
    while True:
        value = steps[-1].result if steps else anchor
        step = _next_step(graph, anchor, value, taken, most)
        if not isinstance(step, Reason):
            operators = 1 + sum(len(earlier.nodes) for earlier in steps) + len(step.nodes)
            step = _check_length(graph, step.nodes[0], operators, most) or step
        if isinstance(step, Reason):
            return Chain(anchor, tuple(steps), step)
        steps.append(step)


def _next_step(graph: Graph, anchor: int, value: int, taken: Collection[int], most: int) -> Step | Reason:
    found, quantized = match_activation(graph, value), match_quantization(graph, value)
    if quantized is not None:
        nodes, kind, name = quantized.nodes, StepKind.ELEMENTWISE, quantized.name
    elif found is not None:
        nodes, kind, name = found.nodes, StepKind.ACTIVATION, found.activation
    else:
        region = _next_region(graph, value, most)
        if isinstance(region, Reason):
            return region
        nodes = region
        kind = _classify(graph, anchor, value, nodes)
        name = _name_elementwise(graph, anchor, nodes) if kind is StepKind.ELEMENTWISE else kind.value
    shape = graph.nodes[value].output.shape
    for node in nodes:
        reason = _check_taken(graph, node, taken) or _check_shape(graph, node, shape)
        if reason is not None:
            return reason
    return Step(kind, nodes, name)


def _next_region(graph: Graph, value: int, most: int) -> tuple[int, ...] | Reason:
    """The smallest single-entry, single-exit piece of elementwise operators after ``value``.

    Nodes are visited in topological order; when none is left to visit, the last one visited
    post-dominates ``value``.
    """
    if graph.is_output(value):
        return Reason(
            Code.RESULT_RETURNED, str(graph.nodes[value]), "a value only the chain reads", "a model output"
        )
    region: list[int] = []
    pending = set(graph.readers(value))
    while pending:
        current = min(pending)
        pending.remove(current)
        node = graph.nodes[current]
        if node.kind not in ELEMENTWISE_KINDS:
            return _reader_reason(graph, value, node)
        region.append(current)
        too_long = _check_length(graph, region[0], 1 + len(region), most)
        if too_long is not None:
            return too_long
        if not pending:
            return tuple(region)
        if graph.is_output(current):
            return Reason(Code.RESULT_RETURNED, str(node), "a value only the chain reads", "a model output")
        pending.update(graph.readers(current))
    return Reason(Code.RESULT_SHARED, str(graph.nodes[value]), "one reader", "no reader")


def _reader_reason(graph: Graph, value: int, reader: Node) -> Reason:
    """Why a value that ``reader`` reads ends the chain."""
    readers = sorted(set(graph.readers(value)))
    if len(readers) > 1:
        names = ", ".join(str(graph.nodes[node]) for node in readers)
        return Reason(Code.RESULT_SHARED, str(graph.nodes[value]), "one reader", f"{len(readers)}: {names}")
    return Reason(Code.READER_NOT_ELEMENTWISE, str(reader), "an elementwise operator", reader.op)


def _classify(graph: Graph, anchor: int, value: int, nodes: tuple[int, ...]) -> StepKind:
    """Name a step: a bias, a residual add, or any other elementwise piece."""
    node = graph.nodes[nodes[0]]
    if len(nodes) != 1 or node.kind not in (Kind.ADD, Kind.BIAS_ADD):
        return StepKind.ELEMENTWISE
    if isinstance(node.attrs, BiasAddAttrs):
        center = graph.nodes[anchor]
        along_channel = center.kind in ANCHOR_KINDS and (node.attrs.axis,) == output_axes(center)
        return StepKind.BIAS if along_channel else StepKind.ELEMENTWISE
    others = [source for source in node.inputs if source != value]
    if len(others) != 1:
        return StepKind.ELEMENTWISE
    other = graph.nodes[others[0]]
    if other.kind in (Kind.CONSTANT, Kind.INPUT) and _is_channel_vector(graph.nodes[anchor], other):
        return StepKind.BIAS
    if other.output.shape == graph.nodes[value].output.shape:
        return StepKind.RESIDUAL
    return StepKind.ELEMENTWISE


def _name_elementwise(graph: Graph, anchor: int, nodes: tuple[int, ...]) -> str:
    """``scale`` by a number or by constants for each channel; ``mul``, ``add``, or what the operator is."""
    if len(nodes) != 1:
        return StepKind.ELEMENTWISE.value
    node = graph.nodes[nodes[0]]
    if node.kind is not Kind.MULTIPLY:
        return node.label
    factors = (graph.nodes[source] for source in node.inputs if graph.nodes[source].kind is Kind.CONSTANT)
    is_scale = any(
        all(dim == 1 for dim in factor.output.shape) or _is_channel_vector(graph.nodes[anchor], factor)
        for factor in factors
    )
    return "scale" if is_scale else "mul"


def _is_channel_vector(anchor: Node, operand: Node) -> bool:
    """Whether an operand holds one number a channel of the anchor's output."""
    shape = anchor.output.shape
    if anchor.kind not in ANCHOR_KINDS:
        return False
    wanted: tuple[Dim, ...] | None = (1,) * (len(shape) - 1) + shape[-1:]
    if isinstance(anchor.attrs, ConvAttrs):
        wanted = channel_vector_shape(anchor.attrs.out_layout, "C", shape)
    return wanted is not None and _without_leading_ones(operand.output.shape) == _without_leading_ones(wanted)


def _without_leading_ones(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    start = next((index for index, dim in enumerate(shape) if dim != 1), len(shape))
    return shape[start:]


def _check_shape(graph: Graph, node: int, shape: tuple[Dim, ...]) -> Reason | None:
    got = graph.nodes[node].output
    if got.shape == shape:
        return None
    wanted = "x".join(str(dim) for dim in shape)
    return Reason(Code.RESULT_SHAPE_CHANGES, str(graph.nodes[node]), wanted, str(got))


def _check_length(graph: Graph, first: int, operators: int, most: int) -> Reason | None:
    if operators <= most:
        return None
    return Reason(Code.CHAIN_TOO_LONG, str(graph.nodes[first]), f"at most {most} operators", str(operators))


def _check_taken(graph: Graph, node: int, taken: Collection[int]) -> Reason | None:
    if node not in taken:
        return None
    return Reason(Code.READER_IN_OTHER_CHAIN, str(graph.nodes[node]), "an operator in no chain", "taken")
