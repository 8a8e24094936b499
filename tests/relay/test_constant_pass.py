"""Constant folding in NumPy: bit for bit what TVM's operators compute."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import LLVM, Net, count_operators, plain_build, relay, run, tvm
from tvm_fuse.core import dtypes

constant_pass = Lazy("tvm_fuse.relay.constant_pass")
rewrite = Lazy("tvm_fuse.relay.rewrite")

pytestmark = pytest.mark.relay

EXPRESSIONS = {
    "add": lambda a, b: a + b,
    "add, broadcast": lambda a, b: a + relay.const(np.array([[1.5], [2.5]], "float32")),
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a, b: relay.negative(a),
    "sqrt": lambda a, b: relay.sqrt(relay.const(np.array([0.0, 2.0, 1e-30], "float32"))),
    "cast": lambda a, b: relay.cast(a, "float16"),
    "cast to int": lambda a, b: relay.cast(a * relay.const(10.0), "int32"),
    "reshape": lambda a, b: relay.reshape(a, (3, -1)),
    "squeeze": lambda a, b: relay.squeeze(relay.reshape(a, (1, 2, 3, 1)), [0]),
    "expand_dims": lambda a, b: relay.expand_dims(a, 1, 2),
    "transpose": lambda a, b: relay.transpose(a),
    "transpose, axes": lambda a, b: relay.transpose(relay.reshape(a, (1, 2, 3)), (2, 0, 1)),
    "repeat": lambda a, b: relay.repeat(a, 2, 1),
    "copy": lambda a, b: relay.copy(a),
    "broadcast_to": lambda a, b: relay.broadcast_to(a, (4, 2, 3)),
    "layout_transform": lambda a, b: relay.layout_transform(
        relay.const(np.arange(48, dtype="float32").reshape(1, 8, 2, 3)), "NCHW", "NCHW4c"
    ),
    "expression": lambda a, b: (a - b) * relay.const(0.5) + relay.transpose(relay.transpose(b)),
}


@pytest.fixture(scope="module")
def expressions():
    """All expressions in one module, what TVM computes for them, and what is left after folding."""
    net = Net()
    a, b = net.const(2, 3), net.const(2, 3)
    module = net.module(*(make(a, b) for make in EXPRESSIONS.values()))
    want = run(plain_build(module, LLVM, 0, ["FoldConstant"]), {})
    return want, constant_pass.fold_constants(module)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_value(expressions, name):
    want, folded = expressions
    index = list(EXPRESSIONS).index(name)
    constant = folded["main"].body.fields[index]
    assert isinstance(constant, relay.Constant)
    got = constant.data.numpy()
    assert (got.dtype, got.shape) == (want[index].dtype, want[index].shape)
    if name in ("divide", "sqrt"):  # correctly rounded here
        np.testing.assert_allclose(got, want[index], rtol=2e-7)
    else:
        assert np.array_equal(got, want[index])


def test_nothing_is_left(expressions):
    _, folded = expressions
    assert not count_operators(folded)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "bool"])
def test_dtypes(dtype):
    values = np.array([[1, 0, 2]], dtype)
    module = tvm.IRModule.from_expr(relay.transpose(relay.const(values, dtype)))
    constant = constant_pass.fold_constants(module)["main"].body
    assert np.array_equal(constant.data.numpy(), values.T)
    assert constant.data.dtype == dtype


BFLOAT16 = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negative": lambda a, b: relay.negative(a),
    "cast to": lambda a, b: relay.cast(relay.const(np.float32([1.00390625, 1.01171875, -3e38])), "bfloat16"),
    "transpose": lambda a, b: relay.transpose(a),
    "broadcast_to": lambda a, b: relay.broadcast_to(a, (2, 2, 3)),
    "each rounded": lambda a, b: a + b + b + b,
}


def test_bfloat16_bit_for_bit():
    def constant(values):
        return rewrite.constant(dtypes.narrow(values, "bfloat16"), "bfloat16")

    a, b = (constant(np.random.default_rng(seed).normal(size=(2, 3))) for seed in (0, 1))
    module = tvm.IRModule.from_expr(relay.Tuple([make(a, b) for make in BFLOAT16.values()]))
    folded = constant_pass.fold_constants(module)
    assert not count_operators(folded)
    want = run(plain_build(module, LLVM, 0, ["FoldConstant"]), {})
    for name, constant, bits in zip(BFLOAT16, folded["main"].body.fields, want):
        assert np.array_equal(constant.data.numpy(), bits), name


def test_cast_from_bfloat16():
    """By hand, since TVM 0.17 cannot build it."""
    bits = rewrite.constant(np.array([0x3FC0, 0xC000], "uint16"), "bfloat16")
    module = tvm.IRModule.from_expr(relay.cast(bits, "float32"))
    assert constant_pass.fold_constants(module)["main"].body.data.numpy().tolist() == [1.5, -2.0]


def test_integer_division_is_left_to_tvm():
    """NumPy and TVM round it differently."""
    seven, two = relay.const(np.array([-7]), "int32"), relay.const(np.array([2]), "int32")
    module = tvm.IRModule.from_expr(seven / two)
    assert count_operators(constant_pass.fold_constants(module)) == {"divide": 1}


def test_float16_sums_are_rounded_each():
    a = relay.const(np.array([2048.0], "float16"))
    one = relay.const(np.array([1.0], "float16"))
    module = tvm.IRModule.from_expr(a + one + one)
    assert constant_pass.fold_constants(module)["main"].body.data.numpy().tolist() == [2048.0]


def test_inputs_are_not_folded():
    net = Net()
    x = net.input("x", (2, 3))
    module = net.module(x + net.const(2, 3) * relay.const(2.0))
    folded = constant_pass.fold_constants(module)
    assert count_operators(folded) == {"add": 1}
    again = constant_pass.fold_constants(folded)
    assert tvm.ir.structural_equal(again, folded)


def test_other_operators_are_folded_by_tvm_in_the_end():
    module = tvm.IRModule.from_expr(relay.exp(relay.const(np.zeros(2, "float32"))))
    assert count_operators(constant_pass.fold_constants(module)) == {"exp": 1}
    folded = constant_pass.fold_all_constants(module)
    assert folded["main"].body.data.numpy().tolist() == [1.0, 1.0]


def test_split_constants_and_infinities():
    """0 / 0 warns nobody and stays what it is."""
    zero = relay.const(np.zeros(2, "float32"))
    module = tvm.IRModule.from_expr(zero / zero)
    assert np.isnan(constant_pass.fold_constants(module)["main"].body.data.numpy()).all()
