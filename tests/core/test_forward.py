"""Scales and shifts pushed into the layers after: every way down by value, and its refusing twin by code."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.folds import assert_folds_into, kinds, refusal
from tests.support.graphs import GraphBuilder, Norm, apply_folds, plain_norm, random_norm
from tests.support.numerics import evaluate, from_plain, max_error
from tvm_fuse.core.affine import plan_affine_folds
from tvm_fuse.core.channelwise import Affine
from tvm_fuse.core.dtypes import narrow
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.forward import absorb_forward
from tvm_fuse.core.graph import ANCHOR_KINDS, Kind
from tvm_fuse.core.reason import Code

C = 4
SHAPE = (C, C, C, C)  # N == C == H == W: a wrong axis fits
EXACT = 1e-12

#: Only a scale: what is left of the shift is exactly zero.
SCALE_ONLY = plain_norm(C, gamma=[2, -1, 0, 3], variance=[1, 4, 2, 0.5])


def draw(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def feeds_of(graph):
    return {node.name: draw(*node.output.shape, seed=90) + 1 for node in graph.of_kind(Kind.INPUT)}


def assert_folds(graph, layers=1, tolerance=EXACT):
    """The only batch norm folds into so many layers after it, and the outputs stay."""
    return assert_folds_into(
        graph, feeds_of(graph), direction=Direction.AFTER, layers=layers, tolerance=tolerance
    )


def normed(g, norm=None, shape=SHAPE, axis=1, name="bn"):
    return g.norm(g.input("x", shape), random_norm(C) if norm is None else norm, axis=axis, name=name)


def conv(g, x, weight=None, **attrs):
    return g.conv2d(x, draw(C, C, 3, 3) if weight is None else weight, name="conv", **attrs)


# --- every kernel, padded or not --------------------------------------------------------------

#: kernel layout, kernel shape, groups, output channels; 4 input channels each
KERNELS = {
    "OIHW": ("OIHW", (C, C, 3, 3), 1, C),
    "OIHW, all sizes equal": ("OIHW", (C, C, C, C), 1, C),
    "HWIO": ("HWIO", (3, 3, C, C), 1, C),
    "OHWI": ("OHWI", (C, 3, 3, C), 1, C),
    "HWOI": ("HWOI", (3, 3, C, C), 1, C),
    "OIHW grouped": ("OIHW", (C, 2, 3, 3), 2, C),
    "OIHW grouped, more outputs": ("OIHW", (12, 2, 3, 3), 2, 12),
    "HWIO grouped": ("HWIO", (3, 3, 2, C), 2, C),
    "OIHW depthwise": ("OIHW", (C, 1, 3, 3), C, C),
    "OIHW depthwise, ONNX multiplier": ("OIHW", (2 * C, 1, 3, 3), C, 2 * C),
    "OIHW depthwise, Relay multiplier": ("OIHW", (C, 2, 3, 3), C, 2 * C),
    "OIHW depthwise, multiplier = channels": ("OIHW", (C, C, 3, 3), C, C * C),
    "HWOI depthwise": ("HWOI", (3, 3, C, 1), C, C),
    "HWOI depthwise, multiplier": ("HWOI", (3, 3, C, 2), C, 2 * C),
    "HWOI depthwise, multiplier = channels": ("HWOI", (3, 3, C, C), C, C * C),
    "OIHW2i2o": ("OIHW2i2o", (2, 2, 3, 3, 2, 2), 1, C),
    "OIHW2o2i": ("OIHW2o2i", (2, 2, 3, 3, 2, 2), 1, C),
    "OHWI4o": ("OHWI4o", (2, 3, 3, C, 4), 1, 8),
    "OIHW1i4o depthwise": ("OIHW1i4o", (1, 1, 3, 3, 1, 4), C, C),
}


@pytest.mark.parametrize("padding", [(0, 0), (1, 1)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("kernel", "shape", "groups", "channels"), KERNELS.values(), ids=KERNELS.keys())
def test_kernels(kernel, shape, groups, channels, layout, padding):
    g = GraphBuilder()
    y = conv(
        g, normed(g, axis=layout.index("C")), draw(*shape),
        padding=padding, layout=layout, kernel=kernel, groups=groups, channels=channels,
    )  # fmt: skip
    folded, record = assert_folds(g.build(y))
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD]
    image = [size for letter, size in zip(layout, record.edit.layers[0].bias.shape) if letter in "HW"]
    assert (image == [1, 1]) is (padding == (0, 0))


GEOMETRIES = {
    "strides": {"strides": (2, 1)},
    "dilation": {"dilation": (1, 3), "strides": (2, 1)},
    "padding": {"padding": (2, 1)},
    "uneven padding": {"padding": (0, 1, 2, 0)},
    "one side only": {"padding": (0, 0, 0, 1)},
    "strides, padding": {"strides": (2, 3), "padding": (1, 2)},
    "dilation, padding": {"dilation": (2, 3), "padding": (2, 3, 2, 4)},
    "all": {"dilation": (2, 1), "strides": (1, 2), "padding": (2, 0, 1, 2), "groups": 2},
    "more padding than kernel": {"padding": (4, 3, 3, 4)},
}
GAMMAS = {"both signs": [1.5, -2, 0.5, -1], "zeros": [0, -0.0, 0, 0], "one zero": [1, 0, -1, 2]}


@pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_geometry(geometry, gamma):
    """Exact up to the border, whatever the scale is: nothing is divided by it."""
    g = GraphBuilder()
    norm = random_norm(C)._replace(gamma=np.array(gamma))
    y = conv(g, normed(g, norm), draw(C, C // geometry.get("groups", 1), 3, 2), **geometry)
    folded, _ = assert_folds(g.build(y))
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD]


def test_border_map_of_one_channel():
    """A 3x3 kernel of ones over 3x3 zeros, shifted by 1: how many taps see the data."""
    g = GraphBuilder()
    x = normed(g, plain_norm(1, beta=1.0), shape=(1, 1, 3, 3))
    _, record = assert_folds(g.build(conv(g, x, np.ones((1, 1, 3, 3)), padding=(1, 1))))
    np.testing.assert_array_equal(record.edit.layers[0].bias[0, 0], [[4, 6, 4], [6, 9, 6], [4, 6, 4]])


@pytest.mark.parametrize("layout", ["NCHW4c", "NCHW2c"])
def test_packed_data_and_kernel(layout):
    block = int(layout[4])
    plain = draw(8, 8, 3, 3)
    kernel = f"OIHW{block}i{block}o"
    weight = from_plain(plain, "OIHW", kernel)
    for padding in ((0, 0), (1, 0)):
        g = GraphBuilder()
        x = g.layout_transform(normed(g, random_norm(8), (2, 8, 4, 4)), "NCHW", layout)
        y = g.conv2d(x, weight, padding=padding, layout=layout, kernel=kernel)
        folded, record = assert_folds(g.build(y))
        assert kinds(folded) == [Kind.LAYOUT_TRANSFORM, Kind.CONV2D, Kind.ADD]
        image = (4, 2) if any(padding) else (1, 1)
        assert record.edit.layers[0].bias.shape == (1, 8 // block, *image, block)


CONVOLUTIONS = {
    "conv1d": (1, "NCW", "OIW", 1, 4),
    "conv1d, channels last": (1, "NWC", "WIO", 1, 4),
    "conv1d, groups": (1, "NCW", "OIW", 2, 8),
    "conv3d": (3, "NCDHW", "OIDHW", 1, 3),
    "conv3d, channels last": (3, "NDHWC", "DHWIO", 1, 3),
    "conv3d, groups": (3, "NCDHW", "OIDHW", 2, 4),
}


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    ("rank", "layout", "kernel", "groups", "channels"), CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys()
)
def test_one_and_three_axes(rank, layout, kernel, groups, channels, padded):
    g = GraphBuilder()
    inner = channels // groups if groups == 1 else 2
    sizes = {"N": 3, "C": inner * groups, **dict.fromkeys("DHW", 3)}
    x = normed(g, random_norm(inner * groups), [sizes[n] for n in layout], axis=layout.index("C"))
    weight = draw(*({"O": channels, "I": inner, **dict.fromkeys("DHW", 2)}[n] for n in kernel))
    padding = (1, 0, 2, 0, 1, 1)[: 2 * rank] if padded else ()
    y = g.convolution(x, weight, layout=layout, kernel=kernel, groups=groups, padding=padding)
    assert_folds(g.build(y))


# --- what padding forbids ----------------------------------------------------------------------


def wide(g, channels, norm=None):
    """From 4 channels to many: the map over the output grows."""
    return conv(g, normed(g, norm, (1, C, C, C)), draw(channels, C, 3, 3), padding=(1, 1))


def test_a_map_of_twice_the_data_is_the_largest():
    g = GraphBuilder()
    assert_folds(g.build(wide(g, 2 * C)))
    g = GraphBuilder()
    reason = refusal(g.build(wide(g, 2 * C + 1)))
    assert (reason.code, reason.got) == (Code.BN_SHIFT_BEFORE_PADDING, "padding of conv")
    g = GraphBuilder()
    assert_folds(g.build(wide(g, 2 * C + 1, SCALE_ONLY)))


SYMBOLIC = {"batch": ("n", C, C, C), "image": (1, C, "h", "w"), "both": ("n", C, "h", "w")}


@pytest.mark.parametrize("shape", SYMBOLIC.values(), ids=SYMBOLIC.keys())
def test_symbolic_sizes(shape):
    """With a shift the map has no size; without one, or without padding, nothing is needed."""
    g = GraphBuilder()
    reason = refusal(g.build(conv(g, normed(g, shape=shape), padding=(1, 1))))
    assert reason.code is Code.BN_SHIFT_BEFORE_PADDING
    for norm, padding in ((SCALE_ONLY, (1, 1)), (random_norm(C), (0, 0))):
        g = GraphBuilder()
        (record,), _ = plan_folds(g.build(conv(g, normed(g, norm, shape), padding=padding)))
        assert (record.direction, record.layers[0].name) == (Direction.AFTER, "conv")


def test_scale_alone_needs_no_bias():
    g = GraphBuilder()
    folded, record = assert_folds(g.build(conv(g, normed(g, SCALE_ONLY), padding=(2, 2))))
    assert record.edit.layers[0].bias is None
    assert kinds(folded) == [Kind.CONV2D]


@pytest.mark.parametrize("image", [((1, 1), (1, 1)), ((0, 2), (1, 0))], ids=["even", "uneven"])
def test_a_pad_before_the_layer_takes_a_scale_only(image):
    for norm in (SCALE_ONLY, None):
        g = GraphBuilder()
        graph = g.build(conv(g, g.pad(normed(g, norm), (0, 0), (0, 0), *image)))
        if norm is None:
            assert refusal(graph).code is Code.BN_SHIFT_BEFORE_PADDING
        else:
            folded, _ = assert_folds(graph)
            assert kinds(folded) == [Kind.PAD, Kind.CONV2D]


PADS = {
    "of ones": (((0, 0), (0, 0), (1, 1), (1, 1)), 1.0),
    "of what is computed": (((0, 0), (0, 0), (1, 1), (1, 1)), None),
    "of channels": (((0, 0), (0, 2), (0, 0), (0, 0)), 0.0),
}


@pytest.mark.parametrize(("widths", "value"), PADS.values(), ids=PADS.keys())
def test_other_pads_are_refused(widths, value):
    g = GraphBuilder()
    x = g.pad(normed(g, SCALE_ONLY), *widths, value=value)
    reason = refusal(g.build(conv(g, x, draw(C, g.shape(x)[1], 3, 3))))
    assert (reason.code, reason.got) == (Code.BN_READER_UNSUPPORTED, "pad")


def test_a_shift_after_the_pad_is_no_shift_before_it():
    g = GraphBuilder()
    x = g.add(g.pad(normed(g, SCALE_ONLY), (0, 0), (0, 0), (1, 1), (1, 1)), draw(C, 1, 1))
    assert refusal(g.build(conv(g, x))).code is Code.BN_READER_UNSUPPORTED


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_transposed_convolutions_take_a_scale_only(layout, groups):
    for norm in (SCALE_ONLY, None):
        g = GraphBuilder()
        x = normed(g, norm, axis=layout.index("C"))
        graph = g.build(
            g.convolution(x, draw(C, 3, 2, 2), layout=layout, kernel="IOHW", transposed=True, groups=groups)
        )
        if norm is None:
            assert refusal(graph).code is Code.BN_SHIFT_BEFORE_PADDING
        else:
            assert_folds(graph)


# --- matrix products ---------------------------------------------------------------------------

#: kernel layout, kernel shape, data shape, axis of the data that is summed over
PRODUCTS = {
    "OI": ("OI", (C, C), (C, C), -1),
    "IO": ("IO", (C, C), (C, C), -1),
    "IO, data transposed": ("IO", (C, C), (C, C), -2),
    "IO, rank 3": ("IO", (C, C), (C, C, C), -1),
    "BOI": ("BOI", (C, C, C), (C, C, C), -1),
    "BIO": ("BIO", (C, C, C), (C, C, C), -1),
    "BIO, data transposed": ("BIO", (C, C, C), (C, C, C), -2),
    "BOI, batch 1": ("BOI", (1, C, C), (1, C, C), -1),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("kernel", "shape", "data", "axis"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_matrix_products(kernel, shape, data, axis, with_bias):
    g = GraphBuilder()
    x = normed(g, shape=data, axis=len(data) + axis)
    y = g.matmul(x, draw(*shape), kernel=kernel, input_axis=axis)
    y = g.add(y, draw(C, seed=5)) if with_bias else y
    folded, record = assert_folds(g.build(y))
    assert kinds(folded)[1:] == [Kind.ADD]
    if "B" in kernel:
        assert record.edit.layers[0].bias.shape == (shape[0], 1, C)  # one bias for each matrix


@pytest.mark.parametrize(
    ("kernel", "axis", "summed"), [("OI", 0, -1), ("IO", 1, -2), ("BOI", 1, -1), ("BOI", 0, -1)]
)
def test_matrix_products_over_their_rows(kernel, axis, summed):
    g = GraphBuilder()
    shape = (C,) * len(kernel)
    y = g.matmul(normed(g, shape=shape, axis=axis), draw(*shape), kernel=kernel, input_axis=summed)
    assert refusal(g.build(y)).code is Code.BN_AXIS_NOT_CHANNEL


@pytest.mark.parametrize("kernel", ["OI4o", "OI2i4o"])
def test_packed_dense(kernel):
    g = GraphBuilder()
    x = normed(g, random_norm(8), (8, 8))
    folded, _ = assert_folds(g.build(g.dense(x, from_plain(draw(8, 8), "OI", kernel), kernel=kernel)))
    assert kinds(folded) == [Kind.DENSE, Kind.ADD]


def test_the_right_side_of_a_product_is_no_layer():
    g = GraphBuilder()
    y = g.matmul(g.input("y", (C, C, C)), normed(g, shape=(C, C, C), axis=2), kernel="BOI")
    assert refusal(g.build(y)).code is Code.BN_READER_UNSUPPORTED
    g = GraphBuilder()  # both sides
    x = normed(g, shape=(C, C, C), axis=2)
    assert refusal(g.build(g.matmul(x, x, kernel="BOI"))).code is Code.WEIGHT_NOT_CONSTANT


# --- ways down ---------------------------------------------------------------------------------

WAYS = {
    "transpose": (lambda g, x: g.transpose(x, 0, 2, 3, 1), "NHWC"),
    "layout_transform": (lambda g, x: g.layout_transform(x, "NCHW", "NHWC"), "NHWC"),
    "there and back": (lambda g, x: g.transpose(g.transpose(x, 0, 2, 3, 1), 0, 3, 1, 2), "NCHW"),
    "reshape": (lambda g, x: g.reshape(x, C, C, 2, 2 * C), "NCHW"),
    "another scale and shift": (lambda g, x: g.add(g.multiply(x, draw(C, 1, 1)), 1.5), "NCHW"),
    "scale, move, shift": (
        lambda g, x: g.subtract(2.0, g.transpose(g.divide(x, 2.0), 0, 2, 3, 1)),
        "NHWC",
    ),
    "cast": (lambda g, x: g.cast(x, "float64"), "NCHW"),
    "merged with H": (lambda g, x: g.reshape(x, C, C * C, C, 1), "NCHW"),
}


@pytest.mark.parametrize("padding", [(0, 0), (1, 0)], ids=["unpadded", "padded"])
@pytest.mark.parametrize(("way", "layout"), WAYS.values(), ids=WAYS.keys())
def test_ways(way, layout, padding):
    g = GraphBuilder()
    x = way(g, normed(g))
    channels = g.shape(x)[layout.index("C")]
    y = conv(g, x, draw(C, channels, 2, 1), layout=layout, padding=padding)
    folded, _ = assert_folds(g.build(y))
    assert not folded.of_kind(Kind.MULTIPLY, Kind.DIVIDE, Kind.SUBTRACT)
    assert kinds(folded)[-2:] == [Kind.CONV2D, Kind.ADD]


FLATTENED = {
    "NCHW": ((C, C, 3, 3), 1, (C, 9 * C)),
    "NHWC": ((C, 3, 3, C), 3, (C, 9 * C)),
    "batch of one": ((1, C, 3, 3), 1, (1, 9 * C)),
    "one pixel": ((C, C, 1, 1), 1, (C, C)),
    "one pixel, batch of one": ((1, C, 1, 1), 1, (1, C)),
}


@pytest.mark.parametrize(("shape", "axis", "flat"), FLATTENED.values(), ids=FLATTENED.keys())
def test_flatten_then_dense(shape, axis, flat):
    """Each channel of the batch norm is many inputs of the dense layer."""
    g = GraphBuilder()
    y = g.dense(g.reshape(normed(g, shape=shape, axis=axis), *flat), draw(5, flat[1]))
    folded, _ = assert_folds(g.build(g.add(y, draw(5))))
    assert kinds(folded) == [Kind.RESHAPE, Kind.DENSE, Kind.ADD]


def test_transposed_then_flattened():
    g = GraphBuilder()
    x = g.transpose(normed(g), 0, 2, 3, 1)
    assert_folds(g.build(g.dense(g.reshape(x, C, C**3), draw(5, C**3))))


def test_flatten_that_is_not_known():
    g = GraphBuilder()
    x = g.reshape(normed(g, shape=(1, C, "h", "w")), 1, "chw")
    assert refusal(g.build(g.dense(x, draw(5, 16)))).code is Code.BN_READER_UNSUPPORTED


ASIDE = {
    "transpose": (lambda g, x: g.transpose(x, 0, 2, 3, 1), Code.BN_AXIS_NOT_CHANNEL),
    "layout_transform": (lambda g, x: g.layout_transform(x, "NCHW", "NHWC"), Code.BN_AXIS_NOT_CHANNEL),
    "elements shift": (lambda g, x: g.reshape(x, C, 2, 2 * C, C), Code.BN_AXIS_NOT_CHANNEL),
    "integers": (lambda g, x: g.cast(g.cast(x, "int32"), "float64"), Code.BN_READER_UNSUPPORTED),
}


@pytest.mark.parametrize(("way", "code"), ASIDE.values(), ids=ASIDE.keys())
def test_ways_that_take_the_channels_elsewhere(way, code):
    g = GraphBuilder()
    x = way(g, normed(g))
    assert refusal(g.build(conv(g, x, draw(C, g.shape(x)[1], 1, 1)))).code is code


def test_channels_that_are_no_channels_of_the_layer():
    g = GraphBuilder()
    assert refusal(g.build(conv(g, normed(g, axis=3)))).code is Code.BN_AXIS_NOT_CHANNEL


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16")], ids=" to ".join)
def test_a_cast_on_the_way_must_hold_the_raw_value(dtypes):
    """1000.25 - 1000 is 0.25 in float32 and in float16; 1000.25 itself is not, in float16."""
    g = GraphBuilder(dtypes[0])
    norm = [vector.astype(dtypes[0]) for vector in plain_norm(C, mean=1000)]
    x = g.cast(g.norm(g.input("x", SHAPE), norm, epsilon=0.0), dtypes[1])
    g.dtype = dtypes[1]
    graph = g.build(g.conv2d(x, draw(C, C, 1, 1).astype(dtypes[1])))
    if dtypes[0] == "float32":
        reason = refusal(graph)
        assert (reason.code, reason.got) == (Code.BN_READER_UNSUPPORTED, "cast")
    else:
        assert_folds(graph, tolerance=1e-3)


# --- readers -----------------------------------------------------------------------------------


def test_two_layers_read_it():
    g = GraphBuilder()
    x = normed(g)
    y = g.add(g.conv2d(x, draw(C, C, 3, 3), padding=(1, 1)), draw(C, 1, 1))
    folded, record = assert_folds(g.build(y, g.conv2d(x, draw(8, C, 1, 1, seed=2))), layers=2)
    assert [layer.had_bias for layer in record.layers] == [True, False]
    assert len(folded.of_kind(Kind.CONV2D)) == 2


def test_two_layers_read_it_in_other_ways():
    g = GraphBuilder()
    x = normed(g)
    first = g.conv2d(g.transpose(x, 0, 2, 3, 1), draw(C, C, 1, 1), layout="NHWC")
    second = g.dense(g.reshape(g.multiply(x, 2.0), C, C**3), draw(3, C**3))
    assert_folds(g.build(first, second), layers=2)


def test_normalized_output_taken_twice():
    g = GraphBuilder()
    bn = g.batch_norm(g.input("x", SHAPE), random_norm(C))
    y = g.conv2d(g.item(bn), draw(C, C, 1, 1)), g.conv2d(g.item(bn), draw(C, C, 1, 1, seed=2))
    assert_folds(g.build(*y), layers=2)


def test_one_layer_adds_to_another():
    g = GraphBuilder()
    x = normed(g)
    y = g.add(g.conv2d(x, draw(C, C, 1, 1)), g.conv2d(x, draw(C, C, 1, 1, seed=2)))
    assert_folds(g.build(y), layers=2)


def test_weights_that_two_layers_share_are_copied():
    g = GraphBuilder()
    weight = g.const(draw(C, C, 1, 1))
    plain = g.conv2d(g.input("y", SHAPE), weight)
    folded, record = assert_folds(g.build(g.conv2d(normed(g), weight), plain))
    assert record.layers[0].weight_before != record.layers[0].weight_after
    assert len({node.inputs[1] for node in folded.of_kind(Kind.CONV2D)}) == 2


def _two(first):
    """A convolution reads it, and something else."""
    return lambda g, x: [g.conv2d(x, draw(C, C, 1, 1)), first(g, x)]


#: outputs that read the batch norm of an input -> code, what was found
READERS = {
    "relu, then conv": (lambda g, x: [conv(g, g.relu(x))], Code.BN_BEFORE_ACTIVATION, "nn.relu"),
    "leaky relu, then conv": (
        lambda g, x: [conv(g, g.leaky_relu(x))],
        Code.BN_BEFORE_ACTIVATION,
        "nn.leaky_relu",
    ),
    "scale, then relu": (
        lambda g, x: [conv(g, g.relu(g.multiply(x, 2.0)))],
        Code.BN_BEFORE_ACTIVATION,
        "nn.relu",
    ),
    "conv and relu": (_two(lambda g, x: g.relu(x)), Code.BN_BEFORE_ACTIVATION, "nn.relu"),
    "conv and pool": (_two(lambda g, x: g.other("pool", x)), Code.BN_READER_UNSUPPORTED, "pool"),
    "pool": (lambda g, x: [g.other("pool", x)], Code.BN_READER_UNSUPPORTED, "pool"),
    "residual add": (
        lambda g, x: [g.add(x, g.conv2d(x, draw(C, C, 1, 1)))],
        Code.BN_READER_UNSUPPORTED,
        "add",
    ),
    "full-size add": (lambda g, x: [conv(g, g.add(x, draw(*SHAPE)))], Code.BN_READER_UNSUPPORTED, "add"),
    "constant over it": (lambda g, x: [conv(g, g.divide(2.0, x))], Code.BN_READER_UNSUPPORTED, "divide"),
    "weight is an input": (
        lambda g, x: [conv(g, x, g.input("w", (C, C, 1, 1)))],
        Code.WEIGHT_NOT_CONSTANT,
        "computed by w",
    ),
    "one weight is an input": (
        _two(lambda g, x: conv(g, x, g.input("w", (C, C, 1, 1)))),
        Code.WEIGHT_NOT_CONSTANT,
        "computed by w",
    ),
    "weight is the batch norm": (
        lambda g, x: [g.conv2d(g.input("y", SHAPE), x)],
        Code.BN_READER_UNSUPPORTED,
        "nn.conv2d",
    ),
    "weights of integers": (
        lambda g, x: [conv(g, x, np.ones((C, C, 1, 1), "int8"))],
        Code.FOLD_OVERFLOW,
        "int8",
    ),
    "weights in float16": (
        lambda g, x: [conv(g, x, np.full((C, C, 1, 1), 65504, "float16"))],
        Code.FOLD_OVERFLOW,
        "weight[0, 0, 0, 0] = ",
    ),
    "grouped and blocked": (
        lambda g, x: [g.conv2d(x, draw(2, 1, 1, 1, 2, 2), groups=2, kernel="OIHW2i2o")],
        Code.WEIGHT_LAYOUT_UNSUPPORTED,
        "OIHW2i2o (2, 1, 1, 1, 2, 2)",
    ),
}


@pytest.mark.parametrize(("read", "code", "got"), READERS.values(), ids=READERS.keys())
def test_readers_that_cannot_take_it(read, code, got):
    """Nothing is folded, not even into the layer that could."""
    g = GraphBuilder()
    norm = random_norm(C)._replace(gamma=np.full(C, 3.0))
    reason = refusal(g.build(*read(g, normed(g, norm))))
    assert reason.code is code
    assert reason.got.startswith(got)


RETURNED = {
    "itself": lambda g, x: [x],
    "conv and itself": _two(lambda g, x: x),
    "conv and what is moved": _two(lambda g, x: g.transpose(x, 1, 0, 2, 3)),
    "conv and what is scaled": _two(lambda g, x: g.multiply(x, 2.0)),
}


@pytest.mark.parametrize("read", RETURNED.values(), ids=RETURNED.keys())
def test_a_value_that_is_returned(read):
    """The batch norm is then reported for what is before it."""
    g = GraphBuilder()
    x = normed(g)
    graph = g.build(*read(g, x))
    reason = absorb_forward(graph, [x], (1,), Affine.identity(C), "bn")
    assert (reason.code, reason.got) == (Code.RESULT_RETURNED, "a model output")
    assert refusal(graph).code is Code.BN_PRODUCER_UNSUPPORTED


def test_a_value_that_nobody_reads():
    g = GraphBuilder()
    x = normed(g)
    reason = absorb_forward(g.build(g.input("y", SHAPE)), [x], (1,), Affine.identity(C), "bn")
    assert (reason.code, reason.got) == (Code.BN_READER_UNSUPPORTED, "no reader")


def test_two_batch_norms_in_a_row_fold_one_a_round():
    g = GraphBuilder()
    graph = g.build(conv(g, g.norm(normed(g, name="first"), random_norm(C, 1), name="second")))
    (record,), (decision, _) = plan_folds(graph)
    assert (record.name, decision.reason.code) == ("second", Code.BN_READER_UNSUPPORTED)
    assert_folds(apply_folds(graph, [record]))


NORMALIZATIONS = ["nn.instance_norm", "nn.layer_norm", "nn.group_norm", "nn.lrn"]


@pytest.mark.parametrize("op", NORMALIZATIONS)
def test_normalizations_of_data_are_named_and_not_folded(op):
    g = GraphBuilder()
    y = g.node(Kind.DATA_NORM, op, (conv(g, g.input("x", SHAPE)),), SHAPE, name="norm7")
    reason = refusal(g.build(conv(g, y, draw(C, C, 1, 1))))
    assert (reason.code, reason.at, reason.got) == (Code.NORMALIZATION_OF_DATA, "norm7", op)
    g = GraphBuilder()  # a batch norm beside it folds
    x = g.node(Kind.DATA_NORM, op, (g.input("x", SHAPE),), SHAPE, name="norm7")
    records, decisions = plan_folds(g.build(g.norm(conv(g, x), random_norm(C), name="bn8")))
    assert [record.name for record in records] == ["bn8"]
    assert [decision.rule for decision in decisions] == ["fold-data-norm", "fold-batch-norm"]


# --- biases after the layer --------------------------------------------------------------------

BIASES = {
    "bias_add": lambda g, y: g.bias_add(y, draw(C, seed=5)),
    "add": lambda g, y: g.add(y, draw(C, 1, 1, seed=5)),
    "add, constant first": lambda g, y: g.add(draw(1, C, 1, 1, seed=5), y),
    "scalar": lambda g, y: g.add(y, 2.5),
}


@pytest.mark.parametrize("padding", [(0, 0), (1, 1)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_a_bias_after_the_layer_is_merged(bias, padding):
    g = GraphBuilder()
    y = bias(g, conv(g, normed(g), padding=padding))
    folded, record = assert_folds(g.build(g.relu(y)))
    assert record.layers[0].had_bias
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD, Kind.RELU]


NOT_MERGED = {
    "full size": lambda g, y: [g.add(y, draw(*g.shape(y)[1:], seed=5))],
    "along W": lambda g, y: [g.add(y, draw(2, seed=5))],
    "subtracted": lambda g, y: [g.subtract(y, draw(C, 1, 1, seed=5))],
    "shared": lambda g, y: [g.add(y, draw(C, 1, 1, seed=5)), g.relu(y)],
    "returned": lambda g, y: [g.add(y, draw(C, 1, 1, seed=5)), y],
}


@pytest.mark.parametrize("more", NOT_MERGED.values(), ids=NOT_MERGED.keys())
def test_what_is_no_bias_stays_after_the_new_one(more):
    g = GraphBuilder()
    folded, record = assert_folds(g.build(*more(g, conv(g, normed(g)))))
    assert not record.layers[0].had_bias
    assert kinds(folded)[:2] == [Kind.CONV2D, Kind.ADD]
    assert len(kinds(folded)) > 2


def test_a_fold_into_the_layer_before_comes_first():
    g = GraphBuilder()
    y = g.norm(conv(g, g.input("x", SHAPE), padding=(1, 1)), random_norm(C))
    (record,), _ = plan_folds(g.build(g.conv2d(y, draw(C, C, 1, 1))))
    assert (record.direction, record.layers[0].name) == (Direction.BEFORE, "conv")


def test_a_batch_norm_that_the_layer_before_cannot_take_goes_on_to_the_next():
    g = GraphBuilder()
    y = conv(g, g.input("x", SHAPE))
    graph = g.build(g.conv2d(g.norm(y, random_norm(C)), draw(C, C, 1, 1)), g.relu(y))
    assert_folds(graph)


# --- both ways on one layer --------------------------------------------------------------------


def fold_all(graph):
    """Rounds of both rules to the end."""
    rounds = []
    while True:
        records = []
        for plan in (plan_folds, plan_affine_folds):
            found, _ = plan(graph)
            graph = apply_folds(graph, found)
            records += found
        if not records:
            return graph, rounds
        rounds.append(records)


LAYERS = {
    "conv": (SHAPE, 1, lambda g, x: conv(g, x)),
    "padded conv": (SHAPE, 1, lambda g, x: conv(g, x, padding=(1, 1))),
    "dense": ((C, C), 1, lambda g, x: g.dense(x, draw(C, C))),
    "batch_matmul": ((C, C, C), 2, lambda g, x: g.matmul(x, draw(C, C, C), kernel="BOI")),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("shape", "axis", "layer"), LAYERS.values(), ids=LAYERS.keys())
def test_batch_norms_on_both_sides(shape, axis, layer, with_bias):
    """The one after the layer folds first: nothing folds back past the map that the other one may leave."""
    g = GraphBuilder()
    y = layer(g, normed(g, shape=shape, axis=axis, name="before"))
    y = g.bias_add(y, draw(C), axis=axis) if with_bias else y
    graph = g.build(g.norm(y, random_norm(C, 3), axis=axis, name="after"))
    folded, rounds = fold_all(graph)
    assert [[record.name for record in records] for records in rounds] == [["after"], ["before"]]
    assert max_error(*evaluate(folded, feeds_of(graph)), *evaluate(graph, feeds_of(graph))) <= EXACT
    assert len(kinds(folded)) == 2


def test_scales_and_shifts_on_both_sides():
    g = GraphBuilder()
    x = g.divide(g.subtract(g.input("x", SHAPE), draw(C, 1, 1)), 3.0)
    y = g.add(g.multiply(conv(g, x, padding=(1, 1)), draw(C, 1, 1, seed=4)), 1.5)
    graph = g.build(y)
    folded, rounds = fold_all(graph)
    assert [[record.operators for record in records] for records in rounds] == [
        [("multiply", "add")],
        [("subtract", "divide")],
    ]
    assert max_error(*evaluate(folded, feeds_of(graph)), *evaluate(graph, feeds_of(graph))) <= EXACT
    assert kinds(folded) == [Kind.CONV2D, Kind.ADD]


def test_a_stack_folds_in_a_few_rounds():
    g = GraphBuilder()
    y = g.input("x", SHAPE)
    for seed in range(4):
        y = g.norm(y, random_norm(C, seed))
        y = g.conv2d(y, draw(C, C, 3, 3, seed=seed), padding=(1, 1))
    graph = g.build(g.norm(y, random_norm(C, 9)))
    folded, rounds = fold_all(graph)
    assert sum(map(len, rounds)) == 5
    assert len(rounds) == 2
    assert not folded.of_kind(Kind.BATCH_NORM)
    assert max_error(*evaluate(folded, feeds_of(graph)), *evaluate(graph, feeds_of(graph))) <= EXACT


# --- the bound on the rounding error -----------------------------------------------------------


@pytest.mark.parametrize("padding", [(0, 0), (1, 1)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_outputs_move_by_no_more_than_the_record_says(dtype, padding):
    """x is what the layer reads after the fold: the data of the batch norm."""

    def const(array):
        return g.const(narrow(np.asarray(array, np.float64), dtype), dtype)

    g = GraphBuilder(dtype)
    norm = Norm(*(const(vector) for vector in random_norm(C)))
    y = g.conv2d(g.norm(g.input("x", (2 * C, C, 3, 3)), norm), const(draw(C, C, 3, 3)), padding=padding)
    graph = g.build(g.bias_add(y, const(draw(C, seed=3))))
    (record,), _ = plan_folds(graph)
    (layer,) = record.layers
    folded = apply_folds(graph, [record])
    exact = exact_weight(graph)
    (anchor,) = folded.of_kind(*ANCHOR_KINDS)
    error = folded.exact(anchor.inputs[1]) - exact
    worst = np.where(error < 0, -1.0, 1.0)
    feeds = {"x": 3.0 * np.concatenate([worst, -worst])}
    moved = np.abs(evaluate(folded, feeds)[0] - evaluate(graph, feeds)[0])
    assert layer.weight_error * 3 - layer.bias_error - 1e-12 <= moved.max()
    assert moved.max() <= layer.weight_error * 3 + layer.bias_error + 1e-12
    assert layer.weight_error > 0


def exact_weight(graph):
    (bn,), (anchor,) = graph.of_kind(Kind.BATCH_NORM), graph.of_kind(*ANCHOR_KINDS)
    gamma, _, _, variance = (graph.exact(source) for source in bn.inputs[1:])
    return graph.exact(anchor.inputs[1]) * (gamma / np.sqrt(variance + bn.attrs.epsilon))[:, None, None]
