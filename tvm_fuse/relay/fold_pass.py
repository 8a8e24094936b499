"""Batch-norm folding and epsilon alignment on Relay (the decisions are ``core/fold.py``'s).

::

    %1 = nn.conv2d(%x, W)                          %1 = nn.conv2d(%x, W')
    %2 = add(%1, b)                  (optional)    %2 = add(%1, b')
    %3 = nn.batch_norm(%2, ...);  %3.0

``b'`` is a constant of the rank of the convolution's output, ``(1, C, 1, 1)`` for NCHW: the form
that keeps ``nn.bias_add``'s later rewrite out of fused kernels. Runs before TVM's
SimplifyInference, which dissolves ``nn.batch_norm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable

from tvm_fuse.core.affine import RULE as AFFINE_RULE
from tvm_fuse.core.audit import compare_epsilons, mismatch
from tvm_fuse.core.edit import Edit, LayerEdit
from tvm_fuse.core.epsilon import (
    EpsilonCheck,
    EpsilonConfig,
    EpsilonOrigin,
    ExpectedEpsilon,
    resolve_expected,
)
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.fold import RULE
from tvm_fuse.core.graph import Kind, Node
from tvm_fuse.core.reason import Decision, Reason, applied, declined, refusal
from tvm_fuse.core.rounds import count_rounds, plan_round
from tvm_fuse.core.statistics import collect_warnings
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.constant_pass import fold_constants
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import ReadFunction, source_name
from tvm_fuse.relay.recompose_pass import recompose_batch_norms
from tvm_fuse.relay.record import PassRecord, last_report, record
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_expression, rebuild_function, renamed

__all__ = ["align_epsilon", "fold_batch_norms"]


def fold_batch_norms(module: Any) -> Any:
    """Fold every batch norm that can be folded, whole or in pieces, in all functions of a module.

    Args:
        module: A Relay module with its parameters bound as constants.

    Returns:
        The type-inferred module; ``last_report()["FoldBatchNorm"]`` tells about the batch norms,
        ``last_report()["FoldScaleShift"]`` about other scales and shifts after a layer. Batch norms written
        as operators are recovered first (``recompose_batch_norms``).
    """
    module = fold_constants(_name_batch_norms(recompose_batch_norms(module, again=True)))
    warnings, operators = _inspect(module)
    norms, runs = _Outcome(), _Outcome()
    for _ in count_rounds(operators):
        module, changed = _fold_round(module, norms, runs)
        if not changed:
            break
    left = sum(decision.rule == RULE for decision in norms.left)
    summary = f"{len(norms.records)} of {len(norms.records) + left} batch norms folded"
    record(replace(norms.as_record("FoldBatchNorm", summary), warnings=warnings))
    summary = f"{len(runs.records)} other scales and shifts folded"
    record(runs.as_record("FoldScaleShift", summary))
    return module


def _inspect(module: Any) -> tuple[tuple[Reason, ...], int]:
    """Warnings about the batch norms of a module, and the number of its operators and constants."""
    warnings: list[Reason] = []
    sizes: list[int] = []

    def inspect(read: ReadFunction) -> Any:
        warnings.extend(collect_warnings(read.graph))
        sizes.append(len(read.graph.nodes))
        return read.function

    rewrite_functions(module, inspect)
    return tuple(warnings), sum(sizes)


@dataclass
class _Outcome:
    """What the rounds of one rule came to; ``left`` is what the last round left."""

    records: list[Any] = field(default_factory=list)
    done: list[Decision] = field(default_factory=list)
    left: list[Decision] = field(default_factory=list)

    def as_record(self, name: str, summary: str) -> PassRecord:
        return PassRecord(name, summary, bool(self.records), (*self.done, *self.left), tuple(self.records))


def _fold_round(module: Any, norms: _Outcome, runs: _Outcome) -> tuple[Any, bool]:
    """Apply what is planned for the module as it is now."""
    norms.left, runs.left = [], []

    def rewrite(read: ReadFunction) -> Any:
        planned = plan_round(read.graph)
        norms.records += planned.folds
        runs.records += planned.runs
        for decision in planned.applied:
            (runs if decision.rule == AFFINE_RULE else norms).done.append(decision)
        for decision in planned.left:
            (runs if decision.rule == AFFINE_RULE else norms).left.append(decision)
        return _apply_edits(read, planned.edits)

    return rewrite_functions(module, rewrite)


def _name_batch_norms(module: Any) -> Any:
    """Write the names that ``read_function`` makes up into the graph, so that folding keeps them."""

    def rewrite(read: ReadFunction) -> Any:
        unnamed = [n for n in read.graph.of_kind(Kind.BATCH_NORM) if not source_name(read.expressions[n.id])]
        return rebuild_function(read, {node.id: renamed(read, node, node.name) for node in unnamed})

    return rewrite_functions(module, rewrite)[0]


def _apply_edits(read: ReadFunction, edits: tuple[Edit, ...]) -> Any:
    replacements: dict[int, Replacement] = {}
    for edit in edits:
        replacements.update((layer.anchor, _layer(read, layer)) for layer in edit.layers)
        replacements.update((value, _alias(other)) for value, other in edit.aliases.items())
    return rebuild_function(read, replacements)


def _layer(read: ReadFunction, edit: LayerEdit) -> Replacement:
    """The layer with its new weight, and its bias added to it."""
    anchor = read.graph.nodes[edit.anchor]
    expr = read.expressions[edit.anchor]
    dtype = read.graph.nodes[anchor.inputs[1]].output.dtype

    def construct(new: Callable[[int], Any]) -> Any:
        layer = rebuild_expression(expr, [new(anchor.inputs[0]), constant(edit.weight, dtype)])
        if edit.bias is None:
            return layer
        bias = constant(edit.bias, anchor.output.dtype)
        return relay.Call(relay.op.get("add"), [layer, bias], None, None, expr.span)

    return construct


def _alias(value: int) -> Replacement:
    return lambda new: new(value)


# --- epsilon ---------------------------------------------------------------------------------


def align_epsilon(
    module: Any,
    source: Mapping[str, ExpectedEpsilon],
    user: Mapping[str, float],
    *,
    align: bool,
    config: EpsilonConfig | None = None,
) -> Any:
    """Compare each batch norm's epsilon with the expected one; correct it when told to, else fail.

    Args:
        module: A Relay module.
        source: Name of each batch norm of the model file -> its epsilon there; may be empty.
        user: Name or glob pattern -> the epsilon that the user says the model was trained with.
        align: Whether the expected value replaces a different one.
        config: The training config.

    Returns:
        The type-inferred module, in which batch norms written as operators are batch norms as well;
        ``last_report()["AlignEpsilon"]`` tells what was found.

    Raises:
        ModelError: An epsilon differs and ``align`` is False, or a batch norm of the source is
            not in the module.
        UsageError: A name or pattern of the user or the config fits no batch norm.
    """
    module = _name_batch_norms(recompose_batch_norms(module))
    source = {**_recovered(), **source}
    names = _batch_norm_names(module)
    lost = sorted(set(source) - set(names))
    if lost:
        raise ModelError(
            f"{len(lost)} batch norm(s) of the model file did not reach the graph: {', '.join(lost[:5])}",
            "the importer changed the model; its epsilon cannot be checked",
        )
    expected = resolve_expected(names, source, user, config)
    checks: list[EpsilonCheck] = []
    decisions: list[Decision] = []

    def rewrite(read: ReadFunction) -> Any:
        replacements: dict[int, Replacement] = {}
        for node, check in compare_epsilons(read.graph, expected, align=align).items():
            checks.append(check)
            if check.matches:
                continue
            if not align:
                decisions.append(declined("align-epsilon", check.name, mismatch(check)))
                continue
            detail = f"{check.in_graph:.9g} -> {check.used:.9g}"
            decisions.append(applied("align-epsilon", check.name, detail))
            replacements[node] = _with_epsilon(read, read.graph.nodes[node], check.used)
        return rebuild_function(read, replacements)

    module, changed = rewrite_functions(module, rewrite)
    summary = f"{len(checks)} epsilons compared, {sum(check.matches for check in checks)} as expected"
    record(PassRecord("AlignEpsilon", summary, changed, tuple(decisions), tuple(checks)))
    differing = [decision.reason for decision in decisions if decision.reason is not None]
    if differing:
        raise refusal("batch norm(s) have another epsilon than expected", differing)
    return module


def _recovered() -> dict[str, ExpectedEpsilon]:
    """Epsilons of the batch norms that were just recovered from operators."""
    items = last_report()["RecomposeBatchNorm"].details
    return {item.name: ExpectedEpsilon(item.epsilon, EpsilonOrigin.RECOVERED) for item in items}


def _batch_norm_names(module: Any) -> tuple[str, ...]:
    names: list[str] = []

    def collect(read: ReadFunction) -> Any:
        names.extend(str(node) for node in read.graph.of_kind(Kind.BATCH_NORM))
        return read.function

    rewrite_functions(module, collect)
    return tuple(names)


def _with_epsilon(read: ReadFunction, node: Node, epsilon: float) -> Replacement:
    expr = read.expressions[node.id]

    def construct(new: Callable[[int], Any]) -> Any:
        attrs = {str(key): expr.attrs[key] for key in expr.attrs.keys()}
        attrs = tvm.ir.make_node("relay.attrs.BatchNormAttrs", **{**attrs, "epsilon": epsilon})
        return relay.Call(expr.op, [new(source) for source in node.inputs], attrs, None, expr.span)

    return construct
