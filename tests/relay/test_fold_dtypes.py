"""Folding in every dtype, and with dynamic shapes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.numerics import from_bfloat16, max_error
from tests.support.relay_folds import check, check_refused, values
from tests.support.relay_graphs import Net, count_operators, feeds, plain_build, relay, run, tvm
from tvm_fuse.core.dtypes import FLOATS, narrow
from tvm_fuse.core.reason import Code

constant_pass = Lazy("tvm_fuse.relay.constant_pass")
fold_pass = Lazy("tvm_fuse.relay.fold_pass")
reader = Lazy("tvm_fuse.relay.read")
record = Lazy("tvm_fuse.relay.record")
rewrite = Lazy("tvm_fuse.relay.rewrite")

pytestmark = pytest.mark.relay

C = 4
SHAPE = (2, C, 5, 6)


def constant(values, dtype):
    return rewrite.constant(narrow(np.asarray(values, "float64"), dtype), dtype)


class Typed(Net):
    """A ``Net`` in any floating-point dtype; constants are drawn in float64 and rounded once."""

    def const(self, *shape, scale=1.0):
        return constant(self.rng.normal(scale=scale, size=shape), self.dtype)

    def norm(self, x, dtype=None, **attrs):
        gamma = self.rng.uniform(0.5, 1.5, C) * [1, -1, 1, -1]
        vectors = gamma, *self.rng.normal(size=(2, C)), self.rng.uniform(0.3, 3.0, C)
        constants = [constant(vector, dtype or self.dtype) for vector in vectors]
        return relay.nn.batch_norm(x, *constants, **{"epsilon": 1e-3, **attrs})[0]

    def layer(self, x, **attrs):
        weight = self.weight(C, C, 3, 3, fan_in=36)
        return relay.nn.conv2d(x, weight, channels=C, kernel_size=(3, 3), **attrs)


def constants(module):
    """The numbers of the constants in float64, in order."""
    graph = reader.read_function(module["main"]).graph
    return [graph.exact(node) for node in graph.constants]


# --- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_folded_numbers_are_rounded_once(dtype):
    """Bit for bit what float64 arithmetic gives, rounded to the dtype."""
    net = Typed(dtype=dtype)
    y = relay.nn.bias_add(net.layer(net.input("x", SHAPE)), net.const(C))
    module = net.module(net.norm(y))
    weight, bias, gamma, beta, mean, var = constants(module)
    folded = fold_pass.fold_batch_norms(module)
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1}
    epsilon = record.last_report()["FoldBatchNorm"].details[0].epsilon
    scale = gamma / np.sqrt(var + epsilon)
    graph = reader.read_function(folded["main"]).graph
    arrays = [graph.constants[node] for node in graph.constants]
    for array, exact in zip(arrays, (weight * scale[:, None, None, None], (bias - mean) * scale + beta)):
        got, wanted = array.ravel(), narrow(exact, dtype).ravel()
        if dtype == "float64":  # the same numbers, added in another order
            np.testing.assert_allclose(got, wanted, rtol=1e-14)
        else:
            assert np.array_equal(got, wanted)
    assert {graph.nodes[node].output.dtype for node in graph.constants} == {dtype}


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_stated_bound_holds_and_is_not_far_off(dtype, where):
    net = Typed(dtype=dtype)
    x = net.input("x", SHAPE)
    module = net.module(
        net.norm(net.layer(x)) if where == "before" else net.layer(net.norm(x), padding=(1, 1))
    )
    folded = fold_pass.fold_batch_norms(module)
    (layer,) = record.last_report()["FoldBatchNorm"].details[0].layers
    data = np.random.default_rng(1).choice([-1.0, 1.0], SHAPE)  # every weight at full size
    (want,), (got,) = values(module, {"x": data}), values(folded, {"x": data})
    error = np.abs(got - want).max()
    slack = 64 * FLOATS["float64"].roundoff * np.abs(want).max()  # of the evaluator
    assert error <= layer.weight_error + layer.bias_error + slack
    assert error >= (layer.weight_error + layer.bias_error) / 20
    assert layer.weight_error <= 36 * FLOATS[dtype].roundoff * 4


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_values_of_tvm(dtype):
    net = Typed(dtype=dtype)
    module = net.module(net.norm(net.layer(net.input("x", SHAPE))))
    folded = check(module, tolerance=FLOATS[dtype].roundoff * 40)
    inputs = feeds(module)
    assert (
        max_error(run(plain_build(folded), inputs)[0], values(module, inputs)[0])
        < FLOATS[dtype].roundoff * 100
    )


def test_bfloat16_values_of_tvm():
    """At opt_level 3; below, TVM 0.17's own bfloat16 convolutions are wrong, folded or not."""
    net = Typed(dtype="bfloat16")
    module = net.module(net.norm(net.layer(net.input("x", SHAPE))))
    folded = check_types(fold_pass.fold_batch_norms(module))
    bits = narrow(np.random.default_rng(1).normal(size=SHAPE), "bfloat16")
    executor = tvm.contrib.graph_executor.GraphModule(plain_build(folded)["default"](tvm.cpu(0)))
    executor.run(x=tvm.nd.empty(SHAPE, "bfloat16").copyfrom(bits))
    got = from_bfloat16(executor.get_output(0).numpy())
    want = values(module, {"x": from_bfloat16(bits)})[0]
    assert max_error(got, want) < FLOATS["bfloat16"].roundoff * 40


