"""Kernels with several reductions on CUDA: resources for three architectures, values by emulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cuda_groups import ARCHS, BuiltGroup, assert_healthy, mostly_slow, run_group
from tests.support.joined import Joined
from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_graphs import relay, target
from tvm_fuse.cuda.emulator.module import KernelFault

kernels = Lazy("tvm_fuse.relay.kernels")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def normal(*shape, scale=1.0, seed=0):
    return np.random.default_rng(seed + len(shape)).normal(size=shape, scale=scale).astype("float32")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def conv(data, weight):
    return relay.nn.conv2d(data, weight, channels=int(weight.type_annotation.shape[0]), kernel_size=(1, 1))


def make_conv_gate(images, channels, hidden):
    group, x = Joined(), normal(images, channels, 1, 1)
    w1, w2 = normal(hidden, channels, 1, 1, scale=channels**-0.5), normal(channels, hidden, 1, 1, scale=0.2)
    b1, b2 = normal(hidden, 1, 1), normal(channels, 1, 1)
    first = group.inner(conv(group.input("x", x), group.const(w1)))
    first = relay.add(first, group.const(b1))
    second = conv(relay.multiply(first, relay.sigmoid(first)), group.const(w2))
    h = x.astype("float64")[:, :, 0, 0] @ w1[:, :, 0, 0].T + b1[:, 0, 0]
    wanted = sigmoid((h * sigmoid(h)) @ w2[:, :, 0, 0].T + b2[:, 0, 0])
    return group, relay.sigmoid(relay.add(second, group.const(b2))), wanted[:, :, None, None]


def make_dense_gate(images, channels, hidden):
    group, x = Joined(), normal(images, channels)
    w1, w2 = normal(hidden, channels, scale=channels**-0.5), normal(channels + 3, hidden)
    first = group.inner(relay.nn.dense(group.input("x", x), group.const(w1)))
    second = relay.nn.dense(relay.nn.relu(first), group.const(w2))
    return group, second, np.maximum(x.astype("float64") @ w1.T, 0) @ w2.T


def make_softmax(*shape):
    group, x, mask = Joined(), normal(*shape, scale=3), normal(shape[0], 1, shape[-1])
    y = relay.multiply(group.input("x", x), relay.const(0.125))
    y = relay.add(y, relay.cast(group.input("mask", mask.astype("int32")), "float32"))
    wanted = softmax(x * 0.125 + mask.astype("int32").astype("float64"))
    return group, relay.tanh(relay.nn.softmax(y)), np.tanh(wanted)


def make_log_softmax(*shape):
    group, x = Joined(), normal(*shape, scale=3)
    wanted = np.log(softmax(x.astype("float64")))
    return group, relay.nn.log_softmax(group.input("x", x)), wanted


def make_layer_norm(*shape):
    """As the ONNX importer spells it."""
    group, x, residual = Joined(), normal(*shape) + 5, normal(*shape, seed=1)
    gamma, beta = normal(shape[-1]), normal(shape[-1], seed=1)
    y = relay.add(group.input("x", x), group.input("residual", residual))
    mean = group.inner(relay.mean(y, axis=[-1], keepdims=True))
    spread = relay.op.reduce._make._variance(y, mean, [-1], True, False, False)
    z = relay.divide(relay.subtract(y, mean), relay.sqrt(relay.add(spread, relay.const(1e-3))))
    z = relay.add(relay.multiply(z, group.const(gamma)), group.const(beta))
    total = x.astype("float64") + residual
    wanted = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + 1e-3)
    return group, z, wanted * gamma + beta


def make_power_norm(*shape):
    """As PyTorch's exporters before opset 17 spell a layer norm."""
    group, x = Joined(), normal(*shape) + 5
    y = group.input("x", x)
    centered = relay.subtract(y, group.inner(relay.mean(y, axis=[-1], keepdims=True)))
    spread = relay.mean(relay.power(centered, relay.const(2.0)), axis=[-1], keepdims=True)
    z = relay.divide(centered, relay.sqrt(relay.add(spread, relay.const(1e-3))))
    total = x.astype("float64")
    wanted = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + 1e-3)
    return group, z, wanted


