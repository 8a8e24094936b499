"""Parts of a plan: each is legal, each fuses more than the one before, and no operator is lost."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.rungs import NOTHING, partial_plan, rungs_by_chain, rungs_by_step

WEIGHT = np.ones((4, 4, 1, 1))


def graph():
    """conv+bias+relu, conv+bias+residual+relu, gate+conv (a prologue on CUDA), add+sigmoid+tanh."""
    g = GraphBuilder()
    x = g.input("x", (1, 4, 2, 2))
    first = g.relu(g.bias_add(g.conv2d(x, WEIGHT, name="a"), np.ones(4)))
    second = g.relu(g.add(g.bias_add(g.conv2d(first, WEIGHT, name="b"), np.ones(4)), first))
    third = g.bias_add(
        g.conv2d(g.multiply(second, g.input("gate", (1, 4, 1, 1))), WEIGHT, name="c"), np.ones(4)
    )
    return g.build(g.tanh(g.sigmoid(g.add(g.other("pool", third), second))))


def names(rung):
    return [(group.id, group.name) for group in rung.plan.groups]


def test_by_step():
    found = graph()
    plan = plan_chains(found, PlanOptions(target="cuda"))
    rungs = rungs_by_step(found, plan)
    assert [rung.name for rung in rungs] == [
        NOTHING, "+ bias", "+ activation", "+ residual", "+ elementwise", "whole plan",
    ]  # fmt: skip
    assert names(rungs[1]) == [(f"chain{i}", "conv2d_bias") for i in range(3)]
    assert names(rungs[2])[0] == ("chain0", "conv2d_bias_relu")
    assert names(rungs[3])[1] == ("chain1", "conv2d_bias_residual_relu")
    assert names(rungs[4])[2:] == [("chain2", "conv2d_bias"), ("chain3", "add_sigmoid_tanh")]
    assert rungs[5].plan is plan
    assert [rung.added for rung in rungs] == [
        (), ("chain0", "chain1", "chain2"), ("chain0",), ("chain1",), ("chain3",), ("chain2",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slices", "rungs"),
    [
        (1, ["+ chain0 to chain3"]),
        (2, ["+ chain0 to chain1", "+ chain2 to chain3"]),
        (3, ["+ chain0 to chain1", "+ chain2 to chain3"]),
        (9, ["+ chain0", "+ chain1", "+ chain2", "+ chain3"]),
    ],
)
def test_by_chain(slices, rungs):
    found = graph()
    plan = plan_chains(found, PlanOptions(target="cuda"))
    made = rungs_by_chain(found, plan, slices)
    assert [rung.name for rung in made] == [NOTHING, *rungs]
    assert made[-1].plan.groups == plan.groups
    assert [group for rung in made for group in rung.added] == [group.id for group in plan.groups]


def test_every_rung_is_legal_and_leaves_no_operator_to_tvm():
    found = graph()
    plan = plan_chains(found, PlanOptions(target="cuda"))
    for rung in (*rungs_by_step(found, plan)[:-1], *rungs_by_chain(found, plan, 4)):
        kernels = (*rung.plan.groups, *rung.plan.alone)
        check_groups(found, kernels, "cuda")
        covered = [node for group in kernels for node in group.nodes]
        computing = [
            n.id for n in found.nodes if n.op.split(".")[0] not in ("input", "constant", "pool", "var")
        ]
        assert sorted(covered) == [node for node in computing if node in covered]
        operators = {"nn.conv2d", "nn.bias_add", "nn.relu", "add", "multiply", "sigmoid", "tanh"}
        assert {n.id for n in found.nodes if n.op in operators} == set(covered)


def test_a_plan_without_groups():
    found = graph()
    empty = partial_plan(found, ())
    assert [rung.name for rung in rungs_by_step(found, empty)] == [NOTHING, "whole plan"]
    assert [rung.name for rung in rungs_by_chain(found, empty, 3)] == [NOTHING]
