"""Dense layers and batched matrix products on a CUDA GPU.

::

    dense:         out[b, o] = sum over k of data[b, k] * weight[o, k]      rows = o, columns = b
    batch_matmul:  out[b, m, n] = sum over k of x[b, m, k] * y[b, n, k]     groups = b, rows = m, columns = n

The weights of a dense layer are the larger operand and lie in memory as they are walked, so they are loaded
four at a time. A batch below eight has one warp a result. One of the batches of a batched product may be 1.

Numerics and what follows: see ``cuda_product.py`` and ``cuda_narrow.py``. Source: the textbook blocked
product.
"""

from __future__ import annotations

from typing import Any

from tvm import te

from tvm_fuse_schedules.cuda_kernel import Kernel
from tvm_fuse_schedules.cuda_plan import plan_product
from tvm_fuse_schedules.cuda_product import Axes, compute_product
from tvm_fuse_schedules.cuda_tiles import Product, Tile

__all__ = ["plan_batch_matmul", "plan_dense"]

_VECTOR = 4


def plan_dense(data: tuple[int, ...], weight: tuple[int, ...], arch: str) -> Kernel | None:
    """Choose the schedule of a float32 dense layer.

    Args:
        data: Shape ``(B, K)``.
        weight: Shape ``(O, K)``.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when no tile fits.
    """
    (batch, depth), rows = data, weight[0]
    product = Product(1, rows, (batch,), depth, left_vector=_vector(depth))

    def compute(tile: Tile | None, x: Any, w: Any) -> Any:
        sums = compute_product(product, tile, lambda g, o, k: w[o, k], lambda g, k, tap, b: x[b, k], x.dtype)
        return te.compute((batch, rows), lambda b, o: sums[0, o, b], name="dense", tag="tvm_fuse_dense")

    return plan_product(product, Axes(row=1, columns=(0,)), compute, arch)


def plan_batch_matmul(
    left: tuple[int, ...], right: tuple[int, ...], transpose_left: bool, transpose_right: bool, arch: str
) -> Kernel | None:
    """Choose the schedule of a float32 batched matrix product.

    Args:
        left: Shape ``(B, M, K)``, or ``(B, K, M)`` when transposed.
        right: Shape ``(B, K, N)``, or ``(B, N, K)`` when transposed.
        transpose_left: Whether the left operand is transposed.
        transpose_right: Whether the right operand is transposed.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when no tile fits.
    """
    batch = max(left[0], right[0])
    rows, depth = (left[2], left[1]) if transpose_left else left[1:]
    columns = right[1] if transpose_right else right[2]
    product = Product(
        groups=batch,
        rows=rows,
        columns=(columns,),
        depth=depth,
        left_vector=1 if transpose_left else _vector(depth),
        right_vector=1 if transpose_right else _vector(columns),
    )

    def compute(tile: Tile | None, x: Any, y: Any) -> Any:
        def left_view(b: Any, m: Any, k: Any) -> Any:
            image = b if left[0] > 1 else 0
            return x[image, k, m] if transpose_left else x[image, m, k]

        def right_view(b: Any, k: Any, tap: Any, n: Any) -> Any:
            image = b if right[0] > 1 else 0
            return y[image, n, k] if transpose_right else y[image, k, n]

        sums = compute_product(product, tile, left_view, right_view, x.dtype)
        shape = (batch, rows, columns)
        return te.compute(shape, lambda *i: sums[i], name="batch_matmul", tag="tvm_fuse_batch_matmul")

    return plan_product(product, Axes(row=1, columns=(2,), group=0), compute, arch)


def _vector(size: int) -> int:
    return _VECTOR if size % _VECTOR == 0 else 1
