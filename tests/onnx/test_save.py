"""Saving ONNX models: whole or not at all, in one file or with data beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.onnx_models import Builder, run
from tvm_fuse.core.errors import UsageError
from tvm_fuse.onnx.parts import take_apart
from tvm_fuse.onnx.save import save_onnx

IN_ONE_FILE, WITH_DATA = {}, {"largest_file": 1000}


def small_model(seed=0, out=8):
    """A convolution of 8 x 4 x 3 x 3 float32 (1152 bytes), a small bias, an integer constant."""
    b = Builder(seed=seed)
    y = b.conv(b.input("x", (1, 4, 6, 6)), out, bias=True, name="c")
    z = b.conv(y, 16, name="d")
    return b.build([b.op("Reshape", z, b.const(np.array([1, -1])), name="r")])


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_model(got, wanted):
    one, other = take_apart(got), take_apart(wanted)
    assert one.structure == other.structure
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        assert np.array_equal(array, other.arrays[name])


@pytest.mark.parametrize("options", [IN_ONE_FILE, WITH_DATA], ids=["one file", "with data"])
def test_what_is_saved_loads_back(tmp_path, options):
    model = small_model()
    before = model.SerializeToString()
    path = tmp_path / "out.onnx"
    save_onnx(model, path, **options)
    assert model.SerializeToString() == before
    onnx.checker.check_model(str(path), full_check=True)
    assert_same_model(onnx.load(str(path)), model)
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float32)
    assert np.array_equal(run(onnx.load(str(path)), {"x": x})[0], run(model, {"x": x})[0])


def test_one_file_holds_the_serialized_model(tmp_path):
    model = small_model()
    save_onnx(model, tmp_path / "out.onnx")
    assert files(tmp_path) == {"out.onnx": model.SerializeToString()}


def test_large_tensors_lie_beside_the_model(tmp_path):
    save_onnx(small_model(), tmp_path / "out.onnx", **WITH_DATA)
    assert set(files(tmp_path)) == {"out.onnx", "out.onnx.data"}
    proto = onnx.load(str(tmp_path / "out.onnx"), load_external_data=False)
    external = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.external_data}
    assert set(external) == {"c.weight", "d.weight"}
    entries = {entry.key: entry.value for entry in external["d.weight"].external_data}
    assert entries == {"location": "out.onnx.data", "offset": "4096", "length": str(16 * 8 * 9 * 4)}


@pytest.mark.parametrize("largest_file", [4600, 6000])
def test_the_threshold_counts_all_tensors(tmp_path, largest_file):
    """1152 + 32 + 4608 + 16 bytes."""
    save_onnx(small_model(), tmp_path / "out.onnx", largest_file=largest_file)
    assert ("out.onnx.data" in files(tmp_path)) is (largest_file < 5808)


@pytest.mark.parametrize("options", [IN_ONE_FILE, WITH_DATA], ids=["one file", "with data"])
def test_an_older_file_is_replaced(tmp_path, options):
    path = tmp_path / "out.onnx"
    save_onnx(small_model(seed=1), path, **options)
    save_onnx(small_model(seed=2), path, **options)
    assert_same_model(onnx.load(str(path)), small_model(seed=2))
    assert len(files(tmp_path)) == 1 + bool(options)


@pytest.mark.parametrize("options", [IN_ONE_FILE, WITH_DATA], ids=["one file", "with data"])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "older file"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, options, is_there, fails_at):
    path = tmp_path / "out.onnx"
    if is_there:
        save_onnx(small_model(seed=1), path, **options)
    before = files(tmp_path)
    replace, calls = Path.replace, []

    def failing(self, target):
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    moves = (3 if is_there else 2) if options else 1
    if fails_at > moves:
        save_onnx(small_model(seed=2), path, **options)
        return
    with pytest.raises(UsageError, match="No space left"):
        save_onnx(small_model(seed=2), path, **options)
    assert files(tmp_path) == before


def test_a_failure_while_writing_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "out.onnx"
    save_onnx(small_model(seed=1), path, **WITH_DATA)
    before = files(tmp_path)

    def failing(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", failing)
    for options in (IN_ONE_FILE, WITH_DATA):
        with pytest.raises(UsageError, match=r"out\.onnx cannot be written: No space left"):
            save_onnx(small_model(seed=2), path, **options)
        assert files(tmp_path) == before


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"absent.*out\.onnx"):
        save_onnx(small_model(), tmp_path / "absent" / "out.onnx")
