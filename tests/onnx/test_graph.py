"""ONNX models as core graphs: kinds, attributes, names, shapes, and who reads what. Needs no TVM."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import Builder
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.graph import (
    BatchNormAttrs,
    BiasAddAttrs,
    ClipAttrs,
    ConcatenateAttrs,
    ConvAttrs,
    DenseAttrs,
    Kind,
    PadAttrs,
    TensorInfo,
    TransposeAttrs,
)
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.parts import take_apart
from tvm_fuse.onnx.shapes import OPAQUE


def read(model):
    found = read_graph(take_apart(model))
    graph = found.graph
    assert [node.id for node in graph.nodes] == list(range(len(graph.nodes)))
    assert all(source < node.id for node in graph.nodes for source in node.inputs)
    assert len(found.values) == len(found.sources) == len(graph.nodes)
    return found


def computed(found):
    """The nodes that are neither inputs nor constants."""
    return [node for node in found.graph.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT)]


def kinds(found):
    return [node.kind for node in computed(found)]


def only(found):
    """The one node that computes something."""
    (node,) = computed(found)
    return node


def value(found, name):
    """The node that holds an ONNX value."""
    return found.graph.nodes[found.values.index(name)]


# --- convolutions ------------------------------------------------------------------------------


def conv_attrs(rank=2, **other):
    spatial = "DHW"[-rank:]
    attrs = {
        "strides": (1,) * rank, "padding": (0,) * (2 * rank), "dilation": (1,) * rank,
        "groups": 1, "channels": 4,
        "data_layout": f"NC{spatial}", "kernel_layout": f"OI{spatial}", "out_layout": f"NC{spatial}",
    }  # fmt: skip
    return ConvAttrs(**{**attrs, **other})


@pytest.mark.parametrize(
    ("rank", "kind"), [(1, Kind.CONV1D), (2, Kind.CONV2D), (3, Kind.CONV3D)], ids=["1d", "2d", "3d"]
)
def test_conv(rank, kind):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, *(8,) * rank)), 4, kernel=[3] * rank, name="c")
    found = read(b.build([y]))
    node = only(found)
    assert (node.kind, node.op, node.name, found.values[node.id]) == (kind, "Conv", "c", "c")
    assert node.attrs == conv_attrs(rank)
    assert node.output == TensorInfo((1, 4, *(6,) * rank), "float32")
    assert found.graph.outputs == (node.id,)
    assert [found.values[source] for source in node.inputs] == ["x", "c.weight"]
    assert found.graph.constant(node.inputs[1]).shape == (4, 3, *(3,) * rank)


def test_conv_of_four_spatial_axes_is_opaque():
    b = Builder()
    y = b.conv(b.input("x", (1, 1, 4, 4, 4, 4)), 1, kernel=[1] * 4)
    assert kinds(read(b.build([y]))) == [Kind.OTHER]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"stride": [2, 1]}, {"strides": (2, 1)}),
        ({"pads": [1, 2, 3, 4]}, {"padding": (1, 2, 3, 4)}),
        ({"dilations": [2, 3]}, {"dilation": (2, 3)}),
        ({"group": 2}, {"groups": 2}),
        ({"auto_pad": "VALID"}, {}),
        ({"auto_pad": "NOTSET", "pads": [1, 1, 1, 1]}, {"padding": (1, 1, 1, 1)}),
        ({"auto_pad": "SAME_UPPER"}, {"padding": (1, 1, 1, 1)}),
        # 9 and 8 with stride 2: 5 and 4 positions; 2 and 1 elements missing.
        ({"auto_pad": "SAME_UPPER", "stride": 2}, {"strides": (2, 2), "padding": (1, 0, 1, 1)}),
        ({"auto_pad": "SAME_LOWER", "stride": 2}, {"strides": (2, 2), "padding": (1, 1, 1, 0)}),
        ({"auto_pad": "SAME_LOWER", "kernel": 1}, {}),
    ],
    ids=lambda value: ",".join(f"{key}={item}" for key, item in value.items()) or "-",
)
def test_attributes_of_conv(options, wanted):
    b = Builder()
    options = {"kernel": 3, **options}
    y = b.conv(b.input("x", (1, 6, 9, 8)), 4, **options)
    assert only(read(b.build([y]))).attrs == conv_attrs(**wanted)


def test_defaults_of_conv():
    """Nothing but inputs: kernel_shape, strides, pads, dilations and group are left out."""
    b = Builder()
    y = b.op("Conv", b.input("x", (1, 3, 5, 5)), b.const(np.ones((4, 3, 3, 3))))
    assert only(read(b.build([y]))).attrs == conv_attrs()


@pytest.mark.parametrize(("kernel", "padding"), [(3, (2, 2, 2, 2)), (1, (0, 0, 0, 0))])
def test_same_padding_of_unknown_sizes_is_the_most_it_may_be(kernel, padding):
    b = Builder()
    x = b.input("x", ("n", 3, "h", None))
    y = b.conv(x, 4, kernel=kernel, channels=3, auto_pad="SAME_UPPER")
    assert only(read(b.build([y]))).attrs.padding == padding


def test_a_bias_is_a_node_of_its_own():
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 8, 8)), 4, bias=True, name="c")
    found = read(b.build([y]))
    conv, bias = computed(found)
    assert (conv.kind, bias.kind, bias.attrs) == (Kind.CONV2D, Kind.BIAS_ADD, BiasAddAttrs(1))
    assert (found.values[conv.id], found.values[bias.id]) == ("", "c")
    assert bias.inputs == (conv.id, found.values.index("c.bias"))
    assert conv.name == bias.name == "c"
    assert found.sources[conv.id] == found.sources[bias.id] == 0
    assert conv.output == bias.output


def test_an_empty_name_is_no_bias():
    b = Builder()
    y = b.op("Conv", b.input("x", (1, 3, 5, 5)), b.const(np.ones((4, 3, 3, 3))), None)
    assert kinds(read(b.build([y]))) == [Kind.CONV2D]


def test_parameters_that_are_inputs():
    b = Builder()
    x, w, bias = b.input("x", (1, 3, 5, 5)), b.input("w", (4, 3, 3, 3)), b.input("b", (4,))
    found = read(b.build([b.op("Conv", x, w, bias)]))
    assert kinds(found) == [Kind.CONV2D, Kind.BIAS_ADD]
    assert computed(found)[0].attrs == conv_attrs()
    assert found.graph.constant(computed(found)[0].inputs[1]) is None


@pytest.mark.parametrize(
    ("rank", "kind"),
    [(1, Kind.CONV1D_TRANSPOSE), (2, Kind.CONV2D_TRANSPOSE), (3, Kind.CONV3D_TRANSPOSE)],
    ids=["1d", "2d", "3d"],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose(rank, kind, groups):
    b = Builder()
    weight = b.const(np.ones((4, 6 // groups, *(3,) * rank)))
    y = b.op("ConvTranspose", b.input("x", (1, 4, *(5,) * rank)), weight, b.const(np.ones(6)), group=groups)
    found = read(b.build([y]))
    conv, bias = computed(found)
    assert (conv.kind, bias.kind) == (kind, Kind.BIAS_ADD)
    spatial = "DHW"[-rank:]
    assert conv.attrs == conv_attrs(rank, groups=groups, channels=6, kernel_layout=f"IO{spatial}")
    assert conv.output.shape == (1, 6, *(7,) * rank)


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        ({"pads": [1, 0, 1, 2]}, (1, 0, 1, 2)),
        ({"auto_pad": "VALID"}, (0, 0, 0, 0)),
        # The full result is 7 long; what is cut off makes it 10 with stride 2, 5 with stride 1.
        ({"auto_pad": "SAME_UPPER"}, (1, 1, 1, 1)),
        ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (1, 1, 0, 0)),
        ({"auto_pad": "SAME_LOWER", "strides": [2, 2]}, (0, 0, 1, 1)),
        ({"output_shape": [6, 7]}, (0, 0, 1, 0)),
    ],
    ids=str,
)
def test_padding_of_conv_transpose(options, padding):
    b = Builder()
    y = b.op("ConvTranspose", b.input("x", (1, 2, 5, 5)), b.const(np.ones((2, 2, 3, 3))), **options)
    model = b.build([y])
    assert only(read(model)).attrs.padding == padding


# --- matrix products ---------------------------------------------------------------------------


def gemm(b_shape=(4, 3), c=None, x_shape=(2, 4), **attrs):
    b = Builder()
    c = c if c is None or isinstance(c, str) else b.const(np.asarray(c))
    x = b.input("x", x_shape)
    if c == "input":
        b.input("input", (3,))
    return b.build([b.op("Gemm", x, b.const(np.ones(b_shape), "W"), c, name="g", **attrs)])


@pytest.mark.parametrize(
    ("options", "attrs"),
    [
        ({}, DenseAttrs("IO")),
        ({"b_shape": (3, 4), "transB": 1}, DenseAttrs("OI")),
        ({"x_shape": (4, 2), "transA": 1}, DenseAttrs("IO", input_axis=-2)),
        ({"alpha": 1.0, "beta": 0.5}, DenseAttrs("IO")),
    ],
    ids=["plain", "transB", "transA", "beta without C"],
)
def test_gemm(options, attrs):
    found = read(gemm(**options))
    node = only(found)
    assert (node.kind, node.attrs, node.output.shape) == (Kind.DENSE, attrs, (2, 3))
    assert found.values[node.id] == "g"


@pytest.mark.parametrize("c", [np.ones(3), np.ones((1, 3)), np.ones((2, 3)), np.ones(1), np.ones(())])
def test_gemm_with_a_sum(c):
    found = read(gemm(c=c))
    dense, add = computed(found)
    assert (dense.kind, add.kind) == (Kind.DENSE, Kind.ADD)
    assert found.graph.constant(add.inputs[1]).shape == c.shape
    assert (found.values[dense.id], found.values[add.id]) == ("", "g")
    assert add.output == dense.output


def test_alpha_and_beta_are_exact():
    found = read(gemm(c=[0.1, 0.2, 0.3], alpha=0.1, beta=3.0))
    dense, multiply, add = computed(found)
    assert [dense.kind, multiply.kind, add.kind] == [Kind.DENSE, Kind.MULTIPLY, Kind.ADD]
    assert multiply.inputs[0] == dense.id
    assert add.inputs[0] == multiply.id
    exact = found.graph.exact
    assert exact(multiply.inputs[1]) == np.float64(np.float32(0.1))
    assert np.array_equal(exact(add.inputs[1]), 3.0 * np.array([0.1, 0.2, 0.3], "f4").astype("f8"))


@pytest.mark.parametrize("what", ["weight", "sum"])
def test_gemm_that_is_not_constant_is_opaque(what):
    b = Builder()
    x, w = b.input("x", (2, 4)), b.input("w", (4, 3)) if what == "weight" else b.const(np.ones((4, 3)))
    c = b.input("c", (3,)) if what == "sum" else b.const(np.ones(3))
    found = read(b.build([b.op("Gemm", x, w, c)]))
    assert only(found).kind is Kind.OTHER
    assert len(only(found).inputs) == 3


@pytest.mark.parametrize(
    ("data", "weight", "kind", "layout"),
    [
        ((2, 4), (4, 3), Kind.MATMUL, "IO"),
        ((5, 2, 4), (4, 3), Kind.MATMUL, "IO"),
        ((4,), (4, 3), Kind.MATMUL, "IO"),
        ((5, 2, 4), (5, 4, 3), Kind.BATCH_MATMUL, "BIO"),
        ((2, 4), (5, 4, 3), Kind.OTHER, None),
        ((6, 5, 2, 4), (5, 4, 3), Kind.OTHER, None),
        ((2, 4), (4,), Kind.OTHER, None),
    ],
    ids=str,
)
def test_matmul(data, weight, kind, layout):
    b = Builder()
    node = only(read(b.build([b.op("MatMul", b.input("x", data), b.const(np.ones(weight)))])))
    assert node.kind is kind
    assert node.attrs == (None if layout is None else DenseAttrs(layout))


def test_matmul_with_the_constant_on_the_left_is_opaque():
    b = Builder()
    node = only(read(b.build([b.op("MatMul", b.const(np.ones((3, 4))), b.input("x", (4, 2)))])))
    assert node.kind is Kind.OTHER


# --- batch norm --------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "wanted"), [(0.25, 0.25), (None, 1e-5), (0.0, 0.0)])
@pytest.mark.parametrize("opset", [7, 9, 14, 15, 17])
def test_batch_norm(opset, epsilon, wanted):
    b = Builder(opset=opset)
    y = b.batch_norm(b.input("x", (1, 3, 4, 4)), epsilon=epsilon, name="bn")
    found = read(b.build([y]))
    norm, item = computed(found)
    assert (norm.kind, item.kind, item.attrs) == (Kind.BATCH_NORM, Kind.GET_ITEM, 0)
    assert norm.attrs == BatchNormAttrs(1, wanted, center=True, scale=True)
    names = [found.values[source] for source in norm.inputs]
    assert names == ["x", "bn.gamma", "bn.beta", "bn.mean", "bn.var"]
    assert (found.values[norm.id], found.values[item.id]) == ("", "bn")
    assert norm.outputs[0] == item.output == TensorInfo((1, 3, 4, 4), "float32")


@pytest.mark.parametrize(
    ("opset", "attrs"),
    [(17, {"training_mode": 1, "n_out": 3}), (17, {"training_mode": 1}), (7, {"spatial": 0})],
)
def test_other_forms_of_batch_norm_are_opaque(opset, attrs):
    b = Builder(opset=opset)
    y = b.batch_norm(b.input("x", (1, 3, 4, 4)), **attrs)
    found = read(b.build([y] if isinstance(y, str) else y[:1], check=False))
    assert kinds(found)[0] is Kind.OTHER


def test_batch_norm_of_a_vector_is_opaque():
    b = Builder()
    y = b.batch_norm(b.input("x", (5,)), channels=1)
    assert only(read(b.build([y]))).kind is Kind.OTHER


# --- elementwise operators, moves --------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "operands", "kind"),
    [
        ("Add", 2, Kind.ADD), ("Sub", 2, Kind.SUBTRACT), ("Mul", 2, Kind.MULTIPLY), ("Div", 2, Kind.DIVIDE),
        ("Pow", 2, Kind.POWER), ("Relu", 1, Kind.RELU), ("Sigmoid", 1, Kind.SIGMOID), ("Tanh", 1, Kind.TANH),
        ("Neg", 1, Kind.NEGATIVE), ("Reciprocal", 1, Kind.RECIPROCAL), ("Sqrt", 1, Kind.SQRT),
        ("Sum", 1, Kind.ELEMENTWISE), ("Sum", 2, Kind.ADD), ("Sum", 3, Kind.ELEMENTWISE),
        ("Exp", 1, Kind.ELEMENTWISE), ("Erf", 1, Kind.ELEMENTWISE), ("HardSwish", 1, Kind.ELEMENTWISE),
        ("Max", 3, Kind.ELEMENTWISE), ("PRelu", 2, Kind.ELEMENTWISE), ("Elu", 1, Kind.ELEMENTWISE),
        ("GlobalAveragePool", 1, Kind.OTHER), ("Softmax", 1, Kind.OTHER), ("ReduceMean", 1, Kind.OTHER),
        ("LRN", 1, Kind.DATA_NORM), ("LpNormalization", 1, Kind.DATA_NORM),
        ("MeanVarianceNormalization", 1, Kind.DATA_NORM),
    ],
)  # fmt: skip
def test_operators_without_attributes_that_matter(op, operands, kind):
    b = Builder()
    inputs = [b.input(f"x{index}", (1, 3, 4, 4)) for index in range(operands)]
    y = b.op(op, *inputs, **({"size": 3} if op == "LRN" else {}))
    node = only(read(b.build([y], check=op != "MeanVarianceNormalization")))
    assert (node.kind, node.op, node.inputs) == (kind, op, tuple(range(operands)))


def test_normalizations_of_data():
    b = Builder()
    x = b.input("x", (1, 3, 4, 4))
    instance = b.op("InstanceNormalization", x, b.const(np.ones(3)), b.const(np.ones(3)))
    layer = b.op("LayerNormalization", x, b.const(np.ones(4)))
    assert kinds(read(b.build([instance, layer]))) == [Kind.DATA_NORM, Kind.DATA_NORM]


def test_cast():
    b = Builder()
    node = only(read(b.build([b.op("Cast", b.input("x", (2,)), to=TensorProto.FLOAT16)])))
    assert (node.kind, node.output.dtype) == (Kind.CAST, "float16")


@pytest.mark.parametrize("alpha", [0.25, None])
def test_leaky_relu(alpha):
    b = Builder()
    node = only(read(b.build([b.op("LeakyRelu", b.input("x", (2,)), alpha=alpha)])))
    assert node.kind is Kind.LEAKY_RELU
    assert np.isclose(node.attrs.alpha, 0.01 if alpha is None else alpha)


@pytest.mark.parametrize("opset", [7, 10, 11, 17])
@pytest.mark.parametrize("const_nodes", [False, True], ids=["initializers", "Constant nodes"])
@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 6.0, (0, 6)),
        (0.0, None, (0, np.inf)),
        (None, 6.0, (-np.inf, 6)),
        (None, None, (-np.inf, np.inf)),
    ],
)
def test_clip(opset, const_nodes, low, high, wanted):
    b = Builder(opset=opset, const_nodes=const_nodes)
    node = only(read(b.build([b.clip(b.input("x", (2,)), low, high)])))
    assert (node.kind, node.attrs, node.inputs) == (Kind.CLIP, ClipAttrs(*wanted), (0,))


def test_clip_with_a_computed_bound():
    b = Builder()
    node = only(read(b.build([b.op("Clip", b.input("x", (2,)), None, b.input("high", ()))])))
    assert (node.kind, node.inputs) == (Kind.ELEMENTWISE, (0, 1))


@pytest.mark.parametrize(("perm", "wanted"), [([0, 2, 3, 1], (0, 2, 3, 1)), (None, (3, 2, 1, 0))])
def test_transpose(perm, wanted):
    b = Builder()
    node = only(read(b.build([b.op("Transpose", b.input("x", (1, 2, 3, 4)), perm=perm)])))
    assert (node.kind, node.attrs) == (Kind.TRANSPOSE, TransposeAttrs(wanted))


def test_reshapes():
    b = Builder()
    x = b.input("x", (1, 6, 1, 4))
    values = [
        b.op("Reshape", x, b.const(np.array([2, -1, 4]))),
        b.op("Flatten", x),
        b.op("Squeeze", x, b.const(np.array([2]))),
        b.op("Unsqueeze", x, b.const(np.array([0]))),
    ]
    found = read(b.build(values))
    assert kinds(found) == [Kind.RESHAPE, Kind.RESHAPE, Kind.RESHAPE, Kind.EXPAND_DIMS]
    assert [node.output.shape for node in computed(found)] == [(2, 3, 4), (1, 24), (1, 6, 4), (1, 1, 6, 1, 4)]
    assert {node.inputs for node in computed(found)} == {(found.values.index("x"),)}


def test_a_reshape_reads_a_computed_shape():
    b = Builder()
    x = b.input("x", (2, 3))
    found = read(b.build([b.op("Reshape", x, b.op("Shape", x), name="r")]))
    shape, reshape = computed(found)
    assert (shape.kind, reshape.kind) == (Kind.OTHER, Kind.RESHAPE)
    assert reshape.inputs == (0, shape.id)


def test_moved_constants_are_constants():
    b = Builder()
    weight = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    turned = b.op("Transpose", b.const(weight))
    raised = b.op("Unsqueeze", b.const(np.ones(3)), b.const(np.array([0])))
    y = b.op("Add", b.op("MatMul", b.input("x", (2, 4)), turned), raised)
    found = read(b.build([y]))
    assert kinds(found) == [Kind.MATMUL, Kind.ADD]
    matmul, add = computed(found)
    assert np.array_equal(found.graph.constant(matmul.inputs[1]), weight.T)
    assert found.graph.constant(add.inputs[1]).shape == (1, 3)


@pytest.mark.parametrize("axis", [1, -3])
def test_concat(axis):
    b = Builder()
    parts = [b.input("x", (1, 2, 4, 4)), b.input("y", (1, 3, 4, 4))]
    found = read(b.build([b.op("Concat", *parts, axis=axis, name="c")]))
    whole, joined = computed(found)
    assert (whole.kind, whole.inputs, joined.kind) == (Kind.TUPLE, (0, 1), Kind.CONCATENATE)
    assert joined.attrs == ConcatenateAttrs(1)
    assert (found.values[whole.id], found.values[joined.id]) == ("", "c")


WIDTHS = ((0, 0), (1, 2))


@pytest.mark.parametrize(
    ("opset", "mode", "fill", "attrs"),
    [
        (17, None, None, PadAttrs(WIDTHS, 0.0)),
        (17, None, 2.5, PadAttrs(WIDTHS, 2.5)),
        (17, "reflect", None, PadAttrs(WIDTHS, None)),
        (17, None, "input", PadAttrs(WIDTHS, None)),
        (10, None, None, PadAttrs(WIDTHS, 0.0)),
        (10, None, 2.5, PadAttrs(WIDTHS, 2.5)),
        (10, "edge", None, PadAttrs(WIDTHS, None)),
    ],
)
def test_pad(opset, mode, fill, attrs):
    b = Builder(opset=opset)
    x = b.input("x", (2, 3))
    if opset < 11:
        y = b.op("Pad", x, pads=[0, 1, 0, 2], value=fill, mode=mode)
    else:
        fill = b.input("fill", ()) if fill == "input" else fill if fill is None else b.const(np.float32(fill))
        y = b.op("Pad", x, b.const(np.array([0, 1, 0, 2])), fill, mode=mode)
    node = only(read(b.build([y])))
    assert (node.kind, node.attrs) == (Kind.PAD, attrs)
    assert len(node.inputs) == (2 if fill == "fill" else 1)


@pytest.mark.parametrize("pads", [[0, -1, 0, 0], "input"], ids=["cropping", "computed"])
def test_pad_by_other_widths_is_opaque(pads):
    b = Builder()
    pads = b.input("pads", (4,), np.int64) if pads == "input" else b.const(np.array(pads))
    assert only(read(b.build([b.op("Pad", b.input("x", (2, 3)), pads, name="p")]))).kind is Kind.OTHER


# --- one value with several names --------------------------------------------------------------


@pytest.mark.parametrize("op", ["Identity", "Dropout"])
def test_a_copy_is_another_name(op):
    b = Builder()
    x = b.input("x", (1, 3, 4, 4))
    y = b.relu(b.op(op, b.relu(x, name="first")), name="second")
    found = read(b.build([y]))
    first, second = computed(found)
    assert second.inputs == (first.id,)
    assert found.graph.readers(first.id) == (second.id,)
    assert found.values[first.id] == "first"


def test_a_copy_that_is_returned():
    b = Builder()
    first = b.relu(b.input("x", (2,)), name="first")
    found = read(b.build([b.op("Identity", first, name="copy"), b.relu(first, name="second")]))
    node = value(found, "first")
    assert found.graph.is_output(node.id)
    assert found.graph.outputs == (node.id, value(found, "second").id)


@pytest.mark.parametrize("switch", [True, "input"])
def test_dropout_that_may_drop_is_opaque(switch):
    b = Builder()
    x = b.input("x", (2,))
    switch = b.input("t", (), np.bool_) if switch == "input" else b.const(np.bool_(True))
    assert only(read(b.build([b.op("Dropout", x, b.const(np.float32(0.5)), switch)]))).kind is Kind.OTHER


def test_dropout_with_a_constant_switch_off():
    b = Builder()
    y = b.op("Dropout", b.input("x", (2,)), b.const(np.float32(0.5)), b.const(np.bool_(False)))
    found = read(b.build([y]))
    assert computed(found) == []
    assert found.graph.outputs == (0,)


def test_the_mask_of_a_dropout():
    b = Builder()
    found = read(b.build(b.op("Dropout", b.input("x", (2,)), n_out=2)))
    assert kinds(found) == [Kind.OTHER, Kind.GET_ITEM, Kind.GET_ITEM]


# --- outputs, branches, other operators --------------------------------------------------------


def test_an_operator_with_several_outputs():
    b = Builder()
    parts = b.op("Split", b.input("x", (1, 4)), b.const(np.array([1, 3])), n_out=2, axis=1, name="s")
    found = read(b.build([b.relu(parts[1], name="r")]))
    split, first, second, relu = computed(found)
    assert split.outputs == (TensorInfo((1, 1), "float32"), TensorInfo((1, 3), "float32"))
    assert [(node.kind, node.attrs, node.inputs) for node in (first, second)] == [
        (Kind.GET_ITEM, 0, (split.id,)), (Kind.GET_ITEM, 1, (split.id,)),
    ]  # fmt: skip
    assert relu.inputs == (second.id,)
    assert found.values[split.id] == ""
    assert found.values[first.id], found.values[second.id] == parts


def test_outputs_keep_their_order_and_may_repeat_a_value():
    b = Builder()
    x = b.input("x", (2,))
    y, z = b.relu(x, name="y"), b.op("Exp", x, name="z")
    found = read(b.build([z, x, y, b.op("Identity", z)]))
    assert [found.values[node] for node in found.graph.outputs] == ["z", "x", "y", "z"]


def branch(name, nodes, result):
    info = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [info])


def model_with_a_branch(depth=1):
    """``y = If(c, Relu(conv), x)``, the conv outside; with depth 2 the reader is in a branch of a branch."""
    b = Builder()
    x, condition = b.input("x", (1, 3, 4, 4)), b.input("c", (), np.bool_)
    b.conv(x, 3, kernel=1, name="conv")
    then = branch("t", [helper.make_node("Relu", ["conv"], ["then"], name="r")], "then")
    other = branch("e", [helper.make_node("Identity", ["x"], ["else"], name="i")], "else")
    for level in range(1, depth):
        nested = helper.make_node(
            "If", ["c"], [f"then{level}"], then_branch=then, else_branch=other, name=f"if{level}"
        )
        then = branch(f"t{level}", [nested], f"then{level}")
    y = b.op("If", condition, then_branch=then, else_branch=other, name="if")
    return b.build([y], check=False)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_branch_reads_what_it_takes_from_outside(depth):
    found = read(model_with_a_branch(depth))
    conv, branches = computed(found)
    assert branches.kind is Kind.OTHER
    assert conv.id in branches.inputs
    assert value(found, "x").id in branches.inputs
    assert found.graph.readers(conv.id) == (branches.id,)


def test_operators_of_other_domains_are_opaque():
    node = helper.make_node("Relu", ["x"], ["y"], domain="com.microsoft")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in "xy"]
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    found = read(helper.make_model(graph, opset_imports=opsets))
    assert only(found).kind is Kind.OTHER
    assert only(found).output == TensorInfo((2,), "float32")


def test_an_operator_that_the_model_defines_itself_is_opaque():
    b = Builder()
    model = b.build([b.relu(b.input("x", (2,)), name="r")])
    body = [helper.make_node("Exp", ["a"], ["b"])]
    opset = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("", "Relu", ["a"], ["b"], body, opset))
    assert only(read(model)).kind is Kind.OTHER


# --- constants ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"initializers_as_inputs": True},
        {"const_nodes": True},
        {"ir_version": 3, "initializers_as_inputs": True},
    ],
    ids=["listed as inputs", "Constant nodes", "IR 3"],
)
def test_where_parameters_may_be(options):
    b = Builder(**options)
    x = b.input("x", (1, 3, 8, 8))
    found = read(b.build([b.batch_norm(b.conv(x, 4, name="conv"), name="bn")]))
    assert [found.values[node.id] for node in found.graph.of_kind(Kind.INPUT)] == ["x"]
    assert len(found.graph.of_kind(Kind.CONSTANT)) == 5
    assert kinds(found) == [Kind.CONV2D, Kind.BATCH_NORM, Kind.GET_ITEM]
    assert found.graph.constant(found.values.index("conv.weight")).shape == (4, 3, 3, 3)


def typed(array, name):
    """A tensor whose numbers are not in raw_data."""
    return helper.make_tensor(
        name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.reshape(-1).tolist()
    )


@pytest.mark.parametrize("make", [numpy_helper.from_array, typed], ids=["raw", "typed"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "int8", "bool", "uint16"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_dtypes_of_constants(make, dtype, shape):
    array = (np.arange(np.prod(shape)).reshape(shape) - 1).astype(dtype)
    found = read(constant_model(make(array, "k")))
    node = value(found, "k")
    assert node.output == TensorInfo(shape, dtype)
    stored = found.graph.constant(node.id)
    assert stored.dtype == np.dtype(dtype)
    assert np.array_equal(stored, array)
    assert not stored.flags.writeable


def constant_model(tensor):
    output = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    input_ = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1,))
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "g", [input_], [output], [tensor])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("raw", [True, False])
def test_bfloat16_is_kept_as_bits(raw):
    numbers = np.array([1.0, -2.5, 3.140625], ml_dtypes.bfloat16)
    bits = numbers.view(np.uint16)
    tensor = onnx.TensorProto(name="k", data_type=TensorProto.BFLOAT16, dims=[3])
    if raw:
        tensor.raw_data = bits.tobytes()
    else:
        tensor.int32_data.extend(bits.tolist())
    found = read(constant_model(tensor))
    node = value(found, "k")
    assert node.output == TensorInfo((3,), "bfloat16")
    assert np.array_equal(found.graph.constant(node.id), bits)
    assert np.array_equal(found.graph.exact(node.id), numbers.astype(np.float64))


def test_strings_are_opaque():
    tensor = helper.make_tensor("k", TensorProto.STRING, (1,), [b"text"])
    assert value(read(constant_model(tensor)), "k").kind is Kind.OTHER


@pytest.mark.parametrize(
    ("attribute", "wanted"),
    [
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_floats": [0.5, 1.0]}, np.array([0.5, 1.0], np.float32)),
        ({"value_int": 3}, np.array(3)),
        ({"value_ints": [3, 4]}, np.array([3, 4])),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_forms_of_constant_nodes(attribute, wanted):
    b = Builder()
    found = read(b.build([b.op("Constant", **attribute, name="k")]))
    got = found.graph.constant(value(found, "k").id)
    assert got.dtype == wanted.dtype
    assert np.array_equal(got, wanted)
    assert value(found, "k").output.dtype == wanted.dtype.name


# --- shapes ------------------------------------------------------------------------------------


def test_symbolic_sizes_are_followed():
    b = Builder()
    x = b.input("x", ("n", 3, "h", None))
    y = b.relu(b.batch_norm(b.conv(x, 4, pad=1, channels=3, bias=True), channels=4))
    found = read(b.build([y]))
    shapes = {node.output.shape for node in computed(found)}
    (shape,) = shapes
    assert shape[:2] == ("n", 4)
    assert shape[2] != shape[3]
    assert all(isinstance(dim, str) for dim in shape[2:])


def test_names_that_the_model_gives_to_sizes_do_not_hide_that_they_are_equal():
    b = Builder()
    x = b.input("x", ("n", 3, "h", "w"))
    conv = b.conv(x, 4, channels=3, name="conv")
    model = b.build([b.batch_norm(conv, channels=4, name="bn")])
    for name, value_info in (("conv", model.graph.value_info.add()), ("bn", model.graph.output[0])):
        shape = ("n", 4, f"{name}_height", f"{name}_width")
        value_info.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    found = read(model)
    assert value(found, "conv").output == value(found, "bn").output


def test_the_model_s_word_counts_where_inference_fails():
    node = helper.make_node("Mystery", ["x"], ["m"], domain="com.microsoft", name="n")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in "xmy"]
    relu = helper.make_node("Relu", ["m"], ["y"])
    graph = helper.make_graph([node, relu], "g", info[:1], [helper.make_empty_tensor_value_info("y")])
    graph.value_info.append(info[1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    found = read(helper.make_model(graph, opset_imports=opsets))
    assert kinds(found) == [Kind.OTHER, Kind.RELU]
    assert value(found, "y").output == TensorInfo((2,), "float32")


@pytest.mark.parametrize("name", [None, "?", "-1"])
def test_unnamed_sizes_differ(name):
    b = Builder()
    found = read(b.build([b.op("Exp", b.input(value, (name, name))) for value in ("x", "y")]))
    sizes = [dim for node in found.graph.of_kind(Kind.INPUT) for dim in node.output.shape]
    assert len(set(sizes)) == 4
    assert [dim for node in computed(found) for dim in node.output.shape] == sizes


def test_the_rank_of_a_reshape_is_the_length_of_its_shape():
    b = Builder()
    y = b.op("Reshape", b.input("x", ("n", 4, "h")), b.input("sizes", (3,), np.int64), name="r")
    found = read(b.build([b.op("MatMul", y, b.const(np.ones((8, 2))), name="m")], check=False))
    shape = value(found, "r").output.shape
    assert len(set(shape)) == 3
    assert all(isinstance(dim, str) for dim in shape)
    assert value(found, "m").kind is Kind.MATMUL
    assert value(found, "m").output.shape == (*shape[:2], 2)


def test_a_batch_norm_of_unknown_rank_is_one():
    b = Builder()
    b.input("shape", ("rank",), np.int64)
    y = b.batch_norm(b.op("Reshape", b.input("x", (2, 3)), "shape"), channels=3, name="bn")
    found = read(b.build([b.op("Transpose", y)], check=False))
    assert kinds(found) == [Kind.OTHER, Kind.BATCH_NORM, Kind.GET_ITEM, Kind.OTHER]
    assert value(found, "bn").output == OPAQUE


def test_what_has_no_known_rank_is_opaque():
    b = Builder()
    x = b.input("x", (2, 3))
    b.input("shape", ("rank",), np.int64)
    y = b.relu(b.op("Reshape", x, "shape", name="r"), name="y")
    found = read(b.build([y], check=False))
    assert kinds(found) == [Kind.OTHER, Kind.OTHER]
    assert value(found, "y").output == OPAQUE


def test_large_constants_do_not_go_through_shape_inference():
    """The weight is above any limit of what is kept; the shape of the Reshape is known all the same."""
    b = Builder()
    x = b.input("x", (1, 300))
    y = b.op("Reshape", b.op("MatMul", x, b.const(np.ones((300, 400)))), b.const(np.array([4, -1])))
    assert computed(read(b.build([y])))[-1].output.shape == (4, 100)


@pytest.mark.parametrize("op", ["Relu", "MatMul"])
def test_unsorted_nodes_are_refused(op):
    nodes = [
        helper.make_node("Relu", ["late"], ["y"], name="n"),
        helper.make_node("Exp", ["x"], ["late"], name="l"),
    ]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in "xy"]
    model = helper.make_model(
        helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)]
    )
    with pytest.raises(ModelError, match="late"):
        read(model)


def test_a_value_named_like_a_node_is_not_that_node():
    """Node ``b`` computes ``a``; node ``a`` computes ``b``."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="b"), helper.make_node("Exp", ["a"], ["b"], name="a")
    ]  # fmt: skip
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in "xb"]
    model = helper.make_model(
        helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)]
    )
    found = read(model)
    assert (value(found, "a").kind, value(found, "a").name) == (Kind.RELU, "b")
    assert (value(found, "b").kind, value(found, "b").name) == (Kind.ELEMENTWISE, "a")
