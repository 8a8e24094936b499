"""Relay's operators in the words of the core: kind, name and attributes of a call."""

from __future__ import annotations

from typing import Any, Callable

from tvm_fuse.core.dtypes import widen
from tvm_fuse.core.graph import (
    BatchNormAttrs,
    BiasAddAttrs,
    ClipAttrs,
    ConcatenateAttrs,
    ConvAttrs,
    DenseAttrs,
    Kind,
    LayoutTransformAttrs,
    LeakyReluAttrs,
    PadAttrs,
    PReluAttrs,
    ReduceAttrs,
    TransposeAttrs,
)
from tvm_fuse.relay.base import relay
from tvm_fuse.relay.objects import items_of, kept, tensors_of
from tvm_fuse.relay.view import view_array

__all__ = ["classify_operator"]

#: Relay's operator patterns (``TOpPattern``) that compute element by element.
_ELEMENTWISE_PATTERNS = (0, 1)  # kElemWise, kBroadcast
_INJECTIVE_PATTERN = 2

_REDUCTIONS = ("all", "any", "max", "mean", "min", "prod", "sum", "variance")

#: Operator -> kind; what an operator that is not here does, TVM's own patterns say.
_KINDS = {
    "add": Kind.ADD,
    "subtract": Kind.SUBTRACT,
    "multiply": Kind.MULTIPLY,
    "divide": Kind.DIVIDE,
    "nn.relu": Kind.RELU,
    "sigmoid": Kind.SIGMOID,
    "tanh": Kind.TANH,
    "cast": Kind.CAST,
    "erf": Kind.ERF,
    "exp": Kind.EXP,
    "log": Kind.LOG,
    "maximum": Kind.MAXIMUM,
    "minimum": Kind.MINIMUM,
    "negative": Kind.NEGATIVE,
    "power": Kind.POWER,
    "rsqrt": Kind.RSQRT,
    "sqrt": Kind.SQRT,
    "broadcast_to": Kind.BROADCAST_TO,
    "expand_dims": Kind.EXPAND_DIMS,
    "reshape": Kind.RESHAPE,
    "squeeze": Kind.RESHAPE,
    "nn.batch_flatten": Kind.RESHAPE,
    "nn.instance_norm": Kind.DATA_NORM,
    "nn.layer_norm": Kind.DATA_NORM,
    "nn.group_norm": Kind.DATA_NORM,
    "nn.l2_normalize": Kind.DATA_NORM,
    "nn.lrn": Kind.DATA_NORM,
    "nn.conv1d": Kind.CONV1D,
    "nn.conv2d": Kind.CONV2D,
    "nn.conv3d": Kind.CONV3D,
    "nn.conv1d_transpose": Kind.CONV1D_TRANSPOSE,
    "nn.conv2d_transpose": Kind.CONV2D_TRANSPOSE,
    "nn.conv3d_transpose": Kind.CONV3D_TRANSPOSE,
    "nn.contrib_conv2d_NCHWc": Kind.CONV2D,
    "nn.contrib_depthwise_conv2d_NCHWc": Kind.CONV2D,
    "nn.dense": Kind.DENSE,
    "nn.contrib_dense_pack": Kind.DENSE,
    "nn.matmul": Kind.MATMUL,
    "nn.batch_matmul": Kind.BATCH_MATMUL,
    "strided_slice": Kind.SLICE,
    "transpose": Kind.TRANSPOSE,
    "layout_transform": Kind.LAYOUT_TRANSFORM,
    "concatenate": Kind.CONCATENATE,
    "nn.pad": Kind.PAD,
    "nn.batch_norm": Kind.BATCH_NORM,
    "nn.bias_add": Kind.BIAS_ADD,
    "clip": Kind.CLIP,
    "nn.leaky_relu": Kind.LEAKY_RELU,
    "nn.prelu": Kind.PRELU,
    "nn.softmax": Kind.SOFTMAX,
    "nn.log_softmax": Kind.SOFTMAX,
    **dict.fromkeys(
        (
            f"nn.{pool}_pool{space}d"
            for pool in ("avg", "max", "adaptive_avg", "adaptive_max")
            for space in (1, 2, 3)
        ),
        Kind.POOL,
    ),
    **dict.fromkeys(("nn.global_avg_pool2d", "nn.global_max_pool2d"), Kind.GLOBAL_POOL),
    **dict.fromkeys(_REDUCTIONS, Kind.REDUCE),
}


