"""The fusion plan: which chain takes what, one decision an anchor, and broken plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import Graph, Kind, ReduceAttrs
from tvm_fuse.core.plan import check_plan, plan_chains
from tvm_fuse.core.plan_options import Extension, PlanOptions
from tvm_fuse.core.reason import Code, Reason, Stage

C = 4
ONE_BY_ONE = np.ones((C, C, 1, 1))


def start(batch=1):
    g = GraphBuilder()
    return g, g.input("x", (batch, C, 4, 4))


def names(plan):
    return [group.name for group in plan.groups]


def codes(plan):
    """What was decided about layers: the code of a refusal, or None."""
    layers = [decision for decision in plan.decisions if decision.rule == "chain"]
    return [decision.reason and decision.reason.code for decision in layers]


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
    assert names(plan) == ["dense_bias_mul"]


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
    plan = plan_chains(g.build(g.relu(x)))
    assert (plan.groups, [decision.reason.code for decision in plan.decisions]) == ((), [Code.OPERATOR_ALONE])


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


# --- operators in no chain, and what targets can do -------------------------------------------------


def reasons(plan):
    """Node -> the code of why it is in no group."""
    return {decision.node: decision.reason.code for decision in plan.decisions if not decision.applied}


def test_opaque_operator():
    g, x = start()
    sort = g.other("argsort", x)
    plan = plan_chains(g.build(sort))
    assert reasons(plan) == {sort: Code.OPERATOR_OPAQUE}
    assert plan.decisions[0].stage is Stage.NO_MATCH


def squeeze_excite():
    g, x = start()
    gate = g.input("gate", (1, C, 1, 1))
    scaled = g.multiply(x, gate)
    conv = g.conv2d(scaled, ONE_BY_ONE)
    return g.build(g.relu(conv)), scaled


def test_scale_on_the_way_into_a_convolution():
    graph, scaled = squeeze_excite()
    (group,) = plan_chains(graph, PlanOptions(target="cuda")).groups
    assert (group.name, group.prologue) == ("multiply_conv2d_relu", (scaled,))


def test_a_target_that_cannot():
    graph, scaled = squeeze_excite()
    plan = plan_chains(graph, PlanOptions(target="cpu"))
    assert names(plan) == ["conv2d_relu"]
    assert reasons(plan) == {scaled: Code.TARGET_CANNOT_JOIN}


def test_a_cost_model_may_refuse():
    graph, scaled = squeeze_excite()
    asked = []

    def accept(graph, candidate):
        asked.append(candidate)
        return Reason(Code.FUSION_COSTS_TIME, "here", "less", "more")

    plan = plan_chains(graph, PlanOptions(target="cuda", accept=accept))
    assert names(plan) == ["conv2d_relu"]
    assert [(one.extension, one.added) for one in asked] == [(Extension.PROLOGUE, (scaled,))]
    (refused,) = [decision for decision in plan.decisions if not decision.applied]
    assert (refused.stage, refused.node, refused.reason.code) == (Stage.COST, scaled, Code.FUSION_COSTS_TIME)


def test_layers_choose_before_pools():
    """A pool after a convolution does not take the add from it."""
    g, x = start()
    conv = g.conv2d(x, ONE_BY_ONE)
    pool = g.node(Kind.POOL, "nn.max_pool2d", (x,), g.shape(x))
    plan = plan_chains(g.build(g.add(conv, pool)))
    assert names(plan) == ["conv2d_residual"]


def test_elementwise_operators_together():
    g, x = start()
    left, right = g.relu(g.tanh(x)), g.sigmoid(x)
    total = g.reshape(g.add(left, right), C, 16)
    (group,) = plan_chains(g.build(total)).groups
    assert (group.family, group.anchor, group.result) == ("elementwise", None, total)
    assert len(group.nodes) == 5


def test_views_alone_are_no_kernel():
    g, x = start()
    plan = plan_chains(g.build(g.reshape(g.expand_dims(x, 0), C, 16)))
    assert (plan.groups, plan.decisions) == ((), ())


@pytest.mark.parametrize(("parts", "code"), [(30, None), (31, Code.TOO_MANY_ARGUMENTS)])
def test_too_many_arguments(parts, code):
    g = GraphBuilder()
    values = [g.relu(g.input(f"x{index}", (1, 2))) for index in range(parts)]
    plan = plan_chains(g.build(g.concatenate(*values)))
    assert len(plan.groups) == (code is None)
    assert set(reasons(plan).values()) == ({code} if code else set())


# --- large graphs: no recursion, and work that grows with the graph ----------------------------------


def deep_chain(length):
    g, x = start()
    for index in range(length):
        x = g.relu(x) if index % 2 else g.add(x, g.input(f"r{index}", g.shape(x)))
    return g.build(x)


def residual_network(blocks):
    g, x = start()
    for _ in range(blocks):
        y = g.relu(g.bias_add(g.conv2d(x, ONE_BY_ONE), np.ones(C)))
        x = g.relu(g.add(g.conv2d(y, ONE_BY_ONE), x))
    return g.build(x)


def dense_network(layers):
    """Each layer reads the concatenation of all results before it, as in DenseNet."""
    g, x = start()
    values = [x]
    for _ in range(layers):
        joined = g.concatenate(*values) if len(values) > 1 else x
        weight = np.ones((C, g.shape(joined)[1], 1, 1))
        values.append(g.conv2d(g.relu(joined), weight))
    return g.build(values[-1])


@pytest.mark.parametrize(
    ("make", "size"),
    [(deep_chain, 1000), (residual_network, 50), (dense_network, 40)],
    ids=["elementwise chain", "residual blocks", "DenseNet"],
)
def test_work_grows_with_the_graph(make, size, monkeypatch):
    """Twice the layers: at most 2.5 times the reads of the graph, for each edge of it."""
    reads = []
    plain = Graph.readers
    monkeypatch.setattr(Graph, "readers", lambda self, node: reads.append(node) or plain(self, node))

    def work(graph):
        reads.clear()
        plan_chains(graph, PlanOptions(target="cuda"))
        return len(reads) / (len(graph.nodes) + sum(len(node.inputs) for node in graph.nodes))

    small, large = work(make(size)), work(make(2 * size))
    assert large < 1.25 * small


@pytest.mark.parametrize("target", ["cuda", "cpu", "other"])
def test_moves_into_a_reduction(target):
    g, x = start()
    joined = g.concatenate(g.tanh(x), g.reshape(g.relu(x), *g.shape(x)))
    total = g.node(Kind.REDUCE, "sum", (joined,), (1, 2 * C, 4, 1), ReduceAttrs((3,), True))
    (group,) = plan_chains(g.build(total), PlanOptions(target=target)).groups
    assert (group.name, group.anchor, len(group.prologue)) == ("tanh_relu_concatenate_sum", total, 5)
