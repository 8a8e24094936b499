"""Several results of one kernel: on the CPU, on the CUDA emulator, as planned, and refused counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.joined import Joined
from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    feeds,
    plain_build,
    relay,
    run,
    run_unfused,
    target,
    texts,
    tvm,
)
from tvm_fuse.core.errors import InternalError

kernels = Lazy("tvm_fuse.relay.kernels")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")
together = Lazy("tvm_fuse.relay.together")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


def make(count):
    """The first so many of some functions of one tensor, and what they should be."""
    x = np.random.default_rng(0).normal(size=(3, 7, 50)).astype("float32")
    group = Joined()
    y = group.input("x", x)
    y = relay.reverse(y, 2)
    results = [relay.tanh(y), relay.cast(relay.multiply(y, relay.const(100.0)), "int32"), relay.nn.relu(y)]
    x = x[:, :, ::-1]
    wanted = [np.tanh(x), (x * np.float32(100)).astype("int32"), np.maximum(x, 0)]
    return group.module(together.together(results[:count])), group.values, wanted[:count]


def check(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_one_cuda_kernel(count):
    module, inputs, wanted = make(count)
    built = kernels.build_kernels(module, target.resolve_target(CUDA))
    assert list(built.calls.values()) == [1]
    check(run_emulated(built, inputs)[0], wanted)


def test_on_a_cpu():
    module, inputs, wanted = make(3)
    check(run(plain_build(module, LLVM), inputs), wanted)


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_or_too_many(count):
    with pytest.raises(InternalError, match=f"wanted 2 to 8, got {count}"):
        together.together([relay.var("x", shape=(1,))] * count)


# --- as planned ------------------------------------------------------------------------------------


def model():
    """Three elementwise readers of one value, of which a layer reads one, and one waits for that layer."""
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    late = x + net.conv2d(relay.tanh(x), 4)
    return net.module(late, relay.nn.relu(x), relay.cast(relay.round(x * relay.const(9.0)), "int32"))


@pytest.fixture(params=[LLVM, CUDA])
def on(request):
    return target.resolve_target(request.param)


def test_planned(on):
    """The readers that need nothing of one another: tanh, relu and cast; the sum is the layer's."""
    module = model()
    grouped = partition_pass.partition_chains(module, on)
    (group,) = [one for one in record.last_report()["PartitionChains"].details if one.also]
    assert len(group.results) == 3
    feed = feeds(module)
    wanted = run_unfused(module, feed)
    if on.kind.name == "llvm":
        check(run(plain_build(grouped), feed), wanted)
    else:
        built = kernels.build_kernels(grouped, on)
        assert sorted(built.calls.values()) == [1, 1]
        check(run_emulated(built, feed)[0], wanted)


def test_partitioning_again_gives_the_same(on):
    once = partition_pass.partition_chains(model(), on)
    assert "tvm_fuse.together3" in texts(once)
    again = partition_pass.partition_chains(once, on)
    assert tvm.ir.structural_equal(once, again, map_free_vars=True)
    plain = partition_pass.dissolve_groups(once)
    assert tvm.ir.structural_equal(plain, model(), map_free_vars=True)


def test_a_result_that_waits():
    """A kernel stands where all that it reads is there, though one of its results comes earlier."""
    net = Net()
    x = net.input("x", (2, 5))
    late = relay.add(x, relay.reverse(relay.sort(relay.nn.relu(x)), 1))
    module = net.module(relay.nn.softmax(relay.tanh(x)), late)
    grouped = partition_pass.partition_chains(module, target.resolve_target(LLVM))
    assert "tvm_fuse.together2" in texts(grouped)
    feed = feeds(module)
    check(run(plain_build(grouped), feed), run_unfused(module, feed))
