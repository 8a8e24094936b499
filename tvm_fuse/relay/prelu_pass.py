"""Parametric ReLUs that an importer flattened get their axes back, so that they can end a chain.

::

    %1 = reshape(%x, newshape=[-1])
    %2 = reshape(broadcast_to_like(slopes, %x), newshape=[-1])      nn.prelu(%x, slopes, axis=1)
    %3 = nn.prelu(%1, %2, axis=0)
    reshape(%3, newshape=[1, 8, 16, 16])

TVM's ONNX importer spells every PRelu so; the reshapes end the chain of the convolution before it. One slope
for all becomes ``nn.leaky_relu``. Slopes that vary along several axes stay as they are. Each element is
multiplied by the same number as before.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.relay.base import relay
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_function

__all__ = ["restore_prelus"]


def restore_prelus(module: Any) -> Any:
    """Give flattened parametric ReLUs their axes back.

    Args:
        module: A Relay module with its parameters bound as constants.

    Returns:
        The type-inferred module.
    """

    def rewrite(read: ReadFunction) -> Any:
        found = {node.id: _restored(read, node) for node in read.graph.of_kind(Kind.RESHAPE)}
        return rebuild_function(read, {node: new for node, new in found.items() if new is not None})

    return rewrite_functions(module, rewrite)[0]


def _restored(read: ReadFunction, result: Node) -> Replacement | None:
    """How to make the value of a reshape that undoes the flattening of a PReLU's data."""
    graph = read.graph
    prelu = graph.nodes[result.inputs[0]]
    if prelu.kind is not Kind.PRELU or graph.readers(prelu.id) != (result.id,):
        return None
    flat, slope = (graph.nodes[source] for source in prelu.inputs)
    if (
        flat.kind is not Kind.RESHAPE
        or flat.output.shape != prelu.output.shape
        or len(flat.output.shape) != 1
    ):
        return None
    data = graph.nodes[flat.inputs[0]]
    if (
        data.output.shape != result.output.shape
        or not data.output.is_static
        or data.output.dtype == "bfloat16"
    ):
        return None
    slopes = _find_slopes(graph, slope, data)
    return None if slopes is None else _construct(read, prelu, data, slopes)


def _find_slopes(graph: Graph, slope: Node, data: Node) -> np.ndarray | None:
    """The slope of every element of the data, where it is constant."""
    shape = tuple(int(dim) for dim in data.output.shape)
    known = graph.constant(slope.id)
    if known is not None:
        return known.reshape(shape)
    repeated = graph.nodes[slope.inputs[0]] if slope.kind is Kind.RESHAPE else slope
    if repeated.op not in ("broadcast_to", "broadcast_to_like") or repeated.output.shape != shape:
        return None
    known = graph.constant(repeated.inputs[0])
    return None if known is None else np.broadcast_to(known, shape)


def _construct(read: ReadFunction, prelu: Node, data: Node, slopes: np.ndarray) -> Replacement | None:
    axis = next((axis for axis in (1, slopes.ndim - 1) if _varies_along(slopes, axis)), None)
    if slopes.size == 0 or axis is None:
        return None
    vector = _along(slopes, axis).ravel()
    span = read.expressions[prelu.id].span

    def construct(new: Callable[[int], Any]) -> Any:
        if (vector == vector[0]).all():
            made = relay.nn.leaky_relu(new(data.id), float(vector[0]))
        else:
            made = relay.nn.prelu(new(data.id), constant(vector, data.output.dtype), axis)
        return relay.Call(made.op, made.args, made.attrs, None, span)

    return construct


def _varies_along(slopes: np.ndarray, axis: int) -> bool:
    """Whether the slopes are the same along every other axis."""
    return 0 <= axis < slopes.ndim and bool((slopes == _along(slopes, axis)).all())


def _along(slopes: np.ndarray, axis: int) -> np.ndarray:
    """The slopes along one axis, at the beginning of all others."""
    first = tuple(slice(None) if other == axis else slice(1) for other in range(slopes.ndim))
    return slopes[first]
