"""The activations a chain may end in, and the spellings exporters give them.

One record is one activation: its NumPy reference and the expression trees that mean it.
``X`` is the value the activation is applied to; every number in a tree is compared with the
number in the model (relative tolerance ``NUMBER_RTOL``), so ``x / 5 * clip(...)`` is never
mistaken for a hard swish. Operands of add and multiply match in either order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, narrow, widen
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, Array, ClipAttrs, Graph, Kind, LeakyReluAttrs, Node

__all__ = ["ACTIVATIONS", "Activation", "Apply", "Match", "Number", "Operand", "X", "match_activation"]

#: Numbers in float32 models carry about seven digits; 1/6 is often stored as 0.16666667.
NUMBER_RTOL = 1e-6


@dataclass(frozen=True)
class Input:
    """The value the activation is applied to."""


@dataclass(frozen=True)
class Number:
    """A scalar constant; ``value=None`` matches any."""

    value: float | None = None


@dataclass(frozen=True)
class Apply:
    """An operator applied to sub-expressions; ``attrs=None`` matches any attributes."""

    kind: Kind
    args: tuple[Expression, ...]
    attrs: object | None = None


@dataclass(frozen=True)
class Operand:
    """Any other value, such as a slope for each channel."""


Expression = Union[Input, Number, Operand, Apply]
X = Input()


@dataclass(frozen=True)
class Activation:
    """An activation function.

    Args:
        name: The field's name for it; also part of the fused function's name.
        reference: NumPy reference, float64 in and out; None where the spelling holds
            free parameters (a slope, two bounds).
        spellings: Expression trees over ``X``, the most specific first.
        source: Where the formula comes from.
    """

    name: str
    reference: Callable[[Array], Array] | None
    spellings: tuple[Apply, ...]
    source: str


@dataclass(frozen=True)
class Match:
    """An activation found in a graph: its operators in topological order, the last is the result."""

    activation: str
    nodes: tuple[int, ...]


def _add(a: Expression, b: Expression) -> Apply:
    return Apply(Kind.ADD, (a, b))


def _mul(a: Expression, b: Expression) -> Apply:
    return Apply(Kind.MULTIPLY, (a, b))


def _div(a: Expression, b: float) -> Apply:
    return Apply(Kind.DIVIDE, (a, Number(b)))


def _clip(a: Expression, low: float, high: float) -> Apply:
    return Apply(Kind.CLIP, (a,), ClipAttrs(low, high))


def _apply(kind: Kind, a: Expression) -> Apply:
    return Apply(kind, (a,))


_RELU6_OF_X_PLUS_3 = _clip(_add(X, Number(3.0)), 0.0, 6.0)
_SIXTH = Number(1.0 / 6.0)
#: clip(x/6 + 1/2, 0, 1): the hard sigmoid of MobileNetV3.
_HARD_SIGMOID_V3 = (
    _div(_RELU6_OF_X_PLUS_3, 6.0),
    _mul(_RELU6_OF_X_PLUS_3, _SIXTH),
    _clip(_add(_mul(X, _SIXTH), Number(0.5)), 0.0, 1.0),
    _clip(_add(_div(X, 6.0), Number(0.5)), 0.0, 1.0),
)


def _elu(scale: float | None) -> Apply:
    """Scale * relu(1 - exp(x)) + relu(x), as TVM's importers write it; the scale is negative."""
    one_less = Apply(Kind.SUBTRACT, (Number(1.0), _apply(Kind.EXP, X)))
    return _add(_mul(Number(scale), _apply(Kind.RELU, one_less)), _apply(Kind.RELU, X))


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_SOFTPLUS = _apply(Kind.LOG, _add(_apply(Kind.EXP, X), Number(1.0)))

#: The two ways to write x / sqrt(2), and 1 + erf of it.
_ERFS = tuple(
    _apply(Kind.ERF, scaled) for scaled in (_div(X, math.sqrt(2.0)), _mul(X, Number(math.sqrt(0.5))))
)
_CUBES = (Apply(Kind.POWER, (X, Number(3.0))), _mul(X, _mul(X, X)))
_TANH_SCALE, _TANH_CUBED = math.sqrt(2.0 / math.pi), 0.044715
#: tanh(sqrt(2/pi) * (x + 0.044715 x^3)), factored or not.
_TANHS = tuple(
    _apply(Kind.TANH, inner)
    for cube in _CUBES
    for inner in (
        _mul(Number(_TANH_SCALE), _add(X, _mul(Number(_TANH_CUBED), cube))),
        _add(_mul(Number(_TANH_SCALE), X), _mul(Number(_TANH_SCALE * _TANH_CUBED), cube)),
    )
)


