"""Which of the two schedules a product gets on a CUDA GPU.

With eight columns or more it is blocked (``cuda_product.py``), with fewer it is narrow (``cuda_narrow.py``).
"""

from __future__ import annotations

import math
from typing import Any, Callable

from tvm_fuse_schedules.cuda_kernel import Kernel, Schedule
from tvm_fuse_schedules.cuda_narrow import schedule_narrow
from tvm_fuse_schedules.cuda_product import Axes, schedule_product
from tvm_fuse_schedules.cuda_tiles import Product, choose_tile, device_of

__all__ = ["FEWEST_COLUMNS", "plan_product"]

#: A product with fewer columns is narrow.
FEWEST_COLUMNS = 8


def plan_product(product: Product, axes: Axes, compute: Callable[..., Any], arch: str) -> Kernel | None:
    """Choose between the two schedules of a product, and the tile.

    Args:
        product: The sizes.
        axes: What the axes of the operator's result are in the product.
        compute: Tile (or None) and the operator's tensors -> the operator's result.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when no tile fits.
    """
    if math.prod(product.columns) < FEWEST_COLUMNS:
        return Kernel(Schedule.NARROW, lambda *tensors: compute(None, *tensors), schedule_narrow)
    tile = choose_tile(product, device_of(arch))
    if tile is None:
        return None
    return Kernel(
        Schedule.BLOCKED,
        lambda *tensors: compute(tile, *tensors),
        lambda output: schedule_product(output, product, tile, axes),
    )