def classify_operator(call: Any, operands: list[Any]) -> tuple[Kind, str, Any]:
    """Kind, name and attributes of a call of an operator.

    Args:
        call: A ``relay.Call`` of a ``tvm.ir.Op``.
        operands: Its operands.
    """
    name, kind = _operator(call.op)
    read_attrs = _READ_ATTRS.get(name)
    if read_attrs is None:
        return kind, name, None
    attrs = read_attrs(call.attrs, operands)
    if isinstance(attrs, ConvAttrs) and not _is_read_as_declared(kind, attrs):
        return Kind.OTHER, f"{name} with {attrs.kernel_layout} weights", None
    return kind, name, attrs


@kept
def _operator(op: Any) -> tuple[str, Kind]:
    """Name and kind of an operator."""
    name = str(op.name)
    if name in _KINDS:
        return name, _KINDS[name]
    pattern = op.get_attr("TOpPattern")
    if pattern is None:
        return name, Kind.OTHER
    if int(pattern) in _ELEMENTWISE_PATTERNS:
        return name, Kind.ELEMENTWISE
    return name, Kind.INJECTIVE if int(pattern) == _INJECTIVE_PATTERN else Kind.OTHER


#: The kernel layout that TVM's schedules take for granted, whatever the attribute says. Where a size
#: gives it away, they fail; where it fits by chance, they compute something else than was declared.
_ASSUMED_KERNELS = {
    (Kind.CONV1D, "NCW"): "OIW",
    (Kind.CONV1D, "NWC"): "WIO",
    (Kind.CONV3D, "NCDHW"): "OIDHW",
    (Kind.CONV3D, "NDHWC"): "DHWIO",
    (Kind.CONV1D_TRANSPOSE, "NCW"): "IOW",
    (Kind.CONV2D_TRANSPOSE, "NCHW"): "IOHW",
    (Kind.CONV3D_TRANSPOSE, "NCDHW"): "IODHW",
}


def _is_read_as_declared(kind: Kind, attrs: ConvAttrs) -> bool:
    return _ASSUMED_KERNELS.get((kind, attrs.data_layout), attrs.kernel_layout) == attrs.kernel_layout


# --- attributes ------------------------------------------------------------------------------


@kept
def _conv_attrs(attrs: Any) -> ConvAttrs:
    data_layout = str(attrs.data_layout)
    channels = attrs.channels
    return ConvAttrs(
        strides=_integers(attrs.strides),
        padding=_integers(attrs.padding),
        dilation=_integers(attrs.dilation),
        groups=int(attrs.groups),
        channels=int(channels) if channels is not None else 0,
        data_layout=data_layout,
        kernel_layout=str(attrs.kernel_layout),
        out_layout=str(attrs.out_layout) or data_layout,
    )


def _integers(array: Any) -> tuple[int, ...]:
    return tuple(int(item) for item in items_of(array))


def _rank(expr: Any) -> int:
    return len(tensors_of(expr.checked_type)[0].shape)


def _positive_axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _read_conv(attrs: Any, operands: list[Any]) -> ConvAttrs:
    return _conv_attrs(attrs)


def _read_batch_norm(attrs: Any, operands: list[Any]) -> BatchNormAttrs:
    axis = _positive_axis(int(attrs.axis), _rank(operands[0]))
    return BatchNormAttrs(axis, float(attrs.epsilon), bool(attrs.center), bool(attrs.scale))


def _read_bias_add(attrs: Any, operands: list[Any]) -> BiasAddAttrs:
    return BiasAddAttrs(_positive_axis(int(attrs.axis), _rank(operands[0])))


def _read_dense(attrs: Any, operands: list[Any]) -> DenseAttrs:
    return DenseAttrs("OI")


def _read_matmul(attrs: Any, operands: list[Any]) -> DenseAttrs:
    """Either operand may be transposed."""
    return DenseAttrs("OI" if attrs.transpose_b else "IO", -2 if attrs.transpose_a else -1)


