"""Shapes and dtypes of all values of an ONNX model, from its structure.

ONNX's own shape inference works on a model of at most 2 GB. It is given the structure, in which
large constants are inputs; small ones keep their numbers, since a ``Reshape`` needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import checker, helper, shape_inference

from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.graph import Dim, TensorInfo
from tvm_fuse.onnx.parts import Parts, constant_tensor, copy_fields, dtype_name, put_together
from tvm_fuse.onnx.read import DTYPES

__all__ = ["OPAQUE", "check_structure", "infer_values"]

#: Stands for a value that is no tensor, or of unknown rank or type: no rule matches it.
OPAQUE = TensorInfo((), "opaque")

_MOST_ELEMENTS = 4096  # of a constant that shape inference may look into


def infer_values(parts: Parts) -> dict[str, TensorInfo]:
    """Infer the shape and dtype of every tensor.

    ONNX infers from the inputs and the constants. What it leaves open is taken from the model's own
    statements, and the rank of a ``Reshape`` from the length of its shape. Where ONNX knows better,
    statements do not count: exporters give equal sizes different names.

    Args:
        parts: The model.

    Returns:
        Name -> shape and dtype; a value of unknown rank or type is missing. A symbolic dimension
        has the model's name, one of ONNX's (equal names are equal sizes), or one that is unique.

    Raises:
        ModelError: Shape inference fails.
    """
    graph = parts.structure.graph
    stated: dict[str, Any] = {}
    while True:
        found = _infer(parts, stated.values())
        known = found.keys() | stated.keys()
        more = {value.name: value for value in (*graph.value_info, *graph.output) if _is_known(value)}
        more = {**_reshaped(graph, found), **more}
        more = {name: value for name, value in more.items() if name not in known}
        if not more:
            return found
        stated.update(more)


def _reshaped(graph: Any, found: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Results of ``Reshape`` nodes with as many unknown sizes as the length of the shape says."""
    values = {}
    for node in graph.node:
        if node.op_type != "Reshape" or len(node.input) < 2 or not found.keys() >= set(node.input):
            continue
        data, shape = (found[name] for name in node.input)
        if data.dtype in DTYPES.values() and len(shape.shape) == 1 and isinstance(shape.shape[0], int):
            element_type = helper.np_dtype_to_tensor_dtype(np.dtype(data.dtype))
            value = helper.make_tensor_value_info(node.output[0], element_type, [None] * shape.shape[0])
            _name_sizes([value])
            values[value.name] = value
    return values


def _infer(parts: Parts, stated: Iterable[Any]) -> dict[str, TensorInfo]:
    """Shapes and dtypes from the inputs, the constants and some statements of the model."""
    model = _without_large_constants(parts)
    del model.graph.value_info[:], model.graph.output[:]
    _name_sizes(model.graph.input)
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


def _name_sizes(values: Iterable[Any]) -> None:
    """Give each unnamed size of an input a name of its own; exporters also write ``?`` for one."""
    for value in values:
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value <= 0 and not any(letter.isalpha() for letter in dim.dim_param):
                dim.dim_param = f"?{value.name}.{index}"


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
