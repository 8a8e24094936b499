"""Scales and shifts pushed into the layers before: every way up by value, and its refusing twin by code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.folds import assert_folds_into, kinds, refusal
from tests.support.graphs import GraphBuilder, Norm, apply_folds, plain_norm, random_norm
from tests.support.numerics import evaluate, from_plain, max_error
from tvm_fuse.core.affine import plan_affine_folds
from tvm_fuse.core.dtypes import FLOATS, narrow
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import ANCHOR_KINDS, ConcatenateAttrs, Kind, TensorInfo
from tvm_fuse.core.reason import Code

C = 4
SHAPE = (C, C, C, C)  # N == C == H == W: a wrong axis fits
EXACT = 1e-12


def draw(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def conv(g, seed=1, x=None, out=C, **attrs):
    x = g.input("x", SHAPE) if x is None else x
    return g.conv2d(x, draw(out, C, 3, 3, seed=seed), padding=(1, 1), name=f"conv{seed}", **attrs)


def feeds_of(graph):
    return {
        node.name: draw(*node.output.shape, seed=90 + node.id) for node in graph.of_kind(Kind.INPUT)
    }  # names may repeat: the last one counts for all


def assert_folds(graph, layers=1, tolerance=EXACT):
    """The only batch norm folds into so many layers before it, and the outputs stay."""
    return assert_folds_into(
        graph, feeds_of(graph), direction=Direction.BEFORE, layers=layers, tolerance=tolerance
    )


# --- every layer -------------------------------------------------------------------------------

#: spatial axes, data layout, kernel layout, groups, input and output channels, transposed
CONVOLUTIONS = {
    "conv1d": (1, "NCW", "OIW", 1, 4, 4, False),
    "conv1d, channels last": (1, "NWC", "WIO", 1, 4, 4, False),
    "conv1d, groups": (1, "NCW", "OIW", 2, 4, 4, False),
    "conv1d, depthwise": (1, "NCW", "OIW", 4, 4, 4, False),
    "conv3d": (3, "NCDHW", "OIDHW", 1, 3, 3, False),
    "conv3d, channels last": (3, "NDHWC", "DHWIO", 1, 3, 3, False),
    "conv3d, groups": (3, "NCDHW", "OIDHW", 2, 4, 4, False),
    "conv1d_transpose": (1, "NCW", "IOW", 1, 4, 4, True),
    "conv1d_transpose, groups": (1, "NCW", "IOW", 2, 4, 4, True),
    "conv2d_transpose": (2, "NCHW", "IOHW", 1, 4, 4, True),
    "conv2d_transpose, channels last": (2, "NHWC", "HWIO", 1, 4, 4, True),
    "conv2d_transpose, groups": (2, "NCHW", "IOHW", 2, 4, 4, True),
    "conv2d_transpose, groups, wider": (2, "NCHW", "IOHW", 2, 4, 8, True),
    "conv2d_transpose, depthwise": (2, "NCHW", "IOHW", 4, 4, 4, True),
    "conv3d_transpose": (3, "NCDHW", "IODHW", 1, 3, 3, True),
    "conv3d_transpose, groups": (3, "NCDHW", "IODHW", 2, 4, 4, True),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolutions(case, with_bias):
    rank, layout, kernel, groups, inner, outer, transposed = case
    sizes = {"N": 2, "C": inner, **dict.fromkeys("DHW", 3)}
    split = {"I": inner, "O": outer // groups} if transposed else {"I": inner // groups, "O": outer}
    g = GraphBuilder()
    y = g.convolution(
        g.input("x", [sizes[letter] for letter in layout]),
        draw(*({**split, **dict.fromkeys("DHW", 2)}[letter] for letter in kernel)),
        layout=layout,
        kernel=kernel,
        transposed=transposed,
        groups=groups,
        strides=(2,) * rank,
        padding=(1, 0) * rank if not transposed else (),
    )
    axis = layout.index("C")
    y = g.bias_add(y, draw(outer, seed=5), axis=axis) if with_bias else y
    folded, record = assert_folds(g.build(g.norm(y, random_norm(outer), axis=axis)))
    assert record.layers[0].had_bias is with_bias
    assert kinds(folded)[1:] == [Kind.ADD]


#: kernel layout and shape, data shape, axis of the data that is summed over
PRODUCTS = {
    "OI": ("OI", (C, C), (C, C), -1),
    "IO": ("IO", (C, C), (C, C), -1),
    "IO, data transposed": ("IO", (C, C), (C, C), -2),
    "OI, rank 3": ("OI", (C, C), (C, C, C), -1),
    "BOI": ("BOI", (C, C, C), (C, C, C), -1),
    "BIO": ("BIO", (C, C, C), (C, C, C), -1),
    "BIO, data transposed": ("BIO", (C, C, C), (C, C, C), -2),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("kernel", "shape", "data", "axis"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_matrix_products(kernel, shape, data, axis, with_bias):
    g = GraphBuilder()
    y = g.matmul(g.input("x", data), draw(*shape), kernel=kernel, input_axis=axis)
    y = g.add(y, draw(C, seed=5)) if with_bias else y
    _, record = assert_folds(g.build(g.norm(y, random_norm(C), axis=len(data) - 1)))
    assert record.layers[0].had_bias is with_bias


def test_matrix_product_over_its_rows_is_refused():
    g = GraphBuilder()
    y = g.matmul(g.input("x", (C, C, C)), draw(C, C, C), kernel="BOI")
    assert refusal(g.build(g.norm(y, random_norm(C), axis=1))).code is Code.BN_AXIS_NOT_CHANNEL


@pytest.mark.parametrize("kernel", ["OI4o", "OI2i4o"])
def test_packed_dense(kernel):
    plain = draw(8, 8)
    g = GraphBuilder()
    y = g.dense(g.input("x", (8, 8)), from_plain(plain, "OI", kernel), kernel=kernel)
    assert_folds(g.build(g.norm(y, random_norm(8))))


# --- packed convolutions -----------------------------------------------------------------------


def packed(g):
    """NCHW4c with 8 channels."""
    return g.conv2d(g.input("x", (2, 2, 5, 5, 4)), draw(2, 2, 3, 3, 4, 4), layout="NCHW4c", kernel="OIHW4i4o")


@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 4), (2, 1, 1, 1), (4,), ()], ids=str)
def test_packed_convolution_takes_constants(shape):
    g = GraphBuilder()
    graph = g.build(g.add(g.multiply(packed(g), draw(*shape)), draw(*shape, seed=2)))
    (record,), _ = plan_affine_folds(graph)
    folded = apply_folds(graph, [record])
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD]
    assert max_error(*evaluate(folded, feeds_of(graph)), *evaluate(graph, feeds_of(graph))) <= EXACT
    assert record.edit.layers[0].bias.shape == (1, 2, 1, 1, 4)


def test_packed_convolution_then_plain_batch_norm():
    g = GraphBuilder()
    y = g.layout_transform(packed(g), "NCHW4c", "NCHW")
    folded, _ = assert_folds(g.build(g.norm(y, random_norm(8))))
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.LAYOUT_TRANSFORM]


def test_packed_convolution_along_its_blocks_only():
    g = GraphBuilder()
    reason = refusal(g.build(g.norm(packed(g), random_norm(4), axis=4)))
    assert reason.code is Code.BN_AXIS_NOT_CHANNEL
    assert (reason.wanted, reason.got) == ("axes [1, 4] of NCHW4c", "axis 4 of NCHW4c")


# --- biases ------------------------------------------------------------------------------------


def test_everything_between_becomes_one_bias():
    g = GraphBuilder()
    y = g.bias_add(conv(g), draw(C, seed=2))
    y = g.divide(g.subtract(3.0, g.multiply(y, draw(C, 1, 1, seed=3))), 2.0)
    y = g.add(g.transpose(y, 0, 2, 3, 1), draw(C, seed=4))
    folded, record = assert_folds(g.build(g.norm(y, random_norm(C), axis=3)))
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.TRANSPOSE]
    assert record.layers[0].had_bias


BIASES = {
    "mean = beta = 0": (plain_norm(C, gamma=[1, 2, -3, 4]), None),
    "bias = mean": (plain_norm(C, mean=[1, 2, 3, 4], gamma=2), np.array([1.0, 2, 3, 4])),
    "gamma = beta = 0": (plain_norm(C, gamma=0, mean=5), None),
}


@pytest.mark.parametrize(("norm", "bias"), BIASES.values(), ids=BIASES.keys())
def test_a_bias_of_zero_is_left_out(norm, bias):
    g = GraphBuilder()
    y = conv(g) if bias is None else g.bias_add(conv(g), bias)
    folded, record = assert_folds(g.build(g.norm(y, norm)))
    assert record.edit.layers[0].bias is None
    assert kinds(folded) == [Kind.CONV2D]


HAD_BIAS = {
    "nothing": (lambda g, y: y, False),
    "bias": (lambda g, y: g.bias_add(y, draw(C)), True),
    "bias, scale": (lambda g, y: g.multiply(g.bias_add(y, draw(C)), 2.0), True),
    "scale, bias": (lambda g, y: g.bias_add(g.multiply(y, 2.0), draw(C)), True),
    "bias, move": (lambda g, y: g.expand_dims(g.bias_add(y, draw(C)), 4), True),
    "scale": (lambda g, y: g.multiply(y, 2.0), False),
    "bias of zero": (lambda g, y: g.bias_add(y, np.zeros(C)), False),  # there is nothing to merge
}


@pytest.mark.parametrize(("between", "had_bias"), HAD_BIAS.values(), ids=HAD_BIAS.keys())
def test_record_says_whether_a_bias_was_merged(between, had_bias):
    g = GraphBuilder()
    _, record = assert_folds(g.build(g.norm(between(g, conv(g)), random_norm(C))))
    assert record.layers[0].had_bias is had_bias


# --- moves -------------------------------------------------------------------------------------

MOVES = {
    "transpose": (lambda g, y: g.transpose(y, 0, 2, 3, 1), 3),
    "transpose, batch last": (lambda g, y: g.transpose(y, 1, 2, 3, 0), 0),
    "reshape, image flattened": (lambda g, y: g.reshape(y, C, C, C * C), 1),
    "reshape, image split": (lambda g, y: g.reshape(y, C, C, 2, 2, C), 1),
    "expand_dims": (lambda g, y: g.expand_dims(y, 1, 2), 3),
    "layout_transform": (lambda g, y: g.layout_transform(y, "NCHW", "NHWC"), 3),
    "there and back": (lambda g, y: g.transpose(g.transpose(y, 0, 2, 3, 1), 0, 3, 1, 2), 1),
    "cast": (lambda g, y: g.cast(y, "float64"), 1),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("move", "axis"), MOVES.values(), ids=MOVES.keys())
def test_moves(move, axis, with_bias):
    g = GraphBuilder()
    y = conv(g)
    y = move(g, g.bias_add(y, draw(C)) if with_bias else y)
    folded, _ = assert_folds(g.build(g.norm(y, random_norm(C), axis=axis)))
    assert kinds(folded)[:2] == [Kind.CONV2D, Kind.ADD]


MOVES_ASIDE = {
    "transpose": (lambda g, y: g.transpose(y, 0, 2, 3, 1), 1, Code.BN_AXIS_NOT_CHANNEL),
    "reshape": (lambda g, y: g.reshape(y, C, C, C * C), 0, Code.BN_AXIS_NOT_CHANNEL),
    "layout_transform": (
        lambda g, y: g.layout_transform(y, "NCHW", "NHWC"),
        1,
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "elements shift": (lambda g, y: g.reshape(y, C, C * C, C), 2, Code.BN_AXIS_NOT_CHANNEL),
    "integers": (lambda g, y: g.cast(g.cast(y, "int32"), "float64"), 1, Code.BN_PRODUCER_UNSUPPORTED),
}


@pytest.mark.parametrize(("move", "axis", "code"), MOVES_ASIDE.values(), ids=MOVES_ASIDE.keys())
def test_moves_that_take_the_channels_elsewhere(move, axis, code):
    g = GraphBuilder()
    assert refusal(g.build(g.norm(move(g, conv(g)), random_norm(C), axis=axis))).code is code


@pytest.mark.parametrize(
    ("read_too", "code"),
    [(lambda g, y: g.relu(y), Code.ANCHOR_OUTPUT_SHARED), (lambda g, y: y, Code.ANCHOR_OUTPUT_RETURNED)],
    ids=["shared", "returned"],
)
def test_a_moved_value_that_is_read_elsewhere(read_too, code):
    g = GraphBuilder()
    moved = g.transpose(conv(g), 0, 2, 3, 1)
    reason = refusal(g.build(g.norm(moved, random_norm(C), axis=3), read_too(g, moved)))
    assert (reason.code, reason.at) == (code, f"transpose#{moved}")


def test_batch_of_one_keeps_its_channels():
    """(1, C) -> (1, C, 1, 1): the 1 in front is none of the channels."""
    g = GraphBuilder()
    y = g.reshape(g.dense(g.input("x", (1, C)), draw(C, C)), 1, C, 1, 1)
    assert_folds(g.build(g.norm(y, random_norm(C))))


def test_dense_then_image():
    """The start of a generator: each channel of the batch norm is many outputs of the dense layer."""
    g = GraphBuilder()
    y = g.add(g.dense(g.input("x", (C, C)), draw(64, C)), draw(64, seed=5))
    folded, record = assert_folds(g.build(g.norm(g.reshape(y, C, C, 4, 4), random_norm(C))))
    assert kinds(folded) == [Kind.DENSE, Kind.ADD, Kind.RESHAPE]
    assert record.edit.layers[0].bias.shape == (1, 64)


def test_dense_then_image_over_rows():
    g = GraphBuilder()
    y = g.reshape(g.dense(g.input("x", (C, C)), draw(16, C)), C, C, C)
    assert_folds(g.build(g.norm(y, random_norm(C), axis=2)))
    g = GraphBuilder()
    y = g.reshape(g.dense(g.input("x", (C, C)), draw(C, C)), 1, C, C)
    reason = refusal(g.build(g.norm(y, random_norm(C), axis=1)))  # the batch of the dense layer
    assert reason.code is Code.BN_AXIS_NOT_CHANNEL


def test_cast_from_half_precision():
    """conv in float16, batch norm in float32: weights in float16, bias of the convolution's dtype."""
    g = GraphBuilder("float16")
    weight = np.random.default_rng(0).integers(-4, 5, (C, C, 1, 1)).astype("float16")
    y = g.cast(g.conv2d(g.input("x", SHAPE), weight), "float32")
    g.dtype = "float32"
    norm = plain_norm(C, gamma=[2, -1, 0.5, 4], variance=[1, 4, 0.25, 1], mean=[1, 2, 3, 0], beta=0.5)
    graph = g.build(g.norm(y, [vector.astype("float32") for vector in norm], epsilon=0.0))
    (record,), _ = plan_folds(graph)
    folded = apply_folds(graph, [record])
    assert (record.edit.layers[0].weight.dtype, record.edit.layers[0].bias.dtype) == ("float16", "float16")
    feeds = {"x": np.random.default_rng(1).integers(-3, 4, SHAPE)}  # exact in float16
    assert max_error(*evaluate(folded, feeds), *evaluate(graph, feeds)) == 0
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.CAST]


