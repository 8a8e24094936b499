"""Convolutions in blocked layout on a CPU: every shape by value, against NumPy, on AVX-512 and AVX2."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numerics import conv2d
from tvm_fuse.core.graph import ConvAttrs

pytestmark = pytest.mark.relay

#: name -> data, weight, strides, padding, dilation
DENSE = {
    "1x1": ((1, 32, 14, 14), (64, 32, 1, 1), 1, 0, 1),
    "1x1, 7 pixels": ((1, 96, 7, 7), (48, 96, 1, 1), 1, 0, 1),
    "1x1, one pixel": ((1, 48, 1, 1), (144, 48, 1, 1), 1, 0, 1),
    "1x1, stride 2": ((2, 16, 13, 11), (32, 16, 1, 1), 2, 0, 1),
    "3x3": ((1, 16, 14, 14), (32, 16, 3, 3), 1, 1, 1),
    "3x3, prime width": ((1, 16, 5, 31), (16, 16, 3, 3), 1, 1, 1),
    "3x3, wide prime": ((1, 16, 3, 37), (16, 16, 3, 3), 1, 1, 1),
    "3x3, stride 2, odd": ((1, 24, 15, 13), (40, 24, 3, 3), 2, 1, 1),
    "3x3, dilated": ((1, 16, 12, 12), (16, 16, 3, 3), 1, 2, 2),
    "3x3, no padding": ((1, 8, 9, 9), (8, 8, 3, 3), 1, 0, 1),
    "1x7": ((1, 16, 9, 9), (16, 16, 1, 7), 1, (0, 3, 0, 3), 1),
    "one-sided padding": ((1, 16, 8, 8), (16, 16, 3, 3), 2, (0, 0, 1, 1), 1),
    "stem": ((1, 3, 32, 32), (32, 3, 7, 7), 2, 3, 1),
    "odd channels": ((1, 5, 8, 8), (7, 5, 3, 3), 1, 1, 1),
    "batch": ((8, 16, 6, 6), (16, 16, 3, 3), 1, 1, 1),
}
DEPTHWISE = {
    "3x3": ((1, 32, 14, 14), (32, 1, 3, 3), 1, 1, 1),
    "5x5, stride 2": ((1, 48, 28, 28), (48, 1, 5, 5), 2, 2, 1),
    "prime width": ((1, 24, 9, 23), (24, 1, 3, 3), 1, 1, 1),
    "dilated": ((1, 16, 11, 11), (16, 1, 3, 3), 1, 2, 2),
    "7x7": ((2, 16, 10, 10), (16, 1, 7, 7), 1, 3, 1),
    "no padding": ((1, 8, 7, 7), (8, 1, 3, 3), 1, 0, 1),
    "one pixel": ((1, 16, 1, 1), (16, 1, 1, 1), 1, 0, 1),
    "odd channels": ((1, 7, 6, 6), (7, 1, 3, 3), 1, 1, 1),
}
CASES = [(name, case, False) for name, case in DENSE.items()] + [
    (f"depthwise {name}", case, True) for name, case in DEPTHWISE.items()
]
EPILOGUES = ("none", "bias_relu", "residual", "swish", "cast")


def build(case, is_depthwise, epilogue, mcpu):
    """The group in the layout and with the schedule of the product: inputs, output, calls."""
    from tvm_fuse.relay.base import relay, tvm
    from tvm_fuse.relay.build import Runner, build_fused
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.partition_pass import partition_chains
    from tvm_fuse.relay.target import resolve_target

    data, weight, strides, padding, dilation = case
    random = np.random.default_rng(0)
    weights = (random.standard_normal(weight) / np.sqrt(np.prod(weight[1:]))).astype("float32")
    x = relay.var("x", shape=data)
    body = relay.nn.conv2d(
        x,
        relay.const(weights),
        strides=(strides, strides),
        padding=padding,
        dilation=(dilation, dilation),
        groups=data[1] if is_depthwise else 1,
        channels=weight[0],
        kernel_size=weight[2:],
    )
    arrays = {"x": random.standard_normal(data).astype("float32")}
    sides = (padding,) * 4 if isinstance(padding, int) else padding
    groups = data[1] if is_depthwise else 1
    attrs = ConvAttrs((strides,) * 2, sides, (dilation,) * 2, groups, weight[0], "NCHW", "OIHW", "NCHW")
    want = conv2d(arrays["x"], weights, attrs)
    if epilogue == "bias_relu":
        bias = random.standard_normal((weight[0], 1, 1)).astype("float32")
        body, want = relay.nn.relu(body + relay.const(bias)), np.maximum(want + bias, 0)
    elif epilogue == "residual":
        arrays["r"] = random.standard_normal(want.shape).astype("float32")
        body, want = relay.nn.relu(body + relay.var("r", shape=want.shape)), np.maximum(want + arrays["r"], 0)
    elif epilogue == "swish":
        body, want = body * relay.sigmoid(body), want / (1 + np.exp(-want))
    elif epilogue == "cast":
        body, want = relay.cast(body, "float16"), want.astype("float16")
    target = resolve_target(f"llvm -mcpu={mcpu}")
    module = decide_layout(tvm.IRModule.from_expr(body), target)
    artifact = build_fused(partition_chains(module, target), target)
    return want, Runner(artifact, target).run(arrays, ["y"])["y"], artifact


def check(want, got, epilogue):
    tolerance = 1e-3 if epilogue == "cast" else 1e-5
    np.testing.assert_allclose(got.astype("float64"), want, rtol=tolerance, atol=tolerance)


def this_cpu_runs(mcpu):
    from tvm_fuse.core.cpu import read_cpu

    return read_cpu().float_lanes >= {"cascadelake": 16, "haswell": 8}[mcpu]


@pytest.mark.parametrize("mcpu", ["cascadelake", pytest.param("haswell", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "case", "is_depthwise"), CASES, ids=[name for name, *_ in CASES])
def test_every_shape_by_value(name, case, is_depthwise, mcpu):
    if not this_cpu_runs(mcpu):
        pytest.skip(f"this CPU does not run code for {mcpu}")
    want, got, artifact = build(case, is_depthwise, "bias_relu", mcpu)
    check(want, got, "bias_relu")
    kernels = [call.function for call in artifact.calls if "conv2d" in call.function]
    assert len(kernels) == 1
    assert "NCHWc" in kernels[0]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    ("case", "is_depthwise"),
    [(DENSE["3x3, stride 2, odd"], False), (DENSE["1x1"], False), (DEPTHWISE["prime width"], True)],
    ids=["3x3", "1x1", "depthwise"],
)
def test_what_follows_by_value(case, is_depthwise, epilogue):
    want, got, _ = build(
        case, is_depthwise, epilogue, "x86-64" if not this_cpu_runs("haswell") else "haswell"
    )
    check(want, got, epilogue)
