"""Folding by value against an independent float64 evaluator, and every refusal by its code.

Kernels have as many input as output channels, and images the same size again, wherever a wrong axis
could otherwise fail by shape instead of by value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, Norm, apply_folds, plain_norm, random_norm, sizes
from tests.support.numerics import evaluate, fold_by_hand, max_error
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.fold import (
    BatchNorm,
    audit_statistics,
    fold_bias,
    fold_scale,
    plan_folds,
    read_batch_norm,
)
from tvm_fuse.core.graph import DenseAttrs, Kind, TensorInfo, digest
from tvm_fuse.core.reason import Code

C = 4
EXACT = 1e-12  # everything below runs in float64 unless it says otherwise


def draw(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def fold(graph, rounds=1):
    """Fold, carry out, and return the folded graph with the records and decisions of the last round."""
    for _ in range(rounds):
        records, decisions = plan_folds(graph)
        graph = apply_folds(graph, records)
    return graph, records, decisions


def assert_folds(graph, feeds, folds=1, tolerance=EXACT):
    """All batch norms fold, and the outputs stay."""
    folded, records, decisions = fold(graph)
    assert [str(decision) for decision in decisions if not decision.applied] == []
    assert len(records) == len(decisions) == folds
    assert not folded.of_kind(Kind.BATCH_NORM)
    for got, wanted in zip(evaluate(folded, feeds), evaluate(graph, feeds)):
        assert max_error(got, wanted) <= tolerance
    return folded, records


def code_of(graph):
    """The code with which the graph's only batch norm is declined."""
    records, (decision,) = plan_folds(graph)
    assert records == ()
    assert not decision.applied
    return decision.reason.code


def conv_feed(builder, layout="NCHW", size=5, channels=C, batch=2):
    shape = tuple({"N": batch, "C": channels, "H": size, "W": size}[letter] for letter in layout)
    return builder.input("x", shape), {"x": draw(*shape, seed=7)}


# --- every kernel layout -----------------------------------------------------------------------

#: kernel layout, shape, groups, output channels; 4 input channels each
KERNELS = [
    pytest.param("OIHW", (C, C, 3, 3), 1, C, id="OIHW"),
    pytest.param("OIHW", (C, C, C, C), 1, C, id="OIHW all sizes equal"),
    pytest.param("HWIO", (3, 3, C, C), 1, C, id="HWIO"),
    pytest.param("OHWI", (C, 3, 3, C), 1, C, id="OHWI"),
    pytest.param("HWOI", (3, 3, C, C), 1, C, id="HWOI full"),
    pytest.param("OIHW", (C, 2, 3, 3), 2, C, id="OIHW grouped"),
    pytest.param("HWIO", (3, 3, 2, C), 2, C, id="HWIO grouped"),
    pytest.param("OIHW", (8, 2, 3, 3), 2, 8, id="OIHW grouped, more outputs"),
    pytest.param("OIHW", (C, 1, 3, 3), C, C, id="OIHW depthwise"),
    pytest.param("OIHW", (2 * C, 1, 3, 3), C, 2 * C, id="OIHW depthwise, ONNX multiplier"),
    pytest.param("OIHW", (C, 2, 3, 3), C, 2 * C, id="OIHW depthwise, Relay multiplier"),
    pytest.param("OIHW", (C, C, 3, 3), C, C * C, id="OIHW depthwise, multiplier = channels"),
    pytest.param("HWOI", (3, 3, C, 1), C, C, id="HWOI depthwise"),
    pytest.param("HWOI", (3, 3, C, 2), C, 2 * C, id="HWOI depthwise, multiplier"),
    pytest.param("HWOI", (3, 3, C, C), C, C * C, id="HWOI depthwise, multiplier = channels"),
    pytest.param("HWIO", (3, 3, C, C), C, C * C, id="HWIO depthwise, multiplier = channels"),
    pytest.param("HWIO", (3, 3, 2, C), C, 2 * C, id="HWIO depthwise, multiplier"),
    pytest.param("OIHW2i2o", (2, 2, 3, 3, 2, 2), 1, C, id="OIHW2i2o"),
    pytest.param("OIHW4i4o", (2, 1, 3, 3, 4, 4), 1, 8, id="OIHW4i4o"),
    pytest.param("OHWI2o", (2, 3, 3, C, 2), 1, C, id="OHWI2o"),
    pytest.param("OIHW1i2o", (2, 1, 3, 3, 1, 2), C, C, id="OIHW1i2o depthwise"),
]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("kernel", "shape", "groups", "channels"), KERNELS)
def test_conv2d_kernels(kernel, shape, groups, channels, layout):
    g = GraphBuilder()
    x, feeds = conv_feed(g, layout)
    y = g.conv2d(
        x, draw(*shape), padding=(1, 1), groups=groups, channels=channels, layout=layout, kernel=kernel
    )
    graph = g.build(g.norm(y, random_norm(channels), axis=layout.index("C")))
    assert_folds(graph, feeds)


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param({"strides": (2, 1)}, id="strides"),
        pytest.param({"dilation": (2, 1), "padding": (2, 1)}, id="dilation"),
        pytest.param({"padding": (0, 1, 2, 0)}, id="uneven padding"),
    ],
)
def test_conv2d_geometry_does_not_matter(geometry):
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    graph = g.build(g.norm(g.conv2d(x, draw(C, C, 3, 3), **geometry), random_norm(C)))
    assert_folds(graph, feeds)


@pytest.mark.parametrize("data_shape", [(3, C), (1, C), (C, C), (2, 3, C)], ids=str)
def test_dense(data_shape):
    g = GraphBuilder()
    y = g.dense(g.input("x", data_shape), draw(C, C))
    graph = g.build(g.norm(y, random_norm(C), axis=len(data_shape) - 1))
    assert_folds(graph, {"x": draw(*data_shape, seed=2)})


# --- every spelling of a bias ------------------------------------------------------------------

