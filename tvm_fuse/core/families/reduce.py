"""Sums, means, maxima over axes: what they read is computed on the way in.

What follows joins along rows only (``joins.py``): TVM's schedules of reductions would make a kernel of its
own of it.
"""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_one_tensor, result_is_static
from tvm_fuse.core.graph import Kind

__all__ = ["REDUCE"]

REDUCE = Family(
    "reduce",
    frozenset({Kind.REDUCE}),
    (result_is_one_tensor, result_is_static),
    entries=(0, 1),
    rule="reduce",
)
