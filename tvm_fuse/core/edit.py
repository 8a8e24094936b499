"""What a fold changes in a graph: the contract between the core and a front end.

A rule of the core returns edits by node id; a front end carries them out on its own IR. In the graph

::

    conv -> bias_add -> batch_norm -> get_item(0)

the fold of the batch norm is ``layers=[conv: weight W', bias b']`` and ``aliases={bias_add: conv,
get_item: bias_add}``: the convolution gets new parameters, ``b'`` is added to its result, and the two
other values become what was before them. Whoever read the value of an aliased node reads the
value of the other node instead, as it is after all edits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tvm_fuse.core.graph import Array

__all__ = ["Direction", "Edit", "LayerEdit", "choose_disjoint"]


class Direction(str, Enum):
    """Where the layers are that take in what was next to them."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class LayerEdit:
    """New parameters of one layer.

    Args:
        anchor: Id of the convolution or matrix product.
        weight: Replaces its weight (input 1): same shape and dtype.
        bias: Constant to add to its output, of the dtype and rank of that output and broadcasting
            with it, ``(1, C, 1, 1)`` for NCHW; None adds nothing. It comes on top of whatever is
            added later: an older bias that it replaces is aliased away.
    """

    anchor: int
    weight: Array = field(compare=False, repr=False)
    bias: Array | None = field(compare=False, repr=False)


@dataclass(frozen=True)
class Edit:
    """One fold: layers with new parameters, and values that become other values.

    Args:
        layers: At least one; each anchor at most once.
        aliases: Id of a value -> id of the value, with the same shape and dtype, that replaces it
            (and is itself subject to ``aliases``).
        direction: Where the layers are.
    """

    layers: tuple[LayerEdit, ...]
    aliases: Mapping[int, int]
    direction: Direction = Direction.BEFORE

    @property
    def touched(self) -> frozenset[int]:
        """The nodes that this edit changes; two edits of one round must not share any."""
        return frozenset(layer.anchor for layer in self.layers) | frozenset(self.aliases)


def choose_disjoint(edits: Mapping[int, Edit]) -> frozenset[int]:
    """The edits that can be made in one round.

    Edits of layers before go first: one of a layer after may leave a map over its output there, past
    which nothing folds back.

    Args:
        edits: Any key -> edit; of those in one direction the first take precedence.

    Returns:
        The keys of the edits that touch nothing that an earlier one touches.
    """
    touched: set[int] = set()
    chosen = []
    for key, edit in sorted(edits.items(), key=lambda item: item[1].direction is Direction.AFTER):
        if touched.isdisjoint(edit.touched):
            chosen.append(key)
        touched |= edit.touched
    return frozenset(chosen)
