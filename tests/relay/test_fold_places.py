"""Every place that a batch norm may have in a Relay graph, and every way to write it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_folds import check, check_refused, values
from tests.support.relay_graphs import (
    Net,
    count_operators,
    feeds,
    infer,
    plain_build,
    relay,
    run,
    run_unfused,
    tvm,
)
from tvm_fuse.core.reason import Code

fold_pass = Lazy("tvm_fuse.relay.fold_pass")
record = Lazy("tvm_fuse.relay.record")
pipeline = Lazy("tvm_fuse.pipeline")
transform = Lazy("tvm_fuse.transform")

pytestmark = pytest.mark.relay

C = 4
SHAPE = (C, C, C, C)  # any axis could be the channel


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def x(net):
    return net.input("x", SHAPE)


def norm(x, values, **attrs):
    return relay.nn.batch_norm(x, *(relay.const(np.asarray(v, "float32")) for v in values), **attrs)[0]


# --- ways to write it ------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 2, 3, -1])
def test_an_axis_that_is_no_channel(net, x, axis):
    check_refused(net.module(net.batch_norm(net.conv2d(x, C), axis=axis)), Code.BN_AXIS_NOT_CHANNEL)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_gamma_and_beta_that_are_not_used(net, x, where, scale, center):
    """Their constants mislead: NaN and infinity."""
    gamma, beta, mean, var = net.norm_values(C)
    vectors = gamma if scale else gamma * np.nan, beta if center else beta * np.inf, mean, var

    def bn(y):
        return norm(y, vectors, scale=scale, center=center)

    layer = net.conv2d(bn(x), C, padding=0) if where == "after" else bn(net.conv2d(x, C))
    check(net.module(layer))


def test_parameters_that_are_not_bound(net, x):
    vectors = [net.input(name, (C,)) for name in ("gamma", "beta", "mean", "var")]
    module = net.module(relay.nn.batch_norm(net.conv2d(x, C), *vectors)[0])
    check_refused(module, Code.BN_PARAMETERS_NOT_CONSTANT)


TUPLES = {
    "statistics too": lambda bn: [bn[0], bn[1]],
    "the whole tuple": lambda bn: [bn.astuple()],
    "a statistic alone": lambda bn: [bn[2]],
}


@pytest.mark.parametrize("case", TUPLES)
def test_statistics_that_are_read(net, x, case):
    vectors = [relay.const(v) for v in net.norm_values(C)]
    bn = relay.nn.batch_norm(net.conv2d(x, C), *vectors)
    check_refused(net.module(*TUPLES[case](bn)), Code.BN_STATISTICS_USED)


def test_the_result_as_one_of_several_outputs_and_twice(net, x):
    y = net.batch_norm(net.conv2d(x, C))
    folded = check(net.module(y, x, y, relay.nn.relu(y)))
    fields = folded["main"].body.fields
    assert fields[0].same_as(fields[2])


def test_a_bias_that_folds_to_zero_leaves_no_add(net, x):
    gamma, _, _, var = net.norm_values(C)
    zero = np.zeros(C, "float32")
    folded = check(net.module(norm(net.conv2d(x, C), (gamma, zero, zero, var))), adds=0)
    assert count_operators(folded) == {"nn.conv2d": 1}
    bias = relay.const(np.float32([1, 2, 3, 4]))
    net = Net()
    y = relay.nn.bias_add(net.conv2d(net.input("x", SHAPE), C), bias)
    folded = check(net.module(norm(y, (gamma, zero, [1, 2, 3, 4], var))), adds=0)
    assert count_operators(folded) == {"nn.conv2d": 1}


def test_one_weight_of_two_layers_is_copied(net, x):
    weight = net.weight(C, C, 3, 3, fan_in=36)
    y = relay.nn.relu(net.batch_norm(net.conv2d(x, C, weight=weight)))
    plain = net.conv2d(y, C, weight=weight)
    folded = check(net.module(net.batch_norm(net.conv2d(y, C, weight=weight)), plain), folds=2)
    weights = []
    relay.analysis.post_order_visit(
        folded["main"],
        lambda e: (
            weights.append(e.args[1]) if isinstance(e, relay.Call) and e.op.name == "nn.conv2d" else None
        ),
    )
    arrays = [w.data.numpy() for w in weights]
    assert not any(np.array_equal(a, b) for a, b in ((arrays[0], arrays[1]), (arrays[1], arrays[2])))
    assert sum(np.array_equal(array, weight.data.numpy()) for array in arrays) == 1


# --- between layer and batch norm --------------------------------------------------------------------

BETWEEN = {
    "transpose": (lambda y: relay.transpose(y, (0, 2, 3, 1)), 3),
    "transpose, other way": (lambda y: relay.transpose(y, (1, 3, 0, 2)), 0),
    "transpose, last": (lambda y: relay.transpose(y, (0, 2, 3, 1)), -1),
    "reversed": (lambda y: relay.transpose(y), 2),
    "reshape": (lambda y: relay.reshape(y, (C, C, C * C)), 1),
    "reshape, split": (lambda y: relay.reshape(y, (2, 2, C, C, 2, 2)), 2),
    "reshape, a part of the channel": (lambda y: relay.reshape(y, (C, 2, 2, C, C)), 2),
    "expand_dims": (lambda y: relay.expand_dims(y, 1, 2), 3),
    "squeeze": (lambda y: relay.squeeze(relay.expand_dims(y, 4), [4]), 1),
    "layout_transform": (lambda y: relay.layout_transform(y, "NCHW", "NHWC"), 3),
    "there and back": (
        lambda y: relay.layout_transform(relay.layout_transform(y, "NCHW", "NCHW2c"), "NCHW2c", "NCHW"), 1,
    ),
    "scale and shift": (lambda y: y * relay.const(2.0) - relay.const(np.ones((C, 1, 1), "float32")), 1),
}  # fmt: skip


@pytest.mark.parametrize("case", BETWEEN)
def test_between(net, x, case):
    move, axis = BETWEEN[case]
    y = move(relay.nn.bias_add(net.conv2d(x, C), net.const(C)))
    size = int(infer(y).shape[axis])
    vectors = [relay.const(v) for v in net.norm_values(size)]
    check(net.module(relay.nn.batch_norm(y, *vectors, axis=axis)[0]))


MIXING = {
    "transposed away": (lambda y: relay.transpose(y, (0, 2, 3, 1)), 1, Code.BN_AXIS_NOT_CHANNEL),
    "image instead of channels": (lambda y: relay.reshape(y, (C, C * C, C)), 2, Code.BN_AXIS_NOT_CHANNEL),
    "flattened": (lambda y: relay.nn.batch_flatten(y), 1, Code.BN_AXIS_NOT_CHANNEL),
    "shuffled": (
        lambda y: relay.reshape(relay.transpose(relay.reshape(y, (C, 2, 2, C, C)), (0, 2, 1, 3, 4)), SHAPE),
        1,
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "reversed": (lambda y: relay.reverse(y, 1), 1, Code.BN_PRODUCER_UNSUPPORTED),
    "pooled": (lambda y: relay.nn.avg_pool2d(y), 1, Code.BN_PRODUCER_UNSUPPORTED),
    "padded": (lambda y: relay.nn.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1))), 1, Code.BN_PRODUCER_UNSUPPORTED),
    "activated": (lambda y: relay.nn.leaky_relu(y, 0.1), 1, Code.BN_AFTER_ACTIVATION),
    "clipped": (lambda y: relay.clip(y, 0, 6), 1, Code.BN_AFTER_ACTIVATION),
    "softmax": (lambda y: relay.nn.softmax(y, 1), 1, Code.BN_PRODUCER_UNSUPPORTED),
    "doubled by the data": (lambda y: y * y, 1, Code.BN_PRODUCER_UNSUPPORTED),
}


@pytest.mark.parametrize("case", MIXING)
def test_between_that_does_not_commute(net, x, case):
    move, axis, code = MIXING[case]
    y = move(net.conv2d(x, C))
    vectors = [relay.const(v) for v in net.norm_values(int(infer(y).shape[axis]))]
    check_refused(net.module(relay.nn.batch_norm(y, *vectors, axis=axis)[0]), code)


@pytest.mark.parametrize("name", ["instance_norm", "layer_norm", "group_norm"])
def test_normalization_of_data(net, x, name):
    attrs = {"group_norm": {"num_groups": 2}, "layer_norm": {"axis": 1}}.get(name, {})
    y = getattr(relay.nn, name)(net.conv2d(x, C), net.const(C), net.const(C), **attrs)
    reason = check_refused(net.module(y), Code.NORMALIZATION_OF_DATA)
    assert reason.got == f"nn.{name}"


# --- joins -------------------------------------------------------------------------------------------


def test_after_a_concatenation(net, x):
    """Three layers of different kinds and sizes; each takes its channels' part."""
    parts = [
        relay.nn.bias_add(net.conv2d(x, 6), net.const(6)),
        net.conv2d(net.input("y", SHAPE), C, groups=4),
        relay.nn.conv2d_transpose(x, net.weight(C, 2, 1, 1, fan_in=C), channels=2, kernel_size=(1, 1)),
    ]
    check(net.module(net.batch_norm(relay.concatenate(parts, 1))), adds=3)


