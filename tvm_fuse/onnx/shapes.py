"""Shapes and dtypes of all values of an ONNX model, from its structure.

ONNX's own shape inference works on a model of at most 2 GB. It is given the structure, in which
large constants are inputs; small ones keep their numbers, since a ``Reshape`` needs them.
"""

from __future__ import annotations

import itertools
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

    Args:
        parts: The model.

    Returns:
        Name -> shape and dtype; a value of unknown rank or type is missing. A symbolic dimension
        has the model's name, one of ONNX's (equal names are equal sizes), or one that is unique.

    Raises:
        ModelError: Shape inference fails.
    """
    try:
        inferred = shape_inference.infer_shapes(_without_large_constants(parts), data_prop=True).graph
    except (shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"the shapes cannot be inferred: {error}", "export the model again") from error
    unknown = itertools.count()
    found = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and tensor.HasField("shape") and tensor.elem_type:
            shape = tuple(_dim(dim) or f"?{next(unknown)}" for dim in tensor.shape.dim)
            found[value.name] = TensorInfo(shape, dtype_name(tensor.elem_type))
    for tensor in inferred.initializer:
        found[tensor.name] = TensorInfo(tuple(tensor.dims), dtype_name(tensor.data_type))
    return found


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
