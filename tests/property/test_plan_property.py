"""Invariants of fusion plans over random graphs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.capabilities import CAPABILITIES
from tvm_fuse.core.graph import (
    ANCHOR_KINDS,
    ELEMENTWISE_KINDS,
    INJECTIVE_KINDS,
    LEAF_KINDS,
    VIEW_KINDS,
    Graph,
    Kind,
)
from tvm_fuse.core.plan import check_plan, plan_chains
from tvm_fuse.core.plan_options import PlanOptions

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings
from hypothesis import strategies as st

SETTINGS = settings(derandomize=True, max_examples=150, deadline=None, database=None)
SHAPE = (1, 2, 2, 2)
WEIGHT = np.ones((2, 2, 1, 1))

UNARY = {
    "conv2d": lambda g, a: g.conv2d(a, WEIGHT),
    "bias_add": lambda g, a: g.bias_add(a, np.ones(2)),
    "relu": lambda g, a: g.relu(a),
    "clip": lambda g, a: g.clip(a),
    "sigmoid": lambda g, a: g.sigmoid(a),
    "shift": lambda g, a: g.add(a, 3.0),
    "sixth": lambda g, a: g.divide(a, 6.0),
    "exp": lambda g, a: g.elementwise("exp", a),
    "pool": lambda g, a: g.other("pool", a),
    "silu": lambda g, a: g.multiply(a, g.sigmoid(a)),
    "there and back": lambda g, a: g.reshape(g.reshape(a, *reversed(SHAPE)), *SHAPE),
}
BINARY = {
    "add": lambda g, a, b: g.add(a, b),
    "multiply": lambda g, a, b: g.multiply(a, b),
    "subtract": lambda g, a, b: g.subtract(a, b),
}
#: operator, how far back its operands lie, whether the result is an output
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*UNARY, *UNARY, *BINARY]), st.integers(0, 3), st.integers(0, 6), st.integers(0, 9)
    ),
    min_size=1,
    max_size=25,
)


def build(steps) -> Graph:
    g = GraphBuilder()
    values = [g.input("x", SHAPE)]
    outputs = []
    for op, near, far, output in steps:
        a, b = values[-1 - near % len(values)], values[-1 - far % len(values)]
        values.append(UNARY[op](g, a) if op in UNARY else BINARY[op](g, a, b))
        if output == 0:
            outputs.append(values[-1])
    return g.build(*outputs, values[-1])


def ancestors(graph: Graph, node: int) -> set[int]:
    seen: set[int] = set()
    stack = [node]
    while stack:
        for source in graph.nodes[stack.pop()].inputs:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


DOWNSAMPLE = [("conv2d", 0, 0, 1), ("conv2d", 1, 0, 1), ("add", 0, 1, 1), ("relu", 0, 0, 1)]


@SETTINGS
@example(DOWNSAMPLE, "cuda")
@given(STEPS, st.sampled_from(sorted(CAPABILITIES)))
def test_invariants(steps, target):
    graph = build(steps)
    plan = plan_chains(graph, PlanOptions(target=target))
    check_plan(graph, plan, target)
    owned = [node for group in plan.groups for node in group.owned]
    assert len(owned) == len(set(owned))
    again = {node for group in plan.groups for node in group.recomputed}
    assert again.isdisjoint(owned)
    for node in again:  # by every kernel that needs it
        readers = [set(graph.readers(node)).intersection(group.nodes) for group in plan.groups]
        assert all(node in group.nodes for group, found in zip(plan.groups, readers) if found)
        assert set(graph.readers(node)) == set().union(*readers)
    taken = [*owned, *again]

    # Every operator is in one group, or one decision says why it is in none.
    refused = [decision.node for decision in plan.decisions if not decision.applied]
    decided = sorted(node for node in (*taken, *refused) if graph.nodes[node].kind not in VIEW_KINDS)
    assert decided == [node.id for node in graph.nodes if node.kind not in {*LEAF_KINDS, *VIEW_KINDS}]
    assert sum(decision.applied for decision in plan.decisions) == len(plan.groups)
    assert all((decision.reason is None) is decision.applied for decision in plan.decisions)
    for group in plan.groups:
        check_group(graph, group)


def check_group(graph, group):
    nodes = set(group.nodes)
    kinds = {node: graph.nodes[node].kind for node in nodes}
    anchors = [node for node in nodes if kinds[node] in ANCHOR_KINDS]
    assert anchors == ([] if group.anchor is None else [group.anchor])
    assert all(kinds[node] in INJECTIVE_KINDS for node in nodes - {group.anchor})
    assert len(nodes) > 1
    assert group.end is not None
    assert group.operators == tuple(graph.nodes[node].op for node in group.nodes)
    inner = set(group.owned) - set(group.results)
    assert not inner.intersection(graph.outputs)
    assert all(reader in nodes for node in inner for reader in graph.readers(node))
    # Convex: nothing outside lies between two members.
    outside = {source for node in nodes for source in graph.nodes[node].inputs} - nodes
    assert not any(ancestors(graph, source).intersection(group.owned) for source in outside)
    if group.anchor is None:
        return
    after = {node for step in group.steps for node in step.nodes}
    assert nodes == after | {group.anchor} | set(group.prologue)
    assert all(group.anchor in ancestors(graph, node) for node in after)
    assert set(group.prologue) <= ancestors(graph, group.anchor)


@SETTINGS
@given(STEPS)
def test_same_graph_same_plan(steps):
    assert plan_chains(build(steps)) == plan_chains(build(steps))


@SETTINGS
@given(STEPS)
def test_no_chain_stops_short(steps):
    """A chain ends only where its reason holds: a lone elementwise reader of the same shape would join."""
    graph = build(steps)
    plan = plan_chains(graph)
    taken = {node for group in plan.groups for node in group.nodes}
    for group in plan.groups:
        result = group.result
        readers = set(graph.readers(result))
        if graph.is_output(result) or len(readers) != 1:
            continue
        (reader,) = readers
        assert reader in taken or graph.nodes[reader].kind not in ELEMENTWISE_KINDS


def test_the_random_graphs_reach_fusion():
    """Guards the strategy: plain stacks of its operators do fuse."""
    graph = build(
        [("conv2d", 0, 0, 1), ("bias_add", 0, 0, 1), ("silu", 0, 0, 1), ("pool", 0, 0, 1), *DOWNSAMPLE]
    )
    assert [group.name for group in plan_chains(graph).groups] == ["conv2d_bias_silu", "conv2d_residual_relu"]
    assert len(graph.of_kind(Kind.CONV2D)) == 3
