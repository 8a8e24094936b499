"""Folding equals batch norm after convolution, over random layers, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, Norm, apply_folds
from tests.support.numerics import evaluate, from_plain, max_error
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import Kind

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(derandomize=True, max_examples=60, deadline=None, database=None)
GAMMA = st.one_of(st.just(0.0), st.floats(0.01, 10.0), st.floats(-10.0, -0.01))


@st.composite
def layers(draw):
    """Groups, channels, layouts, geometry and bias of a convolution, with its batch norm."""
    groups = draw(st.integers(1, 4))
    per_group_in, per_group_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels_in, channels_out = groups * per_group_in, groups * per_group_out
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    window = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return {
        "layout": draw(st.sampled_from(["NCHW", "NHWC"])),
        "kernel": draw(st.sampled_from(["OIHW", "HWIO", "OHWI", "HWOI"])),
        "groups": groups,
        "strides": (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        "padding": tuple(draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))),
        "dilation": (1, draw(st.integers(1, 2))),
        "data": rng.normal(size=(draw(st.integers(1, 2)), channels_in, 5, 5)),
        "weight": rng.normal(size=(channels_out, per_group_in, *window)),
        "bias": draw(st.sampled_from(["none", "bias_add", "add", "add swapped", "number"])),
        "norm": Norm(
            np.array(draw(st.lists(GAMMA, min_size=channels_out, max_size=channels_out))),
            rng.normal(size=channels_out),
            rng.normal(size=channels_out),
            rng.uniform(0, 4, channels_out),
        ),
        "epsilon": draw(st.sampled_from([1e-5, 1e-3, 0.1])),
        "center": draw(st.booleans()),
        "scale": draw(st.booleans()),
        "rng": rng,
    }


def build(layer):
    g = GraphBuilder()
    layout, channel = layer["layout"], layer["layout"].index("C")
    data = from_plain(layer["data"], "NCHW", layout)
    y = g.conv2d(
        g.input("x", data.shape),
        from_plain(layer["weight"], "OIHW", layer["kernel"]),
        kernel=layer["kernel"],
        **{name: layer[name] for name in ("layout", "groups", "strides", "padding", "dilation")},
    )
    bias = layer["rng"].normal(size=len(layer["weight"]))
    spread = bias.reshape([-1 if letter == "C" else 1 for letter in layout])
    y = {
        "none": lambda: y,
        "bias_add": lambda: g.bias_add(y, bias, axis=channel),
        "add": lambda: g.add(y, spread),
        "add swapped": lambda: g.add(spread, y),
        "number": lambda: g.add(y, 1.5),
    }[layer["bias"]]()
    options = {name: layer[name] for name in ("epsilon", "center", "scale")}
    return g.build(g.relu(g.norm(y, layer["norm"], axis=channel, **options))), {"x": data}


@SETTINGS
@given(layers())
def test_fold_equals_batch_norm_after_convolution(layer):
    graph, feeds = build(layer)
    records, decisions = plan_folds(graph)
    assert [decision.applied for decision in decisions] == [True]
    folded = apply_folds(graph, records)
    assert max_error(*evaluate(folded, feeds), *evaluate(graph, feeds)) < 1e-11
    assert plan_folds(folded) == ((), ())


@SETTINGS
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["OIHW", "HWOI", "HWIO"]), st.integers(0, 99))
def test_depthwise_with_multiplier(channels, multiplier, kernel, seed):
    """A ``(C, multiplier, ...)`` kernel: output channel ``c * multiplier + m``."""
    rng = np.random.default_rng(seed)
    out = channels * multiplier
    g = GraphBuilder()
    weight = from_plain(rng.normal(size=(channels, multiplier, 2, 2)), "OIHW", kernel)
    y = g.conv2d(g.input("x", (1, channels, 4, 4)), weight, groups=channels, channels=out, kernel=kernel)
    norm = Norm(rng.normal(size=out), rng.normal(size=out), rng.normal(size=out), rng.uniform(0.1, 2, out))
    graph = g.build(g.norm(y, norm))
    records, _ = plan_folds(graph)
    feeds = {"x": rng.normal(size=(1, channels, 4, 4))}
    assert max_error(*evaluate(apply_folds(graph, records), feeds), *evaluate(graph, feeds)) < 1e-11


@SETTINGS
@given(st.lists(st.sampled_from(["conv", "bias", "bn", "relu", "residual"]), max_size=9), st.integers(0, 99))
def test_any_stack_of_layers_keeps_its_value(stack, seed):
    """Whatever is folded, the outputs stay; folding until nothing changes leaves no foldable pair."""
    rng = np.random.default_rng(seed)
    g = GraphBuilder()
    x = y = g.input("x", (1, 3, 3, 3))
    for layer in stack:
        norm = Norm(rng.normal(size=3), rng.normal(size=3), rng.normal(size=3), rng.uniform(0.1, 2, 3))
        y = {
            "conv": lambda y: g.conv2d(y, rng.normal(size=(3, 3, 1, 1))),
            "bias": lambda y: g.bias_add(y, rng.normal(size=3)),
            "bn": lambda y, norm=norm: g.norm(y, norm),
            "relu": g.relu,
            "residual": lambda y: g.add(y, x),
        }[layer](y)
    graph = folded = g.build(y)
    feeds = {"x": rng.normal(size=(1, 3, 3, 3))}
    wanted = evaluate(graph, feeds)
    for _ in range(len(stack)):
        records, decisions = plan_folds(folded)
        assert (
            len(decisions) == len(folded.of_kind(Kind.BATCH_NORM)) or records
        )  # some wait for the next round
        assert len(records) == sum(decision.applied for decision in decisions)
        folded = apply_folds(folded, records)
        assert max_error(*evaluate(folded, feeds), *wanted) < 1e-10
    assert plan_folds(folded)[0] == ()
