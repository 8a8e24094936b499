"""Values that several kernels compute for themselves: on the CPU, on the CUDA emulator, and on the page."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    all_group_calls,
    feeds,
    plain_build,
    relay,
    run,
    run_unfused,
    target,
    tvm,
)

kernels = Lazy("tvm_fuse.relay.kernels")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def two_layers():
    """A scaled value that two convolutions read; the scale must not move onto the weights."""
    net = Net()
    value = relay.nn.relu(net.input("x", (1, 4, 8, 8))) * net.input("gate", (1, 4, 1, 1))
    return net.module(net.conv2d(value, 8), relay.tanh(net.conv2d(value, 4, 1)))


def two_elementwise():
    net = Net()
    value = relay.nn.relu(net.input("x", (4, 6)) - net.const(6))
    return net.module(relay.transpose(relay.tanh(value)), value * net.input("y", (3, 4, 6)))


def check(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def again(module, on):
    grouped = partition_pass.partition_chains(module, on)
    groups = record.last_report()["PartitionChains"].details
    return grouped, [group for group in groups if group.recomputed]


def test_on_cuda():
    module, on = two_layers(), target.resolve_target(CUDA)
    grouped, groups = again(module, on)
    assert [len(group.recomputed) for group in groups] == [2, 2]
    assert {group.recomputed for group in groups} == {groups[0].recomputed}
    built = kernels.build_kernels(grouped, on)
    assert sorted(built.calls.values()) == [1, 1]
    feed = feeds(module)
    check(run_emulated(built, feed)[0], run_unfused(module, feed))


@pytest.mark.parametrize("on", [LLVM, CUDA])
def test_elementwise(on):
    module = two_elementwise()
    grouped, groups = again(module, target.resolve_target(on))
    assert [group.anchor for group in groups] == [None, None]
    feed = feeds(module)
    if on == LLVM:
        check(run(plain_build(grouped), feed), run_unfused(module, feed))
        return
    built = kernels.build_kernels(grouped, target.resolve_target(on))
    assert sum(built.calls.values()) == 2
    check(run_emulated(built, feed)[0], run_unfused(module, feed))


def test_partitioning_again_gives_the_same():
    on = target.resolve_target(CUDA)
    once, _ = again(two_layers(), on)
    twice = partition_pass.partition_chains(once, on)
    assert len(all_group_calls(once)) == len(all_group_calls(twice))
    assert tvm.ir.structural_equal(once, twice, map_free_vars=True)
