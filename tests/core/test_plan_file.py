"""Plan files: the same bytes, the way there and back, damage that is named, and differences."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core import plan_file
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions

WEIGHT = np.ones((4, 4, 1, 1))
TARGET = "cuda -arch=sm_80"


def build(*, name="stem", weight=WEIGHT, padding=(0, 0)):
    g = GraphBuilder()
    x, z, gate = g.input("x", (1, 4, 2, 2)), g.input("z", (1, 4, 2, 2)), g.input("gate", (1, 4, 1, 1))
    y = g.relu(g.bias_add(g.conv2d(x, weight, name=name, padding=padding), np.ones(4)))
    y = g.relu(g.add(g.conv2d(g.multiply(z, gate), WEIGHT), y))
    return g.build(g.tanh(g.sigmoid(g.other("sort", y))))


def planned(graph=None, **options):
    graph, options = graph or build(), PlanOptions(target="cuda", **options)
    return plan_file.make_plan_file(graph, plan_chains(graph, options), TARGET, options, "tvm-fuse 0.1.0")


@pytest.mark.parametrize("options", [{}, {"skip": ("chain0",)}, {"fuse": "none"}, {"max_ops": 2}], ids=str)
def test_there_and_back(options, tmp_path):
    file = planned(**options)
    text = plan_file.to_json(file)
    assert plan_file.from_json(text) == file
    assert plan_file.to_json(plan_file.from_json(text)) == text
    plan_file.save(tmp_path / "plan.json", file)
    assert plan_file.load(tmp_path / "plan.json") == file
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == text


def test_names_and_weights_do_not_count_in_the_digest():
    other = build(name="first", weight=WEIGHT * 2)
    assert planned(other).digest == planned().digest
    shaped = build(weight=np.ones((4, 4, 3, 3)), padding=(1, 1))
    assert planned(shaped).digest != planned().digest


def test_operators_are_named_for_people():
    group = json.loads(plan_file.to_json(planned()))["groups"][0]
    assert group["id"] == "chain0"
    assert group["nodes"][0] == {"id": 4, "name": "stem", "operator": "nn.conv2d"}


def without(key):
    def edit(document):
        del document[key]

    return edit


def changed(*path, value):
    def edit(document):
        *way, last = path
        for key in way:
            document = document[key]
        document[last] = value

    return edit


DAMAGE = {
    "version": (changed("schema", "version", value=3), "with schema .*'version': 2.*, got .*'version': 3"),
    "older": (changed("schema", "version", value=1), "with schema .*'version': 2.*, got .*'version': 1"),
    "no schema": (without("schema"), "got None"),
    "no groups": (without("groups"), "'groups' is missing"),
    "no target": (without("target"), "'target' is missing"),
    "node that is no number": (changed("groups", 0, "result", value="3"), "the number of a node, got '3'"),
    "negative node": (changed("groups", 0, "nodes", 0, "id", value=-1), "the number of a node, got -1"),
    "a truth": (changed("groups", 0, "anchor", value=True), "the number of a node, got True"),
    "no list": (changed("alone", value=3), "a list of numbers, got 3"),
    "unknown reason": (changed("groups", 0, "end", "code", value="because"), "because"),
    "graph": (changed("graph", "nodes", 0, value="input"), "the graph of the fusion plan was changed"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage(case):
    edit, match = DAMAGE[case]
    document = json.loads(plan_file.to_json(planned()))
    edit(document)
    with pytest.raises(ModelError, match=rf"^plan.json: .*{match}"):
        plan_file.from_json(json.dumps(document), "plan.json")


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "{}"])
def test_no_plan(text):
    with pytest.raises(ModelError, match="wanted a fusion plan"):
        plan_file.from_json(text)


def test_files_that_cannot_be_reached(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        plan_file.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        plan_file.save(tmp_path / "none" / "plan.json", planned())


def test_no_difference():
    assert plan_file.diff(planned(), planned(build(name="other"))).is_empty
    assert plan_file.diff(planned(), replace(planned(), tool="tvm-fuse 9")).lines == ()


def test_differences():
    left, right = planned(), planned(skip=("chain1",))
    found = plan_file.diff(left, right)
    assert [group.id for group in found.removed] == ["chain1"]
    assert (found.added, found.is_empty) == ((), False)
    assert found.lines[0].startswith("left alone: [] became [")
    assert found.lines[1].startswith("- chain1 multiply_conv2d_residual_relu (")
    back = plan_file.diff(right, left)
    assert back.lines[1].startswith("+ chain1 ")
    assert plan_file.diff(left, replace(left, target="llvm")).lines == (f"target: {TARGET} became llvm",)
