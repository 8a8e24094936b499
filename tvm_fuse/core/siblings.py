"""Layers side by side on one value that could be one layer.

::

    x -> conv2d(Wa) -> add(a) -> relu ->            x -> conv2d([Wa; Wb]) -> add([a; b]) -> relu -> part a ->
      -> conv2d(Wb) -> add(b) -> relu ->                                                         -> part b ->

Weights lie in a row along their output channels, and so do the constants of what follows every layer in the
same way (a bias, an activation). These operators are *rows*: one operator of each branch. Rows end where the
branches differ, or where a value is read beside the branch. A reshape that keeps the channels last may be
among them; it comes last in the combined branch, so that a bias behind it joins the layer's kernel.
Every result keeps its formula and its operands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_fuse.core.chain import MOST_OPERATORS
from tvm_fuse.core.dtypes import FLOATS
from tvm_fuse.core.families.family import Condition, result_is_static
from tvm_fuse.core.graph import (
    ANCHOR_KINDS,
    ELEMENTWISE_KINDS,
    VIEW_KINDS,
    Array,
    BiasAddAttrs,
    ConvAttrs,
    Dim,
    Graph,
    Kind,
    Node,
    PReluAttrs,
)
from tvm_fuse.core.layout import axis_index
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.weights import output_axes

__all__ = [
    "CONDITIONS",
    "Siblings",
    "check_alike",
    "check_layer",
    "find_readers",
    "join_constants",
    "make_siblings",
]

#: Kinds that may follow every branch, whose attributes the graph holds.
_STEPS = ELEMENTWISE_KINDS - {Kind.ELEMENTWISE, Kind.BROADCAST_TO}
_COMMUTATIVE = frozenset({Kind.ADD, Kind.MULTIPLY, Kind.MAXIMUM, Kind.MINIMUM})


@dataclass(frozen=True)
class Siblings:
    """Branches that can be one.

    Args:
        source: Id of the value that all layers read.
        rows: Ids of one operator of each branch, in the order of the branches; the layers first, the results
            last.
        axes: For each row, the axis of its values along which the branches lie.
        sizes: Each branch's channels.
        parts: Id of the tuple whose fields the results are, one after another, in order; None where they are
            read one by one.
    """

    source: int
    rows: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the layers."""
        return self.rows[0]

    @property
    def results(self) -> tuple[int, ...]:
        """Ids of the values that leave."""
        return self.rows[-1]

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Ids of the operators of each branch."""
        return tuple(zip(*self.rows))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each branch begins along the axis."""
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))


# --- conditions ----------------------------------------------------------------------------------


def weight_is_constant(graph: Graph, node: Node) -> Reason | None:
    """Weights can be laid in a row before the model runs."""
    weight = graph.nodes[node.inputs[1]]
    if weight.kind is Kind.CONSTANT:
        return None
    return Reason(Code.WEIGHT_NOT_CONSTANT, str(node), "a constant weight", f"computed by {weight}")


def channels_are_one_group(graph: Graph, node: Node) -> Reason | None:
    """Every output channel reads every input channel."""
    if not isinstance(node.attrs, ConvAttrs) or node.attrs.groups == 1:
        return None
    return Reason(Code.SIBLING_GROUPED, str(node), "one group of channels", f"{node.attrs.groups} groups")


def values_are_floats(graph: Graph, node: Node) -> Reason | None:
    """Data, weights and results are floats of one type; a quantized layer has scales of its own."""
    dtypes = {graph.nodes[source].output.dtype for source in node.inputs} | {node.output.dtype}
    if len(dtypes) == 1 and dtypes <= set(FLOATS):
        return None
    return Reason(Code.SIBLING_DTYPE, str(node), "one floating-point type", ", ".join(sorted(dtypes)))


def layout_is_plain(graph: Graph, node: Node) -> Reason | None:
    """The output channels are one axis of the weights, and of the result."""
    if len(output_axes(node) or ()) == 1 and axis_index(node.attrs.kernel_layout, "O") is not None:
        return None
    wanted = "output channels on one axis"
    return Reason(Code.WEIGHT_LAYOUT_UNSUPPORTED, str(node), wanted, node.attrs.kernel_layout)


#: What a layer must be to have siblings, tried in order.
CONDITIONS: tuple[Condition, ...] = (
    result_is_static,
    weight_is_constant,
    values_are_floats,
    channels_are_one_group,
    layout_is_plain,
)


def check_layer(graph: Graph, node: Node) -> Reason | None:
    """The first condition that a layer does not meet."""
    reasons = (condition(graph, node) for condition in CONDITIONS)
    return next((reason for reason in reasons if reason is not None), None)


def check_alike(graph: Graph, node: Node, first: Node) -> Reason | None:
    """Whether two layers of one value, both sound, differ in nothing but their output channels."""
    wanted, got = _form(graph, first), _form(graph, node)
    if wanted == got:
        return None
    return Reason(
        Code.SIBLINGS_DIFFER, str(node), f"{_describe(graph, first)}, as {first}", _describe(graph, node)
    )


