"""Layers side by side: which may be one, what follows them, their order, and their constants in a row."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import Kind, TensorInfo
from tvm_fuse.core.reason import Code
from tvm_fuse.core.siblings import check_alike, check_layer, find_readers, join_constants, make_siblings

RNG = np.random.default_rng(0)


def random(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


def convs(g, x, *channels, **attrs):
    depth = g.shape(x)[1]
    return [g.conv2d(x, random(count, depth, 1, 1), name=f"conv{count}", **attrs) for count in channels]


def start(shape=(1, 8, 4, 4)):
    g = GraphBuilder("float32")
    return g, g.input("x", shape)


def test_readers_of_one_value():
    g, x = start()
    one, two = convs(g, x, 2, 3)
    (three,) = convs(g, g.relu(x), 4)
    graph = g.build(one, two, three)
    assert [[node.id for node in nodes] for nodes in find_readers(graph)] == [[one, two]]


def test_reshapes_of_one_value_are_one_value():
    g, x = start((2, 3, 8))
    layers = [g.dense(g.reshape(x, 6, 8), random(4, 8)) for _ in range(2)]
    other = g.dense(g.reshape(x, 3, 16), random(4, 16))
    assert [[node.id for node in nodes] for nodes in find_readers(g.build(*layers, other))] == [layers]


def test_weights_of_one_constant_are_not_siblings():
    """A product whose data are constant is no layer on a value."""
    g = GraphBuilder("float32")
    data = g.const(random(2, 8))
    layers = [g.dense(data, g.input(name, (3, 8))) for name in "ab"]
    assert find_readers(g.build(*layers)) == ()


REFUSED = {
    "weight is an input": (lambda g, x: g.conv2d(x, g.input("w", (2, 8, 1, 1))), Code.WEIGHT_NOT_CONSTANT),
    "grouped": (lambda g, x: g.conv2d(x, random(8, 4, 1, 1), groups=2), Code.SIBLING_GROUPED),
    "other weights": (lambda g, x: g.conv2d(x, random(2, 8, 1, 1, dtype="float16")), Code.SIBLING_DTYPE),
    "integers": (lambda g, x: g.conv2d(x, np.ones((2, 8, 1, 1), "int8")), Code.SIBLING_DTYPE),
    "packed": (
        lambda g, x: g.node(
            Kind.DENSE, "nn.contrib_dense_pack", (x, random(1, 8, 4)), (1, 4),
            type(g.nodes[g.dense(x, random(4, 4))].attrs)("OI4o"),
        ),
        Code.WEIGHT_LAYOUT_UNSUPPORTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, code = REFUSED[case]
    g, x = start()
    node = make(g, x)
    graph = g.build(node)
    reason = check_layer(graph, graph.nodes[node])
    assert reason is not None
    assert reason.code is code
    assert reason.at == str(graph.nodes[node])


def test_dynamic_is_refused():
    g = GraphBuilder("float32")
    x = g.input("x", ("n", 8))
    info = TensorInfo(("n", 4), "float32")
    attrs = g.nodes[g.dense(g.input("y", (1, 8)), random(4, 8))].attrs
    node = g.node(Kind.DENSE, "nn.dense", (x, random(4, 8)), (info,), attrs)
    graph = g.build(node)
    assert check_layer(graph, graph.nodes[node]).code is Code.CHAIN_DYNAMIC_SHAPE


ALIKE = {
    "channels": (lambda g, x: g.conv2d(x, random(5, 8, 1, 1)), True),
    "window": (lambda g, x: g.conv2d(x, random(2, 8, 3, 3), padding=(1, 1)), False),
    "stride": (lambda g, x: g.conv2d(x, random(2, 8, 1, 1), strides=(2, 2)), False),
    "padding": (lambda g, x: g.conv2d(x, random(2, 8, 1, 1), padding=(1, 1)), False),
    "layout": (lambda g, x: g.conv2d(x, random(1, 1, 8, 2), kernel="HWIO"), False),
}


@pytest.mark.parametrize("case", ALIKE)
def test_alike(case):
    make, wanted = ALIKE[case]
    g, x = start()
    first, other = g.conv2d(x, random(2, 8, 1, 1)), make(g, x)
    graph = g.build(first, other)
    reason = check_alike(graph, graph.nodes[other], graph.nodes[first])
    assert (reason is None) is wanted
    assert wanted or (reason.code is Code.SIBLINGS_DIFFER and reason.wanted != reason.got)


# --- rows ----------------------------------------------------------------------------------------

FOLLOWING = {
    "nothing": (lambda g, y, n: y, ["conv2d"]),
    "bias": (lambda g, y, n: g.add(y, random(n, 1, 1)), ["conv2d", "add"]),
    "bias first": (lambda g, y, n: g.add(random(1, n, 1, 1), y), ["conv2d", "add"]),
    "bias_add": (lambda g, y, n: g.bias_add(y, random(n)), ["conv2d", "bias_add"]),
    "bias and relu": (
        lambda g, y, n: g.relu(g.bias_add(y, random(n))), ["conv2d", "bias_add", "relu"]
    ),
    "silu": (lambda g, y, n: g.multiply(y, g.sigmoid(y)), ["conv2d", "sigmoid", "multiply"]),
    "same number": (lambda g, y, n: g.multiply(y, 0.5), ["conv2d", "multiply"]),
    "another number": (lambda g, y, n: g.multiply(y, float(n)), ["conv2d", "multiply"]),
    "other bounds": (lambda g, y, n: g.clip(y, 0.0, float(n)), ["conv2d"]),
    "other slopes": (lambda g, y, n: g.leaky_relu(y, 0.1 * n), ["conv2d"]),
    "operator of unknown attributes": (lambda g, y, n: g.elementwise("fn", y), ["conv2d"]),
    "one of them": (lambda g, y, n: g.relu(y) if n == 2 else y, ["conv2d"]),
    "for each pixel": (lambda g, y, n: g.add(y, random(4, 4)), ["conv2d", "add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWING)
def test_what_follows(case):
    follow, wanted = FOLLOWING[case]
    g, x = start()
    layers = convs(g, x, 2, 3)
    results = [follow(g, layer, g.shape(layer)[1]) for layer in layers]
    graph = g.build(*(g.other("pool", result) for result in results))
    siblings = make_siblings(graph, layers)
    assert [graph.nodes[row[0]].kind.value for row in siblings.rows] == wanted
    assert siblings.layers == tuple(layers)
    assert (siblings.sizes, siblings.offsets, siblings.parts) == ((2, 3), (0, 2), None)
    assert set(siblings.axes) == {1}


def test_a_value_that_is_read_beside_ends_the_rows():
    g, x = start()
    layers = convs(g, x, 2, 3)
    results = [g.relu(layer) for layer in layers]
    siblings = make_siblings(g.build(*results, layers[1]), layers)
    assert siblings.rows == (tuple(layers),)


def test_operands_of_an_add_in_any_order():
    g, x = start()
    layers = convs(g, x, 2, 3)
    results = g.add(layers[0], random(2, 1, 1)), g.add(random(3, 1, 1), layers[1])
    assert make_siblings(g.build(*results), layers).results == results


def test_operands_of_a_difference_are_not_exchanged():
    g, x = start()
    layers = convs(g, x, 2, 3)
    results = g.subtract(layers[0], random(2, 1, 1)), g.subtract(random(3, 1, 1), layers[1])
    assert make_siblings(g.build(*results), layers).results == tuple(layers)


def test_a_reshape_that_keeps_the_channels_last():
    g, x = start((6, 8))
    layers = [g.dense(x, random(count, 8)) for count in (2, 3)]
    shaped = [g.reshape(layer, 2, 3, g.shape(layer)[1]) for layer in layers]
    results = [g.add(value, random(g.shape(value)[-1])) for value in shaped]
    siblings = make_siblings(g.build(*results), layers)
    assert siblings.results == tuple(results)
    assert siblings.axes == (1, 2, 2)


BEHIND = {
    "that splits channels": lambda g, y: g.reshape(y, 2, 3, 2, 2),
    "and a constant along another axis": lambda g, y: g.add(g.reshape(y, 2, 3, 4), np.ones((3, 1))),
    "and an axis by its number": lambda g, y: g.bias_add(g.reshape(y, 2, 3, 4), random(4), axis=2),
}


@pytest.mark.parametrize(("case", "rows"), list(zip(BEHIND, (1, 2, 2))))
def test_a_reshape_ends_the_rows(case, rows):
    g, x = start((6, 8))
    layers = [g.dense(x, random(4, 8)) for _ in range(2)]
    siblings = make_siblings(g.build(*(BEHIND[case](g, layer) for layer in layers)), layers)
    assert len(siblings.rows) == rows


# --- the order, and a concatenation --------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "whole"),
    [((0, 1, 2), True), ((2, 0, 1), True), ((2, "x", 1, 0), False), (("x", 1, 0, 2), True)],
    ids=str,
)
def test_the_order_of_a_concatenation(order, whole):
    g, x = start()
    layers = convs(g, x, 2, 3, 4)
    fields = [x if place == "x" else layers[place] for place in order]
    tuple_id = len(g.nodes)
    graph = g.build(g.concatenate(*fields))
    siblings = make_siblings(graph, layers)
    assert siblings.parts == (tuple_id if whole else None)
    if whole:
        assert siblings.results == tuple(field for field in fields if field != x)
        assert siblings.sizes == tuple(g.shape(layer)[1] for layer in siblings.layers)


CONCATENATED = {
    "along another axis": lambda g, a, b: g.concatenate(a, b, axis=2),
    "twice": lambda g, a, b: g.concatenate(a, b, a),
}


@pytest.mark.parametrize("case", CONCATENATED)
def test_no_parts(case):
    g, x = start()
    layers = convs(g, x, 3, 3)
    assert make_siblings(g.build(CONCATENATED[case](g, *layers)), layers).parts is None


# --- constants -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "axis"), [("OIHW", 0), ("HWIO", 3)])
def test_weights_lie_in_a_row(kernel, axis):
    g, x = start()
    shapes = [tuple({"O": n, "I": 8, "H": 1, "W": 1}[letter] for letter in kernel) for n in (2, 3)]
    weights = [random(*shape) for shape in shapes]
    layers = [g.conv2d(x, weight, kernel=kernel) for weight in weights]
    graph = g.build(*layers)
    joined = join_constants(graph, make_siblings(graph, layers), 0)
    assert joined.dtype == np.float32
    np.testing.assert_array_equal(joined, np.concatenate(weights, axis))


JOINED = {
    "vectors": (lambda n: random(n, 1, 1), (5, 1, 1)),
    "with leading ones": (lambda n: random(1, n, 1, 1), (5, 1, 1)),
    "equal numbers": (lambda n: np.float32(3), ()),
    "numbers": (lambda n: np.float32(n), (5, 1, 1)),
    "pixels": (lambda n: random(n, 4, 4), (5, 4, 4)),
}


@pytest.mark.parametrize("case", JOINED)
def test_constants_lie_in_a_row(case):
    make, shape = JOINED[case]
    g, x = start()
    layers = convs(g, x, 2, 3)
    constants = [np.asarray(make(n)) for n in (2, 3)]
    graph = g.build(*(g.multiply(layer, constant) for layer, constant in zip(layers, constants)))
    joined = join_constants(graph, make_siblings(graph, layers), 1)
    assert joined.shape == shape
    whole = np.broadcast_to(joined, (1, 5, 4, 4))
    np.testing.assert_array_equal(whole[:, :2], np.broadcast_to(constants[0], (1, 2, 4, 4)))
    np.testing.assert_array_equal(whole[:, 2:], np.broadcast_to(constants[1], (1, 3, 4, 4)))


def test_a_row_without_constants():
    g, x = start()
    layers = convs(g, x, 2, 3)
    graph = g.build(*map(g.relu, layers))
    assert join_constants(graph, make_siblings(graph, layers), 1) is None