# --- concatenations ----------------------------------------------------------------------------


def two_parts(g):
    """Parts of 3 and 5 channels, the second with a bias."""
    return conv(g, 1, out=3), g.bias_add(conv(g, 2, out=5), draw(5, seed=6))


def test_concatenation_of_channels():
    g = GraphBuilder()
    folded, record = assert_folds(g.build(g.norm(g.concatenate(*two_parts(g)), random_norm(8))), layers=2)
    assert [layer.name for layer in record.layers] == ["conv1", "conv2"]
    assert [layer.had_bias for layer in record.layers] == [False, True]
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.CONV2D, Kind.ADD, Kind.CONCATENATE]


@pytest.mark.parametrize("axis", [0, 2, 3])
def test_concatenation_along_another_axis(axis):
    g = GraphBuilder()
    y = g.concatenate(conv(g, 1), g.add(conv(g, 2), 2.0), axis=axis)
    assert_folds(g.build(g.norm(y, random_norm(C))), layers=2)


def test_concatenation_of_parts_that_are_laid_out_otherwise():
    g = GraphBuilder()
    last = g.transpose(conv(g, 1, out=3), 0, 2, 3, 1)
    y = g.concatenate(last, g.transpose(conv(g, 2, out=5), 0, 2, 3, 1), axis=3)
    assert_folds(g.build(g.norm(g.add(y, draw(8)), random_norm(8), axis=3)), layers=2)