BIASES = [
    pytest.param("NCHW", (C, 1, 1), id="NCHW C11"),
    pytest.param("NCHW", (1, C, 1, 1), id="NCHW 1C11"),
    pytest.param("NCHW", (), id="NCHW scalar"),
    pytest.param("NCHW", (1,), id="NCHW 1"),
    pytest.param("NCHW", (1, 1, 1, 1), id="NCHW 1111"),
    pytest.param("NHWC", (C,), id="NHWC C"),
    pytest.param("NHWC", (1, C), id="NHWC 1C"),
    pytest.param("NHWC", (1, 1, C), id="NHWC 11C"),
    pytest.param("NHWC", (1, 1, 1, C), id="NHWC 111C"),
    pytest.param("NHWC", (), id="NHWC scalar"),
]


@pytest.mark.parametrize("swapped", [False, True], ids=["conv + b", "b + conv"])
@pytest.mark.parametrize(("layout", "shape"), BIASES)
def test_constant_added_as_bias(layout, shape, swapped):
    g = GraphBuilder()
    x, feeds = conv_feed(g, layout, size=C)
    y = g.conv2d(x, draw(C, C, 3, 3), padding=(1, 1), layout=layout)
    bias = np.asarray(draw(C, seed=3)[: int(np.prod(shape))]).reshape(shape) + 3
    y = g.add(bias, y) if swapped else g.add(y, bias)
    _, (record,) = assert_folds(g.build(g.norm(y, random_norm(C), axis=layout.index("C"))), feeds)
    assert record.layers[0].had_bias


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_bias_add(layout):
    g = GraphBuilder()
    x, feeds = conv_feed(g, layout, size=C)
    y = g.conv2d(x, draw(C, C, 3, 3), padding=(1, 1), layout=layout)
    y = g.bias_add(y, draw(C, seed=3), axis=layout.index("C"))
    _, (record,) = assert_folds(g.build(g.norm(y, random_norm(C), axis=layout.index("C"))), feeds)
    assert record.layers[0].had_bias


@pytest.mark.parametrize("shape", [(C,), (1, C), (), (1, 1)], ids=str)
def test_dense_bias(shape):
    g = GraphBuilder()
    y = g.dense(g.input("x", (C, C)), draw(C, C))
    y = g.add(y, draw(C, seed=3)[: int(np.prod(shape))].reshape(shape))
    assert_folds(g.build(g.norm(y, random_norm(C))), {"x": draw(C, C, seed=5)})


NOT_A_BIAS = [
    pytest.param("NCHW", (C,), id="NCHW along W"),
    pytest.param("NCHW", (C, 1), id="NCHW along H"),
    pytest.param("NCHW", (C, 1, 1, 1), id="NCHW along N"),
    pytest.param("NCHW", (1, C, C, C), id="NCHW full image"),
    pytest.param("NCHW", (C, C, 1), id="NCHW C and H"),
    pytest.param("NHWC", (C, 1, 1), id="NHWC along H"),
    pytest.param("NHWC", (C, C), id="NHWC W and C"),
    pytest.param("NCHW", (1, C, 1, 1, 1), id="NCHW of higher rank"),
    pytest.param("NCHW", (1, 1, 1, 1, 1), id="NCHW scalar of higher rank"),
]


@pytest.mark.parametrize(("layout", "shape"), NOT_A_BIAS)
def test_constants_that_are_no_bias(layout, shape):
    g = GraphBuilder()
    x, _ = conv_feed(g, layout, size=C, batch=C)  # N == C == H == W: every axis fits
    y = g.add(g.conv2d(x, draw(C, C, 1, 1), layout=layout), draw(*shape))
    assert code_of(g.build(g.norm(y, random_norm(C), axis=layout.index("C")))) is Code.BN_PRODUCER_UNSUPPORTED


def test_constant_that_widens_one_channel_to_several_is_no_bias():
    g = GraphBuilder()
    y = g.add(g.conv2d(g.input("x", (1, C, 5, 5)), draw(1, C, 1, 1)), draw(3, 1, 1))
    assert code_of(g.build(g.norm(y, random_norm(3)))) is Code.BN_PRODUCER_UNSUPPORTED


def test_bias_add_along_another_axis_is_no_bias():
    g = GraphBuilder()
    x, _ = conv_feed(g, size=C)
    y = g.bias_add(g.conv2d(x, draw(C, C, 1, 1)), draw(C), axis=3)
    assert code_of(g.build(g.norm(y, random_norm(C)))) is Code.BN_PRODUCER_UNSUPPORTED


def test_bias_that_is_not_constant_is_declined():
    g = GraphBuilder()
    x, _ = conv_feed(g)
    y = g.add(g.conv2d(x, draw(C, C, 1, 1)), g.input("b", (C, 1, 1)))
    assert code_of(g.build(g.norm(y, random_norm(C)))) is Code.BN_PRODUCER_UNSUPPORTED


def test_whatever_scales_and_shifts_between_layer_and_batch_norm_becomes_one_bias():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    y = g.add(g.add(g.conv2d(x, draw(C, C, 1, 1)), draw(C, 1, 1)), draw(C, 1, 1))
    y = g.subtract(3.0, g.multiply(y, 2.0))
    folded, _ = assert_folds(g.build(g.norm(y, random_norm(C))), feeds)
    assert [node.kind for node in folded.nodes if node.inputs] == [Kind.CONV2D, Kind.ADD]


# --- the numbers of the batch norm -------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("center", [False, True], ids=["no center", "center"])
@pytest.mark.parametrize("scale", [False, True], ids=["no scale", "scale"])
def test_center_and_scale(center, scale, with_bias):
    """B067: a batch norm may have either of gamma and beta without the other."""
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    y = g.conv2d(x, draw(C, C, 3, 3))
    y = g.bias_add(y, draw(C)) if with_bias else y
    assert_folds(g.build(g.norm(y, random_norm(C), center=center, scale=scale)), feeds)


