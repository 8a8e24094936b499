"""What an edit touches, and that carrying one out does what it says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, apply_folds
from tests.support.numerics import evaluate
from tvm_fuse.core.edit import Edit, LayerEdit, choose_disjoint
from tvm_fuse.core.graph import Kind

WEIGHT, BIAS = np.full((1, 1), 3.0), np.full((1, 1), 0.5)


def test_touched_is_what_changes():
    layers = (LayerEdit(3, WEIGHT, None), LayerEdit(5, WEIGHT, BIAS))
    assert Edit(layers, {7: 3, 8: 7}).touched == {3, 5, 7, 8}
    assert Edit(layers[:1], {}).touched == {3}


def test_an_edit_is_a_value():
    edit = Edit((LayerEdit(3, WEIGHT, None),), {})
    assert edit == Edit((LayerEdit(3, 2 * WEIGHT, BIAS),), {})  # arrays are not compared
    assert edit != Edit((LayerEdit(4, WEIGHT, None),), {})
    with pytest.raises(FrozenInstanceError):
        edit.layers = ()


#: what each edit touches -> which are chosen
CHOICES = {
    "none": ([], set()),
    "disjoint": ([{1, 2}, {3}, {4}], {0, 1, 2}),
    "the first one wins": ([{1, 2}, {2, 3}, {4}], {0, 2}),
    "one that is not chosen keeps its place": ([{1, 2}, {2, 3}, {3, 4}, {5}], {0, 3}),
    "all the same": ([{1}, {1}, {1}], {0}),
}


@pytest.mark.parametrize(("touched", "chosen"), CHOICES.values(), ids=CHOICES.keys())
def test_choose_disjoint(touched, chosen):
    edits = {key: Edit((), dict.fromkeys(nodes, 0)) for key, nodes in enumerate(touched)}
    assert choose_disjoint(edits) == chosen


def carried_out(edits, build):
    """The result for x = 2 after some edits of a graph, and the graph."""
    g = GraphBuilder()
    records = [SimpleNamespace(edit=edit) for edit in edits]
    graph = apply_folds(g.build(*build(g)), records)
    return [output.item() for output in evaluate(graph, {"x": np.full((1, 1), 2.0)})], graph


def layer_and_pieces(g):
    """x = 0, weight = 1, layer = 2, 4 = layer * 10, 6 = that + 100"""
    layer = g.dense(g.input("x", (1, 1)), np.ones((1, 1)))
    scaled = g.multiply(layer, np.full((1, 1), 10.0))
    return (g.add(scaled, np.full((1, 1), 100.0)),)


ALIASES = {
    "nothing": ({}, 10 * 2 + 100),
    "one": ({4: 2}, 2 + 100),
    "the last one": ({6: 4}, 10 * 2),
    "a row of them": ({4: 2, 6: 4}, 2),
}


@pytest.mark.parametrize(("aliases", "wanted"), ALIASES.values(), ids=ALIASES.keys())
def test_aliases(aliases, wanted):
    (got,), _ = carried_out([Edit((), aliases)], layer_and_pieces)
    assert got == wanted


def test_weight_and_bias_of_a_layer():
    edit = Edit((LayerEdit(2, WEIGHT, BIAS),), {4: 2, 6: 4})
    (got,), graph = carried_out([edit], layer_and_pieces)
    assert got == 3 * 2 + 0.5
    assert [node.kind for node in graph.nodes if node.inputs] == [Kind.DENSE, Kind.ADD]
    (got,), graph = carried_out([Edit((LayerEdit(2, WEIGHT, None),), {4: 2, 6: 4})], layer_and_pieces)
    assert got == 3 * 2
    assert [node.kind for node in graph.nodes if node.inputs] == [Kind.DENSE]


def test_readers_of_an_alias_read_the_layer_with_its_bias():
    def build(g):
        (result,) = layer_and_pieces(g)
        return g.relu(result), result, g.tanh(result)

    got, _ = carried_out([Edit((LayerEdit(2, WEIGHT, BIAS),), {4: 2, 6: 4})], build)
    assert got == [6.5, 6.5, np.tanh(6.5)]


def test_two_edits_of_one_layer_are_caught():
    edit = Edit((LayerEdit(2, WEIGHT, None),), {})
    with pytest.raises(AssertionError, match="two records fold into one layer"):
        carried_out([edit, edit], layer_and_pieces)
