"""Layers side by side on one value become one layer, and each reader gets its part.

::

    %1 = nn.dense(%x, Wq)               %1 = nn.dense(%x, [Wq; Wk; Wv])
    %2 = nn.dense(%x, Wk)               %2 = strided_slice(%1, begin=[0], end=[64], axes=[1])
    %3 = nn.dense(%x, Wv)               ...

What follows all of them in the same way is combined, too (``core/siblings.py``). Parts that one concatenation
puts together in their order need no slices. The pass runs before layouts are decided; a combined module has
no siblings left, so it is idempotent.

TVM's CombineParallelConv2D, -Dense and -BatchMatmul do less: no ``bias_add`` and nothing that is read twice
in what follows, three branches by default, always slices, and no estimate of what they cost. With its slices
of mode "size" AlterOpLayout divides by zero on a CPU; ours have ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from tvm_fuse.core.graph import VIEW_KINDS, Node
from tvm_fuse.core.parallel import plan_parallel
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Decision
from tvm_fuse.core.siblings import Siblings, join_constants
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.constant_pass import fold_constants
from tvm_fuse.relay.device import accept_for
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.partition_pass import dissolve_groups, target_kind
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.record import PassRecord, record
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_function

__all__ = ["combine_parallel"]

#: Attributes that hold the number of output channels.
_CHANNELS = ("channels", "units")


def combine_parallel(module: Any, target: Any = None, options: PlanOptions | None = None) -> Any:
    """Combine layers that read one value, where that is legal and pays.

    Args:
        module: A Relay module whose parameters are constants, batch norms folded; groups made by
            ``partition_chains`` are dissolved.
        target: The ``tvm.target.Target`` that it will be built for; None takes the options as they are.
        options: How to plan. Where ``target`` is given, it replaces theirs, and where they have no
            ``accept``, the cost model of its device decides what pays.

    Returns:
        The type-inferred module; ``last_report()["CombineParallel"]`` holds the ``Siblings`` and a decision
        for the layers of each value that two or more read.
    """
    options = options or PlanOptions()
    if target is not None:
        accept = options.accept or accept_for(target)
        options = replace(options, target=target_kind(target), accept=accept)
    found: list[Siblings] = []
    decisions: list[Decision] = []
    if options.fuse == "none":
        record(PassRecord("CombineParallel", "nothing was to be combined", False, ()))
        return module

    def rewrite(read: ReadFunction) -> Any:
        plan = plan_parallel(read.graph, options)
        found.extend(plan.siblings)
        decisions.extend(plan.decisions)
        replacements: dict[int, Replacement] = {}
        for siblings in plan.siblings:
            replacements.update(_replace(read, siblings))
        return rebuild_function(read, replacements)

    module, changed = rewrite_functions(fold_constants(dissolve_groups(module)), rewrite)
    layers = sum(len(siblings.layers) for siblings in found)
    summary = f"{layers} layers combined into {len(found)}"
    record(PassRecord("CombineParallel", summary, changed, tuple(decisions), tuple(found)))
    return module


def _replace(read: ReadFunction, siblings: Siblings) -> dict[int, Replacement]:
    """The new values of the results, or of the tuple that they are fields of."""
    combined = _Combined(read, siblings)
    if siblings.parts is not None:
        return _replace_parts(read, siblings, siblings.parts, combined)
    places = zip(siblings.results, siblings.offsets, siblings.sizes)
    return {result: combined.part(offset, size) for result, offset, size in places}


def _replace_parts(
    read: ReadFunction, siblings: Siblings, parts: int, combined: _Combined
) -> dict[int, Replacement]:
    fields = read.graph.nodes[parts].inputs
    if len(fields) == len(siblings.results):
        return dict.fromkeys(read.graph.readers(parts), combined.whole)
    others = [field for field in fields if field not in siblings.results[1:]]

    def construct(new: Callable[[int], Any]) -> Any:
        return relay.Tuple([combined.whole(new) if f in siblings.results else new(f) for f in others])

    return {parts: construct}


class _Combined:
    """The operators of the one branch, each made when it is first asked for."""

    def __init__(self, read: ReadFunction, siblings: Siblings) -> None:
        self.read, self.siblings = read, siblings
        self.made: dict[int, Any] = {}
        self.shaped: Any = None
        self.row_of = {node: index for index, row in enumerate(siblings.rows) for node in row}

    def part(self, offset: int, size: int) -> Replacement:
        """One branch's part of the result."""
        axis = self.siblings.axes[-1]
        return lambda new: relay.strided_slice(
            self.whole(new), begin=[offset], end=[offset + size], axes=[axis]
        )

    def whole(self, new: Callable[[int], Any]) -> Any:
        """The result of the one branch; reshapes come last."""
        for row in range(len(self.siblings.rows)):
            if row not in self.made:
                self.made[row] = self._make(row, new)
        graph, last = self.read.graph, len(self.made) - 1
        if self.shaped is None and any(graph.nodes[r[0]].kind in VIEW_KINDS for r in self.siblings.rows):
            shape = graph.nodes[self.siblings.results[0]].output.shape[:-1]
            self.shaped = relay.reshape(self.made[last], (*map(int, shape), sum(self.siblings.sizes)))
        return self.made[last] if self.shaped is None else self.shaped

    def _make(self, row: int, new: Callable[[int], Any]) -> Any:
        read, siblings = self.read, self.siblings
        node = read.graph.nodes[siblings.rows[row][0]]
        call = read.expressions[node.id]
        if node.kind in VIEW_KINDS:
            return self.made[self.row_of[node.inputs[0]]]
        array = join_constants(read.graph, siblings, row)
        operands = []
        for source in node.inputs:
            if source in read.graph.constants and array is not None:
                operands.append(constant(array, read.graph.nodes[source].output.dtype))
            elif row == 0:
                operands.append(new(siblings.source))
            else:
                operands.append(self.made[self.row_of[source]])
        attrs = call.attrs if row else _with_channels(call.attrs, sum(siblings.sizes))
        return relay.Call(call.op, operands, attrs, None, _span(read, siblings.rows[row]))


def _with_channels(attrs: Any, channels: int) -> Any:
    """The attributes of a layer with another number of output channels."""
    values = {str(key): attrs[key] for key in attrs.keys()}
    changed = {key: channels for key in _CHANNELS if values.get(key) is not None}
    if not changed:
        return attrs
    return tvm.ir.make_node(f"relay.attrs.{type(attrs).__name__}", **{**values, **changed})


def _span(read: ReadFunction, row: tuple[int, ...]) -> Any:
    """Where the operators of a row came from: all their names."""
    nodes: list[Node] = [read.graph.nodes[node] for node in row]
    if not all(node.name for node in nodes):
        return read.expressions[row[0]].span
    return relay.Span(relay.SourceName(" + ".join(node.name for node in nodes)), 0, 0, 0, 0)
