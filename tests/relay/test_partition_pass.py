"""Groups: what is in them, how they enter the module, and that TVM leaves them alone."""

from __future__ import annotations

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

partition_pass = Lazy("tvm_fuse.relay.partition_pass")
record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay


def partition(module):
    """The partitioned module, its groups' names and the codes of the anchors in no group."""
    module = partition_pass.partition_chains(module)
    outcome = record.last_report()["PartitionChains"]
    layers = [decision for decision in outcome.decisions if decision.rule == "chain"]
    codes = [decision.reason.code for decision in layers if not decision.applied]
    return module, [group.name for group in outcome.details], codes


@pytest.fixture
def net():
    return Net()


def biased(net, x, out=4):
    return relay.add(net.conv2d(x, out), net.const(1, out, 1, 1))


# --- the function of a group ---------------------------------------------------------------------


def test_group_is_a_primitive_function_with_its_constants_outside(net):
    x = net.input("x", (1, 3, 5, 5))
    module, names, _ = partition(net.module(relay.nn.relu(biased(net, x))))
    assert names == ["conv2d_bias_relu"]
    (call,) = group_calls(module)
    attrs = {key: call.op.attrs[key] for key in call.op.attrs.keys()}
    assert attrs == {
        "Primitive": 1,
        "Composite": "tvm_fuse.conv2d_bias_relu",
        "PartitionedFromPattern": "nn.conv2d_add_nn.relu_",
    }
    assert [str(param.name_hint) for param in call.op.params] == ["p0", "p1", "p2"]
    assert [type(argument).__name__ for argument in call.args] == ["Var", "Constant", "Constant"]
    assert not relay.analysis.free_vars(call.op)


def test_only_rank_0_constants_stay_inside(net):
    x = net.input("x", (1, 3, 5, 5))
    y = relay.nn.relu(biased(net, x)) / relay.const(4.0)
    module, names, _ = partition(net.module(y + relay.const(np.ones((1, 1, 1, 1), "float32"))))
    assert names == ["conv2d_bias_relu_divide_add"]
    (call,) = group_calls(module)
    assert len(call.args) == 4  # data, weight, bias, the (1, 1, 1, 1) constant


def test_span_of_the_anchor_stays_on_the_call(net):
    x = net.input("x", (1, 3, 5, 5))
    span = relay.Span(relay.SourceName("conv_7"), 0, 0, 0, 0)
    conv = net.conv2d(x, 4)
    conv = relay.Call(conv.op, conv.args, conv.attrs, None, span)
    module, _, _ = partition(net.module(relay.nn.relu(conv)))
    (call,) = group_calls(module)
    assert str(call.span.source_name.name) == "conv_7"
    assert record.last_report()["PartitionChains"].details[0].anchor_name == "conv_7"


def test_operand_read_twice_is_one_parameter(net):
    x = net.input("x", (1, 4, 5, 5))
    module, names, _ = partition(net.module(relay.nn.relu(net.conv2d(x, 4) + x)))
    assert names == ["conv2d_residual_relu"]
    (call,) = group_calls(module)
    assert [type(argument).__name__ for argument in call.args] == ["Var", "Constant"]


# --- which operators join ------------------------------------------------------------------------

SHAPE = (1, 4, 5, 5)
CODES = {
    "shared": (lambda net, x: shared(net, x), Code.RESULT_SHARED),
    "returned": (lambda net, x: returned(net, x), Code.RESULT_RETURNED),
    "pooled": (lambda net, x: (relay.nn.max_pool2d(net.conv2d(x, 4)),), Code.CHAIN_NO_EPILOGUE),
    "broadcast": (lambda net, x: (net.conv2d(x, 4) + net.const(2, 4, 5, 5),), Code.RESULT_SHAPE_CHANGES),
}


def shared(net, x):
    conv = net.conv2d(x, 4)
    return relay.nn.max_pool2d(relay.nn.relu(conv)), relay.nn.softmax(conv)


