"""NumPy views of TVM's tensors, without a copy.

A pass reads every weight of a model, and a job runs a dozen passes; ``NDArray.numpy`` would copy all
of them each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["view_array"]

#: What NumPy has under the same name; bfloat16 is seen as its bits.
_DTYPES = {
    name: np.dtype("uint16" if name == "bfloat16" else name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}

_CPU = 1


class _Buffer:
    """What NumPy needs to look at memory; it keeps the owner of that memory alive."""

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, True),
        }


def view_array(array: Any) -> np.ndarray:
    """Look at a ``tvm.nd.NDArray``.

    Args:
        array: Any NDArray.

    Returns:
        A read-only view of its memory (TVM keeps tensors compact) where that is on the CPU and NumPy
        knows the dtype; else a copy. bfloat16 is given as its bits, in ``uint16``.
    """
    tensor = array.handle.contents
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None or tensor.device.device_type != _CPU or not tensor.data:
        return np.asarray(array.numpy())
    return np.asarray(_Buffer(array, tensor.data + tensor.byte_offset, shape, dtype))
