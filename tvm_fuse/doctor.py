"""What is installed, what it is for, and what is missing for more: ``tvm-fuse doctor``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.cuda.nvrtc import load_nvrtc
from tvm_fuse.relay import compat

__all__ = ["Check", "Status", "count_gpus", "diagnose", "render"]


class Status(str, Enum):
    """How a check ended."""

    OK = "ok"
    MISSING = "missing"  # the main commands do not work without it
    OPTIONAL = "optional"  # absent, and only some uses need it


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked for.
        status: Whether it is there.
        found: Version, place, or why not.
        purpose: What tvm-fuse uses it for.
        advice: What to do when it is absent; empty when it is there.
    """

    name: str
    status: Status
    found: str
    purpose: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status.value}, {self.found}"


def diagnose() -> tuple[Check, ...]:
    """Looks at this machine and this Python; never raises for something that is absent.

    Imports TVM when there is one (about two seconds).
    """
    return (
        _check_python(),
        _check_cpu(),
        _check_package("numpy", Status.MISSING, "everything", "pip install numpy"),
        _check_package("onnx", Status.MISSING, "reading and writing models", "pip install onnx"),
        *_check_tvm(),
        _check_driver(),
        _check_gpu(),
        _check_nvrtc(),
        _check_nvcc(),
        _check_compiler(),
        _check_package(
            "onnxruntime", Status.OPTIONAL, "a second opinion on results", "pip install onnxruntime"
        ),
        _check_package(
            "PyYAML", Status.OPTIONAL, "training configs in YAML (--epsilon-config)", "pip install PyYAML"
        ),
        _check_package("xgboost", Status.OPTIONAL, "tuning", 'pip install "tvm-fuse[tune]"'),
    )


def render(checks: tuple[Check, ...]) -> str:
    """Lays the checks out for people; what is absent says what it is for and what to do."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status.value:8}  {check.name:{width}}  {check.found}")
        if check.status is not Status.OK:
            lines.append(f"{'':8}  {'':{width}}    for: {check.purpose}")
            lines.extend(f"{'':8}  {'':{width}}    do:  {line}" for line in check.advice.splitlines())
    return "\n".join(lines)


def count_gpus() -> int:
    """Number of GPUs that the NVIDIA driver shows this process; 0 without a driver."""
    if compat.load_cuda_driver().kind != "real":
        return 0
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _check_python() -> Check:
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    purpose = "running tvm-fuse"
    if not (3, 9) <= sys.version_info[:2] < (3, 13):
        return Check("Python", Status.MISSING, found, purpose, "use Python 3.9 to 3.12")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Check("Python", Status.MISSING, found, purpose, "the embedded TVM needs Linux on x86-64")
    return Check("Python", Status.OK, found, purpose)


def _check_cpu() -> Check:
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = model.group(1) if model else platform.processor() or "unknown model"
    found = f"{name}, {usable} usable; code is generated for {detect_cpu()}"
    return Check("CPU", Status.OK, found, "CPU builds and tuning")


def _check_package(name: str, absent: Status, purpose: str, advice: str) -> Check:
    try:
        return Check(name, Status.OK, importlib.metadata.version(name), purpose)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, absent, "not installed", purpose, advice)


def _check_tvm() -> tuple[Check, ...]:
    """TVM itself, and what it was built to generate."""
    purpose = "planning, building, tuning and comparing"
    try:
        base, tvm = compat.find_tvm(), compat.load_tvm()
    except MissingDependency as error:
        return (Check("TVM with Relay", Status.MISSING, error.message, purpose, error.hint),)
    installed = f"{base.version}, {base.origin}, {base.path}"
    llvm = tvm.support.libinfo().get("LLVM_VERSION", "NOT-FOUND")
    cuda = tvm.get_global_func("target.build.cuda", allow_missing=True) is not None
    return (
        Check("TVM with Relay", Status.OK, installed, purpose),
        _check_codegen("TVM for CPU", llvm != "NOT-FOUND", f"LLVM {llvm}", Status.MISSING),
        _check_codegen("TVM for CUDA", cuda, "generates CUDA code", Status.OPTIONAL),
    )


def _check_codegen(name: str, present: bool, found: str, absent: Status) -> Check:
    purpose = "building for this target"
    if present:
        return Check(name, Status.OK, found, purpose)
    advice = f"uninstall this TVM, then {compat.INSTALL_RELAY}"
    return Check(name, absent, "this TVM was built without it", purpose, advice)


def _check_driver() -> Check:
    purpose = "running CUDA kernels"
    kind = compat.load_cuda_driver().kind
    if kind == "real":
        return Check("NVIDIA driver", Status.OK, "libcuda.so.1 of this system", purpose)
    found = "none; our stub lets TVM generate CUDA code" if kind == "stub" else "none, and no stub of it"
    return Check("NVIDIA driver", Status.OPTIONAL, found, purpose, "install the NVIDIA driver")


def _check_gpu() -> Check:
    purpose = "running and measuring CUDA kernels"
    gpus = count_gpus()
    if gpus == 0:
        return Check("GPU", Status.OPTIONAL, "none visible", purpose, "use a machine with an NVIDIA GPU")
    driver, name = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(256)
    status = driver.cuDeviceGetName(name, len(name), 0)
    found = name.value.decode(errors="replace") if status == 0 else f"no name (driver status {status})"
    return Check("GPU", Status.OK, f"{gpus} visible, the first is {found}", purpose)


def _check_nvrtc() -> Check:
    purpose = "compiling CUDA kernels to cubins without nvcc"
    try:
        nvrtc = load_nvrtc()
    except MissingDependency as error:
        return Check("NVRTC", Status.OPTIONAL, "not found", purpose, error.hint)
    return Check("NVRTC", Status.OK, f"{nvrtc.version[0]}.{nvrtc.version[1]}, {nvrtc.path}", purpose)


def _check_nvcc() -> Check:
    purpose = "building exported kernels outside TVM"
    found, version = _run_first(("nvcc",))
    release = re.search(r"release [\d.]+", version)
    if release is None:
        return Check("nvcc", Status.OPTIONAL, found, purpose, "install the CUDA toolkit")
    return Check("nvcc", Status.OK, f"{release.group(0)}, {found}", purpose)


def _check_compiler() -> Check:
    purpose = "exporting a built model as a library"
    found, version = _run_first(tuple(filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))))
    if not version:
        return Check("C++ compiler", Status.OPTIONAL, found, purpose, "install g++ or clang++")
    return Check("C++ compiler", Status.OK, f"{version.splitlines()[0]}, {found}", purpose)


def _run_first(commands: tuple[str, ...]) -> tuple[str, str]:
    """Finds the first command that really runs; a wrapper whose program is gone does not count.

    Returns:
        Its path and the text of ``--version``; or why there is none, and an empty text.
    """
    reason = "not found"
    for command in commands:
        path = shutil.which(command)
        if path is None:
            continue
        try:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = f"{path} does not run ({type(error).__name__})"
            continue
        return path, run.stdout
    return reason, ""
