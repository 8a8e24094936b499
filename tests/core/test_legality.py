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


def read_twice():
    g = GraphBuilder()
    x = g.input("x", (1, 4, 2, 2))
    low = g.add(x, 1.0)
    value = g.relu(low)
    first, second = g.conv2d(value, WEIGHT, name="first"), g.tanh(value)
    names = {"low": low, "value": value, "first": first, "second": second}
    return g.build(first, g.transpose(second, 0, 2, 3, 1)), names


#: Operators of the layer's group, what it computes again, and what is wrong with that.
AGAIN = {
    "both": ("low value first", "low value", ""),
    "the last": ("value first", "value", ""),
    "an operand that it alone computes": ("low value first", "value", "operands from outside, or computed"),
    "the anchor": ("value first", "value first", "neither anchors nor results"),
    "another's": ("first", "value", "operators of its own to compute again"),
    "not named": ("low value first", "", "read outside"),
    "beside it": ("low value first second", "low value second", "which it does not read"),
}


@pytest.mark.parametrize("case", AGAIN)
def test_computed_again(case):
    graph, ids = read_twice()
    nodes, again, match = AGAIN[case]
    nodes, again = (tuple(ids[name] for name in part.split()) for part in (nodes, again))
    before = tuple(node for node in nodes if node != ids["first"])
    layer = make_group(graph, ids["first"], nodes, ids["first"], prologue=before, recomputed=again)
    if match:
        with pytest.raises(ModelError, match=match):
            check_groups(graph, [layer], "cuda")
        return
    check_groups(graph, [layer], "cuda")
    owner = make_group(graph, None, [ids[name] for name in ("low", "value", "second")], ids["second"],
                       recomputed=again)  # fmt: skip
    if case == "the last":
        low_inside = make_group(graph, None, [ids["low"], ids["value"]], ids["value"])
        with pytest.raises(ModelError, match="operands in memory"):
            check_groups(graph, [layer, low_inside], "cuda")
    if case == "both":
        check_groups(graph, [layer, owner], "cuda")
        with pytest.raises(ModelError, match="read outside it"):
            check_groups(graph, [replace(owner, recomputed=())], "cuda")


def test_computed_again_from_its_own_result():
    g = GraphBuilder()
    x = g.input("x", (4,))
    low = g.negative(x)
    result = g.relu(low)
    later = g.tanh(g.other("sort", result))
    graph = g.build(g.sigmoid(later))
    group = make_group(graph, None, [low, result, later], result, recomputed=(later,))
    with pytest.raises(ModelError, match="which it does not read"):
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
