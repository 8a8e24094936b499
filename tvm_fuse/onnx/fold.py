"""Batch-norm folding on ONNX models, with NumPy and onnx only (the decisions are ``core/fold.py``'s).

::

    Conv(x, W) -> BatchNormalization -> Relu        Conv(x, W_folded, bias) -> Relu
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from tvm_fuse.core.affine import AffineRecord, plan_affine_folds
from tvm_fuse.core.fold import RULE, FoldRecord, plan_folds
from tvm_fuse.core.graph import Graph, Kind
from tvm_fuse.core.reason import Code, Decision, Reason, declined
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.parts import Parts, put_together, take_apart
from tvm_fuse.onnx.read import OnnxModel
from tvm_fuse.onnx.write import apply_edits

__all__ = ["FoldedModel", "fold_onnx", "fold_parts"]

#: Batch norms in a row fold one a round; a longer row than this is not a model.
_MAX_ROUNDS = 64


@dataclass(frozen=True)
class FoldedModel:
    """An ONNX model after folding.

    Args:
        parts: The new model; the same inputs and outputs as before.
        folds: The batch norms that were folded, in order; the node ids are those of their round.
        affine_folds: Other scales and shifts that were folded.
        decisions: What became of each batch norm and of each scale and shift next to a layer.
    """

    parts: Parts = field(compare=False, repr=False)
    folds: tuple[FoldRecord, ...]
    affine_folds: tuple[AffineRecord, ...]
    decisions: tuple[Decision, ...]

    @property
    def proto(self) -> Any:
        """The new model as an ``onnx.ModelProto``, made anew each time."""
        return put_together(self.parts)


def fold_onnx(model: OnnxModel) -> FoldedModel:
    """``fold_parts`` of a model as ``read_onnx`` returns it; it is not changed."""
    return fold_parts(take_apart(model.proto))


def fold_parts(parts: Parts) -> FoldedModel:
    """Fold every batch norm that can be folded, whole or in pieces, into the layers around it.

    Args:
        parts: A valid model in inference mode, taken apart; it is not changed.

    Returns:
        The folded model. Only branches and loop bodies are left as they are.

    Raises:
        ModelError: The shapes of the model cannot be inferred.
    """
    norms = _Outcome(plan_folds)
    pieces = _Outcome(plan_affine_folds)
    for _ in range(_MAX_ROUNDS):
        before = parts
        parts = pieces.run(norms.run(parts))
        if parts is before:
            break
    decisions = (*norms.decisions, *_unread(read_graph(parts).graph), *pieces.decisions)
    return FoldedModel(parts, tuple(norms.records), tuple(pieces.records), decisions)


def _unread(graph: Graph) -> list[Decision]:
    """A decision for each batch norm of a form that the core has no words for: a vector has no axis 1."""
    wanted = "data of rank 2 or more"
    return [
        declined(RULE, str(node), Reason(Code.BN_AXIS_NOT_CHANNEL, str(node), wanted, str(node.output)))
        for node in graph.of_kind(Kind.OTHER)
        if node.op == "BatchNormalization"
    ]


class _Outcome:
    """What the rounds of one rule came to.

    Args:
        plan: The rule: the records to apply to a graph, and its decisions.
    """

    def __init__(self, plan: Callable[[Graph], tuple[Sequence[Any], Sequence[Decision]]]) -> None:
        self._plan = plan
        self._done: list[Decision] = []
        self._open: list[Decision] = []
        self.records: list[Any] = []

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was done in all rounds, then what the last round left."""
        return (*self._done, *self._open)

    def run(self, parts: Parts) -> Parts:
        """One round; the same parts when there was nothing to do."""
        read = read_graph(parts)
        records, decisions = self._plan(read.graph)
        self.records.extend(records)
        self._done.extend(decision for decision in decisions if decision.applied)
        self._open = [decision for decision in decisions if not decision.applied]
        return apply_edits(read, [record.edit for record in records]) if records else parts
