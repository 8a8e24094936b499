"""Shapes and dtypes of all values of an ONNX model, from its structure.

ONNX's own shape inference works on a model of at most 2 GB. It is given the structure, in which
large constants are inputs; small ones keep their numbers, since a ``Reshape`` needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import checker, helper, shape_inference

from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.graph import Dim, TensorInfo
from tvm_fuse.onnx.parts import Parts, constant_tensor, copy_fields, dtype_name, put_together

__all__ = ["OPAQUE", "check_structure", "infer_values"]

#: Stands for a value that is no tensor, or of unknown rank or type: no rule matches it.
OPAQUE = TensorInfo((), "opaque")

_MOST_ELEMENTS = 4096  # of a constant that shape inference may look into


def infer_values(parts: Parts) -> dict[str, TensorInfo]:
    """Infer the shape and dtype of every tensor.

    What the model itself says of a value counts only where inference fails (an operator that ONNX does
    not know): exporters give equal sizes different names.

    Args:
        parts: The model.

    Returns:
        Name -> shape and dtype; a value of unknown rank or type is missing. A symbolic dimension
        has the model's name, one of ONNX's (equal names are equal sizes), or one that is unique.

    Raises:
        ModelError: Shape inference fails.
    """
    graph = parts.structure.graph
    found = _infer(parts, [])
    stated = [value for value in (*graph.value_info, *graph.output) if value.name not in found]
    return _infer(parts, stated) if any(map(_is_known, stated)) else found


def _infer(parts: Parts, stated: Sequence[Any]) -> dict[str, TensorInfo]:
    """Shapes and dtypes from the inputs, the constants and some statements of the model."""
    model = _without_large_constants(parts)
    del model.graph.value_info[:], model.graph.output[:]
    model.graph.value_info.extend(stated)
    try:
        graph = shape_inference.infer_shapes(model, data_prop=True).graph
    except (shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"the shapes cannot be inferred: {error}", "export the model again") from error
    unknown = itertools.count()
    found = {}
    for value in filter(_is_known, (*graph.input, *graph.value_info)):
        tensor = value.type.tensor_type
        shape = tuple(_dim(dim) or f"?{next(unknown)}" for dim in tensor.shape.dim)
        found[value.name] = TensorInfo(shape, dtype_name(tensor.elem_type))
    for tensor in graph.initializer:
        found[tensor.name] = TensorInfo(tuple(tensor.dims), dtype_name(tensor.data_type))
    return found


def _is_known(value: Any) -> bool:
    """Whether a value is said to be a tensor of known rank and type."""
    tensor = value.type.tensor_type
    return bool(value.type.HasField("tensor_type") and tensor.HasField("shape") and tensor.elem_type)


def check_structure(parts: Parts) -> None:
    """Run ONNX's checker on a model whose large constants are inputs.

    Raises:
        onnx.checker.ValidationError: The model is not valid.
    """
    checker.check_model(_without_large_constants(parts))


def _dim(dim: Any) -> Dim:
    return int(dim.dim_value) if dim.dim_value > 0 else str(dim.dim_param)


def _without_large_constants(parts: Parts) -> Any:
    """The model with the data of its small constants; the large ones are inputs."""
    large = {name for name, array in parts.arrays.items() if array.size > _MOST_ELEMENTS}
    model = onnx.ModelProto()
    copy_fields(parts.structure, model, {"graph"})
    copy_fields(parts.structure.graph, model.graph, {"node", "initializer"})
    listed = {value.name for value in model.graph.input}
    headers = {tensor.name: tensor for tensor in parts.structure.graph.initializer}
    for node in parts.structure.graph.node:
        entry = constant_tensor(node)
        if entry is not None and node.output[0] in large:
            headers[node.output[0]] = entry.t
        else:
            model.graph.node.append(node)
    for name, tensor in headers.items():
        if name not in large:
            model.graph.initializer.append(tensor)
        elif name not in listed:
            model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return put_together(Parts(model, {name: parts.arrays[name] for name in parts.arrays.keys() - large}))
