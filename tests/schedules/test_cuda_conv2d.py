"""Convolutions on CUDA: resources for three architectures, values by emulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_groups import ARCHS, assert_healthy, build_group, mostly_slow, run_group
from tests.support.numerics import conv2d, max_error
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.graph import ConvAttrs

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


@dataclass(frozen=True)
class Conv:
    name: str
    data: tuple
    weight: tuple
    rule: str  # how its kernel is recognised: the stage in it
    attrs: dict[str, Any] = field(default_factory=dict)

    def full_attrs(self):
        return {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, **self.attrs}


BLOCKED, NARROW, DEPTHWISE, GENERIC = "product_left", "__shfl", "depthwise_data", "compute_local"

CONVS = [
    Conv("1x1", (1, 32, 14, 14), (64, 32, 1, 1), BLOCKED),
    Conv("1x1 odd", (1, 17, 7, 7), (33, 17, 1, 1), BLOCKED),
    Conv("1x1 strided", (1, 16, 14, 14), (32, 16, 1, 1), BLOCKED, {"strides": (2, 2)}),
    Conv("3x3", (1, 16, 14, 14), (32, 16, 3, 3), BLOCKED, {"padding": (1, 1, 1, 1)}),
    Conv("3x3 strided", (1, 8, 15, 13), (16, 8, 3, 3), BLOCKED, {"padding": (1, 1, 1, 1), "strides": (2, 2)}),
    Conv("7x7", (1, 3, 30, 30), (16, 3, 7, 7), BLOCKED, {"padding": (3, 3, 3, 3), "strides": (2, 2)}),
    Conv("batch", (3, 5, 9, 9), (7, 5, 3, 3), BLOCKED, {"padding": (1, 1, 1, 1)}),
    Conv(
        "everything odd", (2, 5, 11, 13), (9, 5, 3, 2), BLOCKED,
        {"padding": (0, 1, 2, 1), "strides": (2, 1), "dilation": (1, 2)},
    ),
    Conv("wide", (1, 4, 3, 131), (8, 4, 1, 3), BLOCKED, {"padding": (0, 1, 0, 1)}),
    Conv("grouped", (1, 24, 14, 14), (48, 6, 3, 3), BLOCKED, {"padding": (1, 1, 1, 1), "groups": 4}),
    Conv("grouped, odd", (2, 9, 7, 7), (15, 3, 3, 3), BLOCKED, {"groups": 3}),
    Conv("one pixel", (1, 96, 1, 1), (24, 96, 1, 1), NARROW),
    Conv("few pixels", (2, 19, 5, 3), (7, 19, 3, 3), NARROW, {"groups": 1}),
    Conv("few pixels, grouped", (1, 12, 3, 3), (8, 3, 2, 2), NARROW, {"groups": 4}),
    Conv("depthwise", (1, 12, 14, 14), (12, 1, 3, 3), DEPTHWISE, {"padding": (1, 1, 1, 1), "groups": 12}),
    Conv("depthwise 5x5", (1, 6, 7, 7), (6, 1, 5, 5), DEPTHWISE, {"padding": (2, 2, 2, 2), "groups": 6}),
    Conv(
        "depthwise, odd", (2, 3, 17, 13), (3, 1, 3, 2), DEPTHWISE,
        {"padding": (0, 1, 2, 1), "strides": (1, 2), "dilation": (2, 1), "groups": 3},
    ),
    Conv("multiplier", (1, 5, 9, 9), (15, 1, 3, 3), DEPTHWISE, {"groups": 5}),
    Conv("a tiny depthwise", (1, 3, 2, 2), (3, 1, 3, 3), GENERIC, {"padding": (1, 1, 1, 1), "groups": 3}),
]  # fmt: skip


def make(conv, seed=0):
    """The module of one convolution with its whole epilogue, its inputs, and the wanted result."""
    net, rng, attrs = Net(seed), np.random.default_rng(seed), conv.full_attrs()
    plain = ConvAttrs(
        **attrs, channels=conv.weight[0], data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW"
    )
    x = rng.normal(size=conv.data).astype("float32")
    weight = rng.normal(size=conv.weight, scale=np.prod(conv.weight[1:]) ** -0.5).astype("float32")
    bias = rng.normal(size=(1, conv.weight[0], 1, 1)).astype("float32")
    y = conv2d(x.astype("float64"), weight.astype("float64"), plain)
    residual = rng.normal(size=y.shape).astype("float32")
    y = y + bias
    wanted = np.maximum(y / (1 + np.exp(-y)) + residual, 0)

    channels, *size = conv.weight[0], *conv.weight[2:]
    z = relay.nn.conv2d(
        net.input("x", conv.data), relay.const(weight), channels=channels, kernel_size=size, **attrs
    )
    z = relay.add(z, relay.const(bias))
    z = relay.nn.relu(relay.add(relay.multiply(z, relay.sigmoid(z)), net.input("r", residual.shape)))
    return net.module(z), {"x": x, "r": residual}, wanted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("conv", CONVS, ids=lambda conv: conv.name)
def test_one_kernel_without_spills(conv, arch):
    module, _, _ = make(conv)
    group = build_group(module, arch)
    assert_healthy(group)
    assert conv.rule in group.build.artifact.cuda_source or conv.rule == GENERIC


@pytest.mark.parametrize(
    "conv", mostly_slow(CONVS, {1, 4, 7, 10, 13, 16, 17, 18}), ids=lambda conv: conv.name
)
def test_values(conv):
    module, inputs, wanted = make(conv)
    got = run_group(build_group(module, "sm_80"), inputs)
    assert max_error(got, wanted) < 1e-5
