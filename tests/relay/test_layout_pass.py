"""Layouts before groups: nothing is left for relay.build to rewrite inside a kernel, and names stay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    count_operators,
    feeds,
    group_calls,
    kernel_calls,
    plain_build,
    relay,
    run,
    run_unfused,
    tvm,
)

fold_pass = Lazy("tvm_fuse.relay.fold_pass")
layout_pass = Lazy("tvm_fuse.relay.layout_pass")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")
target = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay

SHAPE = (1, 8, 6, 6)


def decide(module, on=LLVM):
    return layout_pass.decide_layout(module, target.resolve_target(on))


def named(call, name):
    return relay.Call(call.op, call.args, call.attrs, None, relay.Span(relay.SourceName(name), 0, 0, 0, 0))


def two_convolutions(net):
    x = net.input("x", SHAPE)
    y = relay.nn.relu(named(net.conv2d(x, 8), "first") + net.const(1, 8, 1, 1))
    return net.module(relay.nn.relu(named(net.conv2d(y, 8), "second") + net.const(1, 8, 1, 1)))


def test_cpu_layout_is_packed_once():
    module = decide(two_convolutions(Net()))
    counts = count_operators(module)
    assert counts["nn.contrib_conv2d_NCHWc"] == 2
    assert counts["layout_transform"] == 2  # in front and behind, none between, none of a weight
    assert not counts["nn.conv2d"]


@pytest.mark.cuda_codegen
def test_cuda_layout_stays_plain():
    counts = count_operators(decide(two_convolutions(Net()), CUDA))
    assert counts == {"nn.conv2d": 2, "add": 2, "nn.relu": 2}


def test_relay_build_has_nothing_left_to_do():
    """No layout transform inside a kernel: at opt_level 3 the kernels are the groups, as they are."""
    module = decide(two_convolutions(Net()))
    calls = kernel_calls(plain_build(partition_pass.partition_chains(module)))
    assert len(calls) == 4
    inside = [call for call in calls if "conv2d" in call]
    assert len(inside) == 2
    assert not [call for call in inside if "layout_transform" in call]


def test_a_second_run_changes_nothing():
    once = decide(two_convolutions(Net()))
    assert tvm.ir.structural_equal(once, decide(once))


def test_values_stay():
    module = two_convolutions(Net())
    feed = feeds(module)
    got = run(plain_build(decide(module)), feed)[0]
    np.testing.assert_allclose(got, run_unfused(module, feed)[0], atol=1e-5, rtol=1e-5)


def test_names_stay_on_their_convolutions():
    partition_pass.partition_chains(decide(two_convolutions(Net())))
    groups = record.last_report()["PartitionChains"].details
    assert [group.anchor_name for group in groups] == ["first", "second"]


def test_groups_are_dissolved_first():
    module = partition_pass.partition_chains(two_convolutions(Net()))
    assert len(group_calls(module)) == 2
    module = decide(module)
    assert group_calls(module) == []
    assert count_operators(module)["nn.contrib_conv2d_NCHWc"] == 2


def test_context_is_respected_and_restored():
    module = two_convolutions(Net())
    with tvm.transform.PassContext(opt_level=1, disabled_pass=["AlterOpLayout"]) as context:
        plain = decide(module)
        assert tvm.transform.PassContext.current().same_as(context)
    assert count_operators(plain)["nn.conv2d"] == 2


def test_running_scales_are_not_moved_forward():
    """ForwardFoldScaleAxis would divide by the scale: NaN for a gate of zero."""
    net = Net()
    x, gate = net.input("x", SHAPE), net.input("gate", (1, 8, 1, 1))
    module = net.module(net.conv2d(x * gate + net.const(1, 8, 1, 1), 8))
    feed = feeds(module)
    feed["gate"][:] = 0
    fused = partition_pass.partition_chains(decide(module))
    library = plain_build(fused, LLVM, 3, layout_pass.DISABLED_PASSES)
    got = run(library, feed)[0]
    np.testing.assert_allclose(got, run_unfused(module, feed)[0], atol=1e-5, rtol=1e-5)


def test_b046_dense_net_block_at_high_levels():
    """Batch norm before the convolution, a gamma of zero among them: levels agree, none is NaN."""
    net = Net()
    x = net.input("x", SHAPE)

    def layer(y, out):
        vectors = net.norm_values(int(y_channels[0]))
        vectors[0][1], vectors[1][1] = 0.0, 1.0
        normalized = relay.nn.batch_norm(y, *map(relay.const, vectors), epsilon=1e-3)[0]
        return net.conv2d(relay.nn.relu(normalized), out, 1)

    y_channels = [8]
    y = relay.concatenate([x, layer(x, 8)], axis=1)
    y_channels = [16]
    module = net.module(layer(y, 8))
    feed = feeds(module)
    want = run_unfused(module, feed)[0]
    fused = partition_pass.partition_chains(decide(fold_pass.fold_batch_norms(module)))
    for opt_level in (0, 3, 4):
        got = run(plain_build(fused, LLVM, opt_level), feed)[0]
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5, err_msg=str(opt_level))
