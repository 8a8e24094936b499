"""Constants as sums of products, so that what an exporter multiplied can be told apart.

::

    beta - mean * (gamma * rsqrt(variance + epsilon))   ->   beta - mean · gamma · r

    r = 1 / sqrt(variance + epsilon)

A subgraph on constants is read as a few terms; a term is a sign and powers of factors; a factor is
a stored vector, or r, which keeps its variance and its epsilon. Terms are multiplied and divided by
adding and subtracting powers: mean · gamma · r over gamma · r is mean, also where gamma is zero. A
sum without r is one new factor, since there is nothing in it to tell apart.

Shapes: a constant has at most one dimension that is not 1, of n elements; its numbers are float64
``(n,)`` or ``(1,)``. Conditions: what computes it is arithmetic on floats, a root, or moves elements.
Epsilon is the one number, above 0 and at most ``LARGEST_EPSILON``, that is added to the variance; where
both are one number, it is the smaller one. Numerics: float64; a cast of a number without r rounds it,
and every other result is taken as exact, as if the dtype of the graph did not round.

Source: Relay's nn.batch_norm and ONNX BatchNormalization for the meaning of epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, Array, narrow, widen
from tvm_fuse.core.graph import Graph, Kind, Node

__all__ = ["LARGEST_EPSILON", "Constant", "Deviation", "Factor", "Term", "read_constants"]

#: Frameworks use 1e-8 to 1e-2; a larger number is part of the variance.
LARGEST_EPSILON = 0.1

#: A shift has two terms; whatever has more than this was not written as a batch norm.
_MOST_TERMS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Deviation:
    """``sqrt(variance + epsilon)``.

    Args:
        variance: float64, ``(n,)`` or ``(1,)``.
        epsilon: The constant's value; NaN where it could not be told from the variance.
        dtype: Dtype of the sum.
        found: The two addends for people, where they are no variance and epsilon; else empty.
    """

    variance: Array = field(compare=False, repr=False)
    epsilon: float
    dtype: str
    found: str


@dataclass(frozen=True)
class Factor:
    """Numbers that are not taken apart; equal numbers are the same factor.

    Args:
        key: What makes two factors the same.
        numbers: float64, ``(n,)`` or ``(1,)``.
        deviation: Set where the numbers are its inverse.
    """

    key: bytes
    numbers: Array = field(compare=False, repr=False)
    deviation: Deviation | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Term:
    """``sign * f1**p1 * f2**p2 * ...`` with no power of 0."""

    sign: float = 1.0
    powers: Mapping[Factor, int] = field(default_factory=dict)

    @property
    def deviations(self) -> tuple[Factor, ...]:
        """The factors that are an inverse deviation."""
        return tuple(factor for factor in self.powers if factor.deviation is not None)

    @property
    def numbers(self) -> Array:
        """The value, float64 ``(n,)`` or ``(1,)``."""
        value = np.array([self.sign])
        with np.errstate(all="ignore"):  # what is not finite is refused when the batch norm folds
            for factor, power in self.powers.items():
                value = value * factor.numbers**power
        return value

    def negated(self) -> Term:
        """The same with the other sign."""
        return Term(-self.sign, self.powers)

    def times(self, other: Term, power: int = 1) -> Term:
        """The product with a power of another term."""
        powers = dict(self.powers)
        for factor, exponent in other.powers.items():
            powers[factor] = powers.get(factor, 0) + power * exponent
        return Term(self.sign * other.sign, {factor: p for factor, p in powers.items() if p})


Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Constant:
    """A sum of terms and where its vector lies.

    Args:
        terms: None for 0; one where no term has a deviation.
        shape: Of the value before it is repeated (broadcast): at most one dimension is not 1.
    """

    terms: Terms
    shape: Shape

    @cached_property
    def deviations(self) -> frozenset[Factor]:
        """The inverse deviations in it."""
        return frozenset(factor for term in self.terms for factor in term.deviations)

    @cached_property
    def numbers(self) -> Array:
        """The value, float64 ``(n,)`` or ``(1,)``."""
        return sum((term.numbers for term in self.terms), np.zeros(1))


def read_constants(graph: Graph) -> dict[int, Constant]:
    """Read every value that is computed from constants and holds one vector.

    Args:
        graph: The graph.

    Returns:
        Node id -> value; what cannot be read is absent.
    """
    constants: dict[int, Constant] = {}
    for node in graph.nodes:
        constant = (
            _read_stored(graph, node) if node.kind is Kind.CONSTANT else _compute(graph, node, constants)
        )
        if constant is not None:
            constants[node.id] = constant
    return constants


def _read_stored(graph: Graph, node: Node) -> Constant | None:
    shape = graph.constants[node.id].shape
    array = graph.exact(node.id) if _is_vector(shape) else None
    return None if array is None else Constant((_number(array),), shape)


def _is_vector(shape: Shape) -> bool:
    return prod(shape) > 0 and sum(dim != 1 for dim in shape) <= 1


def _number(numbers: Array) -> Term:
    """A term of plain numbers; the number 1 is no factor."""
    numbers = numbers.reshape(-1)
    if numbers.size == 1 and numbers[0] == 1:
        return Term()
    return Term(1.0, {Factor(numbers.tobytes(), numbers): 1})


# --- operators -------------------------------------------------------------------------------

_ROOTS = {Kind.SQRT: 0.5, Kind.RSQRT: -0.5}

#: Operators with one operand that is a tensor; any other (a target shape) is not looked at.
_MOVES = (Kind.RESHAPE, Kind.EXPAND_DIMS, Kind.TRANSPOSE, Kind.BROADCAST_TO)


def _divide(a: Terms, b: Terms) -> Terms | None:
    return tuple(term.times(b[0], -1) for term in a) if len(b) == 1 else None


#: Operator -> terms of its result from those of its operands.
_ARITHMETIC: dict[Kind, Callable[..., Terms | None]] = {
    Kind.ADD: lambda a, b: a + b,
    Kind.SUBTRACT: lambda a, b: a + tuple(term.negated() for term in b),
    Kind.MULTIPLY: lambda a, b: tuple(x.times(y) for x in a for y in b),
    Kind.DIVIDE: _divide,
    Kind.NEGATIVE: lambda a: tuple(term.negated() for term in a),
    Kind.RECIPROCAL: lambda a: _divide((Term(),), a),
}

_READABLE = frozenset({*_ROOTS, *_MOVES, *_ARITHMETIC, Kind.POWER, Kind.CAST})


def _compute(graph: Graph, node: Node, constants: Mapping[int, Constant]) -> Constant | None:
    if node.kind not in _READABLE:
        return None
    sources = node.inputs[:1] if node.kind in _MOVES else node.inputs
    operands = [constants[source] for source in sources if source in constants]
    if len(operands) != len(sources):
        return None
    shape = _shape_after(graph, node, operands)
    terms = None if shape is None else _terms_after(graph, node, operands, constants)
    return None if terms is None or shape is None else Constant(terms, shape)


def _shape_after(graph: Graph, node: Node, operands: Sequence[Constant]) -> Shape | None:
    """Where the vector lies in the result; None when the result is no vector."""
    shapes = [operand.shape for operand in operands]
    if node.kind is Kind.BROADCAST_TO:
        return (1,) * (len(node.output.shape) - len(shapes[0])) + shapes[0]
    if node.kind not in _MOVES:
        shape = np.broadcast_shapes(*shapes)
        return shape if _is_vector(shape) else None
    moved = tuple(dim for dim in node.output.shape if isinstance(dim, int))
    is_whole = len(moved) == len(node.output.shape) and prod(moved) == prod(shapes[0])
    return moved if is_whole and _is_vector(moved) else None


def _terms_after(
    graph: Graph, node: Node, operands: Sequence[Constant], constants: Mapping[int, Constant]
) -> Terms | None:
    first = operands[0]
    if node.kind in _MOVES:
        return first.terms
    if node.output.dtype not in FLOATS:
        return None
    if node.kind is Kind.CAST:
        rounded = widen(narrow(first.numbers, node.output.dtype), node.output.dtype)
        keeps = bool(first.deviations) or np.array_equal(rounded, first.numbers)
        return first.terms if keeps else (_number(rounded),)
    if node.kind not in _ARITHMETIC:
        return _take_power(graph, node, operands, constants)
    terms = _ARITHMETIC[node.kind](*(operand.terms for operand in operands))
    if terms is None or len(terms) == 1:
        return terms
    result = Constant(terms, first.shape)
    if not result.deviations:
        return (_number(result.numbers),)
    return terms if len(terms) <= _MOST_TERMS else None


# --- roots -----------------------------------------------------------------------------------


def _take_power(
    graph: Graph, node: Node, operands: Sequence[Constant], constants: Mapping[int, Constant]
) -> Terms | None:
    if any(operand.deviations for operand in operands):
        return None
    exponents = np.array([_ROOTS[node.kind]]) if node.kind in _ROOTS else operands[1].numbers
    if exponents.size == 1 and abs(exponents[0]) == 0.5:
        total = _sum_under(graph, node)
        if total is not None:
            factor = _inverse_deviation(total, *(constants[source].numbers for source in total.inputs))
            return (Term(1.0, {factor: 1 if exponents[0] < 0 else -1}),)
    with np.errstate(all="ignore"):
        return (_number(np.power(operands[0].numbers, exponents)),)


def _sum_under(graph: Graph, root: Node) -> Node | None:
    """The addition whose root is taken, past what moves elements."""
    node = graph.nodes[root.inputs[0]]
    while node.kind in _MOVES or node.kind is Kind.CAST:
        node = graph.nodes[node.inputs[0]]
    return node if node.kind is Kind.ADD else None


def _inverse_deviation(total: Node, a: Array, b: Array) -> Factor:
    """1 / sqrt of a sum: the variance is the vector, or the larger of two numbers."""
    epsilon, variance = sorted((a, b), key=lambda numbers: (numbers.size, numbers[0]))
    is_told = epsilon.size == 1 and 0 < epsilon[0] <= LARGEST_EPSILON
    if not is_told or (variance.size == 1 and not variance[0] > LARGEST_EPSILON):
        found = " + ".join(f"{n[0]:g}" if n.size == 1 else f"a vector of {n.size}" for n in (a, b))
        deviation = Deviation(variance, float("nan"), total.output.dtype, found)
    else:
        deviation = Deviation(variance, float(epsilon[0]), total.output.dtype, "")
    key = b"r" + variance.tobytes() + epsilon.tobytes()
    with np.errstate(all="ignore"):
        return Factor(key, 1.0 / np.sqrt(variance + epsilon), deviation)
