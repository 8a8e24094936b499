"""Push a per-channel scale and shift into the layers that read a value.

::

    [scale, shift] -> layer -> bias       layer' -> bias'

    W' = W * scale                         along the input channel
    b' = b + sum(W * shift)                over input channels and taps, where nothing is padded

Where the layer pads its data with zeros, the pads are not shifted; near the border fewer taps see
the shift, and the bias becomes a map over the output: ``b'[o, y, x] = b[o] + sum(W * shift)`` over the
taps that fall inside. That is exact, for a zero scale as well; it needs static sizes, and costs
one read of the map, so it must not be larger than what the fold saves. Nothing is divided by the scale.

The way down leads through per-channel operators with constants, operators that only move elements
and zero padding, to convolutions and matrix products with constant weights; every reader must be one.

Conditions by code: ``bn-reader-unsupported``, ``bn-before-activation``, ``bn-shift-before-padding``,
``bn-axis-not-channel``, ``result-returned``; then those of ``core/weights.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tvm_fuse.core.backward import ACTIVATION_KINDS, Absorbed
from tvm_fuse.core.channelwise import MOVE_KINDS, Affine, Axes, after_move, channel_count, read_step
from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.edit import Direction, LayerEdit
from tvm_fuse.core.graph import ANCHOR_KINDS, TRANSPOSED_KINDS, ConvAttrs, Dim, Graph, Kind, Node
from tvm_fuse.core.layout import axis_index, transform
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.weights import (
    FoldedLayer,
    bias_like_output,
    exact_weight,
    input_axes,
    output_axes,
    round_layer,
    scale_inputs,
)

__all__ = ["absorb_forward"]

#: A map over the output may hold this many times the elements of the data.
_LARGEST_MAP = 2


@dataclass(frozen=True)
class _Way:
    """Where the walk is: a value with its channel axes, and the map that is to be pushed down."""

    value: int
    axes: Axes
    affine: Affine
    is_padded: bool = False


def absorb_forward(
    graph: Graph, values: Sequence[int], axes: Axes, affine: Affine, source: str
) -> Absorbed | Reason:
    """Find the layers that read a value and put a map of it into their weights.

    Args:
        graph: The graph.
        values: Ids under which the scaled and shifted value is read.
        axes: Its channel axes.
        affine: The map.
        source: Name of what the map comes from, for messages.

    Returns:
        New layers, with the operators on the way that disappear (not the values themselves); or why not.
    """
    layers: dict[int, tuple[LayerEdit, FoldedLayer]] = {}
    aliases: dict[int, int] = {}
    open_ways = [_Way(value, axes, affine) for value in values]
    while open_ways:
        way = open_ways.pop()
        if graph.is_output(way.value):
            wanted = f"{source} read by layers only"
            return Reason(Code.RESULT_RETURNED, str(graph.nodes[way.value]), wanted, "a model output")
        for reader in graph.readers(way.value):
            node = graph.nodes[reader]
            if node.kind in ANCHOR_KINDS and node.inputs[0] == way.value:
                layer = _into_layer(graph, node, way, source)
                if isinstance(layer, Reason):
                    return layer
                layers[reader] = layer[0]
                aliases.update(layer[1])
                continue
            further = _further(graph, node, way, aliases)
            if further is None:
                return _unsupported(source, node)
            open_ways.append(further)
    if not layers:
        return _unsupported(source, None)
    return Absorbed(tuple(layers.values()), aliases, Direction.AFTER)


def _further(graph: Graph, node: Node, way: _Way, aliases: dict[int, int]) -> _Way | None:
    """The way past an operator, if there is one."""
    step = read_step(graph, node, way.axes)
    if step is not None and not way.is_padded:
        aliases[node.id] = step.value
        return _Way(node.id, way.axes, step.affine.after(way.affine), way.is_padded)
    if node.kind in MOVE_KINDS:
        below = after_move(graph, node, way.axes, way.affine)
        return None if below is None else _Way(node.id, *below, way.is_padded)
    if node.kind is Kind.PAD and node.attrs.value == 0.0:
        widths = [node.attrs.widths[axis] for axis in way.axes]
        return _Way(node.id, way.axes, way.affine, True) if not any(map(any, widths)) else None
    return None


def _unsupported(source: str, node: Node | None) -> Reason:
    is_activation = node is not None and node.kind in ACTIVATION_KINDS
    code = Code.BN_BEFORE_ACTIVATION if is_activation else Code.BN_READER_UNSUPPORTED
    wanted = "convolutions and matrix products as only readers"
    return Reason(code, source, wanted, "no reader" if node is None else node.op)


# --- one layer -------------------------------------------------------------------------------


def _into_layer(
    graph: Graph, anchor: Node, way: _Way, source: str
) -> tuple[tuple[LayerEdit, FoldedLayer], dict[int, int]] | Reason:
    if way.axes != input_axes(graph, anchor):
        got = f"axes {list(way.axes)}"
        return Reason(Code.BN_AXIS_NOT_CHANNEL, source, f"the input channels of {anchor}", got)
    weight = exact_weight(graph, anchor)
    if isinstance(weight, Reason):
        return weight
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = scale_inputs(anchor, weight, way.affine.scale)
        shifted = scale_inputs(anchor, weight, way.affine.shift)
    if isinstance(scaled, Reason):
        return scaled
    if isinstance(shifted, Reason):
        return shifted
    bias = _shift_of_output(graph, anchor, shifted, way, source)
    if isinstance(bias, Reason):
        return bias
    old = _bias_after(graph, anchor)
    if old is not None:
        bias = bias + bias_like_output(anchor, old[1])
    layer = round_layer(graph, anchor, scaled, bias, source, had_bias=old is not None)
    if isinstance(layer, Reason):
        return layer
    return layer, {} if old is None else {old[0]: anchor.id}


def _bias_after(graph: Graph, anchor: Node) -> tuple[int, Array] | None:
    """The add that is the only reader of a layer, and its bias ``(C,)``."""
    readers, axes = graph.readers(anchor.id), output_axes(anchor)
    if graph.is_output(anchor.id) or len(readers) != 1 or axes is None:
        return None
    add = graph.nodes[readers[0]]
    step = read_step(graph, add, axes) if add.kind in (Kind.ADD, Kind.BIAS_ADD) else None
    return None if step is None else (add.id, step.affine.shift)


def _shift_of_output(graph: Graph, anchor: Node, shifted: Array, way: _Way, source: str) -> Array | Reason:
    """What the shift adds to the output: one number a channel, or a map over the output.

    Args:
        graph: The graph.
        anchor: The layer.
        shifted: Its weight times the shift along the input channel, float64.
        way: What reaches the layer.
        source: For messages.

    Returns:
        float64, of the rank of the output.
    """
    axes = output_axes(anchor)
    channels = None if axes is None else channel_count(anchor.output.shape, axes)
    if not way.affine.shift.any():
        return bias_like_output(anchor, np.zeros(channels or 1))
    if channels is None:
        got = f"{anchor.output} of {anchor}"
        return Reason(Code.BN_AXIS_NOT_CHANNEL, source, "static output channels", got)
    if anchor.kind is Kind.BATCH_MATMUL:
        axes_of = [anchor.attrs.kernel_layout.index(letter) for letter in "BOI"]
        sums: Array = shifted.transpose(axes_of).sum(axis=2)
        return sums[:, None, :]
    wanted = "no padding after it"
    if way.is_padded or anchor.kind in TRANSPOSED_KINDS:
        got = f"{anchor}, whose border sees the shift less often"
        return Reason(Code.BN_SHIFT_BEFORE_PADDING, source, wanted, got)
    taps = _tap_sums(anchor, shifted, channels)
    if not any(getattr(anchor.attrs, "padding", ())):
        return bias_like_output(anchor, taps.reshape(channels, -1).sum(axis=1))
    sizes = _map_sizes(graph, anchor, channels)
    if sizes is None:
        return Reason(Code.BN_SHIFT_BEFORE_PADDING, source, wanted, f"padding of {anchor}")
    return _border_map(anchor, taps, sizes)


def _tap_sums(anchor: Node, shifted: Array, channels: int) -> Array:
    """The shift's part of each output channel and tap: ``(O, taps...)``, the input channels summed."""
    layout = anchor.attrs.kernel_layout
    plain: Array = transform(shifted, layout, "OI" + _spatial(layout))
    if plain.shape[0] != channels:  # depthwise (C, multiplier): nothing to sum
        return plain.reshape(channels, *plain.shape[2:])
    sums: Array = plain.sum(axis=1)
    return sums


