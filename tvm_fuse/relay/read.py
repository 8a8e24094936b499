"""Relay function -> IR-neutral Graph.

Node ids follow the order in which a post-order walk first leaves an expression, so inputs have
smaller ids. Calls of function literals (fused groups, BYOC regions) are single opaque nodes:
what is inside is somebody's decision already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Callable

from tvm_fuse.core.dtypes import widen
from tvm_fuse.core.graph import (
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
from tvm_fuse.relay.view import view_array

__all__ = ["COMPOSITE_PREFIX", "ReadFunction", "children", "composite_name", "read_function", "source_name"]

#: ``Composite`` attribute of the groups that this project makes.
COMPOSITE_PREFIX = "tvm_fuse."

#: Relay's operator patterns (``TOpPattern``) that compute element by element.
_ELEMENTWISE_PATTERNS = (0, 1)  # kElemWise, kBroadcast

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
    "transpose": Kind.TRANSPOSE,
    "layout_transform": Kind.LAYOUT_TRANSFORM,
    "concatenate": Kind.CONCATENATE,
    "nn.pad": Kind.PAD,
    "nn.batch_norm": Kind.BATCH_NORM,
    "nn.bias_add": Kind.BIAS_ADD,
    "clip": Kind.CLIP,
    "nn.leaky_relu": Kind.LEAKY_RELU,
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
        Its graph; outputs are the fields of the returned tuple, or the one returned value. Constants
        are views of TVM's memory.
    """
    body = function.body
    walked = _post_order(body)
    seen = {_handle(expr) for expr, _ in walked}
    walked = [(param, []) for param in function.params if _handle(param) not in seen] + walked
    index = {_handle(expr): position for position, (expr, _) in enumerate(walked)}
    nodes = []
    constants = {}
    batch_norms = 0
    for position, (expr, operands) in enumerate(walked):
        kind, op, attrs = _classify(expr, operands)
        name = source_name(expr)
        if kind is Kind.BATCH_NORM:
            name = name or f"batch_norm_{batch_norms}"
            batch_norms += 1
        if kind is Kind.CONSTANT:
            constants[position] = view_array(expr.data)
        inputs = tuple(index[_handle(operand)] for operand in operands)
        nodes.append(Node(position, kind, op, inputs, _tensors(expr.checked_type), attrs, name))
    returned = body.fields if isinstance(body, relay.Tuple) else [body]
    outputs = tuple(index[_handle(expr)] for expr in returned)
    graph = Graph(tuple(nodes), outputs, constants)
    return ReadFunction(function, graph, tuple(expr for expr, _ in walked))


def children(expr: Any) -> list[Any]:
    """The expressions whose values ``expr`` uses, in order."""
    if isinstance(expr, relay.Call):
        callee, operands = expr.op, list(_items(expr.args))
        return operands if _is_known_callee(callee) else [callee, *operands]
    if isinstance(expr, relay.Tuple):
        return list(_items(expr.fields))
    if isinstance(expr, relay.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relay.If):
        return [expr.cond, expr.true_branch, expr.false_branch]
    if isinstance(expr, relay.Let):
        return [expr.value, expr.body]
    return []


def _is_known_callee(callee: Any) -> bool:
    return isinstance(callee, (tvm.ir.Op, relay.Function, relay.GlobalVar))


def _post_order(body: Any) -> list[tuple[Any, list[Any]]]:
    """All expressions below ``body`` with their children, inputs first; a stack, so depth does not matter."""
    order: list[tuple[Any, list[Any]]] = []
    done: set[int] = set()
    stack: list[tuple[Any, list[Any] | None]] = [(body, None)]
    while stack:
        expr, below = stack.pop()
        if _handle(expr) in done:
            continue
        if below is not None:
            done.add(_handle(expr))
            order.append((expr, below))
            continue
        below = children(expr)
        stack.append((expr, below))
        stack.extend((child, None) for child in reversed(below) if _handle(child) not in done)
    return order


# --- reading through TVM's foreign-function interface ---------------------------------------------
# Every attribute is a call into TVM, some microseconds each, and a model is read a dozen times in one
# job. What belongs to an object that does not change is kept, with the object.

_array_size = tvm.get_global_func("runtime.ArraySize")
_array_item = tvm.get_global_func("runtime.ArrayGetItem")

