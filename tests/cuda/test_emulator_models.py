"""Every kernel that TVM generates for small models computes on the emulator what NumPy does."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_graphs import CUDA, relay, tvm
from tvm_fuse.cuda.emulator import KernelFault, build_emulator

kernels = Lazy("tvm_fuse.relay.kernels")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

OURS, TVMS = CUDA, f"{CUDA} -keys=cuda,gpu"


@pytest.fixture(autouse=True)
def without_nvcc_and_gpu(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)


class Draw:
    """Seeded values."""

    def __init__(self):
        self.rng = np.random.default_rng(7)

    def __call__(self, *shape, scale=1.0):
        return self.rng.normal(scale=scale, size=shape).astype("float32")


def build(expr, inputs, on):
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(inputs, expr)))
    fused = transform.FuseChains(on)(transform.FoldBatchNorm()(module))
    return kernels.build_kernels(fused, target.resolve_target(on))


def conv(x, w, groups=1):
    """A 3 x 3 convolution that keeps the image size, in float64."""
    x, w = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).astype("float64"), w.astype("float64")
    height, width, per_group = x.shape[2] - 2, x.shape[3] - 2, w.shape[1]
    y = np.zeros((x.shape[0], w.shape[0], height, width))
    for o in range(w.shape[0]):
        first = o // (w.shape[0] // groups) * per_group
        for i, r, s in np.ndindex(*w.shape[1:]):
            y[:, o] += w[o, i, r, s] * x[:, first + i, r : r + height, s : s + width]
    return y


def conv_model(on, dtype="float32"):
    """Convolution, batch norm, ReLU: the build, its input, and its output in NumPy."""
    draw = Draw()
    x, w = draw(1, 8, 10, 10), draw(16, 8, 3, 3, scale=72**-0.5)
    gamma, beta, mean, variance = draw(16), draw(16), draw(16), abs(draw(16)) + 0.5
    var = relay.var("x", shape=x.shape, dtype=dtype)
    constants = [relay.const(v.astype(dtype), dtype) for v in (w, gamma, beta, mean, variance)]
    y = relay.nn.conv2d(var, constants[0], padding=(1, 1), channels=16, kernel_size=(3, 3))
    y = relay.nn.relu(relay.nn.batch_norm(y, *constants[1:], epsilon=1e-3)[0])
    scale = (gamma / np.sqrt(variance + 1e-3))[:, None, None]
    wanted = np.maximum((conv(x, w) - mean[:, None, None]) * scale + beta[:, None, None], 0)
    return build(y, [var], on), {"x": x.astype(dtype)}, wanted


def depthwise_model(on):
    """Depthwise convolution, gate, pooling, dense layer, softmax."""
    draw = Draw()
    x, w = draw(1, 32, 9, 9), draw(32, 1, 3, 3, scale=1 / 3)
    dense, bias = draw(10, 32, scale=32**-0.5), draw(10)
    var = relay.var("x", shape=x.shape)
    y = relay.nn.conv2d(var, relay.const(w), padding=(1, 1), groups=32, channels=32, kernel_size=(3, 3))
    y = relay.nn.batch_flatten(relay.nn.global_avg_pool2d(y * relay.sigmoid(y)))
    y = relay.nn.softmax(relay.nn.bias_add(relay.nn.dense(y, relay.const(dense)), relay.const(bias)))
    z = conv(x, w, groups=32)
    logits = (z / (1 + np.exp(-z))).mean((2, 3)) @ dense.T.astype("float64") + bias
    exponents = np.exp(logits - logits.max())
    return build(y, [var], on), {"x": x}, exponents / exponents.sum()


MODELS = {"conv": conv_model, "depthwise": depthwise_model}


@functools.cache
def model(name, on):
    return MODELS[name](on)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("on", [OURS, TVMS])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_agrees_with_numpy(name, on, checks):
    built, inputs, wanted = model(name, on)
    (got,), ran = run_emulated(built, inputs, checks=checks, seeds=(0, 1))
    assert max_error(got, wanted) < 1e-5
    idle = {name for name in built.artifact.cuda_kernels if "flatten" in name}  # a reshape launches nothing
    assert ran == set(built.artifact.cuda_kernels) - idle


def test_half_precision():
    built, inputs, wanted = conv_model(TVMS, "float16")
    (got,), _ = run_emulated(built, inputs)
    assert got.dtype == np.float16
    assert 1e-5 < max_error(got.astype("float64"), wanted) < 2e-2


def test_a_reduction_that_counts_on_lockstep():
    """TVM's maximum of bytes leaves out the warp's barriers; CUDA has not promised lockstep since Volta."""
    x = relay.var("x", shape=(4, 200), dtype="int8")
    built = build(relay.max(x, axis=1), [x], TVMS)
    values = np.random.default_rng(7).integers(-128, 128, (4, 200)).astype("int8")
    with pytest.raises(KernelFault, match=r"race: (reads|writes) red_buf0\["):
        run_emulated(built, {"x": values})


# --- generated kernels with something wrong in them --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on", "old", "new", "kinds"),
    [
        ("conv", OURS, r"__syncthreads\(\);", "", {"race", "uninitialized"}),
        ("conv", OURS, r"\bp0\[", "p0[1000 + ", {"out of bounds"}),
        ("conv", OURS, r"__launch_bounds__\(\d+(?:, 1)?\)", "__launch_bounds__(1)", {"launch"}),
        ("depthwise", TVMS, r"(PaddedInput_shared\[[^]]*\]) = ", r"if (false) \1 = ", {"uninitialized"}),
        ("depthwise", TVMS, r"\bp0\[", "p0[1 + ", {"out of bounds"}),
        ("depthwise", TVMS, r"\bp0\[", "p0[-1 + ", {"out of bounds"}),
        ("depthwise", TVMS, r"if \(\(\(int\)threadIdx.x\) < 10\)", "if (true)", {"out of bounds"}),
        ("depthwise", TVMS, r"T_softmax_norm\[", "if (threadIdx.x > 0) T_softmax_norm[", {"unwritten"}),
    ],
)  # fmt: skip
def test_a_mutant_of_generated_code_is_caught(name, on, old, new, kinds):
    built, inputs, _ = model(name, on)
    mutant, count = re.subn(old, new, built.artifact.cuda_source)
    assert count
    with pytest.raises(KernelFault) as caught:
        run_emulated(built, inputs, emulator=build_emulator(mutant))
    assert caught.value.kind in kinds
