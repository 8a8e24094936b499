"""Places of boxes: nothing overlaps, edges go down, chains are straight. Needs no TVM."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.layered import lay_out


def random_graph(seed, boxes=40):
    rng = np.random.default_rng(seed)
    edges = {
        (int(rng.integers(target)), target) for target in range(1, boxes) for _ in range(rng.integers(1, 4))
    }
    return boxes, sorted(edges)


GRAPHS = {
    "nothing": (0, []),
    "one box": (1, []),
    "a chain": (5, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    "residual": (4, [(0, 1), (1, 2), (2, 3), (0, 3)]),
    "two parts": (4, [(0, 1), (2, 3)]),
    "a fan": (7, [(0, i) for i in range(1, 6)] + [(i, 6) for i in range(1, 6)]),
    **{f"random {seed}": random_graph(seed) for seed in range(5)},
}


@pytest.mark.parametrize(("boxes", "edges"), GRAPHS.values(), ids=GRAPHS)
def test_no_box_is_on_another_and_no_line_crosses_one(boxes, edges):
    layout = lay_out(boxes, edges)
    assert layout == lay_out(boxes, edges)
    assert all(layout.layers[source] < layout.layers[target] for source, target in edges)
    rows = {}
    for layer, column in zip(layout.layers, layout.columns):
        rows.setdefault(layer, []).append((column, 1.0))
    for (source, target), bends in zip(edges, layout.bends):
        passed = range(layout.layers[source] + 1, layout.layers[target])
        assert len(bends) == len(passed)
        for layer, column in zip(passed, bends):
            rows[layer].append((column, 0.0))
    for row in rows.values():
        row.sort()
        for (left, left_width), (right, right_width) in zip(row, row[1:]):
            assert right - left > (left_width + right_width) / 2
        assert row[0][0] - row[0][1] / 2 >= 0
        assert row[-1][0] + row[-1][1] / 2 <= layout.width


def test_a_chain_is_straight_and_a_skip_passes_beside_it():
    layout = lay_out(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert max(layout.columns) - min(layout.columns) < 0.01
    assert layout.bends[:3] == ((), (), ())
    assert all(abs(bend - layout.columns[0]) > 0.5 for bend in layout.bends[3])


def test_branches_that_would_cross_are_swapped():
    edges = [(0, 2), (1, 3), (2, 5), (3, 4)]
    layout = lay_out(6, edges)
    left_to_right = [
        layout.columns[target] - layout.columns[other] for target, other in ((0, 1), (2, 3), (5, 4))
    ]
    assert len({value > 0 for value in left_to_right}) == 1
