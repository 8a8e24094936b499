"""Names of ONNX values when values become other values.

A value that is aliased away gives its readers the name of the value that replaces it. Some names
must survive: those of the model's outputs, and those that branches and loop bodies take from
outside. The producer of the replacement takes over such a name; what is left gets an ``Identity``:
the second of two names of one value, and a new name for an input or a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import ANCHOR_KINDS, Kind
from tvm_fuse.onnx.graph import OnnxGraph, captured_names

__all__ = ["Names", "Renaming", "plan_renaming"]


class Names:
    """The names in a graph and its subgraphs; new ones are none of them.

    Args:
        graph: ``onnx.GraphProto``.
    """

    def __init__(self, graph: Any) -> None:
        self._taken = set(_all_names(graph))

    def fresh(self, base: str) -> str:
        """A new name: ``base``, or ``base`` with a number after it."""
        name, count = base, 0
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def _all_names(graph: Any) -> Iterator[str]:
    """Names of values and of nodes."""
    for part in (graph.input, graph.output, graph.value_info, graph.initializer):
        yield from (item.name for item in part)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
        for entry in node.attribute:
            if entry.HasField("g"):
                yield from _all_names(entry.g)


@dataclass(frozen=True)
class Renaming:
    """New names of the values of a graph.

    Args:
        inputs: Old name -> name that its readers read.
        outputs: Old name -> name under which its producer writes it.
        copies: New name -> further names of the same value.
        names: Names in use, from which those of new nodes are made.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    copies: Mapping[str, tuple[str, ...]]
    names: Names

    def apply(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """The nodes with the new names, each followed by the copies of its outputs."""
        renamed = [self._rename(node) for node in nodes]
        produced = {name for node in renamed for name in node.output}
        for name in sorted(self.copies.keys() - produced):  # inputs and initializers
            yield from self._copy(name)
        for node in renamed:
            yield node
            for name in node.output:
                yield from self._copy(name)

    def _rename(self, node: Any) -> Any:
        renamed = onnx.NodeProto()
        renamed.CopyFrom(node)
        renamed.input[:] = [self.inputs.get(name, name) for name in node.input]
        renamed.output[:] = [self.outputs.get(name, name) for name in node.output]
        return renamed

    def _copy(self, name: str) -> Iterator[Any]:
        for copy in self.copies.get(name, ()):
            yield helper.make_node("Identity", [name], [copy], name=self.names.fresh(f"{copy}/Identity"))


def plan_renaming(read: OnnxGraph, aliases: Mapping[int, int], names: Names) -> Renaming:
    """Give every value that is left after some aliases its name.

    Args:
        read: The model and its graph.
        aliases: Core id -> core id of the value that replaces it.
        names: Names in use.

    Returns:
        The new names.

    Raises:
        InternalError: A value that is needed has no name, or aliases run in a circle.
    """
    holders = _holders(read, aliases)
    roots = {name: _root(node, aliases, read) for node, name in enumerate(read.values) if name}
    claims: dict[int, list[str]] = {}
    for name in _kept_names(read):
        if name in roots:  # the others are results of Identity nodes, which stay
            claims.setdefault(roots[name], []).append(name)
    claimed = {name for claim in claims.values() for name in claim}
    final: dict[int, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    for name, node in holders.items():
        claim = claims.get(node, [])
        final[node] = name
        if name not in claim and not _is_given(read, node):
            final[node] = claim[0] if claim else names.fresh(name) if name in claimed else name
        others = tuple(other for other in claim if other != final[node])
        if others:
            copies[final[node]] = others
    for name, root in roots.items():
        if root not in final:
            raise InternalError(f"value {name!r} is to be {read.graph.nodes[root]}, which has no name")
    inputs = {name: final[root] for name, root in roots.items()}
    outputs = {
        name: final[holders[name]] if name in holders else names.fresh(f"{name}_unused") for name in roots
    }
    return Renaming(inputs, outputs, copies, names)


def _holders(read: OnnxGraph, aliases: Mapping[int, int]) -> dict[str, int]:
    """Name -> the core node that holds it after the aliases, if there is one.

    When the end of a layer's ONNX node is aliased away (a bias add), what is left of the node holds its name.
    """
    left: dict[int, int] = {}
    for node, source in zip(read.graph.nodes, read.sources):
        is_layer = node.kind in ANCHOR_KINDS or source in left
        if source is not None and is_layer and node.kind is not Kind.CONSTANT and node.id not in aliases:
            left[source] = node.id
    holders = {}
    for node_id, name in enumerate(read.values):
        source = read.sources[node_id]
        holder = node_id if node_id not in aliases else None if source is None else left.get(source)
        if name and holder is not None:
            holders[name] = holder
    return holders


def _kept_names(read: OnnxGraph) -> list[str]:
    """Names that others know: the model's outputs, then what subgraphs capture."""
    graph = read.parts.structure.graph
    captured = set().union(*map(captured_names, graph.node))
    return list(dict.fromkeys([*(value.name for value in graph.output), *sorted(captured)]))


def _root(node: int, aliases: Mapping[int, int], read: OnnxGraph) -> int:
    start, steps = node, 0
    while node in aliases:
        node, steps = aliases[node], steps + 1
        if steps > len(aliases):
            raise InternalError(f"the aliases of {read.graph.nodes[start]} run in a circle")
    return node


def _is_given(read: OnnxGraph, node: int) -> bool:
    """Whether a value is an input or a constant, which keep their names."""
    return read.sources[node] is None or read.graph.nodes[node].kind is Kind.CONSTANT
