"""Layout strings such as ``NCHW``, ``HWIO`` or ``OIHW16i16o``.

An upper-case letter is an axis; a number with a lower-case letter is a block split off that
axis, inner to it: in ``NCHW16c`` channel ``c`` is ``16 * C + c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import Array, Dim

__all__ = [
    "Axis",
    "axis_index",
    "channel_axes",
    "channel_vector_shape",
    "parse_layout",
    "spread",
    "transform",
]

_TOKEN = re.compile(r"([A-Z])|([1-9][0-9]*)([a-z])")


@dataclass(frozen=True)
class Axis:
    """One dimension of a layout: its letter (upper case) and its block size (0: not a block)."""

    letter: str
    block: int = 0


def parse_layout(layout: str) -> tuple[Axis, ...]:
    """Split a layout string into its dimensions.

    Raises:
        UsageError: The string is not a layout, repeats an axis, or splits one that it lacks.
    """
    axes: list[Axis] = []
    position = 0
    for match in _TOKEN.finditer(layout):
        if match.start() != position:
            break
        position = match.end()
        outer, size, inner = match.groups()
        axes.append(Axis(outer) if outer else Axis(inner.upper(), int(size)))
    if position != len(layout) or not axes:
        raise UsageError(f"not a layout: {layout!r}; wanted a form like NCHW, OHWI or OIHW16i16o")
    outer = [axis.letter for axis in axes if not axis.block]
    if len(outer) != len(set(outer)) or {axis.letter for axis in axes} != set(outer):
        raise UsageError(f"not a layout: {layout!r}; wanted each axis once, and blocks of these only")
    return tuple(axes)


def axis_index(layout: str, letter: str) -> int | None:
    """Position of an unblocked axis, or None when the layout lacks it or splits it in blocks."""
    axes = parse_layout(layout)
    places = [index for index, axis in enumerate(axes) if axis.letter == letter]
    return places[0] if len(places) == 1 else None


def channel_axes(layout: str, letter: str) -> tuple[int, ...] | None:
    """Positions of an axis and its blocks, in order: ``NCHW4c``, C -> (1, 4).

    Returns:
        None when the layout lacks the axis or holds a block before what it is a block of.
    """
    axes = parse_layout(layout)
    places = tuple(index for index, axis in enumerate(axes) if axis.letter == letter)
    if not places or any(axes[index].block == 0 for index in places[1:]):
        return None
    return places


def channel_vector_shape(layout: str, letter: str, shape: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """The shape that spreads a vector along one axis of a tensor, blocks included.

    Args:
        layout: Layout of the tensor.
        letter: The axis, upper case.
        shape: Shape of the tensor.

    Returns:
        ``shape`` with 1 at all other dimensions, or None when the layout does not fit the
        shape, lacks the axis, or holds an inner block before its outer axis.
    """
    axes = parse_layout(layout)
    if len(axes) != len(shape) or any(axis.block not in (0, size) for axis, size in zip(axes, shape)):
        return None
    places = channel_axes(layout, letter)
    if places is None:
        return None
    return tuple(size if index in places else 1 for index, size in enumerate(shape))


def spread(vector: Array, layout: str, letter: str, shape: tuple[int, ...]) -> Array | None:
    """View a per-channel vector as a tensor that broadcasts along ``letter`` of ``shape``.

    Args:
        vector: Shape ``(channels,)``.
        layout: Layout of the tensor it will be combined with.
        letter: The channel axis, upper case.
        shape: Shape of that tensor.

    Returns:
        A view of ``vector``, or None when the sizes do not fit.
    """
    wanted = channel_vector_shape(layout, letter, shape)
    if wanted is None:
        return None
    target = tuple(size for size in wanted if isinstance(size, int))
    if len(target) != len(wanted) or int(np.prod(target)) != vector.size:
        return None
    return vector.reshape(target)


def transform(array: Array, source: str, target: str) -> Array:
    """Copy an array from one layout to another (``OIHW`` -> ``OIHW16i16o`` and back).

    Args:
        array: Any dtype, in ``source`` layout.
        source: Layout of ``array``.
        target: Wanted layout, over the same axes.

    Returns:
        The array in ``target`` layout.

    Raises:
        UsageError: The layouts have different axes, or a block does not divide its axis.
    """
    source_axes, target_axes = parse_layout(source), parse_layout(target)
    letters = sorted({axis.letter for axis in source_axes})
    if letters != sorted({axis.letter for axis in target_axes}) or len(source_axes) != array.ndim:
        raise UsageError(f"cannot transform {array.shape} from layout {source} to {target}")
    plain = _merge_blocks(array, source_axes, letters)
    return _split_blocks(plain, target_axes, letters)


def _merge_blocks(array: Array, axes: tuple[Axis, ...], letters: list[str]) -> Array:
    """Bring the array to one dimension a letter, in the order of ``letters``."""
    outer_first = sorted(range(len(axes)), key=lambda i: axes[i].block != 0)
    order = [i for letter in letters for i in outer_first if axes[i].letter == letter]
    sizes = [
        int(np.prod([array.shape[i] for i, axis in enumerate(axes) if axis.letter == letter]))
        for letter in letters
    ]
    return array.transpose(order).reshape(sizes)


def _split_blocks(plain: Array, axes: tuple[Axis, ...], letters: list[str]) -> Array:
    """Split and order the dimensions of ``plain`` (one a letter) as ``axes`` say."""
    sizes: list[int] = []
    outer: dict[str, int] = {}
    inner: dict[str, list[int]] = {}
    for letter, size in zip(letters, plain.shape):
        blocks = [axis.block for axis in axes if axis.letter == letter and axis.block]
        block = int(np.prod(blocks)) if blocks else 1
        if size % block:
            raise UsageError(f"axis {letter} of size {size} is not divisible by its block {block}")
        outer[letter] = len(sizes)
        sizes += [size // block, *blocks]
        inner[letter] = list(range(outer[letter] + 1, len(sizes)))
    order = [inner[axis.letter].pop(0) if axis.block else outer[axis.letter] for axis in axes]
    return np.ascontiguousarray(plain.reshape(sizes).transpose(order))
