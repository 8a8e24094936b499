"""The fusion plan: which chain takes what, one decision an anchor, and broken plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.plan import FusionPlan, check_plan, plan_chains
from tvm_fuse.core.reason import Code

C = 4
ONE_BY_ONE = np.ones((C, C, 1, 1))


def start(batch=1):
    g = GraphBuilder()
    return g, g.input("x", (batch, C, 4, 4))


def names(plan):
    return [group.name for group in plan.groups]


def codes(plan):
    return [decision.reason and decision.reason.code for decision in plan.decisions]


def test_two_layers():
    g, x = start()
    first = g.conv2d(x, ONE_BY_ONE, name="c1")
    relu = g.relu(g.bias_add(first, np.ones(C)))
    second = g.conv2d(relu, ONE_BY_ONE, name="c2")
    plan = plan_chains(g.build(g.clip(g.add(second, relu))))
    assert names(plan) == ["conv2d_bias_relu", "conv2d_residual_relu6"]
    assert [group.anchor for group in plan.groups] == [first, second]
    assert [group.anchor_name for group in plan.groups] == ["c1", "c2"]
    assert plan.groups[0].operators == ("nn.conv2d", "nn.bias_add", "nn.relu")
    assert [(decision.at, decision.applied) for decision in plan.decisions] == [("c1", True), ("c2", True)]


def test_dense():
    g = GraphBuilder()
    y = g.dense(g.input("x", (2, 8)), np.ones((C, 8)))
    plan = plan_chains(g.build(g.multiply(g.add(y, np.ones(C)), g.sigmoid(g.input("z", (2, C))))))
    assert names(plan) == ["dense_bias_elementwise"]


@pytest.mark.parametrize("swapped", [False, True], ids=["main + shortcut", "shortcut + main"])
def test_downsample_block(swapped):
    """Of two convs added together the later takes the add; the other ends before it."""
    g, x = start()
    main = g.conv2d(g.relu(g.conv2d(x, ONE_BY_ONE, name="a")), ONE_BY_ONE, name="main")
    shortcut = g.conv2d(x, ONE_BY_ONE, name="shortcut")
    added = g.add(shortcut, main) if swapped else g.add(main, shortcut)
    plan = plan_chains(g.build(g.relu(added)))
    assert names(plan) == ["conv2d_relu", "conv2d_residual_relu"]
    assert plan.groups[1].anchor == shortcut
    assert codes(plan) == [None, Code.READER_IN_OTHER_CHAIN, None]
    assert plan.decisions[1].at == "main"


def test_downsample_block_with_biases():
    """The earlier conv keeps its own bias."""
    g, x = start()
    main = g.bias_add(g.conv2d(x, ONE_BY_ONE), np.ones(C))
    shortcut = g.bias_add(g.conv2d(x, ONE_BY_ONE), np.ones(C))
    plan = plan_chains(g.build(g.relu(g.add(main, shortcut))))
    assert names(plan) == ["conv2d_bias", "conv2d_bias_residual_relu"]


def test_conv_that_feeds_an_add_twice_through_two_convs():
    g, x = start()
    stem = g.relu(g.conv2d(x, ONE_BY_ONE))
    left, right = g.conv2d(stem, ONE_BY_ONE), g.conv2d(stem, ONE_BY_ONE)
    plan = plan_chains(g.build(g.add(left, right)))
    assert names(plan) == ["conv2d_relu", "conv2d_residual"]
    assert codes(plan) == [None, Code.READER_IN_OTHER_CHAIN, None]


def test_anchor_with_nothing_after_it():
    g, x = start()
    plan = plan_chains(g.build(g.other("pool", g.conv2d(x, ONE_BY_ONE))))
    assert plan.groups == ()
    assert codes(plan) == [Code.CHAIN_NO_EPILOGUE]


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda g, y: (y,), Code.RESULT_RETURNED),
        (lambda g, y: (g.other("pool", y), g.other("pool", y)), Code.RESULT_SHARED),
        (lambda g, y: (g.add(y, g.input("r", (3, C, 4, 4))),), Code.RESULT_SHAPE_CHANGES),
    ],
    ids=["returned", "shared", "shape"],
)
def test_declined_anchors(make, code):
    g, x = start()
    plan = plan_chains(g.build(*make(g, g.conv2d(x, ONE_BY_ONE))))
    assert (plan.groups, codes(plan)) == ((), [code])


def test_dynamic_shape():
    g, x = start("n")
    plan = plan_chains(g.build(g.relu(g.conv2d(x, ONE_BY_ONE))))
    assert (plan.groups, codes(plan)) == ((), [Code.CHAIN_DYNAMIC_SHAPE])
    assert "nx4x4x4" in plan.decisions[0].reason.got


def test_a_declined_dynamic_anchor_takes_nothing():
    g, x = start()
    static = g.conv2d(x, ONE_BY_ONE)
    dynamic = g.conv2d(g.input("d", ("n", C, 4, 4)), ONE_BY_ONE)
    plan = plan_chains(g.build(g.relu(static), g.relu(dynamic)))
    assert codes(plan) == [None, Code.CHAIN_DYNAMIC_SHAPE]


def test_graph_without_anchors():
    g, x = start()
    assert plan_chains(g.build(g.relu(x))) == FusionPlan((), ())


def test_duplicated_output():
    g, x = start()
    relu = g.relu(g.conv2d(x, ONE_BY_ONE))
    assert names(plan_chains(g.build(relu, relu))) == ["conv2d_relu"]


def test_same_graph_same_plan():
    def build():
        g, x = start()
        for _ in range(4):
            x = g.relu(g.add(g.conv2d(g.relu(g.conv2d(x, ONE_BY_ONE)), ONE_BY_ONE), x))
        return plan_chains(g.build(x))

    assert build() == build()
    assert names(build()) == ["conv2d_relu", "conv2d_residual_relu"] * 4


# --- broken plans --------------------------------------------------------------------------------


def planned():
    g, x = start()
    conv = g.conv2d(x, ONE_BY_ONE)
    relu = g.relu(conv)
    tail = g.tanh(g.other("pool", relu))
    graph = g.build(tail)
    return graph, plan_chains(graph), relu, tail


def test_sound_plan_passes():
    graph, plan, _, _ = planned()
    check_plan(graph, plan)


def test_operator_in_two_groups():
    graph, plan, _, _ = planned()
    with pytest.raises(InternalError, match="two groups"):
        check_plan(graph, replace(plan, groups=plan.groups * 2))


def test_inner_result_read_outside():
    graph, plan, _, tail = planned()
    (group,) = plan.groups
    wider = replace(group, nodes=(*group.nodes, tail), result=tail)
    with pytest.raises(InternalError, match="read outside"):
        check_plan(graph, replace(plan, groups=(wider,)))


def test_inner_result_returned():
    g, x = start()
    conv = g.conv2d(x, ONE_BY_ONE)
    relu = g.relu(conv)
    plan = plan_chains(g.build(relu))
    with pytest.raises(InternalError, match="read outside"):
        check_plan(g.build(relu, conv), plan)
