"""Rounds of folding: what both rules do to a graph at once, until there is nothing left to do.

A front end reads its IR, asks for a round, carries out its edits and starts again. What has to
wait for something else (the second of two batch norms in a row) folds in a later round.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_fuse.core.affine import AffineRecord, plan_affine_folds
from tvm_fuse.core.edit import Edit, choose_disjoint
from tvm_fuse.core.fold import FoldRecord, plan_folds
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.reason import Decision

__all__ = ["MOST_ROUNDS", "Round", "plan_round"]

#: Batch norms in a row fold one a round; a longer row than this is not a model.
MOST_ROUNDS = 64


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
