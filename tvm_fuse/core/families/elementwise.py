"""Operators without an anchor: elementwise ones and moves, computed together where the last one is stored."""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_one_tensor, result_is_static
from tvm_fuse.core.graph import INJECTIVE_KINDS

__all__ = ["ELEMENTWISE"]

ELEMENTWISE = Family(
    "elementwise", INJECTIVE_KINDS, (result_is_one_tensor, result_is_static), rule="elementwise"
)
