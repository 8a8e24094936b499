"""A scale along the output or input channel of a kernel, in every layout; rounding of what is stored."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tests.support.numerics import from_plain, max_error
from tvm_fuse.core.dtypes import narrow
from tvm_fuse.core.edit import LayerEdit
from tvm_fuse.core.graph import digest
from tvm_fuse.core.reason import Code
from tvm_fuse.core.weights import (
    bias_like_output,
    exact_weight,
    fold_weight,
    fold_weight_inputs,
    input_axes,
    output_axes,
    round_layer,
    scale_inputs,
    scale_outputs,
)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_fold_weight_without_a_channel_axis_is_none():
    assert fold_weight(draw(3, 3, 3, 3), np.ones(4), "OIHW") is None
    assert fold_weight(draw(2, 2), np.ones(2), "NC") is None
    assert fold_weight(draw(2, 2, 2, 2), np.ones(2), "OI") is None


@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "OHWI", "OIHW2i4o", "HWOI"])
def test_fold_weight_against_index_arithmetic(layout):
    plain = draw(8, 8, 3, 3)
    scale = draw(8, seed=2)
    wanted = plain.copy()
    for o in range(8):
        wanted[o] *= scale[o]
    got = fold_weight(from_plain(plain, "OIHW", layout), scale, layout)
    assert max_error(got, from_plain(wanted, "OIHW", layout)) == 0


@pytest.mark.parametrize("layout", ["IOHW", "HWIO", "HWOI"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_kernel_against_index_arithmetic(layout, groups):
    """Input channel i belongs to group i // (I / groups), which makes the outputs group * O + o."""
    inputs, outputs = 8, 3
    plain, scale = draw(inputs, outputs, 3, 3), draw(outputs * groups, seed=2)
    wanted = plain.copy()
    for i in range(inputs):
        for o in range(outputs):
            wanted[i, o] *= scale[(i // (inputs // groups)) * outputs + o]
    got = fold_weight(from_plain(plain, "IOHW", layout), scale, layout, groups=groups, transposed=True)
    assert max_error(got, from_plain(wanted, "IOHW", layout)) == 0


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (6, 3), (3, 2)])
def test_transposed_kernel_that_does_not_fit_is_none(channels, groups):
    assert fold_weight(draw(8, 3, 3, 3), np.ones(channels), "IOHW", groups=groups, transposed=True) is None


# --- along the input channel -------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "OHWI", "OIHW2i4o", "OIHW4o2i", "HWOI"])
def test_inputs_against_index_arithmetic(layout):
    plain, scale = draw(8, 8, 3, 3), draw(8, seed=2)
    wanted = plain.copy()
    for i in range(8):
        wanted[:, i] *= scale[i]
    got = fold_weight_inputs(from_plain(plain, "OIHW", layout), scale, layout)
    assert max_error(got, from_plain(wanted, "OIHW", layout)) == 0


