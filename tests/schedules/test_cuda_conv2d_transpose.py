"""Transposed convolutions on CUDA: resources for three architectures, values by emulation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cuda_groups import ARCHS, assert_healthy, build_group, mostly_slow, run_group
from tests.support.numerics import conv_transpose, max_error
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.graph import ConvAttrs

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

#: Name, data, weight, attributes.
CASES = [
    ("2x2, stride 2", (1, 6, 7, 7), (6, 4, 2, 2), {"strides": (2, 2)}),
    ("4x4, stride 2", (1, 6, 5, 7), (6, 9, 4, 4), {"strides": (2, 2), "padding": (1, 1, 1, 1)}),
    ("3x3, stride 2", (2, 5, 5, 4), (5, 3, 3, 3), {"strides": (2, 2), "padding": (1, 1, 1, 1)}),
    ("odd", (1, 3, 4, 6), (3, 5, 3, 4), {"strides": (1, 3), "padding": (0, 1, 2, 1)}),
    ("one stride", (1, 4, 6, 6), (4, 8, 3, 3), {}),
    ("grouped", (1, 6, 5, 5), (6, 4, 2, 2), {"strides": (2, 2), "groups": 3}),
    ("an even number of rows", (1, 16, 8, 10), (16, 8, 3, 3), {"strides": (2, 2)}),
    ("even rows, 4x4", (1, 16, 8, 12), (16, 8, 4, 4), {"strides": (2, 2)}),
    ("one pixel", (1, 40, 1, 1), (40, 3, 2, 2), {"strides": (2, 2)}),
]


def make(data, weight_shape, attrs):
    """The module of one transposed convolution with bias and ReLU, its input, and the wanted result."""
    rng = np.random.default_rng(0)
    net, attrs = Net(), {"strides": (1, 1), "padding": (0, 0, 0, 0), "groups": 1, **attrs}
    channels = weight_shape[1] * attrs["groups"]
    layouts = {"data_layout": "NCHW", "kernel_layout": "IOHW", "out_layout": "NCHW"}
    plain = ConvAttrs(**attrs, **layouts, dilation=(1, 1), channels=channels)
    x = rng.normal(size=data).astype("float32")
    weight = rng.normal(size=weight_shape).astype("float32")
    bias = rng.normal(size=(1, channels, 1, 1)).astype("float32")
    wanted = np.maximum(conv_transpose(x, weight, plain) + bias, 0)
    y = relay.nn.conv2d_transpose(
        net.input("x", data), relay.const(weight), channels=channels, kernel_size=weight_shape[2:], **attrs
    )
    return net.module(relay.nn.relu(relay.add(y, relay.const(bias)))), {"x": x}, wanted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_one_kernel_without_spills(case, arch):
    module, _, _ = make(*case[1:])
    assert_healthy(build_group(module, arch))


@pytest.mark.parametrize("case", mostly_slow(CASES, {3, 5, 6, 7}), ids=lambda case: case[0])
def test_values(case):
    module, inputs, wanted = make(*case[1:])
    assert max_error(run_group(build_group(module, "sm_80"), inputs), wanted) < 1e-5
