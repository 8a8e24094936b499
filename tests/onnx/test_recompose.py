"""Batch norms as exporters write them in ONNX: each spelling becomes one node that computes the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import Builder, run
from tests.support.onnx_pieces import (
    EPSILON,
    NORM,
    PLACES,
    SPELLINGS,
    C,
    affine,
    cast,
    centred,
    deviation,
    parameters,
    pieces,
    stored,
    tensorflow,
)
from tvm_fuse.core.dtypes import FLOATS, holds
from tvm_fuse.onnx.fold import fold_parts
from tvm_fuse.onnx.parts import put_together, take_apart
from tvm_fuse.onnx.recompose import recompose_parts

OPSETS = (7, 9, 13, 15, 17)


def recompose(model):
    """The new model, which is valid, and what was found in it."""
    parts, records = recompose_parts(take_apart(model))
    after = put_together(parts)
    onnx.checker.check_model(after, full_check=True)
    return after, records


def operators(model):
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def norms(model):
    return [node for node in model.graph.node if node.op_type == "BatchNormalization"]


def vectors(model, node):
    """The parameters of a batch norm: gamma, beta, mean, variance."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return dict(zip(NORM, (constants[name] for name in node.input[1:])))


def epsilon_of(node):
    return helper.get_node_attr_value(node, "epsilon")


def feeds(model, seed=0):
    rng = np.random.default_rng(seed)
    info = model.graph.input[0].type.tensor_type
    shape = [dim.dim_value or 3 for dim in info.shape.dim]
    return {"x": rng.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(info.elem_type))}


def assert_same(model, other, tolerance=1e-5):
    feed = feeds(model)
    for want, got in zip(run(model, feed), run(other, feed)):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def assert_recomposed(model, spelling, dtype="float32", tolerance=1e-5):
    after, (record,) = recompose(model)
    assert operators(after) == ["Conv", "BatchNormalization", "Relu"]
    (node,) = norms(after)
    assert (node.name, record.name, node.output[0]) == ("last", "last", "last")
    assert record.epsilon == np.array(EPSILON, dtype)
    assert epsilon_of(node) == np.float32(record.epsilon)
    for role, vector in {**NORM, **SPELLINGS[spelling][1]}.items():
        np.testing.assert_array_equal(vectors(after, node)[role], vector.astype(dtype), err_msg=role)
    assert_same(model, after, tolerance)
    folded = fold_parts(take_apart(after))
    assert operators(folded.proto) == ["Conv", "Relu"]
    assert [item.name for item in folded.folds] == ["last"]
    assert_same(model, folded.proto, tolerance)


@pytest.mark.parametrize("const_nodes", [False, True], ids=["initializers", "Constant nodes"])
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b048_every_spelling_at_every_opset(spelling, opset, const_nodes):
    assert_recomposed(pieces(spelling, opset=opset, const_nodes=const_nodes), spelling)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b049_constants_wherever_they_come_from(spelling, place):
    assert_recomposed(pieces(spelling, PLACES[place]), spelling)


@pytest.mark.parametrize("opset", OPSETS)
def test_b050_float16(opset):
    assert_recomposed(pieces("TensorFlow", opset=opset, dtype="float16"), "TensorFlow", "float16", 2e-2)


@pytest.mark.parametrize("opset", OPSETS)
def test_b050_float64_but_for_epsilon_which_onnx_keeps_in_float32(opset):
    b = Builder(opset=opset, dtype="float64")  # onnxruntime has no convolution of that dtype
    model = b.build([SPELLINGS["TensorFlow"][0](b, b.input("x", (2, C, 5, 5)), parameters(b))])
    after, (record,) = recompose(model)
    assert (operators(after), record.epsilon) == (["BatchNormalization"], EPSILON)
    for role, vector in NORM.items():
        np.testing.assert_array_equal(vectors(after, norms(after)[0])[role], vector)
    assert_same(model, after, 1e-8)


def test_a_rounded_constant_is_what_the_model_computes_with():
    after, _ = recompose(pieces(place=cast))
    for role, vector in NORM.items():
        np.testing.assert_array_equal(vectors(after, norms(after)[0])[role], vector.astype("float16"))


