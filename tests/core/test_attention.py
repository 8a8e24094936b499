"""Attentions: found in the spellings of exporters, and why each stays three kernels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.attention import Attention, explain_attention, find_attention
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Stage

HEADS, ROWS, SIZE = 4, 32, 16


def product(g, *, rows=ROWS, before=lambda g, y: y, after=lambda g, y: y, softmax=lambda g, y: g.softmax(y)):
    """An attention in a builder: ids of its three heavy operators."""
    queries, keys, values = (
        g.input(name, (HEADS, count, SIZE)) for name, count in (("q", rows), ("k", ROWS), ("v", ROWS))
    )
    scores = g.matmul(queries, keys, kernel="BOI")
    soft = softmax(g, before(g, scores))
    mixed = g.matmul(after(g, soft), values, kernel="BIO")
    return Attention(scores, soft, mixed)


def heads(g, y):
    return g.reshape(y, 1, *g.shape(y))


BETWEEN = {
    "nothing": {},
    "scale": {"before": lambda g, y: g.multiply(y, 0.25)},
    "scale and mask": {"before": lambda g, y: g.add(g.divide(y, 4.0), g.input("mask", (1, 1, ROWS)))},
    "mask first": {"before": lambda g, y: g.add(g.input("mask", (1, 1, ROWS)), y)},
    "a computed mask": {
        "before": lambda g, y: g.add(g.multiply(g.subtract(1.0, g.input("mask", (1, 1, ROWS))), -1e9), y)
    },
    "reshapes and a mask": {
        "before": lambda g, y: g.add(heads(g, y), g.input("mask", (1, 1, 1, ROWS))),
        "after": lambda g, y: g.reshape(y, *g.shape(y)[1:]),
    },
    "dropout's scale and a cast": {"after": lambda g, y: g.cast(g.multiply(y, 1.25), "float32")},
}


@pytest.mark.parametrize("case", BETWEEN)
def test_found(case):
    g = GraphBuilder("float32")
    wanted = product(g, **BETWEEN[case])
    graph = g.build(wanted.mixed)
    assert find_attention(graph, graph.nodes[wanted.softmax]) == wanted


def classifier(g):
    return g.softmax(g.dense(g.input("x", (1, 8)), np.ones((4, 8), "float32")))


def returned(g):
    found = product(g)
    return found.softmax, found.mixed


def pooled(g):
    return product(g, after=lambda g, y: g.other("nn.max_pool1d", y)).mixed


def as_values(g):
    """The softmax is the second operand: not the scores of this product."""
    found = product(g)
    return g.matmul(g.input("other", (HEADS, SIZE, ROWS)), found.softmax, kernel="BIO")


def projected(g):
    """A layer with weights, which is no product of two values."""
    scores = g.matmul(g.input("q", (HEADS, ROWS, SIZE)), g.input("k", (HEADS, ROWS, SIZE)), kernel="BOI")
    return g.dense(g.softmax(scores), np.ones((SIZE, ROWS), "float32"))


def symbolic(g):
    queries, keys, values = (g.input(name, (HEADS, "n", SIZE)) for name in "qkv")
    return g.matmul(g.softmax(g.matmul(queries, keys, kernel="BOI")), values, kernel="BIO")


@pytest.mark.parametrize("make", [classifier, returned, pooled, as_values, projected, symbolic])
def test_not_found(make):
    g = GraphBuilder("float32")
    result = make(g)
    graph = g.build(*(result if isinstance(result, tuple) else (result,)))
    (softmax,) = graph.of_kind(Kind.SOFTMAX)
    assert find_attention(graph, softmax) is None
    assert explain_attention(graph, "cuda") == ()


#: Rows of queries, target, stage, what the reason says.
WHY = [
    pytest.param(
        ROWS, "cuda", Stage.COST,
        ("less read again than one kernel saves, 0.07 MB of scores", "0.51 MB of keys and values"),
        id="many rows",
    ),
    pytest.param(
        1, "cuda", Stage.CONDITION, ("a schedule for two products", "none for cuda; it would save"),
        id="one row",
    ),
    pytest.param(ROWS, "cpu", Stage.CONDITION, ("a schedule for two products", "none for cpu"), id="a CPU"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "target", "stage", "says"), WHY)
def test_why(rows, target, stage, says):
    """Scores: 4 x 32 x 32 x 4 bytes, four times; keys and values: 4 x 32 x 16 x 4 bytes each, 31 times."""
    g = GraphBuilder("float32")
    found = product(g, rows=rows)
    decisions = plan_chains(g.build(found.mixed), PlanOptions(target=target)).not_joined
    assert [decision.node for decision in decisions] == [found.scores, found.softmax, found.mixed]
    (reason,) = {decision.reason for decision in decisions}
    assert (reason.code, {decision.stage for decision in decisions}) == (Code.ATTENTION_IN_PARTS, {stage})
    assert says[0] in reason.wanted
    assert says[1] in reason.got


def test_nothing_is_said_where_nothing_is_fused():
    g = GraphBuilder("float32")
    assert plan_chains(g.build(product(g).mixed), PlanOptions(target="cuda", fuse="none")).not_joined == ()
