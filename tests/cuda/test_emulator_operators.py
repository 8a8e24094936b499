"""What TVM generates for one operator each runs on the emulator, checked, to what the CPU computes.

The operators are chosen for what is in their kernels: shuffles over whole and partial warps, shared
memory, halves, bytes, vectors, atomics, mathematical functions.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_graphs import CUDA, Net, feeds, relay, run_unfused
from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.cuda.emulator import KernelFault, build_emulator

kernels = Lazy("tvm_fuse.relay.kernels")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

OURS, TVMS = CUDA, f"{CUDA} -keys=cuda,gpu"


@pytest.fixture(autouse=True)
def without_nvcc_and_gpu(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)


def layer_norm(x, net):
    return relay.nn.layer_norm(x, net.const(300), net.const(300))


def gelu(x, net):
    return x * (relay.const(0.5) + relay.const(0.5) * relay.erf(x * relay.const(0.5**0.5)))


def functions(x, net):
    positive = relay.abs(x) + relay.const(0.1)
    waves = relay.sin(x) + relay.cos(x) * relay.atan(x) + relay.tanh(x) + relay.sigmoid(x)
    return waves + relay.exp(x) + relay.log(positive) + relay.rsqrt(positive) + relay.power(positive, x)


def roundings(x, net):
    x = x * relay.const(10.0, net.dtype)
    return relay.round(x) + relay.floor(x) * relay.ceil(x) + relay.trunc(x)


def integers(x, net):
    x = (x * relay.const(99.0)).astype("int32")
    quotient = relay.floor_divide(x, relay.const(7, "int32")) + relay.floor_mod(x, relay.const(-5, "int32"))
    return (
        quotient
        + relay.right_shift(x, relay.const(2, "int32"))
        + relay.left_shift(x, relay.const(3, "int32"))
    )


def int8_weight(net, *shape):
    return relay.const(net.rng.integers(-90, 90, shape).astype("int8"))


def quantized(x, net):
    x = relay.clip(relay.round(x * relay.const(40.0)), -128, 127).astype("int8")
    scales = [relay.const(value) for value in (3, 0, 0.1, 0.02)]
    y = relay.qnn.op.conv2d(
        x, int8_weight(net, 16, 16, 3, 3), *scales, kernel_size=(3, 3), channels=16, padding=(1, 1)
    )
    y = relay.qnn.op.requantize(
        y, relay.const(0.002), relay.const(0), relay.const(0.05), relay.const(1), out_dtype="int8"
    )
    return relay.qnn.op.dequantize(y, relay.const(0.05), relay.const(1))


def int8_dense(x, net):
    x = (x * relay.const(40.0)).astype("int8")
    return relay.nn.dense(x, int8_weight(net, 12, 64), out_dtype="int32")


def scatter(x, net):
    index = relay.const(np.array([[0, 1, 1, 2, 0, 3]], "int32"))
    return relay.scatter_nd(x, index, net.const(6), mode="add")


def resize(method):
    return lambda x, net: relay.image.resize2d(x, size=(14, 13), method=method)


# operator, shape of its input, dtype
OPERATORS = {
    "softmax, part of a warp": (lambda x, net: relay.nn.softmax(x), (3, 10), "float32"),
    "softmax, several warps": (lambda x, net: relay.nn.softmax(x), (2, 1000), "float32"),
    "softmax, half": (lambda x, net: relay.nn.softmax(x), (3, 100), "float16"),
    "softmax over channels": (lambda x, net: relay.nn.softmax(x, axis=1), (2, 5, 7, 33), "float32"),
    "layer norm": (layer_norm, (5, 300), "float32"),
    "sum of everything": (lambda x, net: relay.sum(x), (7, 11, 13), "float32"),
    "sum, half": (lambda x, net: relay.sum(x, axis=1), (4, 300), "float16"),
    "sum, double": (lambda x, net: relay.sum(x, axis=1), (3, 500), "float64"),
    "argmax": (lambda x, net: relay.argmax(x, axis=1), (4, 300), "float32"),
    "gelu": (gelu, (4, 96), "float32"),
    "functions": (functions, (3, 50), "float32"),
    "roundings, half": (roundings, (3, 50), "float16"),
    "integers": (integers, (3, 50), "float32"),
    "convolution, half": (lambda x, net: relay.nn.relu(net.conv2d(x, 16)), (1, 8, 9, 9), "float16"),
    "dense, half": (lambda x, net: net.dense(x, 10), (5, 40), "float16"),
    "convolution, NHWC": (lambda x, net: net.conv2d(x, 16, layout="NHWC"), (1, 9, 9, 8), "float32"),
    "quantized convolution": (quantized, (1, 16, 9, 9), "float32"),
    "dense, bytes": (int8_dense, (3, 64), "float32"),
    "resize, linear": (resize("linear"), (1, 3, 7, 9), "float32"),
    "resize, cubic": (resize("cubic"), (1, 3, 7, 9), "float32"),
    "maximum pooling": (lambda x, net: relay.nn.max_pool2d(x, (3, 3), (2, 2)), (1, 3, 11, 11), "float32"),
    "global pooling": (lambda x, net: relay.nn.global_avg_pool2d(x), (2, 5, 7, 7), "float32"),
    "argsort": (lambda x, net: relay.argsort(x), (3, 20), "float32"),
}
QUICK = {"softmax, part of a warp", "argmax", "functions", "convolution, half", "dense, bytes"}


def build(operator, shape, dtype, on):
    net = Net(dtype=dtype)
    module = net.module(operator(net.input("x", shape), net))
    module = relay.qnn.transform.CanonicalizeOps()(module)
    resolved = target.resolve_target(on)
    return module, kernels.build_kernels(transform.FuseChains(resolved)(module), resolved)


@pytest.mark.parametrize("on", [OURS, TVMS], ids=["ours", "TVM's"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPERATORS]
)
def test_an_operator_agrees_with_the_cpu(name, on):
    operator, shape, dtype = OPERATORS[name]
    module, built = build(operator, shape, dtype, on)
    inputs = feeds(module)
    (wanted,) = run_unfused(module, inputs)
    (got,), ran = run_emulated(built, inputs, seeds=(0, 1))
    assert ran
    assert got.dtype == wanted.dtype
    tolerance = 2e-2 if wanted.dtype == np.float16 else 1e-5
    assert max_error(got.astype("float64"), wanted.astype("float64")) < tolerance


def test_atomic_sums():
    """They agree; but TVM has every thread write what its sum was before to one place, which is a race."""
    module, built = build(scatter, (6,), "float32", TVMS)
    inputs = feeds(module)
    (wanted,) = run_unfused(module, inputs)
    (got,), _ = run_emulated(built, inputs, checks=False)
    assert max_error(got, wanted) < 1e-5
    with pytest.raises(KernelFault, match=r"race: writes atomic_add_return\[0\], which another block wrote"):
        run_emulated(built, inputs)


def test_a_reduction_of_booleans_counts_on_lockstep():
    """As TVM's maximum of bytes does (``test_emulator_models.py``): no barriers within the warp."""
    module, built = build(lambda x, net: relay.all(x > relay.const(-2.0), axis=1), (4, 70), "float32", TVMS)
    with pytest.raises(KernelFault, match=r"race: (reads|writes) red_buf0\["):
        run_emulated(built, feeds(module))


