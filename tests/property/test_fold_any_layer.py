"""Any layer in any layout, next to any batch norm in any spelling, in any dtype: the outputs stay.

``TVM_FUSE_EXAMPLES=20000 python -m pytest -m slow tests/property/test_fold_any_layer.py`` for more.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.graphs import (
    GraphBuilder,
    apply_folds,
    apply_recompositions,
    shape_in,
)
from tests.support.numerics import evaluate, from_plain
from tvm_fuse.core.dtypes import narrow
from tvm_fuse.core.fold import fold_scale, plan_folds, read_batch_norm
from tvm_fuse.core.graph import ANCHOR_KINDS, Graph, Kind
from tvm_fuse.core.reason import Code
from tvm_fuse.core.recompose import plan_recompositions
from tvm_fuse.core.rounds import count_rounds, plan_round

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.spellings import Spelling, norms

COMMON = {"derandomize": True, "deadline": None, "database": None}
EPSILONS = (1e-5, 1e-3, 0.1)

#: Spatial axes -> (data layout, kernel layout); blocks only where nothing is grouped.
PLAIN = {
    1: [("NCW", "OIW"), ("NWC", "WIO"), ("NWC", "OWI")],
    2: [("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "HWOI"), ("NHWC", "OHWI"), ("NCHW", "OHWI")],
    3: [("NCDHW", "OIDHW"), ("NDHWC", "DHWIO"), ("NDHWC", "ODHWI")],
}
BLOCKED = [("NCHW2c", "OIHW2i2o"), ("NCHW2c", "OIHW2o2i")]
TRANSPOSED = {1: "IOW", 2: "IOHW", 3: "IODHW"}


class Layer(NamedTuple):
    """A layer that is drawn: how to add it to a graph, and the shapes and channel axes around it."""

    add: object
    data: tuple
    channels: tuple  # in, out
    axes: tuple  # channel axis of the data and of the output; None where it is blocked


@st.composite
def convolutions(draw, weights):
    rank = draw(st.integers(1, 3))
    space = "DHW"[-rank:]
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layout, kernel = draw(st.sampled_from(PLAIN[rank]))
    if groups == 1 and rank == 2 and draw(st.integers(0, 4)) == 0:
        (layout, kernel), inner, outer = draw(st.sampled_from(BLOCKED)), 2 * inner, 2 * outer
    transposed = draw(st.booleans()) and layout.startswith("NC") and layout.isalpha()
    taps = [draw(st.integers(1, 3)) for _ in space]
    options = {
        "strides": tuple(draw(st.integers(1, 2)) for _ in space),
        "padding": draw(
            st.sampled_from([(0,) * 2 * rank, tuple(draw(st.integers(0, 2)) for _ in space * 2)])
        ),
        "dilation": tuple(1 if transposed else draw(st.integers(1, 2)) for _ in space),
        "groups": groups,
    }
    channels_in, channels_out = groups * inner, groups * outer
    if transposed:
        kernel, shape = TRANSPOSED[rank], (channels_in, outer, *taps)
    elif inner == 1 and kernel in ("OIHW", "HWOI") and draw(st.booleans()):  # depthwise: (C, multiplier)
        shape = (groups, outer, *taps)
    else:
        shape = (channels_out, inner, *taps)
    plain = weights(shape)
    order = ("IO" if transposed else "OI") + space
    weight = from_plain(plain, order, kernel)
    sizes = {"N": draw(st.integers(1, 2)), "C": channels_in, **{a: draw(st.integers(6, 7)) for a in space}}

    def add(g, x):
        return g.convolution(
            x, constant(g, weight), layout=layout, kernel=kernel, transposed=transposed,
            channels=channels_out, **options,
        )  # fmt: skip

    axis = layout.index("C") if layout.isalpha() else None
    return Layer(add, shape_in(layout, sizes), (channels_in, channels_out), (axis, axis))


@st.composite
def products(draw, weights):
    kernel = draw(st.sampled_from(["OI", "IO", "BOI", "BIO"]))
    sizes = {"B": draw(st.sampled_from([1, 2])), "O": draw(st.integers(1, 4)), "I": draw(st.integers(1, 4))}
    weight = weights([sizes[letter] for letter in kernel])
    batch = (2,) if "B" in kernel else ()
    rows = draw(st.integers(1, 3))

    def add(g, x):
        return g.matmul(x, constant(g, weight), kernel=kernel)

    axis = len(batch) + 1
    return Layer(add, (*batch, rows, sizes["I"]), (sizes["I"], sizes["O"]), (axis, axis))


def constant(g, array):
    return g.const(array, g.dtype) if g.dtype == "bfloat16" else g.const(array)


def stored(array, dtype):
    return narrow(np.asarray(array, np.float64), dtype)


def spell(draw, g, y, axis, rank, norm, epsilon, dtype):
    """A batch norm of ``y``; the spellings with constants that are still to be computed are float64."""
    column = [norm.gamma.size if index == axis else 1 for index in range(rank)][axis:]
    scale = norm.gamma / np.sqrt(norm.variance + epsilon)
    vectors = [constant(g, stored(vector, dtype)) for vector in norm]
    ways = ["operator", "operator", "multiply, add", "subtract, multiply, add", "scale only"]
    way = draw(st.sampled_from([*ways, "operators"] if dtype == "float64" else ways))
    if way == "operator":
        flags = {"center": draw(st.booleans()), "scale": draw(st.booleans())}
        return g.norm(y, vectors, axis=axis, epsilon=epsilon, **flags)
    if way == "operators":
        return Spelling(draw, g, norm, epsilon, axis, rank).write(y)
    multiplied = constant(g, stored(scale, dtype).reshape(column))
    if way == "scale only":
        return g.multiply(multiplied, y)
    if way == "multiply, add":
        return g.add(g.multiply(y, multiplied), constant(g, stored(norm.beta, dtype).reshape(column)))
    centred = g.subtract(y, constant(g, stored(norm.mean, dtype).reshape(column)))
    return g.add(constant(g, stored(norm.beta, dtype).reshape(column)), g.multiply(centred, multiplied))


def around(draw, g, layer, x, dtype):
    """The layer with something before, between and after it."""
    channels_in, channels_out = layer.channels
    place = draw(st.sampled_from(["after", "after", "before", "both", "twice"]))
    y = x

    def norm(value, axis, rank, channels):
        drawn = draw(norms(channels))
        return spell(draw, g, value, axis, rank, drawn, draw(st.sampled_from(EPSILONS)), dtype)

    data_axis, axis = layer.axes
    if place in ("before", "both") and data_axis is not None:
        y = norm(y, data_axis, len(layer.data), channels_in)
    y = layer.add(g, y)
    if axis is None:  # blocked: a constant of the layout's own shape
        blocks = (1, channels_out // 2, 1, 1, 2)
        values = draw(norms(channels_out))
        y = g.multiply(y, constant(g, stored(values.gamma, dtype).reshape(blocks)))
        return g.add(y, constant(g, stored(values.beta, dtype).reshape(blocks)))
    if draw(st.booleans()):
        y = g.bias_add(y, constant(g, stored(draw(norms(channels_out)).beta, dtype)), axis=axis)
    rank = len(g.shape(y))
    if rank > 2 and draw(st.integers(0, 3)) == 0:  # a move between layer and batch norm
        order = draw(st.permutations(range(rank)))
        y, axis = g.transpose(y, *order), order.index(axis)
    if place in ("after", "both", "twice"):
        y = norm(y, axis, rank, channels_out)
    if place == "twice":
        y = norm(y, axis, rank, channels_out)
    return y


def fold_to_the_end(graph):
    """Rounds of both rules; returns the last graph and all records."""
    done = []
    for _ in count_rounds(len(graph.nodes)):
        planned = plan_round(graph)
        if not planned.edits:
            break
        records = (*planned.folds, *planned.runs)
        graph = apply_folds(graph, records)
        done += records
    return graph, done


def _data_of_layers(graph):
    """The graph, returning what its layers read."""
    data = tuple(anchor.inputs[0] for anchor in graph.of_kind(*ANCHOR_KINDS))
    return Graph(graph.nodes, (*data, graph.of_kind(Kind.INPUT)[0].id), graph.constants)


def _gain_left(graph):
    """How much the scales that are still operators can enlarge a difference."""
    gain = 1.0
    for node in graph.of_kind(Kind.MULTIPLY):
        constants = [graph.exact(source) for source in node.inputs if source in graph.constants]
        gain *= max([1.0, *(np.abs(constant).max() for constant in constants)])
    for node in graph.of_kind(Kind.BATCH_NORM):
        gain *= max(1.0, np.abs(fold_scale(read_batch_norm(graph, node))).max())
    return gain


def check(data):
    draw = data.draw
    dtype = draw(st.sampled_from(["float64", "float64", "float32", "float16", "bfloat16"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))

    def weights(shape):
        return stored(rng.normal(size=tuple(shape)), dtype)

    g = GraphBuilder(dtype)
    layer = draw(st.one_of(convolutions(weights), convolutions(weights), products(weights)))
    x = g.input("x", layer.data)
    graph = g.build(g.relu(around(draw, g, layer, x, dtype)))
    recomposed = apply_recompositions(graph, plan_recompositions(graph)[0])
    folded, records = fold_to_the_end(recomposed)
    feeds = {"x": rng.normal(size=layer.data)}
    (want,), (got,) = evaluate(graph, feeds), evaluate(folded, feeds)
    slack = 1e-11 * max(1.0, np.abs(want).max())
    layers = [layer for record in records for layer in record.layers]
    largest = max(np.abs(data).max() for data in evaluate(_data_of_layers(recomposed), feeds))
    bound = sum(layer.weight_error for layer in layers) * largest + sum(layer.bias_error for layer in layers)
    # Each rounding is scaled by what is folded after it, and by what stays behind the layer.
    bound *= np.prod([max(1.0, record.gain_max) for record in records]) * _gain_left(folded)
    assert np.abs(got - want).max() <= bound + slack
    assert got.shape == want.shape
    return folded


@settings(max_examples=150, **COMMON)
@given(st.data())
def test_the_outputs_stay(data):
    check(data)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("TVM_FUSE_EXAMPLES", "2000")), **COMMON)
@given(st.data())
def test_the_outputs_stay_in_many_examples(data):
    folded = check(data)
    # One that is left after a layer has a reason of numbers, or its one channel is on no axis in particular.
    reasons = {decision.at: decision.reason.code for decision in plan_folds(folded)[1]}
    for node in folded.of_kind(Kind.BATCH_NORM):
        if folded.nodes[node.inputs[0]].kind in ANCHOR_KINDS:
            assert reasons[str(node)] in (
                Code.FOLD_OVERFLOW, Code.BN_EPSILON_UNDERFLOW, Code.BN_AXIS_NOT_CHANNEL,
            )  # fmt: skip
            assert (
                reasons[str(node)] is not Code.BN_AXIS_NOT_CHANNEL
                or 1 in folded.nodes[node.inputs[1]].output.shape
            )
