"""Put a per-channel scale, before or after a layer, and a bias into the layer's own parameters.

::

    scale * layer(x, W) + bias  =  layer(x, W') + bias     W' = W * scale along the output channel
    layer(scale * x, W) + bias  =  layer(x, W') + bias     W' = W * scale along the input channel

Shapes: scale and bias hold one number a channel; W is in any layout whose channel is one axis,
blocked or not, a grouped kernel, a depthwise kernel whose two channel axes together make the
output channel, or a transposed kernel, where the output channel is the group and the position in it.

Numerics: float64, rounded once to the dtype of the weights (``core/dtypes.py``). A folded number
differs from the exact one by at most half a unit in the last place; ``FoldedLayer`` states by how
much an output can move for that.

Conditions, by code: ``weight-not-constant``, ``weight-layout-unsupported``, ``fold-overflow``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, Array, narrow, widen
from tvm_fuse.core.edit import LayerEdit
from tvm_fuse.core.graph import TRANSPOSED_KINDS, ConvAttrs, Graph, Node, digest
from tvm_fuse.core.layout import axis_index, channel_axes, spread
from tvm_fuse.core.reason import Code, Reason

__all__ = [
    "FoldedLayer",
    "bias_like_output",
    "exact_weight",
    "fold_weight",
    "fold_weight_inputs",
    "input_axes",
    "output_axes",
    "round_layer",
    "scale_inputs",
    "scale_outputs",
]


@dataclass(frozen=True)
class FoldedLayer:
    """What became of one layer, for people and manifests.

    The rounding of the folded numbers moves an output of the layer by at most
    ``weight_error * max(abs(x)) + bias_error``, x being what the layer reads after the fold.

    Args:
        name: Name of the layer.
        weight_before: Digest of the weight before folding.
        weight_after: Digest of the folded weight.
        weight_error: Largest sum of ``abs(folded - exact)`` over the weights of one output channel.
        bias_error: Largest ``abs(folded - exact)`` of the bias.
        had_bias: Whether an older bias was merged.
    """

    name: str
    weight_before: str
    weight_after: str
    weight_error: float
    bias_error: float
    had_bias: bool


# --- reading ---------------------------------------------------------------------------------


def exact_weight(graph: Graph, anchor: Node) -> Array | Reason:
    """The weight of a layer in float64, or why it cannot be folded into."""
    node = graph.nodes[anchor.inputs[1]]
    weight = graph.constant(node.id)
    if weight is None:
        return Reason(Code.WEIGHT_NOT_CONSTANT, str(anchor), "a constant weight", f"computed by {node}")
    if node.output.dtype not in FLOATS:
        wanted = "a weight in a floating-point dtype"
        return Reason(Code.FOLD_OVERFLOW, str(anchor), wanted, node.output.dtype)
    return widen(weight, node.output.dtype)


def output_axes(anchor: Node) -> tuple[int, ...] | None:
    """The axes of a layer's output that make its output channel, outer one first."""
    if isinstance(anchor.attrs, ConvAttrs):
        return channel_axes(anchor.attrs.out_layout, "C")
    return (len(anchor.output.shape) - 1,)


def input_axes(graph: Graph, anchor: Node) -> tuple[int, ...] | None:
    """The axes of a layer's data that make its input channel, outer one first."""
    if isinstance(anchor.attrs, ConvAttrs):
        return channel_axes(anchor.attrs.data_layout, "C")
    return (len(graph.nodes[anchor.inputs[0]].output.shape) + anchor.attrs.input_axis,)


# --- scaling ---------------------------------------------------------------------------------


def scale_outputs(anchor: Node, weight: Array, scale: Array) -> Array | Reason:
    """The weight of a layer whose output is multiplied by ``scale``, in float64."""
    attrs = anchor.attrs
    if anchor.kind in TRANSPOSED_KINDS:
        scaled = fold_weight(weight, scale, attrs.kernel_layout, groups=attrs.groups, transposed=True)
    else:
        scaled = fold_weight(weight, scale, attrs.kernel_layout)
    return _no_axis(anchor, weight, scale, "output") if scaled is None else scaled


