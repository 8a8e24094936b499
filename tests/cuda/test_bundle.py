"""Bundles: what is written comes back; what is damaged is refused, by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from tests.support import bundles
from tests.support.bundles import KERNELS, SHAPE, W, X, bundle, save, seeded, tensor
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.cuda.bundle import Call, Draw, Image, Operand, Operator, Output, Port, Tensor, Workspace
from tvm_fuse.cuda.bundle_files import (
    draw_parameters,
    load_bundle,
    load_golden,
    load_parameters,
    measure_draw,
    save_bundle,
)
from tvm_fuse.cuda.bundle_json import SCHEMA, from_json, to_json
from tvm_fuse.cuda.launch import Launch, Parameter
from tvm_fuse.cuda.plain import make

FILES = ["bundle.json", "golden.npz", *sorted(bundles.KERNEL_FILES), "params.npz"]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- there and back ------------------------------------------------------------------------------


def test_what_is_saved_loads_back(tmp_path):
    written = save(tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == FILES
    loaded = load_bundle(tmp_path / "out")
    assert loaded == written == bundle(files=written.files)
    assert {record.name for record in loaded.files} == set(FILES) - {"bundle.json"}
    assert np.array_equal(load_parameters(tmp_path / "out", loaded)["w"], W)
    inputs, outputs = load_golden(tmp_path / "out", loaded)
    assert np.array_equal(inputs["x"], X)
    assert np.array_equal(outputs["y"], bundles.expected())


def test_the_text_is_stable_and_says_what_it_is():
    text = to_json(bundle())
    assert text == to_json(bundle())
    assert json.loads(text)["schema"] == SCHEMA == {"name": "tvm-fuse/cuda-bundle", "version": 1}


def test_numbers_of_the_whole():
    made = bundle()
    assert (made.launch_count, made.arena_bytes, made.is_seeded) == (3, 280, False)
    assert bundle(workspaces=(), operators=()).arena_bytes == 0


@pytest.mark.parametrize("dtype", ["bool", "float16", "float64", "int8", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_of_every_dtype_and_rank(tmp_path, dtype, shape):
    array = np.ones(shape, dtype)
    made = bundle(
        tensors=(Tensor(shape, dtype, 0),) * 2,
        storages=(array.nbytes,),
        operators=(),
        outputs=(Output("y", 1, Tolerance(0.0, 0.0, "")),),
    )
    save_bundle(tmp_path, made, bundles.KERNEL_FILES, {"w": array}, ({"x": array}, {"y": array}))
    loaded = load_bundle(tmp_path)
    for got in (load_parameters(tmp_path, loaded)["w"], load_golden(tmp_path, loaded)[1]["y"]):
        assert (str(got.dtype), got.shape) == (dtype, shape)


def test_names_may_be_anything(tmp_path):
    made = bundle(inputs=(Port("file", 0),), parameters=(Port("a/b:0", 1),))
    save_bundle(tmp_path, made, bundles.KERNEL_FILES, {"a/b:0": W}, ({"file": X}, {"y": X}))
    loaded = load_bundle(tmp_path)
    assert load_parameters(tmp_path, loaded).keys() == {"a/b:0"}
    assert load_golden(tmp_path, loaded)[0].keys() == {"file"}


# --- the folder ----------------------------------------------------------------------------------


def test_a_bundle_replaces_an_older_one_and_leaves_other_files(tmp_path):
    save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    made = seeded(images=bundle().images[2:])
    save_bundle(tmp_path, made, {**_kernels("sm_90")}, {}, ({"x": X}, {"y": X}))
    names = {"bundle.json", "golden.npz", "kernels.cu", "kernels.sm_90.cubin", "notes.txt"}
    assert files(tmp_path).keys() == names
    assert load_bundle(tmp_path).is_seeded


def _kernels(arch):
    return {name: data for name, data in bundles.KERNEL_FILES.items() if arch in name or name == "kernels.cu"}


@pytest.mark.parametrize("fails_at", [1, 3, 7])
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch, fails_at):
    save(tmp_path)
    before = files(tmp_path)
    replace_file, calls = os.replace, []

    def failing(*paths):
        calls.append(paths)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return replace_file(*paths)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UsageError, match="No space left"):
        save(tmp_path, w=W + 1)
    assert files(tmp_path) == before


def test_a_folder_without_a_bundle(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"no bundle\.json in it"):
            load_bundle(folder)


@pytest.mark.parametrize("name", FILES[1:])
def test_every_file_is_needed_whole(tmp_path, name):
    save(tmp_path)
    data = (tmp_path / name).read_bytes()
    for wrong, message in ((data + b" ", "wanted .* bytes, got"), (data[:-1] + b"?", "SHA-256 differs")):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(ModelError, match=f"{name}: .*{message}"):
            load_bundle(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=f"{name}: the file is missing"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("name", ["golden.npz", "kernels.cu", "params.npz"])
def test_a_bundle_that_does_not_list_a_file(tmp_path, name):
    written = save(tmp_path)
    rest = tuple(record for record in written.files if record.name != name)
    (tmp_path / "bundle.json").write_text(to_json(replace(written, files=rest)))
    with pytest.raises(ModelError, match=f"{name} is not among its files"):
        load_bundle(tmp_path)


def test_arrays_that_do_not_fit(tmp_path):
    with_other = bundle()
    save_bundle(
        tmp_path, with_other, bundles.KERNEL_FILES, {"w": W[:1]}, ({"x": X.astype("float64")}, {"y": X})
    )
    loaded = load_bundle(tmp_path)
    with pytest.raises(ModelError, match=r"'w': wanted float32\[2, 3\], got float32\[1, 3\]"):
        load_parameters(tmp_path, loaded)
    with pytest.raises(ModelError, match=r"'x': wanted float32\[2, 3\], got float64\[2, 3\]"):
        load_golden(tmp_path, loaded)
    (tmp_path / "params.npz").write_bytes(b"PK no zip")
    with pytest.raises(ModelError, match=r"params.npz: cannot be read"):
        load_parameters(tmp_path, loaded)


# --- drawn parameters ------------------------------------------------------------------------------


def test_drawn_parameters_are_the_same_each_time_and_like_the_real_ones(tmp_path):
    save(tmp_path, seeded())
    assert "params.npz" not in files(tmp_path)
    loaded = load_bundle(tmp_path)
    first, second = (load_parameters(tmp_path, loaded)["w"] for _ in range(2))
    assert np.array_equal(first, second)
    assert (first.dtype, first.shape) == (W.dtype, W.shape)
    assert W.min() <= first.min() < first.max() <= W.max()


def test_the_stream_is_frozen():
    """These numbers were drawn with NumPy 1.26; any other version must draw them as well."""
    specs = [Tensor((3,), "float32", 0), Tensor((4,), "int64", 0), Tensor((2,), "float16", 0)]
    draws = [Draw(-1.0, 1.0, 0.0, 0.5), Draw(-5.0, 5.0, 0.0, 3.0), Draw(2.0, 2.0, 2.0, 0.0)]
    floats, integers, halves = draw_parameters(specs, draws, 1)
    assert floats.tolist() == STREAM[0]
    assert integers.tolist() == STREAM[1]
    assert halves.tolist() == [2.0, 2.0]


STREAM = [[0.8121727108955383, -0.3058781921863556, -0.26408588886260986], [1, 4, -3, -1]]


def test_other_seeds_draw_others():
    drawn = [next(draw_parameters([Tensor(SHAPE, "float32", 0)], [measure_draw(W)], seed)) for seed in (0, 1)]
    assert not np.array_equal(*drawn)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64"])
def test_integers_stay_in_their_range(dtype):
    array = np.array([0, 1, 1], dtype)
    (drawn,) = draw_parameters([Tensor((1000,), dtype, 0)], [measure_draw(array)], 0)
    assert drawn.dtype == array.dtype
    assert set(drawn.tolist()) == {0, 1}


def test_what_cannot_be_drawn():
    assert measure_draw(np.zeros((0, 3), np.float32)) == Draw(0.0, 0.0, 0.0, 0.0)
    for number in (np.inf, np.nan):
        with pytest.raises(ValueError, match="infinite, or no number"):
            measure_draw(np.array([1.0, number]))


# --- descriptions that are damaged -------------------------------------------------------------------


def changed(path, value):
    """The description with one entry changed; ``path`` is a list of keys."""
    document = json.loads(to_json(bundle(files=())))
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a bundle of tvm-fuse"),
        ("[1]", "not a bundle of tvm-fuse"),
        ("{}", "not a bundle of tvm-fuse: KeyError"),
        (b"\xff\xfe\x00", "not a bundle of tvm-fuse"),
        (changed(["schema", "version"], 2), "the bundle is .*'version': 2.*wanted .*'version': 1"),
        (changed(["model"], 3), "model: wanted str, got 3"),
        (changed(["seed"], None), "no field 'seed'"),
        (changed(["colour"], "red"), "unknown field 'colour'"),
        (changed(["kernels", 0, "grid"], [1, 2]), r"kernels\[0\].grid: wanted 3 entries, got \[1, 2\]"),
        (changed(["kernels", 0, "grid", 1], 1.5), r"kernels\[0\].grid\[1\]: wanted int, got 1.5"),
        (changed(["kernels", 0], 5), r"kernels\[0\]: wanted a Launch, got 5"),
        (changed(["kernels"], {}), "kernels: wanted a list"),
        (changed(["seed"], True), "seed: wanted int, got True"),
        (changed(["provenance", "versions"], []), "provenance.versions: wanted names with values"),
        (changed(["provenance", "versions", "tvm"], 1), r"provenance.versions\['tvm'\]: wanted str, got 1"),
        (
            changed(["operators", 0, "calls", 0, "operands", 0, "value"], "1"),
            r"operators\[0\].calls\[0\].operands\[0\].value: wanted int or float, got '1'",
        ),
    ],
)
def test_damaged_text(text, message):
    with pytest.raises(ModelError, match=rf"(?s)^here: .*{message}"):
        from_json(text, "here")


def call(*operands, symbol="add_one"):
    return (Operator("op", (Call(symbol, operands),)),)


FAULTS = [
    ({"kernels": (replace(KERNELS[0], grid=(0, 1, 1)), KERNELS[1])}, "add_one cannot be launched as"),
    ({"kernels": (replace(KERNELS[0], block=(32, 32, 2)), KERNELS[1])}, "add_one cannot be launched as"),
    ({"kernels": (replace(KERNELS[0], smem_dynamic_bytes=-1), KERNELS[1])}, "-1 bytes of shared memory"),
    ({"kernels": (*KERNELS, KERNELS[0])}, "two kernels have one symbol"),
    ({"kernels": (KERNELS[1],)}, "add launches 'add_one', which is no kernel of it"),
    (
        {"kernels": (Launch("k", (1, 1, 1), (1, 1, 1), 0, (Parameter("a", "handle"),)), *KERNELS)},
        "k takes 'a' of the unknown dtype 'handle'",
    ),
    ({"storages": (24, 24, 24, -1)}, "a storage has less than no bytes"),
    ({"storages": (24, 24, 24)}, "tensor 3 lies in storage 3 of 3"),
    ({"storages": (24, 24, 24, 23)}, "tensor 3 has 24 bytes, its storage 23"),
    ({"tensors": (Tensor(SHAPE, "bfloat16", 0), *bundle().tensors[1:])}, r"tensor 0 is bfloat16\[2, 3\]"),
    ({"tensors": (Tensor((-2, 3), "float32", 0), *bundle().tensors[1:])}, r"tensor 0 is float32\[-2, 3\]"),
    ({"workspaces": (Workspace(-1, 24),)}, "workspace 0 is"),
    ({"inputs": (Port("x", 0), Port("x", 0))}, "two inputs or parameters are called 'x'"),
    ({"inputs": (Port("w", 0),)}, "two inputs or parameters are called 'w'"),
    ({"inputs": (Port("x", 4),)}, "'x' is tensor 4 of 4"),
    ({"parameters": (Port("w", -1),)}, "'w' is tensor -1 of 4"),
    ({"outputs": ()}, "it has no output"),
    ({"outputs": bundle().outputs * 2}, "two outputs are called 'y'"),
    ({"images": ()}, "it has no machine code"),
    ({"images": (Image("sm_90", "fatbin", "a"),)}, "unknown machine code 'fatbin' for 'sm_90'"),
    ({"images": (Image("gfx90", "cubin", "a"),)}, "unknown machine code 'cubin' for 'gfx90'"),
    ({"draws": (Draw(0.0, 1.0, 0.5, 0.1),) * 2}, "it draws 2 of 1 parameters"),
    ({"operators": call(tensor(2))}, "op passes 1 of 2 parameters to add_one"),
    ({"operators": call(tensor(2), tensor(4))}, "op passes tensor 4 of 4 for 'in' to add_one"),
    ({"operators": call(tensor(2), tensor(1.5))}, "op passes tensor 1.5 of 4 for 'in' to add_one"),
    ({"operators": call(tensor(2), Operand("workspace", 1))}, "op passes workspace 1 of 1"),
    ({"operators": call(tensor(2), Operand("immediate", 1))}, "op passes the immediate 1 for 'in'"),
    ({"operators": call(tensor(2), Operand("file", 1))}, "op passes the unknown kind 'file'"),
    (
        {"operators": call(*map(tensor, (3, 2, 1, 0)), symbol="scale")},
        "op passes the tensor 0 for 'factor' to scale",
    ),
    (
        {"tensors": (Tensor(SHAPE, "float16", 0), *bundle().tensors[1:])},
        "passes tensor 0 of float16, wanted float32, for 'in' to add_one",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_description_that_contradicts_itself(changes, message):
    with pytest.raises(ModelError, match=f"the bundle is damaged: .*{message}"):
        from_json(to_json(bundle(files=_listed(), **changes)), "here")


def _listed():
    from tvm_fuse.cuda.bundle import FileRecord

    return tuple(FileRecord(name, 0, "") for name in FILES[1:])


def test_the_same_without_a_fault():
    assert from_json(to_json(bundle(files=_listed())), "here") == bundle(files=_listed())


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "", "..", "a\\b"])
def test_files_stay_in_the_folder(name):
    from tvm_fuse.cuda.bundle import FileRecord

    with pytest.raises(ModelError, match="has a folder in it"):
        from_json(to_json(bundle(files=(*_listed(), FileRecord(name, 0, "")))), "here")


def test_an_image_must_be_listed():
    listed = tuple(record for record in _listed() if record.name != "kernels.sm_90.cubin")
    with pytest.raises(ModelError, match=r"kernels\.sm_90\.cubin is not among its files"):
        from_json(to_json(bundle(files=listed)), "here")


def test_a_bundle_that_would_not_load_is_not_written(tmp_path):
    with pytest.raises(ModelError, match="it has no output"):
        save(tmp_path / "out", bundle(outputs=()))
    assert not (tmp_path / "out").exists()


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match=r"^here: wanted int, got 'a{59}\.\.\.$"):
        make(int, "a" * 500, "here")
