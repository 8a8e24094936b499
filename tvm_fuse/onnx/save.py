"""Write an ONNX model to a file, whole or not at all.

Everything is written in a temporary folder beside the file and moved into place when it is complete.
A model that is too large for one file (Protocol Buffers end at 2 GB) gets its large tensors beside it,
in ``<file>.data``.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from tvm_fuse.core.errors import UsageError
from tvm_fuse.onnx.parts import copy_fields, tensor_array, tensor_header

__all__ = ["LARGEST_FILE", "data_file", "save_onnx"]

#: Bytes of tensors above which they are written beside the model.
LARGEST_FILE = 2_000_000_000

_SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay in the model
_ALIGNMENT = 4096  # bytes; lets a reader map a tensor into memory


def data_file(path: Path) -> Path:
    """Where the large tensors of a large model lie."""
    return path.with_name(f"{path.name}.data")


def save_onnx(model: Any, path: Path, *, largest_file: int = LARGEST_FILE) -> None:
    """Save a model.

    Args:
        model: ``onnx.ModelProto`` with all data inside; it is not changed.
        path: The file; one that exists is replaced.
        largest_file: Bytes of tensors above which they go to ``<file>.data`` in the same folder.

    Raises:
        UsageError: The file cannot be written; what was there before is still there.
    """
    data = data_file(path)
    is_large = sum(map(_size, model.graph.initializer)) > largest_file
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            new, new_data, old_data = (Path(folder) / name for name in (path.name, data.name, "old"))
            if not is_large:
                new.write_bytes(model.SerializeToString())
                new.replace(path)
                return
            new.write_bytes(_move_tensors(model, new_data).SerializeToString())
            if data.exists():
                data.replace(old_data)
            try:
                new_data.replace(data)
                new.replace(path)
            except BaseException:
                data.unlink(missing_ok=True)
                if old_data.exists():
                    old_data.replace(data)
                raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", "does its folder exist?"
        ) from error


def _size(tensor: Any) -> int:
    """Bytes of a tensor's numbers, without copying them."""
    return math.prod(tensor.dims) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _move_tensors(model: Any, data: Path) -> Any:
    """Write the large tensors of a model to a file, and return the model that refers to it."""
    moved = onnx.ModelProto()
    copy_fields(model, moved, {"graph"})
    copy_fields(model.graph, moved.graph, {"initializer"})
    with data.open("wb") as file:
        for tensor in model.graph.initializer:
            array = tensor_array(tensor)
            if array is None or array.nbytes < _SMALLEST_EXTERNAL:
                moved.graph.initializer.append(tensor)
                continue
            header = tensor_header(tensor)
            header.data_location = onnx.TensorProto.EXTERNAL
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.seek(offset)
            file.write(array.tobytes())
            for key, value in (("location", data.name), ("offset", offset), ("length", array.nbytes)):
                header.external_data.add(key=key, value=str(value))
            moved.graph.initializer.append(header)
    return moved
