"""Fold scales and shifts before or after a layer into its weights: batch norms in pieces.

::

    layer -> add -> subtract -> multiply -> divide -> ...        layer' -> add
    subtract -> divide -> layer                                  layer' -> add

    y = x * a + b, one a and one b a channel; each operator composes with what came before

Before -> after: a run of such operators becomes one bias add, and the weights carry the scale. A
single add after a layer is a bias already and stays. So do the operators of an activation (the
``x * 0.2 + 0.5`` of a hard sigmoid, the ``/ 6`` of a hard swish), which chains fuse under its name.

Shapes: every constant is a scalar or holds one number a channel. Numerics: a and b are composed in
float64. Conditions: those of ``core/backward.py``, else of ``core/forward.py``; a run that could go
neither way is reported only where it follows a layer.

Source: exporters that write ``(x - mean) * (gamma / sqrt(var + epsilon)) + beta`` as operators, and
models that normalize their input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.activations import match_activation
from tvm_fuse.core.backward import absorb_backward
from tvm_fuse.core.channelwise import AFFINE_KINDS, Affine, Axes, channel_count, read_step
from tvm_fuse.core.edit import Direction, Edit, choose_disjoint
from tvm_fuse.core.forward import absorb_forward
from tvm_fuse.core.graph import ANCHOR_KINDS, BiasAddAttrs, Graph, Kind, Node
from tvm_fuse.core.reason import Decision, Reason, applied, declined
from tvm_fuse.core.weights import FoldedLayer, output_axes

__all__ = ["AffineRecord", "plan_affine_folds"]

RULE = "fold-scale-shift"


@dataclass(frozen=True)
class AffineRecord:
    """A run of scales and shifts folded into the layers before or after it.

    Args:
        operators: The front end's names of the operators, in order.
        gain_max: Largest ``abs(a)``.
        direction: Where the layers are.
        layers: The layers, with digests of their weights and the bound on the rounding error.
        edit: What changes in the graph.
    """

    operators: tuple[str, ...]
    gain_max: float
    direction: Direction
    layers: tuple[FoldedLayer, ...]
    edit: Edit = field(compare=False, repr=False)

    @property
    def anchor_name(self) -> str:
        """Names of the layers, for people."""
        return ", ".join(layer.name for layer in self.layers)


@dataclass(frozen=True)
class _Run:
    """Operators in a row, the value they start from, and what they do together."""

    value: int
    nodes: tuple[int, ...]
    axes: Axes
    affine: Affine


def plan_affine_folds(graph: Graph) -> tuple[tuple[AffineRecord, ...], tuple[Decision, ...]]:
    """Fold every run that is worth it.

    Args:
        graph: The graph; it is not changed.

    Returns:
        The records to apply, none of which touches what another one touches, and a decision for every
        run that was folded or that follows a layer and could not be.
    """
    records: list[AffineRecord] = []
    decisions: list[Decision] = []
    outcomes = {runs[0].nodes[0]: (runs[0], _fold_first(graph, runs)) for runs in _find_runs(graph)}
    found = {key: record for key, (_, record) in outcomes.items() if isinstance(record, AffineRecord)}
    chosen = choose_disjoint({key: record.edit for key, record in found.items()})
    for key, (run, outcome) in outcomes.items():
        start = graph.nodes[run.value]
        if isinstance(outcome, Reason):
            if start.kind in ANCHOR_KINDS:
                decisions.append(declined(RULE, str(start), outcome))
        elif key in chosen:
            records.append(outcome)
            decisions.append(applied(RULE, outcome.anchor_name, ", ".join(outcome.operators)))
    return tuple(records), tuple(decisions)


# --- runs ------------------------------------------------------------------------------------


def _find_runs(graph: Graph) -> Iterator[list[_Run]]:
    """The longest runs, each operator in one at most; each run once for all axes it may be read along."""
    taken = _in_activations(graph)
    for node in graph.nodes:
        if node.kind not in AFFINE_KINDS or node.id in taken:
            continue
        runs = _runs_from(graph, node)
        if runs:
            taken.update(runs[0].nodes)
            if not _is_bias(graph, runs[0]):
                yield runs


def _in_activations(graph: Graph) -> set[int]:
    """The operators of activations: the ``/ 6`` of a hard swish would fit the weights of the next layer."""
    matches = (match_activation(graph, node.id) for node in graph.nodes if node.id not in graph.constants)
    return {node for match in matches if match is not None for node in match.nodes}


def _runs_from(graph: Graph, first: Node) -> list[_Run]:
    """The longest run that starts with an operator, along each of the axes that fit."""
    start = next((source for source in first.inputs if source not in graph.constants), None)
    if start is None:
        return []
    runs = [_run_along(graph, first, start, axes) for axes in _find_axes(graph, first, graph.nodes[start])]
    return [run for run in runs if run.nodes]


def _run_along(graph: Graph, first: Node, start: int, axes: Axes) -> _Run:
    run = _Run(start, (), axes, Affine.identity(channel_count(first.output.shape, axes) or 0))
    operator: Node | None = first
    while operator is not None:
        step = read_step(graph, operator, axes)
        if step is None:
            break
        run = _Run(start, (*run.nodes, operator.id), axes, step.affine.after(run.affine))
        operator = _next_operator(graph, operator)
    return run


def _next_operator(graph: Graph, node: Node) -> Node | None:
    """The only reader, unless an activation starts at the value."""
    readers = graph.readers(node.id)
    if graph.is_output(node.id) or len(readers) != 1 or match_activation(graph, node.id) is not None:
        return None
    return graph.nodes[readers[0]]


def _find_axes(graph: Graph, first: Node, value: Node) -> list[Axes]:
    """The channel axes of a run: the layer's, else the axes along which its constants have numbers.

    A run of scalars has no axis of its own: any axis will do that is the channel of a layer.
    """
    if value.kind in ANCHOR_KINDS:
        axes = output_axes(value)
        return [] if axes is None else [axes]
    operator: Node | None = first
    while operator is not None and operator.kind in AFFINE_KINDS:
        if isinstance(operator.attrs, BiasAddAttrs):
            return [(operator.attrs.axis,)]
        constant = next((graph.constants[s] for s in operator.inputs if s in graph.constants), None)
        rank = len(operator.output.shape)
        if constant is None or constant.ndim > rank:
            break
        wide = tuple(rank - constant.ndim + axis for axis, size in enumerate(constant.shape) if size != 1)
        if wide:
            return [wide]
        operator = _next_operator(graph, operator)
    return [(axis,) for axis in range(1, len(value.output.shape))]


def _is_bias(graph: Graph, run: _Run) -> bool:
    """Whether a run is what folding would make of it: one add after a layer."""
    return graph.nodes[run.value].kind in ANCHOR_KINDS and _is_one_add(graph, run)


def _is_one_add(graph: Graph, run: _Run) -> bool:
    """Whether a run is one add, of which the layers before it would make one add or more."""
    return [graph.nodes[node].kind for node in run.nodes] in ([Kind.ADD], [Kind.BIAS_ADD])


# --- construction ----------------------------------------------------------------------------


def _fold_first(graph: Graph, runs: list[_Run]) -> AffineRecord | Reason:
    """The first of some readings of a run that folds, or why the first one does not."""
    outcomes = (_fold_run(graph, run) for run in runs)
    first = next(outcomes)
    if not isinstance(first, Reason):
        return first
    return next((outcome for outcome in outcomes if isinstance(outcome, AffineRecord)), first)


def _fold_run(graph: Graph, run: _Run) -> AffineRecord | Reason:
    operators = tuple(graph.nodes[node].op for node in run.nodes)
    source = " and ".join(operators)
    aliases = dict(zip(run.nodes, (run.value, *run.nodes)))
    before = absorb_backward(graph, run.value, run.nodes[0], run.axes, run.affine, source)
    absorbed = before
    if isinstance(before, Reason) or _is_one_add(graph, run):
        absorbed = absorb_forward(graph, run.nodes[-1:], run.axes, run.affine, source)
    if isinstance(absorbed, Reason):
        return before if isinstance(before, Reason) else absorbed
    return AffineRecord(
        operators=operators,
        gain_max=float(np.abs(run.affine.scale).max()),
        direction=absorbed.direction,
        layers=absorbed.folded,
        edit=absorbed.edit(aliases),
    )
