"""Remove what no output of an ONNX model needs, and check what is left."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import checker

from tvm_fuse.core.errors import InternalError
from tvm_fuse.onnx.graph import captured_names
from tvm_fuse.onnx.parts import Parts, copy_fields
from tvm_fuse.onnx.shapes import check_structure

__all__ = ["remove_dead", "verify"]


def remove_dead(parts: Parts) -> Parts:
    """The model without operators and constants that no output needs.

    An input that only repeats such a constant goes with it; all others stay. So does what the
    model says about values that are gone.
    """
    source = parts.structure.graph
    needed = {value.name for value in source.output}
    live = []
    for node in reversed(source.node):
        if needed.intersection(node.output):
            live.append(node)
            needed.update(node.input, captured_names(node))
            needed.discard("")  # an optional input that is left out
    structure = onnx.ModelProto()
    copy_fields(parts.structure, structure, {"graph"})
    graph = structure.graph
    filtered = {"node", "input", "initializer", "sparse_initializer", "value_info", "quantization_annotation"}
    copy_fields(source, graph, filtered)
    graph.node.extend(reversed(live))
    graph.initializer.extend(tensor for tensor in source.initializer if tensor.name in needed)
    graph.sparse_initializer.extend(item for item in source.sparse_initializer if item.values.name in needed)
    constants = {tensor.name for tensor in source.initializer}
    graph.input.extend(value for value in source.input if value.name in needed or value.name not in constants)
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    known.update(*(node.output for node in graph.node))
    graph.value_info.extend(value for value in source.value_info if value.name in known)
    graph.quantization_annotation.extend(
        item for item in source.quantization_annotation if item.tensor_name in known
    )
    return Parts(structure, {name: array for name, array in parts.arrays.items() if name in known})


def verify(before: Parts, after: Parts) -> None:
    """Check the promises of a rewrite.

    Raises:
        InternalError: An input or output has changed, or the model is no longer valid.
    """
    for role, old, new in (
        ("inputs", _free_inputs(before), _free_inputs(after)),
        ("outputs", list(before.structure.graph.output), list(after.structure.graph.output)),
    ):
        if old != new:
            names = [[value.name for value in values] for values in (old, new)]
            raise InternalError(f"the {role} of the model have changed: wanted {names[0]}, got {names[1]}")
    try:
        check_structure(after)
    except checker.ValidationError as error:
        raise InternalError(f"the rewritten model is not valid: {error}") from error


def _free_inputs(parts: Parts) -> list[Any]:
    """Inputs that a caller must supply."""
    constants = {tensor.name for tensor in parts.structure.graph.initializer}
    return [value for value in parts.structure.graph.input if value.name not in constants]
