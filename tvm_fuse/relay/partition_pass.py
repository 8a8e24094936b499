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

A value that is computed on the way into the anchor passes through one for the same reason.

Partitioning a module again first dissolves the groups made before, so the pass is idempotent
and can run again after a layout change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.core.legality import check_groups
from tvm_fuse.core.order import sort_nodes
from tvm_fuse.core.plan import FusionGroup, FusionPlan, plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Decision
from tvm_fuse.relay.absorb import INNER_PREFIX, lower_absorbed, restore_absorbed
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_target import TARGET_KEY
from tvm_fuse.relay.cuda_strategy import CUDA_KEY
from tvm_fuse.relay.device import accept_for
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import COMPOSITE_PREFIX, ReadFunction, composite_name, read_function
from tvm_fuse.relay.record import PassRecord, record
from tvm_fuse.relay.rewrite import Replacement, rebuild_expression, rebuild_function
from tvm_fuse.relay.together import TOGETHER_PREFIX, together

__all__ = ["Planner", "Refiner", "dissolve_groups", "make_function", "partition_chains", "target_kind"]


#: Makes the plan of one function.
Planner = Callable[[Graph], FusionPlan]
#: Looks at the plan of one function together with that function, and returns the plan to carry out.
Refiner = Callable[[ReadFunction, FusionPlan], FusionPlan]


def partition_chains(
    module: Any,
    target: Any = None,
    options: PlanOptions | None = None,
    plan: Planner | None = None,
    refine: Refiner | None = None,
) -> Any:
    """Turn every chain of a module into a primitive function.

    Args:
        module: A Relay module; layouts should be final (see ``layout_pass``).
        target: The ``tvm.target.Target`` that it will be built for; None uses nothing that only some
            targets can do.
        options: How to plan. Where ``target`` is given, it replaces theirs, and where they have no
            ``accept``, the cost model of its device decides what pays.
        plan: Makes the plan of a function from its graph, instead of ``plan_chains``; a plan that is not
            legal is refused.
        refine: Gets each plan of ``plan_chains`` before it is carried out, and may return another one, such
            as ``registers.split_spilling_groups`` does. A plan from ``plan`` is carried out as it is.

    Returns:
        The type-inferred module; ``last_report()["PartitionChains"]`` holds the groups and a
        decision for every group and every operator in none.

    Raises:
        ModelError: ``plan`` made groups that cannot be one kernel each.
        UsageError: A pattern of the options fits no group.
    """
    options = options or PlanOptions()
    if target is not None:
        accept = options.accept or accept_for(target)
        options = replace(options, target=target_kind(target), accept=accept)
    groups: list[FusionGroup] = []
    decisions: list[Decision] = []

    def rewrite(read: ReadFunction) -> Any:
        made = plan_chains(read.graph, options) if plan is None else plan(read.graph)
        if plan is None and refine is not None:
            made = refine(read, made)
        kernels = (*made.groups, *made.alone)
        check_groups(read.graph, kernels, options.target)
        groups.extend(made.groups)
        decisions.extend(made.decisions)
        replacements: dict[int, Replacement] = {}
        for group in kernels:
            replacements.update(_replace(read, group))
        order = sort_nodes(read.graph, kernels)
        assert not isinstance(order, FusionGroup)  # checked above
        inner = {node for group in kernels for node in group.owned}.difference(replacements)
        return rebuild_function(read, replacements, [node for node in order if node not in inner])

    module, changed = rewrite_functions(dissolve_groups(module), rewrite)
    layers = sum(group.layers for group in groups)
    anchors = layers + sum(decision.rule == "chain" and not decision.applied for decision in decisions)
    summary = f"{layers} of {anchors} anchors fused with what follows"
    record(PassRecord("PartitionChains", summary, changed, tuple(decisions), tuple(groups)))
    return module


def target_kind(target: Any) -> str:
    """The key of ``CAPABILITIES`` for a ``tvm.target.Target``: whose schedules it gets."""
    keys = {str(key) for key in target.keys}
    if target.libs:
        return "other"
    return "cuda" if CUDA_KEY in keys else "cpu" if TARGET_KEY in keys else "other"


def dissolve_groups(module: Any) -> Any:
    """Replace every call of a group by the operators in it."""

    def rewrite(read: ReadFunction) -> Any:
        replacements: dict[int, Replacement] = {}
        for node in read.graph.of_kind(Kind.OTHER):
            expr = read.expressions[node.id]
            if composite_name(expr).startswith(COMPOSITE_PREFIX):
                replacements[node.id] = _dissolved(expr.op, node.inputs)
                replacements.update(_dissolved_items(read, node))
        return rebuild_function(read, replacements)

    return rewrite_functions(module, rewrite)[0]


def _dissolved(function: Any, inputs: tuple[int, ...]) -> Replacement:
    def construct(new: Callable[[int], Any]) -> Any:
        arguments = [new(source) for source in inputs]
        return relay.bind(_as_it_was(function).body, dict(zip(function.params, arguments)))

    return construct