def test_nested_concatenation():
    g = GraphBuilder()
    inner = g.multiply(g.concatenate(*two_parts(g)), draw(8, 1, 1, seed=7))
    y = g.concatenate(conv(g, 3, out=2), inner, conv(g, 4, out=1))
    folded, record = assert_folds(g.build(g.norm(y, random_norm(11))), layers=4)
    assert [layer.name for layer in record.layers] == ["conv3", "conv1", "conv2", "conv4"]
    assert not folded.of_kind(Kind.MULTIPLY)


def test_a_bias_after_the_concatenation_is_a_bias_of_its_parts():
    g = GraphBuilder()
    y = g.add(g.concatenate(conv(g, 1), conv(g, 2)), draw(2 * C, 1, 1, seed=5))
    folded, record = assert_folds(g.build(g.norm(y, random_norm(2 * C))), layers=2)
    assert [layer.had_bias for layer in record.layers] == [True, True]
    assert kinds(folded)[-1] is Kind.CONCATENATE


#: second part of a concatenation, other outputs -> code, where, what was found
PARTS = {
    "shared": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [g.relu(part)],
        (Code.ANCHOR_OUTPUT_SHARED, "conv2", "2 readers; also nn.relu"),
    ),
    "returned": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [part],
        (Code.ANCHOR_OUTPUT_RETURNED, "conv2", "a model output"),
    ),
    "an activation": (
        lambda g: g.relu(conv(g, 2)),
        lambda g, part, joined: [],
        (Code.BN_AFTER_ACTIVATION, "bn", "nn.relu"),
    ),
    "an input": (
        lambda g: g.input("r", SHAPE),
        lambda g, part, joined: [],
        (Code.BN_PRODUCER_UNSUPPORTED, "bn", "input"),
    ),
    "a constant": (
        lambda g: g.const(draw(*SHAPE)),
        lambda g, part, joined: [],
        (Code.BN_PRODUCER_UNSUPPORTED, "bn", "constant"),
    ),
    "a pooled value": (
        lambda g: g.other("nn.max_pool2d", conv(g, 2)),
        lambda g, part, joined: [],
        (Code.BN_PRODUCER_UNSUPPORTED, "bn", "nn.max_pool2d"),
    ),
    "a weight that is an input": (
        lambda g: g.conv2d(g.input("y", SHAPE), g.input("w", (C, C, 1, 1)), name="conv2"),
        lambda g, part, joined: [],
        (Code.WEIGHT_NOT_CONSTANT, "conv2", "computed by w"),
    ),
    "the concatenation shared": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [g.relu(joined)],
        (Code.ANCHOR_OUTPUT_SHARED, "concatenate#", "2 readers; also nn.relu"),
    ),
    "the concatenation returned": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [joined],
        (Code.ANCHOR_OUTPUT_RETURNED, "concatenate#", "a model output"),
    ),
    "the tuple shared": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [g.item(g.nodes[joined].inputs[0], 0)],
        (Code.ANCHOR_OUTPUT_SHARED, "tuple#", "2 readers; also get_item"),
    ),
    "the tuple returned": (
        lambda g: conv(g, 2),
        lambda g, part, joined: [g.nodes[joined].inputs[0]],
        (Code.ANCHOR_OUTPUT_RETURNED, "tuple#", "a model output"),
    ),
}


