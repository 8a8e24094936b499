"""Constants as sums of products: what is told apart, what is one number, what is not read."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.terms import Constant, Factor, Term, read_constants

V = np.array([0.5, 2.0, 3.0])
W = np.array([0.0, -1.0, 4.0])
EPSILON = 1e-3


def read(g, node):
    return read_constants(g.build(node)).get(node)


def inverse(g):
    return g.rsqrt(g.add(V, EPSILON))


def test_products_are_divided_without_dividing():
    a, zero = Term(powers={Factor(b"a", V): 1}), Term(powers={Factor(b"zero", W): 1})
    product = a.times(zero).negated()
    assert product.times(zero, -1) == a.negated()
    assert product.times(product, -1) == Term()
    assert product.times(zero, -2).powers[Factor(b"zero", W)] == -1
    np.testing.assert_array_equal(product.numbers, -V * W)
    np.testing.assert_array_equal(Term().times(a, -1).numbers, 1 / V)
    np.testing.assert_array_equal(Constant((), ()).numbers, [0.0])


def test_a_shift_has_two_terms():
    g = GraphBuilder()
    constant = read(g, g.subtract(V, g.multiply(g.multiply(W, inverse(g)), V)))
    number, share = constant.terms
    assert not number.deviations
    (factor,) = share.deviations
    assert (share.sign, sorted(share.powers.values())) == (-1.0, [1, 1, 1])
    np.testing.assert_array_equal(share.times(Term(powers={factor: 1}), -1).numbers, -V * W)
    np.testing.assert_allclose(constant.numbers, V - W * V / np.sqrt(V + EPSILON), rtol=1e-15)


def test_a_root_keeps_variance_and_epsilon():
    g = GraphBuilder("float32")
    (factor,) = read(g, inverse(g)).deviations
    deviation = factor.deviation
    epsilon = float(np.float32(EPSILON))
    assert (deviation.epsilon, deviation.dtype, deviation.found) == (epsilon, "float32", "")
    np.testing.assert_array_equal(deviation.variance, V)
    np.testing.assert_allclose(factor.numbers, 1 / np.sqrt(V + epsilon), rtol=1e-15)


def test_equal_numbers_are_one_factor():
    g = GraphBuilder()
    quotient = g.divide(g.multiply(V, inverse(g)), g.multiply(inverse(g), V.copy()))
    assert read(g, quotient).terms == (Term(),)


def test_a_sum_without_a_deviation_is_one_number():
    g = GraphBuilder()
    (term,) = read(g, g.subtract(g.add(V, W), 1.0)).terms
    assert len(term.powers) == 1
    np.testing.assert_array_equal(term.numbers, V + W - 1)


READ = {
    "sqrt": (lambda g: g.sqrt(V), np.sqrt(V)),
    "power": (lambda g: g.power(V, 3.0), V**3),
    "powers": (lambda g: g.power(V, W), V**W),
    "power of a sum": (lambda g: g.power(g.add(V, EPSILON), 2.0), (V + EPSILON) ** 2),
    "reciprocal": (lambda g: g.reciprocal(g.negative(V)), -1 / V),
    "rounded": (lambda g: g.cast(g.cast(V / 3, "float16"), "float64"), (V / 3).astype("float16")),
    "of integers": (lambda g: g.cast(np.array([1, 2, 3]), "float64"), [1, 2, 3]),
    "root of a cast sum": (lambda g: g.rsqrt(g.cast(g.add(V, 1e-3), "float64")), (V + 1e-3) ** -0.5),
}


@pytest.mark.parametrize(("make", "wanted"), READ.values(), ids=READ.keys())
def test_numbers(make, wanted):
    g = GraphBuilder()
    np.testing.assert_allclose(read(g, make(g)).numbers, wanted, rtol=1e-15)


SHAPES = {
    "stored": (lambda g: g.const(V), (3,)),
    "number": (lambda g: g.const(2.0), ()),
    "expanded": (lambda g: g.expand_dims(V, 1, 2), (3, 1, 1)),
    "transposed": (lambda g: g.transpose(V.reshape(3, 1), 1, 0), (1, 3)),
    "repeated": (lambda g: g.broadcast_to(V.reshape(3, 1), 2, 3, 5), (1, 3, 1)),
    "with a number": (lambda g: g.multiply(V, np.ones((1, 1))), (1, 3)),
    "a target shape is not looked at": (
        lambda g: g.node(Kind.RESHAPE, "Reshape", (g.const(V), g.const(np.ones((2, 2)))), (3, 1)),
        (3, 1),
    ),
}


@pytest.mark.parametrize(("make", "wanted"), SHAPES.values(), ids=SHAPES.keys())
def test_shapes(make, wanted):
    g = GraphBuilder()
    assert read(g, make(g)).shape == wanted


def three_terms(g):
    return g.add(g.add(V, inverse(g)), g.sqrt(g.add(V, 2 * EPSILON)))


NOT_READ = {
    "matrix": lambda g: g.const(np.ones((2, 2))),
    "empty": lambda g: g.const(np.ones((0,))),
    "outer product": lambda g: g.multiply(V, V.reshape(3, 1)),
    "reshaped to a matrix": lambda g: g.reshape(np.ones(4), 2, 2),
    "repeated, then reshaped": lambda g: g.reshape(g.broadcast_to(V, 2, 3), 6),
    "symbolic shape": lambda g: g.reshape(V, "n"),
    "not from constants": lambda g: g.multiply(V, g.input("x", (3,))),
    "integers": lambda g: g.cast(V, "int32"),
    "another operator": lambda g: g.elementwise("exp", V),
    "power of a deviation": lambda g: g.power(inverse(g), 2.0),
    "over a sum": lambda g: g.divide(V, g.add(inverse(g), 1.0)),
    "many terms": lambda g: g.multiply(three_terms(g), three_terms(g)),
}


@pytest.mark.parametrize("make", NOT_READ.values(), ids=NOT_READ.keys())
def test_what_is_not_read(make):
    g = GraphBuilder()
    assert read(g, make(g)) is None


FOUND = {
    "two vectors": (V, W, "a vector of 3 + a vector of 3"),
    "large": (0.2, V, "0.2 + a vector of 3"),
    "two small numbers": (1e-3, 1e-2, "0.001 + 0.01"),
}


@pytest.mark.parametrize(("a", "b", "found"), FOUND.values(), ids=FOUND.keys())
def test_no_epsilon(a, b, found):
    g = GraphBuilder()
    (factor,) = read(g, g.sqrt(g.add(a, b))).deviations
    assert factor.deviation.found == found
    assert np.isnan(factor.deviation.epsilon)


def test_the_smaller_of_two_numbers_is_epsilon():
    g = GraphBuilder()
    (factor,) = read(g, g.sqrt(g.add(1e-2, np.full((1, 1), 2.0)))).deviations
    assert (factor.deviation.epsilon, factor.deviation.variance) == (1e-2, 2.0)
