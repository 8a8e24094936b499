"""ONNX operators as core nodes: a reader for each operator that folding knows.

A reader returns the core id of the operator's result, or None, before it has added anything, when
the operator has a form that the core has no words for. An operator without a reader is opaque.
"""

from __future__ import annotations

from typing import Callable, Union

import numpy as np

from tvm_fuse.core.dtypes import widen
from tvm_fuse.core.graph import (
    ClipAttrs,
    ConcatenateAttrs,
    Kind,
    LeakyReluAttrs,
    PadAttrs,
    TransposeAttrs,
)
from tvm_fuse.onnx.builder import Operator
from tvm_fuse.onnx.layers import (
    read_batch_norm,
    read_conv,
    read_conv_transpose,
    read_gemm,
    read_matmul,
)

__all__ = ["READERS", "Reader"]

#: Adds the core nodes of an operator and returns the id of its result.
Reader = Callable[[Operator], Union[int, None]]

#: Operators without attributes that matter.
_PLAIN_KINDS = {
    "Add": Kind.ADD,
    "Div": Kind.DIVIDE,
    "Mul": Kind.MULTIPLY,
    "Neg": Kind.NEGATIVE,
    "Pow": Kind.POWER,
    "Reciprocal": Kind.RECIPROCAL,
    "Relu": Kind.RELU,
    "Sigmoid": Kind.SIGMOID,
    "Sqrt": Kind.SQRT,
    "Sub": Kind.SUBTRACT,
    "Tanh": Kind.TANH,
    "Cast": Kind.CAST,
    **dict.fromkeys(
        "Abs Acos Acosh And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil "
        "Celu Cos Cosh Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN "
        "Less LessOrEqual Log Max Mean Min Mish Mod Not Or PRelu Round Selu Shrink Sign Sin Sinh Softplus "
        "Softsign Tan ThresholdedRelu Where Xor".split(),
        Kind.ELEMENTWISE,
    ),
    **dict.fromkeys(
        "GroupNormalization InstanceNormalization LayerNormalization LpNormalization LRN "
        "MeanVarianceNormalization".split(),
        Kind.DATA_NORM,
    ),
}

#: Operators that change the shape and keep the order of the elements.
_RESHAPES = {
    "Flatten": Kind.RESHAPE,
    "Reshape": Kind.RESHAPE,
    "Squeeze": Kind.RESHAPE,
    "Unsqueeze": Kind.EXPAND_DIMS,
}


def _plain(kind: Kind) -> Reader:
    return lambda operator: operator.emit(kind, operator.operands())


def _read_sum(operator: Operator) -> int | None:
    operands = operator.operands()
    return operator.emit(Kind.ADD if len(operands) == 2 else Kind.ELEMENTWISE, operands)


def _read_identity(operator: Operator) -> int | None:
    """The operand itself: its readers and those of the result are the same to the core."""
    return operator.operand(0)


def _read_dropout(operator: Operator) -> int | None:
    """The operand itself, when the switch to training mode is absent or constantly off."""
    switch = operator.constant(2)
    if operator.has(2) and (switch is None or switch.any()):
        return None
    return operator.operand(0)


def _read_leaky_relu(operator: Operator) -> int | None:
    alpha = float(operator.attributes.get("alpha", 0.01))
    return operator.emit(Kind.LEAKY_RELU, (operator.operand(0),), LeakyReluAttrs(alpha))


def _read_clip(operator: Operator) -> int | None:
    """Bounds are attributes before opset 11 and inputs from then on; one that is absent is infinite."""
    if operator.variable_operands(1):
        return operator.emit(Kind.ELEMENTWISE, operator.operands())
    bounds = [
        _number(operator, position, name, absent)
        for position, name, absent in ((1, "min", -np.inf), (2, "max", np.inf))
    ]
    return operator.emit(Kind.CLIP, (operator.operand(0),), ClipAttrs(*bounds))


def _number(operator: Operator, position: int, name: str, absent: float) -> float:
    """A number that is a constant input or an attribute."""
    array = operator.constant(position)
    if array is None:
        return float(operator.attributes.get(name, absent))
    return float(widen(array, operator.info(position).dtype).reshape(()))


def _read_reshape(operator: Operator) -> int | None:
    """A constant with another shape is a constant."""
    array, result = operator.constant(0), operator.result
    shape = tuple(dim for dim in result.shape if isinstance(dim, int))
    if array is not None and result.is_static and array.size == np.prod(shape, dtype=np.int64):
        return operator.emit_constant(array.reshape(shape), result.dtype)
    kind = _RESHAPES[operator.proto.op_type]
    return operator.emit(kind, [operator.operand(0), *operator.variable_operands(1)])


def _read_transpose(operator: Operator) -> int | None:
    """A transposed constant is a constant."""
    array = operator.constant(0)
    reversed_axes = range(len(operator.result.shape))[::-1]
    axes = tuple(operator.attributes.get("perm", reversed_axes))
    if array is not None:
        return operator.emit_constant(array.transpose(axes), operator.result.dtype)
    return operator.emit(Kind.TRANSPOSE, (operator.operand(0),), TransposeAttrs(axes))


def _read_expand(operator: Operator) -> int | None:
    """A broadcast to a shape that is known."""
    if operator.constant(1) is None:
        return None
    return operator.emit(Kind.BROADCAST_TO, (operator.operand(0),))


def _read_concat(operator: Operator) -> int | None:
    parts = operator.operands()
    rank = len(operator.result.shape)
    outputs = [operator.builder.nodes[part].output for part in parts]
    whole = operator.emit(Kind.TUPLE, parts, outputs=outputs)
    return operator.emit(
        Kind.CONCATENATE, (whole,), ConcatenateAttrs(int(operator.attributes["axis"]) % rank)
    )


def _read_pad(operator: Operator) -> int | None:
    """Padding by known numbers of elements; widths are an attribute before opset 11."""
    given = operator.constant(1)
    pads = operator.attributes.get("pads") if given is None else [int(size) for size in given]
    rank = len(operator.result.shape)
    if pads is None or len(pads) != 2 * rank or min(pads, default=0) < 0 or operator.has(3):
        return None
    value: float | None = None
    if operator.attributes.get("mode", b"constant") == b"constant" and not operator.variable_operands(2):
        value = _number(operator, 2, "value", 0.0)
    attrs = PadAttrs(tuple(zip(pads[:rank], pads[rank:])), value)
    return operator.emit(Kind.PAD, [operator.operand(0), *operator.variable_operands(2)], attrs)


#: Name of an operator of the default domain -> its reader.
READERS: dict[str, Reader] = {
    **{name: _plain(kind) for name, kind in _PLAIN_KINDS.items()},
    **dict.fromkeys(_RESHAPES, _read_reshape),
    "BatchNormalization": read_batch_norm,
    "Clip": _read_clip,
    "Concat": _read_concat,
    "Conv": read_conv,
    "ConvTranspose": read_conv_transpose,
    "Dropout": _read_dropout,
    "Expand": _read_expand,
    "Gemm": read_gemm,
    "Identity": _read_identity,
    "LeakyRelu": _read_leaky_relu,
    "MatMul": read_matmul,
    "Pad": _read_pad,
    "Sum": _read_sum,
    "Transpose": _read_transpose,
}
