"""Compiles emulated kernels with the system's C++ compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvm_fuse.core.errors import MissingDependency, ToolFailed

__all__ = ["INCLUDE", "build_library", "find_compiler"]

#: The emulator's headers.
INCLUDE = Path(__file__).parent / "include"

#: -O1: kernels run for seconds and more, so that compiling with -O2, twice as long, does not pay.
#: -w: what generated code looks like is not ours to change.
_COMMON = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w")
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


def build_library(text: str, folder: Path, *, checked: bool = False, cxx: str | None = None) -> Path:
    """Compiles C++ to a shared library, or finds it compiled.

    Args:
        text: C++.
        folder: Where libraries are kept.
        checked: Whether it is a checked build of kernels.
        cxx: See ``find_compiler``.

    Returns:
        The library; its name is a digest of all that it was made from.

    Raises:
        MissingDependency: There is no compiler.
        ToolFailed: The text does not compile.
    """
    compiler = find_compiler(cxx)
    options = [*_COMMON, *_native(), *(_CHECKED if checked else ())]
    recipe = "\0".join([compiler, *options, _read_headers(), text])
    library = folder / f"emulated-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = _compile(text, Path(scratch), [compiler, *options])
            built.replace(library)  # whole or not at all
    return library


def _compile(text: str, folder: Path, command: Sequence[str]) -> Path:
    source, target, library = (folder / f"emulated.{suffix}" for suffix in ("cpp", "o", "so"))
    source.write_text(text, encoding="utf-8")
    _run([*command, f"-I{INCLUDE}", "-c", "-o", str(target), str(source)])
    # In two steps, since a compiler that links would add its sanitizers' library; handlers are ours.
    _run([command[0], "-shared", "-o", str(library), str(target), "-ldl"])
    return library


@functools.cache
def _read_headers() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(INCLUDE.rglob("*.h")))


@functools.cache
def _native() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in {"x86_64", "aarch64"} else ()


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise ToolFailed(
            f"{command[0]} cannot compile the kernels for the emulator:\n" + "\n".join(lines[:_MOST_LINES]),
            "the emulator knows no tensor cores (wmma), no bfloat16 and no inline assembly",
        )
