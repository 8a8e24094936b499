"""The manifest of a folded model inside the ONNX file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import METADATA_KEY, Manifest, from_json, to_json
from tvm_fuse.onnx.parts import Parts

__all__ = ["external_files", "load_manifest", "with_manifest"]


def with_manifest(parts: Parts, manifest: Manifest) -> Parts:
    """The model with a manifest in its ``metadata_props``; an older one is replaced."""
    structure = onnx.ModelProto()
    structure.CopyFrom(parts.structure)
    kept = [entry for entry in structure.metadata_props if entry.key != METADATA_KEY]
    del structure.metadata_props[:]
    structure.metadata_props.extend(kept)
    structure.metadata_props.add(key=METADATA_KEY, value=to_json(manifest))
    return replace(parts, structure=structure)


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of an ONNX file.

    Raises:
        UsageError: There is no such file.
        ModelError: It is no ONNX file, or has no manifest.
    """
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not an ONNX file: {error}", "is the file complete?") from error
    texts = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
    if not texts:
        raise ModelError(f"{path} has no manifest of tvm-fuse", "`tvm-fuse fold MODEL -o OUT` writes one")
    return from_json(texts[0], str(path))


def external_files(path: Path) -> list[Path]:
    """The files beside an ONNX model that hold its large tensors, in the order they are met."""
    model = onnx.load(str(path), load_external_data=False)
    names: dict[str, None] = {}
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                names[entry.value] = None
    return [path.parent / name for name in names]
