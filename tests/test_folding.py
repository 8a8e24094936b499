"""``fold_file``: what is written can be loaded, says what was folded, and leaves its source alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from examples.models import MODELS
from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder, run
from tests.support.relay_graphs import Net, count_operators, feeds, relay, tvm
from tvm_fuse import folding
from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.graph import digest
from tvm_fuse.core.reason import Code
from tvm_fuse.folding import FoldOptions, fold_file, fold_onnx_model
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import load_manifest
from tvm_fuse.onnx.save import save_onnx

load = Lazy("tvm_fuse.relay.load")
build = Lazy("tvm_fuse.relay.build")
target = Lazy("tvm_fuse.relay.target")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def save(tmp_path):
    """``save(model)`` writes ``model.onnx``."""

    def write(model, name="model.onnx", **options):
        onnx.save(model, str(tmp_path / name), **options)
        return tmp_path / name

    return write


@pytest.fixture
def fold(save, tmp_path):
    """``fold(model)`` from a file to a file; returns the report and the model that was written."""

    def through_files(model, name="out.onnx", **options):
        report = fold_file(save(model), tmp_path / name, FoldOptions(**options))
        path = tmp_path / name
        onnx.checker.check_model(str(path), full_check=True)
        return report, onnx.load(str(path))

    return through_files


def net(opset=17, batch=1, epsilon=1e-3, **options):
    """conv -> bn -> relu -> conv -> bn; the last batch norm is the output ``out``."""
    b = Builder(opset=opset, **options)
    y = b.batch_norm(b.conv(b.input("x", (batch, 3, 6, 6)), 4, name="conv1"), epsilon, name="bn1")
    y = b.conv(b.relu(y), 5, bias=True, name="conv2")
    return b.build([b.batch_norm(y, epsilon, name="out")])


def operators(model):
    return [node.op_type for node in model.graph.node]


def initializers(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def weights(model):
    """Name of each layer -> its weight."""
    arrays = initializers(model)
    return {node.name: arrays[node.input[1]] for node in model.graph.node if node.op_type in ("Conv", "Gemm")}


X = {"x": np.random.default_rng(0).standard_normal((1, 3, 6, 6)).astype("float32")}


# --- the file --------------------------------------------------------------------------------------

FORMS = {
    "initializers": {},
    "initializers that are inputs": {"initializers_as_inputs": True, "ir_version": 3},
    "Constant nodes": {"const_nodes": True},
}


@pytest.mark.parametrize("opset", range(7, 18))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_what_a_caller_sees_stays(fold, form, opset):
    source = net(opset, batch="n", **form)
    report, model = fold(source)
    assert len(report.folds) == 2
    assert model.graph.output == source.graph.output
    given = {tensor.name for tensor in source.graph.initializer}
    left = {tensor.name for tensor in model.graph.initializer}
    assert [entry for entry in model.graph.input if entry.name not in left] == [
        entry for entry in source.graph.input if entry.name not in given
    ]
    assert model.opset_import == source.opset_import
    assert model.ir_version == source.ir_version
    assert sorted(left) == sorted(tensor.name for tensor in model.graph.initializer)
    np.testing.assert_allclose(run(model, X)[0], run(source, X)[0], rtol=1e-5, atol=1e-5)


def test_b032_an_output_that_was_a_batch_norm_keeps_its_name(fold):
    """And a model may return a value and what becomes of it."""
    b = Builder()
    first = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), name="out")
    source = b.build([first, b.relu(first, name="last")])
    _, model = fold(source)
    assert operators(model) == ["Conv", "Relu"]
    assert [output.name for output in model.graph.output] == ["out", "last"]
    for got, wanted in zip(run(model, X), run(source, X)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_b042_b043_weights_are_numbers(fold, form):
    """However the constants came, no arithmetic on them is left, and none of a batch norm."""
    _, model = fold(net(opset=9, **form))
    assert [name for name in operators(model) if name != "Constant"] == ["Conv", "Relu", "Conv"]
    for node in model.graph.node:
        if node.op_type == "Conv":
            assert initializers(model)[node.input[1]].dtype == np.float32
    names = " ".join(initializers(model))
    assert not any(role in names for role in ("gamma", "beta", "mean", "var"))


def test_b073_the_weights_are_those_of_the_formula(fold):
    """Computed once more, from the file, without anything of the tool."""
    source = net(epsilon=1e-3)
    _, model = fold(source)
    values = {name: array.astype("float64") for name, array in initializers(source).items()}
    for conv, norm in (("conv1", "bn1"), ("conv2", "out")):
        scale = values[f"{norm}.gamma"] / np.sqrt(values[f"{norm}.var"] + np.float32(1e-3).astype("float64"))
        wanted = (values[f"{conv}.weight"] * scale[:, None, None, None]).astype("float32")
        assert np.array_equal(weights(model)[conv], wanted)
        bias = (values.get(f"{conv}.bias", 0) - values[f"{norm}.mean"]) * scale + values[f"{norm}.beta"]
        (node,) = [node for node in model.graph.node if node.name == conv]
        assert np.array_equal(initializers(model)[node.input[2]], bias.astype("float32"))


def test_b029_a_shared_weight_becomes_two(fold):
    b = Builder()
    x, w = b.input("x", (1, 3, 6, 6)), b.const(np.random.default_rng(0).normal(size=(3, 3, 3, 3)), "W")
    y = [b.batch_norm(b.conv(x, 3, weight=w, name=f"conv{i}"), name=f"bn{i}") for i in range(2)]
    source = b.build(y)
    report, model = fold(source)
    assert sum(array.ndim == 4 for array in initializers(source).values()) == 1
    assert sum(array.ndim == 4 for array in initializers(model).values()) == 2
    layers = [layer for norm in report.manifest.batch_norms for layer in norm.layers]
    assert [layer.name for layer in layers] == ["conv0", "conv1"]
    assert len({layer.weight_before for layer in layers}) == 1
    assert len({layer.weight_after for layer in layers}) == 2


def test_b026_a_folded_model_folds_to_itself(fold, tmp_path):
    first, _ = fold(net())
    once = (tmp_path / "out.onnx").read_bytes()
    (tmp_path / "again").mkdir()
    report = fold_file(tmp_path / "out.onnx", tmp_path / "again" / "out.onnx")
    assert (report.folds, report.scale_shifts, report.epsilon) == ((), (), ())
    assert (tmp_path / "again" / "out.onnx").read_bytes() == once
    assert report.manifest == first.manifest


def test_what_is_folded_in_addition_gets_a_new_manifest(fold, tmp_path):
    """An older manifest is of another file than the one that is folded now."""
    _, model = fold(net())
    x = model.graph.node[0].input[0]
    b = Builder()
    norm = b.build([b.batch_norm(b.input(x, (1, 3, 6, 6)), name="early")])
    model.graph.initializer.extend(norm.graph.initializer)
    model.graph.node[0].input[0] = "early"
    model.graph.node.insert(0, norm.graph.node[0])
    report, _ = fold(model)
    assert [norm.name for norm in report.manifest.batch_norms] == ["early"]
    assert report.manifest.source.name == "model.onnx"


def test_what_does_not_fold_stays_and_is_told(fold):
    b = Builder()
    x = b.input("x", (1, 3, 6, 6))
    late = b.batch_norm(b.relu(b.conv(x, 4)), 1e-4, name="late")
    report, model = fold(b.build([late, b.batch_norm(b.conv(x, 4), name="bn")]))
    assert operators(model).count("BatchNormalization") == 1
    assert [decision.reason.code for decision in report.not_folded] == [Code.BN_AFTER_ACTIVATION]
    (left,) = report.manifest.left_alone
    assert (left.name, left.code) == ("late", "bn-after-activation")
    assert report.manifest.epsilon == {"late": pytest.approx(1e-4), "bn": pytest.approx(1e-5)}


def test_what_no_output_needs_is_not_counted(fold):
    """A batch norm that the exporter left behind, with broken numbers at that."""
    b = Builder()
    x = b.input("x", (1, 3, 6, 6))
    b.batch_norm(b.conv(x, 4), var=np.nan, name="dead")
    report, model = fold(b.build([b.relu(x, name="y")]))
    assert (report.epsilon, report.not_folded) == ((), ())
    assert operators(model) == ["Relu"]


def test_a_model_with_nothing_to_fold_is_saved_with_a_manifest(fold):
    b = Builder()
    source = b.build([b.conv(b.input("x", (1, 3, 6, 6)), 4, name="y")])
    report, model = fold(source)
    assert (model.graph.node, model.graph.initializer) == (source.graph.node, source.graph.initializer)
    assert (report.manifest.batch_norms, report.manifest.outputs) == ((), ("y",))


def test_the_file_is_parsed_once(save, tmp_path, monkeypatch):
    """What lies beside it is known from that: no parse of gigabytes only to list files."""
    path = save(net(), save_as_external_data=True, location="given.data", size_threshold=0)
    loads, right = [], onnx.load
    monkeypatch.setattr(onnx, "load", lambda *args, **options: loads.append(args) or right(*args, **options))
    report = fold_file(path, tmp_path / "out.onnx")
    assert loads == [(str(path),)]
    assert report.manifest.source == folding.Source(
        path.name, folding.hash_files([path, path.with_name("given.data")])
    )


def test_data_beside_the_model(save, tmp_path, monkeypatch):
    """As for a model of more than 2 GB."""
    monkeypatch.setattr(folding, "save_onnx", lambda model, path: save_onnx(model, path, largest_file=100))
    path = save(net(), save_as_external_data=True, location="given.data", size_threshold=0)
    fold_file(path, tmp_path / "out.onnx")
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    assert (tmp_path / "out.onnx.data").is_file()
    model = onnx.load(str(tmp_path / "out.onnx"))
    np.testing.assert_allclose(run(model, X)[0], run(net(), X)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_shared_weight_may_become_more_than_two_gigabytes(tmp_path):
    """Nine matrix products share 256 MB of weights; nine batch norms make them nine."""
    size, count = 8000, 9
    rng = np.random.default_rng(0)
    values = {"w": rng.random((size, size), "float32")}
    nodes = []
    for index in range(count):
        vectors = [f"{role}{index}" for role in ("gamma", "beta", "mean", "variance")]
        values.update(zip(vectors, rng.random((4, size), "float32")))
        inner, y = f"inner{index}", f"y{index + 1}"
        nodes.append(helper.make_node("Gemm", [f"y{index}", "w"], [inner], name=f"gemm{index}"))
        nodes.append(helper.make_node("BatchNormalization", [inner, *vectors], [y], name=f"bn{index}"))
    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", size))] for name in ("y0", f"y{count}")
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = helper.make_graph(nodes, "large", *infos, tensors)
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]),
        str(tmp_path / "in.onnx"),
    )
    report = fold_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size > 2**31
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    model = onnx.load(str(tmp_path / "out.onnx"))
    assert operators(model) == ["Gemm"] * count
    found = {name: digest(weight) for name, weight in weights(model).items()}
    wanted = {layer.name: layer.weight_after for norm in report.manifest.batch_norms for layer in norm.layers}
    assert found == wanted


# --- what it says of itself --------------------------------------------------------------------------


def test_b074_b121_the_file_says_what_was_folded_from_what_by_what(fold, tmp_path):
    report, model = fold(net())
    manifest = load_manifest(tmp_path / "out.onnx")
    assert manifest == report.manifest
    assert manifest.source.name == "model.onnx"
    assert len(manifest.source.sha256) == 64
    assert set(manifest.versions) == {"tvm-fuse", "numpy", "onnx"}
    assert [(norm.name, [layer.name for layer in norm.layers]) for norm in manifest.batch_norms] == [
        ("bn1", ["conv1"]),
        ("out", ["conv2"]),
    ]
    for norm in manifest.batch_norms:
        assert norm.epsilon_origin == "source attribute"
        (layer,) = norm.layers
        assert digest(weights(model)[layer.name]) == layer.weight_after
        assert digest(weights(net())[layer.name]) == layer.weight_before


def test_metadata_of_the_model_stays(fold):
    source = net()
    source.metadata_props.add(key="author", value="somebody")
    source.doc_string, source.producer_name = "a net", "exporter"
    _, model = fold(source)
    assert (model.doc_string, model.producer_name) == ("a net", "exporter")
    assert [entry.key for entry in model.metadata_props] == ["author", "tvm_fuse.manifest"]


def test_a_batch_norm_written_as_operators_is_recovered(fold):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 6, 6)), 4, name="conv")
    column = lambda: b.const(b.rng.uniform(0.5, 1.5, (4, 1, 1)))  # noqa: E731
    variance = b.op("Add", column(), b.const(np.array(1e-3)))
    y = b.op("Div", b.op("Sub", y, column()), b.op("Sqrt", variance))
    source = b.build([b.op("Add", b.op("Mul", y, column()), column(), name="y")])
    report, model = fold(source)
    assert operators(model) == ["Conv"]
    (norm,) = report.manifest.batch_norms
    assert (norm.epsilon, norm.epsilon_origin) == (pytest.approx(1e-3), "recovered from operators")
    np.testing.assert_allclose(run(model, X)[0], run(source, X)[0], rtol=1e-5, atol=1e-5)


# --- epsilon and statistics --------------------------------------------------------------------------


def test_b073_an_epsilon_that_is_not_the_expected_one_names_the_batch_norm(save, tmp_path):
    path = save(net(epsilon=1e-5))
    with pytest.raises(ModelError, match=r"bn-epsilon-mismatch at bn1: wanted epsilon 0\.001 \(user\)"):
        fold_file(path, tmp_path / "out.onnx", FoldOptions(epsilon={"bn*": 1e-3}))
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("by", ["user", "training config"])
def test_an_epsilon_is_aligned(fold, by):
    given = {"bn1": 0.25}
    options = {"epsilon": given} if by == "user" else {"epsilon_config": EpsilonConfig(given)}
    report, model = fold(net(epsilon=1e-5), align_epsilon=True, **options)
    norm = report.manifest.batch_norms[0]
    assert (norm.epsilon, norm.epsilon_origin) == (0.25, by)
    assert report.manifest.batch_norms[1].epsilon == pytest.approx(1e-5)
    assert not np.array_equal(weights(model)["conv1"], weights(fold(net(epsilon=1e-5))[1])["conv1"])


def test_an_aligned_epsilon_is_in_the_model_also_where_nothing_folds(fold):
    b = Builder()
    source = b.build([b.batch_norm(b.relu(b.conv(b.input("x", (1, 3, 6, 6)), 4)), 1e-5, name="late")])
    report, model = fold(source, epsilon={"late": 0.25}, align_epsilon=True)
    (node,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert {entry.name: entry.f for entry in node.attribute}["epsilon"] == 0.25
    assert report.manifest.epsilon == {"late": 0.25}


def test_statistics_are_judged_with_the_aligned_epsilon(fold):
    """A variance of 0 is legal with the epsilon that the model was trained with."""
    b = Builder()
    source = b.build([b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), 0.0, var=0.0, name="bn")])
    with pytest.raises(ModelError, match="bn-variance-not-positive at bn"):
        fold(source)
    report, _ = fold(source, epsilon={"bn": 1e-3}, align_epsilon=True)
    assert len(report.folds) == 1
    assert [warning.code for warning in report.warnings] == [Code.BN_VARIANCE_ALL_ZERO]


def test_broken_statistics_name_the_batch_norm_and_write_nothing(save, tmp_path):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 6, 6)), 4)
    path = save(b.build([b.batch_norm(y, mean=np.array([0, np.nan, 0, np.inf]), name="bn")]))
    with pytest.raises(ModelError, match=r"bn-statistics-not-finite at bn: .* mean\[1\] = nan, mean\[3\]"):
        fold_file(path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_b010_b053_a_model_in_training_mode_is_refused(save, tmp_path):
    b = Builder()
    outputs = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), training_mode=1, n_out=3, name="bn")
    with pytest.raises(ModelError, match="'bn' is in training mode"):
        fold_file(save(b.build(outputs[:1])), tmp_path / "out.onnx")


def test_an_infinite_epsilon_that_cannot_be_judged_is_left_alone(fold):
    b = Builder()
    gamma = b.input("gamma", (4,))
    y = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), np.inf, gamma=gamma, name="bn")
    report, _ = fold(b.build([y]))
    assert [(left.name, left.epsilon) for left in report.manifest.left_alone] == [("bn", None)]


# --- files that must not be touched ------------------------------------------------------------------


@pytest.mark.parametrize("output", ["model.onnx", "../{here}/model.onnx", "link.onnx"])
def test_the_source_is_not_overwritten(save, tmp_path, output):
    path = save(net())
    (tmp_path / "link.onnx").symlink_to(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="would overwrite its source"):
        fold_file(path, tmp_path / output.format(here=tmp_path.name))
    assert path.read_bytes() == before


def test_data_of_the_source_is_not_overwritten(save, tmp_path):
    path = save(net(), save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    with pytest.raises(UsageError, match=r"out\.onnx\.data: the folded model would overwrite its source"):
        fold_file(path, tmp_path / "out.onnx")


def test_a_failure_in_the_middle_leaves_the_old_file(save, tmp_path, monkeypatch):
    (tmp_path / "out.onnx").write_bytes(b"older")

    def full(self, data):
        raise OSError(28, "No space left on device")

    path = save(net())
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"out\.onnx cannot be written: No space left"):
        fold_file(path, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == b"older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]


# --- a new process -----------------------------------------------------------------------------------

RUN_ONNX = """
import sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(sys.argv[1], options)
outputs = session.run(None, dict(numpy.load(sys.argv[2])))
numpy.savez(sys.argv[3], *outputs)
"""

RUN_RELAY = """
import sys
from pathlib import Path
import numpy
from tvm_fuse.relay.build import Runner, build_unfused
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.target import resolve_target
target = resolve_target("llvm")
model = load_model(Path(sys.argv[1]), shapes={})
inputs = dict(numpy.load(sys.argv[2]))
outputs = Runner(build_unfused(model.module, target), target).run(inputs, model.outputs)
numpy.savez(sys.argv[3], *outputs.values())
"""


def run_elsewhere(code, path, inputs):
    """The outputs of a saved model in a new process."""
    given, results = path.parent / "given.npz", path.parent / "results.npz"
    np.savez(given, **inputs)
    command = [sys.executable, "-c", code, *map(str, (path, given, results))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return list(np.load(results).values())


def conv1d_net():
    """B044: a convolution along one axis with one tap, then a matrix product."""
    b = Builder()
    y = b.conv(b.input("x", (2, 3, 7)), 4, kernel=[1], bias=True, name="conv")
    return b.build([b.batch_norm(y, name="bn")])


def dense_net():
    """B044: a matrix product of two axes."""
    b = Builder()
    weight, bias = b.rng.standard_normal((6, 5)), b.rng.standard_normal(6)
    y = b.op("Gemm", b.input("x", (3, 5)), b.const(weight), b.const(bias), transB=1, name="gemm")
    return b.build([b.batch_norm(y, name="bn")])


def conv3d_net():
    """B071: five axes."""
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 4, 6, 6)), 4, kernel=[3, 3, 3], pad=1, name="conv")
    return b.build([b.batch_norm(y, name="bn")])


RELOADED = {"conv2d": net, "conv1d of one tap": conv1d_net, "dense": dense_net, "conv3d": conv3d_net}


def feeds_of(model):
    rng = np.random.default_rng(0)
    given = {tensor.name for tensor in model.graph.initializer}
    return {
        entry.name: rng.standard_normal([dim.dim_value for dim in entry.type.tensor_type.shape.dim]).astype(
            "f"
        )
        for entry in model.graph.input
        if entry.name not in given
    }


@pytest.mark.parametrize("make", RELOADED.values(), ids=RELOADED.keys())
def test_b044_an_onnx_file_in_a_new_process_is_the_folded_model_bit_for_bit(save, tmp_path, make):
    path, inputs = save(make()), feeds_of(make())
    in_memory, report = fold_onnx_model(load_onnx(path), FoldOptions())
    assert fold_file(path, tmp_path / "out.onnx").manifest == report.manifest
    wanted, got = run(in_memory.proto, inputs), run_elsewhere(RUN_ONNX, tmp_path / "out.onnx", inputs)
    assert len(report.folds) >= 1
    assert all(np.array_equal(*pair) for pair in zip(got, wanted))
    assert not np.array_equal(got[0], run(make(), inputs)[0])  # folded, so rounded otherwise
    model = onnx.load(str(tmp_path / "out.onnx"))
    for norm in load_manifest(tmp_path / "out.onnx").batch_norms:
        assert [digest(weights(model)[layer.name]) for layer in norm.layers] == [
            layer.weight_after for layer in norm.layers
        ]


@pytest.mark.relay
@pytest.mark.parametrize("make", RELOADED.values(), ids=RELOADED.keys())
def test_b044_a_folder_in_a_new_process_is_the_folded_model_bit_for_bit(save, tmp_path, make):
    path, inputs = save(make()), feeds_of(make())
    model = load.load_model(path, shapes={})
    module, report = folding.fold_relay_model(model, FoldOptions(), folding.Source("", ""))
    written = fold_file(path, tmp_path / "out").manifest
    assert written.batch_norms == report.manifest.batch_norms
    cpu = target.resolve_target("llvm")
    wanted = build.Runner(build.build_unfused(module, cpu), cpu).run(inputs, model.outputs)
    got = run_elsewhere(RUN_RELAY, tmp_path / "out", inputs)
    assert all(np.array_equal(*pair) for pair in zip(got, wanted.values()))
    constants = tvm.runtime.load_param_dict((tmp_path / "out" / "params.bin").read_bytes())
    found = {digest(value.numpy()) for value in constants.values()}
    assert {layer.weight_after for norm in written.batch_norms for layer in norm.layers} <= found


# --- folders -----------------------------------------------------------------------------------------


@pytest.mark.relay
def test_a_folder_holds_module_parameters_and_manifest(save, tmp_path):
    report = fold_file(save(net()), tmp_path / "new" / "out")
    folder = tmp_path / "new" / "out"
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", "model.json", "params.bin"]
    model = load.load_model(folder, shapes={})
    assert (model.name, model.outputs) == ("out", ("out",))
    assert "nn.batch_norm" not in count_operators(model.module)
    assert json.loads((folder / "manifest.json").read_text())["outputs"] == ["out"]
    assert set(report.manifest.versions) == {"tvm-fuse", "numpy", "onnx", "tvm"}


@pytest.mark.relay
def test_b085_constants_are_no_text(tmp_path):
    """A weight of 1 MB makes the parameters larger and the graph not."""
    sizes = []
    for out in (8, 8000):
        net = Net()
        module = net.module(net.batch_norm(net.dense(net.input("x", (1, 32)), out)))
        (tmp_path / "m.json").write_text(tvm.ir.save_json(module))
        fold_file(tmp_path / "m.json", tmp_path / f"out{out}")
        sizes.append((tmp_path / f"out{out}" / "model.json").stat().st_size)
        assert (tmp_path / f"out{out}" / "params.bin").stat().st_size > out * 32 * 4
    assert sizes[1] < sizes[0] + 1000 < 100_000


@pytest.mark.relay
def test_b026_a_folder_folds_to_itself(save, tmp_path):
    first = fold_file(save(net()), tmp_path / "out")
    again = fold_file(tmp_path / "out", tmp_path / "out2")
    assert (again.folds, again.scale_shifts, again.manifest) == ((), (), first.manifest)
    for name in ("params.bin", "manifest.json"):
        assert (tmp_path / "out2" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    one, two = (load.load_model(tmp_path / name, shapes={}).module for name in ("out", "out2"))
    assert tvm.ir.structural_equal(one, two)


@pytest.mark.relay
def test_a_relay_module_with_parameters(tmp_path):
    net = Net()
    x, w = net.input("x", (1, 8, 6, 6)), net.input("w", (8, 8, 3, 3))
    module = net.module(net.batch_norm(net.conv2d(x, 8, weight=w)))
    values = feeds(module)
    (tmp_path / "m.relay").write_text(module.astext())
    (tmp_path / "m.params").write_bytes(bytes(tvm.runtime.save_param_dict({"w": values["w"]})))
    options = FoldOptions(params=tmp_path / "m.params")
    report = fold_file(tmp_path / "m.relay", tmp_path / "out", options)
    assert len(report.folds) == 1
    assert report.manifest.source.name == "m.relay"
    assert report.manifest.source.sha256 == folding.hash_files([tmp_path / "m.relay", tmp_path / "m.params"])
    assert load.load_model(tmp_path / "out", shapes={}).inputs[0].name == "x"


@pytest.mark.relay
def test_dynamic_dimensions_of_a_folder_are_given(save, tmp_path):
    path = save(net(batch="n"))
    with pytest.raises(UsageError, match="--shape x="):
        fold_file(path, tmp_path / "out")
    fold_file(path, tmp_path / "out", FoldOptions(shapes={"x": (2, 3, 6, 6)}))
    (spec,) = load.load_model(tmp_path / "out", shapes={}).inputs
    assert spec.shape == (2, 3, 6, 6)


@pytest.mark.relay
def test_files_of_a_relay_source_are_not_overwritten(tmp_path):
    net = Net()
    module = net.module(relay.nn.relu(net.input("x", (1, 3))))
    (tmp_path / "model.json").write_text(tvm.ir.save_json(module))
    before = (tmp_path / "model.json").read_bytes()
    with pytest.raises(UsageError, match=r"model\.json: the folded model would overwrite its source"):
        fold_file(tmp_path / "model.json", tmp_path)
    fold_file(tmp_path / "model.json", tmp_path / "out")
    with pytest.raises(UsageError, match="would overwrite its source"):
        fold_file(tmp_path / "out", tmp_path / "out")
    assert (tmp_path / "model.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_whole_models(fold, name):
    source = MODELS[name](image=64)
    report, model = fold(source)
    count = operators(source).count("BatchNormalization")
    assert len(report.manifest.batch_norms) == count
    assert "BatchNormalization" not in operators(model)
    inputs = feeds_of(source)
    np.testing.assert_allclose(run(model, inputs)[0], run(source, inputs)[0], rtol=1e-4, atol=1e-5)
