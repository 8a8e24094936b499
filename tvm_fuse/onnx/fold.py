"""Batch-norm folding on ONNX models, with NumPy and onnx only (the decisions are ``core/fold.py``'s).

::

    Conv(x, W) -> BatchNormalization -> Relu        Conv(x, W_folded, bias) -> Relu
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_fuse.core.affine import AffineRecord
from tvm_fuse.core.fold import RULE, FoldRecord
from tvm_fuse.core.graph import Graph, Kind
from tvm_fuse.core.reason import Code, Decision, Reason, declined
from tvm_fuse.core.rounds import count_rounds, plan_round
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.parts import Parts, put_together, take_apart
from tvm_fuse.onnx.read import OnnxModel
from tvm_fuse.onnx.write import apply_edits

__all__ = ["FoldedModel", "fold_onnx", "fold_parts"]


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
    folds: list[FoldRecord] = []
    runs: list[AffineRecord] = []
    done: list[Decision] = []
    for _ in count_rounds(len(parts.structure.graph.node)):
        read = read_graph(parts)
        planned = plan_round(read.graph)
        if not planned.edits:
            break
        parts = apply_edits(read, planned.edits)
        folds += planned.folds
        runs += planned.runs
        done += planned.applied
    decisions = (*done, *planned.left, *_unread(read.graph))
    return FoldedModel(parts, tuple(folds), tuple(runs), decisions)


def _unread(graph: Graph) -> list[Decision]:
    """A decision for each batch norm of a form that the core has no words for: a vector has no axis 1."""
    wanted = "data of rank 2 or more"
    return [
        declined(RULE, str(node), Reason(Code.BN_AXIS_NOT_CHANNEL, str(node), wanted, str(node.output)))
        for node in graph.of_kind(Kind.OTHER)
        if node.op == "BatchNormalization"
    ]
