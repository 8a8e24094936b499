"""Set the epsilon of batch norms in an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import helper

from tvm_fuse.onnx.parts import Parts

__all__ = ["set_epsilons"]


def set_epsilons(parts: Parts, values: Mapping[str, float]) -> Parts:
    """Give batch norms another epsilon.

    Args:
        parts: A model; it is not changed.
        values: Name of a ``BatchNormalization`` node -> its new epsilon (stored in float32, as ONNX does).

    Returns:
        The model with these attributes; the same object when there are none.
    """
    if not values:
        return parts
    structure = onnx.ModelProto()
    structure.CopyFrom(parts.structure)
    for node in structure.graph.node:
        if node.name in values:
            _set_attribute(node, "epsilon", values[node.name])
    return replace(parts, structure=structure)


def _set_attribute(node: Any, name: str, value: float) -> None:
    kept = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
