"""Tests of the model generator in ``examples/models.py``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "models.py"
IMAGE = 64


def _load() -> ModuleType:
    """Imports the script by path, since ``examples`` is not an installed package."""
    spec = importlib.util.spec_from_file_location("tvm_fuse_example_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


models = _load()

# Per model: Conv nodes, BatchNormalization nodes, epsilon, and torchvision's number of trainable parameters.
EXPECTED = {
    "resnet50": (53, 53, 1e-5, 25_557_032),
    "mobilenet_v2": (52, 52, 1e-5, 3_504_872),
    "efficientnet_b0": (81, 49, 1e-3, 5_288_548),
}


@pytest.fixture(scope="module", params=sorted(EXPECTED))
def named_model(request: pytest.FixtureRequest) -> tuple[str, onnx.ModelProto]:
    """A model's name and the model, at a small image size and batch two."""
    return request.param, models.MODELS[request.param](batch=2, image=IMAGE)


def _attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _run(model: onnx.ModelProto, data: np.ndarray, optimize: bool = False) -> np.ndarray:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["output"], {"input": data})[0]


def _images(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal((2, 3, IMAGE, IMAGE)).astype(np.float32)


def test_registry_lists_the_three_models() -> None:
    assert set(models.MODELS) == set(EXPECTED)


def test_structure(named_model: tuple[str, onnx.ModelProto]) -> None:
    name, model = named_model
    convs, batch_norms, _, trainable = EXPECTED[name]
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["Conv"] == convs
    assert counts["BatchNormalization"] == batch_norms
    assert counts["Gemm"] == 1
    parameters = _initializers(model)
    assert sum(v.size for k, v in parameters.items() if ".running_" not in k) == trainable


def test_checker_passes_with_inferred_shapes(named_model: tuple[str, onnx.ModelProto]) -> None:
    _, model = named_model
    onnx.checker.check_model(model, full_check=True)
    assert [opset.version for opset in model.opset_import] == [17]
    assert model.ir_version == 8
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("resnet50", "/layer1/layer1.0/conv1/Conv"),
        ("resnet50", "/layer4/layer4.0/downsample/downsample.1/BatchNormalization"),
        ("mobilenet_v2", "/features/features.2/conv/conv.1/conv.1.2/Clip"),
        ("efficientnet_b0", "/features/features.1/features.1.0/block/block.1/scale_activation/Sigmoid"),
    ],
)
def test_nodes_are_named_as_pytorch_exports_name_them(name: str, node: str) -> None:
    assert node in {n.name for n in models.MODELS[name](image=32).graph.node}


def test_every_batch_norm_is_worth_folding(named_model: tuple[str, onnx.ModelProto]) -> None:
    name, model = named_model
    parameters = _initializers(model)
    producers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type != "BatchNormalization":
            continue
        attributes = _attributes(node)
        assert attributes["epsilon"] == pytest.approx(EXPECTED[name][2], rel=1e-6)
        assert attributes["training_mode"] == 0
        conv = producers[node.input[0]]
        assert conv.op_type == "Conv"
        assert len(conv.input) == 2
        gamma, beta, mean, var = (parameters[i] for i in node.input[1:])
        assert gamma.min() < 0 < gamma.max()
        assert np.abs(beta).min() > 0
        assert np.abs(mean).min() > 0
        assert 0.29 < var.min() < 0.6
        assert 1.5 < var.max() < 3.01


def test_resnet_strides_in_the_3x3() -> None:
    nodes = {node.name: node for node in models.resnet50(image=32).graph.node}
    assert _attributes(nodes["/layer2/layer2.0/conv1/Conv"])["strides"] == [1, 1]
    assert _attributes(nodes["/layer2/layer2.0/conv2/Conv"])["strides"] == [2, 2]


def test_same_seed_same_bytes() -> None:
    first, again, other = (models.mobilenet_v2(image=32, seed=seed) for seed in (3, 3, 4))
    assert first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert first.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True)


def test_output_is_sane_and_follows_the_input(named_model: tuple[str, onnx.ModelProto]) -> None:
    _, model = named_model
    output = _run(model, _images())
    assert output.shape == (2, 1000)
    assert np.isfinite(output).all()
    assert 0.1 < output.std() < 10
    # Noise images differ little once pooled, yet by far more than float32 rounding.
    assert np.std(output[0] - output[1]) > 0.01 * output.std()


def test_correct_fold_agrees_and_wrong_folds_do_not(named_model: tuple[str, onnx.ModelProto]) -> None:
    _, model = named_model
    data = _images()
    plain = _run(model, data)
    scale = plain.std()
    assert np.abs(_run(model, data, optimize=True) - plain).max() < 1e-3 * scale
    first = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    for slot, change in [(1, np.abs), (2, np.zeros_like), (3, np.zeros_like), (4, np.ones_like)]:
        wrong = onnx.ModelProto()
        wrong.CopyFrom(model)
        tensor = next(t for t in wrong.graph.initializer if t.name == first.input[slot])
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
        assert np.abs(_run(wrong, data) - plain).max() > 1e-2 * scale


def test_command_line_writes_a_loadable_file(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    command = [sys.executable, os.fspath(SCRIPT), "mobilenet_v2", os.fspath(target)]
    subprocess.run([*command, "--image", "32", "--batch", "2", "--seed", "5"], check=True, timeout=300)
    model = onnx.load(target)
    onnx.checker.check_model(model)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 32, 32]
    assert model == models.mobilenet_v2(batch=2, image=32, seed=5)
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.parametrize("argv", [["vgg", "x.onnx"], ["resnet50", "x.onnx", "--image", "0"]])
def test_command_line_rejects_bad_arguments(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        models.main(argv)
    assert error.value.code == 2
