"""Packages of candidates in folders: written whole or not at all, and read with every hash checked."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import hash_files
from tvm_fuse.cuda.bundle import FileRecord
from tvm_fuse.cuda.candidates import Package, Value
from tvm_fuse.cuda.carried import carried_sources
from tvm_fuse.cuda.plain import make

__all__ = [
    "check_place",
    "cubin_file",
    "load_package",
    "load_reference",
    "package_digest",
    "read_source",
    "save_package",
]

#: Name and version of the JSON form; the number rises when a reader would have to change.
SCHEMA = {"name": "tvm-fuse/cuda-candidates", "version": 1}

_FILE, _REFERENCE, _SOURCES, _RUN = "candidates.json", "reference.npz", "sources.zip", "run.py"
_RUNNER = "tvm_fuse.runner.candidate_job"
_HINT = "`tvm-fuse tune MODEL --export-candidates DIR` writes one"
_DAMAGED = "copy the package again, or export it again"

_RUN_TEXT = '''#!/usr/bin/env python3
"""Checks and times the candidates in this folder. Needs NumPy and the NVIDIA driver, and nothing else.

    python run.py --budget 240 --json results.json

Written by tvm-fuse, whose `tune --import-results` reads what it finds.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER / "lib"))

from tvm_fuse.runner.candidate_job import main

if __name__ == "__main__":
    sys.exit(main(FOLDER))
'''


def check_place(folder: Path) -> None:
    """Refuse a folder that is there and is no package, before the work begins.

    Raises:
        UsageError: It is not empty and no package, or its own folder is not there.
    """
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"{folder}: the folder {folder.absolute().parent} is not there")
    if folder.exists() and not (folder / _FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
        raise UsageError(
            f"{folder}: wanted a new folder or a package of candidates, got something else",
            "name another folder; nothing in this one was touched",
        )


def save_package(
    folder: Path,
    package: Package,
    reference: Mapping[str, Sequence[Array]],
    cubins: Mapping[str, bytes],
    sources: Mapping[str, str],
) -> Package:
    """Write a package.

    Args:
        folder: Where it goes; a package that is there is replaced.
        package: Its description; ``files`` is filled in here.
        reference: Digest of a task -> its sampled results.
        cubins: Id of a candidate -> machine code.
        sources: Id of a candidate -> CUDA C++.

    Returns:
        The description as it was written.

    Raises:
        UsageError: The folder is something else, or cannot be written; it is as it was then.
    """
    check_place(folder)
    contents = {
        _REFERENCE: _pack(package, reference),
        _SOURCES: _zip({f"{name}.cu": text.encode() for name, text in sources.items()}),
        _RUN: _RUN_TEXT.encode(),
        **{cubin_file(name): data for name, data in cubins.items()},
        **{f"lib/{name}": data for name, data in carried_sources(_RUNNER).items()},
    }
    records = (
        FileRecord(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    )
    package = replace(package, files=tuple(records))
    text = json.dumps({"schema": SCHEMA, **asdict(package)}, allow_nan=False)
    contents[_FILE] = f"{text}\n".encode()
    _write(folder, contents)
    return package


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """All files into a new folder, which then takes the place of the old one."""
    folder = folder.absolute()
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            for name, data in contents.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
            if folder.exists():
                folder.rename(old)
            try:
                new.rename(folder)
            except OSError:
                if old.exists():
                    old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def load_package(folder: Path) -> Package:
    """Read the description of a package, and check that every file is the one that was written.

    Raises:
        UsageError: There is no package.
        ModelError: It is of another version, or damaged.
    """
    file = folder / _FILE
    if not file.is_file():
        raise UsageError(f"{folder}: no {_FILE} in it", _HINT)
    try:
        document = json.loads(file.read_bytes())
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, not {SCHEMA}")
        package: Package = make(Package, document, "")
    except ValueError as error:
        raise ModelError(f"{file}: no package of candidates: {error}", _HINT) from error
    for record in package.files:
        path = folder / record.name
        if not path.is_file():
            raise ModelError(f"{path}: the file is missing", _DAMAGED)
        if hash_files([path]) != record.sha256:
            raise ModelError(f"{path}: its contents are not those that were exported", _DAMAGED)
    return package


def package_digest(folder: Path) -> str:
    """SHA-256 of a package's description, which has that of every other file."""
    return hash_files([folder / _FILE])


def cubin_file(candidate: str) -> str:
    """Where the machine code of a candidate is, below the folder."""
    return f"kernels/{candidate}.cubin"


def read_source(folder: Path, candidate: str) -> str:
    """CUDA C++ of a candidate."""
    with zipfile.ZipFile(folder / _SOURCES) as archive:
        return archive.read(f"{candidate}.cu").decode()


def load_reference(folder: Path, digest: str, outputs: Sequence[Value]) -> tuple[Array, ...]:
    """The sampled results of a task, one array for each output.

    Raises:
        ModelError: They are not there, or of another dtype.
    """
    file = folder / _REFERENCE
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = tuple(stored[f"{digest}.{index}"] for index in range(len(outputs)))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file}: cannot be read: {error}", _DAMAGED) from error
    for array, value in zip(arrays, outputs):
        if str(array.dtype) != value.dtype:
            raise ModelError(f"{file}: {digest}: wanted {value.dtype}, got {array.dtype}", _DAMAGED)
    return arrays


def _pack(package: Package, reference: Mapping[str, Sequence[Array]]) -> bytes:
    buffer = io.BytesIO()
    arrays = {
        f"{task.digest}.{index}": array
        for task in package.tasks
        for index, array in enumerate(reference[task.digest])
    }
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _zip(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return buffer.getvalue()
