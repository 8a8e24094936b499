"""Find batch norms that an exporter wrote as operators, while their epsilon can still be read.

::

    subtract -> multiply -> multiply -> add        batch_norm

    y = (x - mean) * r * gamma + beta              r = 1 / sqrt(variance + epsilon)
    y = x * s + (beta - mean * s)                  s = gamma * r

Before -> after: the operators on x become one batch norm with the parameters of the checkpoint. In
every spelling exactly one operator scales x by a constant with r in it. Around it lie, each at most
once and in this order: the mean (subtracted, or added negated), gamma before or after r, and beta (added,
or subtracted with the mean's share in it). Nothing else is taken: not a bias before, not what follows
beta, not an operator of an activation.

Shapes: x of any rank with a static channel dimension C; every constant is a scalar or holds one number
a channel. Parameters are float64 ``(C,)``; what the spelling leaves out is 1 or 0. The axis is where the
vectors lie; with scalars only, C is 1, and the axis is 1 or the last one.

Conditions: ``anchor-output-shared``, ``anchor-output-returned`` (each value between two of the operators
has one reader and is no output of the model), ``bn-epsilon-invalid`` (one epsilon, told apart from the
variance by ``core/terms.py``), ``bn-axis-not-channel`` (the vectors lie along one static axis).
Numerics: parameters are read, not solved for: gamma is not divided by, and a stored number comes back as
it is. Only where the mean's share was already multiplied out is the mean 0 and beta the whole shift.

Source: Ioffe and Szegedy 2015, algorithm 2; Relay's SimplifyInference and TensorFlow's
tf.nn.batch_normalization for the two spellings above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tvm_fuse.core.activations import match_activation
from tvm_fuse.core.dtypes import FLOATS, Array
from tvm_fuse.core.graph import BiasAddAttrs, Dim, Graph, Kind, Node
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined
from tvm_fuse.core.terms import LARGEST_EPSILON, Constant, Deviation, Factor, Term, read_constants

__all__ = ["Recomposition", "plan_recompositions"]

RULE = "recompose-batch-norm"

_SCALES = (Kind.MULTIPLY, Kind.DIVIDE)
_SHIFTS = (Kind.ADD, Kind.BIAS_ADD, Kind.SUBTRACT)


@dataclass(frozen=True)
class Recomposition:
    """A batch norm to put in the place of some operators.

    Args:
        data: Id of the value that is normalized.
        result: Id of the value to replace by the normalized output; same shape and dtype as ``data``.
        axis: The channel axis of ``data`` (>= 0).
        epsilon: The constant's value.
        dtype: The dtype that the variance and epsilon are added in. Stored numbers of that dtype are in
            the parameters unchanged, so rounding these to it (``dtypes.narrow``) loses nothing there.
        name: Where the last operator came from, or empty.
        operators: The front end's names of the operators, in order.
        gamma: float64 ``(C,)``, like the next three.
        beta: Added last.
        mean: Subtracted first.
        variance: What epsilon is added to.
    """

    data: int
    result: int
    axis: int
    epsilon: float
    dtype: str
    name: str
    operators: tuple[str, ...]
    gamma: Array = field(compare=False, repr=False)
    beta: Array = field(compare=False, repr=False)
    mean: Array = field(compare=False, repr=False)
    variance: Array = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Step:
    """One operator: ``data`` times or plus a constant (a divisor inverted, a subtrahend negated)."""

    node: Node
    data: int
    constant: Constant
    axis: int | None

    @property
    def scales(self) -> bool:
        return self.node.kind in _SCALES

    @property
    def is_site(self) -> bool:
        """Whether it scales by a deviation."""
        return self.scales and bool(self.constant.deviations)

    @property
    def is_gamma(self) -> bool:
        return self.scales and not self.constant.deviations

    @property
    def is_mean(self) -> bool:
        """Whether it subtracts a constant, or adds a negated one."""
        return not (self.scales or self.constant.deviations) and self.constant.terms[0].sign < 0


def plan_recompositions(graph: Graph) -> tuple[tuple[Recomposition, ...], tuple[Decision, ...]]:
    """Find every batch norm that is written as operators.

    Args:
        graph: The graph; it is not changed.

    Returns:
        The batch norms, no two with an operator in common, and one decision for every operator that
        scales data by a constant with ``1 / sqrt(variance + epsilon)`` in it and keeps its shape and dtype.
    """
    found: list[Recomposition] = []
    decisions: list[Decision] = []
    steps = _read_steps(graph)
    for site in [step for step in steps.values() if step.is_site]:
        chain = _find_chain(graph, steps, site)
        outcome = _recompose(graph, chain, site)
        at = str(chain[-1].node)
        if isinstance(outcome, Reason):
            decisions.append(declined(RULE, at, outcome))
            continue
        found.append(outcome)
        for step in chain:
            del steps[step.node.id]
        detail = f"{', '.join(outcome.operators)}; axis {outcome.axis}, epsilon {outcome.epsilon:.9g}"
        decisions.append(applied(RULE, at, detail))
    return tuple(found), tuple(decisions)


# --- steps -----------------------------------------------------------------------------------


def _read_steps(graph: Graph) -> dict[int, _Step]:
    """Every operator that scales or shifts a value by a constant, by id."""
    if not graph.of_kind(Kind.SQRT, Kind.RSQRT, Kind.POWER):
        return {}
    constants = read_constants(graph)
    steps = (_read_step(graph, constants, node) for node in graph.of_kind(*_SCALES, *_SHIFTS))
    return {step.node.id: step for step in steps if step is not None}


def _read_step(graph: Graph, constants: dict[int, Constant], node: Node) -> _Step | None:
    if len(node.inputs) != 2:
        return None
    data, other = node.inputs
    if data in constants and node.kind in (Kind.ADD, Kind.MULTIPLY):
        data, other = other, data
    if data in constants or other not in constants or node.output.dtype not in FLOATS:
        return None
    constant = _oriented(node, constants[other])
    if constant is None or graph.nodes[data].output != node.output:
        return None
    return _Step(node, data, constant, _axis_of(node, constant))


def _oriented(node: Node, constant: Constant) -> Constant | None:
    """The constant that is multiplied or added."""
    terms = constant.terms
    if node.kind is Kind.SUBTRACT:
        terms = tuple(term.negated() for term in terms)
    if node.kind is Kind.DIVIDE:
        if len(terms) > 1:
            return None
        terms = (Term().times(terms[0], -1),)
    return Constant(terms, constant.shape)


def _axis_of(node: Node, constant: Constant) -> int | None:
    """The axis of the result along which the vector lies; None for one number."""
    if isinstance(node.attrs, BiasAddAttrs):
        return node.attrs.axis
    lead = len(node.output.shape) - len(constant.shape)
    return next((lead + index for index, dim in enumerate(constant.shape) if dim != 1), None)


# --- chains ----------------------------------------------------------------------------------


def _find_chain(graph: Graph, steps: dict[int, _Step], site: _Step) -> list[_Step]:
    """The operators of the batch norm around a site, in order."""
    chain = [site]
    has_gamma = any(factor.deviation is None for term in site.constant.terms for factor in term.powers)
    before = steps.get(site.data)
    if not has_gamma and before is not None and before.is_gamma and _fits(chain, before):
        first = steps.get(before.data)
        if before.axis is not None or (first is not None and first.is_mean):
            chain.insert(0, before)
            has_gamma = True
    if not has_gamma:
        chain += _follow(graph, steps, chain, lambda step: step.is_gamma)
    chain += _follow(graph, steps, chain, lambda step: _is_beta(step, site))
    first = steps.get(chain[0].data)
    if not _has_mean(chain) and first is not None and first.is_mean and _fits(chain, first):
        chain.insert(0, first)
    return chain


def _follow(
    graph: Graph, steps: dict[int, _Step], chain: list[_Step], accept: Callable[[_Step], bool]
) -> list[_Step]:
    """The step after the chain, as a list, if it is acceptable and not part of an activation."""
    value = chain[-1].node.id
    if match_activation(graph, value) is not None:
        return []
    readers = (steps[reader] for reader in graph.readers(value) if reader in steps)
    return [step for step in readers if accept(step) and _fits(chain, step)][:1]


def _fits(chain: list[_Step], step: _Step) -> bool:
    """Whether the vectors lie along one axis."""
    return len({each.axis for each in (*chain, step)} - {None}) <= 1


def _is_beta(step: _Step, site: _Step) -> bool:
    return not (step.scales or step.is_mean) and step.constant.deviations <= site.constant.deviations


def _has_mean(chain: list[_Step]) -> bool:
    """Whether the shift at the end has the mean's share in it."""
    return not chain[-1].scales and bool(chain[-1].constant.deviations)


