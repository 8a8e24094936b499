"""Kernels in an order, and kernels that cannot be."""

from __future__ import annotations

import random

import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.group import make_group
from tvm_fuse.core.order import Levels, sort_nodes


def crossed():
    """Two pairs of operators, each of which needs one of the other."""
    g = GraphBuilder()
    x, y = g.input("x", (4,)), g.input("y", (4,))
    a, b = g.tanh(x), g.tanh(y)
    c, d = g.relu(a), g.relu(b)
    return g.build(c, d), (a, b, c, d)


def pair(graph, first, second):
    return make_group(graph, None, (first, second), max(first, second), also=(min(first, second),))


def test_a_result_after_what_another_kernel_computes():
    graph, (a, b, c, d) = crossed()
    order = sort_nodes(graph, [pair(graph, a, d)])
    assert sorted(order) == list(range(len(graph.nodes)))
    assert order.index(b) < order.index(a) < order.index(c)
    assert order.index(d) == order.index(a) + 1


def test_no_order():
    graph, (a, b, c, d) = crossed()
    groups = [pair(graph, a, d), pair(graph, b, c)]
    assert sort_nodes(graph, groups) in groups


def test_levels_refuse_what_has_no_order():
    graph, (a, b, c, d) = crossed()
    levels = Levels(graph, ())
    assert levels.join((a,), (d,))
    assert not levels.join((b,), (c,))
    assert levels.join((a, d), (b,)) is False
    assert Levels(graph, ()).join((a,), (b,))


def random_graph(rng, size):
    g = GraphBuilder()
    values = [g.input("x", (4,)), g.input("y", (4,))]
    for _ in range(size):
        one, other = rng.choice(values), rng.choice(values)
        values.append(g.add(one, other) if rng.random() < 0.6 else g.relu(one))
    return g.build(values[-1]), values


@pytest.mark.parametrize("seed", range(20))
def test_levels_know_what_sorting_knows(seed):
    """Kernels of a random graph are joined at random: exactly those joins are refused that leave no order."""
    rng = random.Random(seed)
    graph, _values = random_graph(rng, 24)
    levels = Levels(graph, ())
    kernels = [(node.id,) for node in graph.nodes if node.inputs]
    outcomes = set()
    for _ in range(40):
        first, second = rng.sample(kernels, 2)
        joined = tuple(sorted((*first, *second)))
        rest = [kernel for kernel in kernels if kernel not in (first, second)]
        groups = [make_group(graph, None, nodes, nodes[-1], also=nodes[:-1]) for nodes in (*rest, joined)]
        has_order = isinstance(sort_nodes(graph, groups), tuple)
        is_direct = any(s in second for n in first for s in graph.nodes[n].inputs) or any(
            s in first for n in second for s in graph.nodes[n].inputs
        )
        assert levels.join(first, second) is (has_order and not is_direct)
        outcomes.add(has_order)
        if has_order and not is_direct:
            kernels = [*rest, joined]
        if len(kernels) < 3:
            break
    assert outcomes == {True, False}
