"""The runner in a process of its own, for whoever has loaded something else than the CUDA driver.

A process with TVM in it may hold our stub of the driver under the driver's name, and a second
``libcuda`` would bind to what the first one exports. A fresh process has what the system's loader finds,
and what crashes there crashes nothing else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tvm_fuse
from tvm_fuse.core.errors import MissingDependency, ModelError, ToolFailed, TvmFuseError, UsageError
from tvm_fuse.runner.driver import DeviceInfo
from tvm_fuse.runner.report import RunReport, from_json

__all__ = ["find_device", "run_in_process"]

_ERRORS: dict[int, type[TvmFuseError]] = {
    kind.exit_code: kind for kind in (UsageError, ModelError, MissingDependency, ToolFailed)
}
_DONE = (0, 1)  # 1: the outputs differ, which the report tells
_MOST_LINES = 8


def find_device(ordinal: int) -> DeviceInfo:
    """What the CUDA driver of this machine says of a GPU.

    Args:
        ordinal: Number of the device, from 0.

    Raises:
        MissingDependency: There is no driver, or it sees no GPU.
        UsageError: There is no device of this number.
        ToolFailed: The driver refuses something.
    """
    return DeviceInfo(**json.loads(_run("tvm_fuse.runner.probe", [str(ordinal)])))


def run_in_process(folder: Path, *, device: str, repeats: int, is_checked: bool = False) -> RunReport:
    """What ``tvm_fuse.runner.run.run_bundle`` does, elsewhere.

    Args:
        folder: The bundle.
        device: Number of the GPU, or ``emulator``.
        repeats: Measurements of one inference; 0: none are made.
        is_checked: On the emulator, look at every access to memory.

    Returns:
        What was found; outputs that differ are in the report, not raised.

    Raises:
        TvmFuseError: As of ``run_bundle``; a process that dies is a ``ToolFailed``.
    """
    options = ["--device", device, "--repeats", str(repeats), *(["--checked"] if is_checked else [])]
    return from_json(_run("tvm_fuse.runner", [str(folder), "--json", *options]))


def _run(module: str, arguments: Sequence[str]) -> str:
    """Standard output of a module of ours."""
    package = str(Path(tvm_fuse.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode not in _DONE or not done.stdout:
        raise _failure(module, done.returncode, done.stderr)
    return done.stdout


def _failure(module: str, code: int, stderr: str) -> TvmFuseError:
    """The error that the process printed, as it would have been raised here."""
    printed = re.search(r"^error: (.*)", stderr, re.M | re.S)
    if printed and code in _ERRORS:
        message, _, hint = printed[1].strip().partition("\nhint: ")
        return _ERRORS[code](message, hint)
    how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
    return ToolFailed("\n".join([f"{module} {how}", *stderr.strip().splitlines()[-_MOST_LINES:]]))