def test_constants_are_listed_as_inputs_where_they_must_be():
    model = pieces(opset=7, ir_version=3, initializers_as_inputs=True)
    after, records = recompose(model)
    assert len(records) == 1
    assert {value.name for value in after.graph.input} == {
        "x", *(tensor.name for tensor in after.graph.initializer)
    }  # fmt: skip
    assert_same(model, after)


# --- ranks and shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_every_rank_with_channels_in_axis_1(rank):
    b = Builder()
    x = b.input("x", (C, C, *(C,) * (rank - 2)))  # a wrong axis fits
    y = SPELLINGS["TensorFlow"][0](b, x, parameters(b, lambda b, v: stored(b, v, C, *(1,) * (rank - 2))))
    model = b.build([y])
    after, (record,) = recompose(model)
    assert (operators(after), record.axis) == (["BatchNormalization"], 1)
    assert_same(model, after)


@pytest.mark.parametrize("shape", [("N", 3, "H", "W"), (None, 3, None, None), ("N", 3, "S", "S")])
def test_sizes_that_are_not_known(shape):
    model = pieces(shape=shape)
    after, records = recompose(model)
    assert len(records) == 1
    assert_same(model, after)


def test_several_at_once_and_in_a_row():
    b = Builder()
    y = b.input("x", (1, C, 4, 4))
    for spelling in ("PyTorch", "TensorFlow", "not affine"):
        for _ in range(2):
            y = SPELLINGS[spelling][0](b, y, parameters(b))
            b.nodes[-1].name = b.nodes[-1].output[0] = y = f"{spelling} {len(b.nodes)}"
        y = b.relu(y)
    model = b.build([y])
    after, records = recompose(model)
    assert operators(after) == ["BatchNormalization", "BatchNormalization", "Relu"] * 3
    assert [record.name for record in records] == [node.name for node in norms(after)]
    assert_same(model, after)


def test_shared_constants_stay_for_their_other_readers():
    b = Builder()
    p = parameters(b)
    x = b.input("x", (1, C, 4, 4))
    y = SPELLINGS["PyTorch"][0](b, x, p)
    model = b.build([y, b.op("Exp", deviation(b, p))])
    after, records = recompose(model)
    assert (len(records), sorted(operators(after))) == (
        1, ["Add", "BatchNormalization", "Exp", "Sqrt", "Unsqueeze"],
    )  # fmt: skip
    assert_same(model, after)


# --- names -----------------------------------------------------------------------------------------


def test_a_nameless_operator_gets_a_name_that_is_free():
    b = Builder()
    y = SPELLINGS["PyTorch"][0](b, b.input("x", (1, C, 4, 4)), parameters(b))
    b.nodes[-1].name = ""
    model = b.build([b.relu(y, name="last/BatchNormalization"), b.op("Exp", y, name="last_gamma")])
    after, (record,) = recompose(model)
    (node,) = norms(after)
    assert node.name == record.name == "last/BatchNormalization_1"
    assert node.input[1:] == ["last_gamma_1", "last_beta", "last_mean", "last_variance"]
    assert_same(model, after)


def test_the_model_says_nothing_of_values_that_are_gone():
    model = onnx.shape_inference.infer_shapes(pieces())
    after, _ = recompose(model)
    assert {value.name for value in after.graph.value_info} == {"conv", "last"}


def test_what_a_branch_reads_keeps_its_name():
    b = Builder()
    x = b.input("x", (1, C, 4, 4))
    y = SPELLINGS["PyTorch"][0](b, x, parameters(b))
    out, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, C, 4, 4)) for name in ("out", "z"))
    branch = helper.make_graph([helper.make_node("Exp", [y], ["out"])], "branch", [], [out])
    on = b.const(np.array(True))
    b.nodes.append(helper.make_node("If", [on], ["z"], name="if", then_branch=branch, else_branch=branch))
    model = b._model([z])
    after, records = recompose(model)
    assert (len(records), operators(after)) == (1, ["BatchNormalization", "If"])
    assert_same(model, after)


# --- what stays ------------------------------------------------------------------------------------


