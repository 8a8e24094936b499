"""Floating-point dtypes of tensors, bfloat16 among them, which NumPy does not have.

An array of dtype ``bfloat16`` is held as its bits, in ``uint16``; the name of the dtype is the
graph's (``TensorInfo.dtype``). Everything is computed in float64 and rounded once, to nearest with
ties to even, straight from float64: going through float32 would round twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOATS", "Array", "Float", "holds", "narrow", "size_bytes", "widen"]

#: A NumPy array of any dtype.
Array = NDArray[Any]


@dataclass(frozen=True)
class Float:
    """What a floating-point dtype can hold.

    Args:
        name: Its name.
        roundoff: Largest relative error of rounding to it, for normal numbers: half a unit in the last place.
        largest: Largest finite number.
        smallest: Smallest positive number (subnormal).
    """

    name: str
    roundoff: float
    largest: float
    smallest: float


#: Name -> limits. bfloat16: 8 significant bits and the exponents of float32.
FLOATS = {
    "float16": Float("float16", 2.0**-11, 65504.0, 2.0**-24),
    "bfloat16": Float("bfloat16", 2.0**-8, float((2 - 2.0**-7) * 2.0**127), 2.0**-133),
    "float32": Float("float32", 2.0**-24, float(np.finfo(np.float32).max), 2.0**-149),
    "float64": Float("float64", 2.0**-53, float(np.finfo(np.float64).max), 2.0**-1074),
}


def size_bytes(dtype: str) -> int:
    """Bytes of one number of a dtype such as ``bfloat16``, ``int4`` (a byte) or ``bool``."""
    bits = re.search(r"\d+", dtype)
    return (int(bits.group()) + 7) // 8 if bits else 1


def holds(dtype: str, other: str) -> bool:
    """Whether a floating-point dtype has all numbers of another one."""
    this, that = FLOATS[dtype], FLOATS[other]
    return this.roundoff <= that.roundoff and this.largest >= that.largest and this.smallest <= that.smallest


def widen(array: Array, dtype: str) -> Array:
    """The numbers of an array in float64, exactly.

    Args:
        array: Any shape; ``uint16`` bits where ``dtype`` is ``bfloat16``.
        dtype: Name of the dtype of the tensor.
    """
    with np.errstate(invalid="ignore"):  # a signaling NaN
        if dtype == "bfloat16" and array.dtype == np.uint16:
            bits = np.left_shift(array, 16, dtype=np.uint32)
            return np.asarray(bits.view(np.float32), np.float64)
        return array.astype(np.float64)


def narrow(exact: Array, dtype: str) -> Array:
    """Round float64 numbers once to a dtype; what is too large becomes infinite.

    Args:
        exact: float64, any shape.
        dtype: A name in ``FLOATS``.

    Returns:
        The same shape; ``uint16`` bits for ``bfloat16``.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            return exact.astype(dtype)
        fraction, exponent = np.frexp(exact)
        # Eight significant bits, fewer below 2**-126, where the numbers are subnormal.
        shift = np.minimum(8, exponent + 133)
        rounded = np.ldexp(np.rint(np.ldexp(fraction, shift)), exponent - shift)
        rounded = np.where(np.isfinite(exact), rounded, exact)
        return np.asarray(rounded.astype(np.float32).view(np.uint32) >> 16, np.uint16)
