"""A map that goes past a reshape or transpose does the same there, over random shapes."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder
from tests.support.numerics import max_error, per_channel
from tvm_fuse.core.channelwise import Affine, after_move, axes_after, axes_before, before_move

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(derandomize=True, max_examples=150, deadline=None, database=None)


def apply(affine, x, axes):
    return per_channel(x, affine.scale, affine.shift, axes)


def one_operator(make, shape):
    g = GraphBuilder()
    operator = make(g, g.input("x", shape))
    return g.build(operator), g.nodes[operator]


def _split(draw, sizes):
    """Some sizes, each taken apart into factors at random, with ones thrown in."""
    result = []
    for size in sizes:
        while size > 1 and draw(st.booleans()):
            factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
            result.append(factor)
            size //= factor
            if factor == 1:
                break
        result.append(size)
    return result


@st.composite
def reshapes(draw):
    """Two shapes of the same elements, and the axes of the channel in the first one."""
    before, channel, after = (draw(st.integers(1, 12)) for _ in range(3))
    parts = [_split(draw, [size]) for size in (before, channel, after)]
    shape = tuple(size for part in parts for size in part)
    axes = tuple(range(len(parts[0]), len(parts[0]) + len(parts[1])))
    other = draw(st.sampled_from(["same channels", "any"]))
    target = (
        _split(draw, [before, channel, after])
        if other == "same channels"
        else _split(draw, [before * channel * after])
    )
    return shape, axes, tuple(target)


@SETTINGS
@given(reshapes())
def test_reshapes_move_maps_exactly(case):
    """Whatever axes are found: map then reshape equals reshape then map, there and back."""
    shape, axes, target = case
    graph, node = one_operator(lambda g, x: g.reshape(x, *target), shape)
    channels = prod(shape[axis] for axis in axes)
    affine = Affine(1.0 + np.arange(channels), 0.5 * np.arange(channels))
    moved_axes, moved = after_move(graph, node, axes, affine)  # all sizes are static: there always is one
    x = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    wanted = apply(affine, x, axes).reshape(target)
    assert max_error(apply(moved, x.reshape(target), moved_axes), wanted) == 0
    back_axes, back = before_move(graph, node, moved_axes, moved)
    assert max_error(apply(back, x, back_axes), wanted.reshape(shape)) == 0
    found = axes_after(graph, node, axes)
    if found is not None:
        again = axes_before(graph, node, found)
        assert max_error(apply(affine, x, again), wanted.reshape(shape)) == 0


@SETTINGS
@given(st.permutations(range(5)), st.sampled_from([(1,), (3,), (1, 4), (0, 2, 3)]))
def test_transposes_move_maps_exactly(order, axes):
    shape = (2, 3, 4, 2, 3)
    graph, node = one_operator(lambda g, x: g.transpose(x, *order), shape)
    found = axes_after(graph, node, axes)
    assert (found is None) == ([order.index(a) for a in axes] != sorted(order.index(a) for a in axes))
    if found is not None:
        assert axes_before(graph, node, found) == axes
        channels = prod(shape[axis] for axis in axes)
        affine = Affine(1.0 + np.arange(channels), 0.5 * np.arange(channels))
        x = np.arange(prod(shape), dtype=np.float64).reshape(shape)
        wanted = apply(affine, x, axes).transpose(order)
        assert max_error(apply(affine, x.transpose(order), found), wanted) == 0
