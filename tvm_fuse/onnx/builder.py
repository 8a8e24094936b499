"""Collects the nodes of a core graph while the nodes of an ONNX graph are read in order.

One ONNX node may become several core nodes: a ``Conv`` with a bias is a convolution and a bias add.
The last of them holds the ONNX node's result; the others, and the constants that attributes turn
into, are inner nodes without an ONNX name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import helper

from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.graph import Array, Dim, Kind, Node, TensorInfo
from tvm_fuse.onnx.shapes import OPAQUE

__all__ = ["GraphBuilder", "Operator"]


class GraphBuilder:
    """The nodes so far.

    Args:
        infos: Name of an ONNX value -> its shape and dtype, where they are known.

    Attributes:
        nodes: Core nodes; ``nodes[i].id == i``.
        constants: Core id of a constant -> its numbers.
        values: Core id -> name of the ONNX value, empty for inner values.
        sources: Core id -> index of the ONNX node, None for inputs and initializers.
        ids: Name of an ONNX value -> core id; several names may mean one value.
    """

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self.nodes: list[Node] = []
        self.constants: dict[int, Array] = {}
        self.values: list[str] = []
        self.sources: list[int | None] = []
        self.ids: dict[str, int] = {}

    def add(
        self, kind: Kind, op: str, inputs: Sequence[int], outputs: Sequence[TensorInfo], attrs: Any = None,
        *, name: str = "", source: int | None = None,
    ) -> int:  # fmt: skip
        """Append a node and return its id; ``name`` is for people."""
        node = Node(len(self.nodes), kind, op, tuple(inputs), tuple(outputs), attrs, name)
        self.nodes.append(node)
        self.values.append("")
        self.sources.append(source)
        return node.id

    def bind(self, value: str, node: int) -> None:
        """Let an ONNX value be the value of a node; the first name of a node is the one it keeps."""
        self.ids[value] = node
        self.values[node] = self.values[node] or value

    def info(self, value: str) -> TensorInfo:
        """Shape and dtype of an ONNX value; ``OPAQUE`` when they are not known."""
        return self.infos.get(value, OPAQUE)

    def find(self, value: str) -> int:
        """The core id of an ONNX value.

        Raises:
            ModelError: Nothing before has produced it.
        """
        if value not in self.ids:
            raise ModelError(
                f"value {value!r} is read before it is produced", "sort the nodes: onnx.checker says which"
            )
        return self.ids[value]


@dataclass(frozen=True)
class Operator:
    """One ONNX node while it is read.

    Args:
        builder: Where its core nodes go.
        proto: ``onnx.NodeProto``.
        index: Its position among the nodes of the graph.
    """

    builder: GraphBuilder
    proto: Any
    index: int

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Name -> value, strings as ``bytes``."""
        return {entry.name: helper.get_attribute_value(entry) for entry in self.proto.attribute}

    @property
    def result(self) -> TensorInfo:
        """Shape and dtype of its first output."""
        return self.builder.info(self.proto.output[0])

    def has(self, position: int) -> bool:
        """Whether it has this input; an optional one may be left out."""
        return position < len(self.proto.input) and bool(self.proto.input[position])

    def operand(self, position: int) -> int:
        """Core id of an input that it has."""
        return self.builder.find(self.proto.input[position])

    def operands(self) -> list[int]:
        """Core ids of all inputs that it has."""
        return [self.operand(position) for position in range(len(self.proto.input)) if self.has(position)]

    def info(self, position: int) -> TensorInfo:
        """Shape and dtype of an input that it has, as they are in the graph."""
        return self.builder.nodes[self.operand(position)].output

    def constant(self, position: int) -> Array | None:
        """The numbers of an input, or None when it has none there or it is not constant."""
        return self.builder.constants.get(self.operand(position)) if self.has(position) else None

    def variable_operands(self, start: int) -> list[int]:
        """Core ids of the inputs from ``start`` on that are not constant."""
        positions = [index for index in range(start, len(self.proto.input)) if self.has(index)]
        return [self.operand(index) for index in positions if self.constant(index) is None]

    def shape(self, position: int) -> tuple[Dim, ...]:
        """Shape of an input that it has."""
        return self.info(position).shape

    def emit(
        self, kind: Kind, inputs: Sequence[int], attrs: Any = None, outputs: Sequence[TensorInfo] = ()
    ) -> int:
        """Add a core node of this operator.

        Args:
            kind: What it does.
            inputs: Core ids.
            attrs: Attributes of the kind.
            outputs: Shapes and dtypes, those of the operator's first output if not given.

        Returns:
            Its core id.
        """
        proto = self.proto
        return self.builder.add(
            kind, proto.op_type, inputs, outputs or (self.result,), attrs, name=proto.name, source=self.index
        )

    def emit_constant(self, array: Array, dtype: str) -> int:
        """Add a constant of this operator; bfloat16 as bits in ``uint16``."""
        node = self.emit(Kind.CONSTANT, (), outputs=(TensorInfo(tuple(array.shape), dtype),))
        self.builder.constants[node] = np.asarray(array)
        return node
