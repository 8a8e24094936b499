"""Whatever spelling of a batch norm is drawn, its parameters and epsilon come back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, apply_recompositions
from tests.support.numerics import evaluate, max_error
from tvm_fuse.core.recompose import plan_recompositions

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.spellings import Spelling, norms

SETTINGS = settings(derandomize=True, max_examples=80, deadline=None, database=None)


@SETTINGS
@given(st.data())
def test_any_number_of_them_in_any_spelling(data):
    draw = data.draw
    rank, channels = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    axis = draw(st.integers(1, rank - 1))
    shape = tuple(channels if index == axis else draw(st.integers(1, 4)) for index in range(rank))
    drawn = draw(
        st.lists(st.tuples(norms(channels), st.sampled_from([1e-5, 1e-3, 0.1])), min_size=1, max_size=3)
    )
    g = GraphBuilder()
    values = [g.input("x", shape)]
    for norm, epsilon in drawn:
        values.append(Spelling(draw, g, norm, epsilon, axis, rank).write(values[-1]))
    graph = g.build(values[-1])
    records, decisions = plan_recompositions(graph)
    assert all(decision.applied for decision in decisions)
    assert [(record.data, record.result) for record in records] == list(zip(values, values[1:]))
    for record, (norm, epsilon) in zip(records, drawn):
        assert (record.axis, record.epsilon) == (axis, epsilon)
        for role, vector in norm._asdict().items():
            np.testing.assert_array_equal(getattr(record, role), vector)
    feeds = {"x": np.random.default_rng(0).normal(size=shape)}
    (got,), (want,) = evaluate(apply_recompositions(graph, records), feeds), evaluate(graph, feeds)
    assert max_error(got, want) < 1e-12
