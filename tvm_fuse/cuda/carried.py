"""The part of this package that something needs which is to run without it being installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tvm_fuse

__all__ = ["carried_sources"]

_NAME = "tvm_fuse"
_ROOT = Path(tvm_fuse.__file__).resolve().parent


def carried_sources(module: str) -> dict[str, bytes]:
    """The files of a module and of all modules of ours that it imports, directly or not.

    Args:
        module: Its dotted name.

    Returns:
        Path below a folder for ``sys.path`` -> contents; packages around the modules are included, each with
        what lies in its folder and is no Python.
    """
    found: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        file = _file_of(name)
        if file is None:
            continue
        key = str(Path(_NAME) / file.relative_to(_ROOT))
        if key in found:
            continue
        found[key] = file.read_bytes()
        if file.name == "__init__.py" and file.parent != _ROOT:
            found.update(_data_of(file.parent))
        pending += [name.rpartition(".")[0], *_imports(found[key])]
    return dict(sorted(found.items()))


def _file_of(name: str) -> Path | None:
    """The file of a module; None for what is none of ours."""
    if name.split(".")[0] != _NAME:
        return None
    place = _ROOT.joinpath(*name.split(".")[1:])
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _data_of(package: Path) -> dict[str, bytes]:
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    data = (file for file in files if file.suffix not in (".py", ".pyc"))
    return {str(Path(_NAME) / file.relative_to(_ROOT)): file.read_bytes() for file in data}


def _imports(source: bytes) -> Iterator[str]:
    """The names that a module imports, and what may be modules in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
