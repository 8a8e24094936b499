"""``verify``: an honest folded model passes; what is changed in it, its manifest or its source, is seen."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.errors import ModelError, ToolFailed, UsageError
from tvm_fuse.core.manifest import METADATA_KEY
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.folding import FoldOptions, fold_file
from tvm_fuse.render import render_verification
from tvm_fuse.verify import read_manifest, verify

load = Lazy("tvm_fuse.relay.load")


def net(batch=1, opset=17, dtype=np.float32, epsilon=1e-3):
    """Every way of folding: before (conv, with bias), after (bn1), a run of pieces, and one that stays."""
    b = Builder(opset=opset, dtype=dtype)
    x = b.input("x", (batch, 3, 6, 6))
    y = b.batch_norm(b.conv(x, 4, bias=True, name="conv1"), epsilon, name="bn1")
    y = b.op("Mul", b.conv(b.relu(y), 5, name="conv2"), b.const(b.rng.uniform(0.5, 1.5, (5, 1, 1))))
    y = b.batch_norm(b.relu(y), epsilon, name="stays")
    return b.build([b.relu(y, name="y"), b.conv(b.batch_norm(x, name="early"), 2, kernel=1, name="z")])


@pytest.fixture
def folded(tmp_path):
    """A folded model and its source, as files."""
    source, path = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(net(), str(source))
    fold_file(source, path)
    return path, source


def check(path, source, **options):
    return verify(path, source, **{"shapes": {}, **options})


def failures(outcome):
    return {item.what: item.problem for item in outcome.checks if item.problem}


SOURCE = "the source is the file that was folded"
MANIFEST = "the manifest says what folding the source again finds"
AGAIN = "the source can be folded again with the epsilons of the manifest"
OPERATORS = "folding the source again gives the same operators"
NUMBERS = "folding the source again gives the same"


def whats(outcome):
    """The failed checks; that of the constants without their number."""
    return {NUMBERS if what.endswith("constants") else what for what in failures(outcome)}


# --- an honest model -----------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [7, 9, 13, 17])
def test_an_honest_model_passes(tmp_path, opset):
    source, path = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(net(opset=opset), str(source))
    fold_file(source, path)
    outcome = check(path, source)
    assert failures(outcome) == {}
    assert [row.output for row in outcome.parity.rows] == ["y", "z"]
    assert outcome.engine == "ONNX Runtime"
    assert outcome.passed
    weights = [item.what for item in outcome.checks if item.what.startswith("weight of ")]
    assert weights == ["weight of conv1", "weight of z", "weight of conv2"]


def test_layers_folded_twice_and_shared_weights(tmp_path):
    b = Builder()
    x, w = b.input("x", (1, 3, 6, 6)), b.const(np.random.default_rng(0).normal(size=(3, 3, 1, 1)), "W")
    y = [
        b.batch_norm(b.batch_norm(b.conv(b.batch_norm(x), 3, kernel=1, weight=w, name=f"conv{index}")))
        for index in range(2)
    ]
    onnx.save(b.build(y), str(tmp_path / "model.onnx"))
    report = fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert len(report.folds) == 6
    assert failures(check(tmp_path / "out.onnx", tmp_path / "model.onnx")) == {}


OPTIONS = {
    "user": {"epsilon": {"bn1": 0.25, "stays": 0.125}},
    "all": {"epsilon": {"*": 1e-2}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_epsilons_that_were_aligned_are_those_of_the_manifest(tmp_path, options):
    """The source is folded and run with them."""
    onnx.save(net(), str(tmp_path / "model.onnx"))
    fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx", FoldOptions(align_epsilon=True, **options))
    outcome = check(tmp_path / "out.onnx", tmp_path / "model.onnx")
    assert failures(outcome) == {}
    assert outcome.passed


def test_a_batch_norm_that_was_recovered(tmp_path):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 6, 6)), 4, name="conv")
    mean, variance = (b.const(b.rng.uniform(0.5, 1.5, (4, 1, 1))) for _ in range(2))
    root = b.op("Sqrt", b.op("Add", variance, b.const(np.array(1e-3))))
    onnx.save(b.build([b.op("Div", b.op("Sub", y, mean), root, name="y")]), str(tmp_path / "model.onnx"))
    report = fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert len(report.folds) == 1
    assert check(tmp_path / "out.onnx", tmp_path / "model.onnx").passed


def test_names_that_are_patterns_of_each_other(tmp_path):
    b = Builder()
    y = b.input("x", (1, 3, 6, 6))
    for name, epsilon in {"bn0": 1e-5, "bn[0]": 1e-3, "bn*": 1e-2}.items():
        y = b.relu(b.batch_norm(b.conv(y, 3, pad=1), epsilon, var=1e-3, name=name))
    onnx.save(b.build([y]), str(tmp_path / "model.onnx"))
    fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert check(tmp_path / "out.onnx", tmp_path / "model.onnx").passed


def test_dynamic_dimensions_are_given(tmp_path):
    onnx.save(net(batch="n"), str(tmp_path / "model.onnx"))
    fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    with pytest.raises(UsageError, match="--shape x=1x3x6x6"):
        check(tmp_path / "out.onnx", tmp_path / "model.onnx")
    outcome = check(tmp_path / "out.onnx", tmp_path / "model.onnx", shapes={"x": (2, 3, 6, 6)})
    assert outcome.passed
    assert outcome.parity.rows[0].shape == (2, 5, 2, 2)


def test_data_beside_the_source(tmp_path):
    source = tmp_path / "model.onnx"
    onnx.save(net(), str(source), save_as_external_data=True, location="model.data", size_threshold=0)
    fold_file(source, tmp_path / "out.onnx")
    assert check(tmp_path / "out.onnx", source).passed
    data = bytearray((tmp_path / "model.data").read_bytes())
    data[5] ^= 1
    (tmp_path / "model.data").write_bytes(bytes(data))
    assert whats(check(tmp_path / "out.onnx", source)) == {SOURCE}
    (tmp_path / "model.data").unlink()
    with pytest.raises(UsageError, match=r"model\.data cannot be read"):
        check(tmp_path / "out.onnx", source)


def test_a_model_that_was_folded_already_is_that_of_the_first_source(folded, tmp_path):
    path, source = folded
    fold_file(path, tmp_path / "again.onnx")
    assert check(tmp_path / "again.onnx", source).passed


# --- a dishonest one -----------------------------------------------------------------------------


def edit_tensor(name, change):
    """Change the numbers of the initializer whose name contains ``name``."""

    def tamper(model):
        (tensor,) = [tensor for tensor in model.graph.initializer if name in tensor.name]
        array = numpy_helper.to_array(tensor).copy()
        change(array)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    return tamper


def edit_manifest(change):
    def tamper(model):
        (entry,) = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
        document = json.loads(entry.value)
        change(document)
        entry.value = json.dumps(document)

    return tamper


def edit_node(name, change):
    def tamper(model):
        (node,) = [node for node in model.graph.node if node.name == name]
        change(node)

    return tamper


def one_bit(array):
    array.view(np.uint32).reshape(-1)[0] ^= 1


def set_epsilon(node):
    kept = [entry for entry in node.attribute if entry.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("epsilon", 1e-5)])


def norm_of(document, name):
    (norm,) = [norm for norm in document["batch_norms"] if norm["name"] == name]
    return norm


TAMPERED = {
    "the last bit of a weight": (
        edit_tensor("conv1.weight_folded", one_bit),
        {"weight of conv1", NUMBERS},
        "conv1.weight_folded",
    ),
    "a whole weight": (
        edit_tensor("conv2.weight_folded", lambda array: array.fill(0)),
        {"weight of conv2", NUMBERS},
        "conv2.weight_folded",
    ),
    "the last bit of a bias": (edit_tensor("conv1_bias", one_bit), {NUMBERS}, "conv1_bias"),
    "a number of a batch norm that stays": (edit_tensor("stays.mean", one_bit), {NUMBERS}, "stays.mean"),
    "the epsilon of a batch norm that stays": (
        edit_node("stays", set_epsilon),
        {OPERATORS},
        "BatchNormalization 'stays'",
    ),
    "another operator": (
        edit_node("y", lambda node: setattr(node, "op_type", "Sigmoid")),
        {OPERATORS},
        "wanted Relu 'y', got Sigmoid 'y'",
    ),
    "the producer": (lambda model: setattr(model, "producer_name", "x"), {OPERATORS}, "properties"),
    "a digest after": (
        edit_manifest(lambda m: norm_of(m, "bn1")["layers"][0].update(weight_after="0" * 16)),
        {MANIFEST, "weight of conv1"},
        "wanted ",
    ),
    "a digest before": (
        edit_manifest(lambda m: norm_of(m, "bn1")["layers"][0].update(weight_before="0" * 16)),
        {MANIFEST, "weight of conv1"},
        "no constant of the source has the digest 0000000000000000",
    ),
    "a bound": (
        edit_manifest(lambda m: norm_of(m, "bn1")["layers"][0].update(weight_error=0.0)),
        {MANIFEST},
        "(conv1).weight_error: wanted ",
    ),
    "an epsilon": (
        edit_manifest(lambda m: norm_of(m, "bn1").update(epsilon=1e-5)),
        {MANIFEST, NUMBERS},
        "batch_norms[0] (bn1).gain_max: wanted ",
    ),
    "a name": (
        edit_manifest(lambda m: norm_of(m, "bn1").update(name="bn7")),
        {AGAIN},
        "epsilon for 'bn7': no batch norm has that name",
    ),
    "an epsilon that cannot be": (
        edit_manifest(lambda m: norm_of(m, "bn1").update(epsilon=-1)),
        {AGAIN},
        "wanted a finite number >= 0",
    ),
    "a batch norm less": (
        edit_manifest(lambda m: m["batch_norms"].pop()),
        {MANIFEST},
        "batch_norms: wanted 2 entries, got 1 entries",
    ),
    "a reason": (
        edit_manifest(lambda m: m["left_alone"][0].update(code="fold-overflow")),
        {MANIFEST},
        "left_alone[0] (stays).code",
    ),
    "the hash of the source": (
        edit_manifest(lambda m: m["source"].update(sha256="0" * 64)),
        {SOURCE},
        "it is another file: wanted SHA-256 0000",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "wanted", "part"), TAMPERED.values(), ids=TAMPERED.keys())
def test_what_was_changed_is_seen_and_named(folded, tamper, wanted, part):
    path, source = folded
    model = onnx.load(str(path))
    tamper(model)
    onnx.save(model, str(path))
    outcome = check(path, source)
    assert whats(outcome) == wanted
    assert part in "\n".join(failures(outcome).values())
    assert not outcome.passed
    assert (outcome.parity is None) is bool(wanted & {SOURCE, AGAIN})


def test_a_weight_of_another_shape_is_seen_although_nothing_runs(folded):
    path, source = folded
    model = onnx.load(str(path))
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == "conv1.weight_folded"]
    tensor.CopyFrom(numpy_helper.from_array(np.zeros((4, 7, 3, 3), "float32"), tensor.name))
    onnx.save(model, str(path))
    outcome = check(path, source)
    assert whats(outcome) == {"weight of conv1", NUMBERS, OPERATORS}
    assert outcome.parity is None


def test_a_wrong_fold_that_is_consistent_fails_parity(folded, monkeypatch):
    """The same mistake in both foldings: every hash holds, the outputs do not."""
    from tvm_fuse.core import fold

    path, source = folded
    right = fold.fold_scale
    monkeypatch.setattr(fold, "fold_scale", lambda bn: 1.01 * right(bn))
    fold_file(source, path)
    outcome = check(path, source)
    assert failures(outcome) == {}
    assert not outcome.parity.passed
    assert not outcome.passed


# --- the source ----------------------------------------------------------------------------------


def test_a_source_that_was_changed(folded):
    path, source = folded
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    source.write_bytes(bytes(data))
    outcome = check(path, source)
    assert whats(outcome) == {SOURCE}
    assert (outcome.parity, outcome.engine) == (None, "")
    assert not outcome.passed


@pytest.mark.parametrize("other", ["another model", "text", "itself"])
def test_a_source_that_is_another_file_is_told_as_such(folded, tmp_path, other):
    path, _ = folded
    onnx.save(net(epsilon=1e-5), str(tmp_path / "another model"))
    (tmp_path / "text").write_text("hello")
    outcome = check(path, path if other == "itself" else tmp_path / other)
    assert "it is another file: wanted SHA-256 " in failures(outcome)[SOURCE]
    assert "(model.onnx)" in failures(outcome)[SOURCE]
    assert "NOT RUN" in render_verification(outcome)


def test_a_source_under_another_name_is_the_same(folded, tmp_path):
    path, source = folded
    assert check(path, source.rename(tmp_path / "renamed.onnx")).passed


def test_files_that_are_not_there(folded, tmp_path):
    path, source = folded
    for arguments in ((tmp_path / "absent.onnx", source), (path, tmp_path / "absent.onnx")):
        with pytest.raises(UsageError, match=r"absent\.onnx"):
            check(*arguments)


def test_options_that_do_not_fit(folded):
    path, source = folded
    with pytest.raises(UsageError, match="--params"):
        check(path, source, params=source)
    with pytest.raises(UsageError, match="--shape z"):
        check(path, source, shapes={"z": (1,)})


def test_a_file_without_a_manifest(folded):
    _, source = folded
    with pytest.raises(ModelError, match=r"model\.onnx has no manifest"):
        check(source, source)
    with pytest.raises(ModelError, match="has no manifest"):
        read_manifest(source)


# --- parity --------------------------------------------------------------------------------------


def test_the_tolerance_is_the_callers(folded):
    outcome = check(*folded, tolerance=Tolerance(0.0, 0.0, "none"))
    assert failures(outcome) == {}
    assert not outcome.passed


def test_the_seed_makes_the_inputs(folded):
    errors = [check(*folded, seed=seed).parity.rows[0].worst_reference for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_float16_runs_in_one_engine(tmp_path):
    """The reference evaluator takes over where ONNX Runtime has no kernel."""
    onnx.save(net(dtype=np.float16), str(tmp_path / "model.onnx"))
    fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    outcome = check(tmp_path / "out.onnx", tmp_path / "model.onnx")
    assert failures(outcome) == {}
    assert outcome.passed


def test_a_model_that_no_engine_runs_is_an_error(tmp_path):
    """An operator of a vendor's domain, beside what was folded."""
    b = Builder()
    y = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), name="bn")
    model = b.build([y])
    model.graph.node.append(helper.make_node("Unheard", ["bn"], ["u"], name="u", domain="com.microsoft"))
    model.graph.output.append(helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT, (1, 4)))
    model.opset_import.add(domain="com.microsoft", version=1)
    onnx.save(model, str(tmp_path / "model.onnx"))
    fold_file(tmp_path / "model.onnx", tmp_path / "out.onnx")
    with pytest.raises(ToolFailed, match="cannot be run: ONNX Runtime"):
        check(tmp_path / "out.onnx", tmp_path / "model.onnx")


