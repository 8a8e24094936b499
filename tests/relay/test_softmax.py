"""A softmax with what is before and after it: one kernel on CUDA, emulated; on a CPU with what follows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    feeds,
    kernel_calls,
    relay,
    run,
    run_unfused,
    target,
    tvm,
)
from tvm_fuse.core.reason import Code

build = Lazy("tvm_fuse.relay.build")
kernels = Lazy("tvm_fuse.relay.kernels")
partition = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

SHAPE = (2, 3, 50)


def silu(x):
    return relay.multiply(x, relay.sigmoid(x))


#: The kernel's name, and the graph.
CASES = {
    "a mask after it": ("softmax_mul", lambda net, x: relay.nn.softmax(x) * net.input("mask", SHAPE)),
    "a mask of rows": ("softmax_mul", lambda net, x: relay.nn.softmax(x) * net.input("mask", (2, 1, 50))),
    "dropout's scale": ("softmax_scale", lambda net, x: relay.nn.softmax(x) * relay.const(1.25)),
    "a cast": ("softmax_cast", lambda net, x: relay.cast(relay.nn.softmax(x), "float16")),
    "log softmax": ("log_softmax_negative", lambda net, x: relay.negative(relay.nn.log_softmax(x))),
    "a diamond": ("softmax_silu", lambda net, x: silu(relay.nn.softmax(x))),
    "scale, mask and both": (
        "multiply_add_softmax_mul_cast",
        lambda net, x: relay.cast(
            relay.nn.softmax(x * relay.const(0.125) + net.input("mask", (2, 1, 50)))
            * net.input("dropout", SHAPE),
            "float16",
        ),
    ),
}


def make(case):
    net = Net()
    return net.module(CASES[case][1](net, net.input("x", SHAPE)))


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_on_cuda(case):
    module, resolved = make(case), target.resolve_target(CUDA)
    fused = partition.partition_chains(module, resolved)
    assert [group.name for group in record.last_report()["PartitionChains"].details] == [CASES[case][0]]
    assert tvm.ir.structural_equal(partition.dissolve_groups(fused), module)
    built = kernels.build_kernels(fused, resolved)
    assert sum(built.calls.values()) == 1
    inputs = feeds(module)
    (wanted,) = run_unfused(module, inputs)
    (got,), _ = run_emulated(built, inputs)
    assert got.dtype == wanted.dtype
    tolerance = 1e-3 if got.dtype == np.float16 else 1e-6
    assert max_error(got.astype("float64"), wanted.astype("float64")) < tolerance


@pytest.mark.parametrize("case", CASES)
def test_a_cpu_computes_what_follows(case):
    """What comes before is a kernel of its own there."""
    module, resolved = make(case), target.resolve_target(LLVM)
    fused = partition.partition_chains(module, resolved)
    groups = [group.name for group in record.last_report()["PartitionChains"].details]
    before = ["multiply_add"] if case == "scale, mask and both" else []
    assert groups == [*before, CASES[case][0].removeprefix("multiply_add_")]
    built = build.build_fused(fused, resolved).library
    assert len(kernel_calls(built)) == len(groups)
    inputs = feeds(module)
    for want, got in zip(run_unfused(module, inputs), run(built, inputs)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


#: What ends the kernel at the softmax, or keeps it alone.
ENDS = {
    "read twice": (Code.RESULT_SHARED, lambda y: (relay.nn.max_pool1d(y, 2), relay.tanh(y))),
    "returned": (Code.RESULT_RETURNED, lambda y: (y, relay.tanh(y))),
    "a larger shape": (
        Code.RESULT_SHAPE_CHANGES,
        lambda y: (y + relay.const(np.ones((4, 2, 3, 50), "float32")),),
    ),
    "a reshape": (Code.CHAIN_NO_EPILOGUE, lambda y: (relay.tanh(relay.reshape(y, (6, 50))),)),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_does_not_join(case):
    code, after = ENDS[case]
    net = Net()
    module = net.module(*after(relay.nn.softmax(net.input("x", SHAPE))))
    partition.partition_chains(module, target.resolve_target(CUDA))
    decisions = record.last_report()["PartitionChains"].decisions
    assert [decision.reason.code for decision in decisions if decision.rule == "softmax"] == [code]
