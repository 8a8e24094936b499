"""Plan files carried out: as they were, edited, and refused with what changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.core.test_plan_file import TARGET, build, planned
from tests.support.graphs import GraphBuilder
from tvm_fuse.core import plan as plans
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_file import from_json, to_json
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code
from tvm_fuse.core.replay import replay


def edited(file, index, **changes):
    groups = list(file.groups)
    groups[index] = replace(groups[index], **changes)
    return replace(file, groups=tuple(groups))


@pytest.mark.parametrize("options", [{}, {"skip": ("chain0",)}, {"fuse": "none"}, {"max_ops": 2}], ids=str)
def test_as_it_was(options):
    graph = build()
    made = plan_chains(graph, PlanOptions(target="cuda", **options))
    again = replay(graph, from_json(to_json(planned(**options))), TARGET)
    assert (again.groups, again.alone) == (made.groups, made.alone)


def test_rules_of_another_version_do_not_count(monkeypatch):
    file = planned()
    monkeypatch.setattr(plans, "MOST_OPERATORS", 1)
    assert len(plan_chains(build()).groups) < len(replay(build(), file, TARGET).groups)


def test_weights_and_names_may_change():
    assert replay(build(name="other", weight=np.zeros((4, 4, 1, 1))), planned(), TARGET).groups


def test_a_group_that_was_removed():
    file = planned()
    again = replay(build(), replace(file, groups=file.groups[1:]), TARGET)
    assert [group.id for group in again.groups] == ["chain1", "chain2"]
    left = [decision.reason.code for decision in again.decisions if not decision.applied]
    assert left.count(Code.LEFT_OUT_BY_USER) == len(left) == 4  # conv, bias, relu, sort


def test_an_operator_that_was_moved_out():
    """The multiply leaves the second convolution's kernel; the relu leaves the first one's."""
    file = planned()
    first, second, *_ = file.groups
    file = edited(file, 0, nodes=first.nodes[:-1], result=first.nodes[-2].id)
    file = edited(file, 1, nodes=second.nodes[1:], prologue=())
    groups = replay(build(), file, TARGET).groups
    assert [group.steps[-1].name for group in groups[:2]] == ["bias", "relu"]
    assert [len(group.nodes) for group in groups[:2]] == [2, 3]


def smaller():
    g = GraphBuilder()
    x, gate = g.input("x", (1, 4, 2, 2)), g.input("gate", (1, 4, 1, 1))
    return g.build(g.multiply(x, gate))


def clipped():
    graph = build()
    relu = next(node for node in graph.nodes if node.op == "nn.relu")
    nodes = list(graph.nodes)
    nodes[relu.id] = replace(relu, op="clip")
    return replace(graph, nodes=tuple(nodes))


WIDE = np.ones((4, 4, 3, 3))
STALE = {
    "operator": (clipped, TARGET, r"node 7 was nn.relu \(6\) -> .*, is clip \(6\)"),
    "target": (build, "llvm", "the target was cuda -arch=sm_80, is llvm"),
    "other graph": (smaller, TARGET, r"node 1 was input .*, is input .* nodes, has 3"),
    "shape": (lambda: build(weight=WIDE, padding=(1, 1)), TARGET, "node 3 was constant .*1x1.* is .*3x3"),
    "attributes": (lambda: build(padding=(0, 0, 0, 0)), TARGET, r"node 4 was nn.conv2d .*padding=\(0, 0\)"),
}


@pytest.mark.parametrize("case", STALE)
def test_stale(case):
    make, target, match = STALE[case]
    with pytest.raises(ModelError, match=rf"the fusion plan is stale: {match}.*planned by tvm-fuse 0.1.0"):
        replay(make(), planned(), target)


def test_outputs_are_part_of_the_graph():
    graph = build()
    (last,) = graph.outputs
    with pytest.raises(ModelError, match=f"the end of the graph was returns {last}, is returns {last}, 7"):
        replay(replace(graph, outputs=(last, 7)), planned(), TARGET)


def illegal(edit):
    file = planned()
    return edit(file, file.groups[0], file.groups[1])


ILLEGAL = {
    "wrong operator": (
        lambda f, a, b: edited(f, 0, nodes=(replace(a.nodes[0], operator="nn.dense"), *a.nodes[1:])),
        "chain0 conv2d_bias_relu: wanted node 4 to be nn.conv2d, got nn.dense",
    ),
    "unknown node": (
        lambda f, a, b: edited(f, 0, nodes=(*a.nodes, replace(a.nodes[0], id=99))), "got node 99",
    ),
    "twice": (lambda f, a, b: edited(f, 0, nodes=a.nodes * 2), "which is in two groups"),
    "empty": (lambda f, a, b: edited(f, 0, nodes=()), "its anchor, result and prologue among its nodes"),
    "two anchors": (
        lambda f, a, b: edited(replace(f, groups=f.groups[1:]), 0, nodes=a.nodes + b.nodes),
        "each operator once|the operators before the anchor",
    ),
    "overlap": (lambda f, a, b: replace(f, groups=(*f.groups, a)), "in two groups"),
    "inner value read outside": (lambda f, a, b: edited(f, 0, result=a.nodes[0].id), "read outside"),
    "cpu cannot": (lambda f, a, b: replace(f, kind="cpu"), "the target can compute with it"),
}  # fmt: skip


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_edits(case):
    edit, match = ILLEGAL[case]
    with pytest.raises(ModelError, match=match):
        replay(build(), illegal(edit), TARGET)