def scale_inputs(anchor: Node, weight: Array, scale: Array) -> Array | Reason:
    """The weight of a layer whose data is multiplied by ``scale``, in float64."""
    groups = 1 if anchor.kind in TRANSPOSED_KINDS else getattr(anchor.attrs, "groups", 1)
    scaled = fold_weight_inputs(weight, scale, anchor.attrs.kernel_layout, groups=groups)
    return _no_axis(anchor, weight, scale, "input") if scaled is None else scaled


def _no_axis(anchor: Node, weight: Array, scale: Array, role: str) -> Reason:
    wanted = f"an {role} channel axis of {scale.size}"
    got = f"{anchor.attrs.kernel_layout} {weight.shape}"
    return Reason(Code.WEIGHT_LAYOUT_UNSUPPORTED, str(anchor), wanted, got)


def fold_weight(
    weight: Array, scale: Array, layout: str, *, groups: int = 1, transposed: bool = False
) -> Array | None:
    """Multiply a kernel by ``scale`` along its output channel.

    Args:
        weight: Kernel of any NumPy dtype, in ``layout``.
        scale: float64 ``(C,)``.
        layout: Kernel layout: ``OIHW``, ``HWIO``, ``OIHW16i16o``, ``IOHW``, ``OI``, ...
        groups: Groups of a transposed convolution.
        transposed: Whether the kernel is a transposed convolution's.

    Returns:
        The product in float64, or None when the kernel has no axis that is the output channel.
    """
    if transposed:
        factor = _spread_transposed(weight.shape, scale, layout, groups)
    else:
        factor = spread(scale, layout, "O", weight.shape)
        if factor is None:
            factor = _spread_depthwise(weight.shape, scale, layout)
    return None if factor is None else weight * factor


def fold_weight_inputs(weight: Array, scale: Array, layout: str, *, groups: int = 1) -> Array | None:
    """Multiply a kernel by ``scale`` along its input channel.

    Args:
        weight: Kernel of any NumPy dtype, in ``layout``.
        scale: float64 ``(C,)``.
        layout: Kernel layout.
        groups: Groups of a convolution; 1 for a transposed one, whose kernel holds all input channels.

    Returns:
        The product in float64, or None when the kernel has no axes that are the input channel.
    """
    factor = spread(scale, layout, "I", weight.shape) if groups == 1 else None
    if factor is None and groups > 1:
        factor = _spread_grouped(weight.shape, scale, layout, groups)
    return None if factor is None else weight * factor


def _plain_axes(shape: tuple[int, ...], layout: str) -> tuple[int, int] | None:
    """Positions of O and I in a kernel, when neither is split in blocks."""
    outer, inner = axis_index(layout, "O"), axis_index(layout, "I")
    if outer is None or inner is None or len(layout) != len(shape):
        return None
    return outer, inner


def _spread_depthwise(shape: tuple[int, ...], scale: Array, layout: str) -> Array | None:
    """A depthwise kernel ``(.., C, multiplier, ..)``: output channel = c * multiplier + m."""
    axes = _plain_axes(shape, layout)
    if axes is None or shape[axes[0]] * shape[axes[1]] != scale.size:
        return None
    return _spread_matrix(scale.reshape(shape[axes[0]], shape[axes[1]]), shape, axes)


