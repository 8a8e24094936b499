"""Operators read as per-channel maps, and channels followed past moves of elements, by value."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tests.support.numerics import evaluate, max_error, per_channel
from tvm_fuse.core.channelwise import (
    MOVE_KINDS,
    Affine,
    after_move,
    axes_after,
    axes_before,
    before_move,
    channel_count,
    read_step,
)
from tvm_fuse.core.graph import Kind

C = 4
CUBE = (C, C, C, C)  # N == C == H == W: a wrong axis fits


def draw(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape) + 2


def apply(affine, x, axes):
    return per_channel(x, affine.scale, affine.shift, axes)


def test_identity_and_composition():
    x = draw(C, 3)
    assert max_error(apply(Affine.identity(3), x, (1,)), x) == 0
    first, second = Affine(draw(3), draw(3, seed=2)), Affine(draw(3, seed=3), draw(3, seed=4))
    wanted = apply(second, apply(first, x, (1,)), (1,))
    assert max_error(apply(second.after(first), x, (1,)), wanted) < 1e-15


# --- operators with a constant -----------------------------------------------------------------


def one_operator(make, shape=CUBE):
    g = GraphBuilder()
    operator = make(g, g.input("x", shape))
    return g.build(operator), g.nodes[operator]


def assert_step(make, axes, shape=CUBE):
    """The map that is read does what the operator does."""
    graph, operator = one_operator(make, shape)
    step = read_step(graph, operator, axes)
    assert step is not None
    assert graph.nodes[step.value].kind is Kind.INPUT
    channels = prod(shape[axis] for axis in axes)
    assert step.affine.scale.shape == step.affine.shift.shape == (channels,)
    x = draw(*shape, seed=9)
    assert max_error(apply(step.affine, x, axes), evaluate(graph, {"x": x})[0]) < 1e-15


OPERATORS = {
    "x + c": lambda g, x, c: g.add(x, c),
    "c + x": lambda g, x, c: g.add(c, x),
    "x - c": lambda g, x, c: g.subtract(x, c),
    "c - x": lambda g, x, c: g.subtract(c, x),
    "x * c": lambda g, x, c: g.multiply(x, c),
    "c * x": lambda g, x, c: g.multiply(c, x),
    "x / c": lambda g, x, c: g.divide(x, c),
}
#: axes, shapes of a constant that holds one number a channel, or one for all
SHAPES = {
    "NCHW": ((1,), [(C, 1, 1), (1, C, 1, 1)]),
    "NHWC": ((3,), [(C,), (1, C), (1, 1, 1, C)]),
    "scalar": ((1,), [(), (1,), (1, 1), (1, 1, 1, 1)]),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize(
    ("axes", "shape"),
    [pytest.param(axes, s, id=f"{name} {s}") for name, (axes, all_) in SHAPES.items() for s in all_],
)
def test_steps(operator, axes, shape):
    assert_step(lambda g, x: operator(g, x, draw(*shape)), axes)


@pytest.mark.parametrize("axis", range(4))
def test_bias_add(axis):
    assert_step(lambda g, x: g.bias_add(x, draw(C), axis=axis), (axis,))


PACKED = {
    "both axes": (1, 2, 1, 1, 4),
    "block only": (4,),
    "outer only": (2, 1, 1, 1),
    "scalar": (),
}


@pytest.mark.parametrize("shape", PACKED.values(), ids=PACKED.keys())
def test_packed_channels(shape):
    """NCHW4c with 8 channels: a constant may say less than both axes."""
    assert_step(lambda g, x: g.multiply(x, draw(*shape)), (1, 4), shape=(2, 2, 4, 4, 4))


NO_STEPS = {
    "c / x": (lambda g, x: g.divide(draw(C, 1, 1), x), (1,)),
    "1 / x": (lambda g, x: g.divide(1.0, x), (1,)),
    "along W": (lambda g, x: g.add(x, draw(C)), (1,)),
    "along H": (lambda g, x: g.add(x, draw(C, 1)), (1,)),
    "along N": (lambda g, x: g.add(x, draw(C, 1, 1, 1)), (1,)),
    "NHWC, along H": (lambda g, x: g.add(x, draw(C, 1, 1)), (3,)),
    "every element": (lambda g, x: g.add(x, draw(C, C, C)), (1,)),
    "two axes": (lambda g, x: g.add(x, draw(C, C, 1)), (1,)),
    "bias_add of another axis": (lambda g, x: g.bias_add(x, draw(C), axis=3), (1,)),
    "bias_add of packed channels": (lambda g, x: g.bias_add(x, draw(C), axis=1), (1, 3)),
    "higher rank": (lambda g, x: g.add(x, draw(1, C, 1, 1, 1)), (1,)),
    "no constant": (lambda g, x: g.add(x, x), (1,)),
    "another kind": (lambda g, x: g.elementwise("maximum", x, draw(C, 1, 1)), (1,)),
    "one operand": (lambda g, x: g.relu(x), (1,)),
}


@pytest.mark.parametrize(("make", "axes"), NO_STEPS.values(), ids=NO_STEPS.keys())
def test_what_is_no_step(make, axes):
    graph, operator = one_operator(make)
    assert read_step(graph, operator, axes) is None


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 1, 1, 1)], ids=["channels", "batch"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_broadcasting_up_is_no_step(operator, shape):
    """One channel, or one image, that becomes several."""
    graph, node = one_operator(lambda g, x: operator(g, x, draw(*shape)), shape=(1, 1, 5, 5))
    assert read_step(graph, node, (1,)) is None


def test_two_constants_are_no_step():
    g = GraphBuilder()
    operator = g.add(draw(*CUBE), draw(C, 1, 1))
    assert read_step(g.build(operator), g.nodes[operator], (1,)) is None


def test_symbolic_channels_are_no_step_and_a_symbolic_batch_is_one():
    graph, operator = one_operator(lambda g, x: g.add(x, draw(C, 1, 1)), ("n", C, "h", "w"))
    assert read_step(graph, operator, (1,)) is not None
    graph, operator = one_operator(lambda g, x: g.add(x, 2.0), ("n", "c", 4, 4))
    assert read_step(graph, operator, (1,)) is None


def test_division_by_zero_is_left_to_whoever_makes_weights():
    graph, operator = one_operator(lambda g, x: g.divide(x, np.array([1.0, 0, -2, 4]).reshape(C, 1, 1)))
    step = read_step(graph, operator, (1,))
    np.testing.assert_array_equal(step.affine.scale, [1, np.inf, -0.5, 0.25])


COUNTS = [
    ((2, 8, 5), (1,), 8),
    ((2, 8, 5, 4), (1, 3), 32),
    (("n", 8), (1,), 8),
    (("n", 8), (0,), None),
    ((2, 8), (5,), None),
]


@pytest.mark.parametrize(("shape", "axes", "count"), COUNTS, ids=str)
def test_channel_count(shape, axes, count):
    assert channel_count(shape, axes) == count


# --- moves -------------------------------------------------------------------------------------

#: shape, axes of the channel in it, move, axes in the result (None: none)
MOVES = {
    "NCHW to NHWC": ((2, 4, 4, 4), (1,), lambda g, x: g.transpose(x, 0, 2, 3, 1), (3,)),
    "NHWC to NCHW": ((2, 4, 4, 4), (3,), lambda g, x: g.transpose(x, 0, 3, 1, 2), (1,)),
    "channels first": ((2, 4, 4, 4), (1,), lambda g, x: g.transpose(x, 1, 0, 3, 2), (0,)),
    "packed, order kept": ((2, 2, 3, 3, 4), (1, 4), lambda g, x: g.transpose(x, 0, 2, 1, 4, 3), (2, 3)),
    "packed, order swapped": ((2, 4, 3, 3, 4), (1, 4), lambda g, x: g.transpose(x, 0, 4, 2, 3, 1), None),
    "NCHW to NCHW4c": ((2, 8, 3, 3), (1,), lambda g, x: g.layout_transform(x, "NCHW", "NCHW4c"), (1, 4)),
    "NCHW4c to NCHW": ((2, 2, 3, 3, 4), (1, 4), lambda g, x: g.layout_transform(x, "NCHW4c", "NCHW"), (1,)),
    "NCHW4c to NCHW2c": (
        (2, 2, 3, 3, 4),
        (1, 4),
        lambda g, x: g.layout_transform(x, "NCHW4c", "NCHW2c"),
        (1, 4),
    ),
    "NCHW to NHWC by layout": (
        (2, 4, 4, 4),
        (1,),
        lambda g, x: g.layout_transform(x, "NCHW", "NHWC"),
        (3,),
    ),
    "layout, another axis": ((4, 4, 4, 4), (3,), lambda g, x: g.layout_transform(x, "NCHW", "NHWC"), None),
    "layout, half of the channel": (
        (2, 2, 4, 4, 4),
        (1,),
        lambda g, x: g.layout_transform(x, "NCHW4c", "NCHW"),
        None,
    ),
    "layout without channels": ((2, 4), (1,), lambda g, x: g.layout_transform(x, "OI", "OI4i"), None),
    "image flattened": ((2, 4, 4, 4), (1,), lambda g, x: g.reshape(x, 2, 4, 16), (1,)),
    "image unflattened": ((2, 4, 16), (1,), lambda g, x: g.reshape(x, 2, 4, 4, 4), (1,)),
    "ones dropped": ((2, 4, 1, 1), (1,), lambda g, x: g.reshape(x, 2, 4), (1,)),
    "ones added": ((2, 4), (1,), lambda g, x: g.reshape(x, 2, 4, 1, 1), (1,)),
    "ones dropped, batch 1": ((1, 4, 1, 1), (1,), lambda g, x: g.reshape(x, 1, 4), (1,)),
    "ones added, batch 1": ((1, 4), (1,), lambda g, x: g.reshape(x, 1, 1, 4, 1), (2,)),
    "expand_dims before": ((2, 4), (1,), lambda g, x: g.expand_dims(x, 1, 2), (3,)),
    "expand_dims after": ((2, 4), (1,), lambda g, x: g.expand_dims(x, 2, 2), (1,)),
    "one channel": ((2, 1, 4, 4), (1,), lambda g, x: g.reshape(x, 2, 1, 16), (1,)),
    "one channel, batch 1": ((1, 1, 4, 4), (1,), lambda g, x: g.reshape(x, 1, 1, 16), (1,)),
    "one channel dropped": ((2, 1, 4), (1,), lambda g, x: g.reshape(x, 2, 4), None),
    "channels split": ((2, 8, 3), (1,), lambda g, x: g.reshape(x, 2, 2, 4, 3), (1, 2)),
    "channels merged": ((2, 2, 4, 3), (1, 2), lambda g, x: g.reshape(x, 2, 8, 3), (1,)),
    "batch merged": ((2, 3, 4), (2,), lambda g, x: g.reshape(x, 6, 4), (1,)),
    "equal sizes, another axis": ((4, 4, 4), (1,), lambda g, x: g.reshape(x, 16, 4), None),
    "equal sizes, same axis": ((4, 4, 4), (2,), lambda g, x: g.reshape(x, 16, 4), (1,)),
    "a size that only fits by number": ((2, 6, 4), (1,), lambda g, x: g.reshape(x, 4, 6, 2), None),
    "elements shift": ((2, 4, 6), (1,), lambda g, x: g.reshape(x, 2, 6, 4), None),
    "not side by side": ((2, 2, 4, 3), (1, 3), lambda g, x: g.reshape(x, 2, 2, 12), None),
    "symbolic batch": (("n", 4, 4, 4), (1,), lambda g, x: g.reshape(x, "n", 4, 16), (1,)),
    "symbolic image": (("n", 4, "h", "w"), (1,), lambda g, x: g.reshape(x, "n", 4, "w", "h"), (1,)),
    "unknown sizes": (("?", 4, "?"), (1,), lambda g, x: g.reshape(x, "?", 4, "?"), None),
    "symbols that differ": (("n", 4, "h"), (1,), lambda g, x: g.reshape(x, "h", 4, "n"), None),
    "symbolic channels": ((2, "c", 4), (1,), lambda g, x: g.reshape(x, 2, "c", 2, 2), None),
    "cast": ((2, 4), (1,), lambda g, x: g.cast(x, "float64"), (1,)),
    "cast to integers": ((2, 4), (1,), lambda g, x: g.cast(x, "int32"), None),
}


@pytest.mark.parametrize(("shape", "axes", "move", "wanted"), MOVES.values(), ids=MOVES.keys())
def test_moves(shape, axes, move, wanted):
    graph, node = one_operator(move, shape)
    assert node.kind in MOVE_KINDS
    assert axes_after(graph, node, axes) == wanted
    if wanted is not None:
        assert axes_before(graph, node, wanted) == axes


@pytest.mark.parametrize(
    "name",
    [name for name, case in MOVES.items() if case[3] and all(isinstance(n, int) for n in case[0])],
)
def test_moves_by_value(name):
    """A map before the move equals the map after it."""
    shape, axes, move, wanted = MOVES[name]
    graph, _ = one_operator(move, shape)
    x = draw(*shape)
    channels = prod(shape[axis] for axis in axes)
    affine = Affine(draw(channels, seed=2), draw(channels, seed=3))
    before = evaluate(graph, {"x": apply(affine, x, axes)})[0]
    after = apply(affine, evaluate(graph, {"x": x})[0], wanted)
    assert max_error(before, after) == 0


#: dtypes of operand and result -> may a map go from the result to the operand, and the other way
CASTS = {
    ("float16", "float32"): (True, True),
    ("bfloat16", "float32"): (True, True),
    ("float32", "float64"): (True, True),
    ("float32", "float16"): (True, False),  # x - mean may fit into float16 where x does not
    ("float32", "bfloat16"): (True, False),
    ("float16", "bfloat16"): (True, False),
    ("bfloat16", "float16"): (True, False),
    ("int8", "float32"): (False, False),
    ("float32", "int32"): (False, False),
    ("int8", "int32"): (False, False),
}


@pytest.mark.parametrize(("dtypes", "allowed"), CASTS.items(), ids=lambda case: " ".join(map(str, case)))
def test_casts(dtypes, allowed):
    g = GraphBuilder()
    node = g.cast(g.input("x", (2, C), dtypes[0]), dtypes[1])
    graph = g.build(node)
    assert (axes_before(graph, g.nodes[node], (1,)), axes_after(graph, g.nodes[node], (1,))) == tuple(
        (1,) if way else None for way in allowed
    )


# --- moves that make more channels of one ------------------------------------------------------

#: shape, axes of the channel in it, shape of the reshape, axes in the result
FLATTENS = {
    "NCHW": ((2, 4, 4, 4), (1,), (2, 64), (1,)),
    "NHWC": ((2, 4, 4, 4), (3,), (2, 64), (1,)),
    "batch 1": ((1, 4, 4, 4), (1,), (1, 64), (1,)),
    "axis in the middle": ((2, 4, 4, 4), (2,), (2, 64), (1,)),
    "partly": ((2, 4, 4, 4), (1,), (2, 16, 4), (1,)),
    "packed": ((2, 2, 3, 3, 4), (1, 4), (2, 72), (1,)),
    "batch too": ((2, 4, 4), (1,), (8, 4), (0,)),
    "all": ((2, 4, 4), (1,), (32,), (0,)),
}


@pytest.mark.parametrize(("shape", "axes", "flat", "wanted"), FLATTENS.values(), ids=FLATTENS.keys())
def test_merged_axes_repeat_the_map(shape, axes, flat, wanted):
    graph, node = one_operator(lambda g, x: g.reshape(x, *flat), shape)
    assert axes_after(graph, node, axes) is None
    channels = prod(shape[axis] for axis in axes)
    affine = Affine(draw(channels, seed=2), draw(channels, seed=3))
    got_axes, got = after_move(graph, node, axes, affine)
    assert got_axes == wanted
    x = draw(*shape)
    assert max_error(apply(affine, x, axes).reshape(flat), apply(got, x.reshape(flat), got_axes)) == 0
    graph, node = one_operator(lambda g, x: g.reshape(x, *shape), flat)  # and the way back
    got_axes, got = before_move(graph, node, axes, affine)
    assert max_error(apply(affine, x, axes).reshape(flat), apply(got, x.reshape(flat), got_axes)) == 0


NO_MOVES = {
    "symbolic image": (("n", 4, "h", "w"), (1,), lambda g, x: g.reshape(x, "n", "m")),
    "symbolic channels": ((2, "c", 4), (1,), lambda g, x: g.reshape(x, 2, "m")),
    "packed, order swapped": ((2, 4, 3, 3, 4), (1, 4), lambda g, x: g.transpose(x, 0, 4, 2, 3, 1)),
    "layout, another axis": ((4, 4, 4, 4), (3,), lambda g, x: g.layout_transform(x, "NCHW", "NHWC")),
    "cast to integers": ((2, 4), (1,), lambda g, x: g.cast(x, "int32")),
}


@pytest.mark.parametrize(("shape", "axes", "move"), NO_MOVES.values(), ids=NO_MOVES.keys())
def test_moves_past_which_no_map_goes(shape, axes, move):
    graph, node = one_operator(move, shape)
    assert after_move(graph, node, axes, Affine.identity(4)) is None