@pytest.mark.parametrize("first", [False, True], ids=["second part", "first part"])
@pytest.mark.parametrize(("make", "more", "wanted"), PARTS.values(), ids=PARTS.keys())
def test_parts_that_cannot_take_their_share(make, more, wanted, first):
    """Nothing is folded, not even the other part, and the reason names the part."""
    g = GraphBuilder()
    part = make(g)
    parts = (part, conv(g, 1)) if first else (conv(g, 1), part)
    joined = g.concatenate(*parts)
    reason = refusal(g.build(g.norm(joined, random_norm(2 * C), name="bn"), *more(g, part, joined)))
    code, at, got = wanted
    assert reason.code is code
    assert reason.at.startswith(at)
    assert reason.got.startswith(got)


def test_one_value_twice_in_a_concatenation():
    g = GraphBuilder()
    y = conv(g)
    reason = refusal(g.build(g.norm(g.concatenate(y, y), random_norm(2 * C))))
    assert (reason.code, reason.at) == (Code.ANCHOR_OUTPUT_SHARED, "conv1")


def test_concatenation_of_packed_layers_is_split():
    g = GraphBuilder()
    other = draw(1, 2, 3, 3, 4, 4, seed=2)
    other = g.conv2d(g.input("y", (2, 2, 5, 5, 4)), other, layout="NCHW4c", kernel="OIHW4i4o")
    y = g.layout_transform(g.concatenate(packed(g), other), "NCHW4c", "NCHW")
    assert_folds(g.build(g.norm(y, random_norm(12))), layers=2)


