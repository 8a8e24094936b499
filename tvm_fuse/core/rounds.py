"""Rounds of folding: what both rules do to a graph at once, until there is nothing left to do.

A front end reads its IR, asks for a round, carries out its edits and starts again. What has to
wait for something else (the second of two batch norms in a row) folds in a later round.

There is an end: an edit takes a batch norm, a scale or a shift out of the graph; all that it may add is the
bias of a layer, which moves on only towards the outputs. So there are no more rounds than operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm_fuse.core.affine import AffineRecord, plan_affine_folds
from tvm_fuse.core.edit import Edit, choose_disjoint
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.fold import FoldRecord, plan_folds
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.reason import Decision

__all__ = ["Round", "count_rounds", "plan_round"]


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        folds: Batch norms to fold.
        runs: Other scales and shifts to fold.
        applied: Decisions for both, in order.
        left: Decisions about what cannot be folded, as the graph is now.
    """

    folds: tuple[FoldRecord, ...]
    runs: tuple[AffineRecord, ...]
    applied: tuple[Decision, ...]
    left: tuple[Decision, ...]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What to change; no two edits touch the same node."""
        return (*(fold.edit for fold in self.folds), *(run.edit for run in self.runs))


def count_rounds(operators: int) -> Iterator[int]:
    """The numbers of the rounds, for a loop that stops when there is nothing left to do.

    Args:
        operators: Of the model before the first round.

    Raises:
        InternalError: In a round more than there can be: some rule undoes what another one did.
    """
    yield from range(operators + 1)
    raise InternalError(f"folding does not end: {operators + 1} rounds for {operators} operators")


def plan_round(graph: Graph) -> Round:
    """Plan one round of both rules; where they want the same node, folding into a layer before goes first."""
    folds, about_folds = plan_folds(graph)
    runs, about_runs = plan_affine_folds(graph)
    edits = (*(fold.edit for fold in folds), *(run.edit for run in runs))
    chosen = choose_disjoint(dict(enumerate(edits)))
    applied = [decision for decision in (*about_folds, *about_runs) if decision.applied]
    return Round(
        tuple(fold for index, fold in enumerate(folds) if index in chosen),
        tuple(run for index, run in enumerate(runs, len(folds)) if index in chosen),
        tuple(decision for index, decision in enumerate(applied) if index in chosen),
        tuple(decision for decision in (*about_folds, *about_runs) if not decision.applied),
    )
