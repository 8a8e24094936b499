"""Write files, each complete: one, or several into a folder, all of them or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tvm_fuse.core.errors import UsageError

__all__ = ["write_file", "write_files"]


def write_file(path: Path, content: bytes) -> None:
    """Write one file; one that is there stays whole until the new one is complete.

    Args:
        path: The file, in a folder that is there.
        content: Its bytes.

    Raises:
        UsageError: The file cannot be written.
    """
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"the folder {path.parent} is not there"
        raise UsageError(f"{path}: cannot be written: {why}")
    write_files(path.parent, {path.name: content})


def write_files(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write files so that a failure at any point leaves the folder as it was.

    Args:
        folder: Made if need be; files of the same names in it are replaced, others stay.
        contents: File name -> bytes.
        stale: Names of files that go away, where they are there.

    Raises:
        UsageError: The folder cannot be written.
    """
    is_new = not folder.exists()
    names = list(dict.fromkeys([*contents, *stale]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new, old = (Path(scratch) / name for name in ("new", "old"))
            new.mkdir()
            old.mkdir()
            for name, data in contents.items():
                (new / name).write_bytes(data)
            _exchange(new, folder, old, names)
    except OSError as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def _exchange(new: Path, folder: Path, old: Path, names: list[str]) -> None:
    """Move all files into place; when one cannot be moved, what was there before comes back."""
    written = {name for name in names if (new / name).exists()}
    try:
        for name in names:
            if (folder / name).exists():
                os.replace(folder / name, old / name)
            if name in written:
                os.replace(new / name, folder / name)
    except BaseException:
        for name in names:
            if name in written and not (new / name).exists():
                (folder / name).unlink(missing_ok=True)
            if (old / name).exists():
                os.replace(old / name, folder / name)
        raise
