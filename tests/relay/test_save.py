"""Relay modules in folders: what comes back is what was saved; all files or none."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, count_operators, feeds, relay, run_unfused, tvm
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import Manifest, Source, to_json

load = Lazy("tvm_fuse.relay.load")
save = Lazy("tvm_fuse.relay.save")

pytestmark = pytest.mark.relay

NAMES = ["manifest.json", "model.json", "params.bin"]


def manifest(*outputs):
    return to_json(Manifest(Source("m", "00"), {}, (), (), (), outputs))


def module_of(seed=0, name="x"):
    net = Net(seed)
    x = net.input(name, (1, 4, 6, 6))
    return net.module(relay.nn.relu(net.batch_norm(net.conv2d(x, 4))), net.conv2d(x, 3))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- there and back ------------------------------------------------------------------------------


def test_what_is_saved_loads_back(tmp_path):
    module = module_of()
    before = module.astext()
    save.save_folder(module, manifest("y", "z"), tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == NAMES
    assert module.astext() == before
    model = load.load_model(tmp_path / "out", shapes={})
    assert tvm.ir.structural_equal(model.module, module)
    assert (model.name, model.outputs) == ("out", ("y", "z"))
    inputs = feeds(module)
    for got, wanted in zip(run_unfused(model.module, inputs), run_unfused(module, inputs)):
        assert np.array_equal(got, wanted)


DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_of_every_dtype_and_rank(tmp_path, dtype):
    arrays = [np.ones((), dtype), np.zeros((0, 3), dtype), np.arange(6).reshape(2, 3).astype(dtype)]
    body = relay.Tuple([relay.const(array, dtype) for array in arrays])
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([], body)))
    save.save_folder(module, manifest("a", "b", "c"), tmp_path / "out")
    loaded = load.load_model(tmp_path / "out", shapes={})
    assert loaded.inputs == ()
    for field, array in zip(loaded.module["main"].body.fields, arrays):
        got = field.data.numpy()
        assert (str(got.dtype), got.shape) == (dtype, array.shape)
        assert np.array_equal(got, array)


def test_a_constant_that_is_read_twice_is_stored_once(tmp_path):
    net = Net()
    x, c = net.input("x", (1, 4)), net.const(1, 4)
    module = net.module(relay.add(x, c), relay.multiply(x, c))
    _, values = save.lift_constants(module)
    assert len(values) == 1
    save.save_folder(module, manifest("a", "b"), tmp_path / "out")
    assert tvm.ir.structural_equal(load.load_model(tmp_path / "out", shapes={}).module, module)


def test_inputs_may_have_the_names_of_parameters(tmp_path):
    net = Net()
    names = ["p0", "p1", "p0_"]
    y = net.input(names[0], (1, 4))
    for name in names[1:]:
        y = relay.add(relay.add(y, net.input(name, (1, 4))), net.const(1, 4))
    module = net.module(y)
    save.save_folder(module, manifest("y"), tmp_path / "out")
    loaded = load.load_model(tmp_path / "out", shapes={})
    assert [spec.name for spec in loaded.inputs] == names
    assert tvm.ir.structural_equal(loaded.module, module)


def test_a_module_without_constants(tmp_path):
    net = Net()
    module = net.module(relay.nn.relu(net.input("x", (1, 4))))
    save.save_folder(module, manifest("y"), tmp_path / "out")
    assert tvm.ir.structural_equal(load.load_model(tmp_path / "out", shapes={}).module, module)


def test_constants_become_parameters_in_order():
    module = module_of()
    lifted, values = save.lift_constants(module)
    assert "x" == lifted["main"].params[0].name_hint
    assert [str(param.name_hint) for param in lifted["main"].params[1:]] == list(values)
    assert count_operators(lifted) == count_operators(module)
    assert not any(isinstance(node, relay.Constant) for node in _expressions(lifted))


def _expressions(module):
    found = []
    relay.analysis.post_order_visit(module["main"], found.append)
    return found


# --- the folder ----------------------------------------------------------------------------------


def test_a_folder_is_made_and_other_files_stay(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    for folder in ("a/b", "c/d"):
        save.save_folder(module_of(), manifest("y", "z"), tmp_path / folder)
    assert (tmp_path / "a" / "b" / "notes.txt").read_text() == "mine"
    assert sorted(files(tmp_path / "c" / "d")) == NAMES


def test_older_files_are_replaced(tmp_path):
    for seed in (1, 2):
        save.save_folder(module_of(seed), manifest("y", "z"), tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == NAMES
    assert tvm.ir.structural_equal(load.load_model(tmp_path / "out", shapes={}).module, module_of(2))


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "older files"])
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch, is_there, fails_at):
    folder = tmp_path / "out"
    if is_there:
        save.save_folder(module_of(1), manifest("y", "z"), folder)
        (folder / "notes.txt").write_text("mine")
    before = files(folder) if is_there else None
    replace, calls = os.replace, []

    def failing(*paths):
        calls.append(paths)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return replace(*paths)

    monkeypatch.setattr(os, "replace", failing)
    if fails_at > (6 if is_there else 3):
        save.save_folder(module_of(2), manifest("y", "z"), folder)
        return
    with pytest.raises(UsageError, match=r"cannot write to .*out: No space left"):
        save.save_folder(module_of(2), manifest("y", "z"), folder)
    assert (files(folder) if folder.exists() else None) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file/out: Not a directory"):
        save.save_folder(module_of(), manifest("y", "z"), tmp_path / "file" / "out")


# --- what is not in order --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    save.save_folder(module_of(), manifest("y", "z"), tmp_path / "out")
    return tmp_path / "out"


def test_a_folder_without_a_manifest_is_a_module(folder):
    (folder / "manifest.json").unlink()
    assert load.load_model(folder, shapes={}).outputs == ("output0", "output1")


@pytest.mark.parametrize("name", ["model.json", "params.bin"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"no such file: .*{name}"):
        load.load_model(folder, shapes={})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"hello", b"\xff\xfe\x00"], ids=["empty", "text", "no text"])
def test_a_damaged_file_is_named(folder, name, data):
    (folder / name).write_bytes(data)
    with pytest.raises(ModelError, match=name):
        load.load_model(folder, shapes={})


def test_outputs_of_another_model(folder):
    (folder / "manifest.json").write_text(manifest("y"))
    with pytest.raises(ModelError, match="its manifest names 1 outputs; it has 2"):
        load.load_model(folder, shapes={})


def test_options_that_do_not_fit(folder):
    with pytest.raises(UsageError, match="--shape"):
        load.load_model(folder, shapes={"x": (1, 4, 6, 6)})
    with pytest.raises(UsageError, match="--params"):
        load.load_model(folder, shapes={}, params=folder / "params.bin")