GAMMAS = [[-1.0, -2.0, -3.0, -4.0], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, -0.0], [1e-30, 1e30, -1e-30, 1.0]]


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
def test_gamma_of_any_sign(gamma):
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    norm = random_norm(C)._replace(gamma=np.array(gamma))
    assert_folds(g.build(g.relu(g.norm(g.conv2d(x, draw(C, C, 3, 3)), norm))), feeds)


@pytest.mark.parametrize("role", ["gamma", "beta"])
@pytest.mark.parametrize("content", ["computed", "nan", "zero"])
def test_unused_gamma_and_beta_are_not_read(role, content):
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    fill = {"computed": g.input("p", (C,)), "nan": np.full(C, np.nan), "zero": np.zeros(C)}[content]
    unused = {"gamma": "scale", "beta": "center"}[role]
    norm = random_norm(C)._replace(**{role: fill})
    graph = g.build(g.norm(g.conv2d(x, draw(C, C, 3, 3)), norm, **{unused: False}))
    assert_folds(graph, {**feeds, "p": np.full(C, 9.0)})


def test_formula_of_one_channel():
    bn = BatchNorm(0, "bn", 1.0, *(np.array([v]) for v in (4.0, 0.5, 1.0, 3.0)))
    assert fold_scale(bn) == [2.0]
    assert fold_bias(bn, None) == [-1.5]
    assert fold_bias(bn, np.array([3.0])) == [4.5]


def test_weight_with_one_output_channel():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    assert_folds(g.build(g.norm(g.bias_add(g.conv2d(x, draw(1, C, 3, 3)), draw(1)), random_norm(1))), feeds)


# --- the record --------------------------------------------------------------------------------


def test_record_tells_what_was_done():
    g = GraphBuilder()
    x, _ = conv_feed(g)
    weight = draw(C, C, 1, 1)
    conv = g.conv2d(x, weight, name="stem.conv")
    norm = plain_norm(C, gamma=[1, -6, 2, 3], variance=[1, 4, 9, 0.5])
    bn = g.batch_norm(conv, norm, epsilon=0.0, name="stem.bn")
    item = g.item(bn)
    (record,), (decision,) = plan_folds(g.build(item))
    assert (record.batch_norm, record.direction) == (bn, Direction.BEFORE)
    assert ([layer.anchor for layer in record.edit.layers], record.edit.aliases) == ([conv], {item: conv})
    assert (record.anchor_name, record.name) == ("stem.conv", "stem.bn")
    assert (record.epsilon, record.variance_min) == (0.0, 0.5)
    assert record.gain_max == pytest.approx(3 / 0.5**0.5)
    assert not record.layers[0].had_bias
    assert record.layers[0].weight_before == digest(weight)
    assert (
        record.layers[0].weight_after
        == digest(record.edit.layers[0].weight)
        != record.layers[0].weight_before
    )
    assert decision.at == "stem.bn"
    assert "stem.conv" in decision.detail


def test_normalized_output_taken_twice():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    bn = g.batch_norm(g.conv2d(x, draw(C, C, 3, 3)), random_norm(C))
    first, second = g.item(bn), g.item(bn)
    _, (record,) = assert_folds(g.build(g.relu(first), g.tanh(second), first), feeds)
    assert set(record.edit.aliases) == {first, second}


def test_input_weight_is_not_written():
    g = GraphBuilder()
    x, _ = conv_feed(g)
    weight = draw(C, C, 1, 1)
    graph = g.build(g.norm(g.conv2d(x, weight), random_norm(C)))
    before = {node: digest(array) for node, array in graph.constants.items()}
    plan_folds(graph)
    assert {node: digest(array) for node, array in graph.constants.items()} == before
    np.testing.assert_array_equal(weight, draw(C, C, 1, 1))


# --- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rounded_once_to_the_dtype_of_the_weight(dtype):
    g = GraphBuilder(dtype)
    weight, bias = draw(C, C, 3, 3).astype(dtype), draw(C, seed=2).astype(dtype)
    norm = random_norm(C, dtype=dtype)
    x = g.input("x", (1, C, 5, 5))
    (record,), _ = plan_folds(g.build(g.norm(g.bias_add(g.conv2d(x, weight), bias), norm, epsilon=1e-3)))
    exact_weight, exact_bias = fold_by_hand(
        weight.astype(float), bias.astype(float), Norm(*(v.astype(float) for v in norm)), 1e-3
    )
    assert record.edit.layers[0].weight.dtype == record.edit.layers[0].bias.dtype == dtype
    unit_roundoff = np.finfo(dtype).eps / 2 * (1 + 1e-6) + 4e-16  # the reference rounds as well
    layer = record.edit.layers[0]
    for got, exact in ((layer.weight, exact_weight), (layer.bias.ravel(), exact_bias)):
        assert np.all(np.abs(got.astype(float) - exact) <= unit_roundoff * np.abs(exact))


def test_bias_of_a_layer_that_accumulates_in_float32():
    """float16 weights, float32 output: the bias is rounded to float32, and may exceed 65504."""
    g = GraphBuilder("float16")
    conv = g.conv2d(g.input("x", (1, C, 1, 1)), np.ones((C, C, 1, 1), "float16"))
    g.nodes[conv] = replace(g.nodes[conv], outputs=(TensorInfo((1, C, 1, 1), "float32"),))
    norm = Norm(*(v.astype("float32") for v in plain_norm(C, beta=[0.1, 1e5, 0, 1])))
    (record,), _ = plan_folds(g.build(g.norm(conv, norm, epsilon=0.0)))
    assert (record.edit.layers[0].weight.dtype, record.edit.layers[0].bias.dtype) == ("float16", "float32")
    np.testing.assert_array_equal(record.edit.layers[0].bias.ravel(), norm.beta)


def test_subnormal_folded_weight_is_off_by_half_a_subnormal():
    g = GraphBuilder("float16")
    weight = np.full((C, C, 1, 1), 1e-4, "float16")
    norm = Norm(*(v.astype("float16") for v in plain_norm(C, gamma=[1e-3, 2e-3, -1e-3, 1])))
    (record,), _ = plan_folds(
        g.build(g.norm(g.conv2d(g.input("x", (1, C, 1, 1)), weight), norm, epsilon=0.0))
    )
    exact = weight.astype(float) * norm.gamma.astype(float)[:, None, None, None]
    assert np.abs(record.edit.layers[0].weight.astype(float) - exact).max() <= 2.0**-25


