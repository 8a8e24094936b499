"""Activations as TVM's importers write them: found after a convolution, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.support.lazy import Lazy
from tests.support.relay_graphs import LLVM, Net, plain_build, relay, run, run_unfused

partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay

SHAPE = (1, 4, 4, 6)

#: ONNX operators that make an activation of x, the last its result: (operator, inputs, attributes).
ONNX = {
    "relu": [("Relu", "x", {})],
    "leaky_relu": [("LeakyRelu", "x", {"alpha": 0.2})],
    "sigmoid": [("Sigmoid", "x", {})],
    "tanh": [("Tanh", "x", {})],
    "elu": [("Elu", "x", {"alpha": 0.7})],
    "selu": [("Selu", "x", {})],
    "softplus": [("Softplus", "x", {})],
    "mish": [("Softplus", "x", {}), ("Tanh", "0", {}), ("Mul", "x 1", {})],
    "hard_sigmoid": [("HardSigmoid", "x", {"alpha": 0.2, "beta": 0.5})],
    "hard_swish": [("HardSwish", "x", {})],
    "silu": [("Sigmoid", "x", {}), ("Mul", "x 0", {})],
    "gelu": [
        ("Div", "x sqrt2", {}), ("Erf", "0", {}), ("Add", "1 one", {}), ("Mul", "x 2", {}),
        ("Mul", "3 half", {}),
    ],
    "gelu_tanh": [
        ("Pow", "x three", {}), ("Mul", "0 cubed", {}), ("Add", "x 1", {}), ("Mul", "2 scale", {}),
        ("Tanh", "3", {}), ("Add", "4 one", {}), ("Mul", "x half", {}), ("Mul", "6 5", {}),
    ],
    "gelu_sigmoid": [("Mul", "x quick", {}), ("Sigmoid", "0", {}), ("Mul", "x 1", {})],
}  # fmt: skip
NUMBERS = {
    "sqrt2": 2**0.5, "one": 1, "half": 0.5, "three": 3, "cubed": 0.044715,
    "scale": (2 / np.pi) ** 0.5, "quick": 1.702,
}  # fmt: skip


def names():
    return [group.name for group in record.last_report()["PartitionChains"].details]


def imported(name, dtype):
    """A module of a depthwise 1x1 convolution by ones and what TVM's ONNX importer makes of the operators."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, values = [], {"x": "y"}
    nodes.append(helper.make_node("Conv", ["x", "w"], ["y"], group=4))
    for index, (op, inputs, attrs) in enumerate(ONNX[name]):
        sources = [values.get(source, source) for source in inputs.split()]
        values[str(index)] = f"value{index}"
        nodes.append(helper.make_node(op, sources, [f"value{index}"], **attrs))
    arrays = {"w": np.ones((4, 1, 1, 1)), **NUMBERS}
    tensors = [
        helper.make_tensor(key, elem, np.shape(value), np.asarray(value, dtype).tobytes(), raw=True)
        for key, value in arrays.items()
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", elem, SHAPE)],
        [helper.make_tensor_value_info(f"value{len(ONNX[name]) - 1}", elem, SHAPE)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    module, _ = relay.frontend.from_onnx(model, freeze_params=True)
    return relay.transform.InferType()(module)


#: Zeros, both signs, where exp overflows, and what is no number.
VALUES = np.resize(
    np.array([0.0, -0.0, 0.5, -0.5, 3, -3, 6, 10, -10, 60, -60, 2e4, -2e4, np.inf, -np.inf, np.nan]), SHAPE
)


#: TVM's importer writes float32 numbers into the first four; its CPU code generator knows no erf of float16.
ONLY_FLOAT32 = ("elu", "selu", "hard_sigmoid", "hard_swish", "gelu")


def check(module, fused, feed, tolerance=1e-6):
    (want,), (got,) = run_unfused(module, feed), run(plain_build(fused, LLVM), feed)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", ONNX)
def test_as_onnx_is_imported(name):
    module = imported(name, "float32")
    fused = partition_pass.partition_chains(module)
    assert names() == [f"conv2d_{name}"]
    check(module, fused, {"x": VALUES.astype("float32")})


@pytest.mark.parametrize("name", [name for name in ONNX if name not in ONLY_FLOAT32])
def test_in_float16(name):
    module = imported(name, "float16")
    fused = partition_pass.partition_chains(module)
    assert names() == [f"conv2d_{name}"]
    check(module, fused, {"x": np.linspace(-8, 8, 96).reshape(SHAPE).astype("float16")}, 4e-3)


#: As TVM's PyTorch importer writes them.
TORCH = {
    "elu": lambda x, c: c(-0.7) * relay.nn.relu(c(1.0) - relay.exp(x)) + relay.nn.relu(x),
    "selu": lambda x, c: c(1.05070098735) * (
        c(-1.67326324235) * relay.nn.relu(c(1.0) - relay.exp(x)) + relay.nn.relu(x)
    ),
    "gelu": lambda x, c: x * (c(0.5) + relay.erf(x * c(0.5**0.5)) * c(0.5)),
    "silu": lambda x, c: x * relay.sigmoid(x),
    "hard_sigmoid": lambda x, c: relay.clip(x + c(3.0), 0, 6) / c(6.0),
    "hard_swish": lambda x, c: x * (relay.clip(x + c(3.0), 0, 6) / c(6.0)),
    "prelu": lambda x, c: relay.nn.prelu(x, relay.const(np.array([0.1, -0.2, 0.3, 2], "float32")), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_as_pytorch_is_imported(name):
    net = Net()
    ones = relay.const(np.ones((4, 1, 1, 1), "float32"))
    conv = net.conv2d(net.input("x", SHAPE), 4, 1, groups=4, weight=ones)
    module = net.module(TORCH[name](conv, lambda number: relay.const(number, "float32")))
    fused = partition_pass.partition_chains(module)
    assert names() == [f"conv2d_{name}"]
    check(module, fused, {"x": VALUES.astype("float32")})


def test_onnx_prelu_is_a_kernel_of_its_own():
    """TVM's importer flattens the value first: one elementwise group after the convolution."""
    net = Net()
    conv = net.conv2d(net.input("x", SHAPE), 4, 1)
    slopes = relay.const(np.full(96, 0.25, "float32"))
    flat = relay.nn.prelu(relay.reshape(conv, [-1]), slopes, axis=0)
    module = net.module(relay.reshape(flat, SHAPE))
    fused = partition_pass.partition_chains(module)
    assert [group.family for group in record.last_report()["PartitionChains"].details] == ["elementwise"]
    check(module, fused, {"x": VALUES.astype("float32")})