def _read_batch_matmul(attrs: Any, operands: list[Any]) -> DenseAttrs:
    plain = _read_matmul(attrs, operands)
    return DenseAttrs(f"B{plain.kernel_layout}", plain.input_axis)


def _read_packed_dense(attrs: Any, operands: list[Any]) -> DenseAttrs:
    """``nn.contrib_dense_pack`` calls the output channels N and the input channels C: ``NC8n``."""
    return DenseAttrs(str(attrs.weight_layout).translate(str.maketrans("NCnc", "OIoi")))


def _read_transpose(attrs: Any, operands: list[Any]) -> TransposeAttrs:
    rank = _rank(operands[0])
    axes = _integers(attrs.axes) if attrs.axes else tuple(range(rank))[::-1]
    return TransposeAttrs(tuple(axis % rank for axis in axes))


def _read_layout_transform(attrs: Any, operands: list[Any]) -> LayoutTransformAttrs:
    return LayoutTransformAttrs(str(attrs.src_layout), str(attrs.dst_layout))


def _read_concatenate(attrs: Any, operands: list[Any]) -> ConcatenateAttrs:
    return ConcatenateAttrs(_positive_axis(int(attrs.axis), _rank(operands[0])))


def _read_pad(attrs: Any, operands: list[Any]) -> PadAttrs:
    value = operands[1]
    is_known = isinstance(value, relay.Constant) and str(attrs.pad_mode) == "constant"
    widths = tuple((int(before), int(after)) for before, after in map(items_of, items_of(attrs.pad_width)))
    return PadAttrs(widths, float(widen(view_array(value.data), value.data.dtype)) if is_known else None)


def _read_clip(attrs: Any, operands: list[Any]) -> ClipAttrs:
    return ClipAttrs(float(attrs.a_min), float(attrs.a_max))


def _read_leaky_relu(attrs: Any, operands: list[Any]) -> LeakyReluAttrs:
    return LeakyReluAttrs(float(attrs.alpha))


def _read_prelu(attrs: Any, operands: list[Any]) -> PReluAttrs:
    return PReluAttrs(_positive_axis(int(attrs.axis), _rank(operands[0])))


def _read_reduce(attrs: Any, operands: list[Any]) -> ReduceAttrs:
    rank = _rank(operands[0])
    axes = {_positive_axis(axis, rank) for axis in _axes(attrs.axis)} if attrs.axis is not None else set()
    if attrs.exclude:
        axes = set(range(rank)) - axes
    return ReduceAttrs(
        tuple(sorted(axes)) if attrs.axis is not None else tuple(range(rank)), bool(attrs.keepdims)
    )


def _read_softmax(attrs: Any, operands: list[Any]) -> ReduceAttrs:
    return ReduceAttrs((_positive_axis(int(attrs.axis), _rank(operands[0])),), True)


def _axes(axis: Any) -> tuple[int, ...]:
    return _integers(axis) if hasattr(axis, "__len__") else (int(axis),)


#: Operator -> what reads its attributes, from these and the operands.
_READ_ATTRS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "nn.conv1d": _read_conv,
    "nn.conv2d": _read_conv,
    "nn.conv3d": _read_conv,
    "nn.conv1d_transpose": _read_conv,
    "nn.conv2d_transpose": _read_conv,
    "nn.conv3d_transpose": _read_conv,
    "nn.contrib_conv2d_NCHWc": _read_conv,
    "nn.contrib_depthwise_conv2d_NCHWc": _read_conv,
    "nn.dense": _read_dense,
    "nn.contrib_dense_pack": _read_packed_dense,
    "nn.matmul": _read_matmul,
    "nn.batch_matmul": _read_batch_matmul,
    "transpose": _read_transpose,
    "layout_transform": _read_layout_transform,
    "concatenate": _read_concatenate,
    "nn.pad": _read_pad,
    "nn.batch_norm": _read_batch_norm,
    "nn.bias_add": _read_bias_add,
    "clip": _read_clip,
    "nn.leaky_relu": _read_leaky_relu,
    "nn.prelu": _read_prelu,
    "nn.softmax": _read_softmax,
    "nn.log_softmax": _read_softmax,
    **dict.fromkeys(_REDUCTIONS, _read_reduce),
}
