"""Joined kernels: gates and normalizations that are found, and what refuses each condition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import Kind, ReduceAttrs
from tvm_fuse.core.group import make_group
from tvm_fuse.core.joins import MOST_HIDDEN, RowJoin, check_join, find_row_join, join_gate
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason, Stage

F32 = np.float32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def make_gate(images=1, channels=12, hidden=4, pixels=1, groups=1, dense=False, dtype="float32"):
    """Two products with ReLU and sigmoid: the graph, and the group of each."""
    g = GraphBuilder(dtype)
    shape = (images, channels) if dense else (images, channels, pixels, pixels)

    def product(x, out, inner):
        if dense:
            return g.dense(x, ones(out, inner, dtype=dtype))
        return g.conv2d(x, ones(out, inner // groups, 1, 1, dtype=dtype), groups=groups)

    first = product(g.input("x", shape), hidden, channels)
    relu = g.relu(first)
    second = product(relu, channels, hidden)
    result = g.sigmoid(second)
    graph = g.build(result)
    groups_made = (
        make_group(graph, first, (first, relu), relu),
        make_group(graph, second, (second, result), result),
    )
    return graph, *groups_made


@pytest.mark.parametrize("dense", [False, True], ids=["convolutions", "dense layers"])
def test_gate(dense):
    graph, first, second = make_gate(dense=dense)
    joined = join_gate(graph, first, second)
    assert (first.layers, joined.layers) == (1, 2)
    assert joined.nodes == (*first.nodes, *second.nodes)
    assert (joined.anchor, joined.result) == (second.anchor, second.result)
    assert (joined.absorbed, joined.prologue) == ((first.anchor,), (first.result,))
    assert check_join(graph, joined) is None


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"pixels": 2}, "one pixel"),
        ({"images": 8}, "at most 7 images"),
        ({"hidden": MOST_HIDDEN + 1}, f"at most {MOST_HIDDEN} values between"),
        ({"groups": 2}, "no groups"),
        ({"dtype": "float16"}, "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_gate_refused(changed, wanted):
    graph, first, second = make_gate(**changed)
    reason = join_gate(graph, first, second)
    assert reason.code is Code.TARGET_CANNOT_JOIN
    assert wanted in reason.wanted
    joined = replace(
        second,
        nodes=(*first.nodes, *second.nodes),
        absorbed=(first.anchor,),
        prologue=(first.result,),
    )
    assert wanted in check_join(graph, joined)[0]


def test_gate_whose_hidden_values_are_read_elsewhere():
    graph, first, second = make_gate()
    graph = replace(graph, outputs=(second.result, first.result))
    assert join_gate(graph, first, second).code is Code.RESULT_SHARED


class Rows(GraphBuilder):
    """Builds reductions along the last axes."""

    def __init__(self):
        super().__init__("float32")

    def reduce(self, op, *inputs, axes=(2,), keepdims=True):
        shape = self.shape(inputs[0])
        kept = tuple(1 if axis in axes else dim for axis, dim in enumerate(shape))
        kept = kept if keepdims else tuple(dim for axis, dim in enumerate(shape) if axis not in axes)
        return self.node(Kind.REDUCE, op, inputs, kept, ReduceAttrs(axes, keepdims))


def make_norm(shape=(2, 3, 8), axes=(2,), spelling="variance"):
    g = Rows()
    x = g.relu(g.input("x", shape))
    mean = g.reduce("mean", x, axes=axes)
    centered = g.subtract(x, mean)
    if spelling == "variance":
        spread = g.reduce("variance", x, mean, axes=axes)
    else:
        spread = g.reduce("mean", g.power(centered, ones()), axes=axes)
    y = g.divide(centered, g.sqrt(g.add(spread, ones())))
    return g, mean, spread, g.add(g.multiply(y, ones(shape[-1])), ones(shape[-1]))


@pytest.mark.parametrize("spelling", ["variance", "power"])
@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 8), (2,)), ((2, 3, 4, 8), (2, 3))], ids=["row", "image"])
def test_normalization(spelling, shape, axes):
    g, mean, spread, result = make_norm(shape, axes, spelling)
    graph = g.build(result)
    join = find_row_join(graph, graph.nodes[spread])
    computing = tuple(n.id for n in graph.nodes if n.kind not in (Kind.INPUT, Kind.CONSTANT))
    assert join == RowJoin(spread, computing, result, (mean,))
    group = make_group(graph, spread, join.nodes, result, absorbed=join.absorbed)
    assert check_join(graph, group) is None


def test_what_is_before_and_after_one_reduction():
    g = Rows()
    total = g.reduce("sum", g.tanh(g.input("x", (2, 3, 8))), keepdims=False)
    result = g.sqrt(total)
    graph = g.build(result)
    assert find_row_join(graph, graph.nodes[total]) == RowJoin(total, (total - 1, total, result), result, ())


def test_a_taken_operator_ends_it():
    g, _, spread, result = make_norm()
    graph = g.build(result)
    join = find_row_join(graph, graph.nodes[spread], (1, result))
    assert join.result == graph.nodes[result].inputs[0]
    assert 1 not in join.nodes


def test_statistics_that_are_returned_too():
    """Nothing after the variance joins then."""
    g, _, spread, result = make_norm()
    graph = g.build(result, spread)
    reason = find_row_join(graph, graph.nodes[spread])
    assert reason.code is Code.RESULT_RETURNED


@pytest.mark.parametrize(
    ("shape", "axes", "code"),
    [((2, 3, 8), (1,), Code.TARGET_CANNOT_JOIN), ((2, "n", 8), (2,), Code.TARGET_CANNOT_JOIN)],
    ids=["another axis", "dynamic"],
)
def test_reductions_that_are_no_rows(shape, axes, code):
    g = Rows()
    total = g.reduce("sum", g.relu(g.input("x", shape)), axes=axes)
    graph = g.build(g.sqrt(total))
    assert find_row_join(graph, graph.nodes[total]).code is code


#: What ends the kernel at a sum over the last axis of (2, 3, 8), and what reads the sum.
ENDS = {
    "returned": (Code.RESULT_RETURNED, lambda g, y: (y,)),
    "shared": (Code.RESULT_SHARED, lambda g, y: (g.sqrt(y), g.tanh(y))),
    "sorted": (Code.READER_NOT_ELEMENTWISE, lambda g, y: (g.other("argsort", y),)),
    "spread over more": (Code.RESULT_SHAPE_CHANGES, lambda g, y: (g.add(y, g.const(ones(5, 2, 3, 1))),)),
    "taken": (Code.READER_IN_OTHER_CHAIN, lambda g, y: (g.sqrt(y),)),
}


@pytest.mark.parametrize("case", ENDS)
def test_why_nothing_follows_a_reduction(case):
    code, after = ENDS[case]
    g = Rows()
    total = g.reduce("sum", g.input("x", (2, 3, 8)))
    graph = g.build(*after(g, total))
    taken = graph.readers(total) if case == "taken" else ()
    assert find_row_join(graph, graph.nodes[total], taken).code is code


def test_more_operators_than_join():
    g = Rows()
    y = total = g.reduce("sum", g.input("x", (2, 3, 8)))
    for _ in range(20):
        y = g.tanh(y)
    graph = g.build(y)
    join = find_row_join(graph, graph.nodes[total])
    assert (len(join.nodes), join.end.code) == (17, Code.CHAIN_TOO_LONG)


# --- what a plan says about kernels that are not joined ---------------------------------------------------


def planned(g, *outputs, **options):
    return plan_chains(g.build(*outputs), PlanOptions(**{"target": "cuda", **options}))


def refuse(graph, candidate):
    return Reason(Code.FUSION_COSTS_TIME, "here", "less", "more")


def rows_of(axis, prologue=False, dtype="float32"):
    """A reduction with elementwise readers; with a prologue it is in a group, which ends there."""
    g = Rows()
    g.dtype = dtype
    x = g.input("x", (2, 8, 8))
    total = g.reduce("sum", g.tanh(x) if prologue else x, axes=(axis,))
    return g, total, g.add(x, g.sqrt(total))


#: Axis, dtype, options, and what is said at the reduction.
ROWS = {
    "another axis": (1, "float32", {}, Code.TARGET_CANNOT_JOIN, "the last axes"),
    "half": (2, "float16", {}, Code.TARGET_CANNOT_JOIN, "float32"),
    "a CPU": (2, "float32", {"target": "cpu"}, Code.TARGET_CANNOT_JOIN, "a reduction and what follows it"),
    "few operators": (2, "float32", {"max_ops": 2}, Code.CHAIN_TOO_LONG, "at most 2"),
}


@pytest.mark.parametrize("prologue", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize("case", ROWS)
def test_rows_that_are_not_joined(case, prologue):
    axis, dtype, options, code, wanted = ROWS[case]
    g, total, result = rows_of(axis, prologue, dtype)
    plan = planned(g, result, **options)
    group = next((group for group in plan.groups if total in group.nodes), None)
    decisions = [decision for decision in plan.decisions if decision.node == total]
    reason = group.end if prologue else decisions[0].reason
    assert (reason.code, group is not None) == (code, prologue)
    assert wanted in reason.wanted


def test_rows_that_the_cost_model_refuses():
    """Both reductions say so: the last one and the one that it would have absorbed."""
    g, mean, spread, result = make_norm()
    plan = planned(g, result, accept=refuse)
    said = {d.node: (d.stage, d.reason.code) for d in plan.decisions if d.node in (mean, spread)}
    ends = {group.end.code for group in plan.groups if {mean, spread} & set(group.nodes)}
    assert {code for _, code in said.values()} | ends == {Code.FUSION_COSTS_TIME}
    assert {stage for stage, _ in said.values()} <= {Stage.COST}


def test_reductions_that_nothing_elementwise_reads_say_what_they_said():
    g = Rows()
    total = g.reduce("sum", g.input("x", (2, 3, 8)), axes=(1,))
    (decision, _) = planned(g, g.other("argsort", total)).decisions
    assert decision.reason.code is Code.OPERATOR_ALONE


GATES = {
    "too wide": ({"hidden": MOST_HIDDEN + 1}, {}, Code.TARGET_CANNOT_JOIN, Stage.CONDITION),
    "many images": ({"images": 8}, {}, Code.TARGET_CANNOT_JOIN, Stage.CONDITION),
    "half": ({"dtype": "float16"}, {}, Code.TARGET_CANNOT_JOIN, Stage.CONDITION),
    "dense layers on a CPU": ({"dense": True}, {"target": "cpu"}, Code.TARGET_CANNOT_JOIN, Stage.CONDITION),
    "few operators": ({}, {"max_ops": 3}, Code.CHAIN_TOO_LONG, Stage.CONDITION),
    "costs time": ({}, {"accept": refuse}, Code.FUSION_COSTS_TIME, Stage.COST),
}


@pytest.mark.parametrize("case", GATES)
def test_gates_that_are_not_joined(case):
    changed, options, code, stage = GATES[case]
    graph, first, second = make_gate(**changed)
    plan = plan_chains(graph, PlanOptions(**{"target": "cuda", **options}))
    assert [decision.node for decision in plan.not_joined] == [first.anchor, second.anchor]
    assert {(d.rule, d.stage, d.reason.code) for d in plan.not_joined} == {("gate", stage, code)}


@pytest.mark.parametrize(
    ("changed", "target"), [({}, "cuda"), ({"pixels": 4}, "cuda"), ({"pixels": 4}, "cpu")], ids=str
)
def test_nothing_is_said_of_a_gate_that_is_joined_or_of_layers_of_more_pixels(changed, target):
    graph, _, _ = make_gate(**changed)
    assert plan_chains(graph, PlanOptions(target=target)).not_joined == ()


def test_a_vector_that_is_spread_over_another_axis_ends_it():
    """[8, 8] summed to [8] and added to [8, 8] is added to columns, not to the rows that it came from."""
    g = Rows()
    x = g.input("x", (8, 8))
    total = g.reduce("sum", g.relu(x), axes=(1,), keepdims=False)
    graph = g.build(g.add(g.sqrt(total), g.const(ones(8, 8))))
    join = find_row_join(graph, graph.nodes[total])
    assert graph.nodes[join.result].kind is Kind.SQRT


def test_reductions_of_other_rows_are_found_by_the_check():
    g, mean, spread, result = make_norm()
    graph = g.build(result)
    nodes = list(graph.nodes)
    nodes[mean] = replace(nodes[mean], attrs=ReduceAttrs((1,), True))
    broken = replace(graph, nodes=tuple(nodes))
    group = make_group(broken, spread, range(1, len(nodes)), result, absorbed=(mean,))
    members = tuple(n for n in group.nodes if nodes[n].kind is not Kind.CONSTANT)
    assert check_join(broken, replace(group, nodes=members))[0] == "reductions of the same rows"
