"""Read an ONNX file, refuse what an importer would get silently wrong, and list its batch norms.

TVM's importer ignores ``training_mode`` (and the five-output training form of older opsets):
such a model imports without a word and computes something else. It is refused here, by name,
where the information still exists. The epsilon of every batch norm is taken from the file, so
that it can be compared with what arrives in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import checker, helper, numpy_helper

from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.graph import Dim, TensorSpec

__all__ = [
    "DEFAULT_DOMAINS",
    "DTYPES",
    "OPSETS",
    "OnnxModel",
    "TensorSpec",
    "attribute",
    "fix_shapes",
    "outer_names",
    "read_onnx",
]

#: Opsets of the default domain that are read; newer ones change the meaning of operators.
OPSETS = range(7, 18)

_ONNX_DEFAULT_EPSILON = 1e-5  # BatchNormalization, all opsets
#: Domains of the standard operators.
DEFAULT_DOMAINS = ("", "ai.onnx")
#: The importer goes by the operator's name alone; of these domains it means the right operator.
_KNOWN_DOMAINS = (*DEFAULT_DOMAINS, "com.microsoft")

#: Element types of inputs -> NumPy dtype name. ONNX would also map bfloat16: to float32.
DTYPES: dict[int, str] = {
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}


@dataclass(frozen=True)
class OnnxModel:
    """A checked ONNX model in inference mode.

    Args:
        path: The file.
        files: It, and those beside it that hold its large tensors, in the order they are met.
        proto: The model; every node has a unique name.
        opset: Version of the default operator set.
        inputs: Inputs that a caller must supply (initializers are not among them).
        outputs: Output names, in order.
        epsilon: Name of each batch norm -> its epsilon and whether the file states it.
    """

    path: Path
    files: tuple[Path, ...]
    proto: Any = field(compare=False, repr=False)
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    epsilon: Mapping[str, ExpectedEpsilon]


def read_onnx(path: Path) -> OnnxModel:
    """Load and check an ONNX file.

    Args:
        path: The file; external data is looked for beside it.

    Returns:
        The model.

    Raises:
        UsageError: There is no such file.
        ModelError: It is not a valid ONNX model, has an unsupported opset, or is in training mode.
    """
    proto, data_files = _load(path)
    opset = _default_opset(path, proto)
    _check(path, proto)
    _name_nodes(proto.graph)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(_read_input(value) for value in proto.graph.input if value.name not in initializers)
    _refuse_unknown_domains(path, proto.graph)
    _refuse_training_mode(path, proto.graph)
    epsilon = {node.name: _read_epsilon(node) for node in _batch_norms(_live_nodes(proto.graph))}
    outputs = tuple(value.name for value in proto.graph.output)
    return OnnxModel(path, (path, *data_files), proto, opset, inputs, outputs, epsilon)


def _load(path: Path) -> tuple[Any, list[Path]]:
    """The model with all data inside, and the files that some of it was in."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        proto = onnx.load(str(path), format="protobuf", load_external_data=False)
        data_files = external_files(proto, path.parent)
        onnx.load_external_data_for_model(proto, str(path.absolute().parent))
    except (DecodeError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not an ONNX file: {error}", "is the file complete?") from error
    except (OSError, checker.ValidationError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "is its external data beside it?") from error
    for part, found in {
        "nodes": proto.graph.node, "outputs": proto.graph.output, "opset": proto.opset_import
    }.items():  # fmt: skip
        if not found:
            raise ModelError(f"{path} is not an ONNX model: it has no {part}", "is the file complete?")
    return proto, data_files


def external_files(model: Any, folder: Path) -> list[Path]:
    """The files in a model's folder that hold some of its tensors, in the order they are met."""
    entries = (entry for tensor in _tensors(model.graph) for entry in tensor.external_data)
    names = dict.fromkeys(entry.value for entry in entries if entry.key == "location")
    return [folder / name for name in names]


def _tensors(graph: Any) -> Iterator[Any]:
    """All constants of a graph, those of its nodes and of their subgraphs among them."""
    yield from graph.initializer
    for node in graph.node:
        for entry in node.attribute:
            yield from (entry.t, *entry.tensors)
            yield from _tensors(entry.g)


def _default_opset(path: Path, proto: Any) -> int:
    versions = [entry.version for entry in proto.opset_import if entry.domain in DEFAULT_DOMAINS]
    opset = int(versions[0]) if versions else 0
    if opset not in OPSETS:
        raise ModelError(
            f"{path} uses opset {opset}; wanted {OPSETS.start} to {OPSETS.stop - 1}",
            f"export it with opset_version={OPSETS.stop - 1}, or use onnx.version_converter",
        )
    return opset


def _check(path: Path, proto: Any) -> None:
    too_large_for_bytes = proto.ByteSize() >= 2**31 - 1
    try:
        checker.check_model(str(path) if too_large_for_bytes else proto)
    except (checker.ValidationError, UnicodeDecodeError) as error:
        lines = str(error).strip().splitlines() or [
            "a name in it is not UTF-8"
        ]  # onnx 1.19 then says nothing
        raise ModelError(f"{path} is not a valid ONNX model: {lines[0]}", "export it again") from error


def _all_nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph, then those of its subgraphs (branches and loop bodies)."""
    yield from graph.node
    for node in graph.node:
        for entry in node.attribute:
            if entry.HasField("g"):
                yield from _all_nodes(entry.g)


def _name_nodes(graph: Any) -> None:
    """Give every node a unique name, which TVM's importer then keeps as the operator's source."""
    taken = {node.name for node in _all_nodes(graph)}
    used: set[str] = set()
    for index, node in enumerate(_all_nodes(graph)):
        if not node.name or node.name in used:
            node.name = _fresh_name(f"{node.name or node.op_type}@{index}", taken)
            taken.add(node.name)
        used.add(node.name)


def _fresh_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _live_nodes(graph: Any) -> list[Any]:
    """The nodes that an output depends on; an importer drops the others."""
    needed = {value.name for value in graph.output}
    live = []
    for node in reversed(graph.node):  # ONNX lists nodes in topological order
        if needed.intersection(node.output):
            live.append(node)
            needed.update(
                node.input, *(outer_names(entry.g) for entry in node.attribute if entry.HasField("g"))
            )
    return live[::-1]


def outer_names(graph: Any) -> set[str]:
    """Names that a subgraph (a branch or a loop body) may take from outside: all that it reads or returns."""
    names = {name for node in graph.node for name in node.input}
    nested = (entry.g for node in graph.node for entry in node.attribute if entry.HasField("g"))
    return names.union({value.name for value in graph.output}, *map(outer_names, nested))


def _batch_norms(nodes: Iterable[Any]) -> list[Any]:
    return [node for node in nodes if node.op_type == "BatchNormalization" and node.domain in DEFAULT_DOMAINS]


def attribute(node: Any, name: str) -> Any:
    """The value of a node's attribute, or None when it has none of that name."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), None)


def _read_epsilon(node: Any) -> ExpectedEpsilon:
    value = attribute(node, "epsilon")
    if value is None:
        return ExpectedEpsilon(_ONNX_DEFAULT_EPSILON, EpsilonOrigin.SOURCE_DEFAULT)
    return ExpectedEpsilon(float(value), EpsilonOrigin.SOURCE_ATTRIBUTE)


def _refuse_unknown_domains(path: Path, graph: Any) -> None:
    for node in _all_nodes(graph):
        if node.domain not in _KNOWN_DOMAINS:
            raise ModelError(
                f"{path}: {node.op_type} {node.name!r} is of the unknown domain {node.domain!r}",
                "export the model with standard ONNX operators only",
            )


def _refuse_training_mode(path: Path, graph: Any) -> None:
    hint = "export the model in inference mode (PyTorch: model.eval() before torch.onnx.export)"
    nodes = list(_all_nodes(graph))
    for node in _batch_norms(nodes):
        if any(not name for name in node.input):
            raise ModelError(
                f"{path}: BatchNormalization {node.name!r} lacks an input: {list(node.input)}", hint
            )
        if attribute(node, "training_mode") or len([name for name in node.output if name]) > 1:
            raise ModelError(f"{path}: BatchNormalization {node.name!r} is in training mode", hint)
        if attribute(node, "spatial") == 0:
            raise ModelError(
                f"{path}: BatchNormalization {node.name!r} has spatial=0, which is not supported", hint
            )
    constants = {node.output[0]: attribute(node, "value") for node in nodes if node.op_type == "Constant"}
    constants.update((tensor.name, tensor) for tensor in graph.initializer)
    for node in nodes:
        switch = node.input[2] if node.op_type == "Dropout" and len(node.input) > 2 else ""
        if switch and not _is_false(constants.get(switch)):
            raise ModelError(f"{path}: Dropout {node.name!r} is in training mode, or may be", hint)


def _is_false(tensor: Any) -> bool:
    """Whether a tensor is there and holds no true value."""
    return tensor is not None and not numpy_helper.to_array(tensor).any()


def _read_input(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise ModelError(f"input {value.name!r} is not a tensor of known rank")
    dims: list[Dim] = []
    for index, dim in enumerate(tensor.shape.dim):
        is_static = dim.HasField("dim_value") and dim.dim_value > 0
        dims.append(int(dim.dim_value) if is_static else (dim.dim_param or f"d{index}"))
    if tensor.elem_type not in DTYPES:
        known = tensor.elem_type in onnx.TensorProto.DataType.values()
        found = onnx.TensorProto.DataType.Name(tensor.elem_type) if known else tensor.elem_type
        raise ModelError(
            f"input {value.name!r} has element type {found}; wanted one of {', '.join(DTYPES.values())}"
        )
    return TensorSpec(value.name, tuple(dims), DTYPES[tensor.elem_type])


def fix_shapes(
    inputs: tuple[TensorSpec, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[TensorSpec, ...]:
    """Replace symbolic dimensions by the user's numbers.

    Args:
        inputs: The model's inputs.
        shapes: Input name -> full shape.

    Returns:
        The inputs, all static.

    Raises:
        UsageError: A name is no input, a rank or fixed dimension differs, or a dynamic input
            has no shape.
    """
    names = [spec.name for spec in inputs]
    for name in shapes:
        if name not in names:
            raise UsageError(
                f"--shape {name}=...: no such input; the inputs are: {', '.join(names) or 'none'}"
            )
    fixed = tuple(_fix_shape(spec, shapes.get(spec.name)) for spec in inputs)
    dynamic = [spec for spec in fixed if not spec.is_static]
    if dynamic:
        example = " ".join(f"--shape {_example(spec)}" for spec in dynamic)
        raise UsageError(
            f"the shape of {len(dynamic)} input(s) is not fixed: {'; '.join(str(spec) for spec in dynamic)}",
            f"give the whole shape, for example {example}",
        )
    return fixed


def _fix_shape(spec: TensorSpec, shape: tuple[int, ...] | None) -> TensorSpec:
    if shape is None:
        return spec
    fits = len(shape) == len(spec.shape) and all(
        isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, shape)
    )
    if not fits:
        got = "x".join(str(size) for size in shape)
        raise UsageError(f"--shape {spec.name}={got} does not fit the model's input {spec}")
    return TensorSpec(spec.name, shape, spec.dtype)


def _example(spec: TensorSpec) -> str:
    """A plausible full shape: 1 for the batch, 224 for an unknown image side."""
    dims = []
    for index, dim in enumerate(spec.shape):
        guess = 1 if index == 0 else 3 if index == 1 and len(spec.shape) == 4 else 224
        dims.append(str(dim if isinstance(dim, int) else guess))
    return f"{spec.name}={'x'.join(dims)}"
