"""Kinds: every one belongs to exactly one of the families that the rules know."""

from __future__ import annotations

from tvm_fuse.core import graph, kinds
from tvm_fuse.core.kinds import (
    ANCHOR_KINDS,
    ELEMENTWISE_KINDS,
    INJECTIVE_KINDS,
    LEAF_KINDS,
    VIEW_KINDS,
    Kind,
)


def test_anchors_and_tuples_are_not_elementwise():
    structural = {
        *LEAF_KINDS,
        Kind.TUPLE,
        Kind.GET_ITEM,
        *ANCHOR_KINDS,
        Kind.BATCH_NORM,
        Kind.DATA_NORM,
    }
    moves = {
        Kind.CONCATENATE,
        Kind.EXPAND_DIMS,
        Kind.INJECTIVE,
        Kind.LAYOUT_TRANSFORM,
        Kind.PAD,
        Kind.RESHAPE,
        Kind.SLICE,
        Kind.TRANSPOSE,
    }
    sums = {Kind.GLOBAL_POOL, Kind.POOL, Kind.REDUCE, Kind.SOFTMAX}
    assert INJECTIVE_KINDS - ELEMENTWISE_KINDS == moves
    assert set(Kind) - ELEMENTWISE_KINDS == structural | moves | sums | {Kind.OTHER}


def test_views_only_move():
    assert VIEW_KINDS < INJECTIVE_KINDS - ELEMENTWISE_KINDS


def test_the_graph_module_has_them_all():
    assert all(getattr(graph, name) is getattr(kinds, name) for name in kinds.__all__)
