"""Fold scales and shifts after a layer into its weights: what is left of a batch norm in pieces.

::

    layer -> add -> subtract -> multiply -> divide -> ...        layer' -> add

    y = x * a + b, one a and one b a channel; each operator composes with what came before:
    x + c: b += c        x - c: b -= c        c - x: a = -a, b = c - b
    x * c: a *= c, b *= c        x / c: a /= c, b /= c

Before -> after: a run of two or more such operators, or one that scales, becomes one bias add, and
the weights carry the scale. A single add is a bias already and stays. A run ends before an
activation that has such operators in it (the ``x * 0.2 + 0.5`` of a hard sigmoid).

Shapes: every constant is a scalar or holds one number a channel of the layer's output; results
keep the layer's shape. Conditions: each value has one reader and is no output of the model; then
those of ``core/weights.py``. Numerics: as there; a and b are composed in float64.

Source: exporters that write ``(x - mean) * (gamma / sqrt(var + epsilon)) + beta`` as operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.activations import match_activation
from tvm_fuse.core.graph import ANCHOR_KINDS, Array, Graph, Kind, Node
from tvm_fuse.core.reason import Decision, Reason, applied, declined
from tvm_fuse.core.weights import absorb, channel_axis, channel_vector

__all__ = ["AffineRecord", "plan_affine_folds"]

RULE = "fold-scale-shift"


@dataclass(frozen=True)
class AffineRecord:
    """A run of scales and shifts folded into the layer before it.

    Args:
        anchor: Id of the convolution or dense layer.
        results: Id of the value to replace (the last result of the run), as a tuple.
        anchor_name: Where the layer came from.
        operators: The front end's names of the operators, in order.
        gain_max: Largest ``abs(a)``.
        weight: The folded weight.
        bias: The folded bias, shape ``(C,)``.
    """

    anchor: int
    results: tuple[int, ...]
    anchor_name: str
    operators: tuple[str, ...]
    gain_max: float
    weight: Array = field(compare=False, repr=False)
    bias: Array = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Run:
    """Operators after an anchor, and what they do together: ``x * scale + shift``."""

    nodes: tuple[int, ...]
    scale: Array
    shift: Array


def plan_affine_folds(graph: Graph) -> tuple[tuple[AffineRecord, ...], tuple[Decision, ...]]:
    """Fold every run that is worth it.

    Args:
        graph: The graph; it is not changed.

    Returns:
        The records to apply, and one decision for every run that is worth folding.
    """
    records: list[AffineRecord] = []
    decisions: list[Decision] = []
    for anchor in graph.of_kind(*ANCHOR_KINDS):
        run = _find_run(graph, anchor)
        if run is None or not _is_worth_it(graph, run):
            continue
        outcome = _construct(graph, anchor, run)
        if isinstance(outcome, Reason):
            decisions.append(declined(RULE, str(anchor), outcome))
            continue
        records.append(outcome)
        decisions.append(applied(RULE, str(anchor), ", ".join(outcome.operators)))
    return tuple(records), tuple(decisions)


def _find_run(graph: Graph, anchor: Node) -> _Run | None:
    """The longest run after an anchor; None where its channels are not one static axis."""
    channel = channel_axis(anchor)
    channels = None if channel is None else anchor.output.shape[channel]
    if not isinstance(channels, int):
        return None
    run = _Run((), np.ones(channels), np.zeros(channels))
    value = anchor.id
    while not graph.is_output(value) and len(graph.readers(value)) == 1:
        operator = graph.nodes[graph.readers(value)[0]]
        longer = _extend(graph, anchor, run, operator, value)
        if longer is None or match_activation(graph, value) is not None:
            break
        run, value = longer, operator.id
    return run


def _extend(graph: Graph, anchor: Node, run: _Run, operator: Node, value: int) -> _Run | None:
    """The run with one more operator, or None when the operator does not scale or shift."""
    if operator.kind not in _COMPOSE or len(operator.inputs) != 2:
        return None
    value_first = operator.inputs[0] == value
    constant = graph.constant(operator.inputs[1 if value_first else 0])
    vector = None if constant is None else channel_vector(operator, anchor, constant)
    if vector is None or operator.output != anchor.output:
        return None
    with np.errstate(all="ignore"):  # what is not finite is refused when the weights are made
        composed = _COMPOSE[operator.kind](run.scale, run.shift, vector.astype(np.float64), value_first)
    return None if composed is None else _Run((*run.nodes, operator.id), *composed)


def _subtract(a: Array, b: Array, c: Array, value_first: bool) -> tuple[Array, Array]:
    return (a, b - c) if value_first else (-a, c - b)


def _divide(a: Array, b: Array, c: Array, value_first: bool) -> tuple[Array, Array] | None:
    return (a / c, b / c) if value_first else None


#: Operator -> scale and shift after it, from those before, the constant, and whether the value comes first.
_COMPOSE = {
    Kind.ADD: lambda a, b, c, value_first: (a, b + c),
    Kind.BIAS_ADD: lambda a, b, c, value_first: (a, b + c),
    Kind.SUBTRACT: _subtract,
    Kind.MULTIPLY: lambda a, b, c, value_first: (a * c, b * c),
    Kind.DIVIDE: _divide,
}


def _is_worth_it(graph: Graph, run: _Run) -> bool:
    """Whether folding leaves fewer operators: anything but nothing, or one plain bias."""
    kinds = [graph.nodes[node].kind for node in run.nodes]
    return len(kinds) > 1 or kinds in ([Kind.MULTIPLY], [Kind.DIVIDE], [Kind.SUBTRACT])


def _construct(graph: Graph, anchor: Node, run: _Run) -> AffineRecord | Reason:
    operators = tuple(graph.nodes[node].op for node in run.nodes)
    layer = absorb(graph, anchor, run.scale, run.shift, " and ".join(operators))
    if isinstance(layer, Reason):
        return layer
    return AffineRecord(
        anchor=anchor.id,
        results=(run.nodes[-1],),
        anchor_name=str(anchor),
        operators=operators,
        gain_max=float(np.abs(run.scale).max()),
        weight=layer.weight,
        bias=layer.bias,
    )
