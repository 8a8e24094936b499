"""One batch norm in a core graph: it folds and the outputs stay, or it says why not."""

from __future__ import annotations

from tests.support.graphs import apply_folds
from tests.support.numerics import evaluate, max_error
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import Kind

__all__ = ["assert_folds_into", "kinds", "refusal"]


def assert_folds_into(graph, feeds, *, direction, layers, tolerance):
    """The only batch norm folds into so many layers; returns the folded graph and the record."""
    records, decisions = plan_folds(graph)
    assert [str(decision) for decision in decisions if not decision.applied] == []
    (record,) = records
    assert (record.direction, len(record.layers)) == (direction, layers)
    folded = apply_folds(graph, records)
    assert not folded.of_kind(Kind.BATCH_NORM)
    for got, wanted in zip(evaluate(folded, feeds), evaluate(graph, feeds)):
        assert max_error(got, wanted) <= tolerance
    assert plan_folds(folded) == ((), ())
    return folded, record


def refusal(graph):
    """The reason of the only batch norm, which does not fold."""
    records, (decision,) = plan_folds(graph)
    assert records == ()
    return decision.reason


def kinds(graph):
    """The operators, in order."""
    return [node.kind for node in graph.nodes if node.inputs and node.kind is not Kind.TUPLE]
