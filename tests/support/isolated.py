"""The runner in a process of its own, in which TVM, PyTorch and all else but NumPy cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["run_emulated"]

ROOT = Path(__file__).resolve().parents[2]

_BLOCKED = ("tvm", "bitblas", "torch", "onnx", "onnxruntime", "scipy", "ml_dtypes", "cuda", "cupy")

_CODE = f"""
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {_BLOCKED}:
            raise ImportError(name + " is blocked by this test")

sys.meta_path.insert(0, Block())
from tvm_fuse.runner.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run_emulated(folder, *options):
    """Run a bundle on the emulator.

    Returns:
        Exit code, report, and what was said on standard error.
    """
    command = [sys.executable, "-W", "error", "-c", _CODE, str(folder), "--device", "emulator", "--json"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr
