"""Running ONNX models: ONNX Runtime where it is there and can, else onnx's reference evaluator."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest

from tests.support.onnx_models import Builder
from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.onnx import run as run_module
from tvm_fuse.onnx.run import run_models

RUNTIME, REFERENCE = run_module._ENGINES


@pytest.fixture
def save(tmp_path):
    def write(name, model, **options):
        onnx.save(model, str(tmp_path / name), **options)
        return tmp_path / name

    return write


@pytest.fixture
def no_runtime(monkeypatch):
    """As if ONNX Runtime were not installed."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


def make_model(opset=17, dtype=np.float32, op=None, seed=0, epsilon=0.25):
    """The variance is small, so that epsilon counts, be it the default."""
    b = Builder(opset=opset, dtype=dtype, seed=seed)
    x = b.input("x", (1, 3, 6, 6))
    y = b.batch_norm(b.conv(x, 4, pad=1, bias=True), epsilon, var=epsilon or 1e-5, name="first")
    return b.build([y, b.op(op, y, name="second") if op else b.relu(y, name="second")])


X = {"x": np.random.default_rng(0).standard_normal((1, 3, 6, 6)).astype("float32")}


def test_onnx_runtime_comes_first(save):
    paths = [save("a.onnx", make_model(seed=0)), save("b.onnx", make_model(seed=1))]
    engine, outputs = run_models(paths, X)
    assert engine == RUNTIME == "ONNX Runtime"
    assert [list(each) for each in outputs] == [["first", "second"]] * 2
    assert not np.array_equal(outputs[0]["first"], outputs[1]["first"])
    assert outputs[0]["second"].shape == (1, 4, 6, 6)


@pytest.mark.usefixtures("no_runtime")
@pytest.mark.parametrize("epsilon", [0.25, None], ids=["", "default epsilon"])
@pytest.mark.parametrize("opset", range(7, 18))
def test_the_reference_agrees_at_every_opset(save, monkeypatch, opset, epsilon):
    """onnx's own batch norm takes statistics of the data up to opset 13."""
    path = save("a.onnx", make_model(opset, epsilon=epsilon))
    engine, (got,) = run_models([path], X)
    assert engine == REFERENCE
    monkeypatch.undo()
    engine, (wanted,) = run_models([path], X)
    assert engine == RUNTIME
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * abs(value).max())


def test_what_the_runtime_lacks_runs_in_the_reference(save):
    """Both models, so that they are compared in one engine. ONNX Runtime has no float64 HardSwish."""
    one, other = make_model(dtype=np.float64), make_model(dtype=np.float64, op="HardSwish")
    feeds = {"x": X["x"].astype("float64")}
    engine, outputs = run_models([save("a.onnx", one), save("b.onnx", other)], feeds)
    assert engine == REFERENCE
    assert len(outputs) == 2


@pytest.mark.parametrize("hide", [False, True], ids=["runtime", "reference"])
def test_data_beside_the_model_is_found(save, monkeypatch, hide):
    if hide:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = make_model()
    path = save("a.onnx", model)
    outside = save("b.onnx", model, save_as_external_data=True, location="d", size_threshold=0)
    _, (one, other) = run_models([path, outside], X)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_nothing_is_rewritten(save):
    """ONNX Runtime would fold the batch norm by itself, and both models would be one."""
    import onnxruntime

    levels = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, options, **others):
            levels.append(options.graph_optimization_level)
            super().__init__(path, options, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", Session)
        run_models([save("a.onnx", make_model())], X)
    assert levels == [onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL]


@pytest.mark.parametrize("hide", [False, True], ids=["both", "no runtime"])
def test_when_no_engine_can_the_error_names_all(save, monkeypatch, hide):
    if hide:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    path = save("a.onnx", make_model())
    with pytest.raises(ToolFailed, match=r"a\.onnx cannot be run: ONNX Runtime") as caught:
        run_models([path], {"x": np.zeros((2, 5, 6, 6), "float32")})
    assert ("ONNX Runtime is not installed" in str(caught.value)) is hide
    assert REFERENCE in str(caught.value)
