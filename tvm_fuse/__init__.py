"""tvm-fuse: folds, fuses and explains; an operator-fusion plugin for TVM Relay.

Importing this package imports no TVM; the names below that need it load it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["compile", "last_report", "transform"]

#: Public name -> module that defines it (an empty attribute: the module itself).
_LAZY = {
    "compile": ("tvm_fuse.pipeline", "compile"),
    "last_report": ("tvm_fuse.relay.record", "last_report"),
    "transform": ("tvm_fuse.transform", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = import_module(module_name)
    return getattr(module, attribute) if attribute else module
