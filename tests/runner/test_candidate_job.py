"""``run.py`` of a package, on the emulator: numbers are checked, and what crashes or hangs ends nothing else.

Times mean nothing there. The package runs from its own folder, where TVM and this repository are blocked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.support.candidates import make_package, make_task
from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.candidate_files import package_digest
from tvm_fuse.cuda.candidate_results import FAILED, NOT_REACHED, TIMED, WRONG, read_results
from tvm_fuse.runner import candidate_job
from tvm_fuse.runner.candidate_job import JobOptions, render_results, run_job


def run(tmp_path, *tasks, **options):
    folder = tmp_path / "package"
    package = make_package(folder, *tasks)
    options = {"output": tmp_path / "results.json", "device": "emulator", "repeats": 2, **options}
    lines = []
    _, results = run_job(folder, JobOptions(**options), lines.append)
    assert read_results(options["output"]) == results
    assert results.package == package_digest(folder)
    return package, results, lines


def outcomes(results):
    return {one.id: one.outcome for one in results.results}


def test_mutants_are_found_and_end_nothing_else(tmp_path):
    tasks = make_task(0, ["right", "wrong", "missing", "crashing", "right"]), make_task(1, ["right"])
    package, results, lines = run(tmp_path, *tasks)
    assert outcomes(results) == {
        "t00b": TIMED, "t00c0": TIMED, "t00c1": WRONG, "t00c2": WRONG, "t00c3": FAILED, "t00c4": TIMED,
        "t01b": TIMED, "t01c0": TIMED,
    }  # fmt: skip
    known = results.by_id
    assert known["t00c1"].error == "8 of 8 results differ, by up to 2"
    assert known["t00c2"].error == "3 of 8 results are no finite numbers"
    assert known["t00b"].baseline_s == ()
    for name in ("t00c0", "t00c4", "t01c0"):  # the last ones after the crash
        assert (len(known[name].times_s), len(known[name].baseline_s)) == (2, 2)
        assert known[name].needed <= 1
    assert (results.is_emulated, results.card) == (True, "tvm-fuse CPU emulator")
    assert [line.split(":")[0] for line in lines] == [str(number) for number in range(1, 9)]
    text = render_results(package, results)
    assert "8 kernels in" in text
    assert "5 timed, 2 wrong answer, 1 failed" in text
    assert "times mean nothing" in text


@pytest.mark.slow
def test_a_candidate_that_hangs_is_given_up(tmp_path):
    start = time.monotonic()
    _, results, _ = run(tmp_path, make_task(0, ["hanging", "right"]), silence_s=6.0)
    assert outcomes(results) == {"t00b": TIMED, "t00c0": FAILED, "t00c1": TIMED}
    assert results.by_id["t00c0"].error == "no result within 6 s"
    assert time.monotonic() - start < 40


def test_the_time_is_bounded_and_what_was_not_reached_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(candidate_job, "_GRACE_S", 1.0)
    start = time.monotonic()
    _, results, _ = run(tmp_path, make_task(0, ["hanging", "right"]), budget_s=5.0, silence_s=60.0)
    assert time.monotonic() - start < 20
    found = outcomes(results)
    assert found["t00b"] == TIMED
    assert [found["t00c0"], found["t00c1"]] == [NOT_REACHED, NOT_REACHED]


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    folder, file = tmp_path / "package", tmp_path / "results.json"
    make_package(folder, make_task(0, ["right", "right"]))

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(folder, JobOptions(file, device="emulator", repeats=1), interrupt)
    assert outcomes(read_results(file)) == {"t00b": TIMED, "t00c0": NOT_REACHED, "t00c1": NOT_REACHED}


@pytest.mark.slow
def test_a_baseline_that_is_wrong_is_compared_with_nothing(tmp_path):
    task = make_task(0, ["wrong", "right"])
    task = replace(task, baseline=replace(task.candidates[0], id="t00b"), candidates=task.candidates[1:])
    _, results, _ = run(tmp_path, task)
    assert outcomes(results) == {"t00b": WRONG, "t00c1": TIMED}
    assert results.by_id["t00c1"].baseline_s == ()


def test_a_device_of_another_architecture_is_refused(tmp_path, monkeypatch):
    """The emulator says it is sm_80: as a GPU it is none for candidates of sm_90."""
    folder = tmp_path / "package"
    make_package(folder, make_task(0, ["right"]), arch="sm_90")
    monkeypatch.setattr(candidate_job, "EMULATOR", "another word")
    with pytest.raises(UsageError, match=r"are for sm_90, the device is tvm-fuse CPU emulator \(sm_80\)"):
        run_job(folder, JobOptions(tmp_path / "results.json", device="emulator", repeats=1))


@pytest.fixture
def alone(tmp_path):
    """Run a package's ``run.py`` where only NumPy can be imported."""
    block = tmp_path / "block"
    block.mkdir()
    (block / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('tvm', 'bitblas', 'onnx', 'tvm_fuse_schedules', 'xgboost'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )

    def call(*options):
        command = [sys.executable, str(tmp_path / "package" / "run.py"), *options]
        environment = {**os.environ, "PYTHONPATH": str(block)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return call


def test_it_runs_without_tvm_and_without_this_repository(tmp_path, alone):
    make_package(tmp_path / "package", make_task(0, ["right", "wrong"]))
    done = alone("--device", "emulator", "--json", "results.json")
    assert done.returncode == 0, done.stderr
    assert "wrote results.json" in done.stdout
    assert outcomes(read_results(tmp_path / "results.json"))["t00c1"] == WRONG
    done = alone("--library", "/nowhere/libcuda.so.1")
    assert done.returncode == 4
    assert "the CUDA driver cannot be loaded" in done.stderr
    (tmp_path / "package" / "kernels" / "t00b.cubin").write_bytes(b"")
    done = alone()
    assert done.returncode == 3
    assert "not those that were exported" in done.stderr


@pytest.mark.slow
def test_nothing_that_works(tmp_path, alone):
    task = make_task(0, ["wrong"])
    make_package(tmp_path / "package", replace(task, baseline=replace(task.candidates[0], id="t00b")))
    assert alone("--device", "emulator").returncode == 5
