"""Every spelling of every activation is found, in both operand orders, and near misses are not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tests.support.numerics import evaluate, max_error
from tvm_fuse.core import activations
from tvm_fuse.core.activations import ACTIVATIONS, Apply, Number, Operand, match_activation
from tvm_fuse.core.dtypes import narrow
from tvm_fuse.core.graph import Kind, LeakyReluAttrs

SHAPE = (1, 2, 3, 3)
COMMUTATIVE = (Kind.ADD, Kind.MULTIPLY)


def build(g, expression, x, swaps, leaf=1.5):
    """Add an expression tree; ``swaps`` yields whether to swap the operands of the next commutative node."""
    if isinstance(expression, Number):
        return g.const(leaf if expression.value is None else expression.value)
    if isinstance(expression, Operand):
        return g.const(np.array([0.25, -0.5]))
    if not isinstance(expression, Apply):
        return x
    args = [build(g, arg, x, swaps, leaf) for arg in expression.args]
    if expression.kind in COMMUTATIVE and next(swaps):
        args.reverse()
    attrs = expression.attrs
    if expression.kind is Kind.CLIP:
        return g.clip(*args, *((attrs.minimum, attrs.maximum) if attrs else (-1.0, 1.5)))
    return getattr(g, expression.kind.value)(*args)


def commutative_nodes(expression):
    if not isinstance(expression, Apply):
        return 0
    return (expression.kind in COMMUTATIVE) + sum(commutative_nodes(arg) for arg in expression.args)


def depth(expression):
    return 1 + max(depth(arg) for arg in expression.args) if isinstance(expression, Apply) else 0


def operand_orders(count):
    """All of them, or for many operators each of them the other way round, alone and all at once."""
    if count <= 4:
        return list(itertools.product([False, True], repeat=count))
    alone = [tuple(index == swapped for index in range(count)) for swapped in range(count)]
    return [(False,) * count, *alone, (True,) * count]


def spellings():
    for record in ACTIVATIONS:
        for number, spelling in enumerate(record.spellings):
            for swaps in operand_orders(commutative_nodes(spelling)):
                order = "".join("ba" if swap else "ab" for swap in swaps)
                yield pytest.param(record, spelling, swaps, id=f"{record.name}-{number}-{order}")


def matched(g, x, *outputs):
    return match_activation(g.build(*outputs), x)


@pytest.mark.parametrize(("record", "spelling", "swaps"), list(spellings()))
def test_every_spelling_in_every_operand_order(record, spelling, swaps):
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    root = build(g, spelling, x, iter(swaps))
    graph = g.build(root)
    found = match_activation(graph, x)
    assert found.activation == record.name
    operators = [node.id for node in graph.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT)]
    assert list(found.nodes) == operators
    assert found.nodes[-1] == root
    if record.reference is not None:
        feeds = {"x": np.linspace(-8, 8, 18).reshape(SHAPE)}
        assert max_error(evaluate(graph, feeds)[0], record.reference(feeds["x"])) < 1e-12


def test_a_number_in_bfloat16():
    """Its bits are no number: 0x40C0 is 6."""
    g = GraphBuilder("bfloat16")
    x = g.input("x", SHAPE)

    def const(value):
        return g.const(narrow(np.asarray(value), "bfloat16"), "bfloat16")

    root = g.multiply(g.multiply(x, g.clip(g.add(x, const(3.0)), 0.0, 6.0)), const(1 / 6))
    assert matched(g, x, root).activation == "hard_swish"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)], ids=str)
def test_numbers_as_stored_in_the_dtype_of_the_model(dtype, shape):
    """1/6 has a relative error of 2e-4 in float16."""
    g = GraphBuilder(dtype)
    x = g.input("x", SHAPE)
    three, sixth = (np.full(shape, value, dtype) for value in (3.0, 1 / 6))
    root = g.multiply(g.multiply(x, g.clip(g.add(x, three), 0.0, 6.0)), sixth)
    assert matched(g, x, root).activation == "hard_swish"


def test_table_is_sound():
    names = [record.name for record in ACTIVATIONS]
    assert len(names) == len(set(names))
    assert all(record.source and record.spellings for record in ACTIVATIONS)
    deepest = max(depth(spelling) for record in ACTIVATIONS for spelling in record.spellings)
    assert deepest <= activations._MAX_DEPTH


@pytest.mark.parametrize(
    ("record", "limits"),
    [pytest.param(record, (-1e3, 1e3), id=record.name) for record in ACTIVATIONS if record.reference],
)
def test_references_at_large_inputs(record, limits):
    with np.errstate(over="ignore"):
        low, high = record.reference(np.array(limits))
    assert np.isfinite([low, high]).all()
    lowest, highest = (
        {"tanh": -1, "selu": -1.7580993},
        {"relu6": 6, "tanh": 1, "sigmoid": 1, "selu": 1050.701},
    )
    assert low == pytest.approx(lowest.get(record.name, 0.0), abs=1e-7)
    assert high == pytest.approx(highest.get(record.name, 1e3))


# --- near misses -------------------------------------------------------------------------------


def _hard_swish(g, x, shift=3.0, low=0.0, high=6.0, by=6.0, gate_of=None):
    return g.divide(g.multiply(x, g.clip(g.add(x if gate_of is None else gate_of, shift), low, high)), by)


def _elu(g, x, alpha, combine=None):
    inner = (combine or g.subtract)(g.const(1.0), g.exp(x))
    return g.add(g.multiply(alpha, g.relu(inner)), g.relu(x))


def _gelu(g, x, function):
    return g.multiply(g.multiply(0.5, x), g.add(1.0, function))


def _cubic(g, x, exponent):
    return g.multiply((2 / np.pi) ** 0.5, g.add(x, g.multiply(0.044715, g.power(x, exponent))))


NEAR_MISSES = [
    ("x / 5 instead of / 6", lambda g, x: _hard_swish(g, x, by=5.0)),
    ("6.001", lambda g, x: _hard_swish(g, x, by=6.001)),
    ("clip to 5", lambda g, x: _hard_swish(g, x, high=5.0)),
    ("clip from -1", lambda g, x: _hard_swish(g, x, low=-1.0)),
    ("x + 2", lambda g, x: _hard_swish(g, x, shift=2.0)),
    ("divided the wrong way round", lambda g, x: g.divide(6.0, g.multiply(x, g.clip(g.add(x, 3.0))))),
    ("subtract 3", lambda g, x: g.divide(g.multiply(x, g.clip(g.subtract(x, 3.0))), 6.0)),
    ("a vector", lambda g, x: g.multiply(g.multiply(x, g.clip(g.add(x, 3.0))), np.full((2, 1, 1), 1 / 6))),
    ("gate of another value", lambda g, x: _hard_swish(g, x, gate_of=g.input("z", SHAPE))),
    ("silu with a gate of another value", lambda g, x: g.multiply(x, g.sigmoid(g.input("z", SHAPE)))),
    ("sigmoid of 1.7 x", lambda g, x: g.multiply(x, g.sigmoid(g.multiply(x, 1.7)))),
    ("selu with another scale", lambda g, x: g.multiply(1.06, _elu(g, x, -1.6732632423543772))),
    ("elu from 1 + exp", lambda g, x: _elu(g, x, -1.0, g.add)),
    ("softplus of base 2", lambda g, x: g.log(g.add(g.exp(x), 2.0))),
    ("gelu of x / 1.4", lambda g, x: _gelu(g, x, g.erf(g.divide(x, 1.4)))),
    ("gelu of another value", lambda g, x: _gelu(g, x, g.erf(g.divide(g.input("z", SHAPE), 2**0.5)))),
    ("gelu with x^2", lambda g, x: _gelu(g, x, g.tanh(_cubic(g, x, 2.0)))),
    ("prelu of another value by this", lambda g, x: g.prelu(g.input("z", SHAPE), x)),
    ("x * tanh(x)", lambda g, x: g.multiply(x, g.tanh(x))),
    ("silu with add", lambda g, x: g.add(x, g.sigmoid(x))),
    ("clip inside, bounds 0 to 2", lambda g, x: g.clip(g.add(g.multiply(x, 0.2), 0.5), 0.0, 2.0)),
    ("exp", lambda g, x: g.elementwise("exp", x)),
    ("add of a number", lambda g, x: g.add(x, 3.0)),
]  # fmt: skip


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in NEAR_MISSES])
def test_near_misses(make):
    """Nothing, or at most a part of it: never the whole under a wrong name."""
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    root = make(g, x)
    found = matched(g, x, root)
    assert found is None or root not in found.nodes


@pytest.mark.parametrize(
    ("low", "high", "name"), [(0, 6, "relu6"), (0, 5, "clip"), (-6, 6, "clip"), (0, 1, "clip")]
)
def test_bounds_decide_between_clip_and_relu6(low, high, name):
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    assert matched(g, x, g.clip(x, low, high)).activation == name


def test_longest_match_wins():
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    gate = g.divide(g.clip(g.add(x, 3.0)), 6.0)
    root = g.multiply(x, gate)
    found = matched(g, x, g.relu(root))
    assert (found.activation, found.nodes[-1]) == ("hard_swish", root)


def test_hard_sigmoid_alone_when_its_gate_gates_something_else():
    g = GraphBuilder()
    x, z = g.input("x", SHAPE), g.input("z", SHAPE)
    gate = g.divide(g.clip(g.add(x, 3.0)), 6.0)
    found = matched(g, x, g.multiply(z, gate))
    assert (found.activation, found.nodes[-1]) == ("hard_sigmoid", gate)


@pytest.mark.parametrize("leak", ["value", "inner", "value returned", "inner returned"])
def test_what_is_read_outside_is_not_matched(leak):
    g = GraphBuilder()
    x = g.relu(g.input("x", SHAPE))
    inner = g.sigmoid(x)
    root = g.multiply(x, inner)
    outputs = {
        "value": lambda: (root, g.tanh(x)),
        "inner": lambda: (root, g.tanh(inner)),
        "value returned": lambda: (root, x),
        "inner returned": lambda: (root, inner),
    }[leak]()
    assert matched(g, x, *outputs) is None


def test_root_may_have_many_readers():
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    root = g.relu(x)
    assert matched(g, x, g.tanh(root), g.sigmoid(root), root).activation == "relu"


def test_attributes_of_leaky_relu_compare_by_value():
    exact = Apply(Kind.LEAKY_RELU, (activations.X,), LeakyReluAttrs(0.1))
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    close, far = g.nodes[g.leaky_relu(x, 0.1 + 1e-9)], g.nodes[g.leaky_relu(x, 0.2)]
    assert activations._attrs_match(exact, close)
    assert not activations._attrs_match(exact, far)
