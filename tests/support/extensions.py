"""Extensions of groups that a cost model is asked about: a graph and a candidate each."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.kinds import Kind
from tvm_fuse.core.plan_options import Candidate, Extension

__all__ = ["exponential", "gate_case", "prologue_case", "scaled"]


def prologue_case(
    spell: Callable[[GraphBuilder, int], int], channels: int, rows: int, size: int, kernel: int = 1
) -> tuple[Graph, Candidate]:
    """A convolution whose operand is ``spell(builder, x)``, with a bias after it."""
    g = GraphBuilder("float32")
    x = g.input("x", (1, channels, size, size))
    first = len(g.nodes)
    value = spell(g, x)
    added = tuple(node.id for node in g.nodes[first:] if node.inputs)
    weight = g.input("w", (rows, channels, kernel, kernel))
    conv = g.conv2d(value, weight, padding=(kernel // 2, kernel // 2))
    bias = g.add(conv, g.input("b", (rows, 1, 1)))
    return g.build(bias), Candidate(Extension.PROLOGUE, "conv2d", conv, (conv, bias), added)


def scaled(g: GraphBuilder, x: int) -> int:
    """A squeeze-and-excite multiply."""
    return g.multiply(x, g.input("gate", (*g.shape(x)[:2], 1, 1)))


def exponential(g: GraphBuilder, x: int) -> int:
    """An expensive function."""
    return g.node(Kind.EXP, "exp", (x,), g.shape(x))


def gate_case(channels: int, hidden: int) -> tuple[Graph, Candidate]:
    """A squeeze-and-excite gate: two products of one pixel."""
    g = GraphBuilder("float32")
    x = g.input("x", (1, channels, 1, 1))
    first = g.conv2d(x, g.input("w1", (hidden, channels, 1, 1)))
    act = g.multiply(first, g.sigmoid(first))
    second = g.conv2d(act, g.input("w2", (channels, hidden, 1, 1)))
    out = g.sigmoid(second)
    graph = g.build(out)
    before = tuple(range(first, second - 1))
    return graph, Candidate(Extension.ABSORBED, "conv2d", second, (second, out), before)
