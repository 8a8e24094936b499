"""Convolutions of any rank, transposed or not: bias, residual and activation join them."""

from __future__ import annotations

from tvm_fuse.core.families.family import Family, result_is_static
from tvm_fuse.core.graph import CONVOLUTION_KINDS

__all__ = ["CONVOLUTION"]

CONVOLUTION = Family(
    "conv", CONVOLUTION_KINDS, (result_is_static,), has_epilogue=True, entries=(0,), rule="chain"
)
