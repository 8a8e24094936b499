"""Fold inference batch normalization into the weights of the layers before it, or after it.

::

    y = gamma * (conv(x, W) + b - mean) / sqrt(var + epsilon) + beta
    y = conv(x, W') + b'

    scale = gamma / sqrt(var + epsilon)
    W'    = W * scale            along the output channel of W
    b'    = (b - mean) * scale + beta

A batch norm is a per-channel map ``x * scale + shift``; ``core/backward.py`` pushes it into the layers
that produce its data (through biases, moves, concatenations and residual adds), and where that
cannot be, ``core/forward.py`` into the layers that read its result.

Shapes: gamma, beta, mean, var, b: ``(C,)``; layers and weights as in ``core/weights.py``.

Numerics: everything is computed in float64 and rounded once, W' to the dtype of the weights and
b' to that of the output. With unit roundoff u of that dtype a folded number differs from the exact
one by at most u relative, as long as it is not subnormal in that dtype; such a one differs by half
the smallest subnormal. ``FoldedLayer`` states what that makes of the outputs.

Conditions, by code: ``bn-parameters-not-constant``, ``bn-statistics-used``, ``bn-statistics-not-finite``,
``bn-epsilon-invalid``, ``bn-epsilon-underflow``, ``bn-variance-not-positive``; then those of the two ways.

Source: Ioffe and Szegedy 2015, section 3.1; the algebra is in every text on deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.backward import Absorbed, absorb_backward
from tvm_fuse.core.channelwise import Affine
from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.edit import Direction, Edit, choose_disjoint
from tvm_fuse.core.epsilon import check_epsilon_dtype
from tvm_fuse.core.forward import absorb_forward
from tvm_fuse.core.graph import BatchNormAttrs, Graph, Kind, Node
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined
from tvm_fuse.core.weights import FoldedLayer

__all__ = [
    "RULE",
    "BatchNorm",
    "FoldRecord",
    "audit_statistics",
    "fold_bias",
    "fold_scale",
    "plan_folds",
    "read_batch_norm",
]

RULE = "fold-batch-norm"
#: Of normalizations that cannot be folded by their nature; not counted as batch norms.
DATA_NORM_RULE = "fold-data-norm"


@dataclass(frozen=True)
class BatchNorm:
    """The numbers of one batch normalization, float64, each of shape ``(C,)``.

    ``gamma`` is 1 and ``beta`` 0 where the operator says that it does not scale or shift,
    whatever its constants hold.
    """

    node: int
    name: str
    epsilon: float
    gamma: Array = field(compare=False, repr=False)
    beta: Array = field(compare=False, repr=False)
    mean: Array = field(compare=False, repr=False)
    variance: Array = field(compare=False, repr=False)


@dataclass(frozen=True)
class FoldRecord:
    """One batch norm folded into the layers before or after it.

    Args:
        batch_norm: Id of the batch norm.
        name: Where it came from.
        epsilon: The epsilon that was used.
        variance_min: Smallest variance.
        gain_max: Largest ``abs(scale)``.
        direction: Where the layers are.
        layers: The layers, with digests of their weights and the bound on the rounding error.
        edit: What changes in the graph.
    """

    batch_norm: int
    name: str
    epsilon: float
    variance_min: float
    gain_max: float
    direction: Direction
    layers: tuple[FoldedLayer, ...]
    edit: Edit = field(compare=False, repr=False)

    @property
    def anchor_name(self) -> str:
        """Names of the layers, for people."""
        return ", ".join(layer.name for layer in self.layers)


# --- formula ---------------------------------------------------------------------------------


def fold_scale(bn: BatchNorm) -> Array:
    """``gamma / sqrt(var + epsilon)``, float64 ``(C,)``."""
    with np.errstate(over="ignore", invalid="ignore"):  # refused when the weights are made
        scale: Array = bn.gamma / np.sqrt(bn.variance + bn.epsilon)
    return scale


def fold_bias(bn: BatchNorm, bias: Array | None) -> Array:
    """``(b - mean) * scale + beta``, float64 ``(C,)``; ``bias=None`` means 0."""
    shifted = -bn.mean if bias is None else bias.astype(np.float64) - bn.mean
    with np.errstate(over="ignore", invalid="ignore"):  # refused when the weights are made
        return shifted * fold_scale(bn) + bn.beta


# --- conditions ------------------------------------------------------------------------------


def read_batch_norm(graph: Graph, node: Node) -> BatchNorm | Reason:
    """Read the numbers of a batch norm, or say which of them is not a constant.

    gamma and beta are not read where the operator does not use them.
    """
    attrs: BatchNormAttrs = node.attrs
    unused = {"gamma": None if attrs.scale else 1.0, "beta": None if attrs.center else 0.0}
    values: dict[str, Array] = {}
    for role, source in zip(("mean", "variance", "gamma", "beta"), (*node.inputs[3:5], *node.inputs[1:3])):
        fill = unused.get(role)
        if fill is not None:
            values[role] = np.full_like(values["mean"], fill)
            continue
        array = graph.exact(source)
        if array is None:
            got = f"{role} computed by {graph.nodes[source]}"
            return Reason(Code.BN_PARAMETERS_NOT_CONSTANT, str(node), "constant parameters", got)
        values[role] = array.reshape(-1)
    return BatchNorm(node.id, str(node), attrs.epsilon, **values)


def audit_statistics(bn: BatchNorm) -> Reason | None:
    """Check epsilon and statistics: finite, and variance + epsilon above zero.

    Returns:
        The first problem, with channel and value, or None.
    """
    if not np.isfinite(bn.epsilon) or bn.epsilon < 0:
        return Reason(Code.BN_EPSILON_INVALID, bn.name, "a finite epsilon >= 0", repr(bn.epsilon))
    for role in ("gamma", "beta", "mean", "variance"):
        bad = np.flatnonzero(~np.isfinite(getattr(bn, role)))
        if bad.size:
            got = f"{role}[{bad[0]}] = {getattr(bn, role)[bad[0]]} ({bad.size} of {bn.mean.size} channels)"
            return Reason(Code.BN_STATISTICS_NOT_FINITE, bn.name, "finite statistics", got)
    bad = np.flatnonzero((bn.variance < 0) | (bn.variance + bn.epsilon <= 0))
    if bad.size:
        got = f"variance[{bad[0]}] = {bn.variance[bad[0]]:g}, epsilon = {bn.epsilon:g} ({bad.size} channels)"
        return Reason(Code.BN_VARIANCE_NOT_POSITIVE, bn.name, "variance >= 0 and variance + epsilon > 0", got)
    return None


def _normalized_outputs(graph: Graph, bn: Node) -> tuple[int, ...] | Reason:
    """The ids that take the normalized output out of the tuple, when nothing else is read."""
    items = [graph.nodes[reader] for reader in graph.readers(bn.id)]
    others = [item for item in items if item.kind is not Kind.GET_ITEM or item.attrs != 0]
    if items and not others and not graph.is_output(bn.id):
        return tuple(item.id for item in items)
    got = ", ".join(f"{item} reads output {item.attrs}" for item in others)
    got = got or ("the whole tuple is returned" if graph.is_output(bn.id) else "no reader")
    return Reason(Code.BN_STATISTICS_USED, str(bn), "only the normalized output in use", got)


def _epsilon_fits(graph: Graph, node: Node) -> Reason | None:
    """The dtype that the batch norm is computed in must be able to hold epsilon."""
    return check_epsilon_dtype(str(node), node.attrs.epsilon, graph.nodes[node.inputs[4]].output.dtype)


# --- construction ----------------------------------------------------------------------------


def plan_folds(graph: Graph) -> tuple[tuple[FoldRecord, ...], tuple[Decision, ...]]:
    """Fold every batch norm that can be folded.

    Args:
        graph: The graph; it is not changed.

    Returns:
        The records to apply, none of which touches what another one touches, and a decision for every
        batch norm and every normalization of data. What has to wait for another record (a batch
        norm after a batch norm, two around one layer) gets none in this round and folds in the next.
    """
    records: list[FoldRecord] = []
    decisions: list[Decision] = []
    outcomes = {node.id: _fold_one(graph, node) for node in graph.of_kind(Kind.BATCH_NORM)}
    found = {node: record for node, record in outcomes.items() if isinstance(record, FoldRecord)}
    chosen = choose_disjoint({node: record.edit for node, record in found.items()})
    for node in graph.of_kind(Kind.BATCH_NORM, Kind.DATA_NORM):
        outcome = outcomes.get(node.id)
        if outcome is None:
            reason = Reason(Code.NORMALIZATION_OF_DATA, str(node), "statistics that are constants", node.op)
            decisions.append(declined(DATA_NORM_RULE, str(node), reason))
        elif isinstance(outcome, Reason):
            decisions.append(declined(RULE, str(node), outcome))
        elif node.id in chosen:
            records.append(outcome)
            detail = f"into {outcome.anchor_name}, epsilon {outcome.epsilon:.9g}"
            decisions.append(applied(RULE, str(node), detail))
    return tuple(records), tuple(decisions)


def _fold_one(graph: Graph, node: Node) -> FoldRecord | Reason:
    bn = read_batch_norm(graph, node)
    if isinstance(bn, Reason):
        return bn
    results = _normalized_outputs(graph, node)
    if isinstance(results, Reason):
        return results
    reason = audit_statistics(bn) or _epsilon_fits(graph, node)
    if reason is not None:
        return reason
    scale = fold_scale(bn)
    affine = Affine(scale, fold_bias(bn, None))
    data, axes = node.inputs[0], (node.attrs.axis,)
    before = absorb_backward(graph, data, node.id, axes, affine, bn.name)
    if not isinstance(before, Reason):
        return _record(bn, scale, before, dict.fromkeys(results, data))
    after = absorb_forward(graph, results, axes, affine, bn.name)
    if not isinstance(after, Reason):
        return _record(bn, scale, after, dict.fromkeys(results, data))
    return _more_useful(before, after, is_first=graph.nodes[data].kind is Kind.INPUT)


def _more_useful(before: Reason, after: Reason, *, is_first: bool) -> Reason:
    """Of the reasons why neither way works, the one that says most.

    What is before comes first, unless it is just no layer and what is after says more, or there is
    nothing before.
    """
    if before.code is not Code.BN_PRODUCER_UNSUPPORTED or after.code is Code.RESULT_RETURNED:
        return before
    return after if is_first or after.code is not Code.BN_READER_UNSUPPORTED else before


def _record(bn: BatchNorm, scale: Array, absorbed: Absorbed, results: Mapping[int, int]) -> FoldRecord:
    return FoldRecord(
        batch_norm=bn.node,
        name=bn.name,
        epsilon=bn.epsilon,
        variance_min=float(bn.variance.min()),
        gain_max=float(np.abs(scale).max()),
        direction=absorbed.direction,
        layers=absorbed.folded,
        edit=absorbed.edit(results),
    )