def test_concatenations_that_cannot_be_split():
    g = GraphBuilder()  # along the block: the channels of the parts take turns
    y = g.layout_transform(g.concatenate(packed(g), packed(g), axis=4), "NCHW8c", "NCHW")
    reason = refusal(g.build(g.norm(y, random_norm(16))))
    assert (reason.code, reason.got) == (
        Code.BN_PRODUCER_UNSUPPORTED,
        "a concatenation that cannot be split by channels",
    )
    g = GraphBuilder()  # not joined from a tuple of this graph
    parts = g.other("split", g.input("x", SHAPE))
    y = g.node(Kind.CONCATENATE, "concatenate", (parts,), SHAPE, ConcatenateAttrs(1))
    assert refusal(g.build(g.norm(y, random_norm(C)))).code is Code.BN_PRODUCER_UNSUPPORTED
    g = GraphBuilder()  # sizes unknown
    y = g.conv2d(g.input("x", ("n", C, C, C)), draw(C, C, 1, 1))
    parts = g.concatenate(y, g.conv2d(g.input("y", SHAPE), draw(C, C, 1, 1)), axis=1)
    g.nodes[y] = replace(g.nodes[y], outputs=(TensorInfo(("n", "c", C, C), "float64"),))
    assert refusal(g.build(g.norm(parts, random_norm(2 * C)))).code is Code.BN_PRODUCER_UNSUPPORTED


