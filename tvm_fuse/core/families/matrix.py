"""Matrix products: dense layers, matmul and batch_matmul, with what follows them."""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_static
from tvm_fuse.core.graph import MATRIX_KINDS

__all__ = ["MATRIX"]

MATRIX = Family("matrix", MATRIX_KINDS, (result_is_static,), has_epilogue=True, entries=(0,), rule="chain")
