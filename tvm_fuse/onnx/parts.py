"""An ONNX model taken apart: its structure, and the numbers of its constants.

The structure is a model whose tensors have a name, a type and a shape, but no data: small, however
large the weights are, so that it can be copied, changed and checked at will. The numbers are NumPy
arrays beside it, read from the model once and written once.

::

    take_apart(model) -> Parts(structure, {"conv.weight": array, ...}) -> put_together(parts)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import Array
from tvm_fuse.onnx.read import DEFAULT_DOMAINS, DTYPES

__all__ = [
    "Parts",
    "constant_tensor",
    "copy_fields",
    "dtype_name",
    "element_type",
    "make_header",
    "opset_version",
    "put_together",
    "replace_nodes",
    "take_apart",
    "tensor_array",
    "tensor_header",
]

#: Element type -> NumPy dtype that its numbers are held in, as they lie in ``raw_data``.
_STORAGE = {
    **{kind: np.dtype(name).newbyteorder("<") for kind, name in DTYPES.items()},
    onnx.TensorProto.BFLOAT16: np.dtype("<u2"),
}
_NAMES: dict[int, str] = {**DTYPES, onnx.TensorProto.BFLOAT16: "bfloat16"}
_ELEMENT_TYPES = {name: kind for kind, name in _NAMES.items()}

#: Fields of a tensor that hold its numbers, or say where they are.
_DATA_FIELDS = frozenset(
    "raw_data float_data int32_data string_data int64_data double_data uint64_data "
    "data_location external_data".split()
)

_IR_WITHOUT_LISTED_CONSTANTS = 4  # IR version from which an initializer need not be an input as well


@dataclass(frozen=True)
class Parts:
    """A model taken apart.

    Args:
        structure: ``onnx.ModelProto``; the tensors of ``arrays`` have no data in it. Nobody changes it.
        arrays: Name of a constant (an initializer, or the output of a ``Constant`` node) -> its
            numbers, read-only; bfloat16 as bits in ``uint16``. Strings and the 8- and 4-bit floats,
            which NumPy lacks, stay in the structure.
    """

    structure: Any = field(compare=False, repr=False)
    arrays: Mapping[str, Array] = field(compare=False, repr=False)


def dtype_name(element_type: int) -> str:
    """The core's name of an ONNX element type: ``float32``, ``bfloat16``, ``string``, ..."""
    known = element_type in onnx.TensorProto.DataType.values()
    other = onnx.TensorProto.DataType.Name(element_type).lower() if known else "opaque"
    return _NAMES.get(element_type, other)


def element_type(dtype: str) -> int:
    """The ONNX element type of one of the dtypes of inputs, or of bfloat16."""
    return _ELEMENT_TYPES[dtype]


def take_apart(model: Any) -> Parts:
    """Separate the numbers of a model's constants from its structure.

    Args:
        model: ``onnx.ModelProto`` with its external data loaded; it is not changed. Constants inside
            branches and loop bodies stay where they are.

    Returns:
        The parts. A number is copied once, out of the model's memory.
    """
    arrays: dict[str, Array] = {}
    return Parts(_map_tensors(model, lambda name, tensor: _strip(name, tensor, arrays)), arrays)


def put_together(parts: Parts) -> Any:
    """The model of some parts, a new ``onnx.ModelProto`` with all data inside.

    Raises:
        InternalError: An array does not fit its tensor.
    """
    return _map_tensors(parts.structure, lambda name, tensor: _fill(name, tensor, parts.arrays))


def replace_nodes(
    parts: Parts, nodes: Iterable[Any], headers: Sequence[Any], arrays: Mapping[str, Array]
) -> Parts:
    """A model with other nodes, and more constants beside its own.

    Args:
        parts: The model; it is not changed.
        nodes: ``onnx.NodeProto`` messages in topological order.
        headers: The tensors of the new constants, without their data.
        arrays: Their numbers.
    """
    structure = onnx.ModelProto()
    copy_fields(parts.structure, structure, {"graph"})
    graph = structure.graph
    copy_fields(parts.structure.graph, graph, {"node"})
    graph.node.extend(nodes)
    graph.initializer.extend(headers)
    if structure.ir_version < _IR_WITHOUT_LISTED_CONSTANTS:
        graph.input.extend(
            helper.make_tensor_value_info(header.name, header.data_type, header.dims) for header in headers
        )
    return Parts(structure, {**parts.arrays, **arrays})


