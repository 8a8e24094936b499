"""Edits carried out on ONNX models. The edits are made by hand: nothing here folds anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import Builder, run
from tvm_fuse.core.edit import Edit, LayerEdit
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import ANCHOR_KINDS, Kind
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.parts import put_together, take_apart
from tvm_fuse.onnx.prune import verify
from tvm_fuse.onnx.write import apply_edits


def read(model):
    return read_graph(take_apart(model))


def write(found, *edits):
    """The new model, checked; the old one is seen to be unchanged."""
    before = put_together(found.parts).SerializeToString()
    model = put_together(apply_edits(found, edits))
    assert put_together(found.parts).SerializeToString() == before
    onnx.checker.check_model(model, full_check=True)
    return model


def operators(model):
    return [node.op_type for node in model.graph.node]


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def value(found, name):
    return found.values.index(name)


def layer_of(found, name):
    """The layer that is in the ONNX node with this name."""
    (layer,) = [node for node in found.graph.nodes if node.kind in ANCHOR_KINDS and node.name == name]
    return layer


def weight_of(found, layer):
    return found.graph.constant(layer.inputs[1])


def assert_close(got, wanted, rtol=2e-6):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * max(1.0, np.abs(wanted).max()))


# --- every kind of layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """An ONNX operator with a weight; what it computes without its bias, and what comes on top."""

    op: str
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    channels: int
    attrs: dict[str, Any]
    bias_shape: tuple[int, ...] | None = None
    alpha: float = 1.0
    beta: float = 1.0

    def model(self, opset=17, with_bias=True):
        b = Builder(opset=opset)
        x = b.input("x", self.x_shape)
        inputs = [b.const(b.rng.standard_normal(self.w_shape), "w")]
        if self.bias_shape is not None and with_bias:
            inputs.append(b.const(b.rng.standard_normal(self.bias_shape), "b"))
        scales = {"alpha": self.alpha, "beta": self.beta} if self.op == "Gemm" and with_bias else {}
        return b.build([b.op(self.op, x, *inputs, name="y", **scales, **self.attrs)])

    @property
    def feeds(self):
        return {"x": np.random.default_rng(1).standard_normal(self.x_shape).astype(np.float32)}

    def plain(self):
        """What it computes without alpha and bias."""
        return run(self.model(with_bias=False), self.feeds)[0].astype(np.float64)

    def bias(self, rank):
        """``beta * C`` in the rank of the result."""
        if self.bias_shape is None:
            return 0.0
        bias = initializers(self.model())["b"].astype(np.float64) * self.beta
        return bias.reshape((1, -1) + (1,) * (rank - 2)) if self.op.startswith("Conv") else bias


def conv(rank, bias=True, **attrs):
    bias_shape = (4,) if bias else None
    return Layer("Conv", (2, 3, *(6,) * rank), (4, 3, *(3,) * rank), 4, attrs, bias_shape)


def transposed(rank, bias=True, groups=1):
    bias_shape = (6,) if bias else None
    shape = (4, 6 // groups, *(3,) * rank)
    return Layer("ConvTranspose", (2, 4, *(4,) * rank), shape, 6, {"group": groups}, bias_shape)


def gemm(bias_shape=None, alpha=1.0, beta=1.0, **attrs):
    x_shape = (4, 2) if attrs.get("transA") else (2, 4)
    w_shape = (3, 4) if attrs.get("transB") else (4, 3)
    return Layer("Gemm", x_shape, w_shape, 3, attrs, bias_shape, alpha, beta)


LAYERS = {
    "conv1d": conv(1), "conv2d": conv(2), "conv3d": conv(3), "no bias": conv(2, bias=False),
    "padded": conv(2, pads=[1, 0, 1, 2]), "same": conv(2, auto_pad="SAME_UPPER", strides=[2, 2]),
    "transposed1d": transposed(1), "transposed2d": transposed(2), "transposed3d": transposed(3),
    "transposed, groups": transposed(2, groups=2), "transposed, no bias": transposed(2, bias=False),
    "gemm": gemm(), "gemm, vector": gemm((3,)), "gemm, matrix": gemm((2, 3)), "gemm, column": gemm((2, 1)),
    "gemm, scalar": gemm(()), "gemm, alpha": gemm(alpha=0.3), "gemm, transB": gemm((3,), transB=1),
    "gemm, transA": gemm((1, 3), transA=1), "gemm, all": gemm((3,), 0.3, 0.7, transA=1, transB=1),
    "matmul": Layer("MatMul", (2, 4), (4, 3), 3, {}), "matmul3d": Layer("MatMul", (5, 2, 4), (4, 3), 3, {}),
    "matmul1d": Layer("MatMul", (4,), (4, 3), 3, {}), "batch": Layer("MatMul", (5, 2, 4), (5, 4, 3), 3, {}),
}  # fmt: skip


def each(layers):
    return pytest.mark.parametrize("layer", [pytest.param(layer, id=name) for name, layer in layers.items()])


def new_bias(form, result_shape, channels, axis):
    """A bias to add to a result: one number a channel, one for each element but the batch, or none."""
    shape = [1] * len(result_shape)
    if form == "channel":
        shape[axis] = channels
    elif form == "map":
        shape[1:] = result_shape[1:]
    if form is None:
        return None
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("keep", [True, False], ids=["inner kept", "inner aliased"])
@pytest.mark.parametrize("form", [None, "one", "channel", "map"], ids=["no bias", "one", "vector", "map"])
@each(LAYERS)
def test_new_parameters(layer, form, keep):
    found = read(layer.model())
    anchor = layer_of(found, "y")
    plain = layer.plain()
    axis = 1 if layer.op.startswith("Conv") else plain.ndim - 1
    bias = new_bias(form, plain.shape, layer.channels, axis)
    inner = [node.id for node in found.graph.nodes[anchor.id :] if node.kind is not Kind.CONSTANT]
    aliases = {} if keep else dict(zip(inner[1:], inner))
    edit = Edit((LayerEdit(anchor.id, weight_of(found, anchor) * np.float32(3), bias),), aliases)
    model = write(found, edit)

    wanted = plain * 3 + (0.0 if bias is None else bias)
    if keep:
        wanted = wanted * np.float32(layer.alpha) + layer.bias(plain.ndim)
    assert_close(run(model, layer.feeds)[0], wanted)
    assert [output.name for output in model.graph.output] == ["y"]
    assert set(initializers(model)) <= {"w_folded", "y_bias", "b"}
    is_one = (
        bias is None or layer.op == "Gemm" or (layer.op != "MatMul" and all_but_one(bias, axis))
    )  # not even the kept bias makes another operator
    assert operators(model) == ([layer.op] if is_one else [layer.op, "Add"])


def all_but_one(bias, axis):
    return all(size == 1 for index, size in enumerate(bias.shape) if index != axis)


def test_the_comparison_fails_for_other_numbers():
    wanted = LAYERS["conv2d"].plain()
    with pytest.raises(AssertionError):
        assert_close(wanted * (1 + 1e-4), wanted)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13])
def test_gemm_whose_sum_goes_away(opset):
    """Before opset 11, C may not be left out."""
    layer = LAYERS["gemm, vector"]
    found = read(layer.model(opset))
    anchor, add = layer_of(found, "y"), value(found, "y")
    edit = Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, None),), {add: anchor.id})
    model = write(found, edit)
    assert operators(model) == ["Gemm"]
    assert len(model.graph.node[0].input) == (2 if opset >= 11 else 3)
    assert_close(run(model, layer.feeds)[0], layer.plain() * 2)


@pytest.mark.parametrize("form", [None, "channel", "map"])
def test_a_bias_that_is_an_input_stays(form):
    b = Builder()
    x, old = b.input("x", (1, 3, 5, 5)), b.input("old", (4,))
    source = b.build([b.conv(x, 4, bias=old, name="y")])
    found = read(source)
    anchor = layer_of(found, "y")
    bias = new_bias(form, (1, 4, 3, 3), 4, 1)
    model = write(found, Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, bias),), {}))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((1, 3, 5, 5)).astype("f4"), "old": rng.standard_normal(4).astype("f4")}
    plain = run(source, {**feeds, "old": np.zeros(4, "f4")})[0] * 2
    wanted = plain + feeds["old"].reshape(1, 4, 1, 1) + (0 if bias is None else bias)
    assert_close(run(model, feeds)[0], wanted)
    assert model.graph.input == source.graph.input


def test_a_weight_that_does_not_change_keeps_its_name():
    found = read(LAYERS["conv2d"].model())
    anchor = layer_of(found, "y")
    bias = np.ones((1, 4, 1, 1), np.float32)
    model = write(found, Edit((LayerEdit(anchor.id, weight_of(found, anchor).copy(), bias),), {}))
    assert set(initializers(model)) == {"w", "y_bias"}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype):
    b = Builder(dtype=np.dtype(dtype))
    found = read(b.build([b.conv(b.input("x", (1, 3, 5, 5)), 4, bias=True, name="y")]))
    anchor = layer_of(found, "y")
    bias = np.full((1, 4, 1, 1), 0.1).astype(dtype)
    model = write(found, Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, bias),), {}))
    stored = initializers(model)
    assert {array.dtype for array in stored.values()} == {np.dtype(dtype)}
    old = initializers(put_together(found.parts))["y.bias"].astype(np.float64)
    assert np.array_equal(stored["y_bias"], (old + bias.reshape(-1).astype(np.float64)).astype(dtype))


def test_bfloat16():
    weight = np.ones((4, 3, 1, 1), ml_dtypes.bfloat16)
    tensors = [
        helper.make_tensor(name, TensorProto.BFLOAT16, array.shape, array.view(np.uint16).tobytes(), raw=True)
        for name, array in (("w", weight), ("b", np.ones(4, ml_dtypes.bfloat16)))
    ]
    shape = (1, 3, 2, 2)
    x = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, shape)
    y = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, (1, 4, 2, 2))
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], name="y")
    graph = helper.make_graph([node], "g", [x], [y], tensors)
    found = read(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 22)]))
    anchor = layer_of(found, "y")
    bias = np.full((1, 4, 1, 1), 0.5, ml_dtypes.bfloat16).view(np.uint16)
    new_weight = (weight * ml_dtypes.bfloat16(3)).view(np.uint16)
    parts = apply_edits(found, [Edit((LayerEdit(anchor.id, new_weight, bias),), {})])
    assert np.array_equal(parts.arrays["w_folded"], new_weight)
    assert np.array_equal(parts.arrays["y_bias"].view(ml_dtypes.bfloat16), np.full(4, 1.5))
    types = {tensor.data_type for tensor in put_together(parts).graph.initializer}
    assert types == {TensorProto.BFLOAT16}


# --- constants ---------------------------------------------------------------------------------


OPTIONS = {
    "initializers": {}, "Constant nodes": {"const_nodes": True}, "opset 9": {"opset": 9},
    "IR 3": {"ir_version": 3, "initializers_as_inputs": True, "opset": 8},
    "listed as inputs": {"initializers_as_inputs": True},
}  # fmt: skip
each_option = pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in OPTIONS.items()]
)


def two_convs(**options):
    """Two convolutions of one weight and one bias, added."""
    b = Builder(**options)
    x = b.input("x", (1, 3, 5, 5))
    weight, bias = b.const(b.rng.standard_normal((4, 3, 3, 3)), "W"), b.const(b.rng.standard_normal(4), "B")
    first = b.conv(x, 4, weight=weight, bias=bias, name="first")
    second = b.conv(b.op("Neg", x), 4, weight=weight, bias=bias, name="second")
    return b.build([first, second])


def image():
    return {"x": np.random.default_rng(3).standard_normal((1, 3, 5, 5)).astype(np.float32)}


def doubled(found, name, aliases=None):
    """The weight of a layer times two, its bias kept."""
    anchor = layer_of(found, name)
    return Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, None),), aliases or {})


@each_option
def test_a_shared_weight_is_copied(options):
    source = two_convs(**options)
    found = read(source)
    model = write(found, doubled(found, "first"))
    (one, two), (old_one, old_two) = run(model, image()), run(source, image())
    bias = found.parts.arrays["B"].reshape(1, 4, 1, 1)
    assert_close(one, (old_one - bias) * 2 + bias)
    assert np.array_equal(two, old_two)
    names = constant_names(model)
    assert len(names) == len(set(names)) == 3
    assert set(names) == {"W", "W_folded", "B"}
    assert inputs_that_are_constants(model) == (
        {"W", "W_folded", "B"} if options.get("ir_version") == 3
        else {"W", "B"} if options.get("initializers_as_inputs") else set()
    )  # fmt: skip


@each_option
def test_two_copies_of_one_weight_have_two_names(options):
    found = read(two_convs(**options))
    model = write(found, doubled(found, "first"), doubled(found, "second"))
    assert set(constant_names(model)) == {"W_folded", "W_folded_1", "B"}
    assert "W" not in {entry.name for entry in model.graph.input}
    assert next(entry.name for entry in model.graph.input) == "x"


def constant_names(model):
    """Names of constants, wherever they are."""
    nodes = [node.output[0] for node in model.graph.node if node.op_type == "Constant"]
    return [*initializers(model), *nodes]


def inputs_that_are_constants(model):
    return {entry.name for entry in model.graph.input} & set(initializers(model))


def test_new_names_are_new():
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 5, 5)), 4, weight=b.const(np.ones((4, 3, 3, 3)), "W"), name="y")
    z = b.op("Mul", b.relu(y, name="y_bias"), b.const(np.ones(1), "W_folded"), name="z")
    found = read(b.build([z]))
    anchor = layer_of(found, "y")
    bias = np.ones((1, 4, 3, 3), np.float32)
    model = write(found, Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, bias),), {}))
    (new,) = [name for name in initializers(model) if name not in ("W_folded", "y_bias_1")]
    assert new == "W_folded_1"


def test_a_weight_that_a_branch_reads_stays():
    source = two_convs()
    graphs = [
        helper.make_graph(
            [helper.make_node(op, ["W"], [op], name=op)], op, [],
            [helper.make_tensor_value_info(op, TensorProto.FLOAT, (4, 3, 3, 3))],
        )
        for op in ("Relu", "Neg")
    ]  # fmt: skip
    branch = helper.make_node("If", ["c"], ["w"], name="if", then_branch=graphs[0], else_branch=graphs[1])
    source.graph.node.append(branch)
    source.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, ()))
    source.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (4, 3, 3, 3)))
    found = read(source)
    model = write(found, doubled(found, "first"), doubled(found, "second"))
    assert set(initializers(model)) == {"W", "W_folded", "W_folded_1", "B"}
    feeds = {**image(), "c": np.array(False)}
    assert np.array_equal(run(model, feeds)[2], -found.parts.arrays["W"])


@pytest.mark.parametrize("op", ["Transpose", "Identity"])
def test_a_weight_behind_a_move_is_replaced(op):
    b = Builder()
    stored = b.const(b.rng.standard_normal((4, 3) if op == "Identity" else (3, 4)), "W")
    y = b.op("MatMul", b.input("x", (2, 4)), b.op(op, stored, name="moved"), name="y")
    source = b.build([y])
    found = read(source)
    model = write(found, doubled(found, "y"))
    assert operators(model) == ["MatMul"]
    assert set(initializers(model)) == {"moved_folded"}
    feeds = {"x": np.ones((2, 4), np.float32)}
    assert_close(run(model, feeds)[0], run(source, feeds)[0] * 2)


# --- values that become other values -----------------------------------------------------------


def chain(*ops, outputs, **branch):
    """``x -> ops[0] -> ops[1] ...``, each named after its position (``v0``, ``v1``, ...)."""
    b = Builder()
    current = b.input("x", (2, 3))
    for index, op in enumerate(ops):
        current = b.op(op, current, name=f"v{index}")
    return b.build(outputs)


def aliased(model, **names):
    """The model after aliases given by the names of the values."""
    found = read(model)
    return write(found, Edit((), {value(found, old): value(found, new) for old, new in names.items()}))


DATA = {"x": np.random.default_rng(4).uniform(0.5, 1.5, (2, 3)).astype(np.float32)}


def results(model, feeds=None):
    """Output name -> value, as the model says it is called."""
    return dict(zip([o.name for o in model.graph.output], run(model, DATA if feeds is None else feeds)))


def test_readers_read_the_other_value():
    model = aliased(chain("Exp", "Neg", "Relu", outputs=["v2"]), v1="v0")
    assert operators(model) == ["Exp", "Relu"]
    assert_close(results(model)["v2"], np.exp(DATA["x"]))


def test_the_producer_takes_over_the_name_of_an_output():
    source = chain("Exp", "Neg", outputs=["v1"])
    model = aliased(source, v1="v0")
    assert operators(model) == ["Exp"]
    assert model.graph.output == source.graph.output
    assert_close(results(model)["v1"], np.exp(DATA["x"]))


def test_other_readers_follow_the_name():
    b = Builder()
    v0 = b.op("Exp", b.input("x", (2, 3)), name="v0")
    model = b.build([b.op("Neg", v0, name="v1"), b.op("Tanh", v0, name="t")])
    model = aliased(model, v1="v0")
    assert sorted(operators(model)) == ["Exp", "Tanh"]
    found = results(model)
    assert_close(found["v1"], np.exp(DATA["x"]))
    assert_close(found["t"], np.tanh(np.exp(DATA["x"])))


def test_an_output_that_becomes_another_output():
    source = chain("Exp", "Neg", outputs=["v0", "v1"])
    model = aliased(source, v1="v0")
    assert operators(model) == ["Exp", "Identity"]
    assert model.graph.output == source.graph.output
    for array in results(model).values():
        assert_close(array, np.exp(DATA["x"]))


def test_two_outputs_that_become_one_value():
    model = aliased(chain("Exp", "Neg", "Abs", outputs=["v2", "v1"]), v1="v0", v2="v1")
    assert operators(model) == ["Exp", "Identity"]
    assert [output.name for output in model.graph.output] == ["v2", "v1"]
    for array in results(model).values():
        assert_close(array, np.exp(DATA["x"]))


def test_an_output_that_becomes_an_input():
    model = aliased(chain("Exp", "Neg", outputs=["v1"]), v1="v0", v0="x")
    assert operators(model) == ["Identity"]
    assert np.array_equal(results(model)["v1"], DATA["x"])


@pytest.mark.parametrize("as_node", [False, True])
def test_an_output_that_becomes_a_constant(as_node):
    b = Builder()
    constant = b.const(np.full((2, 3), 7.0), "k", as_node=as_node)
    model = b.build([b.op("Add", b.input("x", (2, 3)), constant, name="y")])
    model = aliased(model, y="k")
    assert operators(model)[-1] == "Identity"
    assert np.array_equal(results(model)["y"], np.full((2, 3), 7.0, np.float32))


def test_the_unused_input_stays():
    b = Builder()
    b.input("unused", (1,))
    model = b.build([b.op("Neg", b.op("Exp", b.input("x", (2, 3)), name="v0"), name="y")])
    assert [entry.name for entry in aliased(model, y="v0").graph.input] == ["unused", "x"]


def test_one_output_of_several():
    b = Builder()
    parts = b.op("Split", b.input("x", (2, 3)), b.const(np.array([1, 2])), n_out=2, axis=1, name="s")
    model = b.build([b.op("Neg", parts[1], name="y"), b.op("Exp", parts[0], name="e")])
    model = aliased(model, y="s_1")
    assert list(model.graph.node[0].output) == ["s", "y"]
    assert np.array_equal(results(model)["y"], DATA["x"][:, 1:])


def test_an_output_of_several_that_goes_away():
    b = Builder()
    x = b.input("x", (2, 3))
    parts = b.op("Split", x, b.const(np.array([1, 2])), n_out=2, axis=1, name="s")
    tail = b.op("Slice", x, *(b.const(np.array([n])) for n in (1, 3, 1)), name="tail")
    model = b.build([parts[1], b.op("Exp", parts[0], name="e"), b.op("Neg", tail, name="n")])
    model = aliased(model, s_1="tail")
    found = results(model)
    assert np.array_equal(found["s_1"], DATA["x"][:, 1:])
    assert_close(found["e"], np.exp(DATA["x"][:, :1]))


@pytest.mark.parametrize("copies", [("Identity", "Relu"), ("Relu", "Identity"), ("Identity", "Identity")])
def test_copies_around_an_aliased_value(copies):
    source = chain("Exp", copies[0], "Neg", copies[1], outputs=["v3"])
    found = read(source)
    before = value(found, "v0" if copies[0] == "Identity" else "v1")
    model = write(found, Edit((), {value(found, "v2"): before}))
    assert "Neg" not in operators(model)
    assert_close(results(model)["v3"], np.exp(DATA["x"]))


def test_a_residual_and_a_concatenation():
    b = Builder()
    x = b.input("x", (2, 3))
    v0 = b.op("Exp", x, name="v0")
    v1 = b.op("Neg", v0, name="v1")
    both = [b.op("Add", v1, x, name="sum"), b.op("Concat", v1, v0, v1, axis=1, name="row")]
    found = results(aliased(b.build(both), v1="v0"))
    e = np.exp(DATA["x"])
    assert_close(found["sum"], e + DATA["x"])
    assert_close(found["row"], np.concatenate([e, e, e], axis=1))


def branches(x="v1", outputs=("y",)):
    """``y = If(c, Relu(x), x + x)`` with x from outside: v0 = Exp(x), v1 = Neg(v0)."""
    b = Builder()
    v0 = b.op("Exp", b.input("x", (2, 3)), name="v0")
    b.op("Neg", v0, name="v1")
    condition = b.input("c", (), np.bool_)
    graphs = [
        helper.make_graph(
            [helper.make_node(op, [x] * count, [op], name=op)], op, [],
            [helper.make_tensor_value_info(op, TensorProto.FLOAT, (2, 3))],
        )
        for op, count in (("Relu", 1), ("Add", 2))
    ]  # fmt: skip
    b.op("If", condition, then_branch=graphs[0], else_branch=graphs[1], name="y")
    return b.build(list(outputs))


@pytest.mark.parametrize("outputs", [("y",), ("y", "v0"), ("v1", "y"), ("v1", "y", "v0")], ids=str)
def test_a_branch_keeps_the_names_that_it_takes_from_outside(outputs):
    source = branches(outputs=outputs)
    model = aliased(source, v1="v0")
    assert model.graph.output == source.graph.output
    assert "Neg" not in operators(model)
    e = np.exp(DATA["x"])
    for condition, wanted in ((True, e), (False, e + e)):
        found = results(model, {**DATA, "c": np.array(condition)})
        assert_close(found["y"], wanted)
        for name in set(outputs) - {"y"}:
            assert_close(found[name], e)


def test_what_only_a_branch_reads_stays():
    """v1 = Neg(v0) is read inside the branches only."""
    found = read(branches())
    model = write(found)
    assert operators(model) == ["Exp", "Neg", "If"]


# --- layers and values together ----------------------------------------------------------------


def conv_norm(output="bn", **options):
    b = Builder(**options)
    y = b.conv(b.input("x", (1, 3, 5, 5)), 4, bias=True, name="conv")
    y = b.batch_norm(y, name="bn")
    return b.build([y if output == "bn" else b.relu(y, name=output)])


def folded_by_hand(found):
    """The edit that folds the batch norm ``bn`` into ``conv``, by the formula."""
    gamma, beta, mean, variance = (
        found.parts.arrays[f"bn.{key}"].astype(np.float64) for key in ("gamma", "beta", "mean", "var")
    )
    scale = gamma / np.sqrt(variance + np.float64(np.float32(1e-5)))
    anchor = layer_of(found, "conv")
    weight = (weight_of(found, anchor) * scale.reshape(4, 1, 1, 1)).astype(np.float32)
    bias = ((found.parts.arrays["conv.bias"] - mean) * scale + beta).astype(np.float32)
    return Edit(
        (LayerEdit(anchor.id, weight, bias.reshape(1, 4, 1, 1)),),
        {value(found, "conv"): anchor.id, value(found, "bn"): value(found, "conv")},
    )


@pytest.mark.parametrize("output", ["bn", "relu"])
@each_option
def test_a_batch_norm_is_gone_and_the_output_keeps_its_name(options, output):
    source = conv_norm(output, **options)
    found = read(source)
    model = write(found, folded_by_hand(found))
    wanted = ["Conv"] if output == "bn" else ["Conv", "Relu"]
    assert [op for op in operators(model) if op != "Constant"] == wanted
    assert model.graph.output == source.graph.output
    assert_close(run(model, image())[0], run(source, image())[0].astype(np.float64))
    names = {entry.name for entry in model.graph.input}
    assert names == {"x"} | (set(initializers(model)) if options.get("ir_version") == 3 else set())
    assert (model.ir_version, model.opset_import) == (source.ir_version, source.opset_import)


def test_sizes_that_are_not_known():
    b = Builder()
    y = b.conv(b.input("x", ("n", 3, "h", None)), 4, bias=True, channels=3, name="conv")
    source = b.build([b.batch_norm(y, channels=4, name="bn")])
    found = read(source)
    model = write(found, folded_by_hand(found))
    assert (model.graph.input, model.graph.output) == (source.graph.input, source.graph.output)
    assert_close(run(model, image())[0], run(source, image())[0].astype(np.float64))


def test_node_names_and_value_names_are_two_things():
    """Each node has the name of the value of another one."""
    source = conv_norm("relu")
    for node, name in zip(source.graph.node, ("bn", "relu", "conv")):
        node.name = name
    found = read(source)
    anchor = layer_of(found, "bn")
    aliases = {value(found, "bn"): value(found, "conv")}
    model = write(found, Edit((LayerEdit(anchor.id, weight_of(found, anchor) * 2, None),), aliases))
    assert operators(model) == ["Conv", "Relu"]
    assert [node.name for node in model.graph.node] == ["bn", "conv"]
    plain = run(conv_norm_without_norm(source), image())[0]
    bias = found.parts.arrays["conv.bias"].reshape(1, 4, 1, 1)
    assert_close(run(model, image())[0], np.maximum((plain - bias) * 2 + bias, 0))


def conv_norm_without_norm(source):
    model = onnx.ModelProto()
    model.CopyFrom(source)
    model.graph.output[0].name = "conv"
    del model.graph.node[1:]
    return model


def test_what_is_said_about_the_model_stays():
    source = conv_norm("relu")
    source.metadata_props.add(key="author", value="somebody")
    source.doc_string, source.producer_name, source.model_version = "text", "exporter", 7
    source.graph.doc_string = "graph text"
    for name in ("conv", "bn", "nowhere"):
        source.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, 3, 3)))
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    source.functions.append(function)
    source.opset_import.append(helper.make_opsetid("local", 1))
    found = read(source)
    model = write(found, folded_by_hand(found))
    for field in (
        "metadata_props",
        "doc_string",
        "producer_name",
        "model_version",
        "functions",
        "opset_import",
    ):
        assert getattr(model, field) == getattr(source, field)
    assert (model.graph.name, model.graph.doc_string) == (source.graph.name, "graph text")
    assert [info.name for info in model.graph.value_info] == ["conv"]


def test_nothing_to_do_changes_nothing_but_what_is_dead():
    source = conv_norm("relu")
    alive = source.SerializeToString()
    source.graph.node.append(helper.make_node("Neg", ["conv"], ["dead"], name="dead"))
    source.graph.initializer.append(numpy_helper.from_array(np.ones(3, "f4"), "unread"))
    assert write(read(source)).SerializeToString(deterministic=True) == onnx.ModelProto.FromString(
        alive
    ).SerializeToString(deterministic=True)


# --- what cannot be ----------------------------------------------------------------------------


def test_edits_with_a_common_node_are_refused():
    found = read(conv_norm())
    with pytest.raises(InternalError, match="two edits"):
        apply_edits(found, [folded_by_hand(found), doubled(found, "conv")])


def test_a_weight_of_another_shape_is_refused():
    found = read(conv_norm())
    anchor = layer_of(found, "conv")
    for weight in (np.ones((4, 3, 3), np.float32), np.ones((4, 3, 3, 3))):
        with pytest.raises(InternalError, match="conv"):
            apply_edits(found, [Edit((LayerEdit(anchor.id, weight, None),), {})])


def test_an_edit_of_something_else_than_a_layer_is_refused():
    found = read(conv_norm("relu"))
    with pytest.raises(InternalError, match="relu"):
        apply_edits(found, [Edit((LayerEdit(value(found, "relu"), np.ones(1), None),), {})])


def test_an_inner_value_cannot_be_had_by_itself():
    """The bias add is kept, and the batch norm is to be the convolution without it."""
    found = read(conv_norm())
    with pytest.raises(InternalError, match="no name"):
        apply_edits(found, [Edit((), {value(found, "bn"): layer_of(found, "conv").id})])


def test_aliases_in_a_circle_are_refused():
    found = read(chain("Exp", "Neg", outputs=["v1"]))
    with pytest.raises(InternalError, match="circle"):
        apply_edits(
            found,
            [Edit((), {value(found, "v0"): value(found, "v1"), value(found, "v1"): value(found, "v0")})],
        )


def test_a_value_of_another_dtype_is_refused():
    b = Builder()
    found = read(b.build([b.op("Cast", b.input("x", (2,)), to=TensorProto.FLOAT16, name="y")]))
    with pytest.raises(InternalError, match="float16"):
        apply_edits(found, [Edit((), {value(found, "y"): value(found, "x")})])


@pytest.mark.parametrize("role", ["input", "output"])
def test_changed_inputs_and_outputs_are_noticed(role):
    before, after = take_apart(conv_norm()), take_apart(conv_norm())
    getattr(after.structure.graph, role)[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(InternalError, match=f"{role}s of the model"):
        verify(before, after)


def test_invalid_models_are_noticed():
    before, after = take_apart(conv_norm()), take_apart(conv_norm())
    after.structure.graph.node[1].input[0] = "nowhere"
    with pytest.raises(InternalError, match="not valid"):
        verify(before, after)
