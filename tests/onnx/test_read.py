"""ONNX files: what is read, what is refused and by which name. Needs no TVM."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import Builder
from tvm_fuse.cli.args import make_parser, to_mapping
from tvm_fuse.core.epsilon import EpsilonOrigin
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.onnx.read import fix_shapes, read_onnx


@pytest.fixture
def save(tmp_path):
    """``save(model)`` writes a model, or bytes, and returns its path."""

    def write(model, name="model.onnx"):
        data = model if isinstance(model, bytes) else model.SerializeToString()
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def conv_norm(opset=17, epsilon=1e-3, **options):
    b = Builder(opset=opset, **options)
    x = b.input("x", (1, 3, 8, 8))
    return b.build([b.batch_norm(b.conv(x, 4, name="conv"), epsilon=epsilon, name="bn")])


def graph_model(nodes, inputs=(), outputs=(), initializers=(), opset=17, domains=()):
    """A model from parts: inputs are value infos, or names of float tensors of shape (1, 3)."""
    infos = [
        [helper.make_tensor_value_info(v, TensorProto.FLOAT, (1, 3)) if isinstance(v, str) else v for v in vs]
        for vs in (inputs, outputs)
    ]
    graph = helper.make_graph(list(nodes), "g", *infos, list(initializers))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def if_model(branch_nodes, nodes=(), initializers=()):
    """``y = If(c, branch, x)``; a branch ends in the value ``then``."""
    then = helper.make_graph(
        list(branch_nodes), "t", [], [helper.make_tensor_value_info("then", TensorProto.FLOAT, (1, 3))]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["else"])],
        "e",
        [],
        [helper.make_tensor_value_info("else", TensorProto.FLOAT, (1, 3))],
    )
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=then, else_branch=other)
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, ())
    return graph_model([*nodes, node], ["x", condition], ["y"], initializers)


NORM_INPUTS = ("gamma", "beta", "mean", "var")
VECTORS = tuple(numpy_helper.from_array(np.ones(3, "float32"), name) for name in NORM_INPUTS)


def norm_node(x, y, name, **attrs):
    return helper.make_node("BatchNormalization", [x, *NORM_INPUTS], [y], name=name, **attrs)


# --- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", range(7, 18))
def test_opsets_that_are_read(save, opset):
    model = read_onnx(save(conv_norm(opset)))
    assert model.opset == opset
    assert model.outputs == ("bn",)
    assert model.inputs == (TensorSpec("x", (1, 3, 8, 8), "float32"),)
    assert np.isclose(model.epsilon["bn"].value, 1e-3, rtol=1e-6)


@pytest.mark.parametrize("opset", [1, 6, 18, 21])
def test_opsets_that_are_refused(save, opset):
    model = conv_norm()
    model.opset_import[0].version = opset
    with pytest.raises(ModelError, match=f"opset {opset};"):
        read_onnx(save(model))


def test_a_model_of_another_domain_only_is_refused(save):
    model = conv_norm()
    model.opset_import[0].domain = "ai.onnx.ml"
    with pytest.raises(ModelError):
        read_onnx(save(model))


@pytest.mark.parametrize(
    "options",
    [
        {"initializers_as_inputs": True},
        {"const_nodes": True},
        {"ir_version": 3, "initializers_as_inputs": True},
    ],
    ids=["initializers listed as inputs", "Constant nodes", "IR 3"],
)
def test_parameters_are_no_inputs(save, options):
    model = read_onnx(save(conv_norm(**options)))
    assert [spec.name for spec in model.inputs] == ["x"]
    assert list(model.epsilon) == ["bn"]


def test_inputs_and_outputs_keep_their_order_and_types(save):
    b = Builder()
    z, a = b.input("z", (2, 3), np.int64), b.input("a", (), np.float32)
    flag = b.input("flag", (2,), np.bool_)
    results = [
        b.op("Not", flag, name="n"),
        b.op("Cast", z, name="c", to=TensorProto.FLOAT),
        b.relu(a, name="r"),
    ]
    model = read_onnx(save(b.build([results[2], results[0], results[1]])))
    assert [(spec.name, spec.shape, spec.dtype) for spec in model.inputs] == [
        ("z", (2, 3), "int64"), ("a", (), "float32"), ("flag", (2,), "bool"),
    ]  # fmt: skip
    assert model.outputs == ("r", "n", "c")
    assert all(spec.is_static for spec in model.inputs)


def test_a_model_without_inputs(save):
    b = Builder()
    model = read_onnx(save(b.build([b.relu(b.const(np.ones((1, 3))), name="r")])))
    assert (model.inputs, model.outputs) == ((), ("r",))
    with pytest.raises(UsageError, match="none"):
        fix_shapes(model.inputs, {"x": (1,)})


# --- epsilon -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "wanted", "origin"),
    [
        (None, 1e-5, EpsilonOrigin.SOURCE_DEFAULT),
        (1e-5, 1e-5, EpsilonOrigin.SOURCE_ATTRIBUTE),
        (0.25, 0.25, EpsilonOrigin.SOURCE_ATTRIBUTE),
        (0.0, 0.0, EpsilonOrigin.SOURCE_ATTRIBUTE),
    ],
)
def test_epsilon_and_its_origin(save, epsilon, wanted, origin):
    found = read_onnx(save(conv_norm(epsilon=epsilon))).epsilon["bn"]
    assert np.isclose(found.value, wanted, rtol=1e-6, atol=0)
    assert found.origin is origin


def test_each_batch_norm_has_its_epsilon(save):
    b = Builder()
    x = b.input("x", (1, 3, 4, 4))
    y = b.batch_norm(b.batch_norm(x, epsilon=0.5, name="first"), epsilon=0.25, name="second")
    model = read_onnx(save(b.build([y])))
    assert {name: entry.value for name, entry in model.epsilon.items()} == {"first": 0.5, "second": 0.25}


def test_a_batch_norm_that_no_output_needs_is_not_expected(save):
    b = Builder()
    x = b.input("x", (1, 3, 4, 4))
    y = b.batch_norm(x, epsilon=0.5, name="used")
    b.relu(b.batch_norm(x, name="dead"), name="also_dead")
    assert list(read_onnx(save(b.build([b.relu(y)]))).epsilon) == ["used"]


def test_a_batch_norm_that_only_a_branch_reads_is_expected(save):
    branch = [helper.make_node("Relu", ["n"], ["then"])]
    model = if_model(branch, [norm_node("x", "n", "bn"), norm_node("x", "m", "dead")], VECTORS)
    assert list(read_onnx(save(model)).epsilon) == ["bn"]


def test_a_batch_norm_that_a_branch_of_a_branch_returns_is_expected(save):
    inner = if_model([helper.make_node("Identity", ["n"], ["then"])]).graph.node[0]
    inner.output[0] = "then"
    model = if_model([inner], [norm_node("x", "n", "bn")], VECTORS)
    assert list(read_onnx(save(model)).epsilon) == ["bn"]


# --- node names --------------------------------------------------------------------------------


def relus(*names):
    values = ["x", *(f"v{index}" for index in range(len(names)))]
    return [helper.make_node("Relu", [values[i]], [values[i + 1]], name=n) for i, n in enumerate(names)]


@pytest.mark.parametrize(
    "names",
    [("", "", ""), ("a", "a", "a"), ("a@2", "a", "a"), ("", "Relu@0", ""), ("a", "", "b")],
    ids=["none", "equal", "the new name is taken", "a later node has the new name", "some"],
)
def test_node_names_become_unique(save, names):
    nodes = relus(*names)
    proto = read_onnx(save(graph_model(nodes, ["x"], [nodes[-1].output[0]]))).proto
    found = [node.name for node in proto.graph.node]
    assert all(found)
    assert len(set(found)) == len(names)
    assert {name for name in names if name} <= set(found)


def test_batch_norms_of_one_name_keep_their_epsilons_apart(save):
    nodes = [norm_node("x", "a", "bn", epsilon=0.5), norm_node("a", "b", "bn", epsilon=0.25)]
    found = read_onnx(save(graph_model(nodes, ["x"], ["b"], VECTORS))).epsilon
    assert [entry.value for entry in found.values()] == [0.5, 0.25]
    assert next(iter(found)) == "bn"


def test_nodes_in_branches_get_names_of_their_own(save):
    branch = [*relus("if", ""), helper.make_node("Relu", ["v1"], ["then"], name="if")]
    proto = read_onnx(save(if_model(branch))).proto
    inside = [node.name for node in proto.graph.node[0].attribute[1].g.node] + [
        node.name for node in proto.graph.node[0].attribute[0].g.node
    ]
    assert proto.graph.node[0].name == "if"
    assert all(inside)
    assert len({"if", *inside}) == 1 + len(inside)


# --- training mode and other forms that TVM would get wrong ------------------------------------


def norm_with(opset=17, outputs=1, **attrs):
    """A model of a batch norm named ``bn_7`` with more outputs or other attributes."""
    b = Builder(opset=opset)
    x = b.input("x", (1, 3, 4, 4))
    model = b.build([b.batch_norm(x, name="bn_7")])
    (node,) = model.graph.node
    node.output.extend(f"bn_7_{index}" for index in range(1, outputs))
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attrs.items())
    return model


@pytest.mark.parametrize(
    "model",
    [
        norm_with(opset=14, training_mode=1, outputs=3),
        norm_with(opset=17, training_mode=1, outputs=3),
        norm_with(opset=15, training_mode=1, outputs=1),
        norm_with(opset=9, outputs=5),
        norm_with(opset=7, outputs=5),
        norm_with(opset=9, outputs=3),
        norm_with(opset=7, spatial=0),
    ],
    ids=["14", "17", "one output", "five outputs, 9", "five outputs, 7", "three outputs, 9", "spatial=0"],
)
def test_what_tvm_would_get_wrong_is_refused_by_name(save, model):
    with pytest.raises(ModelError, match="bn_7"):
        read_onnx(save(model))


@pytest.mark.parametrize(
    "model",
    [norm_with(opset=17, training_mode=0), norm_with(opset=7, spatial=1)],
    ids=["training_mode=0", "spatial=1"],
)
def test_the_inference_form_is_read(save, model):
    assert list(read_onnx(save(model)).epsilon) == ["bn_7"]


def test_outputs_that_are_left_out_are_no_training_mode(save):
    model = norm_with(opset=9)
    model.graph.node[0].output.extend([""] * 4)
    assert list(read_onnx(save(model)).epsilon) == ["bn_7"]


def test_training_mode_inside_a_branch_is_refused(save):
    branch = [norm_node("x", "then", "bn_7", training_mode=1)]
    with pytest.raises(ModelError, match="bn_7"):
        read_onnx(save(if_model(branch, initializers=VECTORS)))


def dropout_model(training, opset=13):
    """A Dropout named ``drop_3``; ``training`` is None, a NumPy bool, or "input"."""
    b = Builder(opset=opset)
    x = b.input("x", (1, 3))
    ratio = b.const(np.float32(0.5)) if opset >= 12 else None
    if isinstance(training, tuple):
        value, as_node = training
        switch = b.const(np.bool_(value), as_node=as_node)
    else:
        switch = b.input("t", (), np.bool_) if training == "input" else None
    inputs = [x, ratio, switch] if switch else [x, ratio] if ratio else [x]
    return b.build([b.op("Dropout", *inputs, name="drop_3")])


@pytest.mark.parametrize(
    "training", [(True, False), (True, True), "input"], ids=["initializer", "node", "input"]
)
def test_dropout_in_training_mode_is_refused(save, training):
    with pytest.raises(ModelError, match="drop_3"):
        read_onnx(save(dropout_model(training)))


@pytest.mark.parametrize(
    ("training", "opset"), [((False, False), 13), ((False, True), 13), (None, 13), (None, 7)],
    ids=["initializer", "node", "absent", "opset 7"],
)  # fmt: skip
def test_dropout_in_inference_mode_is_read(save, training, opset):
    assert read_onnx(save(dropout_model(training, opset))).outputs == ("drop_3",)


@pytest.mark.parametrize("omit", [("gamma",), ("var",), ("mean", "var")])
def test_a_batch_norm_that_lacks_an_input_is_refused_by_name(save, omit):
    b = Builder()
    x = b.input("x", (1, 3, 4, 4))
    y = b.batch_norm(x, omit=omit, name="bn_7")
    model = b.build([y], check=False)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, TensorProto.FLOAT, (1, 3, 4, 4)))
    with pytest.raises(ModelError, match="bn_7"):
        read_onnx(save(model))


# --- operators that do not exist ---------------------------------------------------------------


def test_an_unknown_operator_is_refused_by_name(save):
    model = graph_model([helper.make_node("Frobnicate", ["x"], ["y"], name="n")], ["x"], ["y"])
    with pytest.raises(ModelError, match="Frobnicate"):
        read_onnx(save(model))


@pytest.mark.parametrize("domains", [(), ("org.example",)], ids=["not imported", "imported"])
@pytest.mark.parametrize("op", ["Frobnicate", "Relu"])
def test_an_unknown_domain_is_refused_by_name(save, op, domains):
    node = helper.make_node(op, ["x"], ["y"], name="n", domain="org.example")
    with pytest.raises(ModelError, match=re.escape("org.example")):
        read_onnx(save(graph_model([node], ["x"], ["y"], domains=domains)))


def test_an_unknown_domain_inside_a_branch_is_refused_by_name(save):
    model = if_model([helper.make_node("Relu", ["x"], ["then"], domain="org.example")])
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    with pytest.raises(ModelError, match=re.escape("org.example")):
        read_onnx(save(model))


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.onnx", "model.pbtxt", "model.onnxtxt", "model"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello, this is text\n",
        b"\x00" * 64,
        np.random.default_rng(0).bytes(999),
        b"PK\x03\x04 a zip file",
    ],
    ids=["empty", "text", "zeros", "random", "zip"],
)
def test_what_is_no_model_is_refused(save, data, name):
    with pytest.raises(ModelError, match=re.escape(name)):
        read_onnx(save(data, name))


def test_truncated_files_are_refused(save):
    data = conv_norm().SerializeToString()
    for size in range(0, len(data), 7):
        with pytest.raises(ModelError):
            read_onnx(save(data[:size]))


def test_damaged_files_are_read_or_refused_but_never_break_the_reader(save):
    data = conv_norm().SerializeToString()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for position in rng.integers(len(data), size=3):
            damaged[position] = rng.integers(256)
        try:
            read_onnx(save(bytes(damaged)))
        except ModelError:
            refused += 1
    assert 100 < refused < 300


def test_a_name_that_is_not_utf8_is_refused(save):
    data = conv_norm().SerializeToString().replace(b"conv", b"\xff\xfe\xff\xfe", 1)
    with pytest.raises(ModelError):
        read_onnx(save(data))


@pytest.mark.parametrize("part", ["node", "output"])
def test_a_graph_without_a_part_is_refused(save, part):
    model = conv_norm()
    model.graph.ClearField(part)
    with pytest.raises(ModelError, match=part):
        read_onnx(save(model))


def test_a_graph_that_is_not_connected_is_refused(save):
    model = conv_norm()
    model.graph.output[0].name = "nowhere"
    with pytest.raises(ModelError, match="nowhere"):
        read_onnx(save(model))


@pytest.mark.parametrize("name", ["absent.onnx", "", "model.onnx/below"])
def test_a_path_without_a_file_is_a_usage_error(save, tmp_path, name):
    save(conv_norm())
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / name))):
        read_onnx(tmp_path / name)


def test_external_data(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(conv_norm(), path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    tensor = read_onnx(path).proto.graph.initializer[0]
    assert numpy_helper.to_array(tensor).shape == (4, 3, 3, 3)
    (tmp_path / "weights.bin").write_bytes(b"123")
    with pytest.raises(ModelError):
        read_onnx(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        read_onnx(path)


# --- inputs and shapes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "info",
    [
        helper.make_tensor_value_info("tokens", TensorProto.FLOAT, None),
        helper.make_tensor_sequence_value_info("tokens", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("tokens", 99, [1]),
        helper.make_tensor_value_info("tokens", TensorProto.BFLOAT16, [1]),
        helper.make_tensor_value_info("tokens", TensorProto.STRING, [1]),
    ],
    ids=["no rank", "sequence", "unknown element type", "bfloat16", "string"],
)
def test_inputs_that_are_no_tensors_of_known_rank_and_type_are_refused(save, info):
    node = helper.make_node("Relu", ["x"], ["y"], name="n")
    with pytest.raises(ModelError, match=r"tokens|'shape' of 'type'"):
        read_onnx(save(graph_model([node], ["x", info], ["y"])))


@pytest.mark.parametrize(
    "dtype", "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
def test_element_types(save, dtype):
    info = helper.make_tensor_value_info("z", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [2])
    (_, spec) = read_onnx(save(graph_model(relus("r"), ["x", info], ["v0"]))).inputs
    assert spec == TensorSpec("z", (2,), dtype)


def dynamic_model():
    b = Builder()
    image, tokens, fixed = (
        b.input("image", ("batch", 3, None, 32)), b.input("tokens:0", ("n", "seq")), b.input("fixed", (2, 2))
    )  # fmt: skip
    return b.build([b.relu(value, name=f"r{i}") for i, value in enumerate((image, tokens, fixed))])


def test_dynamic_dimensions_are_named(save):
    inputs = read_onnx(save(dynamic_model())).inputs
    assert inputs[0].shape[:2] + inputs[0].shape[3:] == ("batch", 3, 32)
    assert isinstance(inputs[0].shape[2], str)
    assert [spec.is_static for spec in inputs] == [False, False, True]
    assert "batch" in str(inputs[0])


def test_missing_shapes_are_all_listed_with_an_example_that_works(save):
    inputs = read_onnx(save(dynamic_model())).inputs
    with pytest.raises(UsageError) as caught:
        fix_shapes(inputs, {})
    message = caught.value.message
    assert "image" in message
    assert "tokens:0" in message
    assert "fixed " not in message.replace("not fixed", "")
    example = caught.value.hint[caught.value.hint.index("--shape") :].split()
    shapes = to_mapping(make_parser().parse_args(["run", "m.onnx", *example]).shape, "--shape")
    fixed = fix_shapes(inputs, shapes)
    assert all(spec.is_static for spec in fixed)
    assert fixed[0].shape[1::2] == (3, 32)


def test_one_missing_shape_of_two_names_only_that_one(save):
    inputs = read_onnx(save(dynamic_model())).inputs
    with pytest.raises(UsageError) as caught:
        fix_shapes(inputs, {"image": (1, 3, 8, 32)})
    assert "tokens:0" in str(caught.value)
    assert "image" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("imagee", (1, 3, 8, 32)), ("image", (3, 8, 32)), ("image", (1, 4, 8, 32)), ("fixed", (2, 3)),
        ("fixed", (2,)),
    ],
    ids=["name", "rank", "fixed dimension", "static input", "rank of a static input"],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(save, name, shape):
    inputs = read_onnx(save(dynamic_model())).inputs
    good = {"image": (1, 3, 8, 32), "tokens:0": (1, 5)}
    assert [spec.shape for spec in fix_shapes(inputs, {**good, "fixed": (2, 2)})] == [*good.values(), (2, 2)]
    with pytest.raises(UsageError, match=name):
        fix_shapes(inputs, {**good, name: shape})


def test_a_size_of_zero_or_less_is_dynamic(save):
    model = conv_norm()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    (spec,) = read_onnx(save(model)).inputs
    assert isinstance(spec.shape[0], str)