_MOST_KEPT = 8192


def _handle(expr: Any) -> int:
    """What tells objects apart while they are alive: their address in TVM."""
    return int(expr.handle.value)


def _items(array: Any) -> Iterator[Any]:
    """The items of a TVM array; its own iterator asks for its size before each."""
    return (_array_item(array, position) for position in range(_array_size(array)))


def _kept(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember what was read from an immutable TVM object, by its address."""
    known: dict[int, tuple[Any, Any]] = {}

    @wraps(read)
    def read_once(source: Any) -> Any:
        found = known.get(_handle(source))
        if found is None:
            if len(known) >= _MOST_KEPT:
                known.clear()
            # The source is kept as well, so that its address is not given to another object.
            found = known[_handle(source)] = source, read(source)
        return found[1]

    return read_once


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
    return "" if span is None else _span_name(span)


@_kept
def _span_name(span: Any) -> str:
    while isinstance(span, relay.SequentialSpan):
        if not len(span.spans):
            return ""
        span = span.spans[0]
    # The text parser puts a line and column of its own there, under one name for all operators.
    return "" if span.line else str(span.source_name.name)


#: Structural hash of a type -> the type and its tensors; every pass makes new types, but few different ones.
_known_types: dict[int, tuple[Any, tuple[TensorInfo, ...]]] = {}


def _tensors(checked_type: Any) -> tuple[TensorInfo, ...]:
    key = tvm.ir.structural_hash(checked_type)
    found = _known_types.get(key)
    if found is None or not tvm.ir.structural_equal(found[0], checked_type):
        if len(_known_types) >= _MOST_KEPT:
            _known_types.clear()
        found = _known_types[key] = checked_type, _read_tensors(checked_type)
    return found[1]


def _read_tensors(checked_type: Any) -> tuple[TensorInfo, ...]:
    if isinstance(checked_type, relay.TensorType):
        shape = tuple(_dim(dim) for dim in _items(checked_type.shape))
        return (TensorInfo(shape, str(checked_type.dtype)),)
    if isinstance(checked_type, relay.TupleType):
        return tuple(info for part in _items(checked_type.fields) for info in _read_tensors(part))
    return (TensorInfo((), "opaque"),)


def _dim(dim: Any) -> Dim:
    return int(dim) if isinstance(dim, (int, tvm.tir.IntImm)) else "?"


def _classify(expr: Any, operands: list[Any]) -> tuple[Kind, str, Any]:
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
        return _classify_operator(expr, operands)
    return Kind.OTHER, composite_name(expr) or type(expr).__name__.lower(), None


def _classify_operator(call: Any, operands: list[Any]) -> tuple[Kind, str, Any]:
    name, kind = _operator(call.op)
    read_attrs = _READ_ATTRS.get(name)
    if read_attrs is None:
        return kind, name, None
    attrs = read_attrs(call.attrs, operands)
    if isinstance(attrs, ConvAttrs) and not _is_read_as_declared(kind, attrs):
        return Kind.OTHER, f"{name} with {attrs.kernel_layout} weights", None
    return kind, name, attrs


@_kept
def _operator(op: Any) -> tuple[str, Kind]:
    """Name and kind of an operator."""
    name = str(op.name)
    if name in _KINDS:
        return name, _KINDS[name]
    pattern = op.get_attr("TOpPattern")
    is_elementwise = pattern is not None and int(pattern) in _ELEMENTWISE_PATTERNS
    return name, Kind.ELEMENTWISE if is_elementwise else Kind.OTHER


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


@_kept
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
    return tuple(int(item) for item in _items(array))


def _rank(expr: Any) -> int:
    return len(_tensors(expr.checked_type)[0].shape)


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
    widths = tuple((int(before), int(after)) for before, after in map(_items, _items(attrs.pad_width)))
    return PadAttrs(widths, float(widen(view_array(value.data), value.data.dtype)) if is_known else None)


def _read_clip(attrs: Any, operands: list[Any]) -> ClipAttrs:
    return ClipAttrs(float(attrs.a_min), float(attrs.a_max))


def _read_leaky_relu(attrs: Any, operands: list[Any]) -> LeakyReluAttrs:
    return LeakyReluAttrs(float(attrs.alpha))


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
}
