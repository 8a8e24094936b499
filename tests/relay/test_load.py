"""Models into Relay: names and epsilons are kept, and what cannot be read is refused with a type."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder
from tests.support.relay_graphs import Net
from tvm_fuse.core.epsilon import EpsilonOrigin
from tvm_fuse.core.errors import ModelError, UsageError

pytestmark = pytest.mark.relay

load = Lazy("tvm_fuse.relay.load")
fold_pass = Lazy("tvm_fuse.relay.fold_pass")
relay, tvm = Lazy("tvm_fuse.relay.base", "relay"), Lazy("tvm_fuse.relay.base", "tvm")

HEADER = '#[version = "0.0.5"]\n'
TENSOR = "Tensor[(1, 3), float32]"


@pytest.fixture
def save(tmp_path):
    """``save(name, data)`` writes text, bytes or an ONNX model and returns the path."""

    def write(name, data):
        data = data.encode() if isinstance(data, str) else data
        data = data if isinstance(data, (bytes, bytearray)) else data.SerializeToString()
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.fixture
def load_onnx(save):
    """``load_onnx(model)`` imports an ONNX model from disk."""
    return lambda model, **shapes: load.load_model(save("m.onnx", model), shapes=shapes)


def facts(inputs):
    return [(spec.name, spec.shape, spec.dtype) for spec in inputs]


def batch_norms(module):
    """Name and epsilon of each batch norm that arrived, as alignment sees them."""
    from tvm_fuse.relay.record import last_report

    fold_pass.align_epsilon(module, {}, {}, align=False)
    return {check.name: check.in_graph for check in last_report()["AlignEpsilon"].details}


# --- ONNX --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [7, 9, 13, 14, 17])
@pytest.mark.parametrize("options", [{}, {"const_nodes": True}], ids=["initializers", "Constant nodes"])
def test_onnx_names_and_epsilons_arrive(load_onnx, opset, options):
    b = Builder(opset=opset, **options)
    y = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), epsilon=0.5, name="net/bn 1:a")
    y = b.batch_norm(b.conv(b.relu(y), 4), epsilon=0.25, name="bn2")
    model = load_onnx(b.build([b.batch_norm(b.relu(y), epsilon=None, name="bn3")]))
    assert batch_norms(model.module) == pytest.approx({"net/bn 1:a": 0.5, "bn2": 0.25, "bn3": 1e-5})
    assert {name: entry.value for name, entry in model.epsilon.items()} == batch_norms(model.module)
    assert model.epsilon["bn3"].origin is EpsilonOrigin.SOURCE_DEFAULT
    assert facts(model.inputs) == [("x", (1, 3, 6, 6), "float32")]
    assert (model.name, model.outputs) == ("m", ("bn3",))


def test_onnx_batch_norms_of_one_name_stay_apart(load_onnx):
    b = Builder()
    y = b.batch_norm(b.batch_norm(b.input("x", (1, 3, 2, 2)), 0.5, name="first"), 0.25, name="second")
    proto = b.build([y])
    for node in proto.graph.node:
        node.name = "bn"
    model = load_onnx(proto)
    assert len(model.epsilon) == 2
    assert {name: entry.value for name, entry in model.epsilon.items()} == batch_norms(model.module)


def test_onnx_dynamic_shapes_are_fixed(load_onnx):
    b = Builder()
    proto = b.build([b.relu(b.conv(b.input("x", ("n", 3, "h", "w")), 4), name="y")])
    model = load_onnx(proto, x=(2, 3, 8, 9))
    assert facts(model.inputs) == [("x", (2, 3, 8, 9), "float32")]
    assert [int(dim) for dim in model.module["main"].ret_type.shape] == [2, 4, 6, 7]
    with pytest.raises(UsageError):
        load_onnx(proto)
    with pytest.raises(UsageError):
        load_onnx(proto, y=(2, 3, 8, 9))


def test_onnx_inputs_of_any_type_and_rank(load_onnx):
    b = Builder()
    b.input("scalar", ()), b.input("z", (2, 3), np.int64), b.input("flag", (2,), np.bool_)
    results = b.relu("scalar", name="r"), b.op("Not", "flag", name="n"), b.op("Neg", "z", name="m")
    model = load_onnx(b.build(results))
    assert facts(model.inputs) == [
        ("scalar", (), "float32"), ("z", (2, 3), "int64"), ("flag", (2,), "bool"),
    ]  # fmt: skip
    types = model.module["main"].ret_type.fields
    assert [(len(t.shape), str(t.dtype)) for t in types] == [(0, "float32"), (1, "bool"), (2, "int64")]
    assert model.outputs == ("r", "n", "m")


def test_onnx_without_inputs(load_onnx):
    b = Builder()
    model = load_onnx(b.build([b.relu(b.const(np.ones((1, 3))), name="y")]))
    assert (model.inputs, model.outputs) == ((), ("y",))


def test_onnx_that_returns_an_input_and_a_constant_and_one_value_twice(load_onnx):
    b = Builder()
    x = b.input("x", (1, 3))
    y = b.relu(x, name="y")
    results = [
        b.op("Identity", value, name=name) for name, value in [("a", x), ("b", b.const(np.ones(2))), ("c", y)]
    ]
    model = load_onnx(b.build([*results, y]))
    assert model.outputs == ("a", "b", "c", "y")
    assert len(model.module["main"].ret_type.fields) == 4


def test_onnx_keeps_an_input_that_nothing_reads(load_onnx):
    b = Builder()
    x, _ = b.input("x", (1, 3)), b.input("idle", (2, 2))
    assert [spec.name for spec in load_onnx(b.build([b.relu(x, name="y")])).inputs] == ["x", "idle"]


def test_onnx_operator_that_tvm_does_not_know(load_onnx):
    b = Builder()
    proto = b.build([b.op("LpNormalization", b.input("x", (1, 3)), axis=1, p=2, name="norm")])
    with pytest.raises(ModelError, match="LpNormalization"):
        load_onnx(proto)


def test_onnx_with_an_output_of_unknown_shape(load_onnx):
    b = Builder()
    with pytest.raises(ModelError, match="static"):
        load_onnx(b.build([b.op("NonZero", b.input("x", (2, 3)), name="y")]))


def test_onnx_in_training_mode(load_onnx):
    b = Builder()
    outputs = b.batch_norm(b.input("x", (1, 3, 4, 4)), n_out=3, training_mode=1, name="bn_7")
    with pytest.raises(ModelError, match="bn_7"):
        load_onnx(b.build(outputs[:1]))


def test_onnx_that_the_importer_cannot_type_names_the_types_and_prints_nothing(load_onnx, capfd):
    b = Builder()
    y = b.batch_norm(b.input("x", (1, 3, 4, 4)), channels=5, name="bn")
    proto = b.build([y], check=False)
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, TensorProto.FLOAT, (1, 3, 4, 4)))
    with pytest.raises(ModelError, match=r"\(3\), float32\].*\(5\), float32\]"):
        load_onnx(proto)
    assert capfd.readouterr() == ("", "")


def test_b061_onnx_with_a_batch_norm_of_two_dtypes(load_onnx):
    """Its name, its epsilon and the dtypes outside stay."""
    b = Builder(dtype=np.float16)
    y = b.batch_norm(b.input("x", (1, 3, 4, 4)), 1e-3, param_dtype=np.float32, name="bn")
    model = load_onnx(b.build([y]))
    assert facts(model.inputs) == [("x", (1, 3, 4, 4), "float16")]
    assert model.module["main"].ret_type.dtype == "float16"
    norm = model.module["main"].body.args[0].tuple_value
    assert {value.checked_type.dtype for value in norm.args} == {"float32"}
    assert batch_norms(model.module) == {"bn": pytest.approx(1e-3)}
    assert list(model.epsilon) == ["bn"]


def test_b072_onnx_with_a_cast_after_a_batch_norm(load_onnx):
    """It casts the normalized value, not the tuple of three."""
    b = Builder(dtype=np.float16)
    y = b.batch_norm(b.input("x", (1, 3, 4, 4)), name="bn")
    module = load_onnx(b.build([b.op("Cast", y, to=TensorProto.FLOAT)])).module
    cast = module["main"].body
    assert (cast.op.name, cast.args[0].index) == ("cast", 0)
    assert cast.args[0].tuple_value.op.name == "nn.batch_norm"
    assert cast.checked_type == relay.TensorType((1, 3, 4, 4), "float32")


def test_onnx_whose_importer_breaks(load_onnx):
    """A rank that the checker lets pass and the importer does not."""
    node = helper.make_node("Transpose", ["x"], ["y"], name="t", perm=[0, 5])
    infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 3))] for name in "xy"]
    opsets = [helper.make_opsetid("", 17)]
    proto = helper.make_model(helper.make_graph([node], "g", *infos), ir_version=8, opset_imports=opsets)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_onnx(proto)


# --- Relay files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense():
    """``y = x @ w.T`` with the weight as a second input."""
    x, w = relay.var("x", shape=(1, 3)), relay.var("w", shape=(4, 3))
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x, w], relay.nn.dense(x, w))))


def params_file(**arrays):
    return bytes(tvm.runtime.save_param_dict(arrays))


WEIGHT = np.arange(12, dtype="float32").reshape(4, 3)


def dump(module, suffix):
    return tvm.ir.save_json(module) if suffix == "json" else module.astext()


@pytest.mark.parametrize("suffix", ["relay", "txt", "json", "RELAY"])
def test_relay_files_with_and_without_parameters(save, dense, suffix):
    path = save(f"net.{suffix}", dump(dense, suffix))
    model = load.load_model(path, shapes={})
    assert facts(model.inputs) == [("x", (1, 3), "float32"), ("w", (4, 3), "float32")]
    assert (model.name, model.outputs, dict(model.epsilon)) == ("net", ("output0",), {})
    assert tvm.ir.structural_equal(model.module, dense)

    bound = load.load_model(path, shapes={}, params=save("net.params", params_file(w=WEIGHT)))
    assert facts(bound.inputs) == [("x", (1, 3), "float32")]
    constant = bound.module["main"].body.args[1]
    assert np.array_equal(constant.data.numpy(), WEIGHT)
    assert tvm.ir.structural_equal(load.model_from_module(dense, {"w": WEIGHT}).module, bound.module)


def test_relay_text_with_constants_keeps_batch_norms(save):
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    module = net.module(net.batch_norm(net.conv2d(x, 4), epsilon=0.5), net.batch_norm(x, epsilon=0.25))
    model = load.load_model(save("net.relay", module.astext()), shapes={})
    assert batch_norms(model.module) == {"batch_norm_0": 0.5, "batch_norm_1": 0.25}
    assert model.outputs == ("output0", "output1")


def test_shape_is_for_onnx_and_params_are_for_relay(save, dense):
    relay_file, params = save("net.relay", dense.astext()), save("p", params_file(w=WEIGHT))
    with pytest.raises(UsageError, match="--shape"):
        load.load_model(relay_file, shapes={"x": (1, 3)})
    b = Builder()
    onnx_file = save("m.onnx", b.build([b.relu(b.input("x", (1, 3)))]))
    with pytest.raises(UsageError, match="--params"):
        load.load_model(onnx_file, shapes={}, params=params)


@pytest.mark.parametrize("name", ["m.onnx", "m.relay", "m.json", "m.txt"])
def test_a_missing_file_is_a_usage_error(tmp_path, name):
    with pytest.raises(UsageError, match=name):
        load.load_model(tmp_path / name, shapes={})


def test_a_missing_parameter_file_is_a_usage_error(save, dense, tmp_path):
    for missing in (tmp_path / "none.params", tmp_path):
        with pytest.raises(UsageError, match=str(missing)):
            load.load_model(save("net.relay", dense.astext()), shapes={}, params=missing)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", np.random.default_rng(0).bytes(300), "short", "long"],
    ids=["empty", "text", "random", "truncated", "followed by more"],
)
def test_a_broken_parameter_file_is_named(save, dense, data):
    whole = params_file(w=WEIGHT)
    data = {"short": whole[:-5], "long": whole + b"more"}.get(data, data) if isinstance(data, str) else data
    with pytest.raises(ModelError, match=r"net\.params"):
        load.load_model(save("net.relay", dense.astext()), shapes={}, params=save("net.params", data))


@pytest.mark.parametrize(
    "arrays",
    [
        {"v": WEIGHT},
        {"w": WEIGHT, "v": WEIGHT},
        {"w": WEIGHT.T.copy()},
        {"w": WEIGHT[0]},
        {"w": WEIGHT.astype("float64")},
    ],
    ids=["unknown", "one unknown", "shape", "rank", "dtype"],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_a_usage_error(save, dense, arrays):
    name = "v" if "v" in arrays else "w"
    with pytest.raises(UsageError, match=f"'{name}'"):
        load.model_from_module(dense, arrays)
    path, params = save("net.relay", dense.astext()), save("p", params_file(**arrays))
    with pytest.raises(UsageError, match=f"'{name}'"):
        load.load_model(path, shapes={}, params=params)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("", "version"),
        ("hello", "version"),
        (f"{HEADER}def @main(%x: {TENSOR}) {{ nn.relu(%x) ", ""),
        (f"{HEADER}def @main(%x: {TENSOR}) {{ nn.frobnicate(%x) }}", "nn.frobnicate"),
        (f"{HEADER}def @main(%x) {{ nn.relu(%x) }}", ""),
        (f"{HEADER}def @main(%x: {TENSOR}, %y: Tensor[(2, 7), float32]) {{ add(%x, %y) }}", ""),
        (f"{HEADER}def @main(%x: {TENSOR}) {{ nn.relu(%y) }}", ""),
        (HEADER, "main"),
        (f"{HEADER}def @other(%x: {TENSOR}) {{ nn.relu(%x) }}", "main"),
    ],
    ids=[
        "empty", "text", "unclosed", "operator", "no types", "types", "unbound", "no function", "no main"
    ],
)  # fmt: skip
def test_broken_relay_text_is_refused_and_nothing_is_printed(save, capfd, body, part):
    with pytest.raises(ModelError) as caught:
        load.load_model(save("net.relay", body), shapes={})
    assert part in caught.value.message
    assert "net" in caught.value.message
    assert "check diagnostic render" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_bytes_that_are_no_text_are_refused(save):
    with pytest.raises(ModelError):
        load.load_model(save("net.relay", b"\xff\xfe\x00"), shapes={})


@pytest.mark.parametrize("text", ["", "3", "{}", "[]", "hello", '{"root": 1, "nodes": []}'])
def test_broken_json_is_refused(save, text):
    with pytest.raises(ModelError, match=r"net\.json"):
        load.load_model(save("net.json", text), shapes={})


def test_json_of_something_else_is_refused(save, dense):
    with pytest.raises(ModelError, match="Constant"):
        load.load_model(save("net.json", tvm.ir.save_json(relay.const(1))), shapes={})
    with pytest.raises(ModelError):
        load.load_model(save("net.json", tvm.ir.save_json(dense)[:-50]), shapes={})


# --- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        (f"%x: ({TENSOR}, {TENSOR})", "%x.0"),
        (f"%x: {TENSOR}", "()"),
        (f"%x: {TENSOR}", f"fn (%y: {TENSOR}) {{ %y }}"),
        (f"%x: {TENSOR}", f"(%x, fn (%y: {TENSOR}) {{ %y }})"),
    ],
    ids=["tuple in", "nothing out", "function out", "function in a tuple out"],
)
def test_main_takes_and_returns_tensors(save, signature, body):
    path = save("net.relay", f"{HEADER}def @main({signature}) {{ {body} }}")
    with pytest.raises(ModelError, match="tensors"):
        load.load_model(path, shapes={})


@pytest.mark.parametrize(
    ("signature", "body", "inputs", "outputs"),
    [
        ("", "1f", 0, 1),
        (f"%x: {TENSOR}", "%x", 1, 1),
        (f"%x: {TENSOR}", "(%x, %x)", 1, 2),
        (f"%x: {TENSOR}", "((%x, nn.relu(%x)), (%x,))", 1, 3),
        ("%x: float32, %y: Tensor[(2), int64], %z: Tensor[(2), bool]", "(%x, %y, %z)", 3, 3),
    ],
    ids=["constant", "input", "input twice", "nested tuples", "types"],
)
def test_inputs_and_outputs_are_counted(save, signature, body, inputs, outputs):
    model = load.load_model(save("net.relay", f"{HEADER}def @main({signature}) {{ {body} }}"), shapes={})
    assert len(model.inputs) == inputs
    assert model.outputs == tuple(f"output{index}" for index in range(outputs))


def test_dynamic_relay_is_refused(save):
    with pytest.raises(ModelError, match=r"x \[\?, 3\]"):
        load.load_model(
            save("n.relay", f"{HEADER}def @main(%x: Tensor[(?, 3), float32]) {{ %x }}"), shapes={}
        )
    x = relay.var("x", shape=(2, 3))
    with pytest.raises(ModelError, match="output"):
        load.model_from_module(relay.Function([x], relay.argwhere(x)))


def test_a_function_and_numpy_parameters_will_do(dense):
    model = load.model_from_module(dense["main"], {"w": tvm.nd.array(WEIGHT)}, name="mine")
    assert (model.name, [spec.name for spec in model.inputs]) == ("mine", ["x"])


@pytest.mark.parametrize("module", [None, "def @main() { 1f }", 3])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(ModelError):
        load.model_from_module(module)


def test_the_module_of_the_caller_stays_as_it_is(dense):
    before = dense.astext()
    load.model_from_module(dense, {"w": WEIGHT})
    assert dense.astext() == before


def test_relay_text_in_memory_gives_no_operator_a_name():
    from tvm_fuse.relay.base import relay
    from tvm_fuse.relay.read import read_function

    text = '#[version = "0.0.5"]\ndef @main(%x: Tensor[(1, 3), float32]) { nn.relu(tanh(%x)) }'
    model = load.model_from_module(relay.fromtext(text))
    assert [node.name for node in read_function(model.module["main"]).graph.nodes] == ["x", "", ""]


def test_control_flow_is_refused_by_name():
    from tvm_fuse.relay.base import relay

    text = (
        '#[version = "0.0.5"]\ndef @main(%c: bool, %x: Tensor[(1, 3), float32]) '
        "{ if (%c) { nn.relu(%x) } else { %x } }"
    )
    with pytest.raises(ModelError, match="if"):
        load.model_from_module(relay.fromtext(text))


def test_a_call_of_another_function_is_refused_by_name():
    from tvm_fuse.relay.base import relay

    text = (
        '#[version = "0.0.5"]\n'
        "def @helper(%y: Tensor[(1, 3), float32]) -> Tensor[(1, 3), float32] { nn.relu(%y) }\n"
        "def @main(%x: Tensor[(1, 3), float32]) { @helper(%x) }"
    )
    with pytest.raises(ModelError, match="helper"):
        load.model_from_module(relay.fromtext(text))


def test_let_bound_models_fold_as_well():
    import tvm_fuse
    from tests.support.relay_graphs import Net, relay

    net = Net()
    module = net.module(relay.nn.relu(net.batch_norm(net.conv2d(net.input("x", (1, 4, 5, 5)), 4))))
    model = load.model_from_module(relay.transform.ToANormalForm()(module))
    tvm_fuse.transform.FoldBatchNorm()(model.module)
    assert len(tvm_fuse.last_report()["FoldBatchNorm"].details) == 1