def opset_version(structure: Any) -> int:
    """Version of a model's default operator set, 0 when it has none."""
    return max(
        (entry.version for entry in structure.opset_import if entry.domain in DEFAULT_DOMAINS), default=0
    )


def copy_fields(source: Any, target: Any, without: Iterable[str] = ()) -> None:
    """Copy all fields of a message but some into an empty one."""
    for descriptor, value in source.ListFields():
        if descriptor.name in without:
            continue
        if isinstance(value, (str, bytes, int, float)):
            setattr(target, descriptor.name, value)
        else:
            getattr(target, descriptor.name).MergeFrom(value)


def constant_tensor(node: Any) -> Any:
    """The attribute with the tensor of a ``Constant`` node, or None when it is no such node."""
    if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
        return None
    return next((entry for entry in node.attribute if entry.name == "value"), None)


def tensor_array(tensor: Any) -> Array | None:
    """The numbers of a tensor, read-only, or None when NumPy has no dtype for them.

    Args:
        tensor: ``onnx.TensorProto`` with its data inside.

    Returns:
        An array of the tensor's shape; bfloat16 as bits in ``uint16``.
    """
    storage = _STORAGE.get(tensor.data_type)
    if storage is None:
        return None
    if tensor.HasField("raw_data"):
        array = np.frombuffer(tensor.raw_data, storage) if tensor.raw_data else np.empty(0, storage)
    elif tensor.data_type == onnx.TensorProto.BFLOAT16:
        array = np.array(tensor.int32_data, np.int32).astype(np.uint16)
    else:
        array = numpy_helper.to_array(tensor)
    array = array.reshape(tuple(tensor.dims)).view()
    array.setflags(write=False)
    return array


def tensor_header(tensor: Any) -> Any:
    """A copy of a tensor without its data."""
    header = onnx.TensorProto()
    copy_fields(tensor, header, _DATA_FIELDS)
    return header


def make_header(name: str, dtype: str, shape: Iterable[int]) -> Any:
    """A tensor of one of the dtypes of inputs, or bfloat16, without its data."""
    return onnx.TensorProto(name=name, data_type=element_type(dtype), dims=list(shape))


def _strip(name: str, tensor: Any, arrays: dict[str, Array]) -> Any:
    array = tensor_array(tensor)
    if array is None:
        return tensor
    arrays[name] = array
    return tensor_header(tensor)


def _fill(name: str, tensor: Any, arrays: Mapping[str, Array]) -> Any:
    if name not in arrays:
        return tensor
    array, storage = arrays[name], _STORAGE[tensor.data_type]
    if array.shape != tuple(tensor.dims) or array.dtype != storage:
        raise InternalError(
            f"tensor {name!r}: wanted {storage} {tuple(tensor.dims)}, got {array.dtype} {array.shape}"
        )
    filled = tensor_header(tensor)
    filled.raw_data = array.astype(storage, copy=False).tobytes()
    return filled


def _map_tensors(model: Any, change: Callable[[str, Any], Any]) -> Any:
    """A copy of a model in which ``change(name, tensor)`` stands for each of its constants."""
    copy = onnx.ModelProto()
    copy_fields(model, copy, {"graph"})
    graph = copy.graph
    graph.SetInParent()
    copy_fields(model.graph, graph, {"node", "initializer"})
    for tensor in model.graph.initializer:
        graph.initializer.append(change(tensor.name, tensor))
    graph.node.extend(_map_nodes(model.graph.node, change))
    return copy


def _map_nodes(nodes: Iterable[Any], change: Callable[[str, Any], Any]) -> Iterator[Any]:
    for node in nodes:
        entry = constant_tensor(node)
        if entry is None:
            yield node
            continue
        changed, attribute = onnx.NodeProto(), onnx.AttributeProto()
        copy_fields(node, changed, {"attribute"})
        copy_fields(entry, attribute, {"t"})
        attribute.t.CopyFrom(change(node.output[0], entry.t))
        changed.attribute.append(attribute)
        yield changed
