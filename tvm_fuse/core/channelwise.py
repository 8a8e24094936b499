"""Per-channel scales and shifts, and how they travel past operators that only move elements.

::

    y = x * scale + shift      one scale and one shift a channel

An operator with a constant that holds one number a channel (or one for all) is such a map:
    x + c: (1, c)    x - c: (1, -c)    c - x: (-1, c)    x * c: (c, 0)    x / c: (1 / c, 0)

Shapes: a channel is one axis of a tensor, or an axis with its blocks (``NCHW4c``: axes 1 and 4, outer
one first). A transpose, reshape, layout transform or cast does not mix channels where the channel
axes of its operand and of its result correspond. A reshape that merges channels with other axes (a
flatten) makes more, smaller channels: the map is repeated for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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
    "after_move",
    "axes_after",
    "axes_before",
    "before_move",
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


def before_move(graph: Graph, move: Node, axes: Axes, affine: Affine) -> tuple[Axes, Affine] | None:
    """A map of the operand of a move that does what a map of its result does.

    Args:
        graph: The graph.
        move: A node of ``MOVE_KINDS``.
        axes: The channel axes of its result.
        affine: The map of its result.

    Returns:
        The channel axes of the operand and the map of it, or None when no axes of the operand correspond.
    """
    return _move(graph, move, move.output.shape, axes, affine, axes_before)


def after_move(graph: Graph, move: Node, axes: Axes, affine: Affine) -> tuple[Axes, Affine] | None:
    """A map of the result of a move that does what a map of its operand does; see ``before_move``."""
    return _move(graph, move, graph.nodes[move.inputs[0]].output.shape, axes, affine, axes_after)


def _move(
    graph: Graph,
    move: Node,
    shape: tuple[Dim, ...],
    axes: Axes,
    affine: Affine,
    corresponding: Callable[[Graph, Node, Axes], Axes | None],
) -> tuple[Axes, Affine] | None:
    for wider in _wider(shape, axes) if move.kind in _RESHAPES else (axes,):
        found = corresponding(graph, move, wider)
        if found is not None:
            return found, _repeat(affine, shape, axes, wider)
    return None


def _wider(shape: tuple[Dim, ...], axes: Axes) -> Iterator[Axes]:
    """The axes, then the axes with neighbours of static size, few neighbours first."""
    yield axes
    start, stop = axes[0], axes[-1] + 1
    for count in range(stop - start, len(shape) + 1):
        for first in range(max(0, stop - count), min(start, len(shape) - count) + 1):
            wider = tuple(range(first, first + count))
            if wider != axes and channel_count(shape, wider) is not None:
                yield wider


def _repeat(affine: Affine, shape: tuple[Dim, ...], axes: Axes, wider: Axes) -> Affine:
    """A map over some axes as a map over more axes."""
    if axes == wider:
        return affine
    own = [int(shape[axis]) if axis in axes else 1 for axis in wider]
    full = [int(shape[axis]) for axis in wider]
    scale, shift = (
        np.broadcast_to(vector.reshape(own), full).reshape(-1) for vector in (affine.scale, affine.shift)
    )
    return Affine(scale, shift)


def axes_before(graph: Graph, move: Node, axes: Axes) -> Axes | None:
    """The channel axes of the operand of a move that correspond to those of its result, if any do."""
    operand = graph.nodes[move.inputs[0]].output
    if move.kind is Kind.CAST:
        return axes if operand.dtype in FLOATS and move.output.dtype in FLOATS else None
    if move.kind is Kind.TRANSPOSE:
        return _ascending(tuple(move.attrs.axes[axis] for axis in axes))
    if move.kind is Kind.LAYOUT_TRANSFORM:
        return _relayout(move.attrs.target, move.attrs.source, axes)
    return _reshaped(move.output.shape, operand.shape, axes)


def axes_after(graph: Graph, move: Node, axes: Axes) -> Axes | None:
    """The channel axes of the result of a move that correspond to those of its operand, if any do.

    None for a cast to a narrower dtype as well: ``x - mean`` may fit where ``x`` does not.
    """
    operand = graph.nodes[move.inputs[0]].output
    if move.kind is Kind.CAST:
        return axes if _holds_all_of(move.output.dtype, operand.dtype) else None
    if move.kind is Kind.TRANSPOSE:
        return _ascending(tuple(move.attrs.axes.index(axis) for axis in axes))
    if move.kind is Kind.LAYOUT_TRANSFORM:
        return _relayout(move.attrs.source, move.attrs.target, axes)
    return _reshaped(operand.shape, move.output.shape, axes)


def _holds_all_of(wide: str, narrow: str) -> bool:
    """Whether a dtype holds every number of another one."""
    if wide not in FLOATS or narrow not in FLOATS:
        return False
    return FLOATS[wide].roundoff <= FLOATS[narrow].roundoff and FLOATS[wide].largest >= FLOATS[narrow].largest


def _ascending(axes: Axes) -> Axes | None:
    return axes if list(axes) == sorted(axes) else None


def _relayout(source: str, target: str, axes: Axes) -> Axes | None:
    return channel_axes(target, "C") if "C" in target and axes == channel_axes(source, "C") else None


def _reshaped(source: tuple[Dim, ...], target: tuple[Dim, ...], axes: Axes) -> Axes | None:
    """The axes of ``target`` with the same elements before, in and after them as ``axes`` of ``source``.

    The fewest such axes, so that no axis of size 1 is among them without need; of several, the same axes.
    None where one symbol occurs twice: front ends give all sizes that they do not know the same name.
    """
    start, stop = axes[0], axes[-1] + 1
    symbols = [dim for dim in source if isinstance(dim, str)]
    if axes != tuple(range(start, stop)) or len(symbols) > len(set(symbols)):
        return None
    wanted = _signature(source[:start]), _signature(source[start:stop]), _signature(source[stop:])
    if channel_count(source, axes) is None:
        return None
    found = [
        tuple(range(first, last))
        for first in range(len(target))
        for last in range(first + 1, len(target) + 1)
        if (_signature(target[:first]), _signature(target[first:last]), _signature(target[last:])) == wanted
    ]
    return min(found, key=lambda places: (len(places), places != axes), default=None)


def _signature(dims: Iterable[Dim]) -> tuple[int, Counter[str]]:
    """What decides how many elements some dimensions have: the static ones multiplied, and the symbols."""
    dims = tuple(dims)
    symbols = Counter(dim for dim in dims if isinstance(dim, str))
    return prod(dim for dim in dims if isinstance(dim, int)), symbols
