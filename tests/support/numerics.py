"""An independent float64 evaluator of core graphs, and comparisons that are tested to fail.

Nothing here uses ``tvm_fuse.core.fold`` or ``tvm_fuse.core.layout``: layouts are undone by index
arithmetic, element by element, and a convolution is a sum over taps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tests.support.graphs import Norm, shape_in, sizes, tokens
from tvm_fuse.core.graph import (
    CONVOLUTION_KINDS,
    MATRIX_KINDS,
    TRANSPOSED_KINDS,
    ConvAttrs,
    DenseAttrs,
    Graph,
    Kind,
    Node,
)

__all__ = [
    "conv2d",
    "conv_transpose",
    "evaluate",
    "fold_by_hand",
    "from_bfloat16",
    "from_plain",
    "max_error",
    "normalize",
    "per_channel",
    "to_plain",
]


def max_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference relative to the largest wanted number (or to 1); inf if the shapes differ."""
    if got.shape != wanted.shape:
        return float("inf")
    return float(np.max(np.abs(got - wanted), initial=0.0) / max(1.0, np.max(np.abs(wanted), initial=0.0)))


# --- layouts ---------------------------------------------------------------------------------


def to_plain(array: np.ndarray, layout: str, order: str) -> np.ndarray:
    """Undo a layout: one dimension for each letter of ``order``."""
    sizes_by_letter = sizes(layout, array.shape)
    plain = np.zeros([sizes_by_letter[letter] for letter in order], array.dtype)
    for index in np.ndindex(*array.shape):
        plain[_plain_index(index, array.shape, layout, order)] = array[index]
    return plain


def from_plain(plain: np.ndarray, order: str, layout: str, shape: Sequence[int] | None = None) -> np.ndarray:
    """The inverse of ``to_plain``; give the shape when an axis has more than one block."""
    target = shape_in(layout, dict(zip(order, plain.shape))) if shape is None else shape
    array = np.zeros(target, plain.dtype)
    for index in np.ndindex(*array.shape):
        array[index] = plain[_plain_index(index, array.shape, layout, order)]
    return array


def _plain_index(index: Sequence[int], shape: Sequence[int], layout: str, order: str) -> tuple[int, ...]:
    """``C, c`` of ``NCHW4c`` is channel ``4 * C + c``: a number with the blocks as digits."""
    position = dict.fromkeys(order, 0)
    for (letter, _block), digit, size in zip(tokens(layout), index, shape):
        position[letter.upper()] = position[letter.upper()] * size + digit
    return tuple(position[letter] for letter in order)


# --- operators -------------------------------------------------------------------------------


def conv2d(data: np.ndarray, weight: np.ndarray, attrs: ConvAttrs) -> np.ndarray:
    """A convolution over any number of axes in float64, in and out in the layouts of ``attrs``."""
    space, w, pads = _plain_convolution(weight, attrs, "OI")
    x = to_plain(np.asarray(data, np.float64), attrs.data_layout, "NC" + space)
    x = np.pad(x, ((0, 0), (0, 0), *pads))
    w = _canonical_kernel(w, attrs)
    per_group_in, per_group_out = w.shape[1], w.shape[0] // attrs.groups
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(attrs.dilation, w.shape[2:])]
    out = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, attrs.strides)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    for o in range(w.shape[0]):
        first = o // per_group_out * per_group_in
        for i, *taps in np.ndindex(*w.shape[1:]):
            seen = x[:, first + i]
            for axis, tap in enumerate(taps):
                places = tap * attrs.dilation[axis] + attrs.strides[axis] * np.arange(out[axis])
                seen = np.take(seen, places, axis=1 + axis)
            y[:, o] += w[(o, i, *taps)] * seen
    return from_plain(y, "NC" + space, attrs.out_layout)