# --- refusals ----------------------------------------------------------------------------------


def _sandwich(g, between=lambda g, y: y, norm=None, **attrs):
    x, _ = conv_feed(g)
    return g.norm(between(g, g.conv2d(x, draw(C, C, 3, 3))), norm or random_norm(C), **attrs)


def _after(between, **attrs):
    return lambda g: g.build(_sandwich(g, between, **attrs))


def _attrs(**attrs):
    return lambda g: g.build(_sandwich(g, **attrs))


def _parameters(**vectors):
    return lambda g: g.build(_sandwich(g, norm=random_norm(C)._replace(**vectors)))


def _not_constant(role):
    return lambda g: g.build(_sandwich(g, norm=random_norm(C)._replace(**{role: g.input("p", (C,))})))


def _axis(layout, axis):
    def build(g):
        x, _ = conv_feed(g, layout, size=C)
        return g.build(g.norm(g.conv2d(x, draw(C, C, 1, 1), layout=layout), random_norm(C), axis=axis))

    return build


def _transposed(g):
    x, _ = conv_feed(g)
    return g.build(g.norm(g.other("nn.conv2d_transpose", x, draw(C, C, 3, 3)), random_norm(C)))


def _computed_weight(g):
    return _weight(g, g.other("transpose", draw(3, 3, C, C), shape=(C, C, 3, 3)))


def _shared(read_too):
    def build(g):
        x, _ = conv_feed(g)
        conv = g.conv2d(x, draw(C, C, 3, 3))
        return g.build(g.norm(conv, random_norm(C)), read_too(g, conv))

    return build


def _shared_bias(read_too):
    def build(g):
        x, _ = conv_feed(g)
        conv = g.conv2d(x, draw(C, C, 3, 3))
        biased = g.bias_add(conv, draw(C))
        return g.build(g.norm(biased, random_norm(C)), read_too(g, conv, biased))

    return build


def _weight(g, weight, **attrs):
    x, _ = conv_feed(g)
    return g.build(g.norm(g.conv2d(x, weight, **attrs), random_norm(C)))


def _blocked_output(g):
    y = g.conv2d(g.input("x", (1, 1, 5, 5, 4)), draw(1, 1, 3, 3, 4, 4), layout="NCHW4c", kernel="OIHW4i4o")
    return g.build(g.norm(y, random_norm(4), axis=4))


def _dense_wrong_axis(g):
    return g.build(g.norm(g.dense(g.input("x", (C, C)), draw(C, C)), random_norm(C), axis=0))


def _dense_unknown_packing(g):
    packed = g.const(draw(1, C, 4))
    y = g.node(
        Kind.DENSE, "nn.contrib_dense_pack", (g.input("x", (1, C)), packed), (1, C), DenseAttrs("NC4n")
    )
    return g.build(g.norm(y, random_norm(C)))


def _whole_tuple(g):
    x, _ = conv_feed(g)
    return g.build(g.batch_norm(g.conv2d(x, draw(C, C, 3, 3)), random_norm(C)))


def _item(index):
    def build(g):
        x, _ = conv_feed(g)
        bn = g.batch_norm(g.conv2d(x, draw(C, C, 3, 3)), random_norm(C))
        return g.build(g.item(bn), g.item(bn, index))

    return build


def _unread(g):
    x, _ = conv_feed(g)
    conv = g.conv2d(x, draw(C, C, 3, 3))
    g.batch_norm(conv, random_norm(C))
    return g.build(conv)


def _bn_reads_twice(g):
    x = g.input("x", (C, C))
    conv = g.dense(x, draw(C, C))
    norm = random_norm(C)
    bn = g.batch_norm(conv, (conv, *norm[1:]), scale=False)
    return g.build(g.item(bn))


