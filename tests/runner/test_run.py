"""The runner on a stand-in for the driver, which computes with C functions on host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import W, X, bundle, expected, save, seeded
from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.cuda.bundle import Call, Image, Operand, Operator, Output
from tvm_fuse.cuda.bundle_files import load_bundle, load_parameters
from tvm_fuse.runner.driver import CudaError, Device
from tvm_fuse.runner.network import Network, choose_image
from tvm_fuse.runner.report import render, to_json
from tvm_fuse.runner.run import RunOptions, run_bundle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def options(fake_driver):
    return RunOptions(library=str(fake_driver), repeats=3, warmup=1)


# --- what it computes and measures -----------------------------------------------------------------


def test_a_bundle_that_is_right(folder, options):
    report = run_bundle(folder, options)
    assert report.parity.passed
    assert [row.max_abs for row in report.parity.rows] == [0.0]
    assert report.parity.rows[0].tolerance.why == "by hand"
    assert (report.device.name, report.device.arch, report.device.sms) == ("Fake GPU", "sm_90", 7)
    assert (report.device.driver, report.image) == ("12.9", "kernels.sm_90.cubin")
    assert (report.launches, report.memory_bytes) == (3, 4 * 24 + 280)
    assert [timing.is_graph for timing in report.timings] == [False, True]
    assert all(len(timing.times_s) == 3 and min(timing.times_s) > 0 for timing in report.timings)
    assert report.kernels == ()
    assert report.notes == ()


def test_every_launch_by_itself(folder, options):
    report = run_bundle(folder, replace(options, kernels=True))
    names = [(kernel.operator, kernel.symbol) for kernel in report.kernels]
    assert names == [("add", "add_one"), ("multiply", "add_one"), ("multiply", "scale")]
    assert all(kernel.timing.is_graph for kernel in report.kernels)


def test_without_measuring(folder, options):
    report = run_bundle(folder, replace(options, repeats=0, kernels=True))
    assert (report.timings, report.kernels) == ((), ())


def test_an_output_that_is_wrong(tmp_path, options):
    y = expected()
    y[1, 2] += 1e-4
    save(tmp_path, y=y)
    report = run_bundle(tmp_path, options)
    assert not report.parity.passed
    assert (report.parity.rows[0].failing, report.parity.rows[0].worst_index) == (1, (1, 2))
    assert report.timings == ()
    assert "nothing was measured: the outputs are wrong" in report.notes


def test_the_tolerance_is_the_outputs_own(tmp_path, options):
    save(tmp_path, bundle(outputs=(Output("y", 3, Tolerance(1e-3, 0.0, "wide")),)), y=expected() + 1e-4)
    assert run_bundle(tmp_path, options).parity.passed


def test_what_no_kernel_writes_is_no_number(tmp_path, options):
    operators = bundle().operators[:1]
    save(tmp_path, bundle(operators=operators))
    row = run_bundle(tmp_path, options).parity.rows[0]
    assert (row.failing, row.needed) == (6, np.inf)


def test_a_seeded_bundle(tmp_path, options):
    save(tmp_path, seeded())
    w = load_parameters(tmp_path, load_bundle(tmp_path))["w"]
    assert not np.array_equal(w, W)
    save(tmp_path, seeded(), y=expected(w=w))
    report = run_bundle(tmp_path, options)
    assert report.parity.passed
    assert report.is_seeded
    assert "the parameters are drawn from a seed: the outputs mean nothing" in report.notes


def test_inputs_that_do_not_fit(folder, fake_driver):
    network = Network(Device(library=str(fake_driver)), load_bundle(folder), folder)
    with pytest.raises(UsageError, match="there is no input 'z'; wanted one of w, x"):
        network.set({"z": X})
    for array in (X[:1], X.astype("float64")):
        with pytest.raises(UsageError, match=r"'x': wanted float32\[2, 3\], got"):
            network.set({"x": array})
    network.close()
    network.close()


# --- graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"]
)
def test_a_driver_that_cannot_capture(folder, options, monkeypatch, function):
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{function}:801")
    report = run_bundle(folder, replace(options, kernels=True))
    assert report.parity.passed
    assert [timing.is_graph for timing in report.timings] == [False]
    assert not any(kernel.timing.is_graph for kernel in report.kernels)
    (note,) = report.notes
    assert note == f"not measured as a CUDA graph: {function} failed: CUDA_ERROR"


def test_a_driver_without_graphs(folder, options, monkeypatch):
    """An old driver lacks the functions."""
    monkeypatch.setattr(Device, "_status", _without_graphs(Device._status))
    report = run_bundle(folder, options)
    assert [timing.is_graph for timing in report.timings] == [False]


def _without_graphs(status):
    return lambda self, name, *rest: 801 if "Capture" in name else status(self, name, *rest)


def test_a_launch_that_fails_in_a_capture_leaves_the_stream_usable(folder, fake_driver):
    device = Device(library=str(fake_driver))

    def fail():
        raise RuntimeError("in the capture")

    with pytest.raises(RuntimeError, match="in the capture"), device.captured(fail):
        pass
    network = Network(device, load_bundle(folder), folder)
    network.run_checked()  # the stand-in would record these, were it still capturing
    network.close()


# --- what fails, by name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ("cuMemAlloc_v2:2", CudaError, "out of memory: 24 more bytes were wanted"),
        ("cuMemAlloc_v2:1", CudaError, "cuMemAlloc_v2 failed: CUDA_ERROR"),
        ("cuLaunchKernel@scale:701", CudaError, r"cuLaunchKernel \(scale\) failed: CUDA_ERROR"),
        (
            "cuCtxSynchronize@scale:719",
            CudaError,
            r"cuCtxSynchronize \(scale\) failed: CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure",
        ),
        ("cuFuncSetAttribute@scale:1", CudaError, r"cuFuncSetAttribute \(scale\) failed"),
        ("cuModuleLoad:209", CudaError, "cuModuleLoad failed"),
        ("cuInit:100", MissingDependency, "the CUDA driver sees no NVIDIA GPU"),
        ("cuInit:999", MissingDependency, "the CUDA driver does not start: CUDA_ERROR"),
    ],
)
def test_failures(folder, options, monkeypatch, rule, error, message):
    monkeypatch.setenv("FAKE_CUDA_FAIL", rule)
    with pytest.raises(error, match=message):
        run_bundle(folder, options)
    assert issubclass(CudaError, ToolFailed)


def test_no_device(folder, options, monkeypatch):
    with pytest.raises(UsageError, match="there is no device 1; wanted one below 1"):
        run_bundle(folder, replace(options, device="1"))
    monkeypatch.setenv("FAKE_CUDA_NO_DEVICE", "1")
    with pytest.raises(MissingDependency, match="sees no NVIDIA GPU") as caught:
        run_bundle(folder, options)
    assert "--device emulator" in caught.value.hint


def test_no_driver(folder, options):
    with pytest.raises(MissingDependency, match="the CUDA driver cannot be loaded") as caught:
        run_bundle(folder, replace(options, library="libcuda-that-is-not-there.so"))
    assert "NVIDIA driver" in caught.value.hint


def test_a_kernel_that_the_machine_code_lacks(tmp_path, options):
    kernels = (replace(bundle().kernels[0], symbol="other"),)
    save(tmp_path, bundle(kernels=kernels, operators=()))
    with pytest.raises(CudaError, match=r"cuModuleGetFunction \(other\) failed"):
        run_bundle(tmp_path, options)


# --- machine code for a device ---------------------------------------------------------------------


IMAGES = (
    Image("sm_80", "cubin", "80"),
    Image("sm_75", "ptx", "ptx"),
    Image("sm_90", "cubin", "90"),
    Image("sm_90a", "cubin", "90a"),
)


@pytest.mark.parametrize(
    ("arch", "file"),
    [
        ("sm_80", "80"),
        ("sm_86", "80"),
        ("sm_89", "80"),
        ("sm_90", "90a"),
        ("sm_75", "ptx"),
        ("sm_120", "ptx"),
    ],
)
def test_the_best_image(arch, file):
    assert choose_image(bundle(images=IMAGES), arch).file == file


def test_no_image():
    with pytest.raises(UsageError, match="no machine code for sm_70; it has cubin for sm_80, ptx") as caught:
        choose_image(bundle(images=IMAGES), "sm_70")
    assert "--arch sm_70" in caught.value.hint


@pytest.mark.parametrize(
    ("arch", "image", "note"),
    [
        ("86", "kernels.sm_80.cubin", "the cubin is for sm_80, the device is sm_86"),
        ("120", "kernels.sm_80.ptx", "no cubin fits sm_120: the driver compiled PTX for sm_80"),
    ],
)
def test_a_device_that_the_bundle_was_not_made_for(folder, options, monkeypatch, arch, image, note):
    monkeypatch.setenv("FAKE_CUDA_ARCH", arch)
    report = run_bundle(folder, options)
    assert (report.image, report.notes) == (image, (note,))


# --- numbers among the arguments -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint8", "bool"])
def test_numbers_of_every_dtype(folder, fake_driver, dtype):
    """The C value has the bits of NumPy's."""
    kernels = bundle().kernels
    parameter = replace(kernels[1].parameters[3], dtype=dtype)
    scale = replace(kernels[1], parameters=(*kernels[1].parameters[:3], parameter))
    operands = (*(Operand("tensor", 0),) * 3, Operand("immediate", 1))
    made = bundle(kernels=(scale,), operators=(Operator("op", (Call("scale", operands),)),))
    network = Network(Device(library=str(fake_driver)), made, folder)
    value = network.steps[0].launch._values[3]
    assert bytes(value) == np.ones((), dtype).tobytes()
    network.close()