def check_types(module):
    """Types still fit, and nothing is left."""
    assert not count_operators(module)["nn.batch_norm"]
    return relay.transform.InferType()(module)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_norm_of_a_narrow_layer(dtype):
    """conv -> cast -> float32 batch norm -> cast back: the layer takes it in its own dtype."""
    net = Typed(dtype=dtype)
    y = relay.cast(net.layer(net.input("x", SHAPE)), "float32")
    module = net.module(relay.cast(net.norm(y, "float32"), dtype))
    folded = fold_pass.fold_batch_norms(module)
    counts = count_operators(check_types(folded))
    assert (counts["add"], counts["nn.conv2d"]) == (1, 1)
    (layer,) = record.last_report()["FoldBatchNorm"].details[0].layers
    graph = reader.read_function(folded["main"]).graph
    assert {graph.nodes[node].output.dtype for node in graph.constants} == {dtype}
    if dtype == "float16":
        data = np.random.default_rng(1).choice([-1.0, 1.0], SHAPE)
        want, got = values(module, {"x": data})[0], values(folded, {"x": data})[0]
        rounding = 4 * FLOATS[dtype].roundoff * np.abs(want).max()  # the casts in both
        assert np.abs(got - want).max() <= layer.weight_error + layer.bias_error + rounding


def test_a_norm_of_a_layer_that_sums_in_float32():
    """float16 data and weights, float32 result: the weight is rounded to one, the bias to the other."""
    net = Typed(dtype="float16")
    y = net.layer(net.input("x", SHAPE), out_dtype="float32")
    module = net.module(net.norm(y, "float32"))
    folded = fold_pass.fold_batch_norms(module)
    graph = reader.read_function(check_types(folded)["main"]).graph
    assert [graph.nodes[node].output.dtype for node in graph.constants] == ["float16", "float32"]
    (layer,) = record.last_report()["FoldBatchNorm"].details[0].layers
    assert layer.bias_error < 1e-6 < layer.weight_error


def test_a_widened_value_before_a_wider_layer():
    """float16 -> cast -> float32 batch norm -> float32 convolution."""
    net = Typed()
    y = relay.cast(net.input("x", SHAPE, "float16"), "float32")
    check(net.module(net.layer(net.norm(y))))


