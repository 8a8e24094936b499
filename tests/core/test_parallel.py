"""Which siblings are combined: what their parts cost, by device, and every refusal with its reason."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.accept import accept_on, compare_extension
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.parallel import plan_parallel
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.reason import Code, Reason, Stage
from tvm_fuse.core.targets import DEVICES

A100 = PlanOptions(target="cuda", accept=accept_on(DEVICES["a100"]))
NONE_CAN_READ = PlanOptions(target="cpu", accept=accept_on(DEVICES["a100"]))


def weight(out, depth, kernel=1):
    return np.ones((out, depth, kernel, kernel), "float32")


def start(shape=(1, 32, 14, 14)):
    g = GraphBuilder("float32")
    return g, g.input("x", shape)


def branches(g, x, *channels):
    return [g.relu(g.conv2d(x, weight(count, g.shape(x)[1]))) for count in channels]


def into_layers(g, one, two):
    return [g.conv2d(value, weight(8, g.shape(value)[1], 3), padding=(1, 1)) for value in (one, two)]


READERS = {
    "layers": (into_layers, 0),
    "a concatenation in order": (lambda g, one, two: [g.concatenate(one, two)], 0),
    "a concatenation and others": (lambda g, one, two: [g.concatenate(two, one, one)], 1),
    "transposes": (lambda g, one, two: [g.transpose(value, 0, 2, 3, 1) for value in (one, two)], 0),
    "outputs": (lambda g, one, two: [one, two], 2),
    "two readers": (lambda g, one, two: [*into_layers(g, one, one), *into_layers(g, two, one)[:1]], 1),
    "a residual": (lambda g, one, two: [g.add(g.conv2d(two, weight(16, 16)), one)], 0),
    "a residual behind an activation": (
        lambda g, one, two: [g.add(g.relu(g.conv2d(two, weight(16, 16))), one)], 0
    ),
    "a residual of a shared result": (
        lambda g, one, two: (lambda y: [g.add(y, one), g.tanh(y)])(g.conv2d(two, weight(16, 16))), 1
    ),
    "a sum of pooled values": (lambda g, one, two: [g.add(g.other("pool", two), one)], 2),
    "a sum of both": (lambda g, one, two: [g.add(one, two)], 2),
    "layers behind a cheap operator": (
        lambda g, one, two: into_layers(g, g.clip(one, 0, 1), g.clip(two, 0, 2)), 0
    ),
    "layers behind an expensive operator": (
        lambda g, one, two: into_layers(g, g.tanh(one), g.sigmoid(two)), 2
    ),
    "something opaque": (lambda g, one, two: [g.other("sort", one), g.other("sort", two)], 2),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_copies(case):
    read, copies = READERS[case]
    g, x = start()
    seen: list[Candidate] = []

    def accept(graph, candidate):
        if candidate.extension is Extension.PARALLEL:
            seen.append(candidate)
        return None

    graph = g.build(*read(g, *branches(g, x, 16, 16)))
    plan_parallel(graph, PlanOptions(target="cuda", accept=accept))
    assert len(seen[0].copied) == copies
    assert all(graph.nodes[node].kind is Kind.RELU for node in seen[0].copied)


def test_a_target_that_cannot_read_parts_copies_them():
    g, x = start()
    graph = g.build(*into_layers(g, *branches(g, x, 16, 16)))
    (applied,) = plan_parallel(graph, A100).decisions
    (refused,) = plan_parallel(graph, NONE_CAN_READ).decisions
    assert applied.applied
    assert "2 layers become one" in applied.detail
    assert refused.stage is Stage.COST
    assert refused.reason.code is Code.FUSION_COSTS_TIME
    assert "A100" in refused.reason.wanted
    assert "2 of its results copied from there" in refused.reason.got


@pytest.mark.parametrize("name", ["t4", "a100", "h200"])
def test_copies_cost_what_was_saved(name):
    """Two outputs: a launch saved, two spent."""
    g, x = start()
    options = PlanOptions(target="cuda", accept=accept_on(DEVICES[name]))
    assert plan_parallel(g.build(*branches(g, x, 16, 16)), options).siblings == ()


def test_the_saving_is_the_input_and_the_launches():
    g, x = start()
    graph = g.build(*into_layers(g, *branches(g, x, 16, 24)))
    (siblings,) = plan_parallel(graph, A100).siblings
    first, second = siblings.branches
    candidate = Candidate(Extension.PARALLEL, "conv2d", first[0], first, second)
    compared = compare_extension(graph, candidate)
    assert [cost.launches for cost in compared.apart] == [1, 1]
    assert compared.together.launches == 1
    assert compared.copies == ()
    apart = sum(cost.dram_read_bytes for cost in compared.apart)
    assert apart - compared.together.dram_read_bytes == 32 * 14 * 14 * 4
    assert compared.together.flops == sum(cost.flops for cost in compared.apart)
    assert compared.together.dram_write_bytes == (16 + 24) * 14 * 14 * 4
    assert compared.saved_s(DEVICES["a100"]) >= DEVICES["a100"].launch_s


def test_a_concatenation_that_disappears_is_saved():
    g, x = start()
    graph = g.build(g.concatenate(*branches(g, x, 16, 16)))
    (siblings,) = plan_parallel(graph, A100).siblings
    first, second = siblings.branches
    added = (*second, siblings.parts, *graph.readers(siblings.parts))
    compared = compare_extension(graph, Candidate(Extension.PARALLEL, "conv2d", first[0], first, added))
    assert [cost.launches for cost in compared.apart] == [1, 1, 1]
    assert compared.apart[2].dram_bytes == 2 * 32 * 14 * 14 * 4


def test_query_key_and_value():
    g, x = start((64, 128))
    values = [g.add(g.dense(x, np.ones((128, 128), "float32")), np.ones(128, "float32")) for _ in range(3)]
    heads = [g.transpose(g.reshape(value, 64, 4, 32), 1, 0, 2) for value in values]
    graph = g.build(*heads)
    (siblings,) = plan_parallel(graph, A100).siblings
    assert siblings.results == tuple(values)
    assert siblings.sizes == (128, 128, 128)


def test_refusals_are_decisions():
    g, x = start()
    twin = g.conv2d(x, weight(4, 32), name="twin")
    wide = g.conv2d(x, weight(4, 32, 3), padding=(1, 1), name="wide")
    grouped = g.conv2d(x, weight(4, 16), groups=2, name="grouped")
    free = g.conv2d(x, g.input("w", (4, 32, 1, 1)), name="free")
    decisions = plan_parallel(g.build(twin, wide, grouped, free), A100).decisions
    got = {decision.at: decision.reason.code for decision in decisions}
    assert got == {
        "twin": Code.SIBLINGS_DIFFER,
        "wide": Code.SIBLINGS_DIFFER,
        "grouped": Code.SIBLING_GROUPED,
        "free": Code.WEIGHT_NOT_CONSTANT,
    }


def test_two_sets_on_one_value():
    g, x = start()
    ones = branches(g, x, 16, 16)
    threes = [g.conv2d(x, weight(8, 32, 3), padding=(1, 1)) for _ in range(2)]
    graph = g.build(*into_layers(g, *ones), *into_layers(g, *threes))
    assert [siblings.sizes for siblings in plan_parallel(graph, A100).siblings] == [(16, 16), (8, 8)]


def test_an_only_reader_has_no_decision():
    g, x = start()
    assert plan_parallel(g.build(*branches(g, x, 16)), A100).decisions == ()


def test_nothing_is_combined_where_nothing_is_fused():
    g, x = start()
    graph = g.build(*into_layers(g, *branches(g, x, 16, 16)))
    assert plan_parallel(graph, PlanOptions(target="cuda", fuse="none")).siblings == ()


def test_a_cost_model_may_refuse():
    g, x = start()
    graph = g.build(*into_layers(g, *branches(g, x, 16, 16)))

    def refuse(graph, candidate):
        return Reason(Code.FUSION_COSTS_TIME, "here", "less", "more")

    plan = plan_parallel(graph, PlanOptions(target="cuda", accept=refuse))
    assert plan.siblings == ()
    assert [decision.stage for decision in plan.decisions] == [Stage.COST]


# --- parts that readers take -----------------------------------------------------------------------


def test_a_part_that_is_added_joins_the_kernel_of_the_layer():
    """The plan of a combined graph: the slice is in the group of the layer that adds it, and legal there."""
    g, x = start()
    both = g.conv2d(x, weight(32, 32))
    one, two = (g.node(Kind.SLICE, "strided_slice", (both,), (1, 16, 14, 14)) for _ in range(2))
    conv = g.conv2d(one, weight(16, 16))
    out = g.relu(g.add(conv, two))
    graph = g.build(out)
    on_cuda = plan_chains(graph, PlanOptions(target="cuda"))
    on_cpu = plan_chains(graph, PlanOptions(target="cpu"))
    assert [group.prologue for group in on_cuda.groups if group.anchor == conv] == [(one, two)]
    assert [group.prologue for group in on_cpu.groups if group.anchor == conv] == [()]


def test_another_operator_beside_a_layer_stays_out():
    g, x = start()
    y = g.tanh(g.input("y", (1, 16, 14, 14)))
    graph = g.build(g.add(g.conv2d(x, weight(16, 32)), y))
    assert all(y not in group.nodes for group in plan_chains(graph, PlanOptions(target="cuda")).groups)