def test_after_a_concatenation_along_another_axis(net, x):
    parts = [net.conv2d(x, C), net.conv2d(net.input("y", SHAPE), C)]
    check(net.module(net.batch_norm(relay.concatenate(parts, -1))), adds=2)


def test_after_a_residual_add_of_layers(net, x):
    first = relay.nn.bias_add(net.conv2d(x, C), net.const(C))
    second = relay.nn.bias_add(net.conv2d(x, C, 1), net.const(C))
    check(net.module(net.batch_norm(first + second)), adds=3)


def test_joins_inside_joins(net, x):
    pair = relay.concatenate([net.conv2d(x, 2), net.conv2d(x, 2, 1)], 1)
    check(net.module(net.batch_norm(pair + net.conv2d(x, C))), adds=3)


JOINS = {
    "an input": (lambda net, x: net.conv2d(x, C) + x, Code.BN_PRODUCER_UNSUPPORTED),
    "an activation": (
        lambda net, x: relay.concatenate([net.conv2d(x, 2), relay.nn.relu(net.conv2d(x, 2))], 1),
        Code.BN_AFTER_ACTIVATION,
    ),
    "a layer twice": (lambda net, x: twice(net.conv2d(x, C)), Code.ANCHOR_OUTPUT_SHARED),
    "a layer twice, joined": (
        lambda net, x: (lambda y: relay.concatenate([y, y], 1))(net.conv2d(x, 2)), Code.ANCHOR_OUTPUT_SHARED,
    ),
    "a variable weight": (
        lambda net, x: net.conv2d(x, C) + net.conv2d(x, C, weight=net.input("w", (C, C, 3, 3))),
        Code.WEIGHT_NOT_CONSTANT,
    ),
}  # fmt: skip


