"""Joined kernels: more than one heavy operator in one kernel, where a target's schedules can.

Two families, keys of ``Capability.joined``::

    gate            product -> elementwise -> product -> elementwise, one value a channel (squeeze-and-excite)
    normalization   elementwise -> reductions of rows and elementwise between them -> elementwise (layer norm)

All heavy operators but the last are *absorbed*: computed inside, by what the last one's schedule knows of
them (``schedules/cuda_gate.py``, ``schedules/cuda_rows.py``). Whether a legal join pays is for
``PlanOptions.accept``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from tvm_fuse.core.graph import ELEMENTWISE_KINDS, ConvAttrs, Dim, Graph, Kind, Node, ReduceAttrs
from tvm_fuse.core.group import FusionGroup, make_group
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.region import find_region

__all__ = [
    "MOST_HIDDEN",
    "MOST_IMAGES",
    "RowJoin",
    "check_join",
    "find_row_join",
    "is_like_a_gate",
    "is_used_in_rows",
    "join_gate",
]

#: Hidden values of a gate: each block keeps all of them in shared memory, 4 KiB at most.
MOST_HIDDEN = 1024
#: Images of a gate: with more, a blocked product reads each weight fewer times.
MOST_IMAGES = 7
#: Operators after a reduction that may join it, and evaluations of operators for one element.
_MOST_AFTER, _MOST_EVALUATIONS = 16, 64


def join_gate(graph: Graph, first: FusionGroup, second: FusionGroup) -> FusionGroup | Reason:
    """One group of two products, the second of which reads the first group's result.

    Args:
        graph: The graph.
        first: A group around a product; its result is an operand of ``second``'s anchor.
        second: A group around a product.

    Returns:
        The group of both, or the first condition that does not hold.
    """
    assert first.anchor is not None
    assert second.anchor is not None
    inner, outer = graph.nodes[first.anchor], graph.nodes[second.anchor]
    reason = _are_a_gate(graph, inner, outer) or _result_is_private(graph, first, outer)
    if reason is not None:
        return reason
    before = tuple(sorted({*first.nodes, *second.prologue} - {inner.id}))
    group = make_group(
        graph, outer.id, {*first.nodes, *second.nodes}, second.result, second.steps, before, (inner.id,),
        second.end,
    )  # fmt: skip
    return replace(group, name=f"{first.name}_{second.name}")


@dataclass(frozen=True)
class RowJoin:
    """Reductions of rows in one kernel.

    Args:
        anchor: Id of the last reduction.
        nodes: Ids of all operators, in topological order.
        result: Id of the one whose value leaves the kernel.
        absorbed: Ids of the other reductions.
        end: Why the kernel ends at its result.
    """

    anchor: int
    nodes: tuple[int, ...]
    result: int
    absorbed: tuple[int, ...]
    end: Reason | None = field(default=None, compare=False)


def find_row_join(graph: Graph, reduction: Node, taken: Collection[int] = ()) -> RowJoin | Reason:
    """What can be computed with a reduction whose result is used along its row.

    Args:
        graph: The graph.
        reduction: A node of kind ``REDUCE``, the last of its kernel.
        taken: Ids that belong to other groups.

    Returns:
        The operators, or why there are none.
    """
    reason = _reduces_rows(graph, reduction) or _is_float32(graph, reduction)
    if reason is not None:
        return reason
    data = graph.nodes[reduction.inputs[0]].output.shape
    result, end = _last_along_row(graph, reduction, data, taken)

    def joins(node: Node) -> bool:
        is_row = node.kind is Kind.REDUCE and _same_rows(graph, node, reduction)
        return node.id not in taken and node.output.is_static and (is_row or node.kind in _BETWEEN)

    inputs = graph.nodes[result].inputs
    region = find_region(graph, (result,), inputs, joins, _MOST_EVALUATIONS)
    nodes = (*region, result)
    if reduction.id not in nodes:
        return Reason(Code.RESULT_SHARED, str(reduction), "statistics that only their row reads", "others")
    heavy = [node for node in nodes if graph.nodes[node].kind is Kind.REDUCE]
    if heavy[-1] != reduction.id:
        last = str(graph.nodes[heavy[-1]])
        return Reason(Code.OPERATOR_ALONE, str(reduction), "the last reduction of its rows", last)
    if result == reduction.id and len(heavy) == 1:
        return end
    return RowJoin(reduction.id, nodes, result, tuple(heavy[:-1]), end)


def is_used_in_rows(graph: Graph, reduction: Node) -> bool:
    """Whether operators read a reduction that could be in its kernel on some target, if all else fits."""
    return any(graph.nodes[reader].kind in _BETWEEN for reader in graph.readers(reduction.id))


def is_like_a_gate(graph: Graph, inner: Node, outer: Node) -> bool:
    """Whether two products have one value a channel; what else a gate needs, ``join_gate`` says."""
    return all(
        node.kind in (Kind.DENSE, Kind.CONV2D) and node.output.is_static and _is_one_pixel(node)
        for node in (inner, outer)
    )


#: No reshape: TVM's schedule of reductions for CPUs, where a plan for CUDA is checked, knows none beside one.
_BETWEEN = ELEMENTWISE_KINDS | {Kind.EXPAND_DIMS}


def _last_along_row(
    graph: Graph, reduction: Node, data: tuple[Dim, ...], taken: Collection[int]
) -> tuple[int, Reason]:
    """The last of the operators that read one another after a reduction and keep to its rows, and why."""
    result = reduction
    count = len(data) - len(reduction.attrs.axes)
    one_a_row = (*data[:count], *(1 for _ in reduction.attrs.axes))
    for _ in range(_MOST_AFTER):
        reason = _has_one_reader(graph, result)
        if reason is not None:
            return result.id, reason
        value = graph.nodes[graph.readers(result.id)[0]]
        at = str(value)
        if value.id in taken:
            return result.id, Reason(Code.READER_IN_OTHER_CHAIN, at, "an operator in no group", "taken")
        if value.kind not in _BETWEEN:
            return result.id, Reason(Code.READER_NOT_ELEMENTWISE, at, "an elementwise operator", value.op)
        before, after = result.output.shape, value.output.shape
        spreads = after == data and before == one_a_row
        if not value.output.is_static or (
            not spreads and math.prod(_sizes(result)) != math.prod(_sizes(value))
        ):
            wanted = f"results of the rows {list(data)}, or one for each"
            return result.id, Reason(Code.RESULT_SHAPE_CHANGES, at, wanted, str(value.output))
        result = value
    wanted = f"at most {_MOST_AFTER} operators after it"
    return result.id, Reason(Code.CHAIN_TOO_LONG, str(reduction), wanted, "more")


def check_join(graph: Graph, group: FusionGroup) -> tuple[str, str] | None:
    """What is wrong with a group that has absorbed operators: what was wanted, and what was there."""
    assert group.anchor is not None
    anchor, inner = graph.nodes[group.anchor], [graph.nodes[node] for node in group.absorbed]
    heavy = {anchor.id, *group.absorbed}
    for node in (graph.nodes[member] for member in group.nodes if member not in heavy):
        if node.kind not in _BETWEEN:
            return (
                f"elementwise operators beside {anchor.op}",
                f"{node} ({node.op})",
            )
    reason = _reduces_rows(graph, anchor) if anchor.kind is Kind.REDUCE else None
    if anchor.kind is Kind.REDUCE:
        others = [node for node in inner if not _same_rows(graph, node, anchor)]
        return ("reductions of the same rows", f"{others[0]}") if others else _pair(reason)
    if len(inner) != 1:
        return "one product before another", f"{len(inner)}"
    return _pair(_are_a_gate(graph, inner[0], anchor))


def _pair(reason: Reason | None) -> tuple[str, str] | None:
    return None if reason is None else (reason.wanted, f"{reason.at}: {reason.got}")


# --- conditions, each named as the statement that must hold -------------------------------------------


def _has_one_reader(graph: Graph, node: Node) -> Reason | None:
    readers = sorted(set(graph.readers(node.id)))
    if graph.is_output(node.id):
        return Reason(Code.RESULT_RETURNED, str(node), "a value that only its rows read", "a model output")
    if len(readers) == 1:
        return None
    names = ", ".join(str(graph.nodes[reader]) for reader in readers)
    return Reason(Code.RESULT_SHARED, str(node), "one reader", f"{len(readers)}: {names}")


def _are_a_gate(graph: Graph, inner: Node, outer: Node) -> Reason | None:
    for condition in (_is_dense, _is_one_value_a_channel, _is_float32):
        reason = condition(graph, inner) or condition(graph, outer)
        if reason is not None:
            return reason
    return _hidden_values_fit(inner)


def _is_one_value_a_channel(graph: Graph, node: Node) -> Reason | None:
    if node.output.is_static and _is_one_pixel(node) and _sizes(node)[0] <= MOST_IMAGES:
        return None
    wanted = f"one value a channel, at most {MOST_IMAGES} images"
    return Reason(Code.TARGET_CANNOT_JOIN, str(node), wanted, str(node.output))


def _is_one_pixel(node: Node) -> bool:
    _, channels, *pixels = _sizes(node)
    return channels > 0 and math.prod(pixels) == 1


def _is_float32(graph: Graph, node: Node) -> Reason | None:
    tensors = [graph.nodes[source].output for source in node.inputs] + [node.output]
    others = sorted({tensor.dtype for tensor in tensors} - {"float32"})
    if not others:
        return None
    return Reason(Code.TARGET_CANNOT_JOIN, str(node), "float32", ", ".join(others))


def _is_dense(graph: Graph, node: Node) -> Reason | None:
    attrs = node.attrs
    is_plain = node.kind is Kind.DENSE or (
        node.kind is Kind.CONV2D
        and isinstance(attrs, ConvAttrs)
        and attrs.groups == 1
        and (attrs.data_layout, attrs.kernel_layout) == ("NCHW", "OIHW")
        and math.prod(_sizes(graph.nodes[node.inputs[0]])[2:]) == 1
    )
    if is_plain:
        return None
    wanted = "a dense layer, or a convolution of one pixel (NCHW, no groups)"
    return Reason(Code.TARGET_CANNOT_JOIN, str(node), wanted, f"{node.op}")


def _hidden_values_fit(inner: Node) -> Reason | None:
    hidden = _sizes(inner)[1]
    if hidden <= MOST_HIDDEN:
        return None
    wanted = f"at most {MOST_HIDDEN} values between the products"
    return Reason(Code.TARGET_CANNOT_JOIN, str(inner), wanted, str(hidden))


def _result_is_private(graph: Graph, first: FusionGroup, outer: Node) -> Reason | None:
    readers = graph.readers(first.result)
    if readers == (outer.id,) and not graph.is_output(first.result) and outer.inputs[0] == first.result:
        return None
    wanted = f"a value that only {outer} reads"
    return Reason(Code.RESULT_SHARED, str(graph.nodes[first.result]), wanted, f"{len(readers)} readers")


def _reduces_rows(graph: Graph, node: Node) -> Reason | None:
    rank = len(graph.nodes[node.inputs[0]].output.shape)
    axes = node.attrs.axes if isinstance(node.attrs, ReduceAttrs) else ()
    if axes and axes == tuple(range(rank - len(axes), rank)) and node.output.is_static:
        return None
    wanted = "a reduction over the last axes, of static sizes"
    return Reason(Code.TARGET_CANNOT_JOIN, str(node), wanted, f"axes {list(axes)} of {rank}")


def _sizes(node: Node) -> list[int]:
    """The sizes of a result; 0 for a symbolic one."""
    return [dim if isinstance(dim, int) else 0 for dim in node.output.shape]


def _same_rows(graph: Graph, node: Node, other: Node) -> bool:
    shapes = [graph.nodes[each.inputs[0]].output.shape for each in (node, other)]
    same = _reduces_rows(graph, node) is None and node.attrs.axes == other.attrs.axes
    return same and shapes[0] == shapes[1] and _is_float32(graph, node) is None
