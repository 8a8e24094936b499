"""Chains become primitive functions: one call, one kernel.

::

    %1 = nn.conv2d(%x, W)            %1 = fn (%p0, %p1, %p2, Primitive=1,
    %2 = add(%1, b)                        Composite="tvm_fuse.conv2d_bias_relu") {
    %3 = nn.relu(%2)                     nn.relu(add(nn.conv2d(%p0, %p1), %p2)) }
                                     %1(%x, W, b)

Weights and biases enter as arguments (a constant inside a CUDA kernel would become a host
pointer); only scalars stay inside. Parameters are named p0, p1, ... because AutoScheduler's task
keys hash the names. ``PartitionedFromPattern`` keeps TVM's own partitioner out.

A multiply in a chain reads its value through a ``copy``, which costs nothing in a kernel: TVM's
FoldScaleAxis also works inside primitive functions, and would scale the weights there at every
inference (for CUDA it makes kernels that do not verify). ``dissolve_groups`` drops the copies.

Partitioning a module again first dissolves the groups made before, so the pass is idempotent
and can run again after a layout change.
"""

from __future__ import annotations

from typing import Any, Callable

from tvm_fuse.core.graph import Kind
from tvm_fuse.core.plan import FusionGroup, plan_chains
from tvm_fuse.core.reason import Decision
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import COMPOSITE_PREFIX, ReadFunction, composite_name, read_function
from tvm_fuse.relay.record import PassRecord, record
from tvm_fuse.relay.rewrite import Replacement, rebuild_expression, rebuild_function

__all__ = ["dissolve_groups", "partition_chains"]


def partition_chains(module: Any) -> Any:
    """Turn every chain of a module into a primitive function.

    Args:
        module: A Relay module; layouts should be final (see ``layout_pass``).

    Returns:
        The type-inferred module; ``last_report()["PartitionChains"]`` holds the groups and a
        decision for every anchor.
    """
    groups: list[FusionGroup] = []
    decisions: list[Decision] = []

    def rewrite(read: ReadFunction) -> Any:
        plan = plan_chains(read.graph)
        groups.extend(plan.groups)
        decisions.extend(plan.decisions)
        return rebuild_function(read, {group.result: _grouped(read, group) for group in plan.groups})

    module, changed = rewrite_functions(dissolve_groups(module), rewrite)
    summary = f"{len(groups)} of {len(decisions)} anchors fused with what follows"
    record(PassRecord("PartitionChains", summary, changed, tuple(decisions), tuple(groups)))
    return module


def dissolve_groups(module: Any) -> Any:
    """Replace every call of a group by the operators in it."""

    def rewrite(read: ReadFunction) -> Any:
        replacements: dict[int, Replacement] = {}
        for node in read.graph.of_kind(Kind.OTHER):
            expr = read.expressions[node.id]
            if composite_name(expr).startswith(COMPOSITE_PREFIX):
                replacements[node.id] = _dissolved(expr.op, node.inputs)
        return rebuild_function(read, replacements)

    return rewrite_functions(module, rewrite)[0]


def _dissolved(function: Any, inputs: tuple[int, ...]) -> Replacement:
    def construct(new: Callable[[int], Any]) -> Any:
        arguments = [new(source) for source in inputs]
        return relay.bind(_without_copies(function).body, dict(zip(function.params, arguments)))

    return construct


def _without_copies(function: Any) -> Any:
    read = read_function(function)
    copies = (node for node in read.graph.of_kind(Kind.ELEMENTWISE) if node.op == "copy")
    return rebuild_function(read, {node.id: _same_as(node.inputs[0]) for node in copies})


def _same_as(source: int) -> Replacement:
    return lambda new: new(source)


def _grouped(read: ReadFunction, group: FusionGroup) -> Replacement:
    def construct(new: Callable[[int], Any]) -> Any:
        function, arguments = _make_function(read, group)
        span = read.expressions[_center(group)].span
        return relay.Call(function, [new(source) for source in arguments], None, None, span)

    return construct


def _make_function(read: ReadFunction, group: FusionGroup) -> tuple[Any, tuple[int, ...]]:
    """The primitive function of a group and the ids of the values it is called with."""
    members = group.nodes
    inside: dict[int, Any] = {}
    params: dict[int, Any] = {}
    for node in members:
        sources = read.graph.nodes[node].inputs
        for source in sources:
            if source in members or source in inside:
                continue
            if _is_scalar(read, source):
                inside[source] = read.expressions[source]
            else:
                param = relay.Var(f"p{len(params)}", read.expressions[source].checked_type)
                inside[source] = params[source] = param
        guarded = _scaled_values(read, group, node)
        operands = [relay.copy(inside[source]) if source in guarded else inside[source] for source in sources]
        inside[node] = rebuild_expression(read.expressions[node], operands)
    function = relay.Function(list(params.values()), inside[group.result])
    function = function.with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    function = function.with_attr("Composite", COMPOSITE_PREFIX + group.name)
    function = function.with_attr("PartitionedFromPattern", "_".join(group.operators) + "_")
    return function, tuple(params)


def _center(group: FusionGroup) -> int:
    """The operator that a group is named after in the eyes of others."""
    return group.result if group.anchor is None else group.anchor


def _scaled_values(read: ReadFunction, group: FusionGroup, node: int) -> tuple[int, ...]:
    """The operands of a multiply from which FoldScaleAxis would move it towards the anchor."""
    graph, members = read.graph, group.nodes
    if graph.nodes[node].kind is not Kind.MULTIPLY or not _takes_scale(read.expressions[_center(group)]):
        return ()
    values = [source for source in graph.nodes[node].inputs if source in members]
    return tuple(v for v in values if graph.readers(v) == (node,) and _takes_scale(read.expressions[v]))


def _takes_scale(expr: Any) -> bool:
    """Whether FoldScaleAxis would move a multiply from behind this operator to before it."""
    is_operator = isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op)
    return is_operator and expr.op.get_attr("FScaleAxisBackwardPrep") is not None


def _is_scalar(read: ReadFunction, node: int) -> bool:
    """Whether a value is a constant of rank 0, which may live inside a kernel."""
    constant = read.graph.constant(node)
    return constant is not None and constant.ndim == 0