def twice(y):
    return relay.Call(relay.op.get("add"), [y, y])


@pytest.mark.parametrize("case", JOINS)
def test_a_join_with(net, x, case):
    """One part that cannot take its share, and none does."""
    make, code = JOINS[case]
    check_refused(net.module(net.batch_norm(make(net, x))), code)


# --- before a layer ------------------------------------------------------------------------------------

AFTER = {
    "conv2d": (lambda net, y: net.conv2d(y, C, padding=0), 1),
    "conv2d, padded": (lambda net, y: net.conv2d(y, C), 1),
    "conv2d, strided, dilated": (
        lambda net, y: net.conv2d(y, C, strides=(2, 1), dilation=(1, 2), padding=2), 1,
    ),
    "conv2d, uneven padding": (
        lambda net, y: relay.nn.conv2d(
            y, net.const(C, C, 3, 2), channels=C, kernel_size=(3, 2), padding=(0, 1, 2, 0)
        ), 1,
    ),
    "conv2d, groups": (lambda net, y: net.conv2d(y, C, groups=2), 1),
    "conv2d, depthwise": (lambda net, y: net.conv2d(y, C, groups=4), 1),
    "conv2d, multiplier": (lambda net, y: net.conv2d(y, 8, groups=4), 1),
    "conv2d with a bias": (lambda net, y: relay.nn.bias_add(net.conv2d(y, C), net.const(C)), 1),
    "conv2d, NHWC": (lambda net, y: net.conv2d(y, C, layout="NHWC"), 3),
    "conv2d, NHWC, depthwise": (lambda net, y: net.conv2d(y, C, layout="NHWC", groups=4), 3),
    "dense": (lambda net, y: net.dense(y, C), 3),
    "flattened dense": (lambda net, y: net.dense(relay.nn.batch_flatten(y), C), 1),
    "transposed conv2d": (lambda net, y: net.conv2d(relay.transpose(y, (0, 3, 1, 2)), C), 3),
}  # fmt: skip


