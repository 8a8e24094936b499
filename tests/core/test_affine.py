"""Scales and shifts after a layer: what they fold into, by value, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, apply_folds
from tests.support.numerics import evaluate
from tvm_fuse.core.affine import plan_affine_folds
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.reason import Code

C = 4
SHAPE = (2, C, C, C)  # a wrong axis fits
RNG = np.random.default_rng(0)
VECTORS = RNG.uniform(0.5, 2.0, (8, C)) * np.where(np.arange(C) % 2, -1.0, 1.0)


def column(index, rank=3):
    return VECTORS[index].reshape((1,) * (rank - 3) + (C, 1, 1))


def conv(g, x=None):
    return g.conv2d(g.input("x", SHAPE) if x is None else x, RNG.normal(size=(C, C, 1, 1)))


def folded(g, *outputs):
    """The graph after folding, its records and decisions, checked by value."""
    graph = g.build(*outputs)
    records, decisions = plan_affine_folds(graph)
    after = apply_folds(graph, records)
    feeds = {node.name or node.op: RNG.normal(size=node.output.shape) for node in graph.of_kind(Kind.INPUT)}
    for got, want in zip(evaluate(after, feeds), evaluate(graph, feeds)):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    return after, records, decisions


RUNS = {
    "(x - m) * s + b": lambda g, y: g.add(g.multiply(g.subtract(y, column(0)), column(1)), column(2)),
    "(x - m) / d * g + b": lambda g, y: g.add(
        g.multiply(g.divide(g.subtract(y, column(0)), column(1)), column(2)), column(3)
    ),
    "b + g * x, constants first": lambda g, y: g.add(column(0, 4), g.multiply(column(1, 4), y)),
    "m - x": lambda g, y: g.subtract(column(0), y),
    "x * s": lambda g, y: g.multiply(y, column(0)),
    "x / d": lambda g, y: g.divide(y, column(0)),
    "scalars": lambda g, y: g.add(g.multiply(y, 0.5), 0.1),
    "bias, then pieces": lambda g, y: g.multiply(g.bias_add(y, VECTORS[0]), column(1)),
    "two shifts": lambda g, y: g.add(g.add(y, column(0)), column(1)),
    "a zero in the scale": lambda g, y: g.multiply(y, np.array([0.0, 1.0, -1.0, 2.0]).reshape(C, 1, 1)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_a_run_becomes_one_bias(run):
    g = GraphBuilder()
    after, records, decisions = folded(g, run(g, conv(g)))
    assert len(records) == 1
    assert [decision.applied for decision in decisions] == [True]
    kinds = [node.kind for node in after.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT)]
    assert kinds in ([Kind.CONV2D, Kind.ADD], [Kind.CONV2D])
    assert (Kind.ADD in kinds) == bool(records[0].edit.layers[0].bias is not None)
    assert plan_affine_folds(after) == ((), ())  # folding again finds nothing


def test_dense():
    g = GraphBuilder()
    y = g.dense(g.input("x", (3, C)), RNG.normal(size=(C, C)))
    _, records, _ = folded(g, g.multiply(g.add(y, VECTORS[0]), VECTORS[1]))
    assert len(records) == 1


def test_the_run_ends_at_what_does_not_scale():
    g = GraphBuilder()
    y = g.multiply(g.relu(g.multiply(conv(g), column(0))), column(1))
    after, records, _ = folded(g, y)
    assert [record.operators for record in records] == [("multiply",)]
    assert len(after.of_kind(Kind.MULTIPLY)) == 1


def hard_sigmoid(g, y):
    return g.clip(g.add(g.multiply(y, 0.2), 0.5), 0.0, 1.0)


def hard_swish(g, y):
    return g.divide(g.multiply(y, g.clip(g.add(y, 3.0), 0.0, 6.0)), 6.0)


STAYING = {
    "one bias": lambda g, y: (g.add(y, column(0)),),
    "nothing": lambda g, y: (g.relu(y),),
    "along another axis": lambda g, y: (g.multiply(y, VECTORS[0]),),
    "full size": lambda g, y: (g.multiply(y, RNG.normal(size=SHAPE[1:])),),
    "wider result": lambda g, y: (g.multiply(y, np.ones((1, 1, C, 1, 1))),),
    "not a constant": lambda g, y: (g.multiply(y, g.input("s", (C, 1, 1))),),
    "constant over value": lambda g, y: (g.divide(column(0), y),),
    "squared": lambda g, y: (g.multiply(y, y),),
    "an activation's own numbers": lambda g, y: (hard_sigmoid(g, y),),
    "after a bias, an activation's own": lambda g, y: (hard_sigmoid(g, g.add(y, column(0))),),
    "an activation's last number before a layer": lambda g, y: (conv(g, hard_swish(g, y)),),
}


@pytest.mark.parametrize("case", STAYING.values(), ids=STAYING.keys())
def test_what_stays(case):
    g = GraphBuilder()
    graph = g.build(*case(g, conv(g)))
    assert plan_affine_folds(graph) == ((), ())


def test_what_follows_an_activation_still_goes_into_the_next_layer():
    g = GraphBuilder()
    _, records, _ = folded(g, conv(g, g.multiply(hard_swish(g, conv(g)), column(0))))
    assert [record.operators for record in records] == [("multiply",)]


REFUSED = {
    "weight": (
        lambda g: g.conv2d(g.input("x", SHAPE), g.input("w", (C, C, 1, 1))),
        2.0,
        Code.WEIGHT_NOT_CONSTANT,
    ),
    "overflow": (lambda g: conv(g), np.inf, Code.FOLD_OVERFLOW),
    "NaN": (lambda g: conv(g), np.nan, Code.FOLD_OVERFLOW),
}


@pytest.mark.parametrize(("make", "scale", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_have_codes(make, scale, code):
    g = GraphBuilder()
    graph = g.build(g.multiply(make(g), scale))
    records, (decision,) = plan_affine_folds(graph)
    assert (records, decision.reason.code) == ((), code)


@pytest.mark.parametrize(
    ("read_too", "code"),
    [(lambda g, y: g.relu(y), Code.ANCHOR_OUTPUT_SHARED), (lambda g, y: y, Code.ANCHOR_OUTPUT_RETURNED)],
    ids=["shared", "returned"],
)
def test_a_layer_that_is_read_elsewhere(read_too, code):
    g = GraphBuilder()
    y = conv(g)
    records, (decision,) = plan_affine_folds(g.build(g.multiply(y, column(0)), read_too(g, y)))
    assert (records, decision.reason.code) == ((), code)


BEFORE = {
    "(x - m) / d": lambda g, x: g.divide(g.subtract(x, column(0)), column(1)),
    "x * s": lambda g, x: g.multiply(x, column(0)),
    "x + b": lambda g, x: g.add(x, column(0)),
    "scalars": lambda g, x: g.subtract(g.multiply(x, 2.0), 1.0),
    "a zero in the scale": lambda g, x: g.add(g.multiply(x, np.array([0.0, 1, -1, 2]).reshape(C, 1, 1)), 3.0),
}


@pytest.mark.parametrize("run", BEFORE.values(), ids=BEFORE.keys())
def test_a_run_before_a_layer(run):
    """A model that normalizes its input."""
    g = GraphBuilder()
    after, records, _ = folded(g, g.add(conv(g, run(g, g.input("x", SHAPE))), column(3)))
    assert len(records) == 1
    kinds = [node.kind for node in after.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT)]
    assert kinds == [Kind.CONV2D, Kind.ADD]
    assert plan_affine_folds(after) == ((), ())


#: layout of the layer that reads a run of scalars, or that a run follows at a distance
SCALARS = {
    "NHWC conv": lambda g, x: g.conv2d(x, RNG.normal(size=(C, C, 1, 1)), layout="NHWC"),
    "NHWC conv, moved": lambda g, x: g.conv2d(g.transpose(x, 0, 3, 1, 2), RNG.normal(size=(C, C, 2, 2))),
    "rank 4 dense": lambda g, x: g.dense(x, RNG.normal(size=(C, C))),
    "batch_matmul": lambda g, x: g.matmul(
        g.reshape(x, 2 * C, C, C), RNG.normal(size=(2 * C, C, C)), kernel="BOI"
    ),
    "flattened": lambda g, x: g.dense(g.reshape(x, 2, C**3), RNG.normal(size=(3, C**3))),
}


@pytest.mark.parametrize("layer", SCALARS.values(), ids=SCALARS.keys())
def test_scalars_before_a_layer_fit_any_axis(layer):
    """``x / 127.5 - 1``: the channels are those of the layer that reads it."""
    g = GraphBuilder()
    x = g.subtract(g.divide(g.input("x", SHAPE), 127.5), 1.0)
    after, records, _ = folded(g, layer(g, x))
    assert len(records) == 1
    assert not after.of_kind(Kind.DIVIDE, Kind.SUBTRACT)


def test_scalars_after_moved_layers_fit_any_axis():
    g = GraphBuilder()
    parts = [g.transpose(conv(g), 0, 2, 3, 1) for _ in range(2)]
    after, records, _ = folded(g, g.multiply(g.concatenate(*parts, axis=3), 2.0))
    assert [len(record.layers) for record in records] == [2]
    assert not after.of_kind(Kind.MULTIPLY)


def test_a_vector_fits_its_own_axis_only():
    """Along W of NHWC data, whose C is as large."""
    g = GraphBuilder()
    x = g.multiply(g.input("x", SHAPE), VECTORS[0].reshape(C, 1))
    y = g.conv2d(x, RNG.normal(size=(C, C, 1, 1)), layout="NHWC")
    assert plan_affine_folds(g.build(y))[0] == ()


def test_scalars_that_no_layer_takes_stay():
    g = GraphBuilder()
    graph = g.build(g.relu(g.multiply(g.input("x", SHAPE), 2.0)))
    assert plan_affine_folds(graph) == ((), ())


def test_one_add_after_joined_layers_goes_forward_or_stays():
    """Pushed back it would be one add for each layer."""

    def joined(g):
        x = g.input("x", SHAPE)
        return g.add(g.concatenate(conv(g, x), conv(g, x)), 1.5)

    g = GraphBuilder()
    assert plan_affine_folds(g.build(g.relu(joined(g))))[0] == ()
    g = GraphBuilder()
    after, records, _ = folded(g, g.conv2d(joined(g), RNG.normal(size=(C, 2 * C, 1, 1))))
    assert [len(record.layers) for record in records] == [1]
    assert [node.kind for node in after.nodes][-1] is Kind.ADD


def test_runs_on_both_sides_of_a_layer_take_turns():
    """Two records of one round touch no node twice; the run after the layer comes first."""
    g = GraphBuilder()
    y = g.multiply(conv(g, g.multiply(g.input("x", SHAPE), column(0))), column(1))
    after, records, _ = folded(g, y)
    assert [record.edit.aliases.keys() for record in records] == [{y}]
    records, _ = plan_affine_folds(after)
    assert len(records) == 1
    assert not apply_folds(after, records).of_kind(Kind.MULTIPLY)