def _form(graph: Graph, node: Node) -> tuple[object, ...]:
    weight = graph.nodes[node.inputs[1]].output
    attrs = replace(node.attrs, channels=0) if isinstance(node.attrs, ConvAttrs) else node.attrs
    axis = _weight_axis(node)
    return node.op, attrs, weight.shape[:axis] + weight.shape[axis + 1 :], weight.dtype


def _describe(graph: Graph, node: Node) -> str:
    weight = graph.nodes[node.inputs[1]].output
    text = f"{node.op} of {weight} weights"
    if not isinstance(node.attrs, ConvAttrs):
        return text
    strides, padding = (",".join(map(str, sizes)) for sizes in (node.attrs.strides, node.attrs.padding))
    return f"{text}, strides {strides}, padding {padding}"


def _weight_axis(node: Node) -> int:
    axis = axis_index(node.attrs.kernel_layout, "O")
    assert axis is not None  # layout_is_plain
    return axis


# --- finding -------------------------------------------------------------------------------------


def find_readers(graph: Graph) -> tuple[tuple[Node, ...], ...]:
    """Layers that read one value, two or more at a time, in topological order.

    Views that give one value the same shape give the same value.
    """
    found: dict[object, list[Node]] = {}
    for node in graph.of_kind(*sorted(ANCHOR_KINDS)):
        root, shape = node.inputs[0], graph.nodes[node.inputs[0]].output.shape
        while graph.nodes[root].kind in VIEW_KINDS and graph.nodes[root].output.is_static:
            root = graph.nodes[root].inputs[0]
        if graph.nodes[root].kind is not Kind.CONSTANT:
            found.setdefault((root, shape), []).append(node)
    return tuple(tuple(nodes) for nodes in found.values() if len(nodes) > 1)


def make_siblings(graph: Graph, layers: Sequence[int]) -> Siblings:
    """Lay layers in a row, and what follows all of them in the same way.

    Args:
        graph: The graph.
        layers: Ids of two or more layers of one value that pass ``check_layer`` and ``check_alike``.

    Returns:
        The branches. Where one concatenation reads all results, they have its order.
    """
    nodes = [graph.nodes[layer] for layer in layers]
    (axis,) = output_axes(nodes[0]) or ()
    rows, axes = _grow_rows(graph, tuple(layers), axis)
    parts, order = _find_parts(graph, rows[-1], axes[-1])
    sizes = tuple(int(node.output.shape[axis]) for node in nodes)
    return Siblings(
        source=min(node.inputs[0] for node in nodes),
        rows=tuple(tuple(row[index] for index in order) for row in rows),
        axes=axes,
        sizes=tuple(sizes[index] for index in order),
        parts=parts,
    )