def returned(net, x):
    conv = net.conv2d(x, 4)
    return conv, relay.nn.relu(conv)


@pytest.mark.parametrize("case", CODES)
def test_anchor_in_no_chain(net, case):
    make, code = CODES[case]
    before = net.module(*make(net, net.input("x", SHAPE)))
    module, names, codes = partition(before)
    assert (names, codes) == ([], [code])
    assert tvm.ir.structural_equal(module, before)
    assert not record.last_report()["PartitionChains"].changed


def test_dynamic_shape_is_in_no_chain(net):
    x = net.input("x", (relay.Any(), 3, 5, 5))
    _, names, codes = partition(net.module(relay.nn.relu(net.conv2d(x, 4))))
    assert (names, codes) == ([], [Code.CHAIN_DYNAMIC_SHAPE])


def test_residual_goes_to_the_later_convolution(net):
    x = net.input("x", SHAPE)
    left, right = net.conv2d(x, 4), net.conv2d(x, 4, kernel=1)
    module, names, codes = partition(net.module(relay.nn.relu(left + right)))
    assert names == ["conv2d_residual_relu"]
    assert codes == [Code.READER_IN_OTHER_CHAIN]
    assert count_operators(module) == {"nn.conv2d": 2, "add": 1, "nn.relu": 1}


def test_b020_full_size_constant_is_a_residual_not_a_bias(net):
    x = net.input("x", (1, 136, 4, 4))
    module = net.module(net.conv2d(x, 136, 1, groups=4) + net.const(1, 136, 4, 4))
    fused, names, _ = partition(module)
    assert names == ["conv2d_residual"]
    feed = feeds(module)
    (want,), (got,) = run_unfused(module, feed), run(plain_build(fused), feed)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


RESIDUALS = {
    "multiply": ("conv2d_mul_relu", lambda y, x: y * x),
    "maximum": ("conv2d_maximum_relu", lambda y, x: relay.maximum(y, x)),
    "weighted sum": (
        "conv2d_scale_residual_relu",
        lambda y, x: y * relay.const(0.5) + x * relay.const(0.25),
    ),
    "subtract": ("conv2d_subtract_relu", lambda y, x: x - y),
}


