"""The runner in a process of its own: what it found arrives whole, and what fails is raised by kind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tvm_fuse
from tests.support.bundles import expected, save
from tvm_fuse.core.errors import MissingDependency, ModelError, ToolFailed, UsageError
from tvm_fuse.runner.process import _failure, find_device, run_in_process
from tvm_fuse.runner.report import from_json, to_json
from tvm_fuse.runner.run import RunOptions, run_bundle


@pytest.fixture
def installed(fake_driver, monkeypatch):
    """What a new process finds as its CUDA driver; this one keeps what it has loaded."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver.parent))


# --- reports ---------------------------------------------------------------------------------------


def test_a_report_comes_back_from_json_as_it_was(folder, fake_driver):
    options = RunOptions(library=str(fake_driver), repeats=3, warmup=1, kernels=True)
    report = run_bundle(folder, options)
    assert len(report.kernels) == 3
    assert from_json(to_json(report)) == report
    assert from_json(to_json(replace(report, model="another"))) != report


def test_numbers_that_are_not_finite_come_back(tmp_path, fake_driver):
    y = expected()
    y[0, 0] = np.inf
    save(tmp_path, y=y)
    report = run_bundle(tmp_path, RunOptions(library=str(fake_driver), repeats=0))
    assert report.parity.rows[0].max_abs == np.inf
    assert from_json(to_json(report)) == report


@pytest.mark.usefixtures("installed")
def test_a_bundle_on_the_gpu_of_another_process(folder):
    report = run_in_process(folder, device="0", repeats=2)
    assert report.parity.passed
    assert (report.device.name, report.is_emulated) == ("Fake GPU", False)
    assert [len(timing.times_s) for timing in report.timings] == [2, 2]


@pytest.mark.usefixtures("installed")
def test_outputs_that_differ_are_in_the_report(tmp_path):
    save(tmp_path, y=expected() + 1)
    assert [row.passed for row in run_in_process(tmp_path, device="0", repeats=0).parity.rows] == [False]


# --- devices ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_a_device_that_is_there(monkeypatch):
    assert find_device(0).arch == "sm_90"
    with pytest.raises(UsageError, match="there is no device 1; wanted one below 1"):
        find_device(1)
    monkeypatch.setenv("FAKE_CUDA_NO_DEVICE", "1")
    with pytest.raises(MissingDependency, match="sees no NVIDIA GPU") as caught:
        find_device(0)
    assert "--device emulator" in caught.value.hint


def test_our_stub_of_the_driver_is_no_driver(monkeypatch):
    """TVM is loaded with it, and a process may find it where TVM's workers look for it."""
    built = [Path(folder, "native_lib") for folder in tvm_fuse.__path__]
    folders = [str(folder) for folder in built if (folder / "libcuda.so.1").is_file()]
    if not folders:
        pytest.skip("the stub is not built")
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(folders))
    with pytest.raises(MissingDependency, match="the CUDA driver sees no NVIDIA GPU"):
        find_device(0)


# --- failures --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_a_kernel_that_fails_is_named(folder, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuLaunchKernel@scale:701")
    with pytest.raises(ToolFailed, match=r"^cuLaunchKernel \(scale\) failed"):
        run_in_process(folder, device="0", repeats=0)


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "message", "hint"),
    [
        (2, "error: no\nhint: do", UsageError, "no", "do"),
        (3, "note\nerror: a, then\nb\nhint: do\nmore\n", ModelError, "a, then\nb", "do\nmore"),
        (4, "error: gone: error: twice", MissingDependency, "gone: error: twice", ""),
        (5, "error: no", ToolFailed, "no", ""),
        (2, "usage: x\nx: error: no such option", ToolFailed,
         "m ended with code 2\nusage: x\nx: error: no such option", ""),
        (1, "Traceback\nKeyError: 1", ToolFailed, "m ended with code 1\nTraceback\nKeyError: 1", ""),
        (-11, "", ToolFailed, "m died of signal 11", ""),
    ],
    ids=["usage", "model", "dependency", "tool", "argparse", "traceback", "signal"],
)  # fmt: skip
def test_what_a_process_says_becomes_an_error(code, stderr, kind, message, hint):
    error = _failure("m", code, stderr)
    assert (type(error), error.message, error.hint) == (kind, message, hint)
