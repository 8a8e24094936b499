"""Which convolutions Winograd's algorithm computes, and that the numbers stay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numerics import conv2d
from tvm_fuse.core.graph import ConvAttrs

pytestmark = pytest.mark.relay


def make(data, channels, padding=(1, 1, 1, 1), strides=1, dilation=1, groups=1, weight=None):
    from tvm_fuse.relay.base import relay, tvm

    random = np.random.default_rng(0)
    shape = (channels, data[1] // groups, 3, 3)
    weights = (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")
    bias = random.standard_normal((channels, 1, 1)).astype("float32")
    x = relay.var("x", shape=data)
    conv = relay.nn.conv2d(
        x,
        relay.const(weights) if weight is None else weight,
        padding=padding,
        strides=(strides,) * 2,
        dilation=(dilation,) * 2,
        groups=groups,
        channels=channels,
        kernel_size=(3, 3),
    )
    array = random.standard_normal(data).astype("float32")
    attrs = ConvAttrs((strides,) * 2, padding, (dilation,) * 2, groups, channels, "NCHW", "OIHW", "NCHW")
    want = np.maximum(conv2d(array, weights, attrs) + bias, 0)
    return tvm.IRModule.from_expr(relay.nn.relu(conv + relay.const(bias))), array, want


def build(module, target="llvm"):
    from tvm_fuse.relay.build import build_fused
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.partition_pass import partition_chains
    from tvm_fuse.relay.target import resolve_target

    resolved = resolve_target(target)
    grouped = partition_chains(decide_layout(module, resolved), resolved)
    return build_fused(grouped, resolved), resolved


def uses_winograd(artifact):
    return any("winograd" in call.function for call in artifact.calls)


SHAPES = {
    "even": ((1, 64, 32, 32), 64),
    "tiles over the edge": ((1, 64, 30, 27), 96),
    "one tile high": ((1, 128, 3, 40), 128),
    "batch": ((3, 64, 13, 13), 64),
    "half blocks": ((1, 72, 24, 24), 40),
    "two by two": ((1, 256, 14, 14), 256),
}


OTHER_SIDES = [pytest.param(sides, marks=pytest.mark.slow) for sides in ((0, 0, 0, 0), (0, 2, 1, 0))]


@pytest.mark.parametrize("padding", [(1, 1, 1, 1), *OTHER_SIDES], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_by_value(name, padding):
    from tvm_fuse.relay.build import Runner

    module, array, want = make(*SHAPES[name], padding)
    artifact, target = build(module)
    if min(want.shape[2:]) > 2:
        assert uses_winograd(artifact)
    got = Runner(artifact, target).run({"x": array}, ["y"])["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [2, 4])
def test_both_sizes_of_tiles_by_value(tile, monkeypatch):
    from tvm_fuse.relay import winograd_pass
    from tvm_fuse.relay.build import Runner

    monkeypatch.setattr(
        winograd_pass, "plan_winograd", lambda c, cpu: winograd_pass.make_kernel(c, tile, cpu)
    )
    module, array, want = make((1, 32, 11, 9), 48)
    artifact, target = build(module)
    assert uses_winograd(artifact)
    got = Runner(artifact, target).run({"x": array}, ["y"])["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


OTHERS = {
    "stride": dict(strides=2),
    "dilation": dict(dilation=2, padding=(2, 2, 2, 2)),
    "depthwise": dict(groups=64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_direct_sums(name):
    from tvm_fuse.relay.build import Runner

    module, array, want = make((1, 64, 32, 32), 64, **OTHERS[name])
    artifact, target = build(module)
    assert not uses_winograd(artifact)
    got = Runner(artifact, target).run({"x": array}, ["y"])["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_few_channels_stay_direct_sums():
    assert not uses_winograd(build(make((1, 3, 64, 64), 16)[0])[0])


def test_weights_that_are_no_constants_stay():
    from tvm_fuse.relay.base import relay

    weight = relay.var("w", shape=(64, 64, 3, 3))
    assert not uses_winograd(build(make((1, 64, 32, 32), 64, weight=weight)[0])[0])


@pytest.mark.parametrize("target", ["llvm -keys=cpu"])
def test_other_targets_keep_the_module(target):
    from tvm_fuse.relay.target import resolve_target
    from tvm_fuse.relay.winograd_pass import use_winograd

    module = make((1, 64, 32, 32), 64)[0]
    assert use_winograd(module, resolve_target(target)) is module


def test_the_plan_does_not_know():
    """Digests, names and operations are those of the convolution, whatever computes it."""
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.partition_pass import partition_chains
    from tvm_fuse.relay.target import resolve_target
    from tvm_fuse.relay.winograd_pass import use_winograd

    target = resolve_target("llvm")
    grouped = partition_chains(decide_layout(make((1, 64, 32, 32), 64)[0], target), target)
    chosen = use_winograd(grouped, target)
    assert "conv2d_winograd" in str(chosen)
    assert "conv2d_winograd" not in str(grouped)
    assert names_of(chosen) == names_of(grouped) != []


def names_of(module):
    """The ``Composite`` names of the groups of ``main``."""
    from tvm_fuse.relay.base import relay
    from tvm_fuse.relay.read import composite_name

    found = []
    relay.analysis.post_order_visit(module["main"], lambda expr: found.append(composite_name(expr)))
    return list(filter(None, found))


def test_shared_weights_are_transformed_once(monkeypatch):
    from tvm_fuse.core.winograd import Winograd
    from tvm_fuse.relay.base import relay, tvm
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.target import resolve_target
    from tvm_fuse.relay.winograd_pass import use_winograd

    weight = relay.const(np.ones((64, 64, 3, 3), "float32"))
    body = relay.var("x", shape=(1, 64, 32, 32))
    for _ in range(2):
        body = relay.nn.relu(relay.nn.conv2d(body, weight, padding=(1, 1)))
    target = resolve_target("llvm")
    module = decide_layout(tvm.IRModule.from_expr(body), target)
    made = []
    original = Winograd.transform_weights
    monkeypatch.setattr(Winograd, "transform_weights", lambda *a: made.append(1) or original(*a))
    assert str(use_winograd(module, target)).count("conv2d_winograd") == 2
    assert len(made) == 1