# --- folders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folded Relay module, made once: the convolutions have no names, and one is folded twice."""
    path = tmp_path_factory.mktemp("folder")
    n = Net()
    y = n.batch_norm(n.batch_norm(n.conv2d(n.input("x", (1, 4, 6, 6)), 4)))
    y = n.batch_norm(relay.nn.relu(n.batch_norm(n.conv2d(relay.nn.relu(y), 4))))
    (path / "model.json").write_text(tvm.ir.save_json(n.module(relay.nn.relu(y))))
    fold_file(path / "model.json", path / "out")
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """A folder and its source that may be changed."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy" / "out", tmp_path / "copy" / "model.json"


@pytest.mark.relay
def test_an_honest_folder_passes(folder):
    outcome = check(folder / "out", folder / "model.json")
    assert failures(outcome) == {}
    assert outcome.passed
    assert outcome.engine.startswith("TVM ")
    assert len(read_manifest(folder / "out").batch_norms) == 3


@pytest.mark.relay
def test_a_folder_from_an_onnx_file(tmp_path):
    onnx.save(net(batch="n"), str(tmp_path / "model.onnx"))
    options = FoldOptions(shapes={"x": (1, 3, 6, 6)}, epsilon={"bn1": 0.25}, align_epsilon=True)
    fold_file(tmp_path / "model.onnx", tmp_path / "out", options)
    outcome = check(tmp_path / "out", tmp_path / "model.onnx", shapes={"x": (1, 3, 6, 6)})
    assert failures(outcome) == {}
    assert outcome.passed
    assert [row.output for row in outcome.parity.rows] == ["y", "z"]


@pytest.mark.relay
def test_what_tvm_cannot_build_is_an_error_unless_something_is_wrong_already(copy, monkeypatch):
    """As bfloat16 on a CPU."""

    def fails(*arguments):
        raise ToolFailed("cannot be built")

    path, source = copy
    monkeypatch.setattr("tvm_fuse.relay.verify.build_unfused", fails)
    with pytest.raises(ToolFailed, match="cannot be built"):
        check(path, source)
    edit_params(first_bias)(path)
    outcome = check(path, source)
    assert whats(outcome) == {NUMBERS}
    assert outcome.parity is None


def edit_params(change):
    def tamper(folder):
        values = tvm.runtime.load_param_dict((folder / "params.bin").read_bytes())
        arrays = {name: value.numpy().copy() for name, value in values.items()}
        change(arrays)
        (folder / "params.bin").write_bytes(bytes(tvm.runtime.save_param_dict(arrays)))

    return tamper


def edit_file(change):
    def tamper(folder):
        document = json.loads((folder / "manifest.json").read_text())
        change(document)
        (folder / "manifest.json").write_text(json.dumps(document))

    return tamper


def edit_graph(folder):
    module = tvm.ir.load_json((folder / "model.json").read_text())
    main = module["main"]
    module["main"] = relay.Function(main.params, relay.sigmoid(main.body.args[0]))
    (folder / "model.json").write_text(tvm.ir.save_json(relay.transform.InferType()(module)))


def first_bias(arrays):
    one_bit(next(array for array in arrays.values() if array.shape == (1, 4, 1, 1)))


def first_weight(arrays):
    one_bit(next(array for array in arrays.values() if array.shape == (4, 4, 3, 3)))


FOLDERS = {
    "a weight": (edit_params(first_weight), {"weight of ", NUMBERS}),
    "a bias": (edit_params(first_bias), {NUMBERS}),
    "an operator": (edit_graph, {OPERATORS}),
    "a digest": (
        edit_file(lambda m: m["batch_norms"][-1]["layers"][0].update(weight_after="0" * 16)),
        {MANIFEST, "weight of "},
    ),
    "a name": (edit_file(lambda m: m["batch_norms"][0].update(name="bn7")), {AGAIN}),
    "the hash of the source": (edit_file(lambda m: m["source"].update(sha256="0")), {SOURCE}),
}


@pytest.mark.relay
@pytest.mark.parametrize(("tamper", "wanted"), FOLDERS.values(), ids=FOLDERS.keys())
def test_what_was_changed_in_a_folder_is_seen(copy, tamper, wanted):
    path, source = copy
    tamper(path)
    outcome = check(path, source)
    assert {"weight of " if what.startswith("weight of ") else what for what in whats(outcome)} == wanted
    assert not outcome.passed


@pytest.mark.relay
def test_a_source_of_a_folder_that_is_another_file(copy, tmp_path):
    path, source = copy
    (tmp_path / "text.relay").write_text("hello")
    for other in (tmp_path / "text.relay", path):
        outcome = check(path, other)
        assert "it is another file" in failures(outcome)[SOURCE]
    with pytest.raises(UsageError, match="absent"):
        check(path, tmp_path / "absent.onnx")
    source.write_text(source.read_text().replace("\n", " \n", 1))
    assert whats(check(path, source)) == {SOURCE}
