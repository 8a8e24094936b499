"""Folding on Relay: what becomes of the graph, which batch norms stay and why, and epsilons."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    LLVM,
    Net,
    count_operators,
    feeds,
    plain_build,
    relay,
    run,
    run_unfused,
    texts,
    tvm,
)
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.reason import Code

constant_pass = Lazy("tvm_fuse.relay.constant_pass")
fold_pass = Lazy("tvm_fuse.relay.fold_pass")
record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay

SHAPE = (1, 4, 5, 5)


def fold(module):
    """The folded module, its fold records, and the codes of what stayed."""
    module = fold_pass.fold_batch_norms(module)
    outcome = record.last_report()["FoldBatchNorm"]
    return module, outcome.details, [d.reason.code for d in outcome.decisions if not d.applied]


def constants(function):
    found = []
    relay.analysis.post_order_visit(
        function, lambda expr: found.append(expr.data.numpy()) if isinstance(expr, relay.Constant) else None
    )
    return found


@pytest.fixture
def net():
    return Net()


# --- what folds ----------------------------------------------------------------------------------

FOLDING = {
    "conv2d": lambda net, x: net.conv2d(x, 4),
    "no channels attribute": lambda net, x: relay.nn.conv2d(x, net.weight(6, 4, 3, 3, fan_in=36)),
    "bias_add": lambda net, x: relay.nn.bias_add(net.conv2d(x, 6), net.const(6)),
    "bias, rank 3": lambda net, x: net.conv2d(x, 6) + net.const(6, 1, 1),
    "bias, rank 4": lambda net, x: net.conv2d(x, 6) + net.const(1, 6, 1, 1),
    "bias on the left": lambda net, x: net.const(1, 6, 1, 1) + net.conv2d(x, 6),
    "bias of one number": lambda net, x: net.conv2d(x, 6) + relay.const(0.75),
    "dilated": lambda net, x: net.conv2d(x, 4, dilation=(2, 2), padding=2),
    "grouped": lambda net, x: net.conv2d(x, 6, groups=2),
    "depthwise": lambda net, x: net.conv2d(x, 4, groups=4),
    "depthwise, multiplier 2": lambda net, x: net.conv2d(x, 8, groups=4),
    "dense": lambda net, x: net.dense(relay.nn.batch_flatten(x), 6),
    "dense and bias": lambda net, x: relay.nn.bias_add(net.dense(relay.nn.batch_flatten(x), 6), net.const(6)),
}


def test_all_that_folds_keeps_its_values(net):
    x = net.input("x", SHAPE)
    module = net.module(*(net.batch_norm(make(net, x)) for make in FOLDING.values()))
    folded, records, codes = fold(module)
    assert (len(records), codes) == (len(FOLDING), [])
    assert not count_operators(folded)["nn.batch_norm"]
    assert count_operators(folded)["add"] == len(FOLDING)
    feed = feeds(module)
    for name, want, got in zip(FOLDING, run_unfused(module, feed), run_unfused(folded, feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize(("layout", "axis"), [("NHWC", 3), ("NHWC", -1)])
def test_nhwc(net, layout, axis):
    x = net.input("x", (1, 5, 5, 4))
    convs = net.conv2d(x, 6, layout=layout), net.conv2d(x, 4, layout=layout, groups=4)
    module = net.module(*(net.batch_norm(conv, axis=axis) for conv in convs))
    folded, records, _ = fold(module)
    assert len(records) == 2
    assert sorted(c.shape for c in constants(folded["main"]) if c.shape[0] == 1) == [
        (1, 1, 1, 4),
        (1, 1, 1, 6),
    ]
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run_unfused(folded, feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_b021_dilation_as_an_attribute_folds_and_in_pieces_is_told(net):
    x = net.input("x", SHAPE)
    _, records, _ = fold(net.module(net.batch_norm(net.conv2d(x, 4, dilation=(2, 2), padding=2))))
    assert len(records) == 1
    _, records, codes = fold(net.module(*space_to_batch(net, x)))
    assert (records, codes) == ((), [Code.BN_PRODUCER_UNSUPPORTED])
    (decision,) = record.last_report()["FoldBatchNorm"].decisions
    assert "batch_to_space_nd" in decision.reason.got


def test_numbers_by_hand(net):
    """B001: w=2, b=3, gamma=4, beta=0.5, mean=1, var=3, epsilon=1 -> w=4, b=4.5."""
    x = net.input("x", (1, 1, 2, 2))
    conv = relay.nn.bias_add(net.conv2d(x, 1, 1, weight=scalars(2.0, 1, 1, 1, 1)), scalars(3.0, 1))
    vectors = [scalars(value, 1) for value in (4.0, 0.5, 1.0, 3.0)]
    module = net.module(relay.nn.batch_norm(conv, *vectors, epsilon=1.0)[0])
    folded, (fold_record,), _ = fold(module)
    weight, bias = constants(folded["main"])
    assert (weight.tolist(), bias.tolist()) == ([[[[4.0]]]], [[[[4.5]]]])
    assert fold_record.epsilon == 1.0


def scalars(value, *shape):
    return relay.const(np.full(shape, value, "float32"))


def test_attributes_and_names_stay(net):
    x = net.input("x", SHAPE)
    conv = net.conv2d(x, 6, strides=(2, 2), groups=2)
    conv = relay.Call(conv.op, conv.args, conv.attrs, None, relay.Span(relay.SourceName("c1"), 0, 0, 0, 0))
    folded, (fold_record,), _ = fold(net.module(net.batch_norm(conv)))
    call = folded["main"].body.args[0]
    assert [int(s) for s in call.attrs.strides] == [2, 2]
    assert (int(call.attrs.groups), int(call.attrs.channels)) == (2, 6)
    assert str(call.span.source_name.name) == "c1"
    assert (fold_record.anchor_name, fold_record.name) == ("c1", "batch_norm_0")


@pytest.mark.parametrize("count", [2, 3])
def test_norms_in_a_row_fold_one_after_the_other(net, count):
    x = net.input("x", SHAPE)
    y = net.conv2d(x, 4)
    for _ in range(count):
        y = net.batch_norm(y)
    module = net.module(y)
    folded, records, codes = fold(module)
    assert (len(records), codes) == (count, [])
    assert [r.name for r in records] == [f"batch_norm_{index}" for index in range(count)]
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1}
    feed = feeds(module)
    np.testing.assert_allclose(
        run_unfused(folded, feed)[0], run_unfused(module, feed)[0], atol=2e-5, rtol=1e-5
    )


def test_b076_three_norms_in_one_function(net):
    y = net.input("x", SHAPE)
    for _ in range(3):
        y = net.batch_norm(net.conv2d(y, 4))
    folded, records, _ = fold(net.module(y))
    assert len(records) == 3
    assert count_operators(folded) == {"nn.conv2d": 3, "add": 3}


def test_fold_is_idempotent(net):
    folded, _, _ = fold(net.module(net.batch_norm(net.conv2d(net.input("x", SHAPE), 4))))
    again, records, codes = fold(folded)
    assert (records, codes) == ((), [])
    assert tvm.ir.structural_equal(again, folded)
    assert not record.last_report()["FoldBatchNorm"].changed


def test_normalized_output_taken_twice_is_one_fold(net):
    bn = net.batch_norm(net.conv2d(net.input("x", SHAPE), 4)).tuple_value
    module = net.module(*(make(relay.TupleGetItem(bn, 0)) for make in (relay.nn.relu, relay.tanh)))
    folded, records, _ = fold(module)
    assert len(records) == 1
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1, "tanh": 1}


def test_b043_shared_weight_gives_two(net):
    """One weight, two convolutions, two batch norms: each gets its own copy."""
    x, y, w = net.input("x", SHAPE), net.input("y", SHAPE), net.weight(4, 4, 3, 3, fan_in=36)
    module = net.module(*(net.batch_norm(net.conv2d(data, 4, weight=w)) for data in (x, y)))
    folded, records, _ = fold(module)
    assert len({r.layers[0].weight_before for r in records}) == 1
    assert len({r.layers[0].weight_after for r in records}) == 2
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run_unfused(folded, feed)):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_b023_shared_weight_without_a_norm_keeps_it(net):
    x, w = net.input("x", (1, 1, 2, 2)), scalars(2.0, 1, 1, 1, 1)
    vectors = [scalars(value, 1) for value in (4.0, 0.5, 1.0, 3.0)]
    bare = net.conv2d(x, 1, 1, weight=w)
    conv = net.conv2d(x, 1, 1, weight=w) + scalars(3.0, 1, 1, 1)
    module = net.module(relay.nn.batch_norm(conv, *vectors, epsilon=1.0)[0], bare + scalars(3.0, 1, 1, 1))
    folded, _, _ = fold(module)
    ones = {"x": np.ones((1, 1, 2, 2), "float32")}
    assert [float(out.flat[0]) for out in run_unfused(folded, ones)] == [8.5, 5.0]


def test_b064_b065_gamma_and_beta_that_are_not_used(net):
    """What the operator ignores is ignored, whatever its constant holds."""
    x = net.input("x", SHAPE)
    results = []
    for scale, center in ((False, True), (True, False), (False, False)):
        vectors = net.norm_values(4)
        vectors[0] = np.zeros(4, "float32") if not scale else vectors[0]
        vectors[1] = np.full(4, np.nan, "float32") if not center else vectors[1]
        vectors = [relay.const(v) for v in vectors]
        results.append(relay.nn.batch_norm(net.conv2d(x, 4), *vectors, scale=scale, center=center)[0])
    module = net.module(*results)
    folded, records, _ = fold(module)
    assert len(records) == 3
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run_unfused(folded, feed)):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_functions_beside_main_are_folded(net):
    module = net.module(net.batch_norm(net.conv2d(net.input("x", SHAPE), 4)))
    other = Net(1)
    module["helper"] = other.module(other.batch_norm(other.conv2d(other.input("x", SHAPE), 4)))["main"]
    folded, records, _ = fold(module)
    assert len(records) == 2
    for name in ("main", "helper"):
        assert "nn.batch_norm" not in str(folded[name].astext(show_meta_data=False))


def test_constant_expressions_are_folded_first(net):
    """B041: a weight that is transposed, cast or scaled is a constant in the end."""
    x = net.input("x", SHAPE)
    w = relay.transpose(net.weight(3, 3, 4, 4, fan_in=36), (3, 2, 0, 1))
    module = net.module(net.batch_norm(net.conv2d(x, 4, weight=w * relay.const(2.0))))
    folded, records, codes = fold(module)
    assert (len(records), codes) == (1, [])
    feed = feeds(module)
    np.testing.assert_allclose(run_unfused(folded, feed)[0], run_unfused(module, feed)[0], atol=1e-5, rtol=0)


# --- what stays ----------------------------------------------------------------------------------


def of_tuple(net, x):
    bn = net.batch_norm(net.conv2d(x, 4)).tuple_value
    return relay.TupleGetItem(bn, 0), relay.TupleGetItem(bn, 1)


def shared(net, x):
    conv = net.conv2d(x, 4)
    return net.batch_norm(conv), relay.nn.relu(conv)


def returned(net, x):
    conv = net.conv2d(x, 4)
    return conv, net.batch_norm(conv)


def variable_weight(net, x):
    return (net.batch_norm(net.conv2d(x, 4, weight=net.input("w", (4, 4, 3, 3)))),)


def variable_statistics(net, x):
    vectors = [net.input(name, (4,)) for name in ("gamma", "beta", "mean", "var")]
    return (relay.nn.batch_norm(net.conv2d(x, 4), *vectors)[0],)


def bad_statistics(**changes):
    def make(net, x):
        vectors = net.norm_values(4)
        for index, value in changes.items():
            vectors["gamma beta mean variance".split().index(index)][2] = value
        return (relay.nn.batch_norm(net.conv2d(x, 4), *map(relay.const, vectors), epsilon=1e-5)[0],)

    return make


def space_to_batch(net, x):
    """B021 (b): a dilated convolution spelled with space_to_batch_nd."""
    y = relay.nn.space_to_batch_nd(x, [2, 2], [[2, 3], [2, 3]])
    y = relay.nn.batch_to_space_nd(net.conv2d(y, 4, padding=0), [2, 2], [[0, 1], [0, 1]])
    return (net.batch_norm(y),)


def decomposed(spelling):
    """B049: a batch norm in pieces, its constants not yet evaluated."""

    def make(net, x):
        gamma, beta, mean, var = (relay.const(v.reshape(4, 1, 1)) for v in net.norm_values(4))
        deviation = {
            "rsqrt": lambda: gamma * relay.rsqrt(var + relay.const(1e-3)),
            "divide": lambda: gamma / relay.sqrt(var + relay.const(1e-3)),
            "power": lambda: gamma * relay.power(var + relay.const(1e-3), relay.const(-0.5)),
        }[spelling]()
        return ((net.conv2d(x, 4) - mean) * deviation + beta,)

    return make


STAYING = {
    "no producer": (lambda net, x: (net.batch_norm(x),), Code.BN_PRODUCER_UNSUPPORTED),
    "after a pool": (
        lambda net, x: (net.batch_norm(relay.nn.avg_pool2d(net.conv2d(x, 4))),),
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "after a relu": (
        lambda net, x: (net.batch_norm(relay.nn.relu(net.conv2d(x, 4))),),
        Code.BN_AFTER_ACTIVATION,
    ),
    "after a residual": (
        lambda net, x: (net.batch_norm(net.conv2d(x, 4) + x),),
        Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "other axis": (lambda net, x: (net.batch_norm(net.conv2d(x, 5), axis=3),), Code.BN_AXIS_NOT_CHANNEL),
    "statistics read": (of_tuple, Code.BN_STATISTICS_USED),
    "shared": (shared, Code.ANCHOR_OUTPUT_SHARED),
    "returned": (returned, Code.ANCHOR_OUTPUT_RETURNED),
    "variable weight": (variable_weight, Code.WEIGHT_NOT_CONSTANT),
    "variable statistics (B048 a)": (variable_statistics, Code.BN_PARAMETERS_NOT_CONSTANT),
    "NaN variance": (bad_statistics(variance=np.nan), Code.BN_STATISTICS_NOT_FINITE),
    "infinite mean": (bad_statistics(mean=np.inf), Code.BN_STATISTICS_NOT_FINITE),
    "negative variance": (bad_statistics(variance=-1e-3), Code.BN_VARIANCE_NOT_POSITIVE),
}


@pytest.mark.parametrize("case", STAYING)
def test_what_stays(net, case):
    make, code = STAYING[case]
    module = net.module(*make(net, net.input("x", SHAPE)))
    folded, records, codes = fold(module)
    assert (records, codes) == ((), [code])
    assert count_operators(folded) == count_operators(module)
    assert not record.last_report()["FoldBatchNorm"].changed


def test_every_reason_has_a_hint(net):
    fold(net.module(*of_tuple(net, net.input("x", SHAPE))))
    (decision,) = record.last_report()["FoldBatchNorm"].decisions
    assert decision.at == "batch_norm_0"
    assert decision.reason.wanted
    assert decision.reason.got
    assert decision.reason.hint


def test_b058_fold_that_overflows_float16():
    """4 * 100 / sqrt(1e-5) is above 65504."""
    net = Net(dtype="float16")
    vectors = [relay.const(np.full(4, v, "float16")) for v in (100, 0, 0, 0)]
    weight = relay.const(np.full((4, 4, 3, 3), 4, "float16"))
    conv = net.conv2d(net.input("x", SHAPE), 4, weight=weight)
    folded, records, codes = fold(net.module(relay.nn.batch_norm(conv, *vectors, epsilon=1e-5)[0]))
    assert (records, codes) == ((), [Code.FOLD_OVERFLOW])
    assert count_operators(folded)["nn.batch_norm"] == 1


@pytest.mark.parametrize("spelling", ["rsqrt", "divide", "power"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_b049_norm_in_pieces_folds(net, spelling, evaluated):
    """As a batch norm with its epsilon; as scale and shift where somebody has evaluated the constants."""
    module = net.module(*decomposed(spelling)(net, net.input("x", SHAPE)))
    given = constant_pass.fold_constants(module) if evaluated else module
    folded, records, codes = fold(given)
    assert ([r.epsilon for r in records], codes) == ([] if evaluated else [pytest.approx(1e-3)], [])
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1}
    feed = feeds(module)
    np.testing.assert_allclose(run_unfused(folded, feed)[0], run_unfused(module, feed)[0], atol=1e-5, rtol=0)


def test_b048_binding_the_parameters_is_enough(net):
    module = net.module(*variable_statistics(net, net.input("x", SHAPE)))
    values = dict(zip(("gamma", "beta", "mean", "var"), Net(1).norm_values(4)))
    module["main"] = relay.build_module.bind_params_by_name(module["main"], values)
    _, records, codes = fold(module)
    assert (len(records), codes) == (1, [])


def test_b098_b099_transposed_convolutions(net):
    """They fold; groups and output_padding keep their meaning."""
    x, small = net.input("x", SHAPE), net.input("small", (1, 3, 7, 7))
    grouped = relay.nn.conv2d_transpose(
        x, relay.const(np.ones((4, 2, 1, 1), "float32")), channels=4, kernel_size=(1, 1), groups=2
    )
    padded = relay.nn.conv2d_transpose(
        small, net.const(3, 6, 3, 3), channels=6, kernel_size=(3, 3), strides=(2, 2), padding=(1, 1),
        output_padding=(1, 1),
    )  # fmt: skip
    vectors = [relay.const(np.array(v, "float32")) for v in ([1, 2, 3, 4], [0] * 4, [0] * 4, [1 - 1e-3] * 4)]
    module = net.module(relay.nn.batch_norm(grouped, *vectors, epsilon=1e-3)[0], net.batch_norm(padded))
    folded, records, codes = fold(module)
    assert (len(records), codes) == (2, [])
    feed = {"x": np.ones(SHAPE, "float32"), "small": feeds(module)["small"]}
    ours = run_unfused(folded, feed)
    np.testing.assert_allclose(ours[0][0, :, 0, 0], [2, 4, 6, 8], rtol=1e-6)
    assert ours[1].shape == (1, 6, 14, 14)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_integer_convolutions_have_no_norm_and_no_trouble(dtype):
    net = Net()
    x = net.input("x", SHAPE, dtype)
    weight = relay.const(np.ones((4, 4, 3, 3), dtype))
    conv = relay.nn.conv2d(x, weight, channels=4, kernel_size=(3, 3), out_dtype="int32")
    _, records, codes = fold(net.module(relay.nn.relu(conv)))
    assert (records, codes) == ((), [])


# --- fp16 ----------------------------------------------------------------------------------------


def test_float16_is_folded_in_float64_and_rounded_once():
    net = Net(dtype="float16")
    x = net.input("x", SHAPE)
    module = net.module(net.batch_norm(net.conv2d(x, 4), epsilon=1e-5))
    folded, (fold_record,), _ = fold(module)
    assert {c.dtype.name for c in constants(folded["main"])} == {"float16"}
    weight, gamma, _, _, var = (c.astype("float64") for c in constants(module["main"]))
    exact = weight * (gamma / np.sqrt(var + fold_record.epsilon)).reshape(-1, 1, 1, 1)
    assert np.array_equal(fold_record.edit.layers[0].weight, exact.astype("float16"))


# --- epsilon -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "text"])
def test_b006_epsilon_survives_saving(net, form):
    module = net.module(net.batch_norm(net.conv2d(net.input("x", SHAPE), 4), epsilon=1e-3))
    if form == "json":
        loaded = tvm.ir.load_json(tvm.ir.save_json(module))
    else:
        loaded = relay.fromtext(module.astext())
    _, (fold_record,), _ = fold(loaded)
    _, (wanted,), _ = fold(module)
    assert fold_record.epsilon == pytest.approx(1e-3, rel=1e-6)
    if form == "json":
        assert fold_record.layers[0].weight_after == wanted.layers[0].weight_after


def test_b005_each_norm_has_its_own_epsilon(net):
    y = net.batch_norm(net.conv2d(net.input("x", SHAPE), 4), epsilon=1e-3)
    _, records, _ = fold(net.module(net.batch_norm(net.conv2d(y, 4), epsilon=1e-5)))
    assert [r.epsilon for r in records] == pytest.approx([1e-3, 1e-5])


def test_aligned_epsilon_reaches_the_weights(net):
    module = net.module(net.batch_norm(net.conv2d(net.input("x", SHAPE), 4), epsilon=1e-5))
    wanted = Net()
    right = wanted.module(wanted.batch_norm(wanted.conv2d(wanted.input("x", SHAPE), 4), epsilon=1e-3))
    aligned = fold_pass.align_epsilon(module, {}, {"*": 1e-3}, align=True)
    assert texts(aligned) == texts(fold_pass.align_epsilon(right, {}, {}, align=False))
    _, (got,), _ = fold(aligned)
    assert got.layers[0].weight_after == fold(right)[1][0].layers[0].weight_after
    assert got.layers[0].weight_after != fold(module)[1][0].layers[0].weight_after


def test_alignment_keeps_the_other_attributes(net):
    x = net.input("x", (1, 5, 5, 4))
    module = net.module(net.batch_norm(x, axis=-1, center=False, scale=False, epsilon=1e-5))
    aligned = fold_pass.align_epsilon(module, {}, {"*": 1e-3}, align=True)
    attrs = aligned["main"].body.tuple_value.attrs
    assert (int(attrs.axis), bool(attrs.center), bool(attrs.scale)) == (-1, False, False)
    assert float(attrs.epsilon) == 1e-3


def test_lost_batch_norm_is_an_error(net):
    from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon

    source = {"bn_9": ExpectedEpsilon(1e-3, EpsilonOrigin.SOURCE_ATTRIBUTE)}
    with pytest.raises(ModelError, match="bn_9"):
        fold_pass.align_epsilon(net.module(net.input("x", SHAPE)), source, {}, align=False)


# --- edges ---------------------------------------------------------------------------------------

EDGES = {
    "returns an input": lambda net, x: (x,),
    "returns a constant": lambda net, x: (net.const(2, 3),),
    "only constants": lambda net, x: (net.const(2, 3) + net.const(2, 3),),
    "duplicates": lambda net, x: (x, x, relay.nn.relu(x)),
    "no anchor": lambda net, x: (relay.nn.relu(x),),
    "int8": lambda net, x: (relay.cast(x, "int8") + relay.const(1, "int8"),),
    "bool": lambda net, x: (relay.logical_and(relay.greater(x, x), relay.less(x, x)),),
}


@pytest.mark.parametrize("case", EDGES)
def test_graphs_without_a_norm(net, case):
    from tvm_fuse import transform

    module = net.module(*EDGES[case](net, net.input("x", (1, 3))))
    feed = feeds(module)
    fused = transform.FuseChains(LLVM)(transform.FoldBatchNorm()(module))
    assert record.last_report()["FoldBatchNorm"].details == ()
    for want, got in zip(run(plain_build(module), feed), run(plain_build(fused), feed)):
        assert np.array_equal(got, want)


def test_control_flow_beside_a_norm(net):
    """If and Let are not looked into; what stands beside them folds."""
    x, flag = net.input("x", SHAPE), net.input("flag", (), "bool")
    variable = relay.var("v")
    branch = relay.Let(variable, relay.nn.relu(x), relay.tanh(variable))
    chosen = relay.If(flag, branch, x)
    folded, records, _ = fold(net.module(net.batch_norm(net.conv2d(x, 4)), chosen))
    assert len(records) == 1
    assert isinstance(folded["main"].body.fields[1], relay.If)


@pytest.mark.slow
def test_deep_chain_needs_no_recursion(net):
    y = net.batch_norm(net.conv2d(net.input("x", SHAPE), 4))
    for _ in range(2500):
        y = relay.nn.relu(relay.exp(y))
    _, records, _ = fold(net.module(y))
    assert len(records) == 1
