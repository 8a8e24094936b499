"""Chains: what joins, under which name, and why a chain ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.chain import MOST_OPERATORS, StepKind, grow_chain
from tvm_fuse.core.graph import TensorInfo
from tvm_fuse.core.reason import Code

C = 4


def start(layout="NCHW", size=4, batch=1, channels=C, kernel="OIHW"):
    """A builder and a 1x1 conv whose output has ``channels`` channels; H == W == C hides nothing."""
    g = GraphBuilder()
    shape = tuple({"N": batch, "C": C, "H": size, "W": size}[letter] for letter in layout)
    return g, g.conv2d(g.input("x", shape), np.ones((channels, C, 1, 1)), layout=layout, kernel=kernel)


def grown(g, anchor, *outputs, taken=()):
    return grow_chain(g.build(*outputs), anchor, taken)


def ending(g, anchor, *outputs, taken=()):
    chain = grown(g, anchor, *outputs, taken=taken)
    return chain.epilogue, chain.end.code


# --- one step ----------------------------------------------------------------------------------


def quantize(g, y):
    return g.cast(g.clip(g.elementwise("round", g.divide(y, 0.05)), -128.0, 127.0), "int8")


ONE_STEP = [
    ("bias_add", ("bias",), lambda g, y: g.bias_add(y, np.ones(C))),
    ("bias C11", ("bias",), lambda g, y: g.add(y, np.ones((C, 1, 1)))),
    ("bias 1C11", ("bias",), lambda g, y: g.add(np.ones((1, C, 1, 1)), y)),
    ("bias that is a parameter", ("bias",), lambda g, y: g.add(y, g.input("b", (C, 1, 1)))),
    ("bias_add of a parameter", ("bias",), lambda g, y: g.bias_add(y, g.input("b", (C,)))),
    ("residual", ("residual",), lambda g, y: g.add(y, g.input("r", g.shape(y)))),
    ("residual first", ("residual",), lambda g, y: g.add(g.input("r", g.shape(y)), y)),
    ("constant residual", ("residual",), lambda g, y: g.add(y, np.ones((1, C, 4, 4)))),
    ("vector along W", ("add",), lambda g, y: g.add(y, np.ones(C))),
    ("vector along H", ("add",), lambda g, y: g.add(y, np.ones((C, 1)))),
    ("bias_add along W", ("bias_add",), lambda g, y: g.bias_add(y, np.ones(C), axis=3)),
    ("scalar", ("add",), lambda g, y: g.add(y, 3.0)),
    ("computed channel vector", ("add",), lambda g, y: g.add(y, g.relu(g.input("s", (1, C, 1, 1))))),
    ("a number of a vector's shape", ("scale",), lambda g, y: g.multiply(np.ones((1, 1, 1, 1)), y)),
    ("a constant image", ("mul",), lambda g, y: g.multiply(y, np.ones((1, C, 4, 4)))),
    ("scale of a row", ("mul",), lambda g, y: g.multiply(y, np.ones(C))),
    ("quantize", ("quantize",), quantize),
    ("x + x", ("add",), lambda g, y: g.add(y, y)),
    ("scale", ("scale",), lambda g, y: g.multiply(y, np.ones((C, 1, 1)))),
    ("gate", ("mul",), lambda g, y: g.multiply(y, g.input("s", (1, C, 1, 1)))),
    ("subtract", ("subtract",), lambda g, y: g.subtract(y, g.input("r", g.shape(y)))),
    ("exp", ("exp",), lambda g, y: g.elementwise("exp", y)),
    ("x * tanh(x)", ("elementwise",), lambda g, y: g.multiply(y, g.tanh(y))),
    ("x * (sigmoid(1.7 x))", ("elementwise",), lambda g, y: g.multiply(y, g.sigmoid(g.multiply(y, 1.7)))),
    ("gelu by sigmoid", ("gelu_sigmoid",), lambda g, y: g.multiply(y, g.sigmoid(g.multiply(y, 1.702)))),
    ("prelu", ("prelu",), lambda g, y: g.prelu(y, np.ones(C))),
    ("softplus", ("softplus",), lambda g, y: g.log(g.add(g.exp(y), 1.0))),
    ("relu", ("relu",), lambda g, y: g.relu(y)),
    ("relu6", ("relu6",), lambda g, y: g.clip(y)),
    ("clip", ("clip",), lambda g, y: g.clip(y, -1.0, 1.0)),
    ("leaky relu", ("leaky_relu",), lambda g, y: g.leaky_relu(y)),
    ("sigmoid", ("sigmoid",), lambda g, y: g.sigmoid(y)),
    ("tanh", ("tanh",), lambda g, y: g.tanh(y)),
    ("silu", ("silu",), lambda g, y: g.multiply(g.sigmoid(y), y)),
    ("hard swish", ("hard_swish",), lambda g, y: g.divide(g.multiply(y, g.clip(g.add(y, 3.0))), 6.0)),
    ("hard sigmoid", ("hard_sigmoid",), lambda g, y: g.divide(g.clip(g.add(y, 3.0)), 6.0)),
    ("hard swish / 5", ("elementwise", "divide"),
     lambda g, y: g.divide(g.multiply(y, g.clip(g.add(y, 3.0))), 5.0)),
]  # fmt: skip


@pytest.mark.parametrize(("epilogue", "make"), [pytest.param(*case, id=name) for name, *case in ONE_STEP])
def test_steps(epilogue, make):
    g, conv = start()
    chain = grown(g, conv, make(g, conv))
    assert chain.epilogue == epilogue
    assert chain.result == len(g.nodes) - 1
    assert chain.end.code is Code.RESULT_RETURNED
    dependent = {conv}
    for node in g.nodes:
        if dependent.intersection(node.inputs):
            dependent.add(node.id)
    assert set(chain.nodes) == dependent


@pytest.mark.parametrize(
    ("layout", "shape", "kind"),
    [
        ("NHWC", (C,), StepKind.BIAS),
        ("NHWC", (1, 1, 1, C), StepKind.BIAS),
        ("NHWC", (C, 1), StepKind.ELEMENTWISE),
        ("NHWC", (C, 1, 1), StepKind.ELEMENTWISE),
        ("NCHW", (1,), StepKind.ELEMENTWISE),
    ],
    ids=str,
)
def test_channel_vectors_by_layout(layout, shape, kind):
    g, conv = start(layout)
    assert grown(g, conv, g.add(conv, np.ones(shape))).steps[0].kind is kind


@pytest.mark.parametrize(("axis", "kind"), [(3, StepKind.BIAS), (1, StepKind.ELEMENTWISE)])
def test_bias_add_in_nhwc(axis, kind):
    g, conv = start("NHWC")
    assert grown(g, conv, g.bias_add(conv, np.ones(C), axis=axis)).steps[0].kind is kind


def test_bias_of_a_blocked_layout():
    g = GraphBuilder()
    weight = np.ones((2, 1, 1, 1, 4, 4))
    conv = g.conv2d(g.input("x", (1, 1, 5, 5, 4)), weight, layout="NCHW4c", kernel="OIHW4i4o")
    biased = g.add(conv, np.ones((1, 2, 1, 1, 4)))
    inner = g.add(biased, np.ones((4,)))
    assert grown(g, conv, inner).epilogue == ("bias", "add")


def test_bias_of_one_channel_is_a_number():
    g, conv = start(channels=1)
    assert grown(g, conv, g.relu(g.add(conv, np.ones((1, 1, 1, 1))))).epilogue == ("bias", "relu")


def test_constant_image_in_a_layout_that_does_not_fit_is_no_bias():
    g = GraphBuilder()
    node = g.conv2d(g.input("x", (1, C, 4, 4)), np.ones((C, C, 1, 1)))
    g.nodes[node] = replace(g.nodes[node], outputs=(TensorInfo((C, 4, 4), "float64"),))
    assert grown(g, node, g.add(node, np.ones((C, 4, 4)))).steps[0].kind is StepKind.RESIDUAL


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((C,), StepKind.BIAS),
        ((1, C), StepKind.BIAS),
        ((3, 1), StepKind.ELEMENTWISE),
        ((3, C), StepKind.RESIDUAL),
    ],
    ids=str,
)
def test_dense(shape, kind):
    g = GraphBuilder()
    dense = g.dense(g.input("x", (3, 7)), np.ones((C, 7)))
    assert grown(g, dense, g.add(dense, np.ones(shape))).steps[0].kind is kind


# --- several steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True], ids=["y + r", "r + y"])
def test_bias_residual_relu(swapped):
    g, conv = start()
    residual = g.input("r", (1, C, 4, 4))
    biased = g.bias_add(conv, np.ones(C))
    added = g.add(residual, biased) if swapped else g.add(biased, residual)
    relu = g.relu(added)
    chain = grown(g, conv, g.other("pool", relu))
    assert chain.epilogue == ("bias", "residual", "relu")
    assert chain.nodes == (conv, biased, added, relu)
    assert [step.kind for step in chain.steps] == [StepKind.BIAS, StepKind.RESIDUAL, StepKind.ACTIVATION]
    assert (chain.end.code, chain.end.at) == (Code.READER_NOT_ELEMENTWISE, f"pool#{relu + 1}")


def test_operators_after_the_activation_join_too():
    g, conv = start()
    assert grown(g, conv, g.multiply(g.relu(conv), 2.0)).epilogue == ("relu", "scale")


def test_diamond_that_is_no_named_activation_is_one_step():
    g, conv = start()
    left, right = g.tanh(conv), g.elementwise("exp", conv)
    root = g.subtract(left, right)
    chain = grown(g, conv, root)
    assert chain.steps[0].nodes == (left, right, root)
    assert chain.epilogue == ("elementwise",)


def test_nested_diamonds():
    g, conv = start()
    a = g.tanh(conv)
    b = g.multiply(a, g.sigmoid(a))
    root = g.add(b, g.elementwise("exp", conv))
    chain = grown(g, conv, g.relu(root))
    assert chain.epilogue == ("elementwise", "relu")
    assert chain.steps[0].result == root


def test_diamond_with_a_side_input_of_its_own():
    g, conv = start()
    side = g.input("s", (1, C, 4, 4))
    root = g.add(g.multiply(conv, side), conv)
    assert grown(g, conv, root).steps[0].nodes == (root - 1, root)


def test_b079_compare_where_and_add():
    """conv -> {greater_equal, add}; where(...): one diamond, one step."""
    g, conv = start()
    mask = g.elementwise("greater_equal", conv, 0.0)
    added = g.add(conv, 1.0)
    root = g.elementwise("where", mask, added, conv)
    assert grown(g, conv, root).steps[0].nodes == (mask, added, root)


# --- where a chain ends --------------------------------------------------------------------------


def test_ends_at_a_model_output():
    g, conv = start()
    relu = g.relu(conv)
    assert ending(g, conv, relu) == (("relu",), Code.RESULT_RETURNED)


def test_ends_at_a_model_output_in_the_middle():
    g, conv = start()
    biased = g.bias_add(conv, np.ones(C))
    assert ending(g, conv, g.relu(biased), biased) == (("bias",), Code.RESULT_RETURNED)


def test_anchor_that_is_an_output():
    g, conv = start()
    assert ending(g, conv, g.relu(conv), conv) == ((), Code.RESULT_RETURNED)


def test_output_inside_a_diamond():
    g, conv = start()
    gate = g.tanh(conv)
    assert ending(g, conv, g.multiply(conv, gate), gate) == ((), Code.RESULT_RETURNED)


def test_output_inside_a_named_activation():
    g, conv = start()
    gate = g.sigmoid(conv)
    assert ending(g, conv, g.multiply(conv, gate), gate) == ((), Code.RESULT_RETURNED)


def test_ends_at_two_readers():
    g, conv = start()
    relu = g.relu(conv)
    chain = grown(g, conv, g.other("pool", relu), g.other("flatten", relu))
    assert (chain.epilogue, chain.end.code) == (("relu",), Code.RESULT_SHARED)
    assert "pool" in chain.end.got
    assert "flatten" in chain.end.got


def test_inner_reader_outside_the_diamond():
    g, conv = start()
    gate = g.sigmoid(conv)
    gated, outside = g.multiply(conv, gate), g.other("pool", gate)
    assert ending(g, conv, g.relu(gated), outside) == ((), Code.RESULT_SHARED)


def test_two_independent_readers():
    g, conv = start()
    assert ending(g, conv, g.relu(conv), g.tanh(conv)) == ((), Code.RESULT_RETURNED)


def test_shortcut_around_another_conv():
    g, conv = start()
    relu = g.relu(conv)
    second = g.conv2d(relu, np.ones((C, C, 1, 1)))
    root = g.add(second, relu)
    assert ending(g, conv, root) == (("relu",), Code.RESULT_SHARED)
    assert ending(g, second, root) == (("residual",), Code.RESULT_RETURNED)


def test_value_that_nobody_reads():
    g, conv = start()
    assert ending(g, conv, g.input("z", ())) == ((), Code.RESULT_SHARED)


@pytest.mark.parametrize("op", ["pool", "conv2d", "tuple"])
def test_reader_that_is_not_elementwise(op):
    g, conv = start()
    reader = {
        "pool": lambda: g.other("pool", conv),
        "conv2d": lambda: g.conv2d(conv, np.ones((C, C, 1, 1))),
        "tuple": lambda: g.tuple(conv, conv),
    }[op]()
    assert ending(g, conv, reader) == ((), Code.READER_NOT_ELEMENTWISE)


@pytest.mark.parametrize("shape", [(1, 1, C, 4, 4), (3, C, 4, 4)], ids=["rank", "batch"])
def test_operand_that_widens_the_shape(shape):
    g, conv = start()
    chain = grown(g, conv, g.relu(g.add(conv, g.input("r", shape))))
    assert (chain.steps, chain.end.code) == ((), Code.RESULT_SHAPE_CHANGES)
    assert "x".join(map(str, shape)) in chain.end.got


def test_one_channel_widened_by_a_residual():
    g, conv = start(channels=1)
    assert ending(g, conv, g.add(conv, g.input("r", (1, 3, 4, 4)))) == ((), Code.RESULT_SHAPE_CHANGES)


def test_shape_that_changes_inside_a_diamond():
    g, conv = start(batch=1)
    wide = g.add(conv, g.input("r", (2, C, 4, 4)))
    assert ending(g, conv, g.multiply(wide, conv)) == ((), Code.RESULT_SHAPE_CHANGES)


def test_reader_in_another_chain():
    g, conv = start()
    biased = g.bias_add(conv, np.ones(C))
    added = g.add(biased, g.input("r", (1, C, 4, 4)))
    assert ending(g, conv, added, taken={added}) == (("bias",), Code.READER_IN_OTHER_CHAIN)


def test_chain_without_steps():
    g, conv = start()
    chain = grown(g, conv, conv)
    assert (chain.nodes, chain.result, chain.epilogue) == ((conv,), conv, ())


# --- fault kinds from public trackers --------------------------------------------------------------


def test_b020_full_size_addend_is_a_residual():
    g = GraphBuilder()
    conv = g.conv2d(g.input("x", (1, 136, 28, 28)), np.ones((136, 34, 1, 1)), groups=4)
    assert grown(g, conv, g.add(conv, np.ones((1, 136, 28, 28)))).epilogue == ("residual",)


def test_b035_requested_value_before_the_relu():
    g, conv = start()
    biased = g.bias_add(conv, np.ones(C))
    relu = g.relu(biased)
    assert ending(g, conv, biased, relu) == (("bias",), Code.RESULT_RETURNED)


@pytest.mark.parametrize(("op", "name"), [("multiply", "mul"), ("maximum", "maximum")])
def test_b106_other_combinations_are_no_residual(op, name):
    g, conv = start()
    other = g.input("r", (1, C, 4, 4))
    root = g.multiply(conv, other) if op == "multiply" else g.elementwise(op, conv, other)
    assert grown(g, conv, g.relu(root)).epilogue == (name, "relu")


@pytest.mark.parametrize("operators", [MOST_OPERATORS, MOST_OPERATORS + 1])
def test_a_long_chain_is_cut(operators):
    g, y = start()
    anchor = y
    for _ in range(operators - 1):
        y = g.tanh(y)
    chain = grown(g, anchor, y)
    assert len(chain.nodes) == MOST_OPERATORS
    assert chain.end.code is (Code.RESULT_RETURNED if operators == MOST_OPERATORS else Code.CHAIN_TOO_LONG)


def test_a_diamond_too_large_for_the_rest_of_the_chain_stays_out():
    g, y = start()
    anchor = y
    for _ in range(MOST_OPERATORS):
        y = g.multiply(y, g.sigmoid(y))
    chain = grown(g, anchor, y)
    assert chain.end.code is Code.CHAIN_TOO_LONG
    assert set(chain.epilogue) == {"silu"}
    assert len(chain.nodes) <= MOST_OPERATORS
