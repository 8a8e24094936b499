"""Loading: recovered batch norms are like any other; other models are what ``read_onnx`` makes of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.onnx_models import Builder, run
from tests.support.onnx_pieces import EPSILON, NORM, SPELLINGS, C, parameters, pieces
from tvm_fuse.core.epsilon import EpsilonOrigin
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.folding import FoldOptions, fold_file
from tvm_fuse.onnx import load
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import load_manifest
from tvm_fuse.onnx.read import read_onnx

RECOVERED = (np.float32(EPSILON), EpsilonOrigin.RECOVERED)


@pytest.fixture
def save(tmp_path):
    """``save(model)`` writes a model and returns its path."""

    def write(model):
        onnx.save(model, str(tmp_path / "model.onnx"))
        return tmp_path / "model.onnx"

    return write


def operators(model):
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def epsilons(model):
    return {name: (entry.value, entry.origin) for name, entry in model.epsilon.items()}


@pytest.mark.parametrize("opset", [7, 17])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b048_b049_b050_epsilon_is_recovered(save, spelling, opset):
    model = load_onnx(save(pieces(spelling, opset=opset)))
    assert epsilons(model) == {"last": RECOVERED}
    assert operators(model.proto) == ["Conv", "BatchNormalization", "Relu"]
    assert (model.opset, model.outputs, str(model.inputs[0])) == (opset, ("relu",), "x [2, 3, 5, 5]")
    onnx.checker.check_model(model.proto, full_check=True)


def test_beside_batch_norms_that_are_nodes(save):
    b = Builder()
    y = SPELLINGS["TensorFlow"][0](b, b.input("x", (1, C, 4, 4)), parameters(b))
    y = b.batch_norm(b.relu(y), epsilon=0.25, name="stated")
    model = load_onnx(save(b.build([b.batch_norm(b.relu(y), epsilon=None, name="default")])))
    assert epsilons(model) == {
        "stated": (0.25, EpsilonOrigin.SOURCE_ATTRIBUTE),
        "default": (1e-5, EpsilonOrigin.SOURCE_DEFAULT),
        "last": RECOVERED,
    }


def test_operators_without_names(save):
    model = pieces()
    for node in model.graph.node:
        node.name = ""
    loaded = load_onnx(save(model))
    assert len(loaded.epsilon) == 1
    assert set(loaded.epsilon) < {node.name for node in loaded.proto.graph.node}


def test_operators_that_no_output_needs(save):
    b = Builder()
    x = b.input("x", (1, C, 4, 4))
    SPELLINGS["PyTorch"][0](b, x, parameters(b))
    assert load_onnx(save(b.build([b.relu(x)]))).epsilon == {}


# --- models without ----------------------------------------------------------------------------------


def one_batch_norm(b, x):
    return b.batch_norm(b.conv(x, C))


def root_of_data(b, x):
    return b.op("Div", x, b.op("Sqrt", b.op("Add", b.op("Mul", x, x), b.const(np.array(1e-3)))))


def constants_without_a_root(b, x):
    variance = b.const(NORM["variance"].reshape(C, 1, 1))
    return b.op("Mul", x, b.op("Div", b.const(np.ones((C, 1, 1))), variance))


@pytest.mark.parametrize("make", [one_batch_norm, root_of_data, constants_without_a_root])
def test_other_models_are_not_taken_apart(save, make, monkeypatch):
    def forbidden(model):
        raise AssertionError("its weights were copied")

    monkeypatch.setattr(load, "take_apart", forbidden)
    b = Builder()
    path = save(b.build([make(b, b.input("x", (1, C, 4, 4)))]))
    assert load_onnx(path) == read_onnx(path)


def test_a_model_with_a_root_of_constants_and_no_batch_norm(save):
    b = Builder()
    root = b.op("Sqrt", b.const(np.full((C, 1, 1), 2.0)))
    path = save(b.build([b.op("Mul", b.input("x", (1, C, 4, 4)), root)]))
    assert load_onnx(path).proto == read_onnx(path).proto


def test_what_read_onnx_refuses(save, tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_onnx(tmp_path / "absent.onnx")
    model = pieces()
    model.opset_import[0].version = 6
    with pytest.raises(ModelError, match="opset 6"):
        load_onnx(save(model))


# --- the fold job ------------------------------------------------------------------------------------


def test_folding_a_file(save, tmp_path):
    model = pieces("TensorFlow", const_nodes=True)
    report = fold_file(save(model), tmp_path / "folded.onnx")
    assert [(check.name, check.used, check.origin) for check in report.epsilon] == [("last", *RECOVERED)]
    folded = onnx.load(str(tmp_path / "folded.onnx"))
    assert operators(folded) == ["Conv", "Relu"]
    assert load_manifest(tmp_path / "folded.onnx").epsilon == pytest.approx({"last": EPSILON})
    feed = {"x": np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype("float32")}
    np.testing.assert_allclose(run(folded, feed)[0], run(model, feed)[0], atol=1e-5, rtol=1e-5)


def test_an_epsilon_that_is_not_the_user_s(save, tmp_path):
    path, output = save(pieces()), tmp_path / "folded.onnx"
    with pytest.raises(ModelError, match=r"bn-epsilon-mismatch at last: wanted epsilon 0.01 \(user\)"):
        fold_file(path, output, FoldOptions(epsilon={"last": 1e-2}))
    fold_file(path, output, FoldOptions(epsilon={"last": 1e-2}, align_epsilon=True))
    right = pieces()
    (constant,) = [tensor for tensor in right.graph.initializer if not tensor.dims]
    constant.CopyFrom(helper.make_tensor(constant.name, constant.data_type, (), [1e-2]))
    feed = {"x": np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype("float32")}
    (got,), (want,), (before,) = (run(m, feed) for m in (onnx.load(str(output)), right, pieces()))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    assert np.abs(got - before).max() > 1e-2
