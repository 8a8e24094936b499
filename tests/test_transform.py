"""The public passes as a user runs them: in a Sequential, at any opt_level, before a plain relay.build.

All chains of the table are built together, as one module with many outputs, which takes a tenth of
the time; an assertion names the chain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    count_distinct_groups,
    count_operators,
    cuda_kernels,
    feeds,
    group_calls,
    kernel_calls,
    plain_build,
    relay,
    run,
    run_unfused,
    tvm,
)
from tvm_fuse.core.reason import Code

transform = Lazy("tvm_fuse.transform")
record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay

SHAPE = (1, 8, 6, 6)


def close(got, want, name=""):
    """Within 1e-5: values here are about 1."""
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5, err_msg=name)


# --- the table -----------------------------------------------------------------------------------


class Chain(NamedTuple):
    """How to make the results from a Net and its input, and the groups that must come out.

    ``blocked`` are those of ``FuseChains`` for a CPU where they differ: a blocked convolution multiplies what
    it reads while it copies its rows. ``joined`` are those for CUDA: a gate's parts are one kernel there.
    """

    make: object
    groups: tuple[str, ...]
    blocked: tuple[str, ...] | None = None
    joined: tuple[str, ...] | None = None


def norm_conv(net, x, **attrs):
    return net.batch_norm(net.conv2d(x, 8, **attrs))


def after_conv(activation):
    return lambda net, x: [activation(norm_conv(net, x))]


def relu6_of_x_plus_3(y):
    return relay.clip(y + relay.const(3.0), 0, 6)


def downsample(net, x):
    return [relay.nn.relu(norm_conv(net, x) + norm_conv(net, x, kernel=1))]


def residual_left(net, x):
    """The shortcut is the first operand; the later convolution takes the add."""
    return [relay.nn.relu(relay.nn.relu(norm_conv(net, x, kernel=1)) + norm_conv(net, x))]


def biased(net, x):
    conv = relay.nn.bias_add(net.conv2d(x, 8), net.const(8))
    return [relay.nn.relu(net.batch_norm(conv))]


def expanded_bias(net, x):
    return [relay.nn.relu(net.batch_norm(net.conv2d(x, 8) + net.const(8, 1, 1)))]


def nhwc(net, x):
    data = relay.transpose(x, (0, 2, 3, 1))
    conv = net.conv2d(data, 8, layout="NHWC")
    return [relay.nn.relu(net.batch_norm(conv, axis=3))]


def nhwc_negative_axis(net, x):
    data = relay.transpose(x, (0, 2, 3, 1))
    conv = relay.nn.bias_add(net.conv2d(data, 8, layout="NHWC"), net.const(8), axis=-1)
    return [relay.clip(net.batch_norm(conv, axis=-1), 0, 6)]


def dense(net, x):
    y = relay.nn.bias_add(net.dense(relay.nn.batch_flatten(x), 5), net.const(5))
    return [relay.nn.relu(y)]


def dense_norm(net, x):
    return [relay.nn.relu(net.batch_norm(net.dense(relay.nn.batch_flatten(x), 5)))]


def squeeze_excite(net, x):
    y = norm_conv(net, x)
    y = y * relay.sigmoid(y)
    pooled = relay.nn.global_avg_pool2d(y)
    squeezed = relay.nn.relu(relay.nn.bias_add(net.conv2d(pooled, 4, 1), net.const(4)))
    gate = relay.sigmoid(relay.nn.bias_add(net.conv2d(squeezed, 8, 1), net.const(8)))
    return [norm_conv(net, y * gate, kernel=1)]


def shared(net, x):
    """The batch norm reads a convolution that a pool reads as well: no fold, no chain."""
    conv = net.conv2d(x, 8)
    return [relay.nn.relu(net.batch_norm(conv)), relay.nn.max_pool2d(conv)]


def returned(net, x):
    conv = net.conv2d(x, 8)
    return [conv, relay.nn.relu(net.batch_norm(conv))]


def norm_returned(net, x):
    """The folded value is an output, and what follows reads it from memory."""
    y = norm_conv(net, x)
    return [y, relay.nn.relu(y)]


CHAINS = {
    "hard sigmoid": Chain(
        after_conv(lambda y: relay.clip(y * relay.const(0.2) + relay.const(0.5), 0, 1)),
        ("conv2d_bias_hard_sigmoid",),
    ),
    "residual, right": Chain(
        lambda net, x: [relay.nn.relu(norm_conv(net, x) + x)], ("conv2d_bias_residual_relu",)
    ),
    "depthwise": Chain(
        lambda net, x: [relay.clip(norm_conv(net, x, groups=8), 0, 6)], ("conv2d_bias_relu6",)
    ),
    "NHWC": Chain(nhwc, ("conv2d_bias_relu",)),
    "dense": Chain(dense, ("dense_bias_relu",)),
    "squeeze-excite": Chain(
        squeeze_excite,
        ("conv2d_bias_silu", "conv2d_bias_relu", "conv2d_bias_sigmoid", "conv2d_bias"),
        ("conv2d_bias_silu", "conv2d_bias_relu", "conv2d_bias_sigmoid", "multiply_conv2d_bias"),
        ("conv2d_bias_silu", "conv2d_bias_relu_conv2d_bias_sigmoid", "multiply_conv2d_bias"),
    ),
    "convolution returned": Chain(returned, ()),
}
#: More spellings, and what differs in Relay only: built at one level.
MORE_CHAINS = {
    "relu": Chain(after_conv(lambda y: relay.nn.relu(y)), ("conv2d_bias_relu",)),
    "leaky relu": Chain(after_conv(lambda y: relay.nn.leaky_relu(y, 0.1)), ("conv2d_bias_leaky_relu",)),
    "sigmoid": Chain(after_conv(lambda y: relay.sigmoid(y)), ("conv2d_bias_sigmoid",)),
    "tanh": Chain(after_conv(lambda y: relay.tanh(y)), ("conv2d_bias_tanh",)),
    "hard swish": Chain(
        after_conv(lambda y: y * relu6_of_x_plus_3(y) / relay.const(6.0)), ("conv2d_bias_hard_swish",)
    ),
    "hard swish, by a sixth": Chain(
        after_conv(lambda y: relu6_of_x_plus_3(y) * relay.const(1 / 6) * y), ("conv2d_bias_hard_swish",)
    ),
    "no activation": Chain(after_conv(lambda y: relay.nn.max_pool2d(y)), ("conv2d_bias",)),
    "residual, left": Chain(residual_left, ("conv2d_bias_relu", "conv2d_bias_residual_relu")),
    "residual after relu": Chain(
        lambda net, x: [relay.nn.relu(norm_conv(net, x)) + x], ("conv2d_bias_relu_residual",)
    ),
    "downsample": Chain(downsample, ("conv2d_bias_residual_relu", "conv2d_bias")),
    "grouped": Chain(lambda net, x: [relay.nn.relu(norm_conv(net, x, groups=2))], ("conv2d_bias_relu",)),
    "bias before the norm": Chain(biased, ("conv2d_bias_relu",)),
    "expanded bias before the norm": Chain(expanded_bias, ("conv2d_bias_relu",)),
    "NHWC, negative axes": Chain(nhwc_negative_axis, ("conv2d_bias_relu6",)),
    "dense and norm": Chain(dense_norm, ("dense_bias_relu",)),
    "norm returned": Chain(norm_returned, ("conv2d_bias",)),
    "dilated": Chain(
        lambda net, x: [relay.nn.relu(norm_conv(net, x, dilation=(2, 2), padding=2))], ("conv2d_bias_relu",)
    ),
    "strided": Chain(
        lambda net, x: [relay.nn.relu(norm_conv(net, x, strides=(2, 2)))], ("conv2d_bias_relu",)
    ),
    "1x1": Chain(lambda net, x: [relay.nn.relu(norm_conv(net, x, kernel=1))], ("conv2d_bias_relu",)),
    "two norms": Chain(
        lambda net, x: [relay.nn.relu(net.batch_norm(norm_conv(net, x)))], ("conv2d_bias_relu",)
    ),
    "convolution shared": Chain(shared, ()),
}


class Model(NamedTuple):
    """Chains in one module, with their reference."""

    module: object
    groups: tuple[str, ...]
    blocked: tuple[str, ...]
    joined: tuple[str, ...]
    outputs: tuple[str, ...]
    feed: dict
    want: list


def join(chains):
    net = Net()
    x = net.input("x", SHAPE)
    made = {name: chain.make(net, x) for name, chain in chains.items()}
    module = net.module(*(result for results in made.values() for result in results))
    outputs = tuple(f"{name}, {index}" for name, results in made.items() for index in range(len(results)))
    groups = tuple(group for chain in chains.values() for group in chain.groups)
    blocked = tuple(group for chain in chains.values() for group in chain.blocked or chain.groups)
    joined = tuple(group for chain in chains.values() for group in chain.joined or chain.groups)
    feed = feeds(module)
    return Model(module, groups, blocked, joined, outputs, feed, run_unfused(module, feed))


@pytest.fixture(scope="module")
def model():
    return join(CHAINS)


@pytest.fixture(scope="module")
def more():
    return join(MORE_CHAINS)


def group_names():
    return tuple(group.name for group in record.last_report()["PartitionChains"].details if group.is_layer)


def is_anchor(kernel):
    return "conv2d" in kernel or "dense" in kernel


def check_llvm(model, module, opt_level, disabled=()):
    library = plain_build(module, LLVM, opt_level, disabled)
    for name, want, got in zip(model.outputs, model.want, run(library, model.feed)):
        close(got, want, name)
    return library


def fuse(name, on):
    return transform.PartitionChains() if name == "PartitionChains" else transform.FuseChains(on)


#: Convolutions of CHAINS, and of MORE_CHAINS, that are in no chain: a second reader keeps them out.
OUTSIDE = 1

# --- every level ---------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", range(5))
@pytest.mark.parametrize("pass_name", ["PartitionChains", "FuseChains"])
def test_all_chains_on_cpu(model, pass_name, opt_level):
    """Passes under the level, then relay.build at the level; from 3 on AlterOpLayout works inside groups."""
    passes = tvm.transform.Sequential([transform.FoldBatchNorm(), fuse(pass_name, LLVM)])
    with tvm.transform.PassContext(opt_level=opt_level):
        module = passes(model.module)
    assert sorted(group_names()) == sorted(model.blocked if pass_name == "FuseChains" else model.groups)
    assert len(group_calls(module)) == len(model.groups)
    library = check_llvm(model, module, opt_level)
    anchors = [call for call in kernel_calls(library) if is_anchor(call)]
    assert len(anchors) == len(model.groups) + OUTSIDE


@pytest.mark.cuda_codegen
@pytest.mark.parametrize("opt_level", [2, 3])
@pytest.mark.parametrize("pass_name", ["PartitionChains", "FuseChains"])
def test_all_chains_on_cuda(model, pass_name, opt_level):
    passes = tvm.transform.Sequential([transform.FoldBatchNorm(), fuse(pass_name, CUDA)])
    with tvm.transform.PassContext(opt_level=opt_level):
        module = passes(model.module)
    assert sorted(group_names()) == sorted(model.joined if pass_name == "FuseChains" else model.groups)
    kernels = cuda_kernels(plain_build(module, CUDA, opt_level))
    anchors = [kernel for kernel in kernels if is_anchor(kernel)]
    assert len(anchors) == count_distinct_groups(module) + OUTSIDE
    assert len(set(kernels)) == len(kernels)


def test_more_chains_on_cpu(more):
    module = transform.PartitionChains()(transform.FoldBatchNorm()(more.module))
    assert sorted(group_names()) == sorted(more.groups)
    check_llvm(more, module, 3)


@pytest.mark.cuda_codegen
def test_b103_every_activation_has_a_cuda_kernel(more):
    module = transform.FuseChains(CUDA)(transform.FoldBatchNorm()(more.module))
    assert sorted(group_names()) == sorted(more.groups)
    kernels = cuda_kernels(plain_build(module, CUDA, 3))
    assert len([kernel for kernel in kernels if is_anchor(kernel)]) == count_distinct_groups(module) + OUTSIDE


@pytest.mark.slow
@pytest.mark.parametrize("opt_level", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("pass_name", ["PartitionChains", "FuseChains"])
def test_more_chains_at_every_level(more, pass_name, opt_level):
    with tvm.transform.PassContext(opt_level=opt_level):
        module = fuse(pass_name, LLVM)(transform.FoldBatchNorm()(more.module))
    assert sorted(group_names()) == sorted(more.groups)
    check_llvm(more, module, opt_level)


@pytest.mark.slow
@pytest.mark.cuda_codegen
@pytest.mark.parametrize("opt_level", [0, 2, 4])
@pytest.mark.parametrize("pass_name", ["PartitionChains", "FuseChains"])
def test_more_chains_at_every_level_on_cuda(more, pass_name, opt_level):
    with tvm.transform.PassContext(opt_level=opt_level):
        module = fuse(pass_name, CUDA)(transform.FoldBatchNorm()(more.module))
    anchors = [kernel for kernel in cuda_kernels(plain_build(module, CUDA, opt_level)) if is_anchor(kernel)]
    assert len(anchors) == count_distinct_groups(module) + OUTSIDE


# --- nothing is left of a batch norm -------------------------------------------------------------


def test_batch_norm_leaves_one_add():
    model = join({"relu": MORE_CHAINS["relu"]})
    module = transform.FoldBatchNorm()(model.module)
    assert count_operators(module) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1}
    module = transform.FuseChains(LLVM)(module)
    counts = count_operators(module)
    del counts["layout_transform"]
    assert counts == {"nn.contrib_conv2d_NCHWc": 1, "add": 1, "nn.relu": 1}


def test_batch_norms_leave_no_arithmetic(model):
    module = transform.FoldBatchNorm()(model.module)
    counts = count_operators(module)
    (declined,) = [d for d in record.last_report()["FoldBatchNorm"].decisions if not d.applied]
    assert declined.reason.code is Code.ANCHOR_OUTPUT_RETURNED
    assert counts["nn.batch_norm"] == 1
    assert counts["multiply"] == 3  # the hard sigmoid's slope, silu, the gate
    assert counts["add"] == 8  # one for each of six folds; the hard sigmoid's 0.5; the residual


# --- between TVM's own passes --------------------------------------------------------------------


def mixed(net, x):
    y = relay.clip(norm_conv(net, x) * relay.const(0.2) + relay.const(0.5), 0, 1)
    y = relay.nn.relu(norm_conv(net, y) + x)
    pooled = relay.nn.global_avg_pool2d(norm_conv(net, y, groups=8))
    return relay.nn.relu(net.batch_norm(net.dense(relay.nn.batch_flatten(pooled), 5)))


@pytest.fixture(scope="module")
def small():
    return join({"small": Chain(lambda net, x: [mixed(net, x)], ())})


def fold():
    return transform.FoldBatchNorm()


def group(on=LLVM):
    return transform.PartitionChains() if on is None else transform.FuseChains(on)


def tvm_pass(name, *args):
    return getattr(relay.transform, name)(*args)


#: Anchors of ``small``; the name of the first group depends on whether its 0.5 went into the bias.
ANCHORS = 4
MIXES = {
    "constants first": (lambda: [tvm_pass("FoldConstant"), fold(), group()], ANCHORS),
    "inference simplified after": (
        lambda: [fold(), tvm_pass("SimplifyInference"), tvm_pass("FoldConstant"), group(None)],
        ANCHORS,
    ),
    "inference simplified before": (  # nothing left to fold: TVM's own passes do it
        lambda: [
            tvm_pass("SimplifyInference"),
            fold(),
            tvm_pass("FoldConstant"),
            tvm_pass("BackwardFoldScaleAxis"),
            tvm_pass("FoldConstant"),
            group(None),
        ],
        None,
    ),
    "canonicalized": (
        lambda: [
            fold(),
            tvm_pass("CanonicalizeOps"),
            tvm_pass("EliminateCommonSubexpr"),
            tvm_pass("SimplifyExpr"),
            group(),
        ],
        ANCHORS,
    ),
    "fast math": (lambda: [fold(), tvm_pass("FastMath"), group()], ANCHORS),
    "layout converted": (
        lambda: [fold(), tvm_pass("ConvertLayout", {"nn.conv2d": ["NHWC", "default"]}), group(None)],
        None,
    ),
    "dead code removed after": (lambda: [fold(), group(), tvm_pass("DeadCodeElimination")], ANCHORS),
    "fused by TVM first": (lambda: [fold(), tvm_pass("FuseOps"), group()], 0),
    "fused by TVM after": (lambda: [fold(), group(), tvm_pass("FuseOps")], ANCHORS),
    "chains twice": (lambda: [fold(), group(), group()], ANCHORS),
    "partition, then chains": (lambda: [fold(), group(None), group()], ANCHORS),
    "chains, then partition": (lambda: [fold(), group(), group(None)], ANCHORS),
    "fold twice": (lambda: [fold(), fold(), group()], ANCHORS),
    "fold last": (lambda: [group(), fold()], None),
}


@pytest.mark.parametrize("mix", MIXES)
def test_between_tvm_passes(small, mix):
    passes, groups = MIXES[mix]
    with tvm.transform.PassContext(opt_level=3):
        module = tvm.transform.Sequential(passes())(small.module)
    if groups is not None:
        assert len(group_names()) == groups
    check_llvm(small, module, 3)


def test_chains_twice_is_idempotent(small):
    once = group()(fold()(small.module))
    names, kernels = group_names(), kernel_calls(plain_build(once))
    twice = group()(once)
    assert group_names()[1:] == names[1:]
    assert len(kernel_calls(plain_build(twice))) == len(kernels)
    assert tvm.ir.structural_equal(twice, group()(twice))


@pytest.mark.parametrize(
    "disabled",
    [["AlterOpLayout"], ["BackwardFoldScaleAxis"], ["FoldConstant"], ["SimplifyExpr", "CanonicalizeOps"]],
    ids=",".join,
)
def test_disabled_passes(small, disabled):
    with tvm.transform.PassContext(opt_level=3, disabled_pass=disabled):
        module = tvm.transform.Sequential([fold(), group()])(small.module)
    assert len(group_names()) == ANCHORS
    if disabled == ["AlterOpLayout"]:
        assert not count_operators(module)["layout_transform"]
    check_llvm(small, module, 3, disabled)


def test_our_passes_can_be_disabled_by_name(small):
    names = ["tvm_fuse.FoldBatchNorm", "tvm_fuse.FuseChains"]
    with tvm.transform.PassContext(opt_level=3, disabled_pass=names):
        module = tvm.transform.Sequential([fold(), group()])(small.module)
    assert tvm.ir.structural_equal(module, small.module)


def test_b048_no_context_skips_our_passes(small):
    """Below opt_level 3 TVM skips FoldScaleAxis and says nothing."""
    with tvm.transform.PassContext(opt_level=0):
        module = tvm.transform.Sequential([fold(), group(None)])(small.module)
    assert len(group_calls(module)) == ANCHORS


@pytest.mark.slow
def test_deep_chain_needs_no_recursion():
    net = Net()
    y = norm_conv(net, net.input("x", SHAPE))
    for _ in range(2500):
        y = relay.nn.relu(relay.exp(y))
    module = group()(fold()(net.module(y)))
    assert len(group_calls(module)) == 1


# --- against stock TVM ---------------------------------------------------------------------------


@pytest.mark.parametrize("on", [LLVM, pytest.param(CUDA, marks=pytest.mark.cuda_codegen)])
def test_never_more_kernels_than_stock_tvm(small, on):
    """Counted in calls and, on CUDA, in ``__global__`` functions; ``-m slow`` takes each chain alone."""
    compare_with_stock(small, on)


def compare_with_stock(model, on):
    stock = plain_build(model.module, on, 3)
    fused = plain_build(group(on)(fold()(model.module)), on, 3)
    assert len(kernel_calls(fused)) <= len(kernel_calls(stock))
    assert len(cuda_kernels(fused)) <= len(cuda_kernels(stock))


@pytest.mark.slow
@pytest.mark.cuda_codegen
@pytest.mark.parametrize("name", [*CHAINS, *MORE_CHAINS])
def test_each_chain_against_stock_tvm(name):
    compare_with_stock(join({name: {**CHAINS, **MORE_CHAINS}[name]}), CUDA)
