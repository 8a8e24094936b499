"""Joined kernels from a whole graph: found, built for CUDA, counted, run on the emulator, dissolved again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    count_operators,
    feeds,
    infer,
    relay,
    run_unfused,
    target,
    tvm,
)

kernels = Lazy("tvm_fuse.relay.kernels")
partition = Lazy("tvm_fuse.relay.partition_pass")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def squeeze_and_excite():
    """Depthwise convolution, gate, projection: the parts of an EfficientNet block."""
    net = Net()
    x = relay.nn.relu(
        relay.add(net.conv2d(net.input("x", (1, 24, 10, 10)), 24, groups=24), net.const(24, 1, 1))
    )
    gate = relay.nn.global_avg_pool2d(x)
    for channels, activation in ((6, relay.nn.relu), (24, relay.sigmoid)):
        gate = activation(relay.add(net.conv2d(gate, channels, 1), net.const(channels, 1, 1)))
    return net.module(relay.add(net.conv2d(relay.multiply(x, gate), 16, 1), net.const(16, 1, 1)))


def layer_norm(net, x):
    """As the ONNX importer spells it."""
    size = int(infer(x).shape[-1])
    mean = relay.mean(x, axis=[-1], keepdims=True)
    spread = relay.op.reduce._make._variance(x, mean, [-1], True, False, False)
    y = relay.divide(relay.subtract(x, mean), relay.sqrt(relay.add(spread, relay.const(1e-5))))
    return relay.add(relay.multiply(y, net.const(size)), net.const(size))


def gelu(x):
    half = relay.multiply(relay.erf(relay.multiply(x, relay.const(np.float32(0.5**0.5)))), relay.const(0.5))
    return relay.multiply(x, relay.add(half, relay.const(0.5)))


def encoder_layer(length=12, width=32, heads=4):
    """A transformer's: attention with scale and mask, two layer norms, two dense layers with GELU."""
    net, size = Net(), width // heads
    x, mask = net.input("x", (length, width)), net.input("mask", (1, 1, length))

    def dense(value, out):
        return relay.add(net.dense(value, out), net.const(out))

    def split(value, axes=(1, 0, 2)):
        return relay.transpose(relay.reshape(dense(value, width), (length, heads, size)), axes)

    scores = relay.nn.batch_matmul(split(x), split(x))
    scores = relay.add(relay.multiply(scores, relay.const(np.float32(size**-0.5))), mask)
    mixed = relay.nn.batch_matmul(relay.nn.softmax(scores), split(x), transpose_b=False)
    mixed = relay.reshape(relay.transpose(mixed, (1, 0, 2)), (length, width))
    y = layer_norm(net, relay.add(x, dense(mixed, width)))
    return net.module(layer_norm(net, relay.add(y, dense(gelu(dense(y, 2 * width)), width))))


#: Model, kernels of one inference, inner operators.
MODELS = [(squeeze_and_excite, 4, 1), (encoder_layer, 15, 2)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0].__name__)
def model(request):
    make, launches, inner = request.param
    module = make()
    return module, transform.FuseChains(target.resolve_target(CUDA))(module), launches, inner


def count_inner(module):
    return sum(count for name, count in count_operators(module).items() if name.startswith("tvm_fuse.inner."))


def test_on_the_emulator(model):
    module, fused, launches, inner = model
    built = kernels.build_kernels(fused, target.resolve_target(CUDA))
    assert sum(built.calls.values()) == launches
    assert count_inner(fused) == inner
    inputs = feeds(module)
    (got,), _ = run_emulated(built, inputs)
    np.testing.assert_allclose(got, run_unfused(module, inputs)[0], rtol=1e-5, atol=1e-5)


def test_dissolved(model):
    laid_out = partition.dissolve_groups(model[1])
    again = partition.partition_chains(laid_out, target.resolve_target(CUDA))
    assert count_inner(laid_out) == 0
    assert count_inner(again) == model[3]
    assert tvm.ir.structural_equal(partition.dissolve_groups(again), laid_out)


def test_a_cpu_joins_nothing(model):
    fused = transform.FuseChains(target.resolve_target(LLVM))(model[0])
    assert count_inner(fused) == 0