@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "HWOI"])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_inputs_against_index_arithmetic(layout, groups):
    """Output o is in group o // (O / groups), whose inputs are group * I + i."""
    outputs, inner = 8, 3
    plain, scale = draw(outputs, inner, 2, 2), draw(inner * groups, seed=2)
    wanted = plain.copy()
    for o in range(outputs):
        for i in range(inner):
            wanted[o, i] *= scale[o // (outputs // groups) * inner + i]
    got = fold_weight_inputs(from_plain(plain, "OIHW", layout), scale, layout, groups=groups)
    assert max_error(got, from_plain(wanted, "OIHW", layout)) == 0


@pytest.mark.parametrize("layout", ["OIHW", "HWOI"])
@pytest.mark.parametrize("multiplier", [1, 2, 4])
def test_depthwise_inputs_of_both_forms(layout, multiplier):
    """``(C, multiplier, ...)`` as Relay has it, ``(C * multiplier, 1, ...)`` as ONNX has it."""
    channels = 4
    plain, scale = draw(channels, multiplier, 3, 3), draw(channels, seed=2)
    wanted = plain * scale[:, None, None, None]
    got = fold_weight_inputs(from_plain(plain, "OIHW", layout), scale, layout, groups=channels)
    assert max_error(got, from_plain(wanted, "OIHW", layout)) == 0
    flat, flat_wanted = (array.reshape(-1, 1, 3, 3) for array in (plain, wanted))
    got = fold_weight_inputs(from_plain(flat, "OIHW", layout), scale, layout, groups=channels)
    assert max_error(got, from_plain(flat_wanted, "OIHW", layout)) == 0


#: shape, layout, groups, channels
NO_INPUTS = [
    ((3, 3, 3, 3), "OIHW", 1, 4),
    ((4, 4), "OC", 1, 4),
    ((4, 4, 4), "OI", 1, 4),
    ((4, 2, 3, 3), "OIHW", 2, 5),
    ((3, 2, 3, 3), "OIHW", 2, 4),
    ((2, 1, 1, 1, 2, 2), "OIHW2i2o", 2, 4),
]


@pytest.mark.parametrize(("shape", "layout", "groups", "channels"), NO_INPUTS, ids=str)
def test_kernels_without_that_input_channel(shape, layout, groups, channels):
    assert fold_weight_inputs(draw(*shape), np.ones(channels), layout, groups=groups) is None


# --- layers ------------------------------------------------------------------------------------


def layers(g):
    """Layer -> axes of its input channel and of its output channel."""
    x = g.input("x", (4, 4, 4, 4))
    packed = g.input("p", (1, 2, 4, 4, 4))
    cube = g.input("c", (4, 4, 4))
    return {
        g.conv2d(x, draw(4, 4, 1, 1)): ((1,), (1,)),
        g.conv2d(x, draw(4, 4, 1, 1), layout="NHWC"): ((3,), (3,)),
        g.conv2d(packed, draw(2, 2, 1, 1, 4, 4), layout="NCHW4c", kernel="OIHW4i4o"): ((1, 4), (1, 4)),
        g.convolution(x, draw(8, 4, 1, 1), layout="NCHW", kernel="OIHW", out_layout="NCHW4c"): ((1,), (1, 4)),
        g.dense(x, draw(4, 4)): ((3,), (3,)),
        g.matmul(cube, draw(4, 4, 4), kernel="BOI"): ((2,), (2,)),
        g.matmul(cube, draw(4, 4, 4), kernel="BIO", input_axis=-2): ((1,), (2,)),
    }


def test_axes_of_layers():
    g = GraphBuilder()
    wanted = layers(g)
    graph = g.build(*wanted)
    for layer, axes in wanted.items():
        assert (input_axes(graph, g.nodes[layer]), output_axes(g.nodes[layer])) == axes


def test_bias_has_the_rank_of_the_output():
    g = GraphBuilder()
    shapes = [
        bias_like_output(g.nodes[layer], np.ones(np.prod([g.shape(layer)[a] for a in axes]))).shape
        for layer, (_, axes) in layers(g).items()
    ]
    assert shapes == [
        (1, 4, 1, 1), (1, 1, 1, 4), (1, 2, 1, 1, 4), (1, 2, 1, 1, 4), (1, 1, 1, 4), (1, 1, 4), (1, 1, 4)
    ]  # fmt: skip


def test_a_kernel_that_does_not_fit_has_a_code():
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 4, 4, 4)), draw(8, 4, 1, 1), name="conv")
    weight = exact_weight(g.build(conv), g.nodes[conv])
    for scaled, role in (
        (scale_outputs(g.nodes[conv], weight, np.ones(5)), "output"),
        (scale_inputs(g.nodes[conv], weight, np.ones(5)), "input"),
    ):
        assert (scaled.code, scaled.at) == (Code.WEIGHT_LAYOUT_UNSUPPORTED, "conv")
        assert scaled.wanted == f"an {role} channel axis of 5"