def _spread_transposed(shape: tuple[int, ...], scale: Array, layout: str, groups: int) -> Array | None:
    """A transposed kernel: input channel i is in group i // (I / groups), output channel = group * O + o."""
    axes = _plain_axes(shape, layout)
    if axes is None or shape[axes[0]] * groups != scale.size or shape[axes[1]] % groups:
        return None
    by_group = scale.reshape(groups, shape[axes[0]]).T
    return _spread_matrix(np.repeat(by_group, shape[axes[1]] // groups, axis=1), shape, axes)


def _spread_grouped(shape: tuple[int, ...], scale: Array, layout: str, groups: int) -> Array | None:
    """A grouped kernel: output channel o is in group o // (O / groups), input channel = group * I + i.

    A depthwise kernel may also be ``(.., C, multiplier, ..)``, or blocked: input channel = O.
    """
    if groups == scale.size:
        by_output = spread(scale, layout, "O", shape)
        if by_output is not None:
            return by_output
    axes = _plain_axes(shape, layout)
    if axes is None or shape[axes[1]] * groups != scale.size or shape[axes[0]] % groups:
        return None
    by_group = scale.reshape(groups, shape[axes[1]])
    return _spread_matrix(np.repeat(by_group, shape[axes[0]] // groups, axis=0), shape, axes)


def _spread_matrix(matrix: Array, shape: tuple[int, ...], axes: tuple[int, int]) -> Array:
    """View a matrix over (O, I) as a tensor that broadcasts with the kernel."""
    outer, inner = axes
    target = tuple(size if index in axes else 1 for index, size in enumerate(shape))
    return (matrix if outer < inner else matrix.T).reshape(target)


# --- rounding --------------------------------------------------------------------------------


def round_layer(
    graph: Graph, anchor: Node, weight: Array, bias: Array, source: str, *, had_bias: bool
) -> tuple[LayerEdit, FoldedLayer] | Reason:
    """Store exact parameters in the dtypes of a layer.

    Args:
        graph: The graph.
        anchor: The layer; its weight is a floating-point constant.
        weight: float64, shape of the layer's weight.
        bias: float64, rank of the layer's output and broadcasting with it.
        source: Where scale and bias come from, for the message of a refusal.
        had_bias: Whether ``bias`` contains an older one.

    Returns:
        The edit and its record, or why a number does not fit.
    """
    old = graph.constants[anchor.inputs[1]]
    dtype = graph.nodes[anchor.inputs[1]].output.dtype
    bias_dtype = anchor.output.dtype if anchor.output.dtype in FLOATS else dtype
    stored, stored_bias = narrow(weight, dtype), narrow(bias, bias_dtype)
    kept, kept_bias = widen(stored, dtype), widen(stored_bias, bias_dtype)
    for role, exact, value, name in (
        ("weight", weight, kept, dtype),
        ("bias", bias, kept_bias, bias_dtype),
    ):
        bad = np.argwhere(~np.isfinite(value))
        if len(bad):
            place = [i for i, size in zip(bad[0].tolist(), value.shape) if size > 1 or role == "weight"]
            got = f"{role}{place} = {exact[tuple(bad[0])]:g} for {source}"
            got += f" ({len(bad)} of {value.size} values)"
            wanted = f"values that {name} (at most {FLOATS[name].largest:g}) can hold"
            return Reason(Code.FOLD_OVERFLOW, str(anchor), wanted, got)
    layer = FoldedLayer(
        name=str(anchor),
        weight_before=digest(old),
        weight_after=digest(stored),
        weight_error=_largest_sum(np.abs(kept - weight), anchor.attrs.kernel_layout),
        bias_error=float(np.abs(kept_bias - bias).max()),
        had_bias=had_bias,
    )
    return LayerEdit(anchor.id, stored, stored_bias if kept_bias.any() else None), layer


def _largest_sum(error: Array, layout: str) -> float:
    """Largest sum over everything but the output channel; over a whole group, it is an upper bound."""
    kept = channel_axes(layout, "O") or ()
    others = tuple(axis for axis in range(error.ndim) if axis not in kept)
    return float(error.sum(axis=others).max())


def bias_like_output(anchor: Node, bias: Array) -> Array:
    """A bias ``(C,)`` with the rank of the layer's output: ``(1, C, 1, 1)`` for NCHW."""
    axes = output_axes(anchor) or ()
    shape = tuple(int(size) if axis in axes else 1 for axis, size in _sizes(anchor))
    return bias.reshape(shape)


def _sizes(anchor: Node) -> list[tuple[int, int]]:
    return [(axis, size if isinstance(size, int) else 1) for axis, size in enumerate(anchor.output.shape)]
