"""The IR-neutral graph that folding, matching and planning work on.

A front end reads its IR into a ``Graph``; the core decides; the front end applies the
decision to its own IR by node id. Values are frozen, nodes are in topological order (a
node's inputs have smaller ids), and constants are read-only arrays in a side table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Union

import numpy as np

from tvm_fuse.core.dtypes import Array, widen
from tvm_fuse.core.kinds import (
    ANCHOR_KINDS,
    CONVOLUTION_KINDS,
    ELEMENTWISE_KINDS,
    INJECTIVE_KINDS,
    LEAF_KINDS,
    MATRIX_KINDS,
    TRANSPOSED_KINDS,
    VIEW_KINDS,
    Kind,
)

__all__ = [
    "ANCHOR_KINDS",
    "CONVOLUTION_KINDS",
    "ELEMENTWISE_KINDS",
    "INJECTIVE_KINDS",
    "LEAF_KINDS",
    "MATRIX_KINDS",
    "TRANSPOSED_KINDS",
    "VIEW_KINDS",
    "Array",
    "BatchNormAttrs",
    "BiasAddAttrs",
    "ClipAttrs",
    "ConcatenateAttrs",
    "ConvAttrs",
    "DenseAttrs",
    "Dim",
    "Graph",
    "Kind",
    "LayoutTransformAttrs",
    "LeakyReluAttrs",
    "Node",
    "PReluAttrs",
    "PadAttrs",
    "ReduceAttrs",
    "TensorInfo",
    "TensorSpec",
    "TransposeAttrs",
    "digest",
]

#: A static size, or the name of a symbolic one.
Dim = Union[int, str]


@dataclass(frozen=True)
class ConvAttrs:
    """A convolution over 1, 2 or 3 spatial axes, transposed or not.

    Layouts are spelled like ``NCHW``, ``OIHW`` or ``OIHW16i16o``; in a transposed convolution's kernel
    ``I`` is the input channels and ``O`` the output channels of one group.
    """

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels: int
    data_layout: str
    kernel_layout: str
    out_layout: str


@dataclass(frozen=True)
class DenseAttrs:
    """A matrix product with the weights on the right.

    ``kernel_layout`` is ``OI`` (``y = x · Wᵀ``), ``IO`` (``y = x · W``), one of these behind a batch
    axis (``BOI``, ``BIO``), or a packed form (``OI8o``). ``input_axis`` is the axis of the data that
    is summed over: -1, or -2 where the data is transposed.
    """

    kernel_layout: str
    input_axis: int = -1


@dataclass(frozen=True)
class BatchNormAttrs:
    """Inference batch normalization over ``axis`` (always >= 0)."""

    axis: int
    epsilon: float
    center: bool
    scale: bool


@dataclass(frozen=True)
class BiasAddAttrs:
    """A vector added along ``axis`` (always >= 0)."""

    axis: int


@dataclass(frozen=True)
class TransposeAttrs:
    """Axis ``i`` of the result is axis ``axes[i]`` of the operand (all >= 0)."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class LayoutTransformAttrs:
    """From one layout to another over the same axes."""

    source: str
    target: str


@dataclass(frozen=True)
class ConcatenateAttrs:
    """Parts joined along ``axis`` (always >= 0); the one input is a ``TUPLE`` of the parts."""

    axis: int


@dataclass(frozen=True)
class PadAttrs:
    """Elements added before and after each axis; ``value`` is None unless it is one known constant."""

    widths: tuple[tuple[int, int], ...]
    value: float | None


@dataclass(frozen=True)
class ClipAttrs:
    """Bounds of a clip."""

    minimum: float
    maximum: float


@dataclass(frozen=True)
class LeakyReluAttrs:
    """Slope for negative values."""

    alpha: float


@dataclass(frozen=True)
class PReluAttrs:
    """The axis (always >= 0) along which the slopes run."""

    axis: int


@dataclass(frozen=True)
class ReduceAttrs:
    """The axes (all >= 0, ascending) that a reduction runs over, and whether they stay with size 1."""

    axes: tuple[int, ...]
    keepdims: bool


def _is_static(shape: tuple[Dim, ...]) -> bool:
    return all(isinstance(dim, int) for dim in shape)


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of one tensor; a ``str`` dimension is symbolic."""

    shape: tuple[Dim, ...]
    dtype: str

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return _is_static(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(str(dim) for dim in self.shape)}]"


@dataclass(frozen=True)
class TensorSpec:
    """A graph input: name, shape (a ``str`` dimension is symbolic) and NumPy dtype name."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return _is_static(self.shape)

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(str(dim) for dim in self.shape)}]"


@dataclass(frozen=True)
class Node:
    """One operator, input or constant.

    ``outputs`` has more than one entry only for tuple-valued nodes, which are read through
    ``GET_ITEM`` nodes (``attrs`` is then the index). ``op`` is the front end's own name of
    the operator and ``name`` where it came from (an ONNX node name); both are for people.
    """

    id: int
    kind: Kind
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[TensorInfo, ...]
    attrs: Any = None
    name: str = ""

    @property
    def output(self) -> TensorInfo:
        """The first (usually only) output."""
        return self.outputs[0]

    @property
    def label(self) -> str:
        """The operator as a part of a kernel's name."""
        return self.op.removeprefix("nn.").replace(".", "_")

    def __str__(self) -> str:
        return self.name or f"{self.op}#{self.id}"


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order with the values of the constants among them.

    Args:
        nodes: ``nodes[i].id == i``.
        outputs: Ids of the values the graph returns, in order; an id may repeat.
        constants: Node id -> array, for every node of kind ``CONSTANT``; the graph holds
            read-only views.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    constants: Mapping[int, Array] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        constants = {node: array.view() for node, array in self.constants.items()}
        for array in constants.values():
            array.setflags(write=False)  # the view's flag; the caller's array keeps its own
        object.__setattr__(self, "constants", MappingProxyType(constants))

    @cached_property
    def _readers(self) -> tuple[tuple[int, ...], ...]:
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for source in node.inputs:
                readers[source].append(node.id)
        return tuple(tuple(ids) for ids in readers)

    @cached_property
    def _output_ids(self) -> frozenset[int]:
        return frozenset(self.outputs)

    def readers(self, node_id: int) -> tuple[int, ...]:
        """Ids of the nodes that read this value, one entry for each time it is read."""
        return self._readers[node_id]

    def is_output(self, node_id: int) -> bool:
        """Whether the graph returns this value."""
        return node_id in self._output_ids

    def constant(self, node_id: int) -> Array | None:
        """The value of a constant node as it is stored (bfloat16 as its bits), else None."""
        return self.constants.get(node_id)

    def exact(self, node_id: int) -> Array | None:
        """The value of a floating-point constant node in float64, else None."""
        array = self.constants.get(node_id)
        return None if array is None else widen(array, self.nodes[node_id].output.dtype)

    def of_kind(self, *kinds: Kind) -> tuple[Node, ...]:
        """The nodes of the given kinds, in topological order."""
        return tuple(node for node in self.nodes if node.kind in kinds)


def digest(array: Array) -> str:
    """A short hash of an array's dtype, shape and bytes (16 hex digits of BLAKE2b)."""
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(f"{array.dtype.str}{array.shape}".encode())
    hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
