"""Quantized layers: their pieces are one kernel with the layer, and give the same integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    kernel_calls,
    plain_build,
    relay,
    run,
    run_unfused,
    target,
)
from tvm_fuse.core.reason import Code

build = Lazy("tvm_fuse.relay.build")
kernels = Lazy("tvm_fuse.relay.kernels")
record = Lazy("tvm_fuse.relay.record")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

SHAPE = (1, 16, 9, 9)


def number(value, dtype="float32"):
    return relay.const(value, dtype)


def bytes_of(net, *shape):
    return relay.const(net.rng.integers(-90, 90, shape).astype("int8"))


def quantize(value, point=1, dtype="int8"):
    return relay.qnn.op.quantize(value, number(0.05), number(point, "int32"), out_dtype=dtype)


def with_bias(net, value):
    return relay.nn.bias_add(value, relay.const(net.rng.integers(-900, 900, 16).astype("int32")))


def requantize(value, scale=None):
    scale = number(5e-5) if scale is None else scale
    return relay.qnn.op.requantize(
        value, scale, number(0, "int32"), number(0.05), number(1, "int32"), axis=1, out_dtype="int8"
    )


def convolution(net, x, point=0, padding=0):
    points = number(point, "int32"), number(0, "int32")
    return relay.qnn.op.conv2d(
        x, bytes_of(net, 16, 16, 3, 3), *points, number(0.1), number(0.02), kernel_size=(3, 3), channels=16,
        padding=(padding, padding),
    )  # fmt: skip


def quantize_at_the_end(net):
    y = net.conv2d(net.input("x", SHAPE), 16)
    return quantize(relay.nn.relu(relay.nn.bias_add(y, net.const(16))))


def quantize_to_bytes(net):
    return quantize(net.conv2d(net.input("x", SHAPE), 16), 0, "uint8")


def dequantize_at_the_start(net):
    x = relay.qnn.op.dequantize(net.input("x", SHAPE, "int8"), number(0.05), number(1, "int32"))
    return relay.nn.relu(net.conv2d(x, 16))


def both(net):
    return quantize(dequantize_at_the_start(net))


def int8(net):
    return requantize(with_bias(net, convolution(net, net.input("x", SHAPE, "int8"))))


def int8_zero_point(net):
    return requantize(with_bias(net, convolution(net, net.input("x", SHAPE, "int8"), point=3)))


def int8_channels(net):
    scales = relay.const(np.linspace(2e-5, 1e-4, 16).astype("float32"))
    return requantize(with_bias(net, convolution(net, net.input("x", SHAPE, "int8"))), scales)


def int8_relu(net):
    return requantize(relay.nn.relu(with_bias(net, convolution(net, net.input("x", SHAPE, "int8")))))


def int8_padded(net):
    """Its operand is padded with the zero point, by an operator of its own."""
    return requantize(with_bias(net, convolution(net, net.input("x", SHAPE, "int8"), point=3, padding=1)))


def int8_dense(net):
    points = number(3, "int32"), number(0, "int32")
    x = net.input("x", (16, 64), "int8")
    y = relay.qnn.op.dense(x, bytes_of(net, 16, 64), *points, number(0.1), number(0.02), units=16)
    return requantize(with_bias(net, y))


#: The layer's kernel for each target, and how many kernels there are.
MODELS = [
    (quantize_at_the_end, "conv2d_bias_relu_quantize", 2, "conv2d_bias_relu_quantize", 1),
    (quantize_to_bytes, "conv2d_quantize", 2, "conv2d_quantize", 1),
    (dequantize_at_the_start, "elementwise_conv2d_relu", 2, "elementwise_conv2d_relu", 1),
    (both, "elementwise_conv2d_relu_quantize", 2, "elementwise_conv2d_relu_quantize", 1),
    (int8, "conv2d_bias_requantize", 3, "conv2d_bias_requantize", 1),
    (int8_zero_point, "conv2d_bias_requantize", 3, "conv2d_subtract_bias_requantize", 1),
    (int8_channels, "conv2d_bias_requantize", 3, "conv2d_bias_requantize", 1),
    (int8_relu, "conv2d_bias_relu_requantize", 3, "conv2d_bias_relu_requantize", 1),
    (int8_padded, "conv2d_bias_requantize", 3, "conv2d_subtract_bias_requantize", 2),
    (int8_dense, "dense_bias_requantize", 2, "dense_subtract_bias_requantize", 1),
]


def prepare(make):
    """The module, its inputs, and what the operators that TVM makes of it give one by one."""
    net = Net()
    module = net.module(make(net))
    (param,) = module["main"].params
    shape = [int(dim) for dim in param.checked_type.shape]
    rng = np.random.default_rng(0)
    values = (
        rng.normal(size=shape) if make.__name__.startswith("quantize") else rng.integers(-128, 128, shape)
    )
    inputs = {"x": values.astype(param.checked_type.dtype)}
    (wanted,) = run_unfused(relay.qnn.transform.CanonicalizeOps()(module), inputs)
    return module, inputs, wanted


def fuse(module, on):
    fused = transform.FuseChains(target.resolve_target(on))(module)
    report = record.last_report()["PartitionChains"]
    return fused, [group.name for group in report.details if group.is_layer], report.decisions


def assert_same(got, wanted):
    """Integers agree; float results, of sums in another order, nearly."""
    assert got.dtype == wanted.dtype
    if wanted.dtype == np.float32:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, wanted)
        assert len(np.unique(wanted)) > 50  # not all at a bound


def names(models):
    return [pytest.param(*model, id=model[0].__name__) for model in models]


@pytest.mark.parametrize(("make", "name", "count"), names([model[:3] for model in MODELS]))
def test_on_a_cpu(make, name, count):
    module, inputs, wanted = prepare(make)
    fused, layers, _ = fuse(module, LLVM)
    assert layers == [name]
    built = build.build_fused(fused, target.resolve_target(LLVM)).library
    assert len(kernel_calls(built)) == count
    assert_same(run(built, inputs)[0], wanted)


@pytest.mark.parametrize(("make", "name", "count"), names([(m[0], *m[3:]) for m in MODELS]))
def test_on_cuda(make, name, count):
    module, inputs, wanted = prepare(make)
    fused, layers, decisions = fuse(module, CUDA)
    assert layers == [name]
    built = kernels.build_kernels(fused, target.resolve_target(CUDA))
    assert sum(built.calls.values()) == count
    assert_same(run_emulated(built, inputs)[0][0], wanted)
    if count > 1:
        left = [decision.reason for decision in decisions if not decision.applied]
        assert [(reason.code, "nn.pad" in reason.at) for reason in left] == [(Code.TARGET_CANNOT_JOIN, True)]


def test_a_plain_build_must_not_decide_layouts_again():
    """TVM's layout rule of a requantization by channels knows one axis; a blocked layout has two."""
    module, inputs, wanted = prepare(int8_channels)
    fused, _, _ = fuse(module, LLVM)
    with pytest.raises(Exception, match=r"axes.size\(\) == 1"):
        plain_build(fused)
    assert_same(run(plain_build(fused, disabled=["AlterOpLayout"]), inputs)[0], wanted)
