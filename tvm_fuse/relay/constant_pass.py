"""Constant folding in NumPy.

TVM's own FoldConstant compiles every constant expression through LLVM, about half a second
each; a model whose weights are brought to another layout has a hundred of them. The operators
in the table at the end cover what folding, layout changes and exporters leave behind; TVM's
pass is needed only when an operator on constants is left that is not in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, narrow, widen
from tvm_fuse.core.graph import Kind, Node
from tvm_fuse.core.layout import transform
from tvm_fuse.relay.base import relay
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_function

__all__ = ["fold_all_constants", "fold_constants"]

Evaluate = Callable[[Any, Sequence[np.ndarray], "tuple[int, ...]"], np.ndarray]


def fold_constants(module: Any) -> Any:
    """Replace operators whose operands are all constants by their values.

    Args:
        module: A Relay module.

    Returns:
        The type-inferred module; values are bit-identical to what the operators compute, but
        for square roots and divisions, which are correctly rounded here.
    """
    return rewrite_functions(module, _rewrite)[0]


def fold_all_constants(module: Any) -> Any:
    """``fold_constants``, then TVM's FoldConstant when an operator on constants is left.

    Args:
        module: A Relay module.

    Returns:
        The type-inferred module.
    """
    module = fold_constants(module)
    leftovers: list[str] = []

    def collect(read: ReadFunction) -> Any:
        leftovers.extend(_constant_operators(read))
        return read.function

    rewrite_functions(module, collect)
    return relay.transform.InferType()(relay.transform.FoldConstant()(module)) if leftovers else module


def _constant_operators(read: ReadFunction) -> list[str]:
    """Names of the operators that work on nothing but constants."""
    known: set[int] = set(read.graph.constants)
    names = []
    for node in read.graph.nodes:
        if node.kind in (Kind.INPUT, Kind.CONSTANT) or not all(source in known for source in node.inputs):
            continue
        known.add(node.id)
        if node.kind not in (Kind.TUPLE, Kind.GET_ITEM):
            names.append(node.op)
    return names


def _rewrite(read: ReadFunction) -> Any:
    values: dict[int, np.ndarray] = dict(read.graph.constants)
    replacements: dict[int, Replacement] = {}
    for node in read.graph.nodes:
        operands = [values.get(source) for source in node.inputs]
        known = [operand for operand in operands if operand is not None]
        if node.op not in _KNOWN or not known or len(known) != len(operands):
            continue
        value = _evaluate(read, node, known)
        if value is not None:
            values[node.id] = value
            replacements[node.id] = _constant(value, node.output.dtype)
    return rebuild_function(read, replacements)


def _evaluate(read: ReadFunction, node: Node, operands: list[np.ndarray]) -> np.ndarray | None:
    info = node.output
    if not info.is_static or info.dtype not in _DTYPES:
        return None
    if node.kind is Kind.DIVIDE and info.dtype not in FLOATS:
        return None
    shape = tuple(int(dim) for dim in info.shape)
    attrs = read.expressions[node.id].attrs
    if node.op in _MOVES:
        moved = _MOVES[node.op](attrs, operands, shape)
        return np.ascontiguousarray(moved).reshape(shape)
    dtypes = [read.graph.nodes[source].output.dtype for source in node.inputs]
    with np.errstate(all="ignore"):
        value = _OPERATORS[node.op](attrs, list(map(_computable, operands, dtypes)), shape)
        if info.dtype == "bfloat16":
            return narrow(value.astype(np.float64), info.dtype).reshape(shape)
        return np.ascontiguousarray(value, dtype=info.dtype).reshape(shape)


def _computable(operand: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 as float32, in which TVM computes it; its results are rounded one by one."""
    return widen(operand, dtype).astype(np.float32) if dtype == "bfloat16" else operand


def _constant(value: np.ndarray, dtype: str) -> Replacement:
    return lambda new: constant(value, dtype)


def _axes(attrs: Any, operand: np.ndarray) -> list[int]:
    if attrs.axes is None or len(attrs.axes) == 0:
        return list(range(operand.ndim))[::-1]
    return [int(axis) for axis in attrs.axes]


_DTYPES = (*FLOATS, "int32", "int64", "bool")

#: Operators that move elements -> their value from (attributes, operands, output shape).
_MOVES: dict[str, Evaluate] = {
    "reshape": lambda attrs, x, shape: x[0].reshape(shape),
    "squeeze": lambda attrs, x, shape: x[0].reshape(shape),
    "expand_dims": lambda attrs, x, shape: x[0].reshape(shape),
    "transpose": lambda attrs, x, shape: x[0].transpose(_axes(attrs, x[0])),
    "repeat": lambda attrs, x, shape: np.repeat(x[0], int(attrs.repeats), int(attrs.axis)),
    "copy": lambda attrs, x, shape: x[0],
    "broadcast_to": lambda attrs, x, shape: np.broadcast_to(x[0], shape),
    "layout_transform": lambda attrs, x, shape: transform(x[0], str(attrs.src_layout), str(attrs.dst_layout)),
}

#: Operators that compute -> the same.
_OPERATORS: dict[str, Evaluate] = {
    "add": lambda attrs, x, shape: x[0] + x[1],
    "subtract": lambda attrs, x, shape: x[0] - x[1],
    "multiply": lambda attrs, x, shape: x[0] * x[1],
    "divide": lambda attrs, x, shape: x[0] / x[1],
    "negative": lambda attrs, x, shape: -x[0],
    "power": lambda attrs, x, shape: np.power(x[0], x[1]),
    "sqrt": lambda attrs, x, shape: np.sqrt(x[0]),
    "rsqrt": lambda attrs, x, shape: 1 / np.sqrt(x[0]),
    "cast": lambda attrs, x, shape: _cast(x[0], str(attrs.dtype)),
}


_KNOWN = frozenset((*_MOVES, *_OPERATORS))


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return array if dtype == "bfloat16" else array.astype(dtype)