def _spatial(layout: str) -> str:
    """The spatial axes of a layout, in the order of strides and padding."""
    return "".join(letter for letter in "DHW" if letter in layout)


@dataclass(frozen=True)
class _MapSizes:
    """Data and output sizes of each spatial axis."""

    data: tuple[int, ...]
    output: tuple[int, ...]


def _map_sizes(graph: Graph, anchor: Node, channels: int) -> _MapSizes | None:
    """Sizes for a map over the output, when they are static and the map is small enough."""
    attrs: ConvAttrs = anchor.attrs
    data = graph.nodes[anchor.inputs[0]].output
    if not data.is_static or not anchor.output.is_static:
        return None
    data_sizes = _spatial_sizes(attrs.data_layout, data.shape)
    output_sizes = _spatial_sizes(attrs.out_layout, anchor.output.shape)
    if data_sizes is None or output_sizes is None:
        return None
    is_small = prod(output_sizes) * channels <= _LARGEST_MAP * prod(int(size) for size in data.shape)
    return _MapSizes(data_sizes, output_sizes) if is_small else None


def _spatial_sizes(layout: str, shape: tuple[Dim, ...]) -> tuple[int, ...] | None:
    """Sizes of the spatial axes, or None when one is split in blocks."""
    places = [axis_index(layout, letter) for letter in _spatial(layout)]
    sizes = [int(shape[place]) for place in places if place is not None]
    return tuple(sizes) if len(sizes) == len(places) else None


def _border_map(anchor: Node, taps: Array, sizes: _MapSizes) -> Array:
    """For each output position, the sum over the taps that fall inside the data.

    Args:
        anchor: A convolution.
        taps: float64 ``(O, taps...)``.
        sizes: Sizes of the spatial axes.

    Returns:
        float64, rank and layout of the output, 1 for the batch.
    """
    attrs: ConvAttrs = anchor.attrs
    rank = len(sizes.data)
    padding = attrs.padding if len(attrs.padding) == 2 * rank else (*attrs.padding, *attrs.padding)
    result = taps
    for axis in range(rank):
        position = attrs.strides[axis] * np.arange(sizes.output[axis])[:, None] - padding[axis]
        position = position + attrs.dilation[axis] * np.arange(taps.shape[1 + axis])[None, :]
        inside = ((position >= 0) & (position < sizes.data[axis])).astype(np.float64)
        # Sums over the taps of this axis; its positions go last, so the axes come round in order.
        result = np.tensordot(result, inside, axes=(1, 1))
    return transform(result[None], "NC" + _spatial(attrs.data_layout), attrs.out_layout)