# --- reading and rounding ----------------------------------------------------------------------


def one_conv(dtype, weight):
    g = GraphBuilder(dtype)
    stored = narrow(np.asarray(weight, np.float64), dtype)
    conv = g.conv2d(g.input("x", (1, 2, 3, 3)), g.const(stored, dtype), name="conv")
    return g.build(conv), g.nodes[conv]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_weights_are_read_exactly(dtype):
    weight = np.array([1.5, -0.0078125, 0, 2.0**-10]).reshape(2, 2, 1, 1)
    np.testing.assert_array_equal(exact_weight(*one_conv(dtype, weight)), weight)


def test_weights_that_cannot_be_read():
    g = GraphBuilder()
    x = g.input("x", (1, 2, 3, 3))
    computed = g.conv2d(x, g.transpose(draw(1, 1, 2, 2), 3, 2, 0, 1))
    integers = g.conv2d(x, np.ones((2, 2, 1, 1), "int8"))
    graph = g.build(computed, integers)
    codes = [exact_weight(graph, g.nodes[layer]).code for layer in (computed, integers)]
    assert codes == [Code.WEIGHT_NOT_CONSTANT, Code.FOLD_OVERFLOW]


#: dtype, exact weight, what is stored, largest sum of errors over an output channel
ROUNDED = [
    ("float16", [[1 + 2.0**-11, 1], [1 + 2.0**-12, 1 + 2.0**-12]], [[1, 1], [1, 1]], 2.0**-11),
    ("bfloat16", [[1 + 2.0**-8, 1], [1 + 2.0**-9, -1 - 2.0**-9]], [[1, 1], [1, -1]], 2.0**-8),
    ("float32", [[1 + 2.0**-24, 1 - 2.0**-26], [3, 4]], [[1, 1], [3, 4]], 2.0**-24 + 2.0**-26),
    ("float64", [[1 + 2.0**-52, 1], [3, 4]], [[1 + 2.0**-52, 1], [3, 4]], 0.0),
]


@pytest.mark.parametrize(("dtype", "exact", "stored", "error"), ROUNDED, ids=lambda v: str(v)[:8])
def test_rounding_and_its_record(dtype, exact, stored, error):
    graph, conv = one_conv(dtype, np.ones((2, 2, 1, 1)))
    weight = np.array(exact, np.float64).reshape(2, 2, 1, 1)
    bias = np.array([0.0, 2.0**-40]).reshape(1, 2, 1, 1)
    edit, layer = round_layer(graph, conv, weight, bias, "bn", had_bias=True)
    assert isinstance(edit, LayerEdit)
    kept = narrow(np.array(stored, np.float64).reshape(2, 2, 1, 1), dtype)
    np.testing.assert_array_equal(edit.weight, kept)
    assert layer.weight_after == digest(kept)
    assert (layer.name, layer.weight_error, layer.had_bias) == ("conv", error, True)
    assert (edit.bias is None, layer.bias_error) == ((True, 2.0**-40) if dtype == "float16" else (False, 0.0))


@pytest.mark.parametrize("role", ["weight", "bias"])
@pytest.mark.parametrize("number", [1e39, -np.inf, np.nan])
def test_numbers_that_do_not_fit_have_a_code(role, number):
    graph, conv = one_conv("float32", np.ones((2, 2, 1, 1)))
    weight, bias = np.ones((2, 2, 1, 1)), np.zeros((1, 2, 1, 1))
    if role == "weight":
        weight[1, 0, 0, 0] = number
    else:
        bias[0, 1, 0, 0] = number
    reason = round_layer(graph, conv, weight, bias, "bn7", had_bias=False)
    assert (reason.code, reason.at) == (Code.FOLD_OVERFLOW, "conv")
    place = {"weight": "weight[1, 0, 0, 0]", "bias": "bias[1]"}[role]
    assert reason.got.startswith(f"{place} = {number:g} for bn7 (1 of ")
