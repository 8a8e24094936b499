"""The textbook kernel: its values, its registers, and that it agrees with what is generated."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.emulator import build_emulator
from tvm_fuse.cuda.launch import Launch, Parameter
from tvm_fuse.cuda.reference import THREADS, reference_conv2d
from tvm_fuse.cuda.resources import read_resources

RNG = np.random.default_rng(0)

#: Kernel, stride, padding, and the shape of x with the number of filters.
CASES = [
    (1, 1, 0, (2, 3, 5, 4), 6),
    (3, 1, 1, (1, 4, 7, 6), 4),
    (3, 2, 1, (2, 5, 9, 8), 3),
    (5, 2, 0, (1, 2, 11, 9), 7),
    (7, 2, 3, (1, 3, 13, 15), 5),
]


def textbook(x, w, scale, shift, stride, padding):
    """The formula in NumPy float64, tap by tap."""
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    taps = w.shape[2]
    rows, columns = ((size - taps) // stride + 1 for size in x.shape[2:])
    y = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for r, s in np.ndindex(taps, taps):
        window = x[:, :, r : r + rows * stride : stride, s : s + columns * stride : stride]
        y += np.einsum("ncpq,oc->nopq", window[:, :, :rows, :columns], w[:, :, r, s].astype(np.float64))
    return np.maximum(0, y * scale[:, None, None] + shift[:, None, None])


def run(kernel, x, w, scale, shift, source=None):
    batch, channels, height, width = x.shape
    filters = len(w)
    rows, columns = kernel.output_size(height), kernel.output_size(width)
    y = np.empty((batch, filters, rows, columns), np.float32)
    numbers = (np.int32(n) for n in (batch, channels, height, width, filters, rows, columns))
    build_emulator(source or kernel.source).launch(
        kernel.symbol,
        kernel.grid(batch, filters, height, width),
        (THREADS, 1, 1),
        [x, w, scale, shift, y, *numbers],
        outputs=[4],
    )
    return y


def draw(shape, filters, taps):
    x = RNG.normal(size=shape).astype(np.float32)
    w = RNG.normal(size=(filters, shape[1], taps, taps)).astype(np.float32)
    scale, shift = RNG.normal(size=(2, filters)).astype(np.float32)
    return x, w, scale, shift


@pytest.mark.parametrize(("taps", "stride", "padding", "shape", "filters"), CASES)
def test_values(taps, stride, padding, shape, filters):
    operands = draw(shape, filters, taps)
    got = run(reference_conv2d(taps, stride, padding), *operands)
    np.testing.assert_allclose(got, textbook(*operands, stride, padding), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("* sum + shift", "* sum - shift"), ("max(0.0f, ", "("), ("- 1;", "- 0;"), ("row < height", "row < 3")],
)
def test_a_mistake_shows(right, wrong):
    kernel = reference_conv2d(3, 1, 1)
    assert right in kernel.source
    operands = draw((1, 4, 6, 6), 4, 3)
    got = run(kernel, *operands, source=kernel.source.replace(right, wrong))
    assert np.abs(got - textbook(*operands, 1, 1)).max() > 1e-3


@pytest.mark.relay
@pytest.mark.cuda_codegen
def test_the_generated_kernel_agrees_with_it(monkeypatch):
    """Convolution, batch norm and ReLU through the whole way, against the kernel written by hand."""
    from tests.support.emulated import run_emulated
    from tests.support.relay_graphs import CUDA, relay, tvm
    from tvm_fuse.relay.kernels import build_kernels
    from tvm_fuse.relay.target import resolve_target
    from tvm_fuse.transform import FoldBatchNorm, FuseChains

    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)
    x, w, gamma, beta = draw((2, 6, 9, 7), 10, 3)
    mean, variance = RNG.normal(size=10).astype("float32"), RNG.uniform(0.5, 2, 10).astype("float32")
    data = relay.var("x", shape=x.shape)
    y = relay.nn.conv2d(data, relay.const(w), strides=(2, 2), padding=(1, 1), channels=10, kernel_size=(3, 3))
    y = relay.nn.batch_norm(y, *map(relay.const, (gamma, beta, mean, variance)), epsilon=1e-3)[0]
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([data], relay.nn.relu(y))))
    fused = FuseChains(CUDA)(FoldBatchNorm()(module))
    (got,), ran = run_emulated(build_kernels(fused, resolve_target(CUDA)), {"x": x})
    assert len(ran) == 1
    scale = gamma / np.sqrt(variance + np.float32(1e-3))
    wanted = run(reference_conv2d(3, 2, 1), x, w, scale, beta - mean * scale)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda_codegen
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_it_neither_spills_nor_has_a_stack(arch):
    kernel = reference_conv2d(3, 1, 1)
    pointers = [Parameter(name, "float32") for name in ("x", "w", "scale", "shift", "y")]
    names = ("batch", "channels", "height", "width", "filters", "out_height", "out_width")
    numbers = [Parameter(name, "int32", 4, is_pointer=False) for name in names]
    launch = Launch(kernel.symbol, (8, 1, 1), (THREADS, 1, 1), 0, (*pointers, *numbers))
    (used,) = read_resources(compile_cuda(kernel.source, arch), [launch])
    assert (used.spill_bytes, used.stack_bytes, used.smem_static_bytes) == (0, 0, 0)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (3, 0, 0), (3, 1, -1)])
def test_impossible_numbers(numbers):
    with pytest.raises(UsageError, match="reference convolution"):
        reference_conv2d(*numbers)
