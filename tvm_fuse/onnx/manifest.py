"""The manifest of a folded model inside the ONNX file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import METADATA_KEY, Manifest, from_json, to_json
from tvm_fuse.onnx import read
from tvm_fuse.onnx.parts import Parts

__all__ = ["external_files", "find_manifest", "load_manifest", "with_manifest"]


def with_manifest(parts: Parts, manifest: Manifest) -> Parts:
    """The model with a manifest in its ``metadata_props``; an older one is replaced."""
    structure = onnx.ModelProto()
    structure.CopyFrom(parts.structure)
    kept = [entry for entry in structure.metadata_props if entry.key != METADATA_KEY]
    del structure.metadata_props[:]
    structure.metadata_props.extend(kept)
    structure.metadata_props.add(key=METADATA_KEY, value=to_json(manifest))
    return replace(parts, structure=structure)


def find_manifest(model: Any, where: Path) -> Manifest | None:
    """The manifest in an ``onnx.ModelProto``, or None when there is none.

    Raises:
        ModelError: It is damaged.
    """
    texts = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
    return from_json(texts[0], str(where)) if texts else None


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of an ONNX file.

    Raises:
        UsageError: There is no such file.
        ModelError: It is no ONNX file, or has no manifest.
    """
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not an ONNX file: {error}", "is the file complete?") from error
    manifest = find_manifest(model, path)
    if manifest is None:
        raise ModelError(f"{path} has no manifest of tvm-fuse", "`tvm-fuse fold MODEL -o OUT` writes one")
    return manifest


def external_files(path: Path) -> list[Path]:
    """The files beside an ONNX model that hold its large tensors, in the order they are met.

    Empty for what is no ONNX model.
    """
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, TypeError, OSError):
        return []
    return read.external_files(model, path.parent)
