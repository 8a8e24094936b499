"""The kernels of a module, and what marking does to them."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, feeds, relay, tvm
from tvm_fuse.core.parity import compare

build = Lazy("tvm_fuse.relay.build")
fuse = Lazy("tvm_fuse.relay.fuse")
kernels = Lazy("tvm_fuse.relay.kernel_functions")
load = Lazy("tvm_fuse.relay.load")
targets = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay


@pytest.fixture(scope="module")
def fused():
    net = Net()
    x = net.input("x", (1, 8, 6, 6))
    for _ in range(3):
        x = relay.nn.relu(relay.nn.bias_add(net.conv2d(x, 8), net.const(8)))
    module = net.module(relay.nn.softmax(relay.nn.batch_flatten(relay.nn.max_pool2d(x, (2, 2), (2, 2)))))
    target = targets.resolve_target("llvm")
    return target, fuse.fuse_model(load.model_from_module(module), target, fuse.FuseOptions(records=None))


def functions_of(module):
    found = []
    relay.analysis.post_order_visit(module["main"], found.append)
    return [expr.op for expr in found if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function)]


def names_of(function):
    return [str(param.name_hint) for param in function.params]


def test_kernels_are_found_once_with_their_calls(fused):
    target, model = fused
    found = [(kernel.name, kernel.weight) for kernel in kernels.find_kernels(model.module, target)]
    assert found[:3] == [("conv2d_bias_relu", 1), ("conv2d_bias_relu", 2), ("max_pool2d", 1)]
    calls = build.build_fused(model.module, target).calls
    assert sum(weight for _, weight in found) == len(calls)


def test_only_the_chosen_kernels_are_marked(fused):
    target, model = fused
    conv = next(k for k in kernels.find_kernels(model.module, target) if k.weight == 2)
    marked = functions_of(kernels.mark_kernels(model.module, target, [conv.digest]))
    names = [names_of(function) for function in marked]
    assert names.count(["tuned0", "tuned1", "tuned2"]) == 2
    assert sum(name[0].startswith("tuned") for name in names) == 2
    again = kernels.find_kernels(kernels.mark_kernels(model.module, target, [conv.digest]), target)
    assert {kernel.digest for kernel in again} == {
        k.digest for k in kernels.find_kernels(model.module, target)
    }


def test_marks_change_no_value(fused):
    target, model = fused
    digests = [kernel.digest for kernel in kernels.find_kernels(model.module, target)]
    artifacts = [
        build.build_fused(module, target)
        for module in (model.module, kernels.mark_kernels(model.module, target, digests))
    ]
    want, got = (build.Runner(one, target).run(feeds(model.module), ()) for one in artifacts)
    assert compare(want, got).passed


def test_marks_are_seen_from_any_tensor_of_the_kernel():
    te = tvm.te
    plain, marked = (te.placeholder((4,), name=name) for name in ("p0", "tuned1"))
    both = te.compute((4,), lambda i: plain[i] + marked[i])
    after = te.compute((4,), lambda i: both[i] * 2)
    assert kernels.is_marked([after])
    assert kernels.is_marked([plain, marked])
    assert not kernels.is_marked([plain, te.placeholder((4,), name="tuned")])
