"""Layout strings such as ``NCHW``, ``HWIO`` or ``OIHW16i16o``.

An upper-case letter is an axis; a number with a lower-case letter is a block split off that
axis, inner to it: in ``NCHW16c`` channel ``c`` is ``16 * C + c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.errors import UsageError

__all__ = ["Axis", "axis_index", "channel_vector_shape", "parse_layout", "spread", "transform"]

_TOKEN = re.compile(r"([A-Z])|(\d+)([a-z])")


@dataclass(frozen=True)
class Axis:
    """One dimension of a layout: its letter (upper case) and its block size (0: not a block)."""

    letter: str
    block: int = 0


def parse_layout(layout: str) -> tuple[Axis, ...]:
    """Split a layout string into its dimensions.

    Raises:
        UsageError: The string is not a layout.
    """
    axes = []
    position = 0
    for match in _TOKEN.finditer(layout):
        if match.start() != position:
            break
        position = match.end()
        outer, size, inner = match.groups()
        axes.append(Axis(outer) if outer else Axis(inner.upper(), int(size)))
    if position != len(layout) or not axes:
        raise UsageError(f"not a layout: {layout!r}; wanted a form like NCHW, OHWI or OIHW16i16o")
    return tuple(axes)


def axis_index(layout: str, letter: str) -> int | None:
    """Position of an unblocked axis, or None when the layout lacks it or splits it in blocks."""
    axes = parse_layout(layout)
    places = [index for index, axis in enumerate(axes) if axis.letter == letter]
    return places[0] if len(places) == 1 else None


def channel_vector_shape(layout: str, letter: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
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
    if len(axes) != len(shape):
        return None
    places = [index for index, axis in enumerate(axes) if axis.letter == letter]
    if not places or any(axes[index].block == 0 for index in places[1:]):
        return None
    return tuple(size if index in places else 1 for index, size in enumerate(shape))


def spread(vector: np.ndarray, layout: str, letter: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """View a per-channel vector as a tensor that broadcasts along ``letter`` of ``shape``.

    Args:
        vector: Shape ``(channels,)``.
        layout: Layout of the tensor it will be combined with.
        letter: The channel axis, upper case.
        shape: Shape of that tensor.

    Returns:
        A view of ``vector``, or None when the sizes do not fit.
    """
    target = channel_vector_shape(layout, letter, shape)
    if target is None or int(np.prod(target)) != vector.size:
        return None
    return vector.reshape(target)


def transform(array: np.ndarray, source: str, target: str) -> np.ndarray:
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


def _merge_blocks(array: np.ndarray, axes: tuple[Axis, ...], letters: list[str]) -> np.ndarray:
    """Bring the array to one dimension a letter, in the order of ``letters``."""
    order = [i for letter in letters for i, axis in enumerate(axes) if axis.letter == letter]
    sizes = [
        int(np.prod([array.shape[i] for i, axis in enumerate(axes) if axis.letter == letter]))
        for letter in letters
    ]
    return array.transpose(order).reshape(sizes)


def _split_blocks(plain: np.ndarray, axes: tuple[Axis, ...], letters: list[str]) -> np.ndarray:
    """Split and order the dimensions of ``plain`` (one a letter) as ``axes`` say."""
    sizes: list[int] = []
    keys: list[tuple[str, int]] = []
    for letter, size in zip(letters, plain.shape):
        blocks = [axis.block for axis in axes if axis.letter == letter and axis.block]
        inner = int(np.prod(blocks)) if blocks else 1
        if size % inner:
            raise UsageError(f"axis {letter} of size {size} is not divisible by its block {inner}")
        sizes += [size // inner, *blocks]
        keys += [(letter, 0), *((letter, block) for block in blocks)]
    order = [keys.index((axis.letter, axis.block)) for axis in axes]
    return np.ascontiguousarray(plain.reshape(sizes).transpose(order))
