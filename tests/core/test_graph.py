"""The graph: readers, outputs, read-only constants, digests."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.graph import Kind, TensorInfo, digest


def test_readers_count_each_time_a_value_is_read():
    g = GraphBuilder()
    x = g.input("x", (2,))
    y, z = g.add(x, x), g.relu(x)
    graph = g.build(y, z)
    assert graph.readers(x) == (y, y, z)
    assert graph.readers(z) == ()


def test_an_output_may_repeat():
    g = GraphBuilder()
    x = g.input("x", (2,))
    y = g.relu(x)
    graph = g.build(y, y)
    assert graph.outputs == (y, y)
    assert graph.is_output(y)
    assert not graph.is_output(x)


def test_constants_are_read_only_and_the_callers_array_is_left_alone():
    g = GraphBuilder()
    weight = np.ones(3)
    node = g.const(0.0)
    g.constants[node] = weight
    graph = g.build(node)
    with pytest.raises(ValueError, match="read-only"):
        graph.constants[node][0] = 5
    with pytest.raises(TypeError):
        graph.constants[node] = weight
    weight[0] = 2.0
    assert weight.flags.writeable


def test_constant_of_another_node_is_none():
    g = GraphBuilder()
    x = g.input("x", (2,))
    assert g.build(x).constant(x) is None


def test_of_kind_keeps_the_order():
    g = GraphBuilder()
    x = g.input("x", (2,))
    first, second, third = g.relu(x), g.tanh(x), g.relu(x)
    graph = g.build(first, second, third)
    assert [node.id for node in graph.of_kind(Kind.RELU, Kind.TANH)] == [first, second, third]
    assert [node.id for node in graph.of_kind(Kind.RELU)] == [first, third]


def test_graph_is_frozen_and_compares_by_structure():
    def build(value):
        g = GraphBuilder()
        return g.build(g.add(g.input("x", (2,)), value))

    graph = build(1.0)
    assert graph == build(2.0)
    assert hash(graph) == hash(build(1.0))
    with pytest.raises(FrozenInstanceError):
        graph.outputs = ()


def test_text_forms():
    g = GraphBuilder("float32")
    x = g.input("data", (1, 3, "h"))
    y = g.relu(x)
    assert str(g.nodes[x]) == "data"
    assert str(g.nodes[y]) == "nn.relu#1"
    assert str(g.nodes[y].output) == "float32[1x3xh]"
    assert not g.nodes[y].output.is_static
    assert TensorInfo((), "int32").is_static


BASE = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (BASE.copy(), True),
        (np.asfortranarray(BASE), True),
        (BASE.repeat(2, 1)[:, ::2], True),
        (BASE.reshape(3, 2), False),
        (BASE.astype("float64"), False),
        (BASE.view("int32"), False),
        (BASE.astype(">f4"), False),
        (BASE + np.float32(1e-7), False),
        (np.where(BASE == 0, np.float32(-0.0), BASE), False),
    ],
    ids=["copy", "Fortran order", "view", "shape", "dtype", "bits", "byte order", "value", "negative zero"],
)
def test_digest(other, same):
    assert (digest(other) == digest(BASE)) is same


def test_digest_is_stable():
    assert digest(np.arange(3, dtype="<f4")) == "3e35edb2a5c30b0f"
    assert len(digest(np.zeros(()))) == 16
