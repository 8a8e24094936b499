"""The ``tvm-fuse`` command; exit codes are listed in ``main``."""

from __future__ import annotations

from tvm_fuse.cli.main import main

__all__ = ["main"]
