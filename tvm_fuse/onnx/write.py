"""Carry out the edits of the core on an ONNX model.

::

    Conv(x, W, B) -> BatchNormalization -> y          Conv(x, W_folded, y_bias) -> y

A layer takes its bias into its own bias input where it has one of the right form (``Conv``,
``ConvTranspose``, ``Gemm``), otherwise an ``Add`` follows it. Old constants stay as long as somebody
reads them, and so do the names that others know (``names.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tvm_fuse.core.dtypes import narrow, widen
from tvm_fuse.core.edit import Edit, LayerEdit
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import ANCHOR_KINDS, Array, Kind, Node
from tvm_fuse.onnx.graph import OnnxGraph
from tvm_fuse.onnx.names import Names, plan_renaming
from tvm_fuse.onnx.parts import Parts, make_header, opset_version, replace_nodes
from tvm_fuse.onnx.prune import remove_dead, verify

__all__ = ["apply_edits"]

_GEMM_BIAS_OPTIONAL = 11  # opset from which Gemm needs no C


def apply_edits(read: OnnxGraph, edits: Sequence[Edit]) -> Parts:
    """Carry out edits that do not touch each other.

    Args:
        read: A model and its graph; neither is changed.
        edits: By the ids of that graph.

    Returns:
        The new model. Its inputs, outputs, opsets and metadata are the old ones; operators and
        constants that no output needs any more are gone.

    Raises:
        InternalError: The edits contradict each other or the graph, or the result is not valid.
    """
    layers, aliases = _merge(read, edits)
    writer = _Writer(read, layers, aliases)
    groups: dict[int, list[Node]] = {}
    for part, source in zip(read.graph.nodes, read.sources):
        if source is not None:
            groups.setdefault(source, []).append(part)
    for index, node in enumerate(read.parts.structure.graph.node):
        writer.write(node, groups.get(index, []))
    parts = remove_dead(writer.finish())
    verify(read.parts, parts)
    return parts


def _merge(read: OnnxGraph, edits: Sequence[Edit]) -> tuple[dict[int, LayerEdit], dict[int, int]]:
    """All layers and aliases by core id."""
    layers: dict[int, LayerEdit] = {}
    aliases: dict[int, int] = {}
    nodes = read.graph.nodes
    for edit in edits:
        twice = edit.touched & (layers.keys() | aliases.keys())
        if twice:
            at = ", ".join(str(nodes[node]) for node in sorted(twice))
            raise InternalError(f"two edits of one round change {at}; wanted edits without common nodes")
        layers.update((layer.anchor, layer) for layer in edit.layers)
        aliases.update(edit.aliases)
    for layer in layers.values():
        _check_layer(read, layer)
    for old, new in aliases.items():
        if nodes[old].output.dtype != nodes[new].output.dtype:
            wanted, got = nodes[old].output, nodes[new].output
            raise InternalError(f"{nodes[old]} is to become {nodes[new]}: wanted {wanted}, got {got}")
    return layers, aliases


def _check_layer(read: OnnxGraph, layer: LayerEdit) -> None:
    anchor = read.graph.nodes[layer.anchor]
    old = read.graph.constant(anchor.inputs[1]) if anchor.kind in ANCHOR_KINDS else None
    if old is None:
        raise InternalError(f"edit of {anchor}: wanted a layer with a constant weight, got {anchor.op}")
    new = layer.weight
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise InternalError(
            f"edit of {anchor}: wanted a weight {old.dtype} {old.shape}, got {new.dtype} {new.shape}"
        )


@dataclass(frozen=True)
class _Total:
    """What a layer and the operators behind it in one ONNX node compute: ``scale * layer(x) + shift``.

    Args:
        scale: alpha of a ``Gemm``, else 1.
        shift: float64, of the rank of the layer's output and broadcasting with it, or None.
        keeps_bias: Whether the node's own bias, which is no constant, comes on top.
    """

    scale: float
    shift: Array | None
    keeps_bias: bool


class _Writer:
    """The new nodes and constants while the old nodes are gone through in order."""

    def __init__(self, read: OnnxGraph, layers: Mapping[int, LayerEdit], aliases: Mapping[int, int]) -> None:
        self.read, self.layers, self.aliases = read, layers, aliases
        self.names = Names(read.parts.structure.graph)
        self.nodes: list[Any] = []
        self.headers: list[Any] = []
        self.arrays: dict[str, Array] = {}

    def write(self, node: Any, group: Sequence[Node]) -> None:
        """Write an ONNX node, given the core nodes that it became."""
        is_changed = any(part.id in self.layers or part.id in self.aliases for part in group)
        if is_changed and group[0].kind in ANCHOR_KINDS:
            self._write_layer(node, group[0], [part for part in group[1:] if part.kind is not Kind.CONSTANT])
        else:
            self.nodes.append(node)

    def finish(self) -> Parts:
        """The new model, with what is dead still in it."""
        renaming = plan_renaming(self.read, self.aliases, self.names)
        return replace_nodes(self.read.parts, renaming.apply(self.nodes), self.headers, self.arrays)

    # --- layers ------------------------------------------------------------------------------

    def _write_layer(self, node: Any, anchor: Node, inner: Sequence[Node]) -> None:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        edit = self.layers.get(anchor.id)
        if edit is not None:
            self._replace_weight(new, anchor, edit.weight)
        bias = None if edit is None else edit.bias
        if bias is None and all(part.id not in self.aliases for part in inner):
            self.nodes.append(new)
            return
        total = self._total(anchor, inner, bias)
        write = {"Gemm": self._write_gemm, "MatMul": self._write_matmul}.get(node.op_type, self._write_conv)
        write(new, anchor, total)

    def _replace_weight(self, node: Any, anchor: Node, weight: Array) -> None:
        old = self.read.graph.constants[anchor.inputs[1]]
        if not np.array_equal(weight, old):
            dtype = self.read.graph.nodes[anchor.inputs[1]].output.dtype
            node.input[1] = self._add_constant(f"{node.input[1]}_folded", weight, dtype)

    def _total(self, anchor: Node, inner: Sequence[Node], bias: Array | None) -> _Total:
        """The bias of an edit, and after it the operators of the ONNX node that are not aliased away."""
        rank = len(anchor.output.shape)
        scale, keeps_bias = 1.0, False
        shift = None if bias is None else widen(bias, anchor.output.dtype)
        for part in inner:
            operand = self.read.graph.exact(part.inputs[1])
            if part.id in self.aliases:
                continue
            if operand is None:
                keeps_bias = True
            elif part.kind is Kind.MULTIPLY:
                scale *= float(operand)
                shift = None if shift is None else shift * operand
            else:
                added = operand.reshape(-1, *(1,) * (rank - 2)) if part.kind is Kind.BIAS_ADD else operand
                shift = added if shift is None else shift + added
        if shift is not None:
            shift = shift.reshape((1,) * (rank - shift.ndim) + shift.shape)
        return _Total(scale, shift, keeps_bias)

    def _write_conv(self, node: Any, anchor: Node, total: _Total) -> None:
        """A bias that is one number a channel is the node's own; any other one is added behind it."""
        shift = total.shift
        if total.keeps_bias:
            self._write_sum(node, anchor, shift)
            return
        del node.input[2:]
        if shift is None or any(size != 1 for axis, size in enumerate(shift.shape) if axis != 1):
            self._write_sum(node, anchor, shift)
            return
        vector = np.broadcast_to(shift.reshape(-1), (anchor.attrs.channels,))
        node.input.append(self._add_bias(node, vector, anchor))
        self.nodes.append(node)

    def _write_gemm(self, node: Any, anchor: Node, total: _Total) -> None:
        kept = [entry for entry in node.attribute if entry.name not in ("alpha", "beta")]
        if total.scale != 1.0:
            kept.append(helper.make_attribute("alpha", total.scale))
        del node.attribute[:], node.input[2:]
        node.attribute.extend(kept)
        shift = total.shift
        if shift is None and opset_version(self.read.parts.structure) < _GEMM_BIAS_OPTIONAL:
            shift = np.zeros((1, 1))
        if shift is not None:
            node.input.append(self._add_bias(node, shift[0] if shift.shape[0] == 1 else shift, anchor))
        self.nodes.append(node)

    def _write_matmul(self, node: Any, anchor: Node, total: _Total) -> None:
        self._write_sum(node, anchor, total.shift)

    def _write_sum(self, node: Any, anchor: Node, shift: Array | None) -> None:
        """A node and an ``Add`` behind it, which takes over its result."""
        self.nodes.append(node)
        if shift is None:
            return
        result = node.output[0]
        bias = self._add_bias(node, shift, anchor)
        node.output[0] = self.names.fresh(f"{result}_unbiased")
        name = self.names.fresh(f"{node.name or result}/Add")
        self.nodes.append(helper.make_node("Add", [node.output[0], bias], [result], name=name))

    # --- constants ---------------------------------------------------------------------------

    def _add_bias(self, node: Any, exact: Array, anchor: Node) -> str:
        dtype = anchor.output.dtype
        return self._add_constant(f"{node.output[0]}_bias", narrow(exact, dtype), dtype)

    def _add_constant(self, base: str, array: Array, dtype: str) -> str:
        """A new constant; returns its name."""
        name = self.names.fresh(base)
        self.headers.append(make_header(name, dtype, array.shape))
        self.arrays[name] = array
        return name