# --- residual adds -----------------------------------------------------------------------------


def test_residual_add_of_two_layers():
    """Both are scaled; the shift is added once, and the second bias is scaled only."""
    g = GraphBuilder()
    first, second = g.bias_add(conv(g, 1), draw(C, seed=5)), g.bias_add(conv(g, 2), draw(C, seed=6))
    folded, record = assert_folds(g.build(g.norm(g.add(first, second), random_norm(C))), layers=2)
    assert [layer.had_bias for layer in record.layers] == [True, True]
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.CONV2D, Kind.ADD, Kind.ADD]


def test_residual_add_without_biases_gets_one():
    g = GraphBuilder()
    folded, record = assert_folds(g.build(g.norm(g.add(conv(g, 1), conv(g, 2)), random_norm(C))), layers=2)
    assert [layer.bias is None for layer in record.edit.layers] == [False, True]
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.CONV2D, Kind.ADD]


def test_residual_add_of_three_layers_and_of_moved_ones():
    g = GraphBuilder()
    y = g.add(g.add(conv(g, 1), conv(g, 2)), g.add(conv(g, 3), draw(C, 1, 1)))
    assert_folds(g.build(g.norm(g.add(y, 1.5), random_norm(C))), layers=3)
    g = GraphBuilder()
    y = g.add(g.transpose(conv(g, 1), 0, 2, 3, 1), g.layout_transform(conv(g, 2), "NCHW", "NHWC"))
    assert_folds(g.build(g.norm(y, random_norm(C), axis=3)), layers=2)


