"""Push a per-channel scale and shift into the layers that produce a value.

::

    layer -> bias -> transpose -> [scale, shift]      layer' -> transpose
    concatenate(a, b) -> [scale, shift]               concatenate(a', b')       each gets its channels' part
    add(a, b) -> [scale, shift]                       add(a', b')               both scaled, a shifted

The way up leads through per-channel operators with constants (they are composed into the map and
disappear: exactly one bias is left), operators that only move elements, casts between floating-point
dtypes, concatenations and adds of two values, to convolutions and matrix products with constant weights.

Conditions: every value on the way has one reader and is no output of the model; every branch ends
in a layer that can absorb its part; else nothing is folded and the reason names the branch.
By code: ``anchor-output-shared``, ``anchor-output-returned``, ``bn-producer-unsupported``,
``bn-after-activation``, ``bn-axis-not-channel``, ``fold-overflow``; then those of ``core/weights.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.activations import ACTIVATIONS, Apply
from tvm_fuse.core.channelwise import (
    AFFINE_KINDS,
    MOVE_KINDS,
    Affine,
    Axes,
    before_move,
    channel_count,
    read_step,
)
from tvm_fuse.core.edit import Direction, Edit, LayerEdit
from tvm_fuse.core.graph import ANCHOR_KINDS, ConvAttrs, Graph, Kind, Node
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.weights import (
    FoldedLayer,
    bias_like_output,
    exact_weight,
    output_axes,
    round_layer,
    scale_outputs,
)

__all__ = ["ACTIVATION_KINDS", "Absorbed", "absorb_backward"]

#: Kinds that only occur as activations.
ACTIVATION_KINDS = frozenset(
    spelling.kind for record in ACTIVATIONS for spelling in record.spellings if isinstance(spelling, Apply)
) - {Kind.ADD, Kind.MULTIPLY, Kind.DIVIDE}

_PASSED_KINDS = ANCHOR_KINDS | AFFINE_KINDS | MOVE_KINDS | {Kind.CONCATENATE, Kind.TUPLE}


@dataclass(frozen=True)
class Absorbed:
    """Layers that took a map in, and the values that disappear for it."""

    layers: tuple[tuple[LayerEdit, FoldedLayer], ...]
    aliases: Mapping[int, int]
    direction: Direction = Direction.BEFORE

    @property
    def folded(self) -> tuple[FoldedLayer, ...]:
        """The layers, for people."""
        return tuple(layer for _, layer in self.layers)

    def edit(self, aliases: Mapping[int, int]) -> Edit:
        """The edit, with the values that carried the map aliased as well."""
        return Edit(tuple(edit for edit, _ in self.layers), {**self.aliases, **aliases}, self.direction)


@dataclass(frozen=True)
class _Way:
    """Where the walk is: a value, who reads it, its channel axes, and the map that is to be pushed up."""

    value: Node
    reader: Node
    axes: Axes
    affine: Affine
    has_bias: bool = False


def absorb_backward(
    graph: Graph, value: int, reader: int, axes: Axes, affine: Affine, source: str
) -> Absorbed | Reason:
    """Find the layers that produce a value and put a map of it into their weights.

    Args:
        graph: The graph.
        value: Id of the value that is scaled and shifted.
        reader: Id of the node that does so.
        axes: The channel axes of the value.
        affine: The map.
        source: Name of what the map comes from, for messages.

    Returns:
        New layers, with the operators between them and the value that disappear; or why not.
    """
    return _absorb(graph, _Way(graph.nodes[value], graph.nodes[reader], axes, affine), source)


def _absorb(graph: Graph, way: _Way, source: str) -> Absorbed | Reason:
    aliases: dict[int, int] = {}
    while True:
        node = way.value
        reason = _only_reader(graph, node, way.reader, source)
        if reason is not None:
            return reason
        if node.kind in ANCHOR_KINDS:
            layer = _into_layer(graph, way, source)
            return layer if isinstance(layer, Reason) else Absorbed((layer,), aliases)
        step = read_step(graph, node, way.axes)
        if step is not None:
            aliases[node.id] = step.value
            has_bias = way.has_bias or bool(step.affine.shift.any())
            way = _Way(graph.nodes[step.value], node, way.axes, way.affine.after(step.affine), has_bias)
        elif node.kind in MOVE_KINDS:
            above = before_move(graph, node, way.axes, way.affine)
            if above is None:
                return _unsupported(source, f"{node}, which mixes channels")
            way = _Way(graph.nodes[node.inputs[0]], node, *above, way.has_bias)
        elif node.kind is Kind.CONCATENATE:
            return _into_branches(graph, _concatenated(graph, way, source), source, aliases)
        elif node.kind is Kind.ADD and _joins_two_values(graph, node):
            return _into_branches(graph, _added(graph, way), source, aliases)
        else:
            return _unsupported(source, node.op, node.kind)


# --- branches --------------------------------------------------------------------------------


def _into_branches(
    graph: Graph, ways: list[_Way] | Reason, source: str, aliases: Mapping[int, int]
) -> Absorbed | Reason:
    if isinstance(ways, Reason):
        return ways
    parts = []
    for way in ways:
        part = _absorb(graph, way, source)
        if isinstance(part, Reason):
            return part
        parts.append(part)
    layers = tuple(layer for part in parts for layer in part.layers)
    return Absorbed(layers, {**aliases, **{k: v for part in parts for k, v in part.aliases.items()}})


def _concatenated(graph: Graph, way: _Way, source: str) -> list[_Way] | Reason:
    """Each part with its share of the map."""
    parts = graph.nodes[way.value.inputs[0]]
    reason = _only_reader(graph, parts, way.value, source)
    if reason is not None:
        return reason
    unsplit = _unsupported(source, "a concatenation that cannot be split by channels")
    if parts.kind is not Kind.TUPLE:
        return unsplit
    if way.value.attrs.axis not in way.axes:
        return [_Way(graph.nodes[part], parts, way.axes, way.affine, way.has_bias) for part in parts.inputs]
    if way.value.attrs.axis != way.axes[0]:
        return unsplit
    ways, start = [], 0
    for part in parts.inputs:
        channels = channel_count(graph.nodes[part].output.shape, way.axes)
        if channels is None:
            return unsplit
        share = slice(start, start + channels)
        affine = Affine(way.affine.scale[share], way.affine.shift[share])
        ways.append(_Way(graph.nodes[part], parts, way.axes, affine, way.has_bias))
        start += channels
    return ways


def _added(graph: Graph, way: _Way) -> list[_Way]:
    """Both operands scaled, the first one shifted."""
    first, second = (graph.nodes[source] for source in way.value.inputs)
    unshifted = Affine(way.affine.scale, np.zeros_like(way.affine.shift))
    return [
        _Way(first, way.value, way.axes, way.affine, way.has_bias),
        _Way(second, way.value, way.axes, unshifted),
    ]


def _joins_two_values(graph: Graph, add: Node) -> bool:
    return all(
        source not in graph.constants and graph.nodes[source].output == add.output for source in add.inputs
    )


# --- conditions ------------------------------------------------------------------------------


def _only_reader(graph: Graph, value: Node, reader: Node, source: str) -> Reason | None:
    """Nobody else may read a value that folding changes."""
    if value.kind not in _PASSED_KINDS:
        return None
    wanted = (
        f"{source} as the only reader" if reader.kind is Kind.BATCH_NORM else f"{reader} as the only reader"
    )
    if graph.is_output(value.id):
        return Reason(Code.ANCHOR_OUTPUT_RETURNED, str(value), wanted, "a model output")
    readers = graph.readers(value.id)
    others = [str(graph.nodes[node]) for node in readers if node != reader.id]
    if others or len(readers) > 1:
        got = f"{len(readers)} readers; also {', '.join(others) or reader}"
        return Reason(Code.ANCHOR_OUTPUT_SHARED, str(value), wanted, got)
    return None


def _unsupported(source: str, got: str, kind: Kind = Kind.OTHER) -> Reason:
    code = Code.BN_AFTER_ACTIVATION if kind in ACTIVATION_KINDS else Code.BN_PRODUCER_UNSUPPORTED
    return Reason(code, source, "a convolution or matrix product (with or without bias) before it", got)


def _axis_is_channel(way: _Way, source: str) -> Reason | None:
    channel = output_axes(way.value)
    if way.axes == channel:
        return None
    attrs = way.value.attrs
    where = f" of {attrs.out_layout}" if isinstance(attrs, ConvAttrs) else ""
    wanted = f"{_axis_words(channel)}{where}" if channel is not None else "one channel axis"
    return Reason(Code.BN_AXIS_NOT_CHANNEL, source, wanted, f"{_axis_words(way.axes)}{where}")


def _axis_words(axes: Axes) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {list(axes)}"


# --- construction ----------------------------------------------------------------------------


def _into_layer(graph: Graph, way: _Way, source: str) -> tuple[LayerEdit, FoldedLayer] | Reason:
    anchor = way.value
    reason = _axis_is_channel(way, source)
    if reason is not None:
        return reason
    weight = exact_weight(graph, anchor)
    if isinstance(weight, Reason):
        return weight
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = scale_outputs(anchor, weight, way.affine.scale)
    if isinstance(scaled, Reason):
        return scaled
    bias = bias_like_output(anchor, way.affine.shift)
    return round_layer(graph, anchor, scaled, bias, source, had_bias=way.has_bias)
