"""Bytes, operations and time of kernels, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.cost import (
    NO_COST,
    ROWS,
    GroupCost,
    Parts,
    gate_blocks,
    group_cost,
    operator_costs,
    time_s,
)
from tvm_fuse.core.flops import WEIGHTS
from tvm_fuse.core.graph import TensorInfo
from tvm_fuse.core.kinds import Kind
from tvm_fuse.core.targets import DEVICES

A100 = DEVICES["a100"]
FLOAT = 4


def pointwise(rows=64, channels=8, size=16, batch=1, groups=1):
    """``gate * x`` before a 1x1 convolution with a bias: builder, multiply, conv, bias."""
    g = GraphBuilder("float32")
    x = g.input("x", (batch, channels, size, size))
    scaled = g.multiply(x, g.input("gate", (batch, channels, 1, 1)))
    conv = g.conv2d(scaled, g.input("w", (rows, channels // groups, 1, 1)), groups=groups)
    return g, scaled, conv, g.add(conv, g.input("b", (rows, 1, 1)))


def test_each_operand_once_and_one_result():
    g, _, conv, bias = pointwise()
    cost = group_cost(g.build(bias), Parts((conv, bias), conv))
    assert cost.dram_read_bytes == FLOAT * (8 * 256 + 64 * 8 + 64)
    assert cost.dram_write_bytes == FLOAT * 64 * 256
    assert cost.flops == 2 * 64 * 256 * 8 + 64 * 256
    assert (cost.launches, cost.extra_flops) == (1, 0)


def test_an_operand_read_twice_counts_once():
    g = GraphBuilder("float32")
    x = g.input("x", (4, 4))
    square = g.multiply(x, x)
    cost = group_cost(g.build(square), Parts((square,)))
    assert (cost.dram_read_bytes, cost.dram_write_bytes) == (64, 64)


@pytest.mark.parametrize(("sizes", "read"), [((4, 8), 12), ((12, 8), 16), ((4,), 4)])
def test_of_slices_what_they_read_together(sizes, read):
    """Elements of a value of 16: parts of it, at most all of it."""
    g = GraphBuilder("float32")
    x = g.input("x", (16,))
    parts = [g.node(Kind.SLICE, "strided_slice", (x,), (size,)) for size in sizes]
    result = g.tanh(g.concatenate(*parts, axis=0)) if len(parts) > 1 else g.tanh(parts[0])
    graph = g.build(result)
    inside = tuple(node.id for node in graph.nodes if node.kind is not Kind.INPUT)
    assert group_cost(graph, Parts(inside)).dram_read_bytes == FLOAT * read


def test_inner_results_are_written_when_somebody_else_reads_them():
    g = GraphBuilder("float32")
    x = g.input("x", (4, 4))
    one = g.relu(x)
    two = g.tanh(one)
    assert group_cost(g.build(two), Parts((one, two))).dram_write_bytes == 64
    assert group_cost(g.build(two, one), Parts((one, two))).dram_write_bytes == 128
    outside = g.sigmoid(one)
    assert group_cost(g.build(two, outside), Parts((one, two))).dram_write_bytes == 128


def test_fields_of_a_tuple_are_read_and_scalars_are_not():
    g = GraphBuilder("float16")
    x, y = g.input("x", (2, 3)), g.input("y", (2, 5))
    joined = g.concatenate(x, y)
    tuple_, three = g.nodes[joined].inputs[0], g.add(joined, 3.0)
    cost = group_cost(g.build(three), Parts((tuple_, joined, three)))
    assert (cost.dram_read_bytes, cost.dram_write_bytes) == (2 * 16, 2 * 16)
    apart = group_cost(g.build(three), Parts((three,)))
    assert apart.dram_read_bytes == 2 * 16


def test_operators_apart():
    """Views launch nothing; the others are kernels of their own."""
    g, scaled, conv, bias = pointwise()
    flat = g.reshape(bias, 64, 256)
    costs = operator_costs(g.build(flat), (scaled, conv, bias, flat))
    assert [cost.launches for cost in costs] == [1, 1, 1]
    assert costs[2].dram_read_bytes == FLOAT * (64 * 256 + 64)
    assert group_cost(g.build(flat), Parts((flat,))) == NO_COST


@pytest.mark.parametrize(("rows", "blocks"), [(8, 1), (ROWS, 1), (ROWS + 1, 2), (10 * ROWS, 10)])
def test_prologue_once_for_each_block_of_rows(rows, blocks):
    g, scaled, conv, bias = pointwise(rows)
    cost = group_cost(g.build(bias), Parts((scaled, conv, bias), conv, prologue=(scaled,)))
    assert cost.extra_flops == (blocks - 1) * 8 * 256
    assert cost.l2_read_bytes == (blocks - 1) * FLOAT * (8 * 256 + 8)  # the data and the gate


def test_prologue_once_more_for_each_tap():
    g = GraphBuilder("float32")
    x = g.input("x", (1, 8, 16, 16))
    before = g.relu(x)
    conv = g.conv2d(before, np.zeros((2 * ROWS, 8, 3, 3)), padding=(1, 1))
    strided = g.conv2d(before, np.zeros((2 * ROWS, 8, 3, 3)), padding=(1, 1), strides=(2, 2))
    graph = g.build(conv, strided)
    for node, reads in ((conv, 9), (strided, 9 / 4)):
        cost = group_cost(graph, Parts((before, node), node, prologue=(before,)))
        assert cost.extra_flops == int((2 * reads - 1) * 8 * 256)


def test_depthwise_reads_a_halo_only():
    g = GraphBuilder("float32")
    before = g.relu(g.input("x", (1, 8, 16, 16)))
    conv = g.conv2d(before, np.zeros((8, 1, 3, 3)), padding=(1, 1), groups=8)
    cost = group_cost(g.build(conv), Parts((before, conv), conv, prologue=(before,)))
    assert cost.extra_flops == int(((1 + 2 / 16) ** 2 - 1) * 8 * 256)
    assert cost.l2_read_bytes == 0


def test_narrow_products_have_few_blocks():
    """One pixel: a warp for each result, eight in a block, and each reads all of the data."""
    g, scaled, conv, bias = pointwise(rows=64, channels=256, size=1)
    cost = group_cost(g.build(bias), Parts((scaled, conv, bias), conv, prologue=(scaled,)))
    assert cost.blocks == 8
    assert cost.extra_flops == 63 * 256
    wide = group_cost(g.build(bias), Parts((bias,)))
    assert wide.blocks is None


def test_dense_and_transposed():
    g = GraphBuilder("float32")
    x = g.relu(g.input("x", (32, 64)))
    dense = g.dense(x, np.zeros((5 * ROWS, 64)))
    image = g.relu(g.input("y", (1, 4, 8, 8)))
    up = g.convolution(
        image, np.zeros((4, ROWS, 2, 2)), layout="NCHW", kernel="IOHW", transposed=True, strides=(2, 2)
    )
    graph = g.build(dense, up)
    cost = group_cost(graph, Parts((x, dense), dense, prologue=(x,)))
    assert cost.extra_flops == 4 * 32 * 64
    cost = group_cost(graph, Parts((image, up), up, prologue=(image,)))
    assert cost.extra_flops == 3 * 4 * 64  # four taps, each element once in each


def test_absorbed_product_in_every_block():
    g = GraphBuilder("float32")
    x = g.input("x", (2, 512, 1, 1))
    first = g.conv2d(x, g.input("w1", (32, 512, 1, 1)))
    act = g.relu(first)
    second = g.conv2d(act, g.input("w2", (512, 32, 1, 1)))
    graph = g.build(second)
    cost = group_cost(graph, Parts((first, act, second), second, absorbed=(first, act)))
    blocks = gate_blocks(graph.nodes[second].output)
    assert cost.blocks == blocks == 2 * 16
    assert cost.extra_flops == 15 * (2 * 2 * 512 * 32 + 2 * 32)
    assert cost.l2_read_bytes == 15 * FLOAT * (2 * 512 + 32 * 512)


@pytest.mark.parametrize(
    ("shape", "blocks"), [((1, 16, 1, 1), 1), ((1, 256, 1, 1), 16), ((1, 1152, 1, 1), 15), ((3, 20), 6)]
)
def test_gate_blocks(shape, blocks):
    """ceil(C / (16 x results of a warp)) slices an image, as ``cuda_gate.py`` splits them."""
    assert gate_blocks(TensorInfo(shape, "float32")) == blocks


def test_absorbed_reductions_are_computed_once():
    """Softmax after a mean: the row of a block is its own."""
    g = GraphBuilder("float32")
    x = g.input("x", (8, 64))
    mean = g.node(Kind.REDUCE, "mean", (x,), (8, 1))
    soft = g.node(Kind.SOFTMAX, "nn.softmax", (g.subtract(x, mean),), (8, 64))
    cost = group_cost(g.build(soft), Parts((mean, mean + 1, soft), soft, absorbed=(mean,)))
    assert (cost.extra_flops, cost.l2_read_bytes, cost.blocks) == (0, 0, None)
    assert cost.flops == 8 * 64 * (1 + 1 + WEIGHTS["softmax"])


# --- time ----------------------------------------------------------------------------------------


def test_the_larger_of_arithmetic_and_memory():
    bound = GroupCost(195 * 10**9, 0, 0, 0, 0, 0)  # 195 GFLOP at 19.5 TFLOP/s
    assert time_s(bound, A100) == pytest.approx(0.01)
    assert time_s(replace(bound, flops=0, dram_read_bytes=1_555_000_000), A100) == pytest.approx(0.001)
    both = replace(bound, dram_read_bytes=1_555_000_000, extra_flops=195 * 10**9)
    assert time_s(both, A100) == pytest.approx(0.02)
    assert time_s(replace(both, launches=3), A100) == pytest.approx(0.02 + 3 * A100.launch_s)


def test_reading_again_costs_where_the_cache_is_the_limit():
    cost = GroupCost(0, 0, 10**6, 0, 0, 0)
    again = replace(cost, l2_read_bytes=10**9)
    assert time_s(again, A100) == pytest.approx((10**9 + 10**6) / A100.l2_bytes_per_s)
    assert time_s(replace(cost, l2_read_bytes=10**5), A100) == time_s(cost, A100)


def test_few_blocks_use_a_part_of_the_device():
    cost = GroupCost(10**9, 0, 0, 0, 0, 0, blocks=27)
    assert time_s(cost, A100) == pytest.approx(4 * time_s(replace(cost, blocks=None), A100))
    assert time_s(replace(cost, blocks=10**6), A100) == time_s(replace(cost, blocks=None), A100)


def test_intensity():
    g, _, conv, bias = pointwise()
    cost = group_cost(g.build(bias), Parts((conv, bias), conv))
    assert cost.flops_per_byte == cost.flops / (cost.dram_read_bytes + cost.dram_write_bytes)
    assert cost.flops_per_byte < A100.ridge_flops_per_byte  # a small layer waits for memory
