"""Write an ONNX model to a file, whole or not at all.

Files are written under temporary names in the same folder and renamed when they are complete. A model
that is too large for one file (Protocol Buffers end at 2 GB) gets its large tensors beside it, in
``<file>.data``.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from onnx import helper

from tvm_fuse.onnx.parts import copy_fields, tensor_array, tensor_header

__all__ = ["LARGEST_FILE", "save_onnx"]

#: Bytes of tensors from which they are written beside the model.
LARGEST_FILE = 2_000_000_000

_SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay in the model
_ALIGNMENT = 4096  # bytes; lets a reader map a tensor into memory


def save_onnx(model: Any, path: Path, *, largest_file: int = LARGEST_FILE) -> None:
    """Save a model.

    Args:
        model: ``onnx.ModelProto`` with all data inside; it is not changed.
        path: The file; one that exists is replaced.
        largest_file: Bytes of tensors above which they go to ``<file>.data`` in the same folder.

    Raises:
        OSError: The folder cannot be written; what was there before is still there.
    """
    if sum(map(_size, model.graph.initializer)) <= largest_file:
        with _replacing(path) as file:
            file.write(model.SerializeToString())
        return
    data_path = path.with_name(f"{path.name}.data")
    with _replacing(path) as file, _replacing(data_path) as data:
        file.write(_move_tensors(model, data_path.name, data).SerializeToString())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one when the block ends without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The mask of permissions of new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _size(tensor: Any) -> int:
    """Bytes of a tensor's numbers, without copying them."""
    return math.prod(tensor.dims) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _move_tensors(model: Any, location: str, data: BinaryIO) -> Any:
    """Write the large tensors of a model to a file, and return the model that refers to it."""
    moved = onnx.ModelProto()
    copy_fields(model, moved, {"graph"})
    copy_fields(model.graph, moved.graph, {"initializer"})
    for tensor in model.graph.initializer:
        array = tensor_array(tensor)
        if array is None or array.nbytes < _SMALLEST_EXTERNAL:
            moved.graph.initializer.append(tensor)
            continue
        header = tensor_header(tensor)
        header.data_location = onnx.TensorProto.EXTERNAL
        offset = -(-data.tell() // _ALIGNMENT) * _ALIGNMENT
        data.seek(offset)
        data.write(array.tobytes())
        for key, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
            header.external_data.add(key=key, value=str(value))
        moved.graph.initializer.append(header)
    return moved
