"""Packages of candidates on disk: whole, checked, and with all that they need to run elsewhere."""

from __future__ import annotations

import ast
import json

import numpy as np
import pytest

from tests.support.candidates import make_package, make_task
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.cuda import candidate_files
from tvm_fuse.cuda.candidate_files import (
    check_place,
    load_package,
    load_reference,
    package_digest,
    read_source,
    save_package,
)
from tvm_fuse.cuda.candidate_results import (
    FAILED,
    TIMED,
    CandidateResult,
    Results,
    read_results,
    save_results,
)
from tvm_fuse.cuda.candidates import SAMPLES, Value, choose_positions, draw_operands, scaled_tolerance
from tvm_fuse.cuda.carried import carried_sources


@pytest.fixture
def package(tmp_path):
    return tmp_path / "package", make_package(tmp_path / "package", make_task(0, ["right", "wrong"]))


def test_a_package_comes_back(package):
    folder, written = package
    assert load_package(folder) == written
    task, candidate = written.find("t00c1")
    assert (task.digest, candidate.id) == ("000000000000", "t00c1")
    (reference,) = load_reference(folder, task.digest, task.outputs)
    assert reference.shape == (8,)
    assert "add_wrong" in read_source(folder, "t00c1")
    assert {record.name.split("/")[0] for record in written.files} == {
        "reference.npz", "sources.zip", "run.py", "kernels", "lib",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        pytest.param("kernels/t00b.cubin", None, "is missing", id="a missing file"),
        pytest.param(
            "kernels/t00b.cubin", lambda data: b"other", "not those that were exported", id="changed"
        ),
        pytest.param("run.py", lambda data: data + b"#", "not those that were exported", id="run.py edited"),
        pytest.param("candidates.json", lambda data: b"{", "no package of candidates", id="torn"),
        pytest.param("candidates.json", lambda data: b"[]", "schema None", id="another document"),
        pytest.param(
            "candidates.json",
            lambda data: data.replace(b'"weight": 2', b'"weight": "2"'),
            "weight",
            id="a type",
        ),
    ],
)
def test_damage_is_named(package, file, change, message):
    path = package[0] / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        load_package(package[0])


def test_a_package_is_replaced_whole(package):
    folder, _ = package
    before = package_digest(folder)
    make_package(folder, make_task(1, ["right"]))
    assert package_digest(folder) != before
    assert [task.seed for task in load_package(folder).tasks] == [1]
    assert not (folder / "kernels" / "t00b.cubin").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["package"]


@pytest.mark.parametrize("name", ["", "file"])
def test_what_is_no_package_is_not_touched(tmp_path, package, name):
    _, written = package
    place = tmp_path / "mine"
    place.mkdir()
    (place / "file").write_text("precious")
    with pytest.raises(UsageError, match="wanted a new folder or a package"):
        save_package(place / name, written, {}, {}, {})
    assert (place / "file").read_text() == "precious"


def test_an_empty_folder_will_do_and_a_missing_one_above_will_not(tmp_path):
    (tmp_path / "empty").mkdir()
    check_place(tmp_path / "empty")
    with pytest.raises(UsageError, match="is not there"):
        check_place(tmp_path / "no" / "where")


def test_a_failure_leaves_the_old_package(package, monkeypatch):
    folder, written = package

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(candidate_files.Path, "write_bytes", lambda self, data: fail(self, data))
    with pytest.raises(UsageError, match="No space left"):
        make_package(folder, make_task(1, ["right"]))
    monkeypatch.undo()
    assert load_package(folder) == written


def test_operands_are_the_same_with_every_numpy():
    """RandomState's stream is frozen: were these numbers to change, packages would lose their reference."""
    (floats, bits) = draw_operands([Value((2,), "float32"), Value((4,), "int8")], 7)
    assert floats.tolist() == [np.float32(1.690525703800356), np.float32(-0.4659373705408328)]
    assert (bits.dtype, bits.tolist()) == (np.int8, [0, 1, 0, 1])


def test_positions():
    assert choose_positions(SAMPLES, 0).tolist() == list(range(SAMPLES))
    chosen = choose_positions(10**6, 3)
    assert (chosen.size, chosen[0], chosen[-1]) == (SAMPLES, 0, 10**6 - 1)
    assert (np.diff(chosen) >= 0).all()
    assert not np.array_equal(chosen, choose_positions(10**6, 4))


def test_tolerances_scale_with_the_values():
    small, large = (scaled_tolerance(np.array([1, size], np.float32)) for size in (0.5, 200))
    assert large.atol == pytest.approx(200 * small.atol)
    assert scaled_tolerance(np.array([1, 200], np.int32)).atol == 0.0


def test_what_is_carried_is_complete():
    """Every import of ours in a carried file is of a carried file; its data is there as well."""
    carried = carried_sources("tvm_fuse.runner.candidate_job")
    assert "tvm_fuse/runner/driver.py" in carried
    assert "tvm_fuse/cuda/emulator/driver.cpp" in carried
    assert not any(name.startswith(("tvm_fuse/relay", "tvm_fuse/onnx", "tvm_fuse/cli")) for name in carried)
    for name, data in carried.items():
        tree = ast.parse(data) if name.endswith(".py") else ast.parse("")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "tvm_fuse":
                place = node.module.replace(".", "/")
                assert f"{place}.py" in carried or f"{place}/__init__.py" in carried, (name, node.module)


# --- results -----------------------------------------------------------------------------------------

RESULTS = Results(
    package="0" * 64,
    card="A100",
    arch="sm_80",
    driver="13.0",
    is_emulated=False,
    date="2026-01-02",
    seconds=3.0,
    results=(
        CandidateResult("a", TIMED, (2e-6, 1e-6, 4e-6), (2e-6, 2e-6, 2e-6), 1e-7, 0.1),
        CandidateResult("b", FAILED, error="it crashed"),
    ),
)


def test_results_come_back(tmp_path):
    save_results(tmp_path / "results.json", RESULTS)
    assert read_results(tmp_path / "results.json") == RESULTS
    assert RESULTS.by_id["a"].cost_s == 2e-6
    assert RESULTS.by_id["a"].ratio == 1.0
    assert (RESULTS.by_id["b"].cost_s, RESULTS.by_id["b"].ratio) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.update(schema=1), "schema 1", id="schema"),
        pytest.param(lambda d: d.pop("arch"), "no field 'arch'", id="a field"),
        pytest.param(lambda d: d["results"][1].update(outcome="so so"), "'so so'", id="outcome"),
        pytest.param(lambda d: d["results"][0].update(times_s=[]), "not all above 0", id="no times"),
        pytest.param(lambda d: d["results"][0].update(baseline_s=[0.0]), "not all above 0", id="zero"),
        pytest.param(lambda d: d["results"][0].update(baseline_s=[1.0]), "its rounds", id="rounds"),
    ],
)
def test_damaged_results_are_refused(tmp_path, change, message):
    file = tmp_path / "results.json"
    save_results(file, RESULTS)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        read_results(file)
    with pytest.raises(UsageError, match="no such file"):
        read_results(tmp_path / "none.json")
