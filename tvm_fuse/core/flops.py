"""Floating-point operations of one operator.

A multiply-add is two. Convolutions and products are counted as if padding were data and a matrix held no
zeros, the usual convention; dilation changes nothing. An elementwise operator costs its weight for each
element of its result: the units that compute reciprocals, roots, exponentials and logarithms give 16 results
a clock where 64 or 128 lanes multiply and add (CUDA C++ Programming Guide, arithmetic instructions), so one
such result counts as 8 operations, and a function made of them as about what its formula needs. Operators
that move elements cost nothing here; what they move, bytes count.
"""

from __future__ import annotations

import math

from tvm_fuse.core.graph import ConvAttrs, DenseAttrs, Graph, Kind, Node, TensorInfo
from tvm_fuse.core.kinds import ANCHOR_KINDS, CONVOLUTION_KINDS, LEAF_KINDS, TRANSPOSED_KINDS
from tvm_fuse.core.layout import parse_layout

__all__ = ["WEIGHTS", "count_elements", "count_flops", "is_static"]

_MOVES = LEAF_KINDS | {
    Kind.TUPLE,
    Kind.GET_ITEM,
    Kind.BROADCAST_TO,
    Kind.CONCATENATE,
    Kind.EXPAND_DIMS,
    Kind.INJECTIVE,
    Kind.LAYOUT_TRANSFORM,
    Kind.PAD,
    Kind.RESHAPE,
    Kind.SLICE,
    Kind.TRANSPOSE,
}

#: Kinds that read each element of their operand once and combine it with others.
_REDUCTIONS = (Kind.GLOBAL_POOL, Kind.REDUCE)

#: Kind or operator -> operations for an element of the result; of those that are not here, 1.
WEIGHTS = {
    Kind.CAST.value: 1,
    Kind.CLIP.value: 2,
    Kind.LEAKY_RELU.value: 2,
    Kind.PRELU.value: 2,
    Kind.DIVIDE.value: 10,  # reciprocal, product, correction
    Kind.RECIPROCAL.value: 10,
    Kind.RSQRT.value: 8,
    Kind.SQRT.value: 10,
    Kind.EXP.value: 10,  # product, power of two
    Kind.LOG.value: 10,
    Kind.SIGMOID.value: 20,  # exponential, sum, division
    Kind.TANH.value: 20,
    Kind.ERF.value: 25,  # polynomial, exponential
    Kind.POWER.value: 30,
    Kind.SOFTMAX.value: 23,  # maximum, difference, exponential, sum, division
    Kind.DATA_NORM.value: 8,  # two sums, difference, scale, shift
}

#: Elements of a 3x3 window, the usual pooling, whose size the graph does not hold.
_POOL_WINDOW = 9


def is_static(node: Node) -> bool:
    """Whether all sizes of a node's results are numbers."""
    return all(info.is_static for info in node.outputs)


def count_elements(info: TensorInfo) -> int:
    """Elements of a tensor of static shape."""
    return math.prod(int(dim) for dim in info.shape)


def count_flops(graph: Graph, node: Node) -> int:
    """Operations of one operator.

    Args:
        graph: The graph; shapes of the node and its operands are static.
        node: One of its nodes.

    Returns:
        Operations at the rate of float32 additions.
    """
    if node.kind in _MOVES:
        return 0
    if node.kind in ANCHOR_KINDS:
        return 2 * _count_multiply_adds(graph, node)
    results = sum(map(count_elements, node.outputs))
    if node.kind is Kind.POOL:
        return results * _POOL_WINDOW
    if node.kind in _REDUCTIONS or node.kind is Kind.OTHER:
        sources = (graph.nodes[source].output for source in node.inputs[:1])
        return max([results, *map(count_elements, sources)])
    return results * WEIGHTS.get(node.kind.value, 1)


def _count_multiply_adds(graph: Graph, node: Node) -> int:
    data, weight = (graph.nodes[source].output for source in node.inputs[:2])
    if isinstance(node.attrs, DenseAttrs):
        return count_elements(node.output) * int(data.shape[node.attrs.input_axis])
    if node.kind in CONVOLUTION_KINDS and isinstance(node.attrs, ConvAttrs):
        letter, spread = ("I", data) if node.kind in TRANSPOSED_KINDS else ("O", node.output)
        return count_elements(spread) * count_elements(weight) // _size_of(weight, node.attrs, letter)
    return count_elements(node.output)


def _size_of(weight: TensorInfo, attrs: ConvAttrs, letter: str) -> int:
    """Size of an axis of a convolution's kernel, blocks multiplied in."""
    axes = parse_layout(attrs.kernel_layout)
    return math.prod(int(dim) for axis, dim in zip(axes, weight.shape) if axis.letter == letter)
