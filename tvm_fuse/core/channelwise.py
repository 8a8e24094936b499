"""Per-channel scales and shifts, and how they travel past operators that only move elements.

::

    y = x * scale + shift      one scale and one shift a channel

An operator with a constant that holds one number a channel (or one for all) is such a map:
    x + c: (1, c)    x - c: (1, -c)    c - x: (-1, c)    x * c: (c, 0)    x / c: (1 / c, 0)

Shapes: a channel is one axis of a tensor, or an axis with its blocks (``NCHW4c``: axes 1 and 4, outer
one first). A transpose, reshape, layout transform or cast does not mix channels where the channel
axes of its operand and of its result correspond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Callable

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, Array
from tvm_fuse.core.graph import BiasAddAttrs, Dim, Graph, Kind, Node
from tvm_fuse.core.layout import channel_axes

__all__ = [
    "AFFINE_KINDS",
    "MOVE_KINDS",
    "Affine",
    "Step",
    "axes_after",
    "axes_before",
    "channel_count",
    "read_step",
]

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Affine:
    """``x * scale + shift``; both float64 ``(C,)``."""

    scale: Array = field(repr=False)
    shift: Array = field(repr=False)

    @staticmethod
    def identity(channels: int) -> Affine:
        """The map that changes nothing."""
        return Affine(np.ones(channels), np.zeros(channels))

    def after(self, first: Affine) -> Affine:
        """The map that does ``first`` and then this one."""
        with np.errstate(all="ignore"):  # what is not finite is refused when the weights are made
            return Affine(first.scale * self.scale, first.shift * self.scale + self.shift)


@dataclass(frozen=True)
class Step:
    """One operator as a map of one of its operands."""

    value: int
    affine: Affine


# --- operators with a constant ---------------------------------------------------------------


def read_step(graph: Graph, operator: Node, axes: Axes) -> Step | None:
    """Read an operator as a per-channel map of the operand that is no constant.

    Args:
        graph: The graph.
        operator: Any node.
        axes: The axes of the operator's result that make the channel.

    Returns:
        The operand and the map; None when the operator is none, or changes shape or dtype.
    """
    if operator.kind not in _MAPS or len(operator.inputs) != 2:
        return None
    for position, value in enumerate(operator.inputs):
        constant = graph.exact(operator.inputs[1 - position])
        if constant is None or value in graph.constants or graph.nodes[value].output != operator.output:
            continue
        vector = _channel_vector(operator, axes, constant)
        if vector is None:
            continue
        with np.errstate(all="ignore"):
            affine = _MAPS[operator.kind](vector, position == 0)
        return None if affine is None else Step(value, affine)
    return None


def channel_count(shape: tuple[Dim, ...], axes: Axes) -> int | None:
    """How many channels a shape has, or None when that is not static."""
    sizes = [shape[axis] for axis in axes if axis < len(shape)]
    static = [size for size in sizes if isinstance(size, int)]
    return prod(static) if len(static) == len(axes) else None


def _channel_vector(operator: Node, axes: Axes, constant: Array) -> Array | None:
    """A constant as one number a channel, ``(C,)``, if it is that."""
    shape = operator.output.shape
    channels = channel_count(shape, axes)
    if channels is None or constant.ndim > len(shape):
        return None
    if isinstance(operator.attrs, BiasAddAttrs):
        return constant.reshape(-1) if (operator.attrs.axis,) == axes else None
    padded = (1,) * (len(shape) - constant.ndim) + constant.shape
    if any(size != 1 for index, size in enumerate(padded) if index not in axes):
        return None
    block = constant.reshape([padded[axis] for axis in axes])
    return np.broadcast_to(block, [int(shape[axis]) for axis in axes]).reshape(-1)


def _add(c: Array, value_first: bool) -> Affine:
    return Affine(np.ones_like(c), c)


def _subtract(c: Array, value_first: bool) -> Affine:
    return Affine(np.ones_like(c), -c) if value_first else Affine(-np.ones_like(c), c)


def _multiply(c: Array, value_first: bool) -> Affine:
    return Affine(c, np.zeros_like(c))


def _divide(c: Array, value_first: bool) -> Affine | None:
    return Affine(1 / c, np.zeros_like(c)) if value_first else None


#: Operator -> map from its constant and whether the other operand comes first.
_MAPS: dict[Kind, Callable[[Array, bool], Affine | None]] = {
    Kind.ADD: _add,
    Kind.BIAS_ADD: _add,
    Kind.SUBTRACT: _subtract,
    Kind.MULTIPLY: _multiply,
    Kind.DIVIDE: _divide,
}

AFFINE_KINDS = frozenset(_MAPS)


# --- operators that move elements ------------------------------------------------------------

_RESHAPES = (Kind.RESHAPE, Kind.EXPAND_DIMS)

#: Operators with one operand past which a per-channel map can travel.
MOVE_KINDS = frozenset({Kind.TRANSPOSE, Kind.LAYOUT_TRANSFORM, Kind.CAST, *_RESHAPES})


def axes_before(graph: Graph, move: Node, axes: Axes) -> Axes | None:
    """The channel axes of the operand of a move, from those of its result.

    Args:
        graph: The graph.
        move: A node of ``MOVE_KINDS``.
        axes: Axes of its result.

    Returns:
        The axes, or None when no axes of the operand correspond.
    """
    operand = graph.nodes[move.inputs[0]].output
    if move.kind is Kind.CAST:
        return axes if operand.dtype in FLOATS and move.output.dtype in FLOATS else None
    if move.kind is Kind.TRANSPOSE:
        return _ascending(tuple(move.attrs.axes[axis] for axis in axes))
    if move.kind is Kind.LAYOUT_TRANSFORM:
        return _relayout(move.attrs.target, move.attrs.source, axes)
    return _reshaped(move.output.shape, operand.shape, axes)


def axes_after(graph: Graph, move: Node, axes: Axes) -> Axes | None:
    """The channel axes of the result of a move, from those of its operand; see ``axes_before``."""
    operand = graph.nodes[move.inputs[0]].output
    if move.kind is Kind.CAST:
        return axes if operand.dtype in FLOATS and move.output.dtype in FLOATS else None
    if move.kind is Kind.TRANSPOSE:
        return _ascending(tuple(move.attrs.axes.index(axis) for axis in axes))
    if move.kind is Kind.LAYOUT_TRANSFORM:
        return _relayout(move.attrs.source, move.attrs.target, axes)
    return _reshaped(operand.shape, move.output.shape, axes)


def _ascending(axes: Axes) -> Axes | None:
    return axes if list(axes) == sorted(axes) else None


def _relayout(source: str, target: str, axes: Axes) -> Axes | None:
    return channel_axes(target, "C") if "C" in target and axes == channel_axes(source, "C") else None


def _reshaped(source: tuple[Dim, ...], target: tuple[Dim, ...], axes: Axes) -> Axes | None:
    """The axes of ``target`` with the same elements before, in and after them as ``axes`` of ``source``."""
    start, stop = axes[0], axes[-1] + 1
    if axes != tuple(range(start, stop)):
        return None
    wanted = _signature(source[:start]), _signature(source[start:stop]), _signature(source[stop:])
    if channel_count(source, axes) is None:
        return None
    for first in range(len(target)):
        for last in range(first + 1, len(target) + 1):
            got = _signature(target[:first]), _signature(target[first:last]), _signature(target[last:])
            if got == wanted:
                return tuple(range(first, last))
    return None


def _signature(dims: Iterable[Dim]) -> tuple[int, Counter[str]]:
    """What decides how many elements some dimensions have: the static ones multiplied, and the symbols."""
    dims = tuple(dims)
    symbols = Counter(dim for dim in dims if isinstance(dim, str))
    return prod(dim for dim in dims if isinstance(dim, int)), symbols