@pytest.mark.parametrize("case", AFTER)
def test_before(net, x, case):
    make, axis = AFTER[case]
    check(net.module(make(net, net.batch_norm(x, axis=axis))))


@pytest.mark.parametrize("rank", [1, 3])
def test_before_padded_layers_of_other_ranks(rank):
    net = Net()
    x = net.input("x", (2, C, 3, 4, 5)[: 2 + rank])
    operator = getattr(relay.nn, f"conv{rank}d")
    weight = net.weight(C, C, 3, 2, 3, fan_in=36) if rank == 3 else net.weight(C, C, 3, fan_in=12)
    kernel = (3, 2, 3)[:rank]
    y = operator(
        net.batch_norm(x), weight, channels=C, kernel_size=kernel, padding=(1, 0, 2, 0, 1, 1)[: 2 * rank]
    )
    check(net.module(y))


def test_between_two_layers_the_one_before_takes_it(net, x):
    folded = check(net.module(net.conv2d(net.batch_norm(net.conv2d(x, C)), C)))
    assert record.last_report()["FoldBatchNorm"].details == ()  # of the second fold, which check made
    assert isinstance(folded["main"].body, relay.Call)
    assert folded["main"].body.op.name == "nn.conv2d"


def test_on_both_sides_of_a_padded_layer(net, x):
    """As in nets that normalize their input: both fold, and one map over the output is left."""
    folded = check(
        net.module(relay.nn.relu(net.batch_norm(net.conv2d(net.batch_norm(x), C)))), folds=2, adds=1
    )
    assert set(count_operators(folded)) == {"nn.conv2d", "add", "nn.relu"}


def test_before_two_layers(net, x):
    y = net.batch_norm(x)
    check(net.module(net.conv2d(y, C), net.conv2d(y, 2, 1)), adds=2)


@pytest.mark.parametrize("gamma", [0.0, -2.0], ids=["zero", "negative"])
@pytest.mark.parametrize("padding", [0, 1])
def test_gammas_of_any_sign(net, x, gamma, padding):
    _, beta, mean, var = net.norm_values(C)
    vectors = [gamma, 1.5, gamma, 0.0], np.abs(beta), mean, var
    check(net.module(net.conv2d(norm(x, vectors), C, padding=padding)))
    net = Net()
    check(net.module(relay.nn.relu(norm(net.conv2d(net.input("x", SHAPE), C), vectors))))


def test_a_scale_without_shift_passes_any_padding(net, x):
    vectors = np.arange(1, 5), np.zeros(4), np.zeros(4), np.ones(4)
    padded = relay.nn.pad(norm(x, vectors), ((0, 0), (0, 0), (1, 0), (2, 1)))
    y = relay.nn.conv2d_transpose(norm(x, vectors), net.const(C, C, 3, 3), channels=C, kernel_size=(3, 3))
    check(net.module(net.conv2d(padded, C, padding=0), y), folds=2, adds=0)


PADDED = {
    "explicit padding": lambda net, y: net.conv2d(
        relay.nn.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1))), C, padding=0
    ),
    "transposed": lambda net, y: relay.nn.conv2d_transpose(
        y, net.const(C, C, 3, 3), channels=C, kernel_size=(3, 3)
    ),
    "a map that is too large": lambda net, y: net.conv2d(y, 64 * C),
}


