"""The core of an attention: two products with a softmax between them, which stay three kernels, and why.

::

    queries, keys -> product -> scale, mask -> softmax -> product <- values

One kernel would save writing and reading the scores and their softmax. With a block for each row of scores,
as ``schedules/cuda_rows.py`` has, each of these blocks reads all keys and values of its head. Blocks of
several rows would read less, and with a tile of keys at a time, whose sums are corrected as the maximum
grows, no row of scores would have to be whole (Dao et al. 2022, FlashAttention); there is no such schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm_fuse.core.cost import tensor_bytes
from tvm_fuse.core.dtypes import size_bytes
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, MATRIX_KINDS, VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.reason import Code, Decision, Reason, Stage

__all__ = ["Attention", "explain_attention", "find_attention"]

RULE = "attention"

#: What may lie between a product and the softmax, and so many of them.
_BETWEEN = ELEMENTWISE_KINDS | VIEW_KINDS
_MOST_BETWEEN = 16


@dataclass(frozen=True)
class Attention:
    """Ids of the product that gives the scores, of their softmax, and of the product with the values."""

    scores: int
    softmax: int
    mixed: int


def explain_attention(graph: Graph, target: str) -> tuple[Decision, ...]:
    """Why attentions are no single kernels.

    Args:
        graph: The graph.
        target: Kind of target, a key of ``CAPABILITIES``.

    Returns:
        For each attention of static shapes three decisions, one at each product and one at the softmax.
    """
    found = (find_attention(graph, node) for node in graph.of_kind(Kind.SOFTMAX))
    return tuple(d for attention in found if attention for d in _decisions(graph, attention, target))


def find_attention(graph: Graph, softmax: Node) -> Attention | None:
    """The attention around a softmax.

    Args:
        graph: The graph.
        softmax: A node of kind ``SOFTMAX``.

    Returns:
        None where no product of two computed values comes before it, none after it, or sizes are unknown.
    """
    scores, mixed = _product_before(graph, softmax), _product_after(graph, softmax)
    if scores is None or mixed is None:
        return None
    sources = (graph.nodes[source] for node in (scores, mixed) for source in node.inputs)
    if not all(node.output.is_static for node in (softmax, scores, mixed, *sources)):
        return None
    return Attention(scores.id, softmax.id, mixed.id)


def _product_before(graph: Graph, softmax: Node) -> Node | None:
    pending, seen = list(softmax.inputs), set(softmax.inputs)
    while pending and len(seen) <= _MOST_BETWEEN:
        node = graph.nodes[pending.pop()]
        if _multiplies_values(graph, node):
            return node
        if node.kind in _BETWEEN:
            pending += [source for source in node.inputs if source not in seen]
            seen.update(node.inputs)
    return None


def _product_after(graph: Graph, softmax: Node) -> Node | None:
    value = softmax
    for _ in range(_MOST_BETWEEN):
        readers = set(graph.readers(value.id))
        if len(readers) != 1 or graph.is_output(value.id):
            return None
        before, value = value, graph.nodes[readers.pop()]
        if _multiplies_values(graph, value):
            return value if value.inputs[0] == before.id else None
        if value.kind not in _BETWEEN:
            return None
    return None


def _multiplies_values(graph: Graph, node: Node) -> bool:
    """Whether it is a product of two values that are computed, no layer with weights."""
    is_product = node.kind in MATRIX_KINDS
    return is_product and all(graph.nodes[source].kind is not Kind.CONSTANT for source in node.inputs[:2])


def _decisions(graph: Graph, attention: Attention, target: str) -> Iterator[Decision]:
    stage, reason = _why_apart(graph, attention, target)
    for node in (attention.scores, attention.softmax, attention.mixed):
        yield Decision(RULE, str(graph.nodes[node]), stage, reason, node=node, matched=3)


def _why_apart(graph: Graph, attention: Attention, target: str) -> tuple[Stage, Reason]:
    scores, softmax, mixed = (
        graph.nodes[node] for node in (attention.scores, attention.softmax, attention.mixed)
    )
    rows, columns = (int(dim) for dim in scores.output.shape[-2:])
    saved = 2 * (tensor_bytes(scores.output) + tensor_bytes(softmax.output))
    operands = (graph.nodes[node.inputs[1]].output for node in (scores, mixed))
    again = (rows - 1) * sum(map(tensor_bytes, operands))
    stage = Stage.CONDITION
    wanted = "a schedule for two products and the softmax between them"
    got = f"none for {target}; it would save 2 launches and {_megabytes(saved)} of scores"
    if target == "cuda" and again > saved:
        stage = Stage.COST
        wanted = f"less read again than one kernel saves, {_megabytes(saved)} of scores"
        got = (
            f"{_megabytes(again)} of keys and values, one block for each of the {rows} rows of a head "
            f"({columns * size_bytes(scores.output.dtype)} bytes of scores in its shared memory)"
        )
    return stage, Reason(Code.ATTENTION_IN_PARTS, str(softmax), wanted, got)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
