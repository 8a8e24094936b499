"""Which kernel a tuned record is for: a digest of a chain, and a key of a device.

A digest is 12 hexadecimal digits over operators, attributes, shapes, dtypes, layouts and the scalars inside
the kernel. Names and weights do not count, so a record serves every model with the same chain.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from tvm_fuse.core.graph import Graph, Kind
from tvm_fuse.core.plan_file import describe_graph

__all__ = ["chain_digest", "describe_chain", "device_key"]

_DIGITS = 12


def describe_chain(graph: Graph, attributes: Mapping[int, str]) -> tuple[str, ...]:
    """A chain as text, one line a node.

    Args:
        graph: The graph of the kernel alone: its operands are inputs.
        attributes: Node id -> attributes as the front end writes them, for operators whose attributes the
            graph does not hold.

    Returns:
        The lines; those of scalars have their value.
    """
    lines = list(describe_graph(graph))
    for node in graph.nodes:
        if attributes.get(node.id):
            lines[node.id] += f" {attributes[node.id]}"
        value = graph.constant(node.id) if node.kind is Kind.CONSTANT else None
        if value is not None and value.ndim == 0:
            lines[node.id] += f" = {value.item()!r}"
    return tuple(lines)


def chain_digest(lines: Iterable[str]) -> str:
    """The digest of a chain, from ``describe_chain``."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def device_key(kind: str, name: str, cores: int = 0) -> str:
    """What a measured time is true of, as the name of a folder.

    Args:
        kind: Kind of the target, such as ``llvm`` or ``cuda``.
        name: Architecture of a GPU, LLVM name of a CPU.
        cores: Cores of the CPU; 0 where they are not known or do not count.

    Returns:
        Such as ``cuda-sm_80`` or ``llvm-cascadelake-2cores``.
    """
    parts = [kind, name or "generic", *([f"{cores}cores"] if cores else [])]
    return "-".join(re.sub(r"[^A-Za-z0-9_.+]", "_", part) for part in parts)
