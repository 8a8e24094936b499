"""The doctor must speak on a machine that lacks everything, and tell a wrapper from a program."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from tvm_fuse import doctor
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.doctor import Check, Status
from tvm_fuse.relay.compat import CudaDriver


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine with Python and nothing else."""

    def raise_missing():
        raise MissingDependency("no TVM is installed", "install one")

    def raise_not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.compat, "find_tvm", raise_missing)
    monkeypatch.setattr(doctor.compat, "load_cuda_driver", lambda: CudaDriver("none"))
    monkeypatch.setattr(doctor, "load_nvrtc", raise_missing)
    monkeypatch.setattr(importlib.metadata, "version", raise_not_found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("bare_machine")
def test_diagnose_on_a_bare_machine():
    by_name = {check.name: check for check in doctor.diagnose()}
    missing = {name for name, check in by_name.items() if check.status is Status.MISSING}
    optional = {name for name, check in by_name.items() if check.status is Status.OPTIONAL}
    assert missing == {"numpy", "onnx", "TVM with Relay"}
    assert optional == {
        "NVIDIA driver",
        "GPU",
        "NVRTC",
        "nvcc",
        "C++ compiler",
        "onnxruntime",
        "PyYAML",
        "xgboost",
    }
    assert all(
        check.advice and check.purpose for name, check in by_name.items() if name in missing | optional
    )


def test_render_explains_only_what_is_absent():
    text = doctor.render(
        (
            Check("numpy", Status.OK, "1.26.4", "everything"),
            Check("TVM with Relay", Status.MISSING, "none", "planning", "do this\nor that"),
        )
    )
    assert text.splitlines() == [
        "ok        numpy           1.26.4",
        "missing   TVM with Relay  none",
        "                            for: planning",
        "                            do:  do this",
        "                            do:  or that",
    ]


def test_render_of_nothing():
    assert doctor.render(()) == ""


def write_program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_a_wrapper_without_its_program_does_not_count(monkeypatch, tmp_path):
    write_program(tmp_path / "nvcc", "exec /no/such/bin/nvcc")
    write_program(tmp_path / "g++", "echo 'g++ 12.2'; echo more")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.defpath]))
    monkeypatch.delenv("CXX", raising=False)
    nvcc, compiler = doctor._check_nvcc(), doctor._check_compiler()
    assert nvcc.status is Status.OPTIONAL
    assert "does not run" in nvcc.found
    assert (compiler.status, compiler.found) == (Status.OK, f"g++ 12.2, {tmp_path / 'g++'}")


@pytest.mark.parametrize("kind", ["stub", "none"])
def test_no_gpu_without_a_real_driver(monkeypatch, kind):
    monkeypatch.setattr(doctor.compat, "load_cuda_driver", lambda: CudaDriver(kind))
    assert doctor.count_gpus() == 0
    assert doctor._check_gpu().status is Status.OPTIONAL


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 13, 0)])
def test_unsupported_python(monkeypatch, version):
    monkeypatch.setattr(doctor.sys, "version_info", version)
    assert doctor._check_python().status is Status.MISSING


@pytest.mark.relay
def test_diagnose_with_tvm():
    by_name = {check.name: check for check in doctor.diagnose()}
    assert by_name["TVM with Relay"].status is Status.OK
    assert by_name["TVM for CPU"].found.startswith("LLVM ")


@pytest.mark.cuda_codegen
def test_diagnose_with_cuda_codegen():
    assert {check.name: check.status for check in doctor.diagnose()}["TVM for CUDA"] is Status.OK
