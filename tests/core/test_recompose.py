"""Batch norms written as operators: every spelling is found with its numbers, near misses are not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, apply_recompositions, random_norm
from tests.support.numerics import evaluate, max_error, normalize
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.reason import Code
from tvm_fuse.core.recompose import plan_recompositions

C = 4
SHAPE = (2, C, C, C)  # a wrong axis fits
EPSILON = 1e-3
RNG = np.random.default_rng(0)
NORM = random_norm(C)
NO_MEAN, NO_GAMMA, NO_BETA = {"mean": 0.0}, {"gamma": 1.0}, {"beta": 0.0}


def column(g, vector, axis, rank):
    """``(C, 1, 1)`` for axis 1 of 4, ``(C,)`` for the last axis."""
    return g.const(vector.reshape((-1,) + (1,) * (rank - axis - 1)))


def full_rank(g, vector, axis, rank):
    return g.const(vector.reshape([-1 if index == axis else 1 for index in range(rank)]))


def expanded(g, vector, axis, rank):
    return g.expand_dims(vector, 1, rank - axis - 1)


def reshaped(g, vector, axis, rank):
    return g.reshape(vector, *(vector.size if index == axis else 1 for index in range(rank)))


def squeezed(g, vector, axis, rank):
    stored = vector.reshape((1, -1) + (1,) * (rank - axis))
    return g.reshape(stored, vector.size, *(1,) * (rank - axis - 1))


def transposed(g, vector, axis, rank):
    axes = list(range(rank))
    axes[axis], axes[0] = axes[0], axes[axis]
    return g.transpose(vector.reshape((-1,) + (1,) * (rank - 1)), *axes)


def cast(g, vector, axis, rank):
    return g.cast(full_rank(g, vector.astype("float32"), axis, rank), "float64")


def repeated(g, vector, axis, rank):
    return g.broadcast_to(column(g, vector, axis, rank), *(C,) * (rank - 1))


PLACES = (column, full_rank, expanded, reshaped, squeezed, transposed, cast, repeated)


def parameters(g, norm, place=column, axis=1, rank=4, epsilon=EPSILON):
    """The constants of a batch norm as nodes."""
    ids = {role: place(g, vector, axis, rank) for role, vector in norm._asdict().items()}
    return SimpleNamespace(**ids, epsilon=g.const(epsilon))


def std(g, p):
    return g.sqrt(g.add(p.variance, p.epsilon))


def inverse(g, p):
    return g.rsqrt(g.add(p.variance, p.epsilon))


def centred(g, x, p):
    return g.subtract(x, p.mean)


def scale(g, p):
    return g.multiply(p.gamma, inverse(g, p))


def tensorflow(g, x, s, p):
    return g.add(g.multiply(x, s), g.subtract(p.beta, g.multiply(p.mean, s)))


def by(g, x, p, r):
    """``(x - mean) * r * gamma + beta``."""
    return g.add(g.multiply(g.multiply(centred(g, x, p), r), p.gamma), p.beta)


#: Name -> operators, and the parameters that are not those of the norm.
SPELLINGS = {
    "(x - m) * (g * r) + b": (
        lambda g, x, p: g.add(g.multiply(centred(g, x, p), scale(g, p)), p.beta),
        {},
    ),
    "b + (r * g) * (x - m)": (
        lambda g, x, p: g.add(p.beta, g.multiply(g.multiply(inverse(g, p), p.gamma), g.subtract(x, p.mean))),
        {},
    ),
    "(x - m) * r * g + b": (lambda g, x, p: by(g, x, p, inverse(g, p)), {}),
    "b + g * (r * (x - m))": (
        lambda g, x, p: g.add(p.beta, g.multiply(p.gamma, g.multiply(inverse(g, p), g.subtract(x, p.mean)))),
        {},
    ),
    "epsilon first": (
        lambda g, x, p: by(g, x, p, g.rsqrt(g.add(p.epsilon, p.variance))),
        {},
    ),
    "(x - m) / sqrt * g + b": (
        lambda g, x, p: g.add(g.multiply(g.divide(centred(g, x, p), std(g, p)), p.gamma), p.beta),
        {},
    ),
    "g * (x - m) / sqrt + b": (
        lambda g, x, p: g.add(g.divide(g.multiply(p.gamma, centred(g, x, p)), std(g, p)), p.beta),
        {},
    ),
    "(x - m) * (g / sqrt) + b": (
        lambda g, x, p: g.add(g.multiply(centred(g, x, p), g.divide(p.gamma, std(g, p))), p.beta),
        {},
    ),
    "(x - m) / (sqrt / g) + b": (
        lambda g, x, p: g.add(g.divide(centred(g, x, p), g.divide(std(g, p), p.beta)), p.beta),
        {"gamma": NORM.beta},  # a divisor must not be zero
    ),
    "1 / sqrt": (lambda g, x, p: by(g, x, p, g.divide(1.0, std(g, p))), {}),
    "reciprocal of sqrt": (lambda g, x, p: by(g, x, p, g.reciprocal(std(g, p))), {}),
    "power -0.5": (lambda g, x, p: by(g, x, p, g.power(g.add(p.variance, p.epsilon), -0.5)), {}),
    "1 / power 0.5": (
        lambda g, x, p: by(g, x, p, g.divide(1.0, g.power(g.add(p.variance, p.epsilon), 0.5))),
        {},
    ),
    "/ power 0.5": (
        lambda g, x, p: g.add(
            g.multiply(g.divide(centred(g, x, p), g.power(g.add(p.variance, p.epsilon), 0.5)), p.gamma),
            p.beta,
        ),
        {},
    ),
    "x + (-m)": (
        lambda g, x, p: g.add(g.multiply(g.add(g.negative(p.mean), x), scale(g, p)), p.beta),
        {},
    ),
    "TensorFlow, shared scale": (lambda g, x, p: tensorflow(g, x, scale(g, p), p), {}),
    "TensorFlow, gamma / sqrt": (lambda g, x, p: tensorflow(g, x, g.divide(p.gamma, std(g, p)), p), {}),
    "TensorFlow, two scales": (
        lambda g, x, p: g.add(
            g.subtract(p.beta, g.multiply(scale(g, p), p.mean)), g.multiply(scale(g, p), x)
        ),
        {},
    ),
    "x * (g / sqrt) + (b - m * g / sqrt)": (
        lambda g, x, p: g.add(
            g.multiply(x, g.divide(p.gamma, std(g, p))),
            g.subtract(p.beta, g.divide(g.multiply(p.mean, p.gamma), std(g, p))),
        ),
        {},
    ),
    "x * s - (m * s - b)": (
        lambda g, x, p: g.subtract(
            g.multiply(x, scale(g, p)), g.subtract(g.multiply(p.mean, scale(g, p)), p.beta)
        ),
        {},
    ),
    "x * s + ((-m) * s + b)": (
        lambda g, x, p: g.add(
            g.multiply(x, scale(g, p)), g.add(g.multiply(g.negative(p.mean), scale(g, p)), p.beta)
        ),
        {},
    ),
    "x * s - m * s": (
        lambda g, x, p: g.subtract(g.multiply(x, scale(g, p)), g.multiply(p.mean, scale(g, p))),
        NO_BETA,
    ),
    "no gamma": (lambda g, x, p: g.add(g.multiply(centred(g, x, p), inverse(g, p)), p.beta), NO_GAMMA),
    "no gamma, TensorFlow": (lambda g, x, p: tensorflow(g, x, inverse(g, p), p), NO_GAMMA),
    "no beta": (lambda g, x, p: g.multiply(centred(g, x, p), scale(g, p)), NO_BETA),
    "no beta, gamma last": (
        lambda g, x, p: g.multiply(g.divide(centred(g, x, p), std(g, p)), p.gamma),
        NO_BETA,
    ),
    "no mean": (lambda g, x, p: g.add(g.multiply(x, scale(g, p)), p.beta), NO_MEAN),
    "no mean, gamma first": (
        lambda g, x, p: g.add(g.divide(g.multiply(x, p.gamma), std(g, p)), p.beta),
        NO_MEAN,
    ),
    "no gamma, no beta": (lambda g, x, p: g.divide(centred(g, x, p), std(g, p)), {**NO_GAMMA, **NO_BETA}),
    "scale only": (lambda g, x, p: g.multiply(x, scale(g, p)), {**NO_MEAN, **NO_BETA}),
    "deviation only": (lambda g, x, p: g.divide(x, std(g, p)), {**NO_MEAN, **NO_GAMMA, **NO_BETA}),
    "number for gamma": (
        lambda g, x, p: g.multiply(g.divide(centred(g, x, p), std(g, p)), 1.5),
        {"gamma": 1.5, **NO_BETA},
    ),
    "shapes after the root": (
        lambda g, x, p: by(g, x, p, g.expand_dims(g.reshape(inverse(g, p), C, 1), 2)),
        {},
    ),
}


def found(g, *outputs):
    """The batch norms of a graph, checked by value against the operators they replace."""
    graph = g.build(*outputs)
    records, decisions = plan_recompositions(graph)
    after = apply_recompositions(graph, records)
    feeds = {node.name: RNG.normal(size=node.output.shape) for node in graph.of_kind(Kind.INPUT)}
    for got, want in zip(evaluate(after, feeds), evaluate(graph, feeds)):
        assert max_error(got, want) < 1e-12
    assert len(records) == sum(decision.applied for decision in decisions)
    return records, decisions


def check(record, norm, epsilon=EPSILON, **others):
    """The parameters are the very numbers of the constants."""
    assert record.epsilon == epsilon
    for role, vector in {**norm._asdict(), **others}.items():
        np.testing.assert_array_equal(getattr(record, role), np.broadcast_to(vector, C))


@pytest.mark.parametrize(("spell", "others"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spellings(spell, others):
    g = GraphBuilder()
    x = g.input("x", SHAPE)
    (record,), (decision,) = found(g, g.relu(spell(g, x, parameters(g, NORM))))
    assert (record.data, record.axis, record.dtype, decision.applied) == (x, 1, "float64", True)
    check(record, NORM, **others)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("shape", "axis"), [(SHAPE, 1), (SHAPE, 3), (SHAPE, 2), ((3, C), 1), ((2, C, C), 1)])
@pytest.mark.parametrize("spelling", ["(x - m) * r * g + b", "TensorFlow, shared scale"])
def test_where_the_constants_lie(spelling, shape, axis, place):
    norm = NORM._replace(
        **{role: vector.astype("float32").astype("float64") for role, vector in NORM._asdict().items()}
    )
    g = GraphBuilder()
    x = g.input("x", shape)
    y = SPELLINGS[spelling][0](g, x, parameters(g, norm, place, axis, len(shape)))
    (record,), _ = found(g, y)
    assert (record.data, record.result, record.axis) == (x, y, axis)
    check(record, norm)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (1, 1, 1, 1)])
def test_shapes_of_epsilon_and_of_single_numbers(shape):
    g = GraphBuilder()
    p = parameters(g, NORM, epsilon=np.full(shape, EPSILON))
    p.mean, p.gamma = g.const(np.full(shape, 0.25)), g.const(np.full(shape, -1.5))
    (record,), _ = found(g, SPELLINGS["(x - m) * r * g + b"][0](g, g.input("x", SHAPE), p))
    check(record, NORM._replace(mean=np.full(C, 0.25), gamma=np.full(C, -1.5)))


@pytest.mark.parametrize("number", [1.0, -1.0, 0.0])
def test_units_are_numbers_like_others(number):
    g = GraphBuilder()
    p = parameters(g, NORM)
    p.mean, p.gamma, p.beta = g.const(number), g.const(-number), g.const(number)
    (record,), _ = found(g, by(g, g.input("x", SHAPE), p, inverse(g, p)))
    check(record, NORM, mean=number, gamma=-number, beta=number)


def test_epsilon_is_the_number_of_its_dtype():
    g = GraphBuilder("float32")
    p = parameters(g, random_norm(C, dtype="float32"), epsilon=1e-5)
    (record,), _ = found(g, by(g, g.input("x", SHAPE), p, inverse(g, p)))
    assert record.epsilon == float(np.float32(1e-5)) != 1e-5
    assert record.dtype == "float32"
    for role, vector in random_norm(C, dtype="float32")._asdict().items():
        np.testing.assert_array_equal(getattr(record, role), vector)


def test_a_cast_of_numbers_rounds():
    g = GraphBuilder()
    p = parameters(g, NORM)
    p.epsilon, p.mean = (g.cast(g.cast(value, "float16"), "float64") for value in (1e-3, p.mean))
    (record,), _ = found(g, by(g, g.input("x", SHAPE), p, inverse(g, p)))
    check(record, NORM._replace(mean=NORM.mean.astype("float16")), float(np.float16(1e-3)))


def test_statistics_in_float32_around_float16_data():
    norm = random_norm(C, dtype="float32")
    g = GraphBuilder("float32")
    r = g.cast(g.rsqrt(g.add(norm.variance.reshape(C, 1, 1), 1e-5)), "float16")
    g.dtype = "float16"
    x = g.input("x", SHAPE)
    graph = g.build(g.multiply(x, r))
    (record,), _ = plan_recompositions(graph)
    assert record.dtype == "float32"
    np.testing.assert_array_equal(record.variance, norm.variance)


def test_bias_add_and_names():
    g = GraphBuilder()
    p = parameters(g, NORM, axis=2)
    x = g.input("x", SHAPE)
    y = g.multiply(g.bias_add(g.multiply(g.subtract(x, p.mean), scale(g, p)), NORM.beta, axis=2), 3.0)
    g.nodes[y - 2] = dataclasses.replace(g.nodes[y - 2], name="bn1/add")
    (record,), (decision,) = found(g, y)
    assert record.name == decision.at == "bn1/add"
    assert record.operators == ("subtract", "multiply", "nn.bias_add")
    check(record, NORM)


def test_what_is_around_stays():
    g = GraphBuilder()
    x, p = g.input("x", SHAPE), parameters(g, NORM)
    biased = g.add(x, column(g, NORM.gamma, 1, 4))
    y = by(g, biased, p, inverse(g, p))
    z = g.multiply(g.add(y, column(g, NORM.mean, 1, 4)), 2.0)
    (record,), _ = found(g, z)
    assert (record.data, record.result) == (biased, y)


@pytest.mark.parametrize("spelling", ["TensorFlow, shared scale", "no mean"])
def test_a_bias_before_is_no_mean(spelling):
    g = GraphBuilder()
    biased = g.add(g.input("x", SHAPE), column(g, NORM.gamma, 1, 4))
    (record,), _ = found(g, SPELLINGS[spelling][0](g, biased, parameters(g, NORM)))
    assert record.data == biased


def test_numbers_of_an_activation_are_not_taken():
    g = GraphBuilder()
    p = parameters(g, NORM)
    y = g.divide(centred(g, g.input("x", SHAPE), p), std(g, p))
    (record,), _ = found(g, g.clip(g.add(g.multiply(y, 0.2), 0.5), 0.0, 1.0))
    assert record.result == y
    g = GraphBuilder()
    x, p = g.input("x", SHAPE), parameters(g, NORM)
    swish = g.multiply(g.multiply(x, g.clip(g.add(x, 3.0))), 1 / 6)
    (record,), _ = found(g, tensorflow(g, swish, inverse(g, p), p))
    assert record.data == swish


@pytest.mark.parametrize("second", SPELLINGS)
@pytest.mark.parametrize(
    "first", ["(x - m) * r * g + b", "TensorFlow, shared scale", "no beta", "deviation only"]
)
def test_two_in_a_row_are_two(first, second):
    g = GraphBuilder()
    p, q = parameters(g, NORM), parameters(g, random_norm(C, seed=1), epsilon=1e-5)
    y = SPELLINGS[first][0](g, g.input("x", SHAPE), p)
    z = SPELLINGS[second][0](g, y, q)
    records, _ = found(g, z)
    assert [record.epsilon for record in records] == [1e-3, 1e-5]
    assert records[1].result == z


def test_two_in_a_row_with_the_same_statistics_are_two():
    g = GraphBuilder()
    p = parameters(g, NORM)
    y = g.input("x", SHAPE)
    for _ in range(2):
        y = tensorflow(g, y, scale(g, p), p)
    records, _ = found(g, y)
    assert len(records) == 2
    for record in records:
        check(record, NORM)


def test_many_sites_share_constants():
    g = GraphBuilder()
    p = parameters(g, NORM)
    s = scale(g, p)
    shift = g.subtract(p.beta, g.multiply(p.mean, s))
    outputs = [g.add(g.multiply(g.input(f"x{n}", SHAPE), s), shift) for n in range(3)]
    records, _ = found(g, *outputs)
    assert [record.result for record in records] == outputs


def test_symbolic_sizes():
    g = GraphBuilder()
    p = parameters(g, NORM)
    graph = g.build(by(g, g.input("x", ("n", C, "h", "w")), p, inverse(g, p)))
    (record,), _ = plan_recompositions(graph)
    assert record.axis == 1
    check(record, NORM)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 1, 3, 3), 1), ((2, 3, 3, 1), 3), ((3, 1), 1), ((2, 1, 3, 1), 1)]
)
def test_one_channel(shape, axis):
    g = GraphBuilder()
    p = parameters(g, random_norm(1), lambda g, vector, axis, rank: g.const(vector))
    (record,), _ = found(g, by(g, g.input("x", shape), p, inverse(g, p)))
    assert (record.axis, record.epsilon, record.mean.shape) == (axis, EPSILON, (1,))


def test_a_mean_that_was_multiplied_out_is_in_beta():
    g = GraphBuilder()
    p = parameters(g, NORM)
    share = column(g, NORM.mean * NORM.gamma, 1, 4)
    shift = g.subtract(p.beta, g.multiply(share, inverse(g, p)))
    (record,), _ = found(g, g.add(g.multiply(g.input("x", SHAPE), scale(g, p)), shift))
    assert not record.mean.any()
    np.testing.assert_array_equal(record.gamma, NORM.gamma)


def test_broken_statistics_reach_the_audit():
    g = GraphBuilder()
    variance = np.array([1.0, -1.0, np.nan, np.inf])
    p = parameters(g, NORM._replace(variance=variance))
    (record,), _ = plan_recompositions(g.build(by(g, g.input("x", SHAPE), p, inverse(g, p))))
    check(record, NORM._replace(variance=variance))


# --- what is not one --------------------------------------------------------------------------


def from_data(g):
    """A layer norm: the variance comes from the data."""
    x = g.input("x", SHAPE)
    centre = g.subtract(x, g.other("mean", x, shape=(2, C, C, 1)))
    variance = g.other("mean", g.multiply(centre, centre), shape=(2, C, C, 1))
    return (g.add(g.multiply(g.multiply(centre, g.rsqrt(g.add(variance, 1e-5))), NORM.gamma), NORM.beta),)


def without_epsilon(g):
    p = parameters(g, NORM)
    return (by(g, g.input("x", SHAPE), p, g.rsqrt(p.variance)),)


def folded_deviation(g):
    p = parameters(g, NORM)
    return (by(g, g.input("x", SHAPE), p, p.variance),)


def as_input(g):
    p = parameters(g, NORM)
    p.variance = g.input("v", (C, 1, 1))
    return (by(g, g.input("x", SHAPE), p, inverse(g, p)),)


def wider_result(g):
    p = parameters(g, NORM)
    return (g.multiply(g.input("x", (2, 1, C, C)), inverse(g, p)),)


def other_roots(g):
    p = parameters(g, NORM)
    return (by(g, g.input("x", SHAPE), p, g.power(g.add(p.variance, p.epsilon), 2.0)),)


def of_the_constant(g):
    p = parameters(g, NORM)
    return (g.divide(inverse(g, p), g.input("x", SHAPE)), g.add(g.input("z", SHAPE), inverse(g, p)))


def full_size(g):
    return (g.multiply(g.input("x", SHAPE), g.rsqrt(g.add(np.ones(SHAPE), EPSILON))),)


SILENT = (
    from_data,
    without_epsilon,
    folded_deviation,
    as_input,
    wider_result,
    other_roots,
    of_the_constant,
    full_size,
)


@pytest.mark.parametrize("case", SILENT)
def test_what_is_no_batch_norm(case):
    g = GraphBuilder()
    assert plan_recompositions(g.build(*case(g))) == ((), ())


def shared(g, x, p):
    y = centred(g, x, p)
    return g.add(g.multiply(y, scale(g, p)), p.beta), g.relu(y)


def shared_before_beta(g, x, p):
    y = g.multiply(centred(g, x, p), scale(g, p))
    return g.add(y, p.beta), g.relu(y)


def returned(g, x, p):
    y = g.divide(centred(g, x, p), std(g, p))
    return g.add(g.multiply(y, p.gamma), p.beta), y


def with_epsilon(value):
    def spell(g, x, p):
        return (by(g, x, p, g.rsqrt(g.add(p.variance, value))),)

    return spell


def two_deviations(g, x, p):
    r = g.multiply(inverse(g, p), g.rsqrt(g.add(p.variance, 1e-5)))
    return (by(g, x, p, r),)


def over_the_deviation(g, x, p):
    return (g.multiply(centred(g, x, p), std(g, p)),)


def sum_of_scales(g, x, p):
    return (g.multiply(x, g.add(scale(g, p), 1.0)),)


def numbers(variance, epsilon):
    def spell(g, x, p):
        return (g.divide(g.subtract(x, 0.5), g.sqrt(g.add(variance, epsilon))),)

    return spell


REFUSED = {
    "mean shared": (shared, SHAPE, Code.ANCHOR_OUTPUT_SHARED),
    "shared before beta": (shared_before_beta, SHAPE, Code.ANCHOR_OUTPUT_SHARED),
    "returned": (returned, SHAPE, Code.ANCHOR_OUTPUT_RETURNED),
    "epsilon of zero": (with_epsilon(0.0), SHAPE, Code.BN_EPSILON_INVALID),
    "negative epsilon": (with_epsilon(-1e-3), SHAPE, Code.BN_EPSILON_INVALID),
    "large epsilon": (with_epsilon(0.5), SHAPE, Code.BN_EPSILON_INVALID),
    "NaN for epsilon": (with_epsilon(np.nan), SHAPE, Code.BN_EPSILON_INVALID),
    "vector for epsilon": (with_epsilon(np.full((C, 1, 1), EPSILON)), SHAPE, Code.BN_EPSILON_INVALID),
    "two deviations": (two_deviations, SHAPE, Code.BN_EPSILON_INVALID),
    "times the deviation": (over_the_deviation, SHAPE, Code.BN_EPSILON_INVALID),
    "a sum of scales": (sum_of_scales, SHAPE, Code.BN_EPSILON_INVALID),
    "scalars, two small": (numbers(1e-2, 1e-3), (2, 1, 3, 3), Code.BN_EPSILON_INVALID),
    "scalars, two large": (numbers(2.0, 1.0), (2, 1, 3, 3), Code.BN_EPSILON_INVALID),
    "scalars, many channels": (numbers(2.0, 1e-3), SHAPE, Code.BN_AXIS_NOT_CHANNEL),
    "scalars, no channels": (numbers(2.0, 1e-3), (1,), Code.BN_AXIS_NOT_CHANNEL),
    "symbolic channels": (
        lambda g, x, p: (g.node(Kind.DIVIDE, "divide", (x, std(g, p)), ("n", "c", 4, 4)),),
        ("n", "c", 4, 4),
        Code.BN_AXIS_NOT_CHANNEL,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spell", "shape", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_have_codes(spell, shape, code):
    g = GraphBuilder()
    graph = g.build(*spell(g, g.input("x", shape), parameters(g, NORM)))
    records, (decision,) = plan_recompositions(graph)
    assert (records, decision.reason.code) == ((), code)
    assert str(decision).startswith(f"recompose-batch-norm: not applied: {code.value} at ")


def test_sums_that_double_do_not_explode():
    g = GraphBuilder()
    p = parameters(g, NORM)
    shift = inverse(g, p)
    for _ in range(30):
        shift = g.add(shift, shift)
    (record,), _ = found(g, g.add(g.multiply(g.input("x", SHAPE), scale(g, p)), shift))
    assert not record.beta.any()


# --- the checks above can fail ---------------------------------------------------------------

MUTATIONS = {
    "wrong epsilon": lambda record: {"epsilon": 1e-5},
    "swapped mean and beta": lambda record: {"mean": record.beta, "beta": record.mean},
    "dropped gamma": lambda record: {"gamma": np.ones(C)},
    "wrong axis": lambda record: {"axis": 2},
    "variance with epsilon in it": lambda record: {"variance": record.variance + record.epsilon},
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_parameter_is_seen(mutation):
    g = GraphBuilder()
    p = parameters(g, NORM)
    graph = g.build(by(g, g.input("x", SHAPE), p, inverse(g, p)))
    (record,), _ = plan_recompositions(graph)
    feeds = {"x": RNG.normal(size=SHAPE)}
    (want,) = evaluate(graph, feeds)
    (got,) = evaluate(apply_recompositions(graph, [record]), feeds)
    assert max_error(got, want) < 1e-12
    assert max_error(normalize(feeds["x"], NORM, 1, EPSILON, True, True), want) < 1e-12
    wrong = dataclasses.replace(record, **mutation(record))
    (got,) = evaluate(apply_recompositions(graph, [wrong]), feeds)
    assert max_error(got, want) > 1e-5
