"""A libcuda whose modules are libraries of emulated kernels."""

from __future__ import annotations

from pathlib import Path

from tvm_fuse.cuda.emulator.compiler import build_library

__all__ = ["build_driver"]

_SOURCE = Path(__file__).with_name("driver.cpp")


def build_driver(folder: Path, *, cxx: str | None = None) -> Path:
    """Compiles the emulated CUDA driver, to be loaded in place of ``libcuda.so.1``.

    A "module" is what ``EmulatedModule.library`` returns; a checked one works too.

    Args:
        folder: Where to put it; one that lies there is taken.
        cxx: The C++ compiler; None for ``$CXX`` or the first that there is.

    Returns:
        The library.

    Raises:
        MissingDependency: There is no C++ compiler.
    """
    return build_library(_SOURCE.read_text(encoding="utf-8"), folder, cxx=cxx)
