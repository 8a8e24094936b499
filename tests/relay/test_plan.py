"""Plans carried out in Relay: groups without a layer, operators before an anchor, steering, files."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    all_group_calls,
    count_operators,
    feeds,
    kernel_calls,
    plain_build,
    relay,
    run,
    run_unfused,
    tvm,
)
from tvm_fuse.core import plan_file
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code
from tvm_fuse.core.replay import replay

layouts = Lazy("tvm_fuse.relay.layout_pass")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")
reader = Lazy("tvm_fuse.relay.read")
targets = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay

SHAPE = (1, 4, 5, 5)


def names():
    return [group.name for group in record.last_report()["PartitionChains"].details]


def values(module, fused):
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run(plain_build(fused), feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def gated(net):
    x, gate = net.input("x", SHAPE), net.input("gate", (1, 4, 1, 1))
    return net.module(relay.nn.relu(net.conv2d(x * gate, 4, 1) + x))


MODELS = {
    "two chains that meet": lambda net, x: relay.tanh(relay.exp(x)) + relay.nn.relu(x * relay.const(2.0)),
    "moves between": lambda net, x: relay.exp(relay.transpose(relay.reshape(x + x, (4, 25)), (1, 0))),
    "concatenation": lambda net, x: relay.nn.relu(relay.concatenate([relay.tanh(x), relay.exp(x)], 1)),
    "into a sum": lambda net, x: relay.sum(relay.exp(x) * x, axis=1),
    "pool and after": lambda net, x: relay.sigmoid(relay.nn.max_pool2d(relay.tanh(x), (2, 2))),
    "global pool and after": lambda net, x: relay.nn.relu(relay.nn.global_avg_pool2d(x)),
    "a number for all": lambda net, x: relay.tanh(relay.broadcast_to(net.const(1, 4, 1, 1), SHAPE) + x),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_groups_without_a_layer(model):
    net = Net()
    module = net.module(MODELS[model](net, net.input("x", SHAPE)))
    fused = partition_pass.partition_chains(module, targets.resolve_target("llvm"))
    assert len(names()) == 1
    assert tvm.ir.structural_equal(partition_pass.dissolve_groups(fused), module)
    values(module, fused)


@pytest.mark.parametrize("model", MODELS)
def test_no_more_kernels_than_tvm_alone(model):
    net = Net()
    module = net.module(MODELS[model](net, net.input("x", SHAPE)))
    fused = partition_pass.partition_chains(module, targets.resolve_target("llvm"))
    assert len(kernel_calls(plain_build(fused))) <= len(kernel_calls(plain_build(module)))


@pytest.mark.parametrize(
    ("target", "groups"), [("llvm", ["conv2d_residual_relu"]), (CUDA, ["multiply_conv2d_residual_relu"])]
)
def test_scale_before_a_convolution(target, groups):
    module = gated(Net())
    fused = partition_pass.partition_chains(module, targets.resolve_target(target))
    assert names() == groups
    assert tvm.ir.structural_equal(partition_pass.dissolve_groups(fused), module)
    values(module, fused)


@pytest.mark.cuda_codegen
@pytest.mark.parametrize("opt_level", [0, 3])
def test_scale_stays_off_the_weights(opt_level):
    """ForwardFoldScaleAxis, which a plain build runs, would scale the weights at every inference."""
    target = targets.resolve_target(CUDA)
    fused = partition_pass.partition_chains(gated(Net()), target)
    with tvm.transform.PassContext(opt_level=opt_level):
        after = relay.transform.FoldScaleAxis()(fused)
    assert tvm.ir.structural_equal(after, fused)
    assert count_operators(fused) == {"multiply": 1, "copy": 1, "nn.conv2d": 1, "add": 1, "nn.relu": 1}


@pytest.mark.parametrize(
    "options", [{"fuse": "none"}, {"skip": ("*",)}, {"only": ("conv2d*",)}, {"max_ops": 2}], ids=str
)
def test_steering(options):
    net = Net()
    x = net.input("x", SHAPE)
    y = relay.nn.relu(relay.nn.bias_add(net.conv2d(x, 4), net.const(4)))
    module = net.module(relay.tanh(relay.exp(relay.nn.max_pool2d(y))))
    fused = partition_pass.partition_chains(module, targets.resolve_target(LLVM), PlanOptions(**options))
    values(module, fused)
    kernels = len(kernel_calls(plain_build(fused)))
    assert kernels == {"fuse": 6, "skip": 6, "only": 4, "max_ops": 4}[next(iter(options))]
    for call in all_group_calls(fused):
        assert str(call.op.attrs["Composite"]).startswith("tvm_fuse.")


def test_a_typing_error_in_an_option():
    with pytest.raises(UsageError, match="'conv3d' fits none of the 1 groups"):
        partition_pass.partition_chains(gated(Net()), None, PlanOptions(skip=("conv3d",)))


def planned(module, target):
    graph = reader.read_function(module["main"]).graph
    options = PlanOptions(target=partition_pass.target_kind(target))
    return plan_file.make_plan_file(graph, plan_chains(graph, options), str(target), options, "tvm-fuse test")


@pytest.mark.parametrize("name", ["llvm", CUDA])
def test_a_plan_from_a_file(name):
    target = targets.resolve_target(name)
    module = gated(Net())
    file = plan_file.from_json(plan_file.to_json(planned(module, target)))
    again = partition_pass.partition_chains(
        module, target, plan=lambda graph: replay(graph, file, str(target))
    )
    assert tvm.ir.structural_equal(again, partition_pass.partition_chains(module, target))


def test_a_plan_of_another_target_is_refused():
    module, cuda = gated(Net()), targets.resolve_target(CUDA)
    file = planned(module, cuda)
    llvm = targets.resolve_target("llvm")
    with pytest.raises(ModelError, match="the target was cuda"):
        partition_pass.partition_chains(module, llvm, plan=lambda graph: replay(graph, file, str(llvm)))
    with pytest.raises(ModelError, match="the target can compute with it"):  # a file that lies about it
        partition_pass.partition_chains(module, llvm, plan=lambda graph: replay(graph, file, str(cuda)))


def test_a_plan_of_another_model_is_refused():
    target = targets.resolve_target("llvm")
    file = planned(gated(Net()), target)
    net = Net()
    x = net.input("x", SHAPE)
    other = net.module(relay.clip(net.conv2d(x, 4, 1), 0, 6))
    with pytest.raises(ModelError, match="the fusion plan is stale: node 1 was input"):
        partition_pass.partition_chains(other, target, plan=lambda graph: replay(graph, file, str(target)))


def test_a_deep_graph_needs_no_deep_stack():
    """2,000 operators in a row, with a stack that a recursion over them would not fit in."""
    net = Net()
    x = y = net.input("x", (4,))
    for index in range(2000):
        y = relay.tanh(y) if index % 2 else relay.add(y, x)
    module = net.module(y)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        fused = partition_pass.partition_chains(module, targets.resolve_target("llvm"))
    finally:
        sys.setrecursionlimit(limit)
    assert len(all_group_calls(fused)) == 8
    assert {
        decision.reason and decision.reason.code
        for decision in record.last_report()["PartitionChains"].decisions
    } == {None}


def test_fuse_ops_cuts_no_group():
    """B086: TVM's limit on the depth of fusion is not for groups that are made."""
    module = gated(Net())
    fused = partition_pass.partition_chains(module)
    with tvm.transform.PassContext(opt_level=2, config={"relay.FuseOps.max_depth": 1}):
        after = relay.transform.FuseOps()(fused)
    (group,) = [call for call in all_group_calls(after) if "Composite" in call.op.attrs]
    assert str(group.op.attrs["Composite"]) == "tvm_fuse.conv2d_residual_relu"
    assert names() == ["conv2d_residual_relu"]
    refused = [
        decision for decision in record.last_report()["PartitionChains"].decisions if not decision.applied
    ]
    assert [decision.reason.code for decision in refused] == [Code.TARGET_CANNOT_JOIN]


@pytest.mark.parametrize("target", ["llvm", CUDA])
def test_b055_a_norm_that_stays_uses_its_stored_statistics(target):
    """A batch norm after an activation, which nothing absorbs: no mean or variance of the data."""
    net = Net()
    x = net.input("x", SHAPE)
    mean, variance = np.array([1, -2, 3, 0.5], "float32"), np.array([0.25, 4, 1, 9], "float32")
    vectors = [
        relay.const(vector) for vector in (np.ones(4, "float32"), np.zeros(4, "float32"), mean, variance)
    ]
    norm = relay.nn.batch_norm(relay.nn.relu(x), *vectors, epsilon=0.0)[0]
    resolved = targets.resolve_target(target)
    fused = partition_pass.partition_chains(layouts.decide_layout(net.module(norm), resolved), resolved)
    assert not {"mean", "variance", "sum"} & set(count_operators(fused))
    feed = feeds(fused)
    want = (np.maximum(feed["x"], 0) - mean[:, None, None]) / np.sqrt(variance)[:, None, None]
    np.testing.assert_allclose(run(plain_build(fused), feed)[0], want, atol=1e-5, rtol=1e-5)
