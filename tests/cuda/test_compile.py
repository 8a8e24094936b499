"""Compiling without nvcc; the user's nvcc; what is said when it does not work."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from tests.support.cuda_kernels import SOURCE
from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.cuda import compile as compile_module
from tvm_fuse.cuda import nvrtc as nvrtc_module
from tvm_fuse.cuda.compile import compile_cuda, find_cuda_headers, parse_arch
from tvm_fuse.cuda.nvrtc import load_nvrtc
from tvm_fuse.cuda.wheels import find_in_wheels

HALF = '#include <cuda_fp16.h>\nextern "C" __global__ void f(half* a) { a[0] = a[0] * a[1]; }\n'
NVCC = shutil.which("nvcc")


@pytest.fixture(autouse=True)
def empty_path(monkeypatch, tmp_path):
    """No nvcc, no g++, nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("nvcc") is None


@pytest.mark.parametrize(
    ("arch", "number"), [("sm_75", 75), ("sm_90a", 90), ("sm_120", 120), ("sm_100f", 100)]
)
def test_number_of_an_architecture(arch, number):
    assert parse_arch(arch) == number


@pytest.mark.parametrize("arch", ["", "80", "sm_", "compute_80", "sm_80 ", "sm_1000", "SM_80"])
def test_no_architecture(arch):
    with pytest.raises(UsageError, match="sm_80"):
        parse_arch(arch)


@pytest.mark.cuda_codegen
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a"])
def test_machine_code_without_nvcc(arch):
    compiled = compile_cuda(SOURCE, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in compiled.ptx
    assert compiled.log.count("Compiling entry function") == 7
    assert compiled.compiler == str(load_nvrtc())


@pytest.mark.cuda_codegen
def test_half_precision_finds_its_header():
    assert compile_cuda(HALF, "sm_80").cubin


@pytest.mark.cuda_codegen
def test_missing_header_names_its_package(monkeypatch):
    monkeypatch.setattr(compile_module, "find_cuda_headers", lambda: ())
    with pytest.raises(MissingDependency, match=r"cuda_fp16\.h") as caught:
        compile_cuda(HALF, "sm_80")
    assert caught.value.hint == "pip install nvidia-cuda-runtime-cu12"
    with pytest.raises(MissingDependency) as caught:
        compile_cuda('#include "crt/mma.h"\n', "sm_80")
    assert caught.value.hint == "pip install nvidia-cuda-nvcc-cu12"


@pytest.mark.cuda_codegen
def test_headers_come_from_the_wheel():
    assert find_in_wheels("cuda_runtime/include") in find_cuda_headers()
    assert find_in_wheels("no/such/file") is None


def test_headers_of_a_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_module, "find_in_wheels", lambda name: None)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_cuda_headers() == (tmp_path / "include",)


@pytest.mark.cuda_codegen
def test_wrong_source_is_told_with_its_first_lines():
    with pytest.raises(ToolFailed, match=r'kernels\.cu\(1\): error: identifier "nothing"') as caught:
        compile_cuda("__global__ void f(float* a) { a[0] = nothing; }", "sm_80")
    assert "sm_80" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.cuda_codegen
def test_failure_of_ptxas_is_told_without_the_kernels_that_are_well():
    big = "__global__ void f(float* a) { __shared__ float t[20000]; t[threadIdx.x] = a[0]; a[1] = t[9]; }"
    with pytest.raises(ToolFailed, match="too much shared data") as caught:
        compile_cuda(SOURCE + big, "sm_80")
    assert len(str(caught.value).splitlines()) == 2


# --- architectures that NVRTC does not know ------------------------------------------------------


@pytest.mark.cuda_codegen
def test_newer_architecture_gets_ptx():
    newest = load_nvrtc().archs[-1]
    compiled = compile_cuda(SOURCE, "sm_990")
    assert compiled.cubin == b""
    assert f".target sm_{newest}" in compiled.ptx
    assert compiled.arch == "sm_990"


@pytest.mark.cuda_codegen
def test_architecture_between_gets_ptx_of_the_older_one(monkeypatch):
    without = replace(load_nvrtc(), archs=(75, 80, 90))
    monkeypatch.setattr(compile_module, "load_nvrtc", lambda: without)
    assert ".target sm_80" in compile_cuda(SOURCE, "sm_86").ptx


@pytest.mark.cuda_codegen
def test_dropped_architecture_is_refused(monkeypatch):
    newer = replace(load_nvrtc(), archs=(75, 80, 90))
    monkeypatch.setattr(compile_module, "load_nvrtc", lambda: newer)
    with pytest.raises(ToolFailed, match="sm_75 and newer, not for sm_70"):
        compile_cuda(SOURCE, "sm_70")


def test_absent_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc_module, "find_in_wheels", lambda name: None)
    monkeypatch.setattr(nvrtc_module, "_IN_SYSTEM", ("libno-such-nvrtc.so",))
    with pytest.raises(MissingDependency, match="libno-such-nvrtc") as caught:
        nvrtc_module.load_nvrtc.__wrapped__()
    assert caught.value.hint == "pip install nvidia-cuda-nvrtc-cu12"


def test_library_that_is_none_of_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc_module, "find_in_wheels", lambda name: None)
    monkeypatch.setattr(nvrtc_module, "_IN_SYSTEM", ("libc.so.6",))
    with pytest.raises(MissingDependency, match="nvrtc"):
        nvrtc_module.load_nvrtc.__wrapped__()


# --- nvcc ----------------------------------------------------------------------------------------


def make_program(folder, text):
    file = folder / "nvcc"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("compiler", ["nvcc", "/no/such/nvcc"])
def test_absent_nvcc(compiler):
    with pytest.raises(MissingDependency, match=compiler):
        compile_cuda(SOURCE, "sm_80", compiler=compiler)


def test_nvcc_that_fails(tmp_path):
    make_program(tmp_path, "echo 'kernels.cu(1): error: no' >&2; exit 1")
    with pytest.raises(ToolFailed, match=r"kernels\.cu\(1\): error: no"):
        compile_cuda(SOURCE, "sm_80", compiler="nvcc")


def test_nvcc_that_does_not_run(tmp_path):
    (tmp_path / "nvcc").write_text("#!/no/such/interpreter\n")
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(ToolFailed, match="does not run"):
        compile_cuda(SOURCE, "sm_80", compiler="nvcc")


def test_what_nvcc_is_asked_for(tmp_path):
    """The stand-in notes its arguments in the place of the cubin."""
    path = make_program(
        tmp_path,
        'case "$1" in --version) echo "release 12.9, V1"; exit;; esac\n'
        'for word in "$@"; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
        'echo "$@" > "$out"; echo a report >&2',
    )
    compiled = compile_cuda(SOURCE, "sm_90", compiler=path)
    assert {"-cubin", "-arch=sm_90", "--ptxas-options=-v", "-O3"} <= set(compiled.cubin.decode().split())
    assert (compiled.compiler, compiled.log, compiled.ptx) == ("nvcc 12.9", "a report\n", "")


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
def test_a_real_nvcc(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")  # nvcc runs a C++ compiler
    works = subprocess.run([NVCC, "--version"], capture_output=True, check=False).returncode == 0
    if not works:
        pytest.skip("nvcc does not run")
    compiled = compile_cuda(SOURCE, "sm_80", compiler=NVCC)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.compiler.startswith("nvcc ")
