"""Batch norms whose data and parameters differ in dtype, which opset 14 and later allow and TVM does not.

::

    BatchNormalization(x: float16, parameters: float32)
    Cast(x, float32) -> BatchNormalization(all float32) -> Cast(float16)

Everything is computed in the widest dtype, so no parameter loses a digit before it is folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import helper

from tvm_fuse.core.dtypes import FLOATS, holds
from tvm_fuse.core.graph import TensorInfo
from tvm_fuse.onnx.names import Names
from tvm_fuse.onnx.parts import dtype_name, element_type, put_together, replace_nodes, take_apart
from tvm_fuse.onnx.read import DEFAULT_DOMAINS, OnnxModel, attribute
from tvm_fuse.onnx.shapes import infer_values

__all__ = ["with_casts"]

_MIXED_SINCE = 14  # opset from which a batch norm may have parameters of another dtype


def with_casts(model: OnnxModel) -> OnnxModel:
    """A model whose batch norms have data and parameters of one dtype each.

    Args:
        model: As ``read_onnx`` returns it; batch norms in branches and loop bodies stay as they are.

    Returns:
        The model, with casts around batch norms of several dtypes; the same object when there is none.

    Raises:
        ModelError: The shapes of a model with several floating-point dtypes cannot be inferred.
    """
    if model.opset < _MIXED_SINCE or len(set(_floats(model.proto.graph))) < 2:
        return model
    parts = take_apart(model.proto)
    infos, names = infer_values(parts), Names(model.proto.graph)
    before = list(parts.structure.graph.node)
    after = [new for node in before for new in _cast_around(node, infos, names)]
    if len(after) == len(before):
        return model
    return replace(model, proto=put_together(replace_nodes(parts, after, [], {})))


def _floats(graph: Any) -> Iterator[str]:
    """The floating-point dtypes that a graph names: of inputs, constants and attributes."""
    kinds = [value.type.tensor_type.elem_type for value in graph.input]
    kinds += [tensor.data_type for tensor in graph.initializer]
    for node in graph.node:
        kinds += [attribute(node, "to") or attribute(node, "dtype")] if node.op_type != "Constant" else []
        kinds += [entry.t.data_type for entry in node.attribute if entry.HasField("t")]
    return (name for name in map(dtype_name, filter(None, kinds)) if name in FLOATS)


def _cast_around(node: Any, infos: Mapping[str, TensorInfo], names: Names) -> Iterator[Any]:
    """A node, with casts before and after it where it is a batch norm of several dtypes."""
    dtypes = [infos[name].dtype if name in infos else "" for name in node.input]
    is_norm = node.op_type == "BatchNormalization" and node.domain in DEFAULT_DOMAINS
    if not is_norm or len(set(dtypes)) == 1 or not FLOATS.keys() >= set(dtypes):
        yield node
        return
    wide, result = _widest(dtypes), node.output[0]
    norm = onnx.NodeProto()
    norm.CopyFrom(node)
    for index, (name, dtype) in enumerate(zip(node.input, dtypes)):
        if dtype != wide:
            norm.input[index] = names.fresh(f"{name}_{wide}")
            yield _cast(name, norm.input[index], wide, names)
    if dtypes[0] == wide:
        yield norm
        return
    norm.output[0] = names.fresh(f"{result}_{wide}")
    yield norm
    yield _cast(norm.output[0], result, dtypes[0], names)


def _widest(dtypes: Iterable[str]) -> str:
    """The narrowest dtype that has all numbers of all of them."""
    return next(dtype for dtype in FLOATS if all(holds(dtype, other) for other in dtypes))


def _cast(source: str, result: str, dtype: str, names: Names) -> Any:
    return helper.make_node(
        "Cast", [source], [result], name=names.fresh(f"{result}/Cast"), to=element_type(dtype)
    )
