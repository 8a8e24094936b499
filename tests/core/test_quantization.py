"""Quantization in pieces: the spellings that have a name, and what keeps it from one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tvm_fuse.core.quantization import match_quantization


def divided(g, x):
    return g.elementwise("round", g.divide(x, 0.05))


def fixed_point(op, cast=True):
    def make(g, x):
        x = g.cast(x, "int32") if cast else x
        inputs = (x, *([g.const(np.ones(2, "int32"))] * 3 if op.endswith("axis") else ()))
        return g.elementwise(op, *inputs)

    return make


def bounded(g, x, point=True, dtype="int8"):
    x = g.add(x, 1.0) if point else x
    return g.cast(g.clip(x, -128.0, 127.0), dtype)


FOUND = {
    "quantize": ("quantize", divided, {}),
    "quantize, zero point 0": ("quantize", divided, {"point": False}),
    "quantize to bytes": ("quantize", divided, {"dtype": "uint8"}),
    "requantize": ("requantize", fixed_point("fixed_point_multiply"), {}),
    "requantize, no cast": ("requantize", fixed_point("fixed_point_multiply", cast=False), {}),
    "requantize channels": ("requantize", fixed_point("fixed_point_multiply_per_axis"), {"point": False}),
}


@pytest.mark.parametrize("case", FOUND)
def test_found(case):
    name, start, end = FOUND[case]
    g = GraphBuilder("float32")
    x = g.input("x", (1, 2))
    graph = g.build(g.relu(bounded(g, start(g, x), **end)))
    found = match_quantization(graph, x)
    assert found.name == name
    wanted = tuple(node.id for node in graph.nodes if node.kind.value not in ("input", "constant", "relu"))
    assert found.nodes == wanted


def clipped_only(g, x):
    return bounded(g, x), ()


def to_float(g, x):
    return bounded(g, divided(g, x), dtype="float16"), ()


def read_twice(g, x):
    rounded = divided(g, x)
    return bounded(g, rounded), (g.tanh(rounded),)


def returned(g, x):
    rounded = divided(g, x)
    return bounded(g, rounded), (rounded,)


@pytest.mark.parametrize("make", [clipped_only, to_float, read_twice, returned])
def test_not_found(make):
    g = GraphBuilder("float32")
    x = g.input("x", (1, 2))
    result, others = make(g, x)
    assert match_quantization(g.build(result, *others), x) is None