# --- conditions ------------------------------------------------------------------------------


def _recompose(graph: Graph, chain: list[_Step], site: _Step) -> Recomposition | Reason:
    factor = _one_deviation(site)
    if isinstance(factor, Reason):
        return factor
    reason = _check_private(graph, chain)
    if reason is not None:
        return reason
    axis = _channel_axis(graph, chain)
    if isinstance(axis, Reason):
        return axis
    return _construct(graph, chain, factor, axis)


def _one_deviation(site: _Step) -> Factor | Reason:
    """The inverse deviation that a site scales by, with an epsilon that is one."""
    terms, at = site.constant.terms, str(site.node)
    powers = [(factor, term.powers[factor]) for term in terms for factor in term.deviations]
    if len(terms) > 1 or len(powers) > 1 or powers[0][1] != 1:
        got = f"{len(powers)} of them in {len(terms)} terms, powers {[power for _, power in powers]}"
        return Reason(Code.BN_EPSILON_INVALID, at, "one factor 1 / sqrt(variance + epsilon)", got)
    deviation = powers[0][0].deviation
    assert deviation is not None
    if deviation.found:
        wanted = f"a variance and one epsilon in (0, {LARGEST_EPSILON:g}] under the root"
        return Reason(Code.BN_EPSILON_INVALID, at, wanted, deviation.found)
    return powers[0][0]


