"""Relay function -> IR-neutral Graph.

Node ids follow the order in which a post-order walk first leaves an expression, so inputs have
smaller ids. Calls of function literals (fused groups, BYOC regions) are single opaque nodes:
what is inside is somebody's decision already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from tvm_fuse.core.graph import (
    TRANSPOSED_KINDS,
    BatchNormAttrs,
    BiasAddAttrs,
    ClipAttrs,
    ConcatenateAttrs,
    ConvAttrs,
    DenseAttrs,
    Dim,
    Graph,
    Kind,
    LayoutTransformAttrs,
    LeakyReluAttrs,
    Node,
    PadAttrs,
    TensorInfo,
    TransposeAttrs,
)
from tvm_fuse.relay.base import relay, tvm

__all__ = ["COMPOSITE_PREFIX", "ReadFunction", "children", "composite_name", "read_function", "source_name"]

#: ``Composite`` attribute of the groups that this project makes.
COMPOSITE_PREFIX = "tvm_fuse."

#: Relay's operator patterns (``TOpPattern``) that compute element by element.
_ELEMENTWISE_PATTERNS = (0, 1)  # kElemWise, kBroadcast

_SIMPLE_KINDS = {
    "add": Kind.ADD,
    "subtract": Kind.SUBTRACT,
    "multiply": Kind.MULTIPLY,
    "divide": Kind.DIVIDE,
    "nn.relu": Kind.RELU,
    "sigmoid": Kind.SIGMOID,
    "tanh": Kind.TANH,
    "cast": Kind.CAST,
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
}


@dataclass(frozen=True)
class ReadFunction:
    """A Relay function and its graph; ``expressions[i]`` is the expression of node ``i``."""

    function: Any
    graph: Graph
    expressions: tuple[Any, ...]


def read_function(function: Any) -> ReadFunction:
    """Read a type-inferred Relay function.

    Args:
        function: A ``relay.Function`` whose expressions have checked types.

    Returns:
        Its graph; outputs are the fields of the returned tuple, or the one returned value.
    """
    expressions = _post_order(function.body)
    seen = set(expressions)
    expressions = [param for param in function.params if param not in seen] + expressions
    index = {expr: position for position, expr in enumerate(expressions)}
    nodes = []
    constants = {}
    batch_norms = 0
    for position, expr in enumerate(expressions):
        inputs = tuple(index[child] for child in children(expr))
        kind, op, attrs = _classify(expr)
        name = source_name(expr)
        if kind is Kind.BATCH_NORM:
            name = name or f"batch_norm_{batch_norms}"
            batch_norms += 1
        if kind is Kind.CONSTANT:
            constants[position] = expr.data.numpy()
        nodes.append(Node(position, kind, op, inputs, _tensors(expr.checked_type), attrs, name))
    returned = function.body.fields if isinstance(function.body, relay.Tuple) else [function.body]
    outputs = tuple(index[expr] for expr in returned)
    return ReadFunction(function, Graph(tuple(nodes), outputs, constants), tuple(expressions))


def children(expr: Any) -> list[Any]:
    """The expressions whose values ``expr`` uses, in order."""
    if isinstance(expr, relay.Call):
        operands = list(expr.args)
        return operands if _is_known_callee(expr.op) else [expr.op, *operands]
    if isinstance(expr, relay.Tuple):
        return list(expr.fields)
    if isinstance(expr, relay.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relay.If):
        return [expr.cond, expr.true_branch, expr.false_branch]
    if isinstance(expr, relay.Let):
        return [expr.value, expr.body]
    return []


def _is_known_callee(callee: Any) -> bool:
    return isinstance(callee, (tvm.ir.Op, relay.Function, relay.GlobalVar))


def _post_order(body: Any) -> list[Any]:
    """All expressions below ``body``, inputs first; an explicit stack, so depth does not matter."""
    order: list[Any] = []
    done: set[Any] = set()
    stack = [(body, False)]
    while stack:
        expr, expanded = stack.pop()
        if expr in done:
            continue
        if expanded:
            done.add(expr)
            order.append(expr)
            continue
        stack.append((expr, True))
        stack.extend((child, False) for child in reversed(children(expr)) if child not in done)
    return order


def composite_name(expr: Any) -> str:
    """The ``Composite`` name of a called function literal, else an empty string."""
    if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function) and expr.op.attrs:
        return str(expr.op.attrs["Composite"]) if "Composite" in expr.op.attrs else ""
    return ""


def source_name(expr: Any) -> str:
    """Where an expression came from: the name in its span, or its own name hint."""
    if isinstance(expr, relay.Var):
        return str(expr.name_hint)
    span = getattr(expr, "span", None)
    while span is not None and hasattr(span, "spans"):
        span = span.spans[0] if len(span.spans) else None
    # The text parser puts a line and column of its own there, under one name for all operators.
    return str(span.source_name.name) if span is not None and not span.line else ""


def _tensors(checked_type: Any) -> tuple[TensorInfo, ...]:
    if isinstance(checked_type, relay.TensorType):
        return (TensorInfo(tuple(_dim(dim) for dim in checked_type.shape), str(checked_type.dtype)),)
    if isinstance(checked_type, relay.TupleType):
        return tuple(info for part in checked_type.fields for info in _tensors(part))
    return (TensorInfo((), "opaque"),)


def _dim(dim: Any) -> Dim:
    return int(dim) if isinstance(dim, (int, tvm.tir.IntImm)) else "?"


def _classify(expr: Any) -> tuple[Kind, str, Any]:
    """Kind, operator name and attributes of an expression."""
    if isinstance(expr, relay.Var):
        return Kind.INPUT, "input", None
    if isinstance(expr, relay.Constant):
        return Kind.CONSTANT, "constant", None
    if isinstance(expr, relay.Tuple):
        return Kind.TUPLE, "tuple", None
    if isinstance(expr, relay.TupleGetItem):
        return Kind.GET_ITEM, "get_item", int(expr.index)
    if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op):
        return _classify_operator(expr)
    return Kind.OTHER, composite_name(expr) or type(expr).__name__.lower(), None


def _classify_operator(call: Any) -> tuple[Kind, str, Any]:
    name = str(call.op.name)
    if name in _SIMPLE_KINDS:
        return _SIMPLE_KINDS[name], name, None
    if name in _READ_ATTRS:
        kind, read_attrs = _READ_ATTRS[name]
        attrs = read_attrs(call)
        # TVM's schedules take every transposed kernel as input channels first, whatever its layout says.
        if kind in TRANSPOSED_KINDS and not attrs.kernel_layout.startswith("IO"):
            return Kind.OTHER, name, None
        return kind, name, attrs
    pattern = call.op.get_attr("TOpPattern")
    is_elementwise = pattern is not None and int(pattern) in _ELEMENTWISE_PATTERNS
    return (Kind.ELEMENTWISE if is_elementwise else Kind.OTHER), name, None


def _read_conv(call: Any) -> ConvAttrs:
    attrs = call.attrs
    data_layout = str(attrs.data_layout)
    channels = attrs.channels
    return ConvAttrs(
        strides=tuple(int(value) for value in attrs.strides),
        padding=tuple(int(value) for value in attrs.padding),
        dilation=tuple(int(value) for value in attrs.dilation),
        groups=int(attrs.groups),
        channels=int(channels) if channels is not None else 0,
        data_layout=data_layout,
        kernel_layout=str(attrs.kernel_layout),
        out_layout=str(attrs.out_layout) or data_layout,
    )


def _read_batch_norm(call: Any) -> BatchNormAttrs:
    attrs = call.attrs
    axis = _positive_axis(int(attrs.axis), call.args[0])
    return BatchNormAttrs(axis, float(attrs.epsilon), bool(attrs.center), bool(attrs.scale))


def _positive_axis(axis: int, data: Any) -> int:
    return axis + len(data.checked_type.shape) if axis < 0 else axis


def _read_matmul(call: Any, *, batch: str) -> DenseAttrs:
    """``nn.matmul`` and ``nn.batch_matmul``: either operand may be transposed."""
    layout = batch + ("OI" if call.attrs.transpose_b else "IO")
    return DenseAttrs(layout, -2 if call.attrs.transpose_a else -1)


def _read_packed_dense(call: Any) -> DenseAttrs:
    """``nn.contrib_dense_pack`` calls the output channels N and the input channels C: ``NC8n``."""
    layout = str(call.attrs.weight_layout)
    return DenseAttrs(layout.translate(str.maketrans("NCnc", "OIoi")))


def _read_transpose(call: Any) -> TransposeAttrs:
    rank = len(call.args[0].checked_type.shape)
    axes = [int(axis) for axis in call.attrs.axes] if call.attrs.axes else list(range(rank))[::-1]
    return TransposeAttrs(tuple(axis % rank for axis in axes))


def _read_concatenate(call: Any) -> ConcatenateAttrs:
    axis = int(call.attrs.axis)
    return ConcatenateAttrs(axis + len(call.checked_type.shape) if axis < 0 else axis)


def _read_pad(call: Any) -> PadAttrs:
    value = call.args[1]
    is_known = isinstance(value, relay.Constant) and str(call.attrs.pad_mode) == "constant"
    widths = tuple((int(before), int(after)) for before, after in call.attrs.pad_width)
    return PadAttrs(widths, float(value.data.numpy()) if is_known else None)


#: Operators with attributes that matter: name -> kind and reader.
_READ_ATTRS: dict[str, tuple[Kind, Callable[[Any], Any]]] = {
    "nn.conv1d": (Kind.CONV1D, _read_conv),
    "nn.conv2d": (Kind.CONV2D, _read_conv),
    "nn.conv3d": (Kind.CONV3D, _read_conv),
    "nn.conv1d_transpose": (Kind.CONV1D_TRANSPOSE, _read_conv),
    "nn.conv2d_transpose": (Kind.CONV2D_TRANSPOSE, _read_conv),
    "nn.conv3d_transpose": (Kind.CONV3D_TRANSPOSE, _read_conv),
    "nn.contrib_conv2d_NCHWc": (Kind.CONV2D, _read_conv),
    "nn.contrib_depthwise_conv2d_NCHWc": (Kind.CONV2D, _read_conv),
    "nn.dense": (Kind.DENSE, lambda call: DenseAttrs("OI")),
    "nn.contrib_dense_pack": (Kind.DENSE, _read_packed_dense),
    "nn.matmul": (Kind.MATMUL, lambda call: _read_matmul(call, batch="")),
    "nn.batch_matmul": (Kind.BATCH_MATMUL, lambda call: _read_matmul(call, batch="B")),
    "transpose": (Kind.TRANSPOSE, _read_transpose),
    "layout_transform": (
        Kind.LAYOUT_TRANSFORM,
        lambda call: LayoutTransformAttrs(str(call.attrs.src_layout), str(call.attrs.dst_layout)),
    ),
    "concatenate": (Kind.CONCATENATE, _read_concatenate),
    "nn.pad": (Kind.PAD, _read_pad),
    "nn.batch_norm": (Kind.BATCH_NORM, _read_batch_norm),
    "nn.bias_add": (
        Kind.BIAS_ADD,
        lambda call: BiasAddAttrs(_positive_axis(int(call.attrs.axis), call.args[0])),
    ),
    "clip": (Kind.CLIP, lambda call: ClipAttrs(float(call.attrs.a_min), float(call.attrs.a_max))),
    "nn.leaky_relu": (Kind.LEAKY_RELU, lambda call: LeakyReluAttrs(float(call.attrs.alpha))),
}
