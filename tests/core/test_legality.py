"""Every rule of a legal group, each with a group that breaks it and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.group import make_group
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.plan import plan_chains

WEIGHT = np.ones((4, 4, 1, 1))


def build():
    g = GraphBuilder()
    x, r = g.input("x", (1, 4, 2, 2)), g.input("r", (1, 4, 2, 2))
    before = g.exp(x) if hasattr(g, "exp") else g.tanh(x)
    conv = g.conv2d(before, WEIGHT, name="conv")
    beside = g.sigmoid(r)
    add = g.add(conv, beside)
    relu = g.relu(add)
    second = g.conv2d(relu, WEIGHT, name="second")
    wide = g.add(second, g.input("w", (3, 4, 2, 2)))
    pool = g.other("pool", wide)
    dynamic = g.tanh(g.input("d", ("n", 4)))
    tail = g.tanh(g.relu(pool))
    parts = g.concatenate(tail, tail)
    ids = {
        "before": before, "conv": conv, "beside": beside, "add": add, "relu": relu, "second": second,
        "wide": wide, "pool": pool, "dynamic": dynamic, "tail": tail, "parts": parts,
    }  # fmt: skip
    return g.build(parts, g.sigmoid(dynamic), relu), ids


BROKEN = {
    "unknown node": ((999,), None, "operators of the model"),
    "a leaf": ((0,), None, "operators with one result"),
    "dynamic": (("dynamic",), None, "static shapes"),
    "inner result is an output": (("second", "relu"), "second", "read outside"),
    "two anchors": (("conv", "add", "relu", "second"), "second", "elementwise operators after|read outside"),
    "opaque": (("pool", "wide"), None, "elementwise operators alone|an anchor"),
    "anchor of no family": (("pool",), "pool", "an anchor that kernels are built around"),
    "shape changes": (("second", "wide"), "second", "results of the shape"),
    "beside": (("conv", "beside", "add"), "conv", "before or after|can compute with it"),
    "transcendental prologue": (("before", "conv"), "conv", "the target can compute with it"),
    "a tuple from outside": (("parts",), None, "tensors as operands"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case):
    graph, ids = build()
    nodes, anchor, match = BROKEN[case]
    nodes = sorted(ids.get(node, node) for node in nodes)
    anchor = None if anchor is None else ids[anchor]
    result = nodes[-1]
    before = () if anchor is None else tuple(node for node in nodes if node < anchor or node == ids["beside"])
    known = [node for node in nodes if node < len(graph.nodes)]
    made = make_group(graph, anchor, known or [0], (known or [0])[-1])
    group = replace(made, nodes=tuple(nodes), result=result, prologue=before)
    for target in ("cpu", "cuda"):
        with pytest.raises(ModelError, match=match):
            check_groups(graph, [group], target)


def test_unsorted_or_without_result():
    graph, ids = build()
    good = make_group(graph, ids["conv"], (ids["conv"], ids["add"]), ids["add"])
    check_groups(graph, [good])
    for bad in (
        replace(good, nodes=good.nodes[::-1]),
        replace(good, result=ids["relu"]),
        replace(good, anchor=ids["second"]),
        replace(good, prologue=(ids["before"],)),
    ):
        with pytest.raises(ModelError, match="cannot be carried out: group"):
            check_groups(graph, [bad])


def test_overlap():
    graph, ids = build()
    good = make_group(graph, ids["conv"], (ids["conv"], ids["add"]), ids["add"])
    other = make_group(graph, None, (ids["add"], ids["relu"]), ids["relu"])
    with pytest.raises(ModelError, match="which is in two groups"):
        check_groups(graph, [good, other])


def several():
    g = GraphBuilder()
    x, y = g.input("x", (4, 3)), g.input("y", (2, 4, 3))
    a, b, wide = g.tanh(x), g.relu(x), g.sigmoid(y)
    sums = g.add(a, b)
    return g.build(sums, wide, b), {"a": a, "b": b, "wide": wide, "sums": sums}


#: Operators, results and what is wrong with that; empty where nothing is.
SEVERAL = {
    "side by side": (("a", "b"), ("a", "b"), ""),
    "one reads the other": (("b", "a", "sums"), ("b", "sums"), ""),
    "one is not named": (("a", "b"), ("b",), "read outside"),
    "shapes": (("a", "b", "wide"), ("a", "b", "wide"), "tensors of one shape as results"),
    "another operator's": (("a", "b"), ("wide", "b"), "results among its operators"),
    "twice": (("a", "b"), ("b", "b"), "results among its operators"),
}  # fmt: skip


@pytest.mark.parametrize("case", SEVERAL)
def test_several_results(case):
    graph, ids = several()
    nodes, results, match = SEVERAL[case]
    *also, result = (ids[name] for name in results)
    group = make_group(graph, None, [ids[name] for name in nodes], result, also=tuple(also))
    if not match:
        check_groups(graph, [group], "cuda")
        match = "at most 1 of elementwise operators alone"
        with pytest.raises(ModelError, match=match):
            check_groups(graph, [group], "other")
        return
    with pytest.raises(ModelError, match=match):
        check_groups(graph, [group], "cuda")


def test_several_results_around_an_anchor():
    graph, ids = build()
    good = make_group(graph, ids["conv"], (ids["conv"], ids["add"], ids["relu"]), ids["relu"])
    with pytest.raises(ModelError, match="of elementwise operators alone, got 2 results"):
        check_groups(graph, [replace(good, also=(ids["add"],))], "cuda")


def test_a_group_that_needs_itself():
    g = GraphBuilder()
    x = g.input("x", (4,))
    first = g.tanh(x)
    last = g.add(g.other("sort", first), x)
    graph = g.build(last)
    group = make_group(graph, None, (first, last), last, also=(first,))
    with pytest.raises(ModelError, match="groups that can be put in an order"):
        check_groups(graph, [group], "cuda")


def test_exploding_code():
    g = GraphBuilder()
    x = g.input("x", (4,))
    for _ in range(12):
        x = g.multiply(x, g.sigmoid(x))
    graph = g.build(x)
    group = make_group(graph, None, range(1, len(graph.nodes)), x)
    with pytest.raises(ModelError, match="at most 256 evaluations"):
        check_groups(graph, [group])


@pytest.mark.parametrize("target", ["cuda", "cpu", "other"])
def test_what_the_planner_makes_is_legal(target):
    graph, _ = build()
    groups = plan_chains(graph).groups
    assert groups
    check_groups(graph, groups, target)