def test_a_value_that_is_narrowed_before_the_layer_stays():
    """``x - mean`` may fit into float16 where ``x`` does not."""
    net = Typed(dtype="float16")
    y = relay.cast(net.norm(net.input("x", SHAPE, "float32"), "float32"), "float16")
    check_refused(net.module(net.layer(y)), Code.BN_READER_UNSUPPORTED)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_integer_weights(dtype):
    net = Typed()
    weight = relay.const(np.ones((C, C, 3, 3), dtype), dtype)
    x = net.input("x", SHAPE, dtype)
    conv = relay.nn.conv2d(x, weight, channels=C, kernel_size=(3, 3), out_dtype="float32")
    reason = check_refused(net.module(net.norm(conv)), Code.FOLD_OVERFLOW)
    assert reason.got == dtype


def test_an_integer_sum_that_is_cast():
    net = Typed()
    weight = relay.const(np.ones((C, C, 3, 3), "int8"), "int8")
    x = net.input("x", SHAPE, "int8")
    conv = relay.nn.conv2d(x, weight, channels=C, kernel_size=(3, 3), out_dtype="int32")
    check_refused(net.module(net.norm(relay.cast(conv, "float32"))), Code.BN_PRODUCER_UNSUPPORTED)


def test_an_epsilon_that_the_dtype_loses():
    """float16 rounds 1e-8 to zero: the model itself computes without it."""
    net = Typed(dtype="float16")
    module = net.module(net.norm(net.layer(net.input("x", SHAPE)), epsilon=1e-8))
    check_refused(module, Code.BN_EPSILON_UNDERFLOW)
    net = Typed(dtype="float16")
    y = relay.cast(net.layer(net.input("x", SHAPE)), "float32")
    folded = fold_pass.fold_batch_norms(net.module(net.norm(y, "float32", epsilon=1e-8)))
    assert not count_operators(folded)["nn.batch_norm"]  # the same epsilon in float32 is one


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_that_do_not_fit(dtype):
    net = Typed(dtype=dtype)
    vectors = [constant(np.full(C, v), dtype) for v in (FLOATS[dtype].largest, 0, 0, 0.01)]
    y = relay.nn.batch_norm(net.layer(net.input("x", SHAPE)), *vectors, epsilon=1e-3)[0]
    check_refused(net.module(y), Code.FOLD_OVERFLOW)


def test_bfloat16_norms_in_pieces():
    """The constants of a batch norm that an exporter took apart are folded in bfloat16 as well."""
    net = Typed(dtype="bfloat16")
    gamma, beta, mean, var = (net.const(C) for _ in range(4))
    shaped = [relay.expand_dims(vector, 1, 2) for vector in (gamma, beta, mean)]
    deviation = relay.reshape(relay.transpose(relay.reshape(var * var, (1, C))), (C, 1, 1))
    y = (net.layer(net.input("x", SHAPE)) - shaped[2]) * deviation * shaped[0] + shaped[1]
    module = net.module(y)
    folded = fold_pass.fold_batch_norms(module)
    assert count_operators(check_types(folded)) == {"nn.conv2d": 1, "add": 1}
    bits = narrow(np.random.default_rng(1).normal(size=SHAPE), "bfloat16")
    feed = {"x": from_bfloat16(bits)}
    (layer,) = record.last_report()["FoldScaleShift"].details[0].layers
    want = values(module, feed)[0]
    got = values(folded, feed)[0]
    assert max_error(got, want) < 4 * FLOATS["bfloat16"].roundoff
    assert layer.weight_error > 0


# --- dynamic shapes ------------------------------------------------------------------------------------

