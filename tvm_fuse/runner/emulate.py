"""The device that is none: the emulator's driver, and the kernels compiled for this machine's CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvm_fuse.cuda.emulator import build_driver, build_emulator

__all__ = ["emulated"]


@contextmanager
def emulated(kernels: Path, *, checked: bool) -> Iterator[tuple[Path, Path]]:
    """What stands for a GPU while the block runs.

    Args:
        kernels: CUDA C++.
        checked: Whether every access to memory is looked at.

    Yields:
        A driver, and a module for it.

    Raises:
        MissingDependency: There is no C++ compiler.
        ToolFailed: The kernels hold what the emulator does not know.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_fuse_runner_") as scratch:
        folder = Path(scratch)
        module = build_emulator(kernels.read_text(encoding="utf-8"), folder=folder)
        yield build_driver(folder), module.library(checked=checked)
