"""Put a per-channel scale and a bias into a layer's weights.

::

    scale * layer(x, W) + bias  =  layer(x, W') + bias,    W' = W * scale along the output channel

Shapes: scale, bias: ``(C,)``; W in any layout whose output channel is one axis, blocked or not; a
depthwise kernel whose two channel axes together make the output channel; or a transposed kernel,
where the output channel is the group and the position in it.

Numerics: float64, rounded once to the dtype of the weights.
Conditions, by code: ``weight-not-constant``, ``weight-layout-unsupported``, ``fold-overflow``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_fuse.core.graph import TRANSPOSED_KINDS, Array, BiasAddAttrs, ConvAttrs, Graph, Node, digest
from tvm_fuse.core.layout import axis_index, spread
from tvm_fuse.core.reason import Code, Reason

__all__ = ["ScaledLayer", "absorb", "channel_axis", "channel_vector", "fold_weight"]

#: Floating-point dtypes that NumPy has.
_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True)
class ScaledLayer:
    """A layer's new weight (shape and dtype of the old one) and bias (``(C,)``), with digests."""

    weight_before: str
    weight_after: str
    weight: Array = field(compare=False, repr=False)
    bias: Array = field(compare=False, repr=False)


def absorb(graph: Graph, anchor: Node, scale: Array, bias: Array, source: str) -> ScaledLayer | Reason:
    """Compute the weights of a layer that scales and shifts its own output.

    Args:
        graph: The graph.
        anchor: A convolution or dense layer.
        scale: float64 ``(C,)``.
        bias: float64 ``(C,)``, everything that is added to the scaled output.
        source: Where scale and bias come from, for the message of a refusal.

    Returns:
        The new weight and bias, or why they cannot be had.
    """
    weight = graph.constant(anchor.inputs[1])
    if weight is None:
        got = f"computed by {graph.nodes[anchor.inputs[1]]}"
        return Reason(Code.WEIGHT_NOT_CONSTANT, str(anchor), "a constant weight", got)
    reason = _check_floating(anchor, weight)
    if reason is not None:
        return reason
    with np.errstate(over="ignore", invalid="ignore"):
        exact = _fold_weight_of(anchor, weight, scale)
    if exact is None:
        got = f"{anchor.attrs.kernel_layout} {weight.shape}"
        wanted = f"an output channel axis of {scale.size}"
        return Reason(Code.WEIGHT_LAYOUT_UNSUPPORTED, str(anchor), wanted, got)
    with np.errstate(over="ignore"):
        stored, stored_bias = exact.astype(weight.dtype), bias.astype(_bias_dtype(anchor, weight))
    reason = _check_fits(source, anchor, exact, stored, "weight") or _check_fits(
        source, anchor, bias, stored_bias, "bias"
    )
    if reason is not None:
        return reason
    return ScaledLayer(digest(weight), digest(stored), stored, stored_bias)


def _fold_weight_of(anchor: Node, weight: Array, scale: Array) -> Array | None:
    if anchor.kind not in TRANSPOSED_KINDS:
        return fold_weight(weight, scale, anchor.attrs.kernel_layout)
    return fold_weight(weight, scale, anchor.attrs.kernel_layout, groups=anchor.attrs.groups, transposed=True)


def fold_weight(
    weight: Array, scale: Array, layout: str, *, groups: int = 1, transposed: bool = False
) -> Array | None:
    """Multiply a kernel by ``scale`` along its output channel.

    Args:
        weight: Kernel of any dtype, in ``layout``.
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
    return None if factor is None else weight.astype(np.float64) * factor


def _channel_axes(shape: tuple[int, ...], layout: str) -> tuple[int, int] | None:
    """Positions of O and I in a kernel, when neither is split in blocks."""
    outer, inner = axis_index(layout, "O"), axis_index(layout, "I")
    if outer is None or inner is None or len(layout) != len(shape):
        return None
    return outer, inner


def _spread_depthwise(shape: tuple[int, ...], scale: Array, layout: str) -> Array | None:
    """A depthwise kernel ``(.., C, multiplier, ..)``: output channel = c * multiplier + m."""
    axes = _channel_axes(shape, layout)
    if axes is None or shape[axes[0]] * shape[axes[1]] != scale.size:
        return None
    return _spread_matrix(scale.reshape(shape[axes[0]], shape[axes[1]]), shape, axes)


def _spread_transposed(shape: tuple[int, ...], scale: Array, layout: str, groups: int) -> Array | None:
    """A transposed kernel: input channel i is in group i // (I / groups), output channel = group * O + o."""
    axes = _channel_axes(shape, layout)
    if axes is None or shape[axes[0]] * groups != scale.size or shape[axes[1]] % groups:
        return None
    by_group = scale.reshape(groups, shape[axes[0]]).T
    return _spread_matrix(np.repeat(by_group, shape[axes[1]] // groups, axis=1), shape, axes)


def _spread_matrix(matrix: Array, shape: tuple[int, ...], axes: tuple[int, int]) -> Array:
    """View a matrix over (O, I) as a tensor that broadcasts with the kernel."""
    outer, inner = axes
    target = tuple(size if index in axes else 1 for index, size in enumerate(shape))
    return (matrix if outer < inner else matrix.T).reshape(target)


def channel_vector(operator: Node, anchor: Node, constant: Array) -> Array | None:
    """Read a constant as one number a channel of the anchor's output, else None.

    A constant that broadcasts the output to a larger shape is none.
    """
    shape = anchor.output.shape
    channel = channel_axis(anchor)
    if channel is None or operator.output.shape != shape:
        return None
    channels = shape[channel]
    if not isinstance(channels, int):
        return None
    if isinstance(operator.attrs, BiasAddAttrs):
        return constant.reshape(-1) if operator.attrs.axis == channel else None
    padded = (1,) * (len(shape) - constant.ndim) + constant.shape
    if any(size != 1 for index, size in enumerate(padded) if index != channel):
        return None
    return np.broadcast_to(constant.reshape(-1), (channels,))


def channel_axis(anchor: Node) -> int | None:
    """The axis of the anchor's output that is its output channel."""
    if isinstance(anchor.attrs, ConvAttrs):
        return axis_index(anchor.attrs.out_layout, "C")
    return len(anchor.output.shape) - 1


def _check_fits(source: str, anchor: Node, exact: Array, stored: Array, role: str) -> Reason | None:
    """A folded number must not overflow the dtype it is stored in."""
    bad = np.argwhere(~np.isfinite(stored.astype(np.float64)))
    if not len(bad):
        return None
    value = exact[tuple(bad[0])]
    got = f"{role}{bad[0].tolist()} = {value:g} for {source} ({len(bad)} of {stored.size} values)"
    return Reason(Code.FOLD_OVERFLOW, str(anchor), f"values that {_range(stored)} can hold", got)


def _range(stored: Array) -> str:
    """A dtype with its largest number."""
    dtype = stored.dtype
    return f"{dtype} (at most {np.finfo(dtype).max:g})" if dtype.kind == "f" else str(dtype)


def _bias_dtype(anchor: Node, weight: Array) -> Any:
    """The dtype of the sum that the bias is added to."""
    return anchor.output.dtype if anchor.output.dtype in _FLOATS else weight.dtype


def _check_floating(anchor: Node, weight: Array) -> Reason | None:
    """Integers cannot hold a folded weight; TVM also hands out bfloat16 as the bits, in uint16."""
    if weight.dtype.kind == "f" or weight.dtype.name == "bfloat16":
        return None
    return Reason(Code.FOLD_OVERFLOW, str(anchor), "a weight in a floating-point dtype", f"{weight.dtype}")