def conv_transpose(data: np.ndarray, weight: np.ndarray, attrs: ConvAttrs) -> np.ndarray:
    """A transposed convolution: each input element writes its kernel into the output, which is cropped."""
    space, w, pads = _plain_convolution(weight, attrs, "IO")
    x = to_plain(np.asarray(data, np.float64), attrs.data_layout, "NC" + space)
    per_group = w.shape[0] // attrs.groups
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(attrs.dilation, w.shape[2:])]
    full = [(n - 1) * s + r for n, r, s in zip(x.shape[2:], reach, attrs.strides)]
    y = np.zeros((x.shape[0], w.shape[1] * attrs.groups, *full))
    for n, i, *place in np.ndindex(*x.shape):
        for o, *taps in np.ndindex(*w.shape[1:]):
            at = [p * s + t * d for p, s, t, d in zip(place, attrs.strides, taps, attrs.dilation)]
            y[(n, i // per_group * w.shape[1] + o, *at)] += x[(n, i, *place)] * w[(i, o, *taps)]
    crop = tuple(slice(before, size - after) for size, (before, after) in zip(full, pads))
    return from_plain(y[(slice(None), slice(None), *crop)], "NC" + space, attrs.out_layout)


def _plain_convolution(weight: np.ndarray, attrs: ConvAttrs, channels: str) -> tuple:
    """The spatial letters, the kernel with ``channels`` first, and the padding of each spatial axis."""
    space = "".join(letter for letter in attrs.data_layout if letter in "DHW")
    kernel = to_plain(np.asarray(weight, np.float64), attrs.kernel_layout, channels + space)
    return space, kernel, tuple(zip(attrs.padding[: len(space)], attrs.padding[-len(space) :]))


def _canonical_kernel(w: np.ndarray, attrs: ConvAttrs) -> np.ndarray:
    """A depthwise kernel ``(C, multiplier, ...)`` as ``(C * multiplier, 1, ...)``."""
    if attrs.channels == w.shape[0]:
        return w
    assert attrs.groups == w.shape[0]
    assert attrs.channels == w.shape[0] * w.shape[1]
    return np.stack([w[c, m][None] for c in range(w.shape[0]) for m in range(w.shape[1])])


def product(data: np.ndarray, weight: np.ndarray, attrs: DenseAttrs) -> np.ndarray:
    """A matrix product with the weights on the right, in any layout, behind a batch axis or not."""
    x = np.moveaxis(np.asarray(data, np.float64), attrs.input_axis, -1)
    order = ("B" if "B" in attrs.kernel_layout else "") + "OI"
    w = to_plain(np.asarray(weight, np.float64), attrs.kernel_layout, order)
    return np.einsum("bmi,boi->bmo" if "B" in order else "...i,oi->...o", x, w)


def relayout(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """From one layout to another."""
    order = "".join(letter for letter, block in tokens(source) if not block)
    return from_plain(to_plain(array, source, order), order, target)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits in float64: sign, eight bits of exponent, seven bits of fraction."""
    bits = np.asarray(bits, np.int64)
    exponent, fraction = (bits >> 7) & 0xFF, (bits & 0x7F) / 128
    size = np.where(exponent == 0, np.ldexp(fraction, -126), np.ldexp(1 + fraction, exponent - 127))
    size = np.where(exponent == 0xFF, np.where(fraction == 0, np.inf, np.nan), size)
    return np.where(bits >> 15, -size, size)


def normalize(
    x: np.ndarray, norm: Sequence[np.ndarray], axis: int, epsilon: float, center: bool, scale: bool
) -> np.ndarray:
    """Batch norm, channel by channel."""
    gamma, beta, mean, variance = (np.asarray(vector, np.float64) for vector in norm)
    y = np.empty(x.shape)
    for c in range(x.shape[axis]):
        at = (slice(None),) * axis + (c,)
        y[at] = (x[at] - mean[c]) / np.sqrt(variance[c] + epsilon)
        y[at] = y[at] * (gamma[c] if scale else 1.0) + (beta[c] if center else 0.0)
    return y


def per_channel(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """``x * scale + shift``, element by element; the channel is the number with ``axes`` as digits."""
    y = np.array(x, np.float64)
    for index in np.ndindex(*x.shape):
        channel = 0
        for axis in axes:
            channel = channel * x.shape[axis] + index[axis]
        y[index] = x[index] * scale[channel] + shift[channel]
    return y


def _bias_add(x: np.ndarray, bias: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(np.moveaxis(x, axis, -1) + bias, -1, axis)


_FUNCTIONS = {
    Kind.ADD: np.add,
    Kind.SUBTRACT: np.subtract,
    Kind.MULTIPLY: np.multiply,
    Kind.DIVIDE: np.divide,
    Kind.RELU: lambda x: np.where(x > 0, x, 0.0),
    Kind.SIGMOID: lambda x: 0.5 * (1 + np.tanh(x / 2)),
    Kind.TANH: np.tanh,
    Kind.NEGATIVE: np.negative,
    Kind.POWER: np.power,
    Kind.RECIPROCAL: lambda x: 1.0 / x,
    Kind.RSQRT: lambda x: 1.0 / np.sqrt(x),
    Kind.SQRT: np.sqrt,
}


def _compute(node: Node, args: list) -> object:
    attrs = node.attrs
    if node.kind in _FUNCTIONS:
        return _FUNCTIONS[node.kind](*args)
    if node.kind in TRANSPOSED_KINDS:
        return conv_transpose(*args, attrs)
    if node.kind in CONVOLUTION_KINDS:
        return conv2d(*args, attrs)
    if node.kind in MATRIX_KINDS:
        return product(*args, attrs)
    if node.kind is Kind.BATCH_NORM:
        return (
            normalize(args[0], args[1:], attrs.axis, attrs.epsilon, attrs.center, attrs.scale),
            args[3],
            args[4],
        )
    if node.kind in (Kind.RESHAPE, Kind.EXPAND_DIMS):
        return np.reshape(args[0], node.output.shape)
    if node.kind is Kind.BROADCAST_TO:
        return np.broadcast_to(args[0], node.output.shape)
    if node.kind is Kind.TRANSPOSE:
        return np.transpose(args[0], attrs.axes)
    if node.kind is Kind.LAYOUT_TRANSFORM:
        return relayout(args[0], attrs.source, attrs.target)
    if node.kind is Kind.CONCATENATE:
        return np.concatenate(args[0], attrs.axis)
    if node.kind is Kind.PAD:
        return np.pad(args[0], attrs.widths, constant_values=1.0 if attrs.value is None else attrs.value)
    if node.kind is Kind.CAST:
        return args[0].astype(node.output.dtype).astype(np.float64)
    if node.kind is Kind.GET_ITEM:
        return args[0][attrs]
    if node.kind is Kind.TUPLE:
        return tuple(args)
    if node.kind is Kind.BIAS_ADD:
        return _bias_add(*args, attrs.axis)
    if node.kind is Kind.CLIP:
        return np.minimum(np.maximum(args[0], attrs.minimum), attrs.maximum)
    if node.kind is Kind.LEAKY_RELU:
        return np.where(args[0] > 0, args[0], attrs.alpha * args[0])
    if node.kind is Kind.PRELU:
        slopes = args[1].reshape([-1 if axis == attrs.axis else 1 for axis in range(args[0].ndim)])
        return np.where(args[0] > 0, args[0], slopes * args[0])
    if node.kind is Kind.ERF:
        return np.vectorize(math.erf, otypes=[float])(args[0])
    return getattr(np, node.op)(*args)  # "exp", "maximum", "transpose", ...


def evaluate(graph: Graph, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a graph in float64; inputs by name."""
    values: list = []
    for node in graph.nodes:
        if node.kind is Kind.INPUT:
            value: object = np.asarray(feeds[node.name], np.float64)
        elif node.kind is Kind.CONSTANT:
            array = graph.constants[node.id]
            value = from_bfloat16(array) if node.output.dtype == "bfloat16" else np.asarray(array, np.float64)
        else:
            value = _compute(node, [values[source] for source in node.inputs])
        values.append(value)
    return [values[output] for output in graph.outputs]


# --- the fold, done another way, with mistakes on demand ---------------------------------------


def fold_by_hand(
    weight: np.ndarray, bias: np.ndarray, norm: Norm, epsilon: float, mistake: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Fold channel by channel into an ``OIHW`` kernel; ``mistake`` names what to get wrong."""
    new_weight, new_bias = np.array(weight, np.float64), np.zeros(len(bias))
    if mistake == "wrong epsilon":
        epsilon = 1e-5
    for c in range(len(bias)):
        gain = norm.gamma[c] / (norm.variance[c] + epsilon) ** 0.5
        if mistake == "swapped axis":
            new_weight[:, c] = weight[:, c] * gain
        else:
            new_weight[c] = weight[c] * gain
        old = 0.0 if mistake == "dropped bias" else bias[c]
        mean = 0.0 if mistake == "dropped mean" else norm.mean[c]
        beta = 0.0 if mistake == "dropped beta" else norm.beta[c]
        if mistake == "unscaled old bias":
            new_bias[c] = old - mean * gain + beta
        else:
            new_bias[c] = (old - mean) * gain + beta
    return new_weight, new_bias
