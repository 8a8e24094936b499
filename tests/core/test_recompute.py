"""Cheap values that several kernels read are computed again in each, or a decision says why not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.accept import accept_on, compare_group
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason, Stage
from tvm_fuse.core.targets import DEVICES

SHAPE = (1, 32, 14, 14)
A100 = PlanOptions(target="cuda", accept=accept_on(DEVICES["a100"]))
CPU = PlanOptions(target="cpu")


def start():
    g = GraphBuilder("float32")
    return g, g.other("sort", g.input("x", SHAPE))


def conv(g, x, kernel=1, name="conv"):
    padding = (kernel // 2, kernel // 2)
    return g.conv2d(x, np.ones((8, 32, kernel, kernel), "float32"), padding=padding, name=name)


def turned(g, x):
    """A kernel of its own, of other shape."""
    return g.transpose(g.tanh(x), 0, 2, 3, 1)


def two_layers(g, x):
    value = g.relu(x)
    return [value], [conv(g, value), g.relu(conv(g, value, 3))]


def two_of_two_operators(g, x):
    scaled = g.multiply(x, g.input("gate", (1, 32, 1, 1)))
    value = g.relu(scaled)
    return [scaled, value], [conv(g, value), conv(g, value, 3)]


def one_after_another(g, x):
    """The first value is read by a layer and by the second one, which two kernels compute."""
    first = g.relu(x)
    second = g.add(first, 1.0)
    return [first, second], [conv(g, first), conv(g, second), conv(g, second, 3)]


def two_elementwise(g, x):
    value = g.relu(x)
    return [value], [turned(g, value), g.add(value, g.input("r", (2, 32, 14, 14)))]


def added(g, x):
    value = g.relu(x)
    return [value], [g.add(g.conv2d(x, np.ones((32, 32, 1, 1), "float32")), value), conv(g, value)]


#: How often each value is computed on CUDA and on a CPU; 1 where it is a kernel of its own.
CASES = {
    "two layers": (two_layers, 2, 1),
    "two operators": (two_of_two_operators, 2, 1),
    "one after another": (one_after_another, [3, 2], 1),
    "two elementwise kernels": (two_elementwise, 2, 2),
    "an output": (lambda g, x: (lambda v: ([v], [v, conv(g, v), conv(g, v, 3)]))(g.relu(x)), 1, 1),
    "not cheap": (lambda g, x: (lambda v: ([v], [conv(g, v), conv(g, v, 3)]))(g.tanh(x)), 1, 1),
    "read by an operator of no kernel": (
        lambda g, x: (lambda v: ([v], [conv(g, v), conv(g, v, 3), g.other("sort", v)]))(g.relu(x)), 1, 1,
    ),
    "added to a layer's result": (added, 1, 1),
    "five operators": (
        lambda g, x: (lambda v: ([v], [conv(g, v), conv(g, v, 3)]))(
            g.relu(g.add(g.relu(g.add(g.negative(x), 1.0)), 2.0))
        ), 1, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_how_often(case, target):
    read, on_cuda, on_cpu = CASES[case]
    g, x = start()
    values, outputs = read(g, x)
    graph = g.build(*outputs)
    plan = plan_chains(graph, PlanOptions(target=target))
    check_groups(graph, plan.groups, target)
    wanted = on_cuda if target == "cuda" else on_cpu
    wanted = wanted if isinstance(wanted, list) else [wanted] * len(values)
    again = [sum(value in group.recomputed for group in plan.groups) for value in values]
    assert again == [0 if count == 1 else count for count in wanted]
    decided = {decision.node for decision in plan.decisions}
    assert decided.union(*(group.nodes for group in plan.groups)).issuperset(values)


def test_a_lone_layer_gets_a_group_instead_of_its_decision():
    g, x = start()
    _, outputs = two_layers(g, x)
    plan = plan_chains(g.build(*outputs), A100)
    assert [decision.applied for decision in plan.decisions if decision.node == outputs[0]] == [True]


REFUSED = {
    "not cheap": (
        lambda g, v: g.tanh(v),
        A100,
        "operators of one or two instructions, for 2 kernels",
        "(tanh)",
    ),
    "the target": (lambda g, v: g.relu(v), CPU, "2 kernels that can compute it", "conv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_written(case):
    make, options, wanted, got = REFUSED[case]
    g, x = start()
    value = make(g, x)
    plan = plan_chains(g.build(conv(g, value), conv(g, value, 3)), options)
    (decision,) = [decision for decision in plan.not_joined if decision.node == value]
    assert (decision.rule, decision.stage, decision.matched) == ("recompute", Stage.CONDITION, 2)
    assert decision.reason.code is Code.VALUE_WRITTEN
    assert wanted in decision.reason.wanted
    assert got in decision.reason.got


def test_refused_by_the_cost_model_of_one_reader():
    """One of two would lose: then both read it."""
    g, x = start()
    value = g.relu(x)
    few, many = conv(g, value, name="few"), conv(g, value, 3, name="many")
    graph = g.build(few, many)
    refusal = Reason(Code.FUSION_COSTS_TIME, "here", "less", "more")
    seen = []

    def accept(graph, candidate):
        seen.append((candidate.anchor, candidate.kernels))
        return refusal if candidate.anchor == many else None

    plan = plan_chains(graph, PlanOptions(target="cuda", accept=accept))
    assert seen == [(few, 2), (many, 2)]
    assert plan.groups == ()
    assert [(d.node, d.stage, d.reason) for d in plan.not_joined] == [(value, Stage.COST, refusal)]


def test_what_the_devices_say():
    """Before many rows with nine taps each an operator is computed too often; before few rows it pays."""
    for rows, is_again in ((16, True), (2048, False)):
        g = GraphBuilder("float32")
        x = g.other("sort", g.input("x", (1, 256, 28, 28)))
        value = g.relu(g.multiply(g.add(x, 1.0), g.input("gate", (1, 256, 1, 1))))
        layers = [g.conv2d(value, np.zeros((rows, 256, 3, 3), "float32"), padding=(1, 1)) for _ in range(2)]
        plan = plan_chains(g.build(*layers), A100)
        assert any(value in group.recomputed for group in plan.groups) is is_again
        stages = [(d.stage, d.reason.code) for d in plan.not_joined if d.node == value]
        assert stages == ([] if is_again else [(Stage.COST, Code.FUSION_COSTS_TIME)])


def test_readers_that_became_one_kernel_compute_the_value_themselves():
    g, x = start()
    value = g.sigmoid(x)
    plan = plan_chains(g.build(g.tanh(value), g.relu(value)), A100)
    assert [(len(group.nodes), len(group.results), group.recomputed) for group in plan.groups] == [(3, 2, ())]


def test_each_kernel_saves_its_share():
    g, x = start()
    _, outputs = two_layers(g, x)
    graph = g.build(*outputs)
    groups = plan_chains(graph, A100).groups
    launches = [compare_group(graph, group, {group.recomputed[0]: 2}).apart[0].launches for group in groups]
    assert launches == [0.5, 0.5]


@pytest.mark.parametrize("skip", ["chain0", "chain1"])
def test_a_kernel_that_is_left_out_leaves_the_value_to_itself(skip):
    g, x = start()
    (value,), outputs = two_layers(g, x)
    graph = g.build(*outputs)
    plan = plan_chains(graph, PlanOptions(target="cuda", skip=(skip,)))
    assert value in [group.result for group in plan.alone]
    assert [group.recomputed for group in plan.groups] == [(value,)]


def test_deep_graphs_in_time():
    """Every value is read by two kernels: the next one, and one at its side."""
    g, x = start()
    outputs = []
    for index in range(600):
        x = g.relu(g.add(g.other("sort", x), float(index)))
        outputs.append(turned(g, x))
        x = g.transpose(x, 0, 1, 3, 2)
    graph = g.build(*outputs, x)
    begin = time.process_time()
    plan_chains(graph, A100)
    assert time.process_time() - begin < 2
