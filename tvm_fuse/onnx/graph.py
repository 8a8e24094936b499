"""ONNX model -> IR-neutral Graph.

Core ids follow the order of the file, so inputs have smaller ids. A node with branches or a loop
body is one opaque node that reads whatever they take from outside. ``Identity`` and a ``Dropout`` in
inference mode are no core nodes: their results are other names of the values they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_fuse.core.graph import Array, Graph, Kind, TensorInfo
from tvm_fuse.onnx.builder import GraphBuilder, Operator
from tvm_fuse.onnx.operators import READERS
from tvm_fuse.onnx.parts import Parts, dtype_name
from tvm_fuse.onnx.read import DEFAULT_DOMAINS, outer_names
from tvm_fuse.onnx.shapes import OPAQUE, infer_values

__all__ = ["OnnxGraph", "captured_names", "read_graph"]


@dataclass(frozen=True)
class OnnxGraph:
    """A model and its core graph.

    Args:
        parts: The model.
        graph: Its graph; its outputs are the model's, in order.
        values: Core id -> name of the ONNX value, empty for inner values.
        sources: Core id -> index of the ONNX node it came from; None for inputs and initializers.
    """

    parts: Parts
    graph: Graph
    values: tuple[str, ...]
    sources: tuple[int | None, ...]


def read_graph(parts: Parts) -> OnnxGraph:
    """Read a model, as ``take_apart`` returns it.

    Args:
        parts: A valid model in inference mode.

    Returns:
        Its graph. Values of unknown rank or type have the shape and dtype ``OPAQUE``, and what
        computes them is opaque; only batch norms are always what they are, so that each is told of.

    Raises:
        ModelError: The shapes cannot be inferred, or the nodes are not sorted.
    """
    structure = parts.structure
    builder = GraphBuilder(infer_values(parts))
    _read_given(builder, parts)
    replaced = {(function.domain, function.name) for function in structure.functions}
    for index, node in enumerate(structure.graph.node):
        operator = Operator(builder, node, index)
        constant = _constant_value(parts, node)
        if constant is not None:
            builder.bind(node.output[0], operator.emit_constant(*constant))
        else:
            _read_node(operator, is_standard=(node.domain, node.op_type) not in replaced)
    outputs = tuple(builder.find(value.name) for value in structure.graph.output)
    graph = Graph(tuple(builder.nodes), outputs, builder.constants)
    return OnnxGraph(parts, graph, tuple(builder.values), tuple(builder.sources))


def captured_names(node: Any) -> set[str]:
    """Names that the branches or the loop body of an ONNX node may take from outside."""
    graphs = [entry.g for entry in node.attribute if entry.HasField("g")]
    return set().union(*map(outer_names, graphs))


def _read_given(builder: GraphBuilder, parts: Parts) -> None:
    """Inputs, and constants that are no nodes."""
    graph = parts.structure.graph
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in constants:
            info = builder.info(value.name)
            builder.bind(value.name, builder.add(Kind.INPUT, "input", (), (info,), name=value.name))
    for name, element_type in constants.items():
        array = parts.arrays.get(name)
        info = OPAQUE if array is None else TensorInfo(array.shape, dtype_name(element_type))
        kind = Kind.OTHER if array is None else Kind.CONSTANT
        node = builder.add(kind, "constant", (), (info,), name=name)
        builder.bind(name, node)
        if array is not None:
            builder.constants[node] = array
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        node = builder.add(Kind.OTHER, "sparse_initializer", (), (builder.info(name),), name=name)
        builder.bind(name, node)


def _read_node(operator: Operator, is_standard: bool) -> None:
    """Add the core nodes of an operator and bind its outputs to them."""
    node, builder = operator.proto, operator.builder
    outputs = [name for name in node.output if name]
    is_known = operator.result is not OPAQUE or node.op_type == "BatchNormalization"
    is_readable = is_standard and node.domain in DEFAULT_DOMAINS and is_known
    if is_readable and outputs == [node.output[0]] and node.op_type in READERS:
        value = READERS[node.op_type](operator)
        if value is not None:
            builder.bind(node.output[0], value)
            return
    captured = [builder.ids[name] for name in sorted(captured_names(node)) if name in builder.ids]
    inputs = [*operator.operands(), *captured]
    value = operator.emit(Kind.OTHER, inputs, outputs=[builder.info(name) for name in node.output])
    if len(node.output) == 1:
        builder.bind(node.output[0], value)
        return
    for position, name in enumerate(node.output):
        if name:
            item = operator.emit(Kind.GET_ITEM, (value,), position, (builder.info(name),))
            builder.bind(name, item)


def _constant_value(parts: Parts, node: Any) -> tuple[Array, str] | None:
    """The numbers and the dtype of a ``Constant`` node, in any of its forms that NumPy can hold."""
    if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
        return None
    for entry in node.attribute:
        if entry.name == "value":
            array = parts.arrays.get(node.output[0])
            return None if array is None else (array, dtype_name(entry.t.data_type))
        if entry.name in ("value_float", "value_floats"):
            return np.array(entry.f if entry.name == "value_float" else entry.floats, np.float32), "float32"
        if entry.name in ("value_int", "value_ints"):
            return np.array(entry.i if entry.name == "value_int" else entry.ints, np.int64), "int64"
    return None
