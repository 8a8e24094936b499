"""NVRTC, NVIDIA's compiler as a library, through ctypes: no nvcc, no driver, no further package."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvm_fuse.core.errors import MissingDependency, ToolFailed
from tvm_fuse.cuda.wheels import find_in_wheels

__all__ = ["INSTALL_NVRTC", "Nvrtc", "NvrtcProgram", "load_nvrtc"]

INSTALL_NVRTC = "pip install nvidia-cuda-nvrtc-cu12"

#: Below the namespace package of the wheels, then by the names that the system's loader knows.
_IN_WHEELS = ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13")
_IN_SYSTEM = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so")


@dataclass(frozen=True)
class NvrtcProgram:
    """What NVRTC made of a source.

    Args:
        succeeded: Whether it compiled; without that only ``log`` is filled.
        log: Messages, and ptxas' report when it was asked for.
        ptx: PTX text.
        cubin: Machine code; empty when a virtual architecture was asked for.
    """

    succeeded: bool
    log: str
    ptx: str = ""
    cubin: bytes = b""


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC.

    Args:
        path: Its file, or the name under which the system's loader found it.
        version: Major and minor number.
        archs: The compute capabilities it knows, times ten, ascending: 75 is ``sm_75``.
        library: The ctypes library.
    """

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    library: ctypes.CDLL = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def compile(self, source: str, options: Sequence[str]) -> NvrtcProgram:
        """Compiles a source.

        Args:
            source: CUDA C++.
            options: As NVRTC takes them, such as ``--gpu-architecture=sm_80``.

        Returns:
            The program; errors in the source are in its log.

        Raises:
            ToolFailed: NVRTC failed otherwise.
        """
        program = ctypes.c_void_p()
        arguments = ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        self._check(self.library.nvrtcCreateProgram(*arguments), "nvrtcCreateProgram")
        try:
            texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            status = self.library.nvrtcCompileProgram(program, len(options), texts)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                return NvrtcProgram(False, log or self._describe(status))
            ptx = self._read(program, "PTX").rstrip(b"\0").decode()
            return NvrtcProgram(True, log, ptx, self._read(program, "CUBIN"))
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        if size.value == 0:
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise ToolFailed(f"{self} ({self.path}) failed in {what}: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        return (self.library.nvrtcGetErrorString(status) or b"unknown error").decode()


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Loads NVRTC: from NVIDIA's pip packages, else the system's.

    Returns:
        The library.

    Raises:
        MissingDependency: There is none, or none that can be loaded.
    """
    wheels = [str(file) for file in map(find_in_wheels, _IN_WHEELS) if file is not None]
    failures = []
    for name in (*wheels, *_IN_SYSTEM):
        try:
            return _open(name)
        except (OSError, AttributeError) as error:  # AttributeError: older than nvrtcGetCUBIN
            failures.append(str(error))
    raise MissingDependency(
        f"NVRTC, which compiles CUDA kernels, cannot be loaded: {failures[0]}", INSTALL_NVRTC
    )


def _open(name: str) -> Nvrtc:
    """Loads one file, after its built-ins, which NVRTC opens by bare name from wherever it can."""
    folder = Path(name).parent
    for builtins in folder.glob("libnvrtc-builtins.so.*") if folder.is_absolute() else ():
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(name)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    for function in ("nvrtcGetCUBIN", "nvrtcGetNumSupportedArchs"):
        getattr(library, function)
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return Nvrtc(name, (major.value, minor.value), tuple(sorted(archs)), library)
