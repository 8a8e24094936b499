"""What is said about the end of a kernel, about an operator alone, and about kernels that are not joined."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.chain import grow_chain
from tvm_fuse.core.reason import Code, Stage
from tvm_fuse.core.refusals import alone, cannot_join, end_of, too_long, without_epilogue


@pytest.mark.parametrize(
    ("target", "wanted"), [("cuda", None), ("cpu", "two products"), ("other", "two products")]
)
def test_targets_that_join_a_gate(target, wanted):
    g = GraphBuilder()
    graph = g.build(g.relu(g.input("x", (1, 4))))
    refused = cannot_join(graph.nodes[-1], "gate", target)
    if wanted is None:
        assert refused is None
        return
    stage, reason = refused
    assert (stage, reason.code, reason.got) == (Stage.CONDITION, Code.TARGET_CANNOT_JOIN, target)
    assert wanted in reason.wanted


def test_too_long():
    g = GraphBuilder()
    graph = g.build(g.relu(g.input("x", (1, 4))))
    _, reason = too_long(graph.nodes[-1], 2, 3)
    assert (reason.code, reason.wanted, reason.got) == (Code.CHAIN_TOO_LONG, "at most 2 operators", "3")


ENDS = {
    Code.RESULT_RETURNED: lambda g, y: (y,),
    Code.RESULT_SHARED: lambda g, y: (g.tanh(y), g.sigmoid(y)),
    Code.READER_NOT_ELEMENTWISE: lambda g, y: (g.other("argsort", y),),
}


@pytest.mark.parametrize("code", ENDS)
def test_end_of(code):
    g = GraphBuilder()
    y = g.relu(g.input("x", (1, 4)))
    assert end_of(g.build(*ENDS[code](g, y)), y).code is code


def test_a_layer_before_something_else_has_no_epilogue():
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 4, 5, 5)), np.ones((4, 4, 1, 1)))
    chain = grow_chain(g.build(g.other("nn.max_pool2d", conv)), conv)
    assert chain.end.code is Code.READER_NOT_ELEMENTWISE
    assert without_epilogue(chain).code is Code.CHAIN_NO_EPILOGUE


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda g, x: g.relu(x), "inputs of the model"),
        (lambda g, x: g.relu(g.other("argsort", x)), "argsort cannot join it"),
        (lambda g, x: g.add(g.tanh(x), 1.0), "read elsewhere, too"),
    ],
    ids=["inputs", "a sort", "shared"],
)
def test_alone(make, got):
    g = GraphBuilder()
    last = make(g, g.input("x", (1, 4)))
    other = [g.sigmoid(node.id) for node in g.nodes if node.op == "tanh"]
    graph = g.build(last, *other)
    reason = alone(graph, graph.nodes[last])
    assert reason.code is Code.OPERATOR_ALONE
    assert got in reason.got
