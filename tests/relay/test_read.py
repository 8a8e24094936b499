"""Relay functions as core graphs: kinds, attributes, names, and shapes of graphs that models never have."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.graph import (
    BatchNormAttrs,
    BiasAddAttrs,
    ClipAttrs,
    ConcatenateAttrs,
    ConvAttrs,
    DenseAttrs,
    Kind,
    LayoutTransformAttrs,
    LeakyReluAttrs,
    PadAttrs,
    PReluAttrs,
    ReduceAttrs,
    TensorInfo,
    TransposeAttrs,
)

reader = Lazy("tvm_fuse.relay.read")

pytestmark = pytest.mark.relay


@pytest.fixture
def net():
    return Net()


def read(net, *results):
    return reader.read_function(net.module(*results)["main"])


def last(net, result):
    """The node of an expression."""
    graph = read(net, result).graph
    return graph.nodes[graph.outputs[0]]


def named(expr, name):
    return relay.Call(expr.op, expr.args, expr.attrs, None, relay.Span(relay.SourceName(name), 0, 0, 0, 0))


# --- operators -----------------------------------------------------------------------------------


def transposed(x, kernel_layout):
    shape = (4, 1, 3, 3) if kernel_layout == "IOHW" else (1, 4, 3, 3)
    return relay.nn.conv2d_transpose(
        x, relay.const(np.ones(shape, "float32")), channels=2, kernel_size=(3, 3), strides=(2, 1), groups=2,
        kernel_layout=kernel_layout,
    )  # fmt: skip


def data_norm(name, x, **attrs):
    return getattr(relay.nn, name)(x, *(relay.const(np.ones(4, "float32")) for _ in range(2)), **attrs)


OPERATORS = {
    "add": (lambda x: x + x, Kind.ADD, None),
    "subtract": (lambda x: x - x, Kind.SUBTRACT, None),
    "multiply": (lambda x: x * x, Kind.MULTIPLY, None),
    "divide": (lambda x: x / x, Kind.DIVIDE, None),
    "nn.relu": (lambda x: relay.nn.relu(x), Kind.RELU, None),
    "sigmoid": (lambda x: relay.sigmoid(x), Kind.SIGMOID, None),
    "tanh": (lambda x: relay.tanh(x), Kind.TANH, None),
    "clip": (lambda x: relay.clip(x, -1.5, 6), Kind.CLIP, ClipAttrs(-1.5, 6.0)),
    "nn.leaky_relu": (lambda x: relay.nn.leaky_relu(x, 0.25), Kind.LEAKY_RELU, LeakyReluAttrs(0.25)),
    "exp": (lambda x: relay.exp(x), Kind.EXP, None),
    "erf": (lambda x: relay.erf(x), Kind.ERF, None),
    "log": (lambda x: relay.log(x), Kind.LOG, None),
    "abs": (lambda x: relay.abs(x), Kind.ELEMENTWISE, None),
    "maximum": (lambda x: relay.maximum(x, x), Kind.MAXIMUM, None),
    "minimum": (lambda x: relay.minimum(x, x), Kind.MINIMUM, None),
    "cast": (lambda x: relay.cast(x, "float16"), Kind.CAST, None),
    "negative": (lambda x: relay.negative(x), Kind.NEGATIVE, None),
    "power": (lambda x: relay.power(x, x), Kind.POWER, None),
    "sqrt": (lambda x: relay.sqrt(x), Kind.SQRT, None),
    "rsqrt": (lambda x: relay.rsqrt(x), Kind.RSQRT, None),
    "where": (lambda x: relay.where(relay.greater(x, x), x, x), Kind.ELEMENTWISE, None),
    "nn.prelu": (lambda x: relay.nn.prelu(x, relay.const(np.ones(4, "float32"))), Kind.PRELU, PReluAttrs(1)),
    "reshape": (lambda x: relay.reshape(x, (4, -1)), Kind.RESHAPE, None),
    "squeeze": (lambda x: relay.squeeze(x, [0]), Kind.RESHAPE, None),
    "nn.batch_flatten": (lambda x: relay.nn.batch_flatten(x), Kind.RESHAPE, None),
    "expand_dims": (lambda x: relay.expand_dims(x, 1, 2), Kind.EXPAND_DIMS, None),
    "layout_transform": (
        lambda x: relay.layout_transform(x, "NCHW", "NCHW4c"), Kind.LAYOUT_TRANSFORM,
        LayoutTransformAttrs("NCHW", "NCHW4c"),
    ),
    "concatenate": (lambda x: relay.concatenate([x, x], 1), Kind.CONCATENATE, ConcatenateAttrs(1)),
    "nn.instance_norm": (lambda x: data_norm("instance_norm", x), Kind.DATA_NORM, None),
    "nn.group_norm": (lambda x: data_norm("group_norm", x, num_groups=2), Kind.DATA_NORM, None),
    "nn.layer_norm": (lambda x: data_norm("layer_norm", x, axis=1), Kind.DATA_NORM, None),
    "nn.l2_normalize": (lambda x: relay.nn.l2_normalize(x, 1e-3), Kind.DATA_NORM, None),
    "nn.lrn": (lambda x: relay.nn.lrn(x), Kind.DATA_NORM, None),
    "nn.softmax": (lambda x: relay.nn.softmax(x), Kind.SOFTMAX, ReduceAttrs((3,), True)),
    "nn.max_pool2d": (lambda x: relay.nn.max_pool2d(x), Kind.POOL, None),
    "nn.global_avg_pool2d": (lambda x: relay.nn.global_avg_pool2d(x), Kind.GLOBAL_POOL, None),
    "sum": (lambda x: relay.sum(x), Kind.REDUCE, ReduceAttrs((0, 1, 2, 3), False)),
    "mean": (lambda x: relay.mean(x, axis=-1, keepdims=True), Kind.REDUCE, ReduceAttrs((3,), True)),
    "max": (lambda x: relay.max(x, axis=1, exclude=True), Kind.REDUCE, ReduceAttrs((0, 2, 3), False)),
    "strided_slice": (lambda x: relay.strided_slice(x, [0], [1]), Kind.SLICE, None),
    "nn.upsampling": (lambda x: relay.nn.upsampling(x), Kind.INJECTIVE, None),
    "cumsum": (lambda x: relay.cumsum(x), Kind.OTHER, None),
    "nn.conv2d_transpose": (
        lambda x: transposed(x, "IOHW"), Kind.CONV2D_TRANSPOSE,
        ConvAttrs((2, 1), (0, 0, 0, 0), (1, 1), 2, 2, "NCHW", "IOHW", "NCHW"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_operator(net, op):
    make, kind, attrs = OPERATORS[op]
    node = last(net, make(net.input("x", (1, 4, 5, 5))))
    assert (node.op, node.kind, node.attrs) == (op, kind, attrs)


def test_a_transposed_kernel_that_tvm_misreads_is_no_convolution(net):
    assert last(net, transposed(net.input("x", (1, 4, 5, 5)), "OIHW")).kind is Kind.OTHER


def test_prelu_is_elementwise_by_what_tvm_says():
    assert int(tvm.ir.Op.get("nn.prelu").get_attr("TOpPattern")) == 1


def test_conv2d(net):
    conv = net.conv2d(net.input("x", (1, 4, 8, 8)), 6, groups=2, strides=(2, 1), dilation=(1, 2), padding=1)
    node = last(net, conv)
    assert node.kind is Kind.CONV2D
    assert node.attrs == ConvAttrs((2, 1), (1, 1, 1, 1), (1, 2), 2, 6, "NCHW", "OIHW", "NCHW")
    assert node.output == TensorInfo((1, 6, 4, 6), "float32")


def test_conv2d_without_channels_attribute(net):
    x = net.input("x", (1, 4, 8, 8))
    node = last(net, relay.nn.conv2d(x, net.const(6, 4, 3, 3)))
    assert (node.attrs.channels, node.output.shape) == (0, (1, 6, 6, 6))


def test_conv2d_nhwc(net):
    node = last(net, net.conv2d(net.input("x", (1, 8, 8, 4)), 4, layout="NHWC", groups=4))
    assert (node.attrs.data_layout, node.attrs.kernel_layout, node.attrs.out_layout) == (
        "NHWC",
        "HWOI",
        "NHWC",
    )


def test_dense(net):
    node = last(net, net.dense(net.input("x", (2, 3)), 5))
    assert (node.kind, node.attrs, node.output.shape) == (Kind.DENSE, DenseAttrs("OI"), (2, 5))


def test_packed_operators(net):
    x = net.input("x", (1, 1, 6, 6, 4))
    packed = relay.nn.contrib_conv2d_nchwc(
        x, net.const(2, 1, 3, 3, 4, 4), channels=8, kernel_size=(3, 3), data_layout="NCHW4c",
        kernel_layout="OIHW4i4o", out_layout="NCHW4c",
    )  # fmt: skip
    node = last(net, packed)
    assert (node.kind, node.attrs.out_layout, node.attrs.kernel_layout) == (Kind.CONV2D, "NCHW4c", "OIHW4i4o")
    net = Net()
    node = last(net, relay.nn.contrib_dense_pack(net.input("x", (1, 3)), net.const(2, 3, 8), "NC8n"))
    assert (node.kind, node.attrs) == (Kind.DENSE, DenseAttrs("OI8o"))


@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "layout", "axis"),
    [(False, True, "OI", -1), (False, False, "IO", -1), (True, True, "OI", -2), (True, False, "IO", -2)],
)
def test_matrix_products(net, transpose_a, transpose_b, layout, axis):
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    x, y = net.input("x", (3, 3)), net.input("y", (2, 3, 3))
    node = last(net, relay.nn.matmul(x, net.const(3, 3), **flags))
    is_dense = (layout, axis) == ("OI", -1)  # TVM itself makes nn.dense of it
    assert (node.kind, node.attrs) == (Kind.DENSE if is_dense else Kind.MATMUL, DenseAttrs(layout, axis))
    node = last(net, relay.nn.batch_matmul(y, net.const(2, 3, 3), **flags))
    assert (node.kind, node.attrs) == (Kind.BATCH_MATMUL, DenseAttrs("B" + layout, axis))


@pytest.mark.parametrize(
    ("axes", "wanted"), [(None, (3, 2, 1, 0)), ((0, 2, 3, 1), (0, 2, 3, 1)), ((0, -1, 1, -2), (0, 3, 1, 2))]
)
def test_transpose(net, axes, wanted):
    node = last(net, relay.transpose(net.input("x", (1, 4, 5, 5)), axes))
    assert (node.kind, node.attrs) == (Kind.TRANSPOSE, TransposeAttrs(wanted))


def test_negative_axis_of_a_concatenation(net):
    x = net.input("x", (1, 4, 5, 5))
    graph = read(net, relay.concatenate([x, net.input("y", (1, 4, 5, 2))], -1)).graph
    node = graph.nodes[graph.outputs[0]]
    assert (node.attrs, graph.nodes[node.inputs[0]].kind) == (ConcatenateAttrs(3), Kind.TUPLE)


WIDTHS = ((0, 0), (0, 0), (1, 2), (0, 3))


@pytest.mark.parametrize(
    ("pad", "value"),
    [({}, 0.0), ({"pad_value": 1.5}, 1.5), ({"pad_mode": "edge"}, None), ({"pad_mode": "reflect"}, None)],
)
def test_pad(net, pad, value):
    node = last(net, relay.nn.pad(net.input("x", (1, 4, 5, 5)), WIDTHS, **pad))
    assert (node.kind, node.attrs) == (Kind.PAD, PadAttrs(WIDTHS, value))


def test_pad_with_a_computed_value(net):
    value = net.input("value", ())
    node = last(net, relay.nn.pad(net.input("x", (1, 4, 5, 5)), WIDTHS, value))
    assert (node.kind, node.attrs) == (Kind.PAD, PadAttrs(WIDTHS, None))


@pytest.mark.parametrize(("axis", "wanted"), [(1, 1), (-1, 3), (3, 3)])
def test_axes_are_counted_from_the_front(net, axis, wanted):
    x = net.input("x", (1, 4, 4, 4))
    assert last(net, relay.nn.bias_add(x, net.const(4), axis)).attrs == BiasAddAttrs(wanted)
    (node,) = read(net, net.batch_norm(x, axis=axis)).graph.of_kind(Kind.BATCH_NORM)
    assert node.attrs == BatchNormAttrs(wanted, pytest.approx(1e-3), True, True)


@pytest.mark.parametrize(("center", "scale"), [(True, False), (False, True)])
def test_batch_norm(net, center, scale):
    bn = net.batch_norm(net.input("x", (1, 4, 4, 4)), epsilon=2e-5, center=center, scale=scale)
    graph = read(net, bn).graph
    (node,) = graph.of_kind(Kind.BATCH_NORM)
    assert (node.attrs.center, node.attrs.scale) == (center, scale)
    assert node.attrs.epsilon == pytest.approx(2e-5, rel=1e-12)
    assert [info.shape for info in node.outputs] == [(1, 4, 4, 4), (4,), (4,)]
    (item,) = graph.of_kind(Kind.GET_ITEM)
    assert (item.attrs, item.inputs, graph.outputs) == (0, (node.id,), (item.id,))


@pytest.mark.parametrize("dtype", ["float16", "int8", "bool", "float64"])
def test_dtypes(net, dtype):
    node = last(net, relay.logical_not(relay.cast(net.input("x", (2, 3), dtype), "bool")))
    assert node.output == TensorInfo((2, 3), "bool")
    assert read(net, net.inputs[0]).graph.nodes[0].output.dtype == dtype


def test_constants_are_read_only_and_keep_their_bits(net):
    values = np.array([[1.5, np.nan, -0.0]], "float32")
    graph = read(net, net.input("x", (1, 3)) + relay.const(values)).graph
    (constant,) = graph.constants.values()
    assert constant.tobytes() == values.tobytes()
    assert not constant.flags.writeable


# --- names ---------------------------------------------------------------------------------------


def test_names_come_from_spans_and_hints(net):
    x = net.input("data", (1, 4, 4, 4))
    graph = read(net, named(relay.nn.relu(x), "relu_3")).graph
    assert [node.name for node in graph.nodes] == ["data", "relu_3"]


def test_first_of_several_spans(net):
    spans = [relay.Span(relay.SourceName(name), 0, 0, 0, 0) for name in ("first", "second")]
    relu = relay.nn.relu(net.input("x", (1, 2)))
    call = relay.Call(relu.op, relu.args, relu.attrs, None, tvm.relay.SequentialSpan(spans))
    assert last(net, call).name == "first"


# --- graphs of any shape -------------------------------------------------------------------------


def test_ids_are_in_topological_order_and_shared_values_are_one_node(net):
    x = net.input("x", (1, 4, 4, 4))
    y = relay.nn.relu(x)
    graph = read(net, y + relay.tanh(y)).graph
    assert all(source < node.id for node in graph.nodes for source in node.inputs)
    assert len(graph.of_kind(Kind.RELU)) == 1


def test_unused_parameters_are_inputs(net):
    x, _ = net.input("x", (1, 2)), net.input("unused", (3,))
    graph = read(net, relay.nn.relu(x)).graph
    assert sorted(node.name for node in graph.of_kind(Kind.INPUT)) == ["unused", "x"]


def test_tuple_with_duplicates(net):
    x = net.input("x", (1, 2))
    y = relay.nn.relu(x)
    graph = read(net, y, x, y).graph
    assert [graph.nodes[output].kind for output in graph.outputs] == [Kind.RELU, Kind.INPUT, Kind.RELU]
    assert graph.outputs[0] == graph.outputs[2]


@pytest.mark.parametrize("case", ["input", "constant", "expression of constants"])
def test_function_that_returns_what_it_gets(net, case):
    x = net.input("x", (2,))
    constant = relay.const(np.ones(2, "float32"))
    graph = read(net, {"input": x, "constant": constant}.get(case, constant + constant)).graph
    assert len(graph.outputs) == 1
    assert graph.nodes[graph.outputs[0]].output.shape == (2,)


def test_dynamic_dimensions_are_symbols(net):
    x = net.input("x", (relay.Any(), 3, 4, 4))
    assert last(net, net.conv2d(x, 4)).output == TensorInfo(("?", 4, 4, 4), "float32")


def test_split_and_items(net):
    halves = relay.split(net.input("x", (1, 4)), 2, axis=1)
    graph = read(net, halves[1] + halves[0]).graph
    (split,) = (node for node in graph.nodes if node.op == "split")
    assert [info.shape for info in split.outputs] == [(1, 2), (1, 2)]
    assert [node.attrs for node in graph.of_kind(Kind.GET_ITEM)] == [1, 0]


def test_if_and_let(net):
    x, condition = net.input("x", (1, 2)), net.input("c", (), "bool")
    variable = relay.var("v")
    body = relay.Let(variable, relay.nn.relu(x), relay.tanh(variable))
    graph = read(net, relay.If(condition, body, relay.exp(x))).graph
    assert graph.nodes[graph.outputs[0]].op == "if"
    assert {"nn.relu", "tanh", "exp", "let"} <= {node.op for node in graph.nodes}


def test_function_literals_are_opaque(net):
    x = net.input("x", (1, 2))
    inner = relay.var("a", shape=(1, 2))
    function = relay.Function([inner], relay.nn.relu(inner)).with_attr("Composite", "dnnl.relu")
    node = last(net, relay.Call(function, [x]))
    assert (node.kind, node.op, len(node.inputs)) == (Kind.OTHER, "dnnl.relu", 1)


def test_closures_and_global_functions(net):
    x = net.input("x", (1, 2))
    inner = relay.var("a", shape=(1, 2))
    module = tvm.IRModule()
    module["helper"] = relay.Function([inner], relay.nn.relu(inner), relay.TensorType((1, 2)))
    helper = module.get_global_var("helper")
    module["main"] = relay.Function([x], relay.Call(helper, [x]))
    module = relay.transform.InferType()(module)
    graph = reader.read_function(module["main"]).graph
    assert [(node.op, len(node.inputs)) for node in graph.nodes] == [("input", 0), ("call", 1)]


def test_deep_graph_needs_no_recursion(net):
    y = net.input("x", (1, 2))
    for _ in range(5000):
        y = relay.nn.relu(y)
    function = net.module(y)["main"]
    assert len(reader.read_function(function).graph.nodes) == 5001


def test_wide_sharing_is_linear(net):
    y = net.input("x", (1, 2))
    for _ in range(100):  # 2 ** 100 paths
        y = y + y
    assert len(read(net, y).graph.nodes) == 101
