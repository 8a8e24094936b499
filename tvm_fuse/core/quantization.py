"""Quantization written as operators: what TVM makes of ``qnn.quantize`` and ``qnn.requantize``.

::

    quantize     float -> divide -> round -> [add a zero point] -> clip -> cast -> integer
    requantize   int32 -> fixed_point_multiply -> [add a zero point] -> clip -> cast -> integer

Each is a run of elementwise operators with one reader each. A ``qnn.dequantize`` is up to four of them (cast,
subtract, cast, multiply) and has no name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_fuse.core.graph import Graph

__all__ = ["Quantization", "match_quantization"]

#: Name -> its operators, each with the names that it goes by, and whether it may be missing.
_RUNS = {
    "quantize": ((("divide",), False), (("round",), False)),
    "requantize": ((("cast",), True), (("fixed_point_multiply", "fixed_point_multiply_per_axis"), False)),
}
#: How both end: in the bounds of an integer type.
_END = ((("add",), True), (("clip",), False), (("cast",), False))
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")


@dataclass(frozen=True)
class Quantization:
    """A run that was found: its operators in topological order, the last is the result."""

    name: str
    nodes: tuple[int, ...]


def match_quantization(graph: Graph, value: int) -> Quantization | None:
    """Find a quantization of a value, and of nothing else.

    Args:
        graph: The graph.
        value: Id of the node whose output is quantized.

    Returns:
        The run, or None; every value before its last is read inside it only.
    """
    for name, start in _RUNS.items():
        nodes = _follow(graph, value, (*start, *_END))
        if nodes is not None and graph.nodes[nodes[-1]].output.dtype in _INTEGERS:
            return Quantization(name, nodes)
    return None


def _follow(
    graph: Graph, value: int, run: tuple[tuple[tuple[str, ...], bool], ...]
) -> tuple[int, ...] | None:
    """The operators of a run that starts at the one reader of a value."""
    nodes: list[int] = []
    for operators, is_optional in run:
        readers = graph.readers(value)
        is_next = len(readers) == 1 and not graph.is_output(value) and graph.nodes[readers[0]].op in operators
        if is_next:
            value = readers[0]
            nodes.append(value)
        elif not is_optional:
            return None
    return tuple(nodes)
