"""Elementwise kernels that read one value become one with several results, or a reason says why not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.accept import accept_on
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason, Stage
from tvm_fuse.core.targets import DEVICES

SHAPE = (1, 32, 14, 14)
A100 = PlanOptions(target="cuda", accept=accept_on(DEVICES["a100"]))
CPU = PlanOptions(target="cpu")


def weight(*shape):
    return np.ones(shape, "float32")


def start():
    g = GraphBuilder("float32")
    return g, g.input("x", SHAPE)


def through_another(g, x):
    first = g.tanh(x)
    return [first, g.add(x, g.other("sort", first))]


def later(g, x):
    """One reads what is computed later: it can wait for that."""
    return [g.tanh(x), g.add(x, g.other("sort", g.other("sort", x)))]


def crossed(g, x):
    """Two pairs read x and y, but one of each needs one of the other: only one pair can be joined."""
    y = g.other("sort", x)
    a, b = g.tanh(x), g.tanh(y)
    c, d = g.add(y, g.other("sort", a)), g.add(x, g.other("sort", b))
    return [a, b, c, d]


#: What reads x, and how many results the joined kernels have.
CASES = {
    "two": (lambda g, x: [g.tanh(x), g.sigmoid(x)], [2]),
    "three, one of two operators": (lambda g, x: [g.tanh(x), g.sigmoid(x), g.relu(g.negative(x))], [3]),
    "nine": (lambda g, x: [g.clip(x, 0.0, float(most)) for most in range(9)], [8]),
    "eighteen": (lambda g, x: [g.clip(x, 0.0, float(most)) for most in range(18)], [8, 8, 2]),
    "later": (later, [2]),
    "crossed": (crossed, [2]),
    "one kernel": (lambda g, x: [g.multiply(x, g.sigmoid(x))], []),
    "one needs the other": (lambda g, x: (lambda y: [y, g.add(x, y)])(g.tanh(x)), []),
    "one needs the other through an operator": (through_another, []),
    "other shapes": (lambda g, x: [g.tanh(x), g.add(x, np.ones((2, 1, 1, 1), "float32"))], []),
    "a layer computes one": (lambda g, x: [g.tanh(x), g.add(g.conv2d(x, weight(32, 32, 1, 1)), x)], []),
    "one moves": (lambda g, x: [g.tanh(x), g.transpose(g.relu(x), 0, 1, 3, 2)], []),
    "a small value": (
        lambda g, x: (lambda s: [g.add(g.other("sort", x), s), g.multiply(g.other("sort", x), s)])(
            g.input("scale", (1, 32, 1, 1))
        ),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [pytest.param(A100, id="cuda"), pytest.param(CPU, id="cpu")])
def test_readers(case, options):
    read, counts = CASES[case]
    g, x = start()
    plan = plan_chains(g.build(*read(g, x)), options)
    joined = [group for group in plan.groups if group.also]
    assert sorted((len(group.results) for group in joined), reverse=True) == counts
    for group in joined:
        assert group.anchor is None
        decisions = [decision for decision in plan.decisions if decision.node == group.result]
        assert [decision.applied for decision in decisions] == [True]


def test_a_shared_value_twice():
    """Kernels joined for one value are one kernel where they share another."""
    g, x = start()
    y = g.input("y", SHAPE)
    plan = plan_chains(g.build(g.add(x, y), g.multiply(x, y), g.tanh(y)), A100)
    assert [len(group.results) for group in plan.groups] == [3]


def test_refused_by_the_cost_model():
    g, x = start()
    refusal = Reason(Code.FUSION_COSTS_TIME, "here", "less", "more")
    graph = g.build(g.tanh(x), g.sigmoid(x))
    plan = plan_chains(graph, PlanOptions(target="cuda", accept=lambda graph, candidate: refusal))
    assert plan.groups == ()
    assert [(d.node, d.stage, d.reason) for d in plan.not_joined] == [
        (node, Stage.COST, refusal) for node in graph.outputs
    ]


LIMITS = {
    "of the target": (PlanOptions(target="other"), Code.SEVERAL_RESULTS, "at most 1 results of a kernel"),
    "of the user": (PlanOptions(target="cuda", max_ops=1), Code.CHAIN_TOO_LONG, "at most 1 operators"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(case):
    options, code, wanted = LIMITS[case]
    g, x = start()
    plan = plan_chains(g.build(g.tanh(x), g.sigmoid(x)), options)
    assert plan.groups == ()
    assert {decision.reason.code for decision in plan.not_joined} == {code}
    assert all(wanted in decision.reason.wanted for decision in plan.not_joined)


def test_too_many_tensors():
    g, x = start()
    sums = []
    for count in range(2):
        value = x
        for index in range(130):
            value = g.add(value, g.input(f"{count} {index}", SHAPE))
        sums.append(value)
    many = plan_chains(g.build(*sums), PlanOptions(target="cuda"))
    assert {decision.reason.code for decision in many.not_joined} == {Code.CHAIN_TOO_LONG}


DEEP = {
    "pairs": lambda g, x: g.add(g.tanh(g.other("sort", x)), g.sigmoid(x)),
    "pairs with a second operand": lambda g, x: g.add(g.other("sort", g.tanh(x)), g.other("sort", g.relu(x))),
    "one read by all": lambda g, x: g.add(g.other("sort", x), 0),
}


@pytest.mark.parametrize("case", DEEP)
def test_deep_graphs_in_time(case):
    g, x = start()
    for _ in range(500):
        x = DEEP[case](g, x)
    graph = g.build(x)
    begin = time.process_time()
    plan_chains(graph, A100)
    assert time.process_time() - begin < 2
