"""What a blocked convolution computes while it copies the rows that it reads, on a CPU, by value."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.reason import Code

pytestmark = pytest.mark.relay


def scaled(relay, x):
    return x * relay.var("gate", shape=(x.type_annotation.shape[0], x.type_annotation.shape[1], 1, 1))


#: name -> data, weight, convolution's attributes, what is before it
JOINED = {
    "gate, by rows": ((1, 96, 14, 14), (24, 96, 1, 1), {}, scaled),
    "gate, by channels": ((1, 384, 7, 7), (96, 384, 1, 1), {}, scaled),
    "gate, rows beyond the image": ((1, 16, 5, 31), (8, 16, 1, 1), {}, scaled),
    "gate, images": ((3, 24, 6, 5), (16, 24, 1, 1), {}, scaled),
    "gate, one pixel": ((1, 48, 1, 1), (16, 48, 1, 1), {}, scaled),
    "gate, odd channels": ((1, 6, 9, 9), (10, 6, 1, 1), {}, scaled),
    "relu, 3x3": ((1, 16, 14, 14), (32, 16, 3, 3), {"padding": 1}, lambda r, x: r.nn.relu(x)),
    "relu, 3x3 by Winograd": ((1, 64, 28, 28), (64, 64, 3, 3), {"padding": 1}, lambda r, x: r.nn.relu(x)),
    "not zero at the edge": ((1, 16, 9, 9), (16, 16, 3, 3), {"padding": 1}, lambda r, x: x + r.const(1.0)),
    "edge of Winograd's": (
        (1, 64, 28, 28), (64, 64, 3, 3), {"padding": 1}, lambda r, x: x + r.const(1.0),
    ),
    "stride 2": ((1, 16, 15, 13), (16, 16, 3, 3), {"strides": 2, "padding": 1}, lambda r, x: r.clip(x, 0, 1)),
    "depthwise": (
        (1, 32, 14, 14), (32, 1, 3, 3), {"padding": 1, "groups": 32},
        lambda r, x: r.nn.relu(x + r.const(0.5)),
    ),
    "pad": (
        (1, 16, 8, 8), (16, 16, 3, 3), {},
        lambda r, x: r.nn.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1)), pad_value=2.0),
    ),
    "stem": ((1, 3, 32, 30), (16, 3, 3, 3), {"strides": 2, "padding": 1}, lambda r, x: x),
    "stem of one channel": ((2, 1, 17, 19), (16, 1, 5, 5), {"padding": 2}, lambda r, x: x),
    "slice": (
        (1, 32, 14, 14), (16, 16, 1, 1), {}, lambda r, x: r.strided_slice(x, [0, 16, 0, 0], [1, 32, 14, 14]),
    ),
}  # fmt: skip


def make(case):
    from tvm_fuse.relay.base import relay, tvm

    data, weight, attrs, before = case
    random = np.random.default_rng(0)
    weights = (random.standard_normal(weight) / np.sqrt(np.prod(weight[1:]))).astype("float32")
    value = before(relay, relay.var("x", shape=data))
    body = relay.nn.conv2d(value, relay.const(weights), channels=weight[0], kernel_size=weight[2:], **attrs)
    return tvm.transform.Sequential([relay.transform.InferType()])(
        tvm.IRModule.from_expr(relay.nn.relu(body))
    )


def group(module, target):
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.partition_pass import partition_chains
    from tvm_fuse.relay.record import last_report

    grouped = partition_chains(decide_layout(module, target), target)
    return grouped, last_report()["PartitionChains"]


def run(module, target, arrays):
    from tvm_fuse.relay.build import Runner, build_fused

    artifact = build_fused(module, target)
    return Runner(artifact, target).run(arrays, ["y"])["y"], [call.function for call in artifact.calls]


@pytest.mark.parametrize("name", JOINED)
def test_joins_and_keeps_the_value(name):
    from tvm_fuse.relay.target import resolve_target

    module = make(JOINED[name])
    random = np.random.default_rng(1)
    arrays = {
        str(parameter.name_hint): random.standard_normal(
            [int(size) for size in parameter.checked_type.shape]
        ).astype("float32")
        for parameter in module["main"].params
    }
    grouped, record = group(module, resolve_target("llvm"))
    got, kernels = run(grouped, resolve_target("llvm"), arrays)
    want, _ = run(module, resolve_target("llvm -keys=cpu"), arrays)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    (layer,) = (made for made in record.details if made.is_layer)
    assert layer.prologue
    assert len([kernel for kernel in kernels if "conv2d" in kernel]) == 1
    assert not [kernel for kernel in kernels if "conv2d" not in kernel and "layout_transform" not in kernel]


def grouped_conv():
    return (1, 32, 8, 8), (32, 16, 3, 3), {"groups": 2, "padding": 1}, lambda r, x: r.nn.relu(x)


def nhwc_conv():
    from tvm_fuse.relay.base import relay, tvm

    x = relay.var("x", shape=(1, 8, 8, 16))
    weights = relay.const(np.ones((3, 3, 16, 16), "float32"))
    body = relay.nn.conv2d(
        relay.nn.relu(x), weights, channels=16, kernel_size=(3, 3), data_layout="NHWC", kernel_layout="HWIO"
    )
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.nn.relu(body)))


def double_conv():
    from tvm_fuse.relay.base import relay, tvm

    x = relay.var("x", shape=(1, 16, 8, 8), dtype="float64")
    body = relay.nn.conv2d(
        x, relay.const(np.ones((16, 16, 1, 1)), "float64"), channels=16, kernel_size=(1, 1)
    )
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.nn.relu(body)))


@pytest.mark.parametrize(
    "made", [lambda: make(grouped_conv()), nhwc_conv, double_conv], ids=["groups", "NHWC", "float64"]
)
def test_refused_where_the_schedule_is_of_tvm(made):
    from tvm_fuse.relay.target import resolve_target

    _, record = group(made(), resolve_target("llvm"))
    (layer,) = (made for made in record.details if made.is_layer)
    assert not layer.prologue
    reasons = [decision.reason for decision in record.decisions if decision.reason is not None]
    assert Code.TARGET_CANNOT_JOIN in [reason.code for reason in reasons]
