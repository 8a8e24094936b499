"""CUDA C++ to machine code: with NVRTC, or with an nvcc of the user's choice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.cuda.nvrtc import Nvrtc, load_nvrtc
from tvm_fuse.cuda.wheels import find_in_wheels

__all__ = ["CompiledModule", "compile_cuda", "find_cuda_headers", "parse_arch"]

#: First folder of a header -> the pip package that has it; the others are in the runtime's.
_HEADER_PACKAGES = {"crt": "nvidia-cuda-nvcc-cu12", "nv": "nvidia-cuda-cccl-cu12"}

#: Makes ptxas report what each kernel uses.
_REPORT = "--ptxas-options=-v"

_MISSING_HEADER = re.compile(r"(?:could not|cannot) open source file \"([^\"]+)\"")
_REPORT_LINE = re.compile(r"^ptxas info|bytes stack frame")  # of kernels that are well
_MOST_LOG_LINES = 8


@dataclass(frozen=True)
class CompiledModule:
    """Kernels in the form that a driver loads.

    Args:
        arch: The architecture that was asked for, such as ``sm_90``.
        compiler: Name and version of the compiler.
        cubin: Machine code for ``arch``; empty when the compiler is too old for it.
        ptx: PTX text, which a driver compiles when it loads it; empty from nvcc.
        log: What the compiler said, ptxas' report on each kernel included.
    """

    arch: str
    compiler: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    log: str = field(repr=False)


def compile_cuda(source: str, arch: str, *, compiler: str = "nvrtc") -> CompiledModule:
    """Compiles CUDA kernels.

    An architecture that NVRTC does not know, since it is newer, gets PTX for the newest older one.

    Args:
        source: CUDA C++; ``cuda_fp16.h`` and its like are found in NVIDIA's pip packages.
        arch: Such as ``sm_80``.
        compiler: ``nvrtc``, ``nvcc`` (the one in PATH), or the path of an nvcc.

    Returns:
        The kernels.

    Raises:
        UsageError: ``arch`` is no architecture.
        MissingDependency: The compiler, or a header, is not installed.
        ToolFailed: The source does not compile, or the compiler no longer knows ``arch``.
    """
    number = parse_arch(arch)
    if compiler != "nvrtc":
        return _compile_with_nvcc(source, arch, compiler)
    nvrtc = load_nvrtc()
    options = [f"--gpu-architecture={_choose_arch(nvrtc, arch, number)}", _REPORT]
    program = nvrtc.compile(source, [*options, *(f"-I{folder}" for folder in find_cuda_headers())])
    if not program.succeeded:
        raise _failure(str(nvrtc), arch, program.log)
    return CompiledModule(arch, str(nvrtc), program.cubin, program.ptx, program.log)


def parse_arch(arch: str) -> int:
    """The compute capability of an architecture, times ten: 90 for ``sm_90`` and ``sm_90a``.

    Raises:
        UsageError: The name is none of an architecture.
    """
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise UsageError(f"{arch!r} is no GPU architecture; wanted a name such as sm_80")
    return int(match.group(1))


def find_cuda_headers() -> tuple[Path, ...]:
    """The folders with CUDA's headers: of NVIDIA's pip packages, else of an installed CUDA toolkit."""
    names = ("cuda_runtime/include", "cuda_nvcc/include", "cuda_cccl/include", "cu13/include")
    wheels = tuple(filter(None, map(find_in_wheels, names)))
    if wheels:
        return wheels
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = (Path(root, "include") for root in roots if root)
    return tuple(folder for folder in folders if (folder / "cuda_fp16.h").is_file())[:1]


def _choose_arch(nvrtc: Nvrtc, arch: str, number: int) -> str:
    """The architecture itself, or a virtual one whose PTX its driver can compile."""
    if number in nvrtc.archs:
        return arch
    older = [known for known in nvrtc.archs if known < number]
    if not older:
        raise ToolFailed(
            f"{nvrtc} ({nvrtc.path}) compiles for sm_{nvrtc.archs[0]} and newer, not for {arch}",
            "name a newer architecture, or choose an older compiler",
        )
    return f"compute_{older[-1]}"


def _compile_with_nvcc(source: str, arch: str, compiler: str) -> CompiledModule:
    path = shutil.which(compiler)
    if path is None:
        raise MissingDependency(
            f"the CUDA compiler {compiler!r} is not there, or cannot be run",
            "give the path of an nvcc, or use NVRTC, which needs no toolkit",
        )
    with tempfile.TemporaryDirectory() as folder:
        kernels, cubin = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        kernels.write_text(source, encoding="utf-8")
        command = [path, "-cubin", "-O3", f"-arch={arch}", _REPORT, "-o", str(cubin), str(kernels)]
        log = _run(command)
        if not cubin.is_file():
            raise _failure(path, arch, log)
        return CompiledModule(arch, _name_nvcc(path), cubin.read_bytes(), "", log)


def _name_nvcc(path: str) -> str:
    release = re.search(r"release ([\d.]+)", _run([path, "--version"]))
    return f"nvcc {release.group(1)}" if release else path


def _run(command: list[str]) -> str:
    """The messages of a command, whether it succeeds or not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ToolFailed(f"{command[0]} does not run: {error.strerror}") from error
    return done.stdout + done.stderr


def _failure(compiler: str, arch: str, log: str) -> MissingDependency | ToolFailed:
    header = _MISSING_HEADER.search(log)
    if header is not None:
        package = _HEADER_PACKAGES.get(header.group(1).split("/")[0], "nvidia-cuda-runtime-cu12")
        return MissingDependency(
            f"{compiler} does not find the header {header.group(1)}, which a kernel includes",
            f"pip install {package}",
        )
    lines = [line for line in log.splitlines() if line.strip() and not _REPORT_LINE.search(line)]
    shown = "".join(f"\n  {line}" for line in lines[:_MOST_LOG_LINES])
    return ToolFailed(f"{compiler} cannot compile the kernels for {arch}:{shown}")