def _grow_rows(
    graph: Graph, layers: tuple[int, ...], axis: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    rows, axes, whole = [layers], [axis], 1
    while len(rows) < MOST_OPERATORS:
        row = _next_row(graph, rows, axes)
        if row is None:
            break
        axes.append(axes[-1] if graph.nodes[row[0]].kind not in VIEW_KINDS else _last(graph.nodes[row[0]]))
        rows.append(row)
        if not _leave_early(graph, rows):
            whole = len(rows)
    return tuple(rows[:whole]), tuple(axes[:whole])


def _leave_early(graph: Graph, rows: Sequence[tuple[int, ...]]) -> bool:
    """Whether a value before the last row is read outside."""
    inside = {node for row in rows for node in row}
    early = [node for row in rows[:-1] for node in row]
    return any(graph.is_output(node) or not inside.issuperset(graph.readers(node)) for node in early)


def _next_row(graph: Graph, rows: list[tuple[int, ...]], axes: list[int]) -> tuple[int, ...] | None:
    """Operators that follow every branch in the same way, the earliest of the first branch."""
    places = [{row[branch]: index for index, row in enumerate(rows)} for branch in range(len(rows[0]))]
    for first in _followers(graph, places[0]):
        pattern = _pattern(graph, first, places[0])
        if pattern is None or not _keeps_channels(graph, first, places[0], axes):
            continue
        row = [first.id]
        for place in places[1:]:
            alike = (
                node.id
                for node in _followers(graph, place)
                if _pattern(graph, node, place) == pattern and _keeps_channels(graph, node, place, axes)
            )
            row += [node for node in alike][:1]
        is_shaped = any(graph.nodes[earlier[0]].kind in VIEW_KINDS for earlier in rows)
        if len(row) == len(places) and _constants_fit(graph, row, axes[-1], is_shaped):
            return tuple(row)
    return None


def _followers(graph: Graph, place: dict[int, int]) -> list[Node]:
    found = {reader for node in place for reader in graph.readers(node) if reader not in place}
    return [graph.nodes[node] for node in sorted(found)]


def _pattern(graph: Graph, node: Node, place: dict[int, int]) -> tuple[object, ...] | None:
    """What an operator does, and the rows of its operands (constants: -1); None where it reads others."""
    constants = [source for source in node.inputs if graph.nodes[source].kind is Kind.CONSTANT]
    operands = [-1 if source in constants else place.get(source, -2) for source in node.inputs]
    if -2 in operands or len(constants) > 1 or node.kind not in _STEPS | VIEW_KINDS:
        return None
    if node.kind in _COMMUTATIVE:
        operands.sort()
    shape = node.output.shape[:-1] if node.kind in VIEW_KINDS else ()
    return node.op, node.attrs, node.output.dtype, tuple(operands), shape


def _keeps_channels(graph: Graph, node: Node, place: dict[int, int], axes: list[int]) -> bool:
    """Elementwise operators keep the shape; views move only axes before the channels, the last axis."""
    sources = [graph.nodes[source] for source in node.inputs if source in place]
    if node.kind not in VIEW_KINDS:
        return all(source.output.shape == node.output.shape for source in sources) and all(
            axes[place[source.id]] == axes[-1] for source in sources
        )
    (source,) = sources
    is_last = axes[place[source.id]] == _last(source)
    return is_last and bool(node.output.shape) and source.output.shape[-1] == node.output.shape[-1]


def _last(node: Node) -> int:
    return len(node.output.shape) - 1


def _find_parts(graph: Graph, results: tuple[int, ...], axis: int) -> tuple[int | None, tuple[int, ...]]:
    """The tuple of a concatenation that has all results side by side, and their order in it."""
    order = tuple(range(len(results)))
    readers = {reader for result in results for reader in graph.readers(result)}
    reader = graph.nodes[min(readers)] if len(readers) == 1 else None
    if reader is None or reader.kind is not Kind.TUPLE or any(map(graph.is_output, (*results, reader.id))):
        return None, order
    joined = [graph.nodes[node] for node in graph.readers(reader.id)]
    places = [reader.inputs.index(result) for result in results]
    is_whole = all(reader.inputs.count(result) == 1 for result in results)
    along = all(node.kind is Kind.CONCATENATE and node.attrs.axis == axis for node in joined)
    if not (joined and along and is_whole and max(places) - min(places) == len(results) - 1):
        return None, order
    return reader.id, tuple(sorted(order, key=places.__getitem__))


# --- constants -----------------------------------------------------------------------------------


def join_constants(graph: Graph, siblings: Siblings, row: int) -> Array | None:
    """The constant operand of a row of the combined branch.

    Args:
        graph: The graph.
        siblings: Its branches.
        row: Index of a row.

    Returns:
        The weights for row 0, else a constant that broadcasts along the channels; dtype as in the branches
        (bfloat16 as its bits). None where the row has no constant.
    """
    nodes = [graph.nodes[node] for node in siblings.rows[row]]
    arrays = [array for array in (_constant_of(graph, node) for node in nodes) if array is not None]
    if not arrays:
        return None
    if row == 0:
        return np.concatenate(arrays, axis=_weight_axis(nodes[0]))
    if isinstance(nodes[0].attrs, (BiasAddAttrs, PReluAttrs)):
        return np.concatenate(arrays)
    if all(array.size == 1 and array.tobytes() == arrays[0].tobytes() for array in arrays):
        return arrays[0]
    axis, rank = siblings.axes[row], len(nodes[0].output.shape)
    joined = np.concatenate(
        [_spread(array, rank, axis, size) for array, size in zip(arrays, siblings.sizes)], axis=axis
    )
    leading = next(index for index in range(axis + 1) if index == axis or joined.shape[index] != 1)
    return joined.reshape(joined.shape[leading:])


def _constant_of(graph: Graph, node: Node) -> Array | None:
    return next((graph.constants[source] for source in node.inputs if source in graph.constants), None)


def _spread(array: Array, rank: int, axis: int, size: int) -> Array:
    padded = array.reshape((1,) * (rank - array.ndim) + array.shape)
    return np.broadcast_to(padded, (*padded.shape[:axis], size, *padded.shape[axis + 1 :]))


def _constants_fit(graph: Graph, row: Collection[int], axis: int, is_shaped: bool) -> bool:
    """Whether the constants of a row differ in size along the channels only.

    Behind a reshape they may have no other axis, and the operator must not name one.
    """
    forms: set[tuple[Dim, ...]] = set()
    for node in map(graph.nodes.__getitem__, row):
        array = _constant_of(graph, node)
        if array is None:
            forms.add(())
        elif isinstance(node.attrs, (BiasAddAttrs, PReluAttrs)):
            if is_shaped or node.attrs.axis != axis or array.shape != (node.output.shape[axis],):
                return False
            forms.add((1,))
        else:
            shape = (1,) * (len(node.output.shape) - array.ndim) + array.shape
            forms.add(shape[:axis] + shape[axis + 1 :])
    return len(forms) == 1 and not (is_shaped and any(size != 1 for form in forms for size in form))