ONES = np.ones(C)
REFUSALS = [
    (
        "bn of a model input",
        Code.BN_PRODUCER_UNSUPPORTED,
        lambda g: g.build(g.norm(conv_feed(g)[0], random_norm(C))),
    ),
    ("pool between", Code.BN_PRODUCER_UNSUPPORTED, _after(lambda g, y: g.other("pool", y))),
    (
        "residual add between",
        Code.BN_PRODUCER_UNSUPPORTED,
        _after(lambda g, y: g.add(y, g.input("r", g.shape(y)))),
    ),
    ("conv + itself between", Code.ANCHOR_OUTPUT_SHARED, _after(lambda g, y: g.add(y, y))),
    ("conv2d_transpose", Code.BN_PRODUCER_UNSUPPORTED, _transposed),
    ("relu between", Code.BN_AFTER_ACTIVATION, _after(lambda g, y: g.relu(y))),
    ("clip between", Code.BN_AFTER_ACTIVATION, _after(lambda g, y: g.clip(y))),
    ("leaky relu between", Code.BN_AFTER_ACTIVATION, _after(lambda g, y: g.leaky_relu(y))),
    ("sigmoid between", Code.BN_AFTER_ACTIVATION, _after(lambda g, y: g.sigmoid(y))),
    ("bias and tanh between", Code.BN_AFTER_ACTIVATION, _after(lambda g, y: g.tanh(g.bias_add(y, ONES)))),
    *(
        (f"{role} not constant", Code.BN_PARAMETERS_NOT_CONSTANT, _not_constant(role))
        for role in Norm._fields
    ),
    ("moving mean used", Code.BN_STATISTICS_USED, _item(1)),
    ("moving variance used", Code.BN_STATISTICS_USED, _item(2)),
    ("whole tuple returned", Code.BN_STATISTICS_USED, _whole_tuple),
    ("nothing used", Code.BN_STATISTICS_USED, _unread),
    ("axis of the image", Code.BN_AXIS_NOT_CHANNEL, _axis("NCHW", 3)),
    ("NHWC with axis 1", Code.BN_AXIS_NOT_CHANNEL, _axis("NHWC", 1)),
    ("dense over the batch", Code.BN_AXIS_NOT_CHANNEL, _dense_wrong_axis),
    ("blocked output", Code.BN_AXIS_NOT_CHANNEL, _blocked_output),
    ("nan gamma", Code.BN_STATISTICS_NOT_FINITE, _parameters(gamma=ONES * [1, np.nan, 1, 1])),
    ("inf beta", Code.BN_STATISTICS_NOT_FINITE, _parameters(beta=ONES * [1, 1, -np.inf, 1])),
    ("nan mean", Code.BN_STATISTICS_NOT_FINITE, _parameters(mean=ONES * np.nan)),
    ("inf variance", Code.BN_STATISTICS_NOT_FINITE, _parameters(variance=ONES * np.inf)),
    ("negative variance", Code.BN_VARIANCE_NOT_POSITIVE, _parameters(variance=ONES * [1, -1e-3, 1, 1])),
    ("negative variance within epsilon", Code.BN_VARIANCE_NOT_POSITIVE, _parameters(variance=ONES * -1e-9)),
    (
        "zero variance, zero epsilon",
        Code.BN_VARIANCE_NOT_POSITIVE,
        _attrs(norm=plain_norm(C, variance=[1, 1, 0, 1]), epsilon=0.0),
    ),
    ("negative epsilon", Code.BN_EPSILON_INVALID, _attrs(epsilon=-1e-5)),
    ("nan epsilon", Code.BN_EPSILON_INVALID, _attrs(epsilon=float("nan"))),
    ("inf epsilon", Code.BN_EPSILON_INVALID, _attrs(epsilon=float("inf"))),
    ("conv read by relu too", Code.ANCHOR_OUTPUT_SHARED, _shared(lambda g, conv: g.relu(conv))),
    (
        "conv read before its bias",
        Code.ANCHOR_OUTPUT_SHARED,
        _shared_bias(lambda g, conv, biased: g.relu(conv)),
    ),
    ("biased conv read too", Code.ANCHOR_OUTPUT_SHARED, _shared_bias(lambda g, conv, biased: g.relu(biased))),
    ("bn reads the dense twice", Code.ANCHOR_OUTPUT_SHARED, _bn_reads_twice),
    ("conv returned", Code.ANCHOR_OUTPUT_RETURNED, _shared(lambda g, conv: conv)),
    (
        "conv returned before its bias",
        Code.ANCHOR_OUTPUT_RETURNED,
        _shared_bias(lambda g, conv, biased: conv),
    ),
    ("biased conv returned", Code.ANCHOR_OUTPUT_RETURNED, _shared_bias(lambda g, conv, biased: biased)),
    ("weight is an input", Code.WEIGHT_NOT_CONSTANT, lambda g: _weight(g, g.input("w", (C, C, 3, 3)))),
    ("weight is computed", Code.WEIGHT_NOT_CONSTANT, _computed_weight),
    ("packed dense", Code.WEIGHT_LAYOUT_UNSUPPORTED, _dense_unknown_packing),
    ("integer weight", Code.FOLD_OVERFLOW, lambda g: _weight(g, np.ones((C, C, 3, 3), "int8"))),
    (
        "bfloat16 weight as TVM hands it out",
        Code.FOLD_OVERFLOW,
        lambda g: _weight(g, np.full((C, C, 3, 3), 0x3F80, "uint16")),
    ),
    (
        "float16 weight too large",
        Code.FOLD_OVERFLOW,
        lambda g: _weight(g, np.full((C, C, 3, 3), 6e4, "float16")),
    ),
    (
        "weight overflows in float64",
        Code.FOLD_OVERFLOW,
        _attrs(norm=plain_norm(C, gamma=1e300, variance=1e-300), epsilon=0.0),
    ),
]


@pytest.mark.parametrize(("code", "build"), [pytest.param(*case, id=name) for name, *case in REFUSALS])
def test_refusals(code, build):
    assert code_of(build(GraphBuilder())) is code


def test_conv_read_by_two_batch_norms():
    g = GraphBuilder()
    x, _ = conv_feed(g)
    conv = g.conv2d(x, draw(C, C, 3, 3))
    records, decisions = plan_folds(g.build(g.norm(conv, random_norm(C)), g.norm(conv, random_norm(C, 1))))
    assert records == ()
    assert [decision.reason.code for decision in decisions] == [Code.ANCHOR_OUTPUT_SHARED] * 2


def test_bias_overflow_names_role_value_and_limit():
    g = GraphBuilder("float16")
    norm = Norm(*(v.astype("float16") for v in plain_norm(C, mean=[0, 0, 6e4, 0], gamma=2.0)))
    conv = g.conv2d(g.input("x", (1, C, 1, 1)), np.ones((C, C, 1, 1), "float16"), name="conv7")
    _, (decision,) = plan_folds(g.build(g.norm(conv, norm, epsilon=0.0)))
    assert decision.reason.code is Code.FOLD_OVERFLOW
    assert decision.reason.at == "conv7"
    assert "bias[2] = -120000" in decision.reason.got
    assert "65504" in decision.reason.wanted


@pytest.mark.filterwarnings("error")
def test_a_damaged_weight_is_declined_without_a_warning():
    weight = np.ones((C, C, 3, 3))
    weight[1, 2, 0, 1] = np.inf
    g = GraphBuilder()
    assert code_of(_weight(g, weight)) is Code.FOLD_OVERFLOW


@pytest.mark.parametrize(
    ("variance", "epsilon", "code"),
    [
        (np.zeros(C), 1e-5, None),
        (np.full(C, 1e-300), 0.0, None),
        (np.full(C, 5e-324), 0.0, None),
        (np.zeros(C), 0.0, Code.BN_VARIANCE_NOT_POSITIVE),
        (np.array([1.0, np.nan, 1, 1]), 1e-5, Code.BN_STATISTICS_NOT_FINITE),
    ],
)
def test_audit(variance, epsilon, code):
    bn = BatchNorm(0, "bn", epsilon, np.ones(C), np.zeros(C), np.zeros(C), variance)
    reason = audit_statistics(bn)
    assert (reason and reason.code) is code