@pytest.mark.parametrize("case", PADDED)
def test_a_shift_before_padding(net, case):
    x = net.input("x", (1, C, 5, 6))
    check_refused(net.module(PADDED[case](net, net.batch_norm(x))), Code.BN_SHIFT_BEFORE_PADDING)


READERS = {
    "relu": (lambda net, y: net.conv2d(relay.nn.relu(y), C), Code.BN_BEFORE_ACTIVATION),
    "pool": (lambda net, y: net.conv2d(relay.nn.avg_pool2d(y), C), Code.BN_READER_UNSUPPORTED),
    "not only a layer": (lambda net, y: net.conv2d(y, C) + relay.exp(y), Code.BN_READER_UNSUPPORTED),
    "as a weight": (
        lambda net, y: relay.nn.conv2d(net.input("z", SHAPE), y, channels=C, kernel_size=(C, C)),
        Code.BN_READER_UNSUPPORTED,
    ),
    "variable weight": (
        lambda net, y: net.conv2d(y, C, weight=net.input("w", (C, C, 3, 3))), Code.WEIGHT_NOT_CONSTANT,
    ),
    "other axis": (lambda net, y: net.conv2d(relay.transpose(y), C, padding=0), Code.BN_AXIS_NOT_CHANNEL),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_readers_that_do_not_take_it(net, x, case):
    make, code = READERS[case]
    check_refused(net.module(make(net, net.batch_norm(x))), code)


def test_a_result_that_is_returned_as_well(net, x):
    y = net.batch_norm(x)
    check_refused(net.module(y, net.conv2d(y, C)), Code.BN_PRODUCER_UNSUPPORTED)


# --- what TVM makes of it --------------------------------------------------------------------------------


def test_values_of_tvm(net, x):
    """A few of the above, built and run."""
    y = net.batch_norm(x)
    results = [
        net.conv2d(net.batch_norm(x), C),
        net.conv2d(y, C, groups=2),
        net.conv2d(y, C, padding=0),
        net.batch_norm(relay.concatenate([net.conv2d(x, 6), net.conv2d(x, 2)], 1)),
        net.batch_norm(net.conv2d(x, C) + net.conv2d(x, C)),
        net.batch_norm(relay.transpose(net.conv2d(x, C), (0, 2, 3, 1)), axis=3),
    ]
    module = net.module(*results)
    folded = check(module, folds=5, adds=8)
    inputs = feeds(module)
    for got, want in zip(run(plain_build(folded), inputs), values(module, inputs)):
        assert max_error(got, want) < 1e-5


def preactivation(net, x):
    """batch norm -> conv, with a gamma of zero: TVM's ForwardFoldScaleAxis divides by it."""
    _, beta, mean, var = net.norm_values(C)
    vectors = [0.0, 1.0, 0.5, 2.0], np.abs(beta) + 1, mean, var
    return net.module(net.conv2d(norm(x, vectors), C), net.conv2d(relay.nn.relu(norm(x, vectors)), C))


def test_a_zero_gamma_before_a_convolution(net, x):
    module = preactivation(net, x)
    inputs = feeds(module)
    want = values(module, inputs)
    stock = run(plain_build(module, opt_level=3), inputs)
    assert np.isnan(stock[0]).any(), "stock TVM is right now: this test can go"
    compiled = pipeline.compile(module, options=pipeline.Options(latency=False))
    assert compiled.report.parity.passed
    for got, exact in zip(run(compiled.library, inputs), want):
        assert max_error(got, exact) < 1e-5


def test_passes_inside_a_sequential_of_tvm(net, x):
    module = net.module(relay.nn.relu(net.batch_norm(net.conv2d(net.batch_norm(x), C))))
    with tvm.transform.PassContext(opt_level=0):
        folded = tvm.transform.Sequential([transform.FoldBatchNorm(), relay.transform.InferType()])(module)
    inputs = feeds(module)
    assert max_error(run_unfused(folded, inputs)[0], values(module, inputs)[0]) < 1e-5
