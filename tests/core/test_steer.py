"""Steering: patterns keep and leave out groups, what is left out stays apart, and a typing error is named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code

WEIGHT = np.ones((4, 4, 1, 1))


def graph():
    g = GraphBuilder()
    x = g.input("x", (1, 4, 2, 2))
    for name in ("stem", "body"):
        x = g.relu(g.bias_add(g.conv2d(x, WEIGHT, name=name), np.ones(4)))
    return g.build(g.tanh(g.sigmoid(g.other("pool", x))))


def plan(**options):
    return plan_chains(graph(), PlanOptions(**options))


CASES = {
    "nothing": ({}, ["chain0", "chain1", "chain2"]),
    "only by id": ({"only": ("chain1",)}, ["chain1"]),
    "only by glob": ({"only": ("conv2d*",)}, ["chain0", "chain1"]),
    "only by anchor": ({"only": ("stem", "tanh*")}, ["chain0", "chain2"]),
    "skip by id": ({"skip": ("chain0",)}, ["chain1", "chain2"]),
    "skip by name": ({"skip": ("sigmoid_tanh",)}, ["chain0", "chain1"]),
    "skip wins": ({"only": ("conv2d*",), "skip": ("body",)}, ["chain0"]),
    "none": ({"fuse": "none"}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_patterns(case):
    options, kept = CASES[case]
    found = plan(**options)
    assert [group.id for group in found.groups] == kept
    everything = {node for group in plan().groups for node in group.nodes}
    grouped = {node for group in found.groups for node in group.nodes}
    assert {group.nodes for group in found.alone} == {(node,) for node in everything - grouped}
    left = [d for d in found.decisions if d.reason and d.reason.code is Code.LEFT_OUT_BY_USER]
    assert len(left) == len(found.alone)


@pytest.mark.parametrize("option", ["only", "skip"])
def test_a_pattern_that_fits_nothing_names_the_nearest(option):
    with pytest.raises(UsageError, match=rf"{option}: 'chian1' fits none of the 3 groups") as error:
        plan(**{option: ("chain0", "chian1")})
    assert "chain1" in error.value.hint


@pytest.mark.parametrize("most", [1, 2, 3])
def test_max_ops(most):
    sizes = [len(group.nodes) for group in plan(max_ops=most).groups]
    assert max(sizes, default=1) == most
