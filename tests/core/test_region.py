"""Regions: what joins, what a second reader keeps out, and where the walk ends."""

from __future__ import annotations

import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import INJECTIVE_KINDS, Kind
from tvm_fuse.core.region import MOST_EVALUATIONS, find_region, find_slices

SHAPE = (2, 3)
KINDS = INJECTIVE_KINDS | {Kind.TUPLE}


def region(g, result, *outputs, **options):
    graph = g.build(*(outputs or (result,)))
    return find_region(graph, (result,), graph.nodes[result].inputs, lambda n: n.kind in KINDS, **options)


@pytest.fixture
def start():
    g = GraphBuilder()
    return g, g.input("x", SHAPE), g.input("y", SHAPE)


def test_both_operands_join(start):
    g, x, y = start
    a, b = g.relu(x), g.tanh(y)
    assert region(g, g.add(a, b)) == (a, b)


def test_diamond(start):
    g, x, _ = start
    a = g.relu(x)
    gate = g.sigmoid(a)
    assert region(g, g.multiply(a, gate)) == (a, gate)


def test_a_value_that_others_read_stays_out(start):
    g, x, _ = start
    a = g.relu(x)
    b = g.tanh(a)
    result = g.sigmoid(b)
    assert region(g, result, result, g.other("sort", a)) == (b,)
    assert region(g, result, result, b) == ()


def test_moves_and_their_tuple(start):
    g, x, y = start
    a, b = g.relu(x), g.reshape(y, *SHAPE)
    joined = g.concatenate(a, b)
    assert region(g, g.relu(joined)) == (a, b, joined - 1, joined)


def test_a_tuple_that_is_shared_keeps_its_reader_out(start):
    g, x, y = start
    joined = g.concatenate(g.relu(x), y)
    assert region(g, g.relu(joined), g.other("pack", joined - 1), joined + 1) == ()


@pytest.mark.parametrize("length", [MOST_EVALUATIONS, MOST_EVALUATIONS + 50])
def test_a_long_chain_is_cut(start, length):
    g, x, _ = start
    for _ in range(length):
        x = g.tanh(x)
    assert len(region(g, x)) == MOST_EVALUATIONS - 1


def test_nested_diamonds_count_for_what_they_cost(start):
    """TVM computes the innermost of n nested ``x * sigmoid(x)`` 2^n times."""
    g, x, _ = start
    for _ in range(12):
        x = g.multiply(x, g.sigmoid(x))
    found = region(g, x)
    assert 8 < len(found) < 16
    assert len(region(g, x, most=8)) < len(found)


def test_each_operator_is_visited_once(start):
    """No growth but with the number of operators, for a graph that has exponentially many paths."""
    g, x, _ = start
    for _ in range(200):
        x = g.add(x, x)
    calls = []
    graph = g.build(x)
    find_region(graph, (x,), graph.nodes[x].inputs, lambda node: calls.append(node.id) or True, 10**80)
    assert len(calls) == len(set(calls)) == 200


def test_slices_that_nobody_else_reads():
    g = GraphBuilder("float32")
    x, y = g.input("x", (4,)), g.input("y", (2,))
    own, shared, returned = (g.node(Kind.SLICE, "strided_slice", (x,), (2,)) for _ in range(3))
    total = y
    members = []
    for part in (own, shared, returned, g.relu(y)):
        total = g.add(total, part)
        members.append(total)
    graph = g.build(total, returned, g.tanh(shared))
    assert find_slices(graph, members) == (own,)
