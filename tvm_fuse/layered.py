"""Places for the boxes of a directed graph: layers from top to bottom, few crossings, straight lines.

After Sugiyama et al. 1981: a box lies one layer below the lowest box that it reads; an edge over several
layers gets a *bend* in each layer between, so that it passes beside the boxes; each layer is ordered by the
mean place of its neighbours; then boxes move towards their neighbours as far as there is room. The same
graph always gives the same picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layout", "lay_out"]

_SWEEPS = 8
_SHIFTS = 16
#: Room that a bend takes, as a share of a box.
_BEND = 0.12
#: How hard a bend pushes, where a box pushes with 1.
_BEND_WEIGHT = 1e-3


@dataclass(frozen=True)
class Layout:
    """Where things are.

    Args:
        layers: Layer of each box, 0 at the top.
        columns: Middle of each box, in widths of a box, 0 at the left.
        bends: For each edge its places in the layers between its ends, from top to bottom.
        width: Of the whole, in widths of a box.
        height: Layers.
    """

    layers: tuple[int, ...]
    columns: tuple[float, ...]
    bends: tuple[tuple[float, ...], ...]
    width: float
    height: int


def lay_out(boxes: int, edges: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes.

    Args:
        boxes: How many; numbered in a topological order.
        edges: From a box to one with a larger number.

    Returns:
        The places; those of ``bends`` in the order of ``edges``.
    """
    layers = [0] * boxes
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        layers[target] = max(layers[target], layers[source] + 1)
    level = list(layers)  # boxes, then bends
    chains = []
    links: list[tuple[int, int]] = []
    for source, target in edges:
        chain = list(range(len(level), len(level) + layers[target] - layers[source] - 1))
        level += range(layers[source] + 1, layers[target])
        links += zip([source, *chain], [*chain, target])
        chains.append(chain)
    rows: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for item, row in enumerate(level):
        rows[row].append(item)
    above, below = _neighbours(len(level), links)
    _order(rows, above, below)
    place = _place(rows, above, below, boxes)
    return Layout(
        tuple(layers),
        tuple(place[:boxes]),
        tuple(tuple(place[bend] for bend in chain) for chain in chains),
        max((place[item] + _half(item, boxes) for item in range(len(level))), default=0.0),
        len(rows),
    )


def _neighbours(items: int, links: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(items)]
    below: list[list[int]] = [[] for _ in range(items)]
    for source, target in links:
        above[target].append(source)
        below[source].append(target)
    return above, below


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each row by the mean position of its neighbours in the row before, down and up in turn."""
    position = {item: index for row in rows for index, item in enumerate(row)}
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            keys = {item: _mean([position[n] for n in neighbours[item]], position[item]) for item in row}
            row.sort(key=lambda item: (keys[item], position[item]))
            position.update({item: index for index, item in enumerate(row)})


def _place(rows: list[list[int]], above: list[list[int]], below: list[list[int]], boxes: int) -> list[float]:
    """Move each item towards its neighbours, keeping the order of its row and the room of each item."""
    place = [0.0] * sum(map(len, rows))
    for row in rows:
        _spread(row, dict.fromkeys(row, 0.0), place, boxes)
    for shift in range(_SHIFTS):
        for row in rows if shift % 2 == 0 or shift == _SHIFTS - 1 else reversed(rows):
            wanted = {}
            for item in row:
                near = above[item] + below[item] if shift < _SHIFTS - 2 else above[item]
                straight = [n for n in near if (n < boxes) == (item < boxes)] or near
                wanted[item] = _mean([place[n] for n in straight], place[item])
            _spread(row, wanted, place, boxes)
    left = min((place[item] - _half(item, boxes) for item in range(len(place))), default=0.0)
    return [round(where - left, 3) for where in place]


def _spread(row: Sequence[int], wanted: dict[int, float], place: list[float], boxes: int) -> None:
    """The places nearest to the wanted ones at which nothing overlaps: items that touch move as one block."""
    blocks: list[_Block] = []
    for item in row:
        half = _half(item, boxes)
        weight = 1.0 if item < boxes else _BEND_WEIGHT
        blocks.append(_Block(weight * (wanted[item] - half), weight, 1, 2 * half))
        while len(blocks) > 1 and blocks[-2].start + blocks[-2].length > blocks[-1].start:
            last = blocks.pop()
            blocks[-1] = blocks[-1].joined(last)
    waiting = iter(row)
    for block in blocks:
        edge = block.start
        for item in itertools.islice(waiting, block.items):
            half = _half(item, boxes)
            place[item] = edge + half
            edge += 2 * half


@dataclass(frozen=True)
class _Block:
    """Items side by side; ``total`` is the weighted sum of where each would have the block start."""

    total: float
    weight: float
    items: int
    length: float

    @property
    def start(self) -> float:
        return self.total / self.weight

    def joined(self, right: _Block) -> _Block:
        total = self.total + right.total - right.weight * self.length
        return _Block(total, self.weight + right.weight, self.items + right.items, self.length + right.length)


def _half(item: int, boxes: int) -> float:
    return 0.55 if item < boxes else _BEND / 2


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