def _dissolved_items(read: ReadFunction, node: Node) -> dict[int, Replacement]:
    """The results of a group that has several, each as the operator that computes it."""
    items = (
        reader for reader in read.graph.readers(node.id) if read.graph.nodes[reader].kind is Kind.GET_ITEM
    )
    return {item: _field(node.id, int(read.graph.nodes[item].attrs)) for item in items}


def _field(source: int, index: int) -> Replacement:
    return lambda new: new(source).fields[index]


def _as_it_was(function: Any) -> Any:
    """Without the copies and the operators of ours that ``make_function`` puts in."""
    read = read_function(function)
    edits = {n.id: _same_as(n.inputs[0]) for n in read.graph.of_kind(Kind.ELEMENTWISE) if n.op == "copy"}
    inner = (node for node in read.graph.nodes if node.op.startswith(INNER_PREFIX))
    edits.update({node.id: _plain(read, node) for node in inner})
    tuples = (node for node in read.graph.nodes if node.op.startswith(TOGETHER_PREFIX))
    edits.update({node.id: _tuple_of(node.inputs) for node in tuples})
    return rebuild_function(read, edits)


def _tuple_of(sources: tuple[int, ...]) -> Replacement:
    return lambda new: relay.Tuple([new(source) for source in sources])


def _plain(read: ReadFunction, node: Node) -> Replacement:
    call = restore_absorbed(read.expressions[node.id])
    return lambda new: rebuild_expression(call, [new(source) for source in node.inputs])


def _same_as(source: int) -> Replacement:
    return lambda new: new(source)


def _replace(read: ReadFunction, group: FusionGroup) -> dict[int, Replacement]:
    """The new values of a group's results: one call, of a tuple where there are several."""
    grouped = _grouped(read, group)
    if not group.also:
        return {group.result: grouped}
    calls: list[Any] = []

    def item(index: int) -> Replacement:
        def construct(new: Callable[[int], Any]) -> Any:
            calls.extend([] if calls else [grouped(new)])
            return relay.TupleGetItem(calls[0], index)

        return construct

    return {result: item(index) for index, result in enumerate(group.results)}


def _grouped(read: ReadFunction, group: FusionGroup) -> Replacement:
    def construct(new: Callable[[int], Any]) -> Any:
        function, arguments = make_function(read, group)
        span = read.expressions[group.center].span
        return relay.Call(function, [new(source) for source in arguments], None, None, span)

    return construct


def make_function(read: ReadFunction, group: FusionGroup) -> tuple[Any, tuple[int, ...]]:
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
        guarded = {*_scaled_values(read, group, node), *_entering_values(read, group, node)}
        operands = [relay.copy(inside[source]) if source in guarded else inside[source] for source in sources]
        inside[node] = rebuild_expression(read.expressions[node], operands)
        if node in group.absorbed:
            inside[node] = lower_absorbed(inside[node])
    results = [inside[result] for result in group.results]
    function = relay.Function(list(params.values()), together(results) if group.also else results[0])
    function = function.with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    function = function.with_attr("Composite", COMPOSITE_PREFIX + group.name)
    function = function.with_attr("PartitionedFromPattern", "_".join(group.operators) + "_")
    return function, tuple(params)


def _scaled_values(read: ReadFunction, group: FusionGroup, node: int) -> tuple[int, ...]:
    """The operands of a multiply from which FoldScaleAxis would move it towards the anchor."""
    graph, members = read.graph, group.nodes
    if graph.nodes[node].kind is not Kind.MULTIPLY or not _takes_scale(read.expressions[group.center]):
        return ()
    values = [source for source in graph.nodes[node].inputs if source in members]
    return tuple(
        value
        for value in values
        if [reader for reader in graph.readers(value) if reader in members] == [node]
        and _takes_scale(read.expressions[value])
    )


def _entering_values(read: ReadFunction, group: FusionGroup, node: int) -> tuple[int, ...]:
    """The operands of an anchor that are computed on the way in."""
    if node != group.anchor:
        return ()
    sources = read.graph.nodes[node].inputs
    return tuple(source for source in sources if source in group.prologue and _takes_scale_before(read, node))


def _takes_scale_before(read: ReadFunction, node: int) -> bool:
    """Whether FoldScaleAxis would move a multiply from before this operator onto its weights."""
    return read.expressions[node].op.get_attr("FScaleAxisForwardRewrite") is not None


def _takes_scale(expr: Any) -> bool:
    """Whether FoldScaleAxis would move a multiply from behind this operator to before it."""
    is_operator = isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op)
    return is_operator and expr.op.get_attr("FScaleAxisBackwardPrep") is not None


def _is_scalar(read: ReadFunction, node: int) -> bool:
    """Whether a value is a constant of rank 0, which may live inside a kernel."""
    constant = read.graph.constant(node)
    return constant is not None and constant.ndim == 0