def _half_of(function: Apply) -> tuple[Apply, ...]:
    """X / 2 * (1 + function), multiplied in any order."""
    doubled, half = _add(Number(1.0), function), Number(0.5)
    return _mul(_mul(half, X), doubled), _mul(_mul(X, doubled), half), _mul(X, _mul(half, doubled))


_erf = np.vectorize(math.erf, otypes=[float])

#: The table. Order matters only for people: the longest match wins.
ACTIVATIONS: tuple[Activation, ...] = (
    Activation("relu", lambda x: np.maximum(x, 0.0), (Apply(Kind.RELU, (X,)),), "Nair and Hinton 2010"),
    Activation(
        "relu6", lambda x: np.clip(x, 0.0, 6.0), (_clip(X, 0.0, 6.0),), "Krizhevsky 2010; MobileNetV2"
    ),
    Activation("clip", None, (Apply(Kind.CLIP, (X,)),), "ONNX Clip"),
    Activation("leaky_relu", None, (Apply(Kind.LEAKY_RELU, (X,)),), "Maas et al. 2013"),
    Activation("prelu", None, (Apply(Kind.PRELU, (X, Operand())),), "He et al. 2015"),
    Activation("elu", None, (_elu(None),), "Clevert et al. 2015"),
    Activation(
        "selu",
        lambda x: _SELU_SCALE * np.where(x > 0.0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0.0))),
        (_mul(Number(_SELU_SCALE), _elu(-_SELU_ALPHA)),),
        "Klambauer et al. 2017",
    ),
    Activation("softplus", lambda x: np.logaddexp(0.0, x), (_SOFTPLUS,), "Dugas et al. 2001"),
    Activation(
        "mish",
        lambda x: x * np.tanh(np.logaddexp(0.0, x)),
        (_mul(X, _apply(Kind.TANH, _SOFTPLUS)),),
        "Misra 2019",
    ),
    Activation(
        "gelu",
        lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
        (
            *(spelling for erf in _ERFS for spelling in _half_of(erf)),
            *(_mul(X, _add(Number(0.5), _mul(erf, Number(0.5)))) for erf in _ERFS),
        ),
        "Hendrycks and Gimpel 2016",
    ),
    Activation(
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + np.tanh(_TANH_SCALE * (x + _TANH_CUBED * x**3))),
        tuple(spelling for tanh in _TANHS for spelling in _half_of(tanh)),
        "Hendrycks and Gimpel 2016, section 2",
    ),
    Activation(
        "gelu_sigmoid",
        lambda x: x / (1.0 + np.exp(-1.702 * x)),
        (_mul(X, _apply(Kind.SIGMOID, _mul(Number(1.702), X))),),
        "Hendrycks and Gimpel 2016, section 2",
    ),
    Activation(
        "sigmoid", lambda x: 1.0 / (1.0 + np.exp(-x)), (Apply(Kind.SIGMOID, (X,)),), "logistic function"
    ),
    Activation("tanh", np.tanh, (Apply(Kind.TANH, (X,)),), "hyperbolic tangent"),
    Activation(
        "silu",
        lambda x: x / (1.0 + np.exp(-x)),
        (_mul(X, Apply(Kind.SIGMOID, (X,))),),
        "Elfwing et al. 2017; also called swish",
    ),
    Activation(
        "hard_sigmoid",
        None,
        (
            *_HARD_SIGMOID_V3,
            _clip(_add(_mul(X, Number()), Number()), 0.0, 1.0),
            _clip(_add(X, Number()), 0.0, 1.0),  # the slope was folded into the weights
        ),
        "ONNX HardSigmoid (any alpha and beta); MobileNetV3",
    ),
    Activation(
        "hard_swish",
        lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
        (
            _div(_mul(X, _RELU6_OF_X_PLUS_3), 6.0),
            _mul(_mul(X, _RELU6_OF_X_PLUS_3), _SIXTH),
            _mul(_div(X, 6.0), _RELU6_OF_X_PLUS_3),
            _mul(_mul(X, _SIXTH), _RELU6_OF_X_PLUS_3),
            *(_mul(X, gate) for gate in _HARD_SIGMOID_V3),
        ),
        "Howard et al. 2019 (MobileNetV3)",
    ),
)