def test_residual_add_inside_a_concatenation_and_the_other_way_round():
    g = GraphBuilder()
    y = g.concatenate(g.add(conv(g, 1), conv(g, 2)), conv(g, 3))
    assert_folds(g.build(g.norm(y, random_norm(2 * C))), layers=3)
    g = GraphBuilder()
    y = g.add(g.concatenate(conv(g, 1), conv(g, 2)), conv(g, 3, out=2 * C))
    assert_folds(g.build(g.norm(y, random_norm(2 * C))), layers=3)


RESIDUALS = {
    "an input": (lambda g: g.input("x", SHAPE), Code.BN_PRODUCER_UNSUPPORTED),
    "an activation": (lambda g: g.relu(conv(g, 2)), Code.BN_AFTER_ACTIVATION),
    "broadcast batch": (
        lambda g: g.conv2d(g.input("y", (1, C, C, C)), draw(C, C, 1, 1)),
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "broadcast image": (
        lambda g: g.conv2d(g.input("y", (C, C, 1, 1)), draw(C, C, 1, 1)),
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize(("other", "code"), RESIDUALS.values(), ids=RESIDUALS.keys())
def test_residual_add_with_what_is_no_layer(other, code, swapped):
    g = GraphBuilder()
    operands = (conv(g, 1), other(g))
    y = g.add(*(operands[::-1] if swapped else operands))
    assert refusal(g.build(g.norm(y, random_norm(C)))).code is code


def test_a_layer_on_both_sides_of_an_add():
    g = GraphBuilder()
    y = conv(g)
    assert refusal(g.build(g.norm(g.add(y, g.transpose(y, 0, 1, 3, 2)), random_norm(C)))).code is (
        Code.ANCHOR_OUTPUT_SHARED
    )


def test_product_and_difference_of_two_layers_are_refused():
    for operator in (GraphBuilder.multiply, GraphBuilder.subtract):
        g = GraphBuilder()
        y = operator(g, conv(g, 1), conv(g, 2))
        assert refusal(g.build(g.norm(y, random_norm(C)))).code is Code.BN_PRODUCER_UNSUPPORTED


# --- shared weights ----------------------------------------------------------------------------


def test_weights_that_two_layers_share_are_copied():
    g = GraphBuilder()
    x, weight = g.input("x", SHAPE), g.const(draw(C, C, 1, 1))
    plain = g.conv2d(x, weight)
    y = g.concatenate(g.conv2d(x, weight), g.conv2d(x, weight))
    graph = g.build(g.norm(y, random_norm(2 * C)), plain)
    folded, record = assert_folds(graph, layers=2)
    assert len({layer.weight_after for layer in record.layers}) == 2
    assert len({layer.weight_before for layer in record.layers}) == 1
    weights = {node.inputs[1] for node in folded.of_kind(Kind.CONV2D)}
    assert len(weights) == 3
    np.testing.assert_array_equal(graph.constants[weight], draw(C, C, 1, 1))


# --- the bound on the rounding error -----------------------------------------------------------


def stored(array, dtype):
    return narrow(np.asarray(array, np.float64), dtype)


def rounded_layer(kind, dtype):
    """A layer and its batch norm, with random parameters of a dtype."""
    g = GraphBuilder(dtype)
    norm = random_norm(C)._replace(variance=np.array([0.3, 2.0, 1.0, 1e-3]))
    if kind == "dense":
        weight = stored(draw(C, C), dtype)
        y = g.dense(g.input("x", (2 * C, C)), g.const(weight, dtype))
    else:
        weight = stored(draw(C, 1 if kind == "depthwise" else C, 3, 3), dtype)
        groups = C if kind == "depthwise" else 1
        y = g.conv2d(g.input("x", (2 * C, C, 3, 3)), g.const(weight, dtype), groups=groups)
    bias = g.const(stored(draw(C, seed=3), dtype), dtype)
    y = g.bias_add(y, bias)
    norm = Norm(*(g.const(stored(vector, dtype), dtype) for vector in norm))
    return g.build(g.norm(y, norm, epsilon=1e-3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["conv", "depthwise", "dense"])
def test_outputs_move_by_no_more_than_the_record_says(kind, dtype):
    """Inputs made to add up all errors of one output channel; the bound holds, and is nearly reached."""
    graph = rounded_layer(kind, dtype)
    (record,), _ = plan_folds(graph)
    (layer,) = record.layers
    folded = apply_folds(graph, [record])
    exact = weight_of(graph)
    exact = exact * scale_of(graph).reshape(-1, *(1,) * (exact.ndim - 1))
    error = weight_of(folded) - exact
    x = np.zeros(graph.of_kind(Kind.INPUT)[0].output.shape)
    for o in range(C):
        for sign in (0, 1):  # both signs, so that one of them adds up with the error of the bias
            worst = np.where(error[o] < 0, -1.0, 1.0) * (1 - 2 * sign)
            if kind == "depthwise":
                x[2 * o + sign, o] = worst[0]
            else:
                x[2 * o + sign] = worst
    size = 3.0
    moved = np.abs(evaluate(folded, {"x": size * x})[0] - evaluate(graph, {"x": size * x})[0])
    bound = layer.weight_error * size + layer.bias_error
    slack = 1e-13 * size
    assert moved.max() <= bound + slack
    # one row has the largest sum of weight errors: only the bias of its own channel may be off by less
    assert moved.max() >= layer.weight_error * size - layer.bias_error - slack
    assert layer.weight_error > 0
    channel = np.abs(exact).reshape(C, -1).sum(axis=1).max()
    assert layer.weight_error <= FLOATS[dtype].roundoff * channel + FLOATS[dtype].smallest * error[0].size


def scale_of(graph):
    (bn,) = graph.of_kind(Kind.BATCH_NORM)
    gamma, _, _, variance = (graph.exact(source) for source in bn.inputs[1:])
    return gamma / np.sqrt(variance + bn.attrs.epsilon)


def weight_of(graph):
    (anchor,) = graph.of_kind(*ANCHOR_KINDS)
    return graph.exact(anchor.inputs[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_that_the_dtype_holds_are_off_by_nothing(dtype):
    g = GraphBuilder(dtype)
    weight = g.const(stored(np.arange(16.0).reshape(C, C, 1, 1), dtype), dtype)
    norm = plain_norm(C, gamma=[2, -1, 0.5, 4], variance=[1, 4, 0.25, 1], mean=[1, 2, 3, 0], beta=0.5)
    norm = [g.const(stored(vector, dtype), dtype) for vector in norm]
    graph = g.build(g.norm(g.conv2d(g.input("x", SHAPE), weight), norm, epsilon=0.0))
    _, record = assert_folds(graph, tolerance=0.0)
    assert (record.layers[0].weight_error, record.layers[0].bias_error) == (0.0, 0.0)


def test_bfloat16_is_refused_where_it_overflows():
    g = GraphBuilder("bfloat16")
    weight = g.const(stored(np.full((C, C, 1, 1), 3e38), "bfloat16"), "bfloat16")
    norm = [g.const(stored(vector, "bfloat16"), "bfloat16") for vector in plain_norm(C, gamma=2)]
    reason = refusal(g.build(g.norm(g.conv2d(g.input("x", SHAPE), weight), norm, epsilon=0.0)))
    assert reason.code is Code.FOLD_OVERFLOW
    assert "bfloat16" in reason.wanted


def test_a_bias_too_small_for_the_dtype_is_counted():
    """The bias becomes zero and is left out; the record still tells by how much outputs move."""
    g = GraphBuilder("float16")
    weight = np.ones((C, C, 1, 1), "float16")
    y = g.cast(g.conv2d(g.input("x", SHAPE), weight), "float32")
    g.dtype = "float32"
    norm = [vector.astype("float32") for vector in plain_norm(C, beta=1e-9)]
    (record,), _ = plan_folds(g.build(g.norm(y, norm, epsilon=0.0)))
    assert record.edit.layers[0].bias is None
    assert record.layers[0].bias_error == pytest.approx(1e-9)
