"""Pooling and global pooling: elementwise operators after them join (TVM's schedules inline them)."""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_one_tensor, result_is_static
from tvm_fuse.core.graph import Kind

__all__ = ["POOL"]

POOL = Family(
    "pool",
    frozenset({Kind.POOL, Kind.GLOBAL_POOL}),
    (result_is_one_tensor, result_is_static),
    has_epilogue=True,
    entries=(0,),
    rule="pool",
)