def _check_private(graph: Graph, chain: list[_Step]) -> Reason | None:
    """Nobody else may read a value that disappears."""
    for step, following in zip(chain, chain[1:]):
        at, wanted = str(step.node), f"{following.node} as the only reader"
        if graph.is_output(step.node.id):
            return Reason(Code.ANCHOR_OUTPUT_RETURNED, at, wanted, "a model output")
        readers = graph.readers(step.node.id)
        if len(readers) > 1:
            names = ", ".join(str(graph.nodes[reader]) for reader in readers)
            return Reason(Code.ANCHOR_OUTPUT_SHARED, at, wanted, f"{len(readers)} readers: {names}")
    return None


def _channel_axis(graph: Graph, chain: list[_Step]) -> int | Reason:
    shape, at = chain[0].node.output.shape, str(chain[-1].node)
    axis = next((step.axis for step in chain if step.axis is not None), _single_channel(shape))
    sizes = {numbers.size for step in chain for numbers in _vectors(step)} - {1}
    if axis is None:
        got = f"scalars, and {_show(shape)}"
        return Reason(Code.BN_AXIS_NOT_CHANNEL, at, "one number a channel, or one channel", got)
    if not isinstance(shape[axis], int) or not sizes <= {shape[axis]}:
        got = f"axis {axis} of {_show(shape)}"
        return Reason(Code.BN_AXIS_NOT_CHANNEL, at, "a static channel axis", got)
    return axis


def _single_channel(shape: tuple[Dim, ...]) -> int | None:
    """Axis 1 or the last one, whichever has one element."""
    return next((axis for axis in (1, len(shape) - 1) if 0 < axis < len(shape) and shape[axis] == 1), None)


def _vectors(step: _Step) -> Iterator[Array]:
    return (factor.numbers for term in step.constant.terms for factor in term.powers)


def _show(shape: tuple[Dim, ...]) -> str:
    return "x".join(str(dim) for dim in shape)


# --- construction ----------------------------------------------------------------------------


def _construct(graph: Graph, chain: list[_Step], factor: Factor, axis: int) -> Recomposition:
    last, shape = chain[-1].node, chain[0].node.output.shape
    scale = Term()
    for step in chain:
        scale = scale.times(step.constant.terms[0]) if step.scales else scale
    mean, beta = _split_shift(scale, () if chain[-1].scales else chain[-1].constant.terms)
    if chain[0].is_mean:
        mean = mean - chain[0].constant.numbers
    deviation: Deviation | None = factor.deviation
    assert deviation is not None
    parameters = {
        "gamma": scale.times(Term(powers={factor: 1}), -1).numbers,
        "beta": beta,
        "mean": mean,
        "variance": deviation.variance,
    }
    channels = int(shape[axis])
    return Recomposition(
        data=chain[0].data,
        result=last.id,
        axis=axis,
        epsilon=deviation.epsilon,
        dtype=deviation.dtype,
        name=last.name,
        operators=tuple(step.node.op for step in chain),
        **{role: np.broadcast_to(numbers, channels).copy() for role, numbers in parameters.items()},
    )


def _split_shift(scale: Term, terms: tuple[Term, ...]) -> tuple[Array, Array]:
    """Mean and beta of a shift ``beta - mean * scale``; 0 and all of it where it is not written so."""
    shares = [term.negated().times(scale, -1) for term in terms if term.deviations]
    if any(share.deviations or min(share.powers.values(), default=1) < 0 for share in shares):
        shares, rest = [], terms
    else:
        rest = tuple(term for term in terms if not term.deviations)
    return Constant(tuple(shares), ()).numbers, Constant(rest, ()).numbers
