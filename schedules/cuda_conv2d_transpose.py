"""Transposed conv2d on a CUDA GPU as a product, with groups, in NCHW.

::

    out[n, o, y, x] = sum over c, ky, kx of weight[c, o, ky, kx] * data[n, c, (y + py - ky) / sy, ...]
                      for the ky, kx for which the divisions leave nothing

Of every ``sy * sx`` neighbours of the result each uses its own taps of the kernel, so each such *phase* is a
product of its own, and no term is a product with a zero that the stride put there::

    group = (o // (O / groups), y % sy, x % sx)      row = o % (O / groups)
    depth = c, taps = every sy-th ky, every sx-th kx      columns = (n, y // sy, x // sx)

A kernel size that the stride does not divide has taps of zero weight in some phases. Taps run from the last
to the first, so that pixels are counted up: TVM's simplifier makes ``b < 5`` of ``2 b + r < 10`` for an ``r``
from -1 to 1, which is wrong for -1 (``canonical_simplify.cc``, less-than). Numerics and what follows: see
``cuda_product.py`` and ``cuda_narrow.py``. Source: the sub-pixel view of Shi et al., "Is the deconvolution
layer the same as a convolutional layer?", arXiv 1609.07009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cuda_kernel import Kernel
from tvm_fuse_schedules.cuda_plan import plan_product
from tvm_fuse_schedules.cuda_product import Axes, compute_product
from tvm_fuse_schedules.cuda_tiles import Product, Tile

__all__ = ["Conv2dTranspose", "plan_conv2d_transpose"]


@dataclass(frozen=True)
class Conv2dTranspose:
    """A transposed convolution without dilation.

    Args:
        data: Shape ``(N, C, H, W)``.
        weight: Shape ``(C, O / groups, KH, KW)``.
        result: Shape ``(N, O, OH, OW)``; output padding is part of it.
        strides: Of height and width.
        padding: Top and left.
        groups: C and O divide by it.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    groups: int = 1

    @property
    def taps(self) -> tuple[int, int]:
        """Taps of a phase along height and width."""
        height, width = (-(-size // stride) for size, stride in zip(self.weight[2:], self.strides))
        return height, width


def plan_conv2d_transpose(conv: Conv2dTranspose, arch: str) -> Kernel | None:
    """Choose the schedule of a float32 transposed convolution.

    Args:
        conv: The convolution.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when no tile fits.
    """
    batch, _, height, width = conv.result
    product = Product(
        groups=conv.groups * math.prod(conv.strides),
        rows=conv.weight[1],
        columns=(batch, -(-height // conv.strides[0]), -(-width // conv.strides[1])),
        depth=conv.data[1] // conv.groups,
        taps=math.prod(conv.taps),
        is_joined=conv.groups > 1,
    )

    def compute(tile: Tile | None, data: Any, weight: Any) -> Any:
        return _compute(conv, product, tile, data, weight)

    axes = Axes(row=1, columns=(0, 2, 3), phases=(1, *conv.strides))
    return plan_product(product, axes, compute, arch)


def _compute(conv: Conv2dTranspose, product: Product, tile: Tile | None, data: Any, weight: Any) -> Any:
    (stride_h, stride_w), (top, left), depth, rows = conv.strides, conv.padding, product.depth, product.rows
    taps_h, taps_w = conv.taps
    zero = tir.const(0, data.dtype)

    def phases_of(group: Any) -> tuple[Any, Any, Any]:
        return group // (stride_h * stride_w), group // stride_w % stride_h + top, group % stride_w + left

    def weights(group: Any, row: Any, term: Any) -> Any:
        group, phase_y, phase_x = phases_of(group)
        tap = term % product.taps
        ky = phase_y % stride_h + (taps_h - 1 - tap // taps_w) * stride_h
        kx = phase_x % stride_w + (taps_w - 1 - tap % taps_w) * stride_w
        is_tap = tir.all(ky < conv.weight[2], kx < conv.weight[3])
        return tir.if_then_else(is_tap, weight[group * depth + term // product.taps, row, ky, kx], zero)

    def pixels(group: Any, step: Any, tap: Any, image: Any, y: Any, x: Any) -> Any:
        group, phase_y, phase_x = phases_of(group)
        y = y + phase_y // stride_h + tap // taps_w - (taps_h - 1)
        x = x + phase_x // stride_w + tap % taps_w - (taps_w - 1)
        is_inside = tir.all(y >= 0, y < conv.data[2], x >= 0, x < conv.data[3])
        return tir.if_then_else(is_inside, data[image, group * depth + step, y, x], zero)

    sums = compute_product(product, tile, weights, pixels, data.dtype)

    def result(n: Any, o: Any, y: Any, x: Any) -> Any:
        group, row = (0, o) if conv.groups == 1 else (o // rows, o % rows)
        group = (group * stride_h + y % stride_h) * stride_w + x % stride_w
        return sums[group, row, n, y // stride_h, x // stride_w]

    return te.compute(conv.result, result, name="conv2d_transpose", tag="tvm_fuse_conv2d_transpose")
