"""Operations of operators, counted again by loops or by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.flops import WEIGHTS, count_flops, is_static
from tvm_fuse.core.kinds import Kind


def flops(builder, node):
    graph = builder.build(node)
    return count_flops(graph, graph.nodes[node])


def count_by_loops(data, weight, out, groups):
    """Multiply-adds of an NCHW convolution, one by one."""
    count = 0
    for _ in itertools.product(*map(range, out)):
        for _ in itertools.product(range(data[1] // groups), *map(range, weight[2:])):
            count += 1
    return count


@pytest.mark.parametrize(
    ("data", "weight", "options"),
    [
        ((1, 4, 5, 6), (3, 4, 3, 3), {}),
        ((2, 4, 5, 6), (3, 4, 1, 1), {}),
        ((1, 4, 5, 6), (4, 1, 3, 3), {"groups": 4}),
        ((1, 4, 5, 6), (6, 2, 3, 2), {"groups": 2}),
        ((1, 2, 7, 7), (3, 2, 3, 3), {"strides": (2, 2), "padding": (1, 1)}),
        ((1, 2, 9, 9), (3, 2, 3, 3), {"dilation": (2, 2)}),
    ],
    ids=["3x3", "1x1 batch", "depthwise", "groups", "strided", "dilated"],
)
def test_convolution(data, weight, options):
    g = GraphBuilder()
    node = g.conv2d(g.input("x", data), np.zeros(weight), **options)
    expected = count_by_loops(data, weight, g.shape(node), options.get("groups", 1))
    assert flops(g, node) == 2 * expected


def test_blocked_convolution_is_the_plain_one():
    plain, blocked = GraphBuilder(), GraphBuilder()
    one = plain.conv2d(plain.input("x", (1, 8, 5, 5)), np.zeros((16, 8, 3, 3)))
    other = blocked.convolution(
        blocked.input("x", (1, 2, 5, 5, 4)), np.zeros((2, 2, 3, 3, 4, 8)), layout="NCHW4c",
        kernel="OIHW4i8o", out_layout="NCHW8c", channels=16,
    )  # fmt: skip
    assert flops(plain, one) == flops(blocked, other) == 2 * 16 * 3 * 3 * 8 * 9


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups):
    """Each input pixel meets the whole kernel of its group."""
    g = GraphBuilder()
    weight = np.zeros((4, 3, 2, 2))  # input channels, output channels of a group
    node = g.convolution(
        g.input("x", (1, 4, 5, 5)), weight, layout="NCHW", kernel="IOHW", transposed=True,
        strides=(2, 2), groups=groups,
    )  # fmt: skip
    assert flops(g, node) == 2 * (5 * 5) * 4 * 3 * 2 * 2


def test_one_and_three_axes():
    g = GraphBuilder()
    wave = g.convolution(g.input("x", (1, 2, 8)), np.zeros((3, 2, 3)), layout="NCW", kernel="OIW")
    space = g.convolution(
        g.input("y", (1, 2, 4, 4, 4)), np.zeros((3, 2, 3, 3, 3)), layout="NCDHW", kernel="OIDHW"
    )
    assert flops(g, wave) == 2 * 3 * 6 * 2 * 3
    assert flops(g, space) == 2 * 3 * 8 * 2 * 27


@pytest.mark.parametrize(
    ("data", "weight", "options", "expected"),
    [
        ((2, 5), (7, 5), {"kernel": "OI"}, 2 * 2 * 7 * 5),
        ((2, 5), (5, 7), {"kernel": "IO"}, 2 * 2 * 7 * 5),
        ((5, 2), (5, 7), {"kernel": "IO", "input_axis": -2}, 2 * 2 * 7 * 5),
        ((3, 2, 5), (3, 7, 5), {"kernel": "BOI"}, 2 * 3 * 2 * 7 * 5),
    ],
    ids=["dense", "matmul", "transposed", "batch"],
)
def test_products(data, weight, options, expected):
    g = GraphBuilder()
    assert flops(g, g.matmul(g.input("x", data), np.zeros(weight), **options)) == expected


def test_elementwise():
    g = GraphBuilder()
    x = g.input("x", (2, 3, 4, 4))
    gate = g.input("s", (2, 3, 1, 1))
    assert flops(g, g.relu(x)) == 96
    assert flops(g, g.multiply(x, gate)) == 96  # the result's elements, not the operand's
    assert flops(g, g.sigmoid(gate)) == 6 * WEIGHTS["sigmoid"]
    assert flops(g, g.elementwise("exotic", x)) == 96
    assert flops(g, g.reshape(x, 6, 16)) == 0
    assert flops(g, g.transpose(x, 0, 2, 3, 1)) == 0


def test_reductions():
    """A reduction costs what it reads; of an unknown operator the larger side counts."""
    g = GraphBuilder()
    x = g.input("x", (2, 3, 4, 4))
    assert flops(g, g.node(Kind.GLOBAL_POOL, "nn.global_avg_pool2d", (x,), (2, 3, 1, 1))) == 96
    assert flops(g, g.node(Kind.POOL, "nn.max_pool2d", (x,), (2, 3, 2, 2))) == 24 * 9
    assert flops(g, g.other("image.resize2d", x, shape=(2, 3, 8, 8))) == 384
    assert flops(g, g.other("sum", x, shape=(2,))) == 96


def test_more_expensive_functions_cost_more():
    """The orders that the cost model rests on."""
    assert WEIGHTS["erf"] > WEIGHTS["exp"] > WEIGHTS["clip"]
    assert WEIGHTS["sigmoid"] > WEIGHTS["exp"]
    assert set(WEIGHTS) <= {kind.value for kind in Kind}


def test_symbolic_sizes_are_told():
    g = GraphBuilder()
    x = g.input("x", ("n", 3))
    assert not is_static(g.build(x).nodes[x])