#: The deepest spelling above, in operators: how far forward a match can reach.
_MAX_DEPTH = 9


def match_activation(graph: Graph, value: int) -> Match | None:
    """Find the largest activation that is applied to a value.

    Every result inside the activation must be read inside it only, and every reader of
    ``value`` must belong to it.

    Args:
        graph: The graph.
        value: Id of the node whose output the activation is applied to.

    Returns:
        The match with the most operators, or None.
    """
    best: Match | None = None
    for root in _roots(graph, value):
        for activation in ACTIVATIONS:
            for spelling in activation.spellings:
                nodes = _unify(graph, spelling, root, value)
                if nodes is None or not _is_private(graph, value, nodes, root):
                    continue
                if best is None or len(nodes) > len(best.nodes):
                    best = Match(activation.name, tuple(sorted(nodes)))
    return best


def _roots(graph: Graph, value: int) -> list[int]:
    """Nodes within reach of ``value`` that could be the result of an activation of it."""
    reached: set[int] = set()
    frontier = {value}
    for _ in range(_MAX_DEPTH):
        readers = {reader for node in frontier for reader in graph.readers(node)} - reached
        frontier = {reader for reader in readers if graph.nodes[reader].kind in ELEMENTWISE_KINDS}
        reached |= frontier
    return sorted(reached)


def _is_private(graph: Graph, value: int, nodes: frozenset[int], root: int) -> bool:
    """Whether nobody outside reads ``value`` or an inner result."""
    inner = (nodes - {root}) | {value}
    return all(
        not graph.is_output(node) and all(reader in nodes for reader in graph.readers(node)) for node in inner
    )


def _unify(graph: Graph, expression: Expression, node_id: int, value: int) -> frozenset[int] | None:
    """The operators that make ``node_id`` an instance of ``expression`` with X = ``value``."""
    if isinstance(expression, Input):
        return frozenset() if node_id == value else None
    if isinstance(expression, Operand):
        return frozenset() if node_id != value else None
    if isinstance(expression, Number):
        return frozenset() if _is_number(graph, node_id, expression.value) else None
    node = graph.nodes[node_id]
    if node.kind is not expression.kind or len(node.inputs) != len(expression.args):
        return None
    if not _attrs_match(expression, node):
        return None
    orders = [node.inputs]
    if node.kind in (Kind.ADD, Kind.MULTIPLY):
        orders.append(node.inputs[::-1])
    for inputs in orders:
        parts = [_unify(graph, arg, source, value) for arg, source in zip(expression.args, inputs)]
        if all(part is not None for part in parts):
            return frozenset({node_id}).union(*(part for part in parts if part is not None))
    return None


def _attrs_match(expression: Apply, node: Node) -> bool:
    wanted, got = expression.attrs, node.attrs
    if wanted is None:
        return True
    if isinstance(wanted, ClipAttrs) and isinstance(got, ClipAttrs):
        return _close(wanted.minimum, got.minimum) and _close(wanted.maximum, got.maximum)
    if isinstance(wanted, LeakyReluAttrs) and isinstance(got, LeakyReluAttrs):
        return _close(wanted.alpha, got.alpha)
    return bool(wanted == got)


def _is_number(graph: Graph, node_id: int, wanted: float | None) -> bool:
    array = graph.constant(node_id)
    if array is None or array.size != 1:
        return False
    dtype = graph.nodes[node_id].output.dtype
    number = float(widen(array, dtype).reshape(()))
    if wanted is None or _close(wanted, number):
        return True
    # A sixth in float16 is off by 2e-4: no tolerance, but the very number that dtype has for it.
    return dtype in FLOATS and float(widen(narrow(np.asarray(wanted), dtype), dtype)) == number


def _close(wanted: float, got: float) -> bool:
    return math.isclose(wanted, got, rel_tol=NUMBER_RTOL, abs_tol=NUMBER_RTOL)