# --- report and command ------------------------------------------------------------------------------


def test_the_report_as_text_and_json(folder, options):
    report = run_bundle(folder, replace(options, kernels=True))
    document = json.loads(to_json(report))
    assert document["schema"] == {"name": "tvm-fuse/bundle-run", "version": 1}
    assert document["passed"] is True
    assert document["device"]["arch"] == "sm_90"
    assert len(document["timings"]) == 2
    assert len(document["kernels"][0]["timing"]["times_s"]) == 3
    text = render(report)
    for part in ("by hand on Fake GPU (sm_90, 7 SMs; driver for CUDA 12.9)", "PASSED", "as a CUDA graph"):
        assert part in text
    assert text.count("add_one") == 2


def command(*arguments, driver=None, **environment):
    """The runner in a process of its own, with a driver in the loader's path or none."""
    settings = {**os.environ, **environment}
    settings["LD_LIBRARY_PATH"] = str(driver.parent) if driver else ""
    return subprocess.run(
        [sys.executable, "-m", "tvm_fuse.runner", *map(str, arguments)],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(folder, fake_driver):
    done = command(folder, "--repeats", "2", "--kernels", "--json", driver=fake_driver)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    assert "PASSED" in done.stderr
    assert (
        "Each launch by itself" in command(folder, "--kernels", "--repeats", "1", driver=fake_driver).stdout
    )


def test_exit_codes(folder, tmp_path, fake_driver):
    save(tmp_path / "wrong", y=expected() + 1)
    assert command(tmp_path / "wrong", driver=fake_driver).returncode == 1
    assert command(tmp_path / "none", driver=fake_driver).returncode == 2
    for wrong in (["--device", "first"], ["--repeats", "-1"], ["--warmup", "x"], ["--checked"], []):
        assert command(*([folder, *wrong] if wrong else []), driver=fake_driver).returncode == 2
    failed = command(folder, driver=fake_driver, FAKE_CUDA_FAIL="cuLaunchKernel@add_one:1")
    assert (failed.returncode, failed.stdout) == (5, "")
    assert failed.stderr.startswith("error: cuLaunchKernel (add_one) failed")
    (folder / "kernels.cu").write_text("")
    assert command(folder, driver=fake_driver).returncode == 3
