"""Folding to the end over random graphs: the outputs stay, it ends, and no round touches a node twice."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, Norm, apply_folds
from tests.support.numerics import evaluate, max_error
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.rounds import plan_round

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    derandomize=True,
    max_examples=int(os.environ.get("TVM_FUSE_EXAMPLES", "150")),
    deadline=None,
    database=None,
)
C = 3  # as large as the image and the batch: a wrong axis fits
#: What a graph is made of, piece by piece.
PIECES = [
    ["conv", "bn"],
    ["bn", "conv"],
    ["bn", "pad", "conv"],
    ["conv", "bias", "concat", "bn"],
    ["conv", "residual", "bn"],
    ["conv", "concat", "transpose", "residual", "scale", "bn"],
    ["transpose", "conv", "transpose", "scale"],
    ["scale", "bias", "dense", "scale"],
    *(["conv"], ["bn"], ["bias"], ["scale"], ["transpose"], ["residual"], ["concat"], ["relu"]),
]


class Net:
    """A graph that grows by one operator at a time, each on a value drawn from those there are."""

    def __init__(self, draw, seed):
        self.draw, self.rng = draw, np.random.default_rng(seed)
        self.g = GraphBuilder()
        self.layouts = {self.g.input("x", (C, C, C, C)): "NCHW"}

    def grow(self, step):
        # Mostly the newest value, so that chains get long; sometimes an older one, which is then shared.
        age = self.rng.choice([1, 2, 3], p=[0.94, 0.03, 0.03])
        value = list(self.layouts)[-min(age, len(self.layouts))]
        layout = self.layouts[value]
        new = getattr(self, step)(value, layout)
        if new is not None:
            new, layout = new
            self.layouts[new] = layout

    def channels(self, value, layout):
        return self.g.shape(value)[layout.index("C")]

    def vector(self, value, layout):
        channels = self.channels(value, layout)
        vector = self.rng.uniform(0.5, 1.5, channels) * self.rng.choice([-1.0, 1.0], channels)
        return vector.reshape([-1 if letter == "C" else 1 for letter in layout])

    def conv(self, value, layout):
        channels = self.channels(value, layout)
        is_deep = channels == C and self.draw(st.integers(0, 3)) == 0
        size = self.draw(st.sampled_from([1, 3]))
        shape = (C, 1 if is_deep else channels, size, size)
        weight = self.rng.normal(size=shape) / (shape[1] * size**2) ** 0.5
        groups = C if is_deep else 1
        same = (size // 2,) * 2
        return self.g.conv2d(value, weight, padding=same, groups=groups, layout=layout), layout

    def dense(self, value, layout):
        channels = self.g.shape(value)[-1]
        weight = self.rng.normal(size=(channels, channels)) / channels**0.5
        return self.g.dense(value, weight), layout

    def bias(self, value, layout):
        vector = self.vector(value, layout)
        if self.draw(st.booleans()):
            return self.g.bias_add(value, vector.reshape(-1), axis=layout.index("C")), layout
        return self.g.add(value, vector), layout

    def scale(self, value, layout):
        operator = self.draw(st.sampled_from(["multiply", "divide", "subtract"]))
        constant = self.draw(st.sampled_from(["vector", "scalar"]))
        number = self.vector(value, layout) if constant == "vector" else 1.5
        return getattr(self.g, operator)(value, number), layout

    def bn(self, value, layout):
        axis = layout.index("C") if self.draw(st.integers(0, 9)) else self.draw(st.integers(0, 3))
        size = self.g.shape(value)[axis]
        gamma = self.rng.uniform(0.5, 1.5, size) * self.rng.choice([-1.0, 0.0, 1.0], size, p=[0.4, 0.1, 0.5])
        norm = Norm(
            gamma, self.rng.normal(size=size), self.rng.normal(size=size), self.rng.uniform(0.5, 2, size)
        )
        return self.g.norm(value, norm, axis=axis), layout

    def relu(self, value, layout):
        return self.g.relu(value), layout

    def other(self, value, layout):
        """Something to join with a value: mostly a new layer beside it, sometimes a value that there is."""
        axis = layout.index("C")
        shape = self.g.shape(value)
        fitting = [
            value
            for value, its in self.layouts.items()
            if its == layout
            and all(a == b for i, (a, b) in enumerate(zip(self.g.shape(value), shape)) if i != axis)
        ]
        if self.rng.random() < 0.1:
            return fitting[-1 - self.rng.integers(min(3, len(fitting)))]
        new, _ = self.conv(fitting[0], layout)
        return self.bias(new, layout)[0] if self.rng.random() < 0.5 else new

    def residual(self, value, layout):
        other = self.other(value, layout)
        if self.g.shape(other) != self.g.shape(value):
            return None
        return self.g.add(*((value, other) if self.draw(st.booleans()) else (other, value))), layout

    def concat(self, value, layout):
        other = self.other(value, layout)
        if self.channels(value, layout) + self.channels(other, layout) > 4 * C:
            return None
        parts = (value, other) if self.draw(st.booleans()) else (other, value)
        return self.g.concatenate(*parts, axis=layout.index("C")), layout

    def transpose(self, value, layout):
        order = (0, 2, 3, 1) if layout == "NCHW" else (0, 3, 1, 2)
        return self.g.transpose(value, *order), "NHWC" if layout == "NCHW" else "NCHW"

    def pad(self, value, layout):
        if max(self.g.shape(value)) > 4:
            return None
        return self.g.pad(value, *((int(letter in "HW"), 0) for letter in layout)), layout

    def build(self):
        """Everything that nobody reads is returned, and now and then a value that is read as well."""
        read = {source for node in self.g.nodes for source in node.inputs}
        outputs = [value for value in self.layouts if value not in read]
        if self.draw(st.integers(0, 4)) == 0:
            outputs.append(self.draw(st.sampled_from(list(self.layouts))))
        return self.g.build(*outputs)


@SETTINGS
@given(st.data(), st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.integers(0, 2**16))
def test_random_graphs_keep_their_outputs(data, pieces, seed):
    steps = [step for piece in pieces for step in piece]
    net = Net(data.draw, seed)
    for step in steps:
        net.grow(step)
    graph = net.build()
    feeds = {"x": np.random.default_rng(seed).normal(size=(C, C, C, C))}
    wanted = evaluate(graph, feeds)
    for _ in range(2 * len(steps) + 1):
        planned = plan_round(graph)
        records = (*planned.folds, *planned.runs)
        assert len(records) == len(planned.applied) == len(planned.edits)
        if not records:
            break
        touched = [node for edit in planned.edits for node in edit.touched]
        assert len(touched) == len(set(touched))
        some = [record for record in records if data.draw(st.booleans())]
        for chosen in (some, records):  # each record stands for itself
            folded = apply_folds(graph, chosen)
            for got, want in zip(evaluate(folded, feeds), wanted):
                assert max_error(got, want) < 1e-10
        assert len(folded.of_kind(Kind.BATCH_NORM)) <= len(graph.of_kind(Kind.BATCH_NORM))
        graph = folded
    else:
        raise AssertionError("folding does not end")
