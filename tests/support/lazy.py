"""Modules that are imported at first use, so that tests which need TVM are collected without it.

Example::

    relay, tvm = Lazy("tvm_fuse.relay.base", "relay"), Lazy("tvm_fuse.relay.base", "tvm")
    read = Lazy("tvm_fuse.relay.read")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Lazy"]


class Lazy:
    """Stands for a module, or for one name in it."""

    def __init__(self, module: str, name: str = "") -> None:
        self._module, self._name = module, name

    def _load(self) -> Any:
        module = import_module(self._module)
        return getattr(module, self._name) if self._name else module

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)
