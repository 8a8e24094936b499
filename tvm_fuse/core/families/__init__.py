"""Families: which operators a kernel is built around. A new one is a file and a line here."""

from __future__ import annotations

from tvm_fuse.core.families.conv import CONVOLUTION
from tvm_fuse.core.families.elementwise import ELEMENTWISE
from tvm_fuse.core.families.family import Family
from tvm_fuse.core.families.matrix import MATRIX
from tvm_fuse.core.families.pool import POOL
from tvm_fuse.core.families.reduce import REDUCE
from tvm_fuse.core.families.softmax import SOFTMAX
from tvm_fuse.core.graph import Kind

__all__ = ["ELEMENTWISE", "FAMILIES", "LAYERS", "REDUCE", "Family", "family_of"]

#: Families whose anchors choose first what joins them.
LAYERS = (CONVOLUTION, MATRIX)

FAMILIES = (CONVOLUTION, MATRIX, POOL, REDUCE, SOFTMAX, ELEMENTWISE)

_BY_KIND = {kind: family for family in FAMILIES for kind in family.kinds}


def family_of(kind: Kind) -> Family | None:
    """The family of an operator; None where a group can be built neither around it nor with it."""
    return _BY_KIND.get(kind)
