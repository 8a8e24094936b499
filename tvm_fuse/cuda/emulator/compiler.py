"""Compiles emulated kernels with the system's C++ compiler."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tvm_fuse.core.errors import MissingDependency, ToolFailed

__all__ = ["INCLUDE", "build_library", "find_compiler"]

#: The emulator's headers.
INCLUDE = Path(__file__).parent / "include"

#: -w: what generated code looks like is not ours to change.
_COMMON = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w")
#: Local arrays are filled with a pattern, so that what was never written is wrong every time.
_CHECKED = (
    "-DEMU_CHECKED",
    "-fsanitize=bounds,integer-divide-by-zero",
    "-ftrivial-auto-var-init=pattern",
)
_MOST_LINES = 12


def find_compiler(cxx: str | None = None) -> str:
    """The path of a C++ compiler.

    Args:
        cxx: A name or path; None for ``$CXX``, else the first of the usual names.

    Raises:
        MissingDependency: There is none.
    """
    asked = cxx or os.environ.get("CXX")
    names = (asked,) if asked else ("g++", "c++", "clang++")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingDependency(
            f"emulating CUDA kernels needs a C++ compiler; there is no {' or '.join(names)}",
            "install one (Debian and Ubuntu: g++) or name one in CXX",
        )
    return found


def build_library(source: Path, library: Path, *, checked: bool = False, cxx: str | None = None) -> None:
    """Compiles a C++ file to a shared library.

    Args:
        source: The file.
        library: Where to put the library.
        checked: Whether the file is a checked build of kernels.
        cxx: See ``find_compiler``.

    Raises:
        MissingDependency: There is no compiler.
        ToolFailed: The file does not compile.
    """
    compiler = find_compiler(cxx)
    target = library.with_suffix(".o")
    options = [*_COMMON, *_native(), *(_CHECKED if checked else ()), f"-I{INCLUDE}"]
    _run([compiler, *options, "-c", "-o", str(target), str(source)])
    # In two steps, since a compiler that links would add its sanitizers' library; handlers are ours.
    _run([compiler, "-shared", "-o", str(library), str(target), "-ldl"])
    target.unlink()


@functools.cache
def _native() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in {"x86_64", "aarch64"} else ()


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise ToolFailed(
            f"{command[0]} cannot compile the kernels for the emulator:\n" + "\n".join(lines[:_MOST_LINES]),
            "the emulator knows no tensor cores (wmma) and no inline assembly",
        )