def test_audit_names_channel_and_value():
    bn = BatchNorm(0, "bn3", 1e-5, np.ones(C), np.zeros(C), np.zeros(C), np.array([1, 1, -0.25, 1]))
    reason = audit_statistics(bn)
    assert (reason.code, reason.at) == (Code.BN_VARIANCE_NOT_POSITIVE, "bn3")
    assert "variance[2] = -0.25" in reason.got


def test_read_batch_norm_keeps_the_numbers():
    g = GraphBuilder("float32")
    norm = random_norm(C, dtype="float32")
    bn = g.batch_norm(g.input("x", (1, C, 2, 2)), norm, epsilon=0.1)
    read = read_batch_norm(g.build(bn), g.nodes[bn])
    assert read.epsilon == 0.1
    for role in Norm._fields:
        assert getattr(read, role).dtype == np.float64
        np.testing.assert_array_equal(getattr(read, role), getattr(norm, role).astype(float))


# --- the comparison itself turns red -------------------------------------------------------------

MISTAKES = [
    "wrong epsilon",
    "swapped axis",
    "dropped bias",
    "unscaled old bias",
    "dropped mean",
    "dropped beta",
]


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_comparison_sees_the_mistake(mistake):
    """Carry out a fold that was made by hand, right or wrong, in place of the planned one."""
    weight, bias, norm = draw(C, C, 3, 3), draw(C, seed=4) + 2, random_norm(C)
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    graph = g.build(g.norm(g.bias_add(g.conv2d(x, weight, padding=(1, 1)), bias), norm, epsilon=1e-3))
    (record,), _ = plan_folds(graph)
    by_hand = fold_by_hand(weight, bias, norm, 1e-3, mistake)
    layer = replace(record.edit.layers[0], weight=by_hand[0], bias=by_hand[1].reshape(1, C, 1, 1))
    record = replace(record, edit=replace(record.edit, layers=(layer,)))
    error = max_error(*evaluate(apply_folds(graph, [record]), feeds), *evaluate(graph, feeds))
    assert error > 1e-5 if mistake else error <= EXACT


# --- fault kinds from public trackers (worked numbers by hand) -------------------------------------


def one(value, *shape):
    return np.full(shape or (1,), float(value))


#: gamma 4, beta 0.5, mean 1, variance 3; with epsilon 1 the scale is 2
B001_NORM = Norm(one(4), one(0.5), one(1), one(3))


def b001(g, weight=None, bias=3.0, x=None):
    """Input 1, weight 2, bias 3 -> 5 before the batch norm and 8.5 after it."""
    x = g.input("x", (1, 1, 1, 1)) if x is None else x
    conv = g.conv2d(x, one(2, 1, 1, 1, 1) if weight is None else weight)
    y = conv if bias is None else g.bias_add(conv, one(bias))
    return g.norm(y, B001_NORM, epsilon=1.0)


ONE_FEED = {"x": one(1, 1, 1, 1, 1)}


@pytest.mark.parametrize("groups", [1, 3], ids=["full", "depthwise"])
def test_b001_old_bias_is_scaled_conv(groups):
    """y = 8.5 with w' = 4, b' = 4.5; an unscaled bias gives 5.5, a dropped shift 10."""
    channels = 3
    g = GraphBuilder()
    weight = np.zeros((channels, channels // groups, 1, 1))
    for c in range(channels):
        weight[c, c if groups == 1 else 0] = 2
    y = g.bias_add(g.conv2d(g.input("x", (1, channels, 1, 1)), weight, groups=groups), one(3, channels))
    graph = g.build(g.norm(y, [np.repeat(v, channels) for v in B001_NORM], epsilon=1.0))
    folded, (record,) = assert_folds(graph, {"x": one(1, 1, channels, 1, 1)})
    assert set(record.edit.layers[0].bias.ravel()) == {4.5}
    assert set(record.edit.layers[0].weight.ravel()) <= {0.0, 4.0}
    assert set(evaluate(folded, {"x": one(1, 1, channels, 1, 1)})[0].ravel()) == {8.5}


def test_b001_old_bias_is_scaled_dense():
    g = GraphBuilder()
    y = g.add(g.dense(g.input("x", (1, 1)), one(2, 1, 1)), one(3))
    folded, (record,) = assert_folds(g.build(g.norm(y, B001_NORM, epsilon=1.0)), {"x": one(1, 1, 1)})
    assert (record.edit.layers[0].weight.item(), record.edit.layers[0].bias.item()) == (4.0, 4.5)
    assert evaluate(folded, {"x": one(1, 1, 1)})[0].item() == 8.5


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_b002_random_bias_and_gamma(with_bias, dtype):
    g = GraphBuilder(dtype)
    y = g.conv2d(g.input("x", (1, 3, 8, 8)), draw(4, 3, 1, 1).astype(dtype))
    bias = (draw(4, seed=9) + 5).astype(dtype)
    y = g.bias_add(y, bias) if with_bias else y
    graph = g.build(g.norm(y, random_norm(4, dtype=dtype)))
    assert_folds(graph, {"x": draw(1, 3, 8, 8, seed=6)}, tolerance=1e-5 if dtype == "float32" else EXACT)


def test_b004_epsilon_of_the_layer_is_used():
    """Channel 0 is 1 / sqrt(1e-3) = 31.6228; the hard-wired 1e-5 would give 316.228."""
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 3, 1, 1)), np.eye(3).reshape(3, 3, 1, 1))
    graph = g.build(g.norm(conv, plain_norm(3, variance=[0, 1e-4, 1.0]), epsilon=1e-3))
    folded, (record,) = assert_folds(graph, {"x": one(1, 1, 3, 1, 1)})
    got = evaluate(folded, {"x": one(1, 1, 3, 1, 1)})[0].ravel()
    np.testing.assert_allclose(got, [31.6228, 30.1511, 0.9995], rtol=1e-5)
    assert record.epsilon == 1e-3