# --- what is refused --------------------------------------------------------------------------------------


def bfloat16(x, net):
    return relay.nn.relu(x.astype("bfloat16")).astype("float32")


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "header"),
    [
        (lambda x, net: net.dense(x, 32), (16, 64), "float16", "mma.h"),
        (bfloat16, (3, 50), "float32", "cuda_bf16.h"),
    ],
    ids=["tensor cores", "bfloat16"],
)
def test_what_the_emulator_does_not_know_is_refused(operator, shape, dtype, header):
    module, built = build(operator, shape, dtype, TVMS)
    with pytest.raises(ToolFailed, match=rf"{header}: No such file") as caught:
        run_emulated(built, feeds(module))
    assert "tensor cores" in caught.value.hint


@pytest.mark.parametrize(
    "statement",
    [
        'asm volatile("cp.async.wait_all;");',
        '__asm__ __volatile__("ldmatrix.sync.aligned.m8n8.x4.shared.b16;");',
    ],
    ids=["cp.async", "ldmatrix"],
)
@pytest.mark.parametrize("checks", [False, True])
def test_inline_assembly_is_refused(statement, checks):
    module = build_emulator(f"__global__ void k(float* y) {{ {statement} y[0] = 1; }}")
    with pytest.raises(ToolFailed, match=r"kernels\.cu:1"):
        module.launch("k", (1,), (1,), [np.zeros(1, "float32")], outputs=[0], checks=checks)


DOUBLE_BUFFERED = r"""
__global__ void running(const float* x, float* y) {
  __shared__ float buffer[2][64];
  int t = threadIdx.x;
  float sum = 0.0f;
  buffer[0][t] = x[t];
  __syncthreads();
  for (int k = 0; k < 8; ++k) {
    if (k < 7) buffer[(k + 1) & 1][t] = x[64 * (k + 1) + t];
    sum += buffer[k & 1][63 - t];
    __syncthreads();
  }
  y[t] = sum;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", ""),
        ("    __syncthreads();\n", "", "race|uninitialized"),
        ("(k + 1) & 1", "k & 1", "race"),
    ],
    ids=["right", "no barrier", "one buffer"],
)
def test_double_buffers(old, new, fault):
    x, y = np.random.default_rng(0).normal(size=(8, 64)).astype("float32"), np.empty(64, "float32")
    assert old in DOUBLE_BUFFERED
    module = build_emulator(DOUBLE_BUFFERED.replace(old, new) if old else DOUBLE_BUFFERED)
    if fault:
        with pytest.raises(KernelFault, match=fault):
            module.launch("running", (1,), (64,), [x, y], outputs=[1])
    else:
        module.launch("running", (1,), (64,), [x, y], outputs=[1], seeds=(0, 1, 2))
        np.testing.assert_allclose(y, x.sum(0)[::-1], rtol=1e-5, atol=1e-5)