def make_instance_norm(*shape):
    group, x = Joined(), normal(*shape) + 5
    y = group.input("x", x)
    mean = group.inner(relay.mean(y, axis=[2, 3], keepdims=True))
    spread = relay.op.reduce._make._variance(y, mean, [2, 3], True, False, False)
    z = relay.multiply(relay.subtract(y, mean), relay.rsqrt(relay.add(spread, relay.const(1e-3))))
    total = x.astype("float64")
    axes = {"axis": (2, 3), "keepdims": True}
    return group, z, (total - total.mean(**axes)) / np.sqrt(total.var(**axes) + 1e-3)


def make_global_pool(*shape):
    group, x, bias = Joined(), normal(*shape), normal(shape[1], 1, 1)
    y = relay.nn.relu(relay.add(group.input("x", x), group.const(bias)))
    wanted = np.tanh(np.maximum(x.astype("float64") + bias, 0).mean((2, 3), keepdims=True))
    return group, relay.tanh(relay.nn.global_avg_pool2d(y)), wanted


def make_max_pool(*shape):
    group, x = Joined(), normal(*shape)
    y = relay.nn.max_pool2d(relay.negative(group.input("x", x)), (2, 2), strides=(2, 2))
    windows = -x.reshape(*shape[:2], shape[2] // 2, 2, shape[3] // 2, 2)
    return group, relay.nn.relu(y), np.maximum(windows.max((3, 5)), 0)


def make_mean(axis, *shape):
    group, x = Joined(), normal(*shape)
    y = relay.mean(relay.exp(group.input("x", x)), axis=list(axis))
    return group, relay.sqrt(y), np.sqrt(np.exp(x.astype("float64")).mean(axis))


CASES = [
    (make_conv_gate, (1, 96, 4)),
    (make_conv_gate, (1, 1152, 48)),
    (make_conv_gate, (3, 33, 7)),
    (make_dense_gate, (1, 64, 16)),
    (make_dense_gate, (2, 257, 40)),
    (make_softmax, (2, 6, 50)),
    (make_softmax, (2, 3, 1000)),
    (make_softmax, (1, 2, 6000)),
    (make_softmax, (1, 5, 7)),
    (make_log_softmax, (3, 100)),
    (make_layer_norm, (2, 3, 96)),
    (make_layer_norm, (1, 2, 770)),
    (make_layer_norm, (12, 32)),
    (make_power_norm, (2, 3, 130)),
    (make_instance_norm, (2, 3, 7, 9)),
    (make_global_pool, (1, 20, 7, 7)),
    (make_global_pool, (2, 3, 40, 40)),
    (make_max_pool, (1, 5, 6, 8)),
    (make_mean, ((1,), 3, 200)),
    (make_mean, ((1,), 3, 20, 7)),
    (make_mean, ((0, 1), 30, 20)),
]
QUICK = {0, 4, 5, 6, 11, 12, 14, 15, 17, 19}


def name(case):
    return f"{case[0].__name__[5:]}{case[1]}"


def build(case, arch):
    make, sizes = case
    group, result, wanted = make(*sizes)
    module = group.module(result)
    built = kernels.build_kernels(module, target.resolve_target(f"cuda -arch={arch}"))
    return BuiltGroup(module["main"].body, built, arch), group.values, wanted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK), ids=name)
def test_one_kernel_without_spills(case, arch):
    group, _, _ = build(case, arch)
    assert_healthy(group)


@pytest.mark.parametrize("case", mostly_slow(CASES, QUICK), ids=name)
def test_values(case):
    group, inputs, wanted = build(case, "sm_80")
    assert max_error(run_group(group, inputs), wanted) < 1e-5


#: A kernel of each schedule, what is changed in it, and into what.
MUTANTS = {
    "gate without barriers": ((make_dense_gate, (1, 64, 16)), "__syncthreads();", ""),
    "softmax without barriers": ((make_softmax, (2, 6, 50)), "__syncthreads();", ""),
    "norm without barriers": ((make_layer_norm, (1, 2, 300)), "__syncthreads();", ""),
    "a lane less": ((make_softmax, (2, 6, 50)), "], 16, 32)", "], 8, 32)"),
    "a wrong count": ((make_layer_norm, (1, 2, 300)), "3.333333e-03f", "3.333334e-02f"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant):
    case, before, after = MUTANTS[mutant]
    group, inputs, wanted = build(case, "sm_80")
    source = group.build.artifact.cuda_source
    assert before in source
    artifact = replace(group.build.artifact, cuda_source=source.replace(before, after))
    broken = replace(group, build=replace(group.build, artifact=artifact))
    try:
        got = run_group(broken, inputs)
    except KernelFault:
        return
    assert max_error(got, wanted) > 1e-4