def test_b005_each_batch_norm_has_its_own_epsilon():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    norm = random_norm(C)._replace(variance=np.full(C, 1e-3))
    y = g.norm(g.conv2d(x, draw(C, C, 1, 1)), norm, epsilon=1e-3)
    graph = g.build(g.norm(g.conv2d(y, draw(C, C, 1, 1, seed=2)), norm, epsilon=1e-5), y)
    _, records = assert_folds(graph, feeds, folds=2)
    assert [record.epsilon for record in records] == [1e-3, 1e-5]


def test_b007_negative_and_zero_gamma_before_relu():
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 3, 1, 2)), np.eye(3).reshape(3, 3, 1, 1))
    norm = plain_norm(3, gamma=[-1, 0, 2], variance=1 - 1e-3, beta=[0, 0.7, 0])
    graph = g.build(g.relu(g.norm(conv, norm, epsilon=1e-3)))
    feeds = {"x": np.tile([-2.0, 2.0], (1, 3, 1, 1))}
    folded, _ = assert_folds(graph, feeds)
    got = evaluate(folded, feeds)[0][0, :, 0]
    np.testing.assert_allclose(got, [[2, 0], [0.7, 0.7], [0, 4]], atol=1e-12)


def test_b017_grouped_conv_keeps_its_attributes():
    g = GraphBuilder()
    x, feeds = conv_feed(g, channels=8)
    graph = g.build(g.norm(g.conv2d(x, draw(16, 2, 3, 3), groups=4), random_norm(16)))
    folded, (record,) = assert_folds(graph, feeds)
    assert record.edit.layers[0].weight.shape == (16, 2, 3, 3)
    (conv,) = folded.of_kind(Kind.CONV2D)
    assert (conv.attrs.groups, conv.attrs.channels) == (4, 16)


@pytest.mark.parametrize("channels", [6, 54])
def test_b018_second_run_is_a_no_op(channels):
    g = GraphBuilder()
    x = g.multiply(g.input("x", (1, channels, 4, 4)), draw(channels, 1, 1))
    y = g.norm(g.conv2d(x, draw(channels, 1, 3, 3), padding=(1, 1), groups=channels), random_norm(channels))
    graph = g.build(g.multiply(g.relu(y), draw(channels, 1, 1, seed=2)))
    feeds = {"x": draw(1, channels, 4, 4, seed=3)}
    once, _ = assert_folds(graph, feeds)
    twice, records, decisions = fold(once)
    assert (records, decisions) == ((), ())
    np.testing.assert_array_equal(evaluate(twice, feeds)[0], evaluate(once, feeds)[0])


def test_b020_full_size_addend_is_no_bias():
    g = GraphBuilder()
    y = g.conv2d(g.input("x", (1, 136, 4, 4)), draw(136, 34, 1, 1), groups=4)
    y = g.add(y, draw(1, 136, 4, 4, seed=2))
    assert code_of(g.build(g.norm(y, random_norm(136)))) is Code.BN_PRODUCER_UNSUPPORTED


def test_b023_shared_weight_with_one_batch_norm():
    """8.5 with the batch norm and 5 without: never 8.5 twice."""
    g = GraphBuilder()
    weight, x = g.const(one(2, 1, 1, 1, 1)), g.input("x", (1, 1, 1, 1))
    plain = g.bias_add(g.conv2d(x, weight), one(3))
    graph = g.build(b001(g, weight, x=x), plain)
    folded, _ = assert_folds(graph, ONE_FEED)
    assert [output.item() for output in evaluate(folded, ONE_FEED)] == [8.5, 5.0]


def test_b026_folding_twice_keeps_the_value():
    """A double fold would give 15.5."""
    g = GraphBuilder()
    graph = g.build(b001(g))
    folded, records, _ = fold(graph, rounds=2)
    assert records == ()
    assert evaluate(folded, ONE_FEED)[0].item() == 8.5


def test_b027_conv_with_another_reader():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    conv = g.conv2d(x, draw(C, C, 3, 3), name="c1")
    graph = g.build(g.norm(conv, random_norm(C)), g.relu(conv))
    folded, _, (decision,) = fold(graph)
    assert (decision.reason.code, decision.reason.at) == (Code.ANCHOR_OUTPUT_SHARED, "c1")
    assert "2 readers" in decision.reason.got
    for got, wanted in zip(evaluate(folded, feeds), evaluate(graph, feeds)):
        assert max_error(got, wanted) == 0


def test_b029_shared_weight_with_two_batch_norms():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    weight = g.const(draw(C, C, 3, 3))
    ends = [g.norm(g.conv2d(x, weight), random_norm(C, seed)) for seed in (0, 1)]
    folded, records = assert_folds(g.build(*ends), feeds, folds=2)
    assert records[0].layers[0].weight_before == records[1].layers[0].weight_before
    assert records[0].layers[0].weight_after != records[1].layers[0].weight_after
    assert len([a for a in folded.constants.values() if a.ndim == 4 and a.shape[2] == 3]) == 2


def test_b030_other_outputs_of_the_batch_norm():
    g = GraphBuilder()
    x, _ = conv_feed(g)
    bn = g.batch_norm(g.conv2d(x, draw(C, C, 3, 3)), random_norm(C))
    _, (decision,) = plan_folds(g.build(g.item(bn), g.item(bn, 1)))
    assert decision.reason.code is Code.BN_STATISTICS_USED
    assert "reads output 1" in decision.reason.got


def test_b038_relu_before_the_batch_norm():
    """relu(-2) = 0, then (0 - 1) * 2 = -2; an illegal fold gives 0."""
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 1, 1, 1)), one(-2, 1, 1, 1, 1))
    graph = g.build(g.norm(g.relu(conv), plain_norm(1, gamma=2, mean=1, variance=1 - 1e-3), epsilon=1e-3))
    assert code_of(graph) is Code.BN_AFTER_ACTIVATION
    assert evaluate(fold(graph)[0], ONE_FEED)[0].item() == pytest.approx(-2, abs=1e-12)


