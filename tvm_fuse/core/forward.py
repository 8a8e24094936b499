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
from tvm_fuse.core.channelwise import MOVE_KINDS, Affine, Axes, axes_after, read_step
from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.edit import LayerEdit
from tvm_fuse.core.graph import ANCHOR_KINDS, TRANSPOSED_KINDS, ConvAttrs, Graph, Kind, Node
from tvm_fuse.core.layout import axis_index
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
    return Absorbed(tuple(layers.values()), aliases)


def _further(graph: Graph, node: Node, way: _Way, aliases: dict[int, int]) -> _Way | None:
    """The way past an operator, if there is one."""
    step = read_step(graph, node, way.axes)
    if step is not None and not way.is_padded:
        aliases[node.id] = step.value
        return _Way(node.id, way.axes, step.affine.after(way.affine), way.is_padded)
    if node.kind in MOVE_KINDS:
        below = axes_after(graph, node, way.axes)
        return None if below is None else _Way(node.id, below, way.affine, way.is_padded)
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
    channels = [anchor.output.shape[axis] for axis in axes or ()]
    if not way.affine.shift.any():
        return bias_like_output(anchor, np.zeros(prod(int(size) for size in channels)))
    if anchor.kind is Kind.BATCH_MATMUL:
        axes_of = [anchor.attrs.kernel_layout.index(letter) for letter in "BOI"]
        sums: Array = shifted.transpose(axes_of).sum(axis=2)
        return sums[:, None, :]
    taps = _tap_sums(anchor, shifted)
    is_plain = not way.is_padded and anchor.kind not in TRANSPOSED_KINDS
    if taps is not None and is_plain and not any(getattr(anchor.attrs, "padding", ())):
        return bias_like_output(anchor, taps.reshape(len(taps), -1).sum(axis=1))
    sizes = _map_sizes(graph, anchor) if taps is not None and is_plain else None
    if taps is None or sizes is None:
        got = f"padding of {anchor}" if is_plain else f"{anchor}, whose border sees the shift less often"
        return Reason(Code.BN_SHIFT_BEFORE_PADDING, source, "no padding after it", got)
    return _border_map(anchor, taps, sizes)


def _tap_sums(anchor: Node, shifted: Array) -> Array | None:
    """The shift's part of each output channel and tap: ``(O, taps...)``, the input channels summed."""
    layout = anchor.attrs.kernel_layout
    axes = output_axes(anchor)
    outer, inner = axis_index(layout, "O"), axis_index(layout, "I")
    if outer is None or inner is None or axes is None:
        return None
    ordered: Array = np.moveaxis(shifted, (outer, inner), (0, 1))
    channels = prod(int(anchor.output.shape[axis]) for axis in axes)
    if ordered.shape[0] != channels:  # depthwise (C, multiplier): nothing to sum
        return ordered.reshape(-1, *ordered.shape[2:])
    sums: Array = ordered.sum(axis=1)
    return sums


@dataclass(frozen=True)
class _MapSizes:
    """Data and output sizes of each spatial axis."""

    data: tuple[int, ...]
    output: tuple[int, ...]


def _map_sizes(graph: Graph, anchor: Node) -> _MapSizes | None:
    """Sizes for a map over the output, when they are static, unblocked, and the map is small enough."""
    attrs: ConvAttrs = anchor.attrs
    data = graph.nodes[anchor.inputs[0]].output
    spatial = [letter for letter in attrs.data_layout if letter in "DHW"]
    if not attrs.data_layout.isalpha() or not attrs.out_layout.isalpha():
        return None
    data_sizes = [data.shape[attrs.data_layout.index(letter)] for letter in spatial]
    sizes = [anchor.output.shape[attrs.out_layout.index(letter)] for letter in spatial]
    channels = anchor.output.shape[attrs.out_layout.index("C")]
    static = [size for size in (*data_sizes, *sizes) if isinstance(size, int)]
    elements = [size for size in data.shape if isinstance(size, int)]
    if len(static) != 2 * len(spatial) or len(elements) != len(data.shape) or not isinstance(channels, int):
        return None
    data_static, output_static = tuple(static[: len(spatial)]), tuple(static[len(spatial) :])
    if prod(output_static) * channels > _LARGEST_MAP * prod(elements):
        return None
    return _MapSizes(data_static, output_static)


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
    plain = "NC" + "".join(letter for letter in attrs.out_layout if letter in "DHW")
    return result[None].transpose([plain.index(letter) for letter in attrs.out_layout])
