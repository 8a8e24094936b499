"""Rounds of both rules: what goes first, what waits, and that there is an end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, apply_folds, random_norm
from tests.support.numerics import evaluate, max_error
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.rounds import count_rounds, plan_round

C = 4
RNG = np.random.default_rng(0)


def conv(g, x, **attrs):
    return g.conv2d(x, RNG.normal(size=(C, C, 3, 3)), **attrs)


def fold(graph):
    """Rounds to the end; returns the last graph, the directions in order, and what is left."""
    directions = []
    for _ in count_rounds(len(graph.nodes)):
        planned = plan_round(graph)
        if not planned.edits:
            break
        assert len(planned.applied) == len(planned.edits)
        directions.append([edit.direction for edit in planned.edits])
        graph = apply_folds(graph, (*planned.folds, *planned.runs))
    return graph, directions, planned.left


def test_pieces_after_a_layer_go_before_a_batch_norm_before_it():
    """The other way round, the padded layer would get a map over its output, and the pieces would stay."""
    g = GraphBuilder()
    x = g.input("x", (1, C, 5, 5))
    y = conv(g, g.norm(x, random_norm(C)), padding=(1, 1))
    scale, shift = RNG.normal(size=(2, C, 1, 1))
    graph = g.build(g.add(g.multiply(y, scale), shift))
    folded, directions, left = fold(graph)
    assert directions == [[Direction.BEFORE], [Direction.AFTER]]
    assert left == ()
    assert [node.kind for node in folded.nodes if node.inputs] == [Kind.CONV2D, Kind.ADD]
    feeds = {"x": RNG.normal(size=(1, C, 5, 5))}
    assert max_error(*evaluate(folded, feeds), *evaluate(graph, feeds)) < 1e-12


def test_what_needs_no_order_goes_in_one_round():
    g = GraphBuilder()
    y = g.norm(conv(g, g.input("x", (1, C, 9, 9))), random_norm(C))
    y = g.multiply(conv(g, g.relu(y)), RNG.normal(size=(C, 1, 1)))
    _, directions, _ = fold(g.build(g.relu(y)))
    assert directions == [[Direction.BEFORE, Direction.BEFORE]]


@pytest.mark.parametrize("length", [5, 80])
def test_a_row_takes_a_round_each_and_ends(length):
    g = GraphBuilder()
    y = conv(g, g.input("x", (1, C, 5, 5)))
    for seed in range(length):
        y = g.norm(y, random_norm(C, seed))
    folded, directions, left = fold(g.build(y))
    assert [len(round) for round in directions] == [1] * length
    assert (folded.of_kind(Kind.BATCH_NORM), left) == ((), ())


def test_rounds_without_an_end_are_a_bug_that_is_told():
    rounds = count_rounds(2)
    assert [next(rounds) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InternalError, match="folding does not end: 3 rounds for 2 operators"):
        next(rounds)


def test_nothing_to_do():
    g = GraphBuilder()
    planned = plan_round(g.build(g.relu(g.norm(g.relu(g.input("x", (1, C, 5, 5))), random_norm(C)))))
    assert (planned.folds, planned.runs, planned.applied, planned.edits) == ((), (), (), ())
    assert len(planned.left) == 1