def test_b106_other_residuals_are_computed_as_they_are(net):
    """Only a plain add is called residual; the others join by name of what they are, and agree."""
    x = net.input("x", SHAPE)
    module = net.module(*(relay.nn.relu(join(net.conv2d(x, 4), x)) for _, join in RESIDUALS.values()))
    fused, names, _ = partition(module)
    assert names == [name for name, _ in RESIDUALS.values()]
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run(plain_build(fused), feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_b082_diamond_before_a_typed_operator(net):
    """MergeComposite loses types there; the groups made here keep them."""
    x = net.input("x", SHAPE)
    conv = net.conv2d(x, 4)
    diamond = relay.exp(conv) * relay.tanh(conv)
    module = net.module(relay.sequence_mask(diamond, relay.const(np.full(4, 3, "int32")), axis=0))
    fused, names, _ = partition(module)
    assert names == ["conv2d_elementwise"]
    feed = feeds(module)
    (want,), (got,) = run_unfused(module, feed), run(plain_build(fused), feed)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def test_b079_output_used_by_compare_where_and_add(net):
    x = net.input("x", SHAPE)
    conv = net.conv2d(x, 4)
    chosen = relay.where(relay.greater_equal(conv, relay.const(0.0)), conv + relay.const(1.0), conv)
    module = net.module(chosen + relay.const(0.5))
    fused, names, codes = partition(module)
    assert (names, codes) == (["conv2d_elementwise_add"], [])
    feed = feeds(module)
    (want,), (got,) = run_unfused(module, feed), run(plain_build(fused), feed)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


# --- once more, and back -------------------------------------------------------------------------


def scaled(net, x, gate):
    """Chains with a multiply that FoldScaleAxis could move onto the weights."""
    return {
        "scalar after relu": relay.nn.relu(biased(net, x)) * relay.const(0.25),
        "hard sigmoid": relay.clip(biased(net, x) * relay.const(0.2) + relay.const(0.5), 0, 1),
        "gate": biased(net, x) * gate,
        "gate first": gate * biased(net, x),
        "vector": biased(net, x) * net.const(4, 1, 1),
        "one number, rank 4": relay.nn.relu(biased(net, x)) * net.const(1, 1, 1, 1),
        "two in a row": biased(net, x) * relay.const(2.0) * relay.const(3.0),
        "two with a relu between": relay.nn.relu(biased(net, x) * relay.const(2.0)) * relay.const(0.5),
        "leaky": relay.nn.leaky_relu(biased(net, x), 0.1) * relay.const(0.5),
        "no bias": net.conv2d(x, 4) * relay.const(0.5),
        "dense": relay.reshape(
            relay.nn.relu(net.dense(relay.nn.batch_flatten(x), 6)) * relay.const(0.5), (1, 6)
        ),
    }


@pytest.fixture(scope="module")
def scaled_module():
    net = Net()
    x, gate = net.input("x", SHAPE), net.input("gate", (1, 4, 1, 1))
    chains = scaled(net, x, gate)
    return net.module(*chains.values()), tuple(chains)


def test_scales_stay_in_their_kernel_for_cpu(scaled_module):
    """Found in tvm 0.17: FoldScaleAxis (opt_level 3) works inside primitive functions, at every inference."""
    module, names = scaled_module
    feed = feeds(module)
    library = plain_build(partition(module)[0], LLVM, 3)
    calls = kernel_calls(library)
    assert len([call for call in calls if "conv2d" in call or "dense" in call]) == len(names)
    assert not [call for call in calls if "multiply_layout" in call]  # a scaled weight
    for name, want, got in zip(names, run_unfused(module, feed), run(library, feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.cuda_codegen
def test_scales_stay_in_their_kernel_for_cuda(scaled_module):
    """Found in tvm 0.17: a scale folded inside a primitive function gives "Memory verification failed"."""
    module, _ = scaled_module
    fused, groups, _ = partition(module)
    assert len(groups) == count_distinct_groups(fused) == 11
    kernels = cuda_kernels(plain_build(fused, CUDA, 3))
    assert len([kernel for kernel in kernels if "conv2d" in kernel or "dense" in kernel]) == 11


def test_partition_is_idempotent(scaled_module):
    module, _ = scaled_module
    once, names, _ = partition(module)
    twice, names_again, _ = partition(once)
    assert names_again == names
    assert tvm.ir.structural_equal(once, twice)


def test_dissolve_undoes_partition(scaled_module):
    module, _ = scaled_module
    dissolved = partition_pass.dissolve_groups(partition(module)[0])
    assert tvm.ir.structural_equal(dissolved, module)


def test_foreign_functions_stay(net):
    """Primitive and Compiler functions are somebody's decision already."""
    x = net.input("x", SHAPE)
    inner = relay.var("a", shape=SHAPE)
    foreign = relay.Function([inner], relay.nn.relu(net.conv2d(inner, 4)))
    foreign = foreign.with_attr("Primitive", tvm.tir.IntImm("int32", 1)).with_attr("Composite", "dnnl.conv")
    module = net.module(relay.tanh(net.conv2d(relay.Call(foreign, [x]), 4)))
    fused, names, _ = partition(module)
    assert names == ["conv2d_tanh"]
    assert [str(call.op.attrs["Composite"]) for call in group_calls(fused)] == [
        "dnnl.conv",
        "tvm_fuse.conv2d_tanh",
    ]
    dissolved = partition_pass.dissolve_groups(fused)
    assert tvm.ir.structural_equal(dissolved, module)
