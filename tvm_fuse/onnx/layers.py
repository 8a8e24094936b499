"""Convolutions, matrix products and batch norms of ONNX as core nodes.

::

    Conv, ConvTranspose(x, W, B)    conv(x, W) -> bias_add(B)
    Gemm(A, B, C)                   dense(A, B) -> multiply(alpha) -> add(beta * C)
    MatMul(A, B)                    matmul(A, B)
    BatchNormalization(x, ...)      batch_norm(x, ...) -> get_item(0)

What an operator lacks (no bias, alpha = 1) is left out. A reader returns the core id of the result,
or None, before it has added anything, when the operator has a form that the core has no words for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, widen
from tvm_fuse.core.graph import (
    BatchNormAttrs,
    BiasAddAttrs,
    ConvAttrs,
    DenseAttrs,
    Dim,
    Kind,
)
from tvm_fuse.onnx.builder import Operator
from tvm_fuse.onnx.shapes import OPAQUE

__all__ = ["read_batch_norm", "read_conv", "read_conv_transpose", "read_gemm", "read_matmul"]

_CONV_KINDS = {1: Kind.CONV1D, 2: Kind.CONV2D, 3: Kind.CONV3D}
_TRANSPOSED_KINDS = {1: Kind.CONV1D_TRANSPOSE, 2: Kind.CONV2D_TRANSPOSE, 3: Kind.CONV3D_TRANSPOSE}
_DEFAULT_EPSILON = 1e-5
#: Padding on one side that is there, but how much is not known.
_SOME_PADDING = 1


def read_conv(operator: Operator) -> int | None:
    """``Conv`` over one, two or three spatial axes."""
    return _read_convolution(operator, _CONV_KINDS, "OI")


def read_conv_transpose(operator: Operator) -> int | None:
    """``ConvTranspose`` over one, two or three spatial axes; ``O`` of its kernel is that of one group."""
    return _read_convolution(operator, _TRANSPOSED_KINDS, "IO")


def _read_convolution(operator: Operator, kinds: dict[int, Kind], kernel_axes: str) -> int | None:
    shape = operator.shape(1)
    rank = len(shape) - 2
    if rank not in kinds or {len(operator.shape(0)), len(operator.result.shape)} != {rank + 2}:
        return None
    attributes = operator.attributes
    is_transposed = kinds is _TRANSPOSED_KINDS
    groups = int(attributes.get("group", 1))
    channels = shape[kernel_axes.index("O")]
    strides = tuple(attributes.get("strides", (1,) * rank))
    dilation = tuple(attributes.get("dilations", (1,) * rank))
    taps = tuple(attributes.get("kernel_shape", shape[2:]))
    extents = [(tap - 1) * step + 1 if isinstance(tap, int) else "?" for tap, step in zip(taps, dilation)]
    pad = _transposed_padding if is_transposed else _conv_padding
    spatial = "DHW"[-rank:]
    attrs = ConvAttrs(
        strides=strides,
        padding=pad(operator, extents, strides),
        dilation=dilation,
        groups=groups,
        channels=channels * (groups if is_transposed else 1) if isinstance(channels, int) else 0,
        data_layout=f"NC{spatial}",
        kernel_layout=f"{kernel_axes}{spatial}",
        out_layout=f"NC{spatial}",
    )
    value = operator.emit(kinds[rank], (operator.operand(0), operator.operand(1)), attrs)
    if operator.has(2):
        value = operator.emit(Kind.BIAS_ADD, (value, operator.operand(2)), BiasAddAttrs(1))
    return value


# --- padding ---------------------------------------------------------------------------------


def _auto_pad(operator: Operator) -> str:
    return bytes(operator.attributes.get("auto_pad", b"NOTSET")).decode() or "NOTSET"


def _explicit_padding(operator: Operator, rank: int) -> tuple[int, ...]:
    if _auto_pad(operator) == "VALID":
        return (0,) * (2 * rank)
    return tuple(operator.attributes.get("pads", (0,) * (2 * rank)))


def _conv_padding(operator: Operator, extents: Sequence[Dim], strides: Sequence[int]) -> tuple[int, ...]:
    """Begin of every axis, then end of every axis.

    Where SAME meets an unknown size, both sides get the most it may be: 0 only when it is surely 0.
    """
    auto_pad = _auto_pad(operator)
    if not auto_pad.startswith("SAME"):
        return _explicit_padding(operator, len(strides))
    sides = []
    for size, extent, stride in zip(operator.shape(0)[2:], extents, strides):
        if not isinstance(extent, int):
            sides.append((_SOME_PADDING, _SOME_PADDING))
        elif not isinstance(size, int):
            sides.append((extent - 1, extent - 1))
        else:
            total = max((ceil(size / stride) - 1) * stride + extent - size, 0)
            sides.append(_split(total, extra_at_end=auto_pad == "SAME_UPPER"))
    return _begins_then_ends(sides)


def _transposed_padding(
    operator: Operator, extents: Sequence[Dim], strides: Sequence[int]
) -> tuple[int, ...]:
    """What is cut off the begin of every axis, then the end of every axis."""
    auto_pad = _auto_pad(operator)
    rank = len(strides)
    if not auto_pad.startswith("SAME") and "output_shape" not in operator.attributes:
        return _explicit_padding(operator, rank)
    added = operator.attributes.get("output_padding", (0,) * rank)
    sides = []
    for size, extent, stride, more, result in zip(
        operator.shape(0)[2:], extents, strides, added, operator.result.shape[2:]
    ):
        if isinstance(size, int) and isinstance(extent, int) and isinstance(result, int):
            total = stride * (size - 1) + more + extent - result
            sides.append(_split(total, extra_at_end=auto_pad != "SAME_UPPER"))
        else:
            sides.append((_SOME_PADDING, _SOME_PADDING))
    return _begins_then_ends(sides)


def _split(total: int, extra_at_end: bool) -> tuple[int, int]:
    small, large = total // 2, total - total // 2
    return (small, large) if extra_at_end else (large, small)


def _begins_then_ends(sides: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return (*(begin for begin, _ in sides), *(end for _, end in sides))


# --- matrix products -------------------------------------------------------------------------


def read_gemm(operator: Operator) -> int | None:
    """``alpha * A' B' + beta * C`` with constant B and C.

    alpha and ``beta * C`` are float64 constants, so that nothing is rounded before a fold.
    """
    weight, result = operator.constant(1), operator.result
    has_sum = operator.has(2)
    if weight is None or weight.ndim != 2 or len(result.shape) != 2 or result.dtype not in FLOATS:
        return None
    if has_sum and operator.constant(2) is None:
        return None
    attributes = operator.attributes
    alpha, beta = float(attributes.get("alpha", 1.0)), float(attributes.get("beta", 1.0))
    layout = "OI" if attributes.get("transB", 0) else "IO"
    attrs = DenseAttrs(layout, input_axis=-2 if attributes.get("transA", 0) else -1)
    value = operator.emit(Kind.DENSE, (operator.operand(0), operator.operand(1)), attrs)
    if alpha != 1.0:
        value = operator.emit(Kind.MULTIPLY, (value, operator.emit_constant(np.array(alpha), "float64")))
    if has_sum:
        value = operator.emit(Kind.ADD, (value, _scaled_sum(operator, beta)))
    return value


def _scaled_sum(operator: Operator, beta: float) -> int:
    """Core id of ``beta * C``."""
    added = operator.constant(2)
    if beta == 1.0 or added is None:
        return operator.operand(2)
    return operator.emit_constant(beta * widen(added, operator.info(2).dtype), "float64")


def read_matmul(operator: Operator) -> int | None:
    """A product with a constant on the right: a matrix, or a stack of them for a stack of data."""
    weight = operator.constant(1)
    inputs = (operator.operand(0), operator.operand(1))
    data_rank, rank = len(operator.shape(0)), len(operator.result.shape)
    if weight is None or data_rank != rank:
        return None
    if weight.ndim == 2:
        return operator.emit(Kind.MATMUL, inputs, DenseAttrs("IO"))
    if weight.ndim == data_rank == 3:
        return operator.emit(Kind.BATCH_MATMUL, inputs, DenseAttrs("BIO"))
    return None


# --- batch norm ------------------------------------------------------------------------------


def read_batch_norm(operator: Operator) -> int | None:
    """The inference form over axis 1; data of rank 1, which has no such axis, is not read."""
    attributes = operator.attributes
    is_training = attributes.get("training_mode", 0) or not attributes.get("spatial", 1)
    if is_training or not all(operator.has(position) for position in range(5)):
        return None
    result = operator.info(0)  # the shape stays
    if result is not OPAQUE and len(result.shape) < 2:
        return None
    attrs = BatchNormAttrs(1, float(attributes.get("epsilon", _DEFAULT_EPSILON)), center=True, scale=True)
    outputs = (result, operator.info(3), operator.info(4))
    value = operator.emit(Kind.BATCH_NORM, [operator.operand(index) for index in range(5)], attrs, outputs)
    return operator.emit(Kind.GET_ITEM, (value,), 0, (result,))
