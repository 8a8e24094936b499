"""Groups: the names they get."""

from __future__ import annotations

import numpy as np

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.group import make_group

WEIGHT = np.ones((4, 4, 1, 1))


def test_names():
    g = GraphBuilder()
    x, gate = g.input("x", (1, 4, 2, 2)), g.input("gate", (1, 4, 1, 1))
    scaled = g.multiply(x, gate)
    conv = g.conv2d(scaled, WEIGHT, name="project")
    relu = g.relu(conv)
    tail = [relu]
    for _ in range(3):
        tail.append(g.tanh(tail[-1]))
    graph = g.build(tail[-1])
    group = make_group(graph, conv, (conv, scaled), conv, prologue=(scaled,))
    assert (group.name, group.family, group.anchor_name) == ("multiply_conv2d", "conv2d", "project")
    assert group.nodes == (scaled, conv)
    assert group.operators == ("multiply", "nn.conv2d")
    assert group.is_layer
    assert (group.layers, group.center) == (1, conv)
    few, many = make_group(graph, None, tail[:2], tail[1]), make_group(graph, None, tail, tail[-1])
    assert (few.name, many.name) == ("relu_tanh", "elementwise")
    assert not few.is_layer
    assert (few.layers, few.center) == (0, tail[1])
