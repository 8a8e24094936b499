"""Several results of one kernel: on the CPU, on the CUDA emulator, and refused counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.joined import Joined
from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, LLVM, plain_build, relay, run, target
from tvm_fuse.core.errors import InternalError

kernels = Lazy("tvm_fuse.relay.kernels")
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