def last_axis(b, x):
    """ONNX has no batch norm over the last of three axes."""
    return [SPELLINGS["PyTorch"][0](b, b.input("y", (2, 3, C)), parameters(b, lambda b, v: b.const(v)))]


def summed_wider(b, x):
    """The variance may not fit into the dtype of the data."""
    b.initializers += [
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in {"variance": NORM["variance"], "epsilon": np.float64(EPSILON)}.items()
    ]
    root = b.op("Cast", b.op("Sqrt", b.op("Add", "variance", "epsilon")), to=TensorProto.FLOAT)
    return [b.op("Div", x, b.op("Reshape", root, b.const(np.array([C, 1, 1]))))]


def value_between_is_returned(b, x):
    p = parameters(b)
    middle = centred(b, x, p)
    return [affine(b, b.op("Div", middle, deviation(b, p)), p), middle]


def epsilon_is_not_told(b, x):
    p = parameters(b, epsilon=3.0)
    return [affine(b, b.op("Div", centred(b, x, p), deviation(b, p)), p)]


def mean_is_the_bias_of_a_layer(b, x):
    """The value between a convolution and its bias has no name."""
    mean = b.op("Neg", b.const(NORM["mean"]))
    y = b.op("Conv", x, b.const(b.rng.standard_normal((C, C, 1, 1))), mean)
    return [b.op("Div", y, deviation(b, parameters(b)))]


def root_of_data(b, x):
    return [b.op("Div", x, b.op("Sqrt", b.op("Add", b.op("Mul", x, x), b.const(np.array(EPSILON)))))]


LEFT = (
    last_axis,
    summed_wider,
    value_between_is_returned,
    epsilon_is_not_told,
    mean_is_the_bias_of_a_layer,
    root_of_data,
)


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("opset", [13, 17])
def test_what_is_left_alone(make, opset):
    b = Builder(opset=opset)
    parts = take_apart(b.build(make(b, b.input("x", (2, C, 3, 3)))))
    after, records = recompose_parts(parts)
    assert (after is parts, records) == (True, ())


def bfloat16(opset):
    vectors = {**{role: vector.reshape(C, 1, 1) for role, vector in NORM.items()}, "epsilon": np.array(1e-3)}
    constants = [
        helper.make_tensor(role, TensorProto.BFLOAT16, vector.shape, vector.ravel().tolist())
        for role, vector in vectors.items()
    ]
    b = Builder(opset=opset)
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, (1, C, 2, 2))
    b.inputs, b.initializers = [x], constants
    tensorflow(b, "x", SimpleNamespace(**{role: role for role in vectors}))
    y = helper.make_tensor_value_info("last", TensorProto.BFLOAT16, (1, C, 2, 2))
    return b._model([y])


@pytest.mark.parametrize("opset", [13, 14, 17])
def test_bfloat16_from_opset_14(opset):
    after, records = recompose_parts(take_apart(bfloat16(opset)))
    assert len(records) == (opset >= 14)
    for record in records:
        assert operators(after.structure) == ["BatchNormalization"]
        assert {tensor.data_type for tensor in after.structure.graph.initializer} == {TensorProto.BFLOAT16}
        assert record.epsilon == pytest.approx(1e-3, rel=2**-8)


def test_dead_operators_are_no_batch_norm():
    b = Builder()
    x = b.input("x", (1, C, 4, 4))
    SPELLINGS["PyTorch"][0](b, x, parameters(b))
    parts = take_apart(b.build([b.relu(x, name="relu")]))
    assert recompose_parts(parts) == (parts, ())


def test_a_second_run_finds_nothing():
    parts, _ = recompose_parts(take_apart(pieces()))
    again, records = recompose_parts(parts)
    assert (again is parts, records) == (True, ())


@pytest.mark.parametrize("dtype", FLOATS)
def test_which_dtype_holds_which(dtype):
    wider = {
        "float16": {"float16"},
        "bfloat16": {"bfloat16"},
        "float32": {"float16", "bfloat16", "float32"},
        "float64": set(FLOATS),
    }
    assert {other for other in FLOATS if holds(dtype, other)} == wider[dtype]