def test_b039_stack_of_conv_relu_bn():
    g = GraphBuilder()
    y, feeds = conv_feed(g, channels=8)
    for block in range(7):
        y = g.norm(g.relu(g.conv2d(y, draw(8, 8, 1, 1, seed=block))), random_norm(8, block))
    graph = g.build(y)
    folded, records, decisions = fold(graph)
    assert [record.direction for record in records] == [Direction.AFTER] * 6  # into the next block, exactly
    assert decisions[-1].reason.code is Code.BN_AFTER_ACTIVATION
    assert max_error(*evaluate(folded, feeds), *evaluate(graph, feeds)) <= EXACT


@pytest.mark.parametrize("op", ["transpose", "cast", "qnn.dequantize"])
def test_b041_weight_is_computed(op):
    g = GraphBuilder()
    x, _ = conv_feed(g)
    weight = g.other(op, draw(3, 3, C, C), shape=(C, C, 3, 3))
    _, (decision,) = plan_folds(g.build(g.norm(g.conv2d(x, weight), random_norm(C))))
    assert decision.reason.code is Code.WEIGHT_NOT_CONSTANT
    assert op in decision.reason.got


def test_b058_half_precision_overflow():
    """4 * 100 / sqrt(1e-5) = 126491 > 65504."""
    g = GraphBuilder("float16")
    conv = g.conv2d(g.input("x", (1, 1, 1, 1)), np.full((1, 1, 1, 1), 4, "float16"), name="conv3")
    norm = Norm(*(v.astype("float16") for v in plain_norm(1, gamma=100, variance=0)))
    records, (decision,) = plan_folds(g.build(g.norm(conv, norm, epsilon=1e-5, name="bn3")))
    assert records == ()
    assert (decision.reason.code, decision.reason.at) == (Code.FOLD_OVERFLOW, "conv3")
    assert "weight[0, 0, 0, 0] = 126491" in decision.reason.got
    assert "65504" in decision.reason.wanted


@pytest.mark.parametrize(
    ("variance", "code", "channel"),
    [
        ([-1e-3, np.nan, 0, np.inf], Code.BN_STATISTICS_NOT_FINITE, "variance[1] = nan"),
        ([1, 1, 0, np.inf], Code.BN_STATISTICS_NOT_FINITE, "variance[3] = inf"),
        ([-1e-3, 1, 0, 1], Code.BN_VARIANCE_NOT_POSITIVE, "variance[0] = -0.001"),
    ],
    ids=["all", "inf", "negative"],
)
def test_b062_damaged_variance(variance, code, channel):
    g = GraphBuilder()
    x, _ = conv_feed(g)
    norm = plain_norm(C, variance=variance)
    graph = g.build(g.leaky_relu(g.norm(g.conv2d(x, draw(C, C, 1, 1)), norm, epsilon=1e-5, name="bn8")))
    _, (decision,) = plan_folds(graph)
    assert (decision.reason.code, decision.reason.at) == (code, "bn8")
    assert channel in decision.reason.got


def test_b065_gamma_and_beta_that_must_be_ignored():
    """gamma counts as 1 and beta as 0 whatever the constants hold."""
    g = GraphBuilder()
    norm = B001_NORM._replace(gamma=one(0), beta=one(99))
    y = g.bias_add(g.conv2d(g.input("x", (1, 1, 1, 1)), one(2, 1, 1, 1, 1)), one(3))
    graph = g.build(g.norm(y, norm, epsilon=1.0, center=False, scale=False))
    folded, (record,) = assert_folds(graph, ONE_FEED)
    assert (record.edit.layers[0].weight.item(), record.edit.layers[0].bias.item()) == (1.0, 1.0)
    assert evaluate(folded, ONE_FEED)[0].item() == 2.0  # (5 - 1) / 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_b069_two_dimensional_input_with_variance_near_zero(dtype):
    """The bound follows from the scale: each folded number is off by one rounding of its size."""
    g = GraphBuilder(dtype)
    weight = draw(20, 20).astype(dtype)
    norm = Norm(*(v.astype(dtype) for v in random_norm(20)))._replace(variance=np.full(20, 1e-7, dtype))
    graph = g.build(g.norm(g.dense(g.input("x", (10, 20)), weight), norm, epsilon=1e-5))
    feeds = {"x": draw(10, 20, seed=8)}
    folded, (record,), _ = fold(graph)
    got, wanted = evaluate(folded, feeds)[0], evaluate(graph, feeds)[0]
    roundoff = max(np.finfo(dtype).eps, 1e-14)
    bound = roundoff * record.gain_max * (np.abs(feeds["x"]).sum(1).max() * np.abs(weight).max() + 10)
    assert np.abs(got - wanted).max() <= bound


def test_batch_norms_in_a_row_fold_in_two_rounds():
    g = GraphBuilder()
    x, feeds = conv_feed(g)
    graph = g.build(g.norm(g.norm(g.conv2d(x, draw(C, C, 1, 1)), random_norm(C)), random_norm(C, 1)))
    first, records, decisions = fold(graph)
    assert (len(records), [d.applied for d in decisions]) == (1, [True, False])
    assert decisions[1].reason.code is Code.BN_PRODUCER_UNSUPPORTED
    second, records, _ = fold(first)
    assert len(records) == 1
    assert max_error(*evaluate(second, feeds), *evaluate(graph, feeds)) <= EXACT


def test_dynamic_batch_folds():
    g = GraphBuilder()
    x = g.input("x", ("n", C, 5, 5))
    _, (decision,) = plan_folds(
        g.build(g.norm(g.bias_add(g.conv2d(x, draw(C, C, 3, 3)), draw(C)), random_norm(C)))
    )
    assert decision.applied


def test_support_sizes():
    assert sizes("OIHW4i2o", (2, 3, 1, 1, 4, 2)) == {"O": 4, "I": 12, "H": 1, "W": 1}
