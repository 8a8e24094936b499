"""Batch norms that an exporter wrote as operators become ``BatchNormalization`` nodes.

::

    Sub(x, mean) -> Mul(1 / Sqrt(variance + epsilon)) -> Mul(gamma) -> Add(beta) -> y
    BatchNormalization(x, gamma, beta, mean, variance; epsilon) -> y

``core/recompose.py`` finds them as long as nobody has evaluated their constants. Here is what ONNX
asks for: channels are axis 1, and the parameters have the dtype of x. Opset 15 allows others, which TVM's
importer does not; where x cannot hold the numbers, the operators stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onnx import helper

from tvm_fuse.core.dtypes import Array, holds, narrow
from tvm_fuse.core.recompose import Recomposition, plan_recompositions
from tvm_fuse.onnx.graph import OnnxGraph, read_graph
from tvm_fuse.onnx.names import Names
from tvm_fuse.onnx.parts import Parts, make_header, opset_version, replace_nodes
from tvm_fuse.onnx.prune import remove_dead, verify

__all__ = ["recompose_parts"]

_BFLOAT16_SINCE = 14  # opset from which BatchNormalization takes bfloat16


def recompose_parts(parts: Parts) -> tuple[Parts, tuple[Recomposition, ...]]:
    """Make batch norms of the operators that compute one, until none is left.

    Args:
        parts: A valid model in inference mode, taken apart; it is not changed.

    Returns:
        The new model (the same object when there is nothing to do), and what was found, with the names of
        the new nodes; the ids are those of the graph at the time.

    Raises:
        ModelError: The shapes of the model cannot be inferred.
    """
    found: list[Recomposition] = []
    while True:
        read = read_graph(remove_dead(parts))
        records = [record for record in plan_recompositions(read.graph)[0] if _is_possible(read, record)]
        if not records:
            return parts, tuple(found)
        after, named = _write(read, records)
        verify(parts, after)
        parts = after
        found += named


def _is_possible(read: OnnxGraph, record: Recomposition) -> bool:
    """Whether a node can say it; where the bias inside a ``Conv`` is the mean, the data has no name."""
    dtype = read.graph.nodes[record.data].output.dtype
    is_known = dtype != "bfloat16" or opset_version(read.parts.structure) >= _BFLOAT16_SINCE
    return record.axis == 1 and bool(read.values[record.data]) and is_known and holds(dtype, record.dtype)


def _write(read: OnnxGraph, records: Sequence[Recomposition]) -> tuple[Parts, list[Recomposition]]:
    """Put a batch norm in the place of the last operator of each record; the others are dead then."""
    nodes = list(read.parts.structure.graph.node)
    names = Names(read.parts.structure.graph)
    headers: list[Any] = []
    arrays: dict[str, Array] = {}
    named = []
    for record in records:
        source = read.sources[record.result]
        assert source is not None
        result = nodes[source].output[0]
        record = replace(record, name=record.name or names.fresh(f"{result}/BatchNormalization"))
        inputs = [read.values[record.data]]
        dtype = read.graph.nodes[record.data].output.dtype
        for role in ("gamma", "beta", "mean", "variance"):
            inputs.append(names.fresh(f"{result}_{role}"))
            arrays[inputs[-1]] = narrow(getattr(record, role), dtype)
            headers.append(make_header(inputs[-1], dtype, arrays[inputs[-1]].shape))
        nodes[source] = helper.make_node(
            "BatchNormalization", inputs, [result], name=record.name, epsilon=record.epsilon
        )
        named.append(record)
    return remove_dead(replace_nodes(read.parts, nodes, headers, arrays)), named