DYNAMIC = {
    "batch": (("?", C, 6, 6), lambda net, x: net.norm(net.layer(x))),
    "image": ((1, C, "?", "?"), lambda net, x: net.norm(net.layer(x, padding=(1, 1)))),
    "all": (("?", C, "?", "?"), lambda net, x: net.norm(relay.nn.bias_add(net.layer(x), net.const(C)))),
    "transpose": (
        ("?", C, "?", "?"),
        lambda net, x: net.norm(relay.transpose(net.layer(x), (0, 2, 3, 1)), axis=3),
    ),
    "reshape": (("?", C, 6, 6), lambda net, x: net.norm(relay.reshape(net.layer(x), (-1, C, 16)))),
    "concatenation": (
        ("?", C, "?", "?"),
        lambda net, x: net.layer(relay.concatenate([net.norm(net.layer(x)), net.norm(net.layer(x))], 0)),
    ),
    "residual": (("?", C, "?", "?"), lambda net, x: net.norm(net.layer(x) + net.layer(x))),
    "in front": (("?", C, "?", "?"), lambda net, x: net.layer(net.norm(x))),
    "dense": (("?", C), lambda net, x: net.norm(relay.nn.dense(x, net.const(C, C)))),
}


def dynamic(case):
    shape, make = DYNAMIC[case]
    net = Typed()
    x = net.input("x", [relay.Any() if size == "?" else size for size in shape])
    return net.module(make(net, x)), shape


@pytest.mark.parametrize("case", DYNAMIC)
def test_dynamic_shapes_fold(case):
    module, _ = dynamic(case)
    folded = fold_pass.fold_batch_norms(module)
    assert not count_operators(folded)["nn.batch_norm"]
    assert [d for d in record.last_report()["FoldBatchNorm"].decisions if not d.applied] == []
    assert tvm.ir.structural_equal(fold_pass.fold_batch_norms(folded), folded)


@pytest.mark.filterwarnings("ignore:visit_:DeprecationWarning")  # TVM's hybrid script
@pytest.mark.parametrize("case", ["all", "residual", "in front", "dense"])
def test_dynamic_shapes_by_value(case):
    module, shape = dynamic(case)
    folded = fold_pass.fold_batch_norms(module)
    machines = [virtual_machine(each) for each in (module, folded)]
    for size in (1, 3):
        data = np.random.default_rng(size).normal(
            size=[s if s != "?" else size + 4 * (i > 0) for i, s in enumerate(shape)]
        )
        want, got = (machine.invoke("main", data.astype("float32")).numpy() for machine in machines)
        assert want.shape[0] == size
        assert max_error(got, want) < 1e-5


def virtual_machine(module):
    with tvm.transform.PassContext(opt_level=1):
        executable = relay.vm.compile(module, target="llvm -opt-level=0")
    return tvm.runtime.vm.VirtualMachine(executable, tvm.cpu())


def test_a_padded_layer_of_unknown_size_takes_no_shift():
    net = Typed()
    x = net.input("x", (1, C, relay.Any(), relay.Any()))
    check_refused(net.module(net.layer(net.norm(x), padding=(1, 1))), Code.BN_SHIFT_BEFORE_PADDING)


def test_unknown_sizes_that_trade_elements():
    """(n, 4, w) -> (n / 4, 4, 4 w): the shapes look alike, the channels are others."""
    net = Typed()
    x = net.input("x", (relay.Any(), C, relay.Any()))
    conv = relay.nn.conv1d(x, net.const(C, C, 1), channels=C, kernel_size=(1,))
    y = relay.reshape(conv, (-4, -1, C, -3))
    module = net.module(net.norm(y))
    (info,) = [
        node.output for node in reader.read_function(module["main"]).graph.nodes if node.op == "reshape"
    ]
    assert info.shape == ("?", C, "?")
    check_refused(module, Code.BN_PRODUCER_UNSUPPORTED)


def test_unknown_channels():
    net = Typed()
    x = net.input("x", (1, relay.Any(), 5, 6))
    vectors = [net.input(name, (relay.Any(),)) for name in ("gamma", "beta", "mean", "var")]
    module = net.module(relay.nn.batch_norm(relay.nn.relu(x), *vectors)[0])
    check_refused(module, Code.BN_PARAMETERS_NOT_CONSTANT)
