"""Fold inference batch normalization into the weights of the layer before it.

::

    y = gamma * (conv(x, W) + b - mean) / sqrt(var + epsilon) + beta
    y = conv(x, W') + b'

    scale = gamma / sqrt(var + epsilon)
    W'    = W * scale            along the output channel of W
    b'    = (b - mean) * scale + beta

Shapes: gamma, beta, mean, var, b: ``(C,)``; W in any layout whose output channel is one axis,
blocked or not; a depthwise kernel whose two channel axes together make the output channel; or a
transposed kernel, where the output channel is the group and the position in it.

Numerics: everything is computed in float64 and rounded once, W' to the dtype of the weights and
b' to that of the output. With unit roundoff u of that dtype a folded number differs from the exact
one by at most u relative, as long as it is not subnormal in that dtype; such a one differs by half
the smallest subnormal.

Conditions, by code: ``bn-producer-unsupported``, ``bn-after-activation``,
``bn-parameters-not-constant``, ``bn-statistics-used``, ``bn-axis-not-channel``,
``bn-statistics-not-finite``, ``bn-epsilon-invalid``, ``bn-variance-not-positive``,
``anchor-output-shared``, ``anchor-output-returned``, ``weight-not-constant``,
``weight-layout-unsupported``, ``fold-overflow``.

Source: Ioffe and Szegedy 2015, section 3.1; the algebra is in every text on deployment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.activations import ACTIVATIONS, Apply
from tvm_fuse.core.graph import (
    ANCHOR_KINDS,
    Array,
    BatchNormAttrs,
    ConvAttrs,
    Graph,
    Kind,
    Node,
)
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined
from tvm_fuse.core.weights import absorb, channel_axis, channel_vector

__all__ = [
    "BatchNorm",
    "FoldRecord",
    "audit_statistics",
    "fold_bias",
    "fold_scale",
    "plan_folds",
    "read_batch_norm",
]

RULE = "fold-batch-norm"

_ACTIVATION_KINDS = frozenset(
    spelling.kind for record in ACTIVATIONS for spelling in record.spellings if isinstance(spelling, Apply)
) - {Kind.ADD, Kind.MULTIPLY, Kind.DIVIDE}


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
    """One batch norm folded into one anchor.

    Args:
        anchor: Id of the convolution or dense layer.
        batch_norm: Id of the batch norm.
        results: Ids of the values to replace (the normalized output, once for each time it is taken
            out of the tuple).
        anchor_name: Where the anchor came from.
        name: Where the batch norm came from.
        epsilon: The epsilon that was used.
        variance_min: Smallest variance.
        gain_max: Largest ``abs(scale)``.
        had_bias: Whether an older bias was merged.
        weight_before: Digest of the weight before folding.
        weight_after: Digest of the folded weight.
        weight: The folded weight, shape and dtype of the old one.
        bias: The folded bias, shape ``(C,)``, dtype of the anchor's output (float16 weights may
            accumulate in float32).
    """

    anchor: int
    batch_norm: int
    results: tuple[int, ...]
    anchor_name: str
    name: str
    epsilon: float
    variance_min: float
    gain_max: float
    had_bias: bool
    weight_before: str
    weight_after: str
    weight: Array = field(compare=False, repr=False)
    bias: Array = field(compare=False, repr=False)


# --- formula ---------------------------------------------------------------------------------


def fold_scale(bn: BatchNorm) -> Array:
    """``gamma / sqrt(var + epsilon)``, float64 ``(C,)``."""
    scale: Array = bn.gamma / np.sqrt(bn.variance + bn.epsilon)
    return scale


def fold_bias(bn: BatchNorm, bias: Array | None) -> Array:
    """``(b - mean) * scale + beta``, float64 ``(C,)``; ``bias=None`` means 0."""
    shifted = -bn.mean if bias is None else bias.astype(np.float64) - bn.mean
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
        array = graph.constant(source)
        if array is None:
            got = f"{role} computed by {graph.nodes[source]}"
            return Reason(Code.BN_PARAMETERS_NOT_CONSTANT, str(node), "constant parameters", got)
        values[role] = array.astype(np.float64).reshape(-1)
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


@dataclass(frozen=True)
class _Producer:
    """The anchor before a batch norm and the bias between them (``(C,)`` or None)."""

    anchor: Node
    bias: Array | None


def _find_producer(graph: Graph, bn: Node) -> _Producer | Reason:
    """Walk up from the batch norm: at most one constant per-channel add, then the anchor."""
    source = graph.nodes[bn.inputs[0]]
    bias: Array | None = None
    reason = _only_reader(graph, source, bn)
    if reason is not None:
        return reason
    if source.kind in (Kind.ADD, Kind.BIAS_ADD):
        split = _split_bias(graph, source)
        if split is not None:
            bias, anchor = split
            reason = _only_reader(graph, anchor, source)
            if reason is not None:
                return reason
            source = anchor
    if source.kind in ANCHOR_KINDS:
        return _Producer(source, bias)
    code = Code.BN_AFTER_ACTIVATION if source.kind in _ACTIVATION_KINDS else Code.BN_PRODUCER_UNSUPPORTED
    return Reason(code, str(bn), "a convolution or dense layer (with or without bias) before it", source.op)


def _split_bias(graph: Graph, add: Node) -> tuple[Array, Node] | None:
    """A per-channel constant and the anchor it is added to, if ``add`` is that."""
    for value, other in (add.inputs, add.inputs[::-1]):
        anchor, constant = graph.nodes[value], graph.constant(other)
        if anchor.kind in ANCHOR_KINDS and constant is not None:
            vector = channel_vector(add, anchor, constant)
            if vector is not None:
                return vector, anchor
    return None


def _only_reader(graph: Graph, value: Node, reader: Node) -> Reason | None:
    """Nobody else may read a value that folding changes."""
    if value.kind not in ANCHOR_KINDS | {Kind.ADD, Kind.BIAS_ADD}:
        return None
    wanted = f"{reader} as the only reader"
    if graph.is_output(value.id):
        return Reason(Code.ANCHOR_OUTPUT_RETURNED, str(value), wanted, "a model output")
    others = [str(graph.nodes[node]) for node in graph.readers(value.id) if node != reader.id]
    if others or len(graph.readers(value.id)) > 1:
        got = f"{len(graph.readers(value.id))} readers; also {', '.join(others) or reader}"
        return Reason(Code.ANCHOR_OUTPUT_SHARED, str(value), wanted, got)
    return None


def _axis_is_channel(bn: Node, anchor: Node) -> Reason | None:
    channel = channel_axis(anchor)
    if bn.attrs.axis == channel:
        return None
    where = f" of {anchor.attrs.out_layout}" if isinstance(anchor.attrs, ConvAttrs) else ""
    wanted = f"axis {channel}{where}" if channel is not None else "one unblocked channel axis"
    return Reason(Code.BN_AXIS_NOT_CHANNEL, str(bn), wanted, f"axis {bn.attrs.axis}{where}")


# --- construction ----------------------------------------------------------------------------


def plan_folds(graph: Graph) -> tuple[tuple[FoldRecord, ...], tuple[Decision, ...]]:
    """Fold every batch norm that can be folded.

    Args:
        graph: The graph; it is not changed.

    Returns:
        The records to apply, and one decision for every batch norm. A batch norm after
        another one is declined in this round and folds in the next.
    """
    records: list[FoldRecord] = []
    decisions: list[Decision] = []
    for node in graph.of_kind(Kind.BATCH_NORM):
        outcome = _fold_one(graph, node)
        if isinstance(outcome, Reason):
            decisions.append(declined(RULE, str(node), outcome))
            continue
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
    producer = _find_producer(graph, node)
    if isinstance(producer, Reason):
        return producer
    anchor = producer.anchor
    reason = _axis_is_channel(node, anchor) or audit_statistics(bn)
    if reason is not None:
        return reason
    return _construct(graph, bn, producer, results)


def _construct(
    graph: Graph, bn: BatchNorm, producer: _Producer, results: tuple[int, ...]
) -> FoldRecord | Reason:
    anchor = producer.anchor
    with np.errstate(over="ignore", invalid="ignore"):
        scale, bias = fold_scale(bn), fold_bias(bn, producer.bias)
    layer = absorb(graph, anchor, scale, bias, bn.name)
    if isinstance(layer, Reason):
        return layer
    return FoldRecord(
        anchor=anchor.id,
        batch_norm=bn.node,
        results=results,
        anchor_name=str(anchor),
        name=bn.name,
        epsilon=bn.epsilon,
        variance_min=float(bn.variance.min()),
        gain_max=float(np.abs(scale).max()),
        had_bias=producer.bias is not None,
        weight_before=layer.weight_before,
        weight_after=layer.weight_after,
        weight=layer.weight,
        bias=layer.bias,
    )
