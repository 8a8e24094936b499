"""conv2d on a CUDA GPU as a product, with groups, in NCHW.

::

    out[n, o, y, x] = sum over c, ky, kx of weight[o, c, ky, kx] * data[n, c', y * sy + ky * dy - py, ...]

    group = o // (O / groups)      row = o % (O / groups)          channels of the result
    depth = c, taps = (ky, kx)     columns = (n, y, x)             pixels of the result

The patches are a view: shared memory holds those of one chunk, and padding is a condition of the load.
The weights of a row lie in memory as they are walked, so they are loaded four at a time where their
number divides by four; so are the pixels of a 1x1 convolution with stride 1.

Numerics and what follows: see ``cuda_product.py`` and ``cuda_narrow.py``. Source: the implicit GEMM
formulation of Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", arXiv 1410.0759.
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

__all__ = ["Conv2d", "plan_conv2d"]

#: Axes of an NCHW result.
_AXES = Axes(row=1, columns=(0, 2, 3))
_FLOATS_OF_A_VECTOR = 4


@dataclass(frozen=True)
class Conv2d:
    """A convolution.

    Args:
        data: Shape ``(N, C, H, W)``.
        weight: Shape ``(O, C / groups, KH, KW)``.
        strides: Of height and width.
        padding: Top, left, bottom, right.
        dilation: Of height and width.
        groups: C and O divide by it.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def result(self) -> tuple[int, int, int, int]:
        """Shape ``(N, O, OH, OW)``."""
        height, width = (
            (size + before + after - (kernel - 1) * dilation - 1) // stride + 1
            for size, before, after, kernel, dilation, stride in zip(
                self.data[2:],
                self.padding[:2],
                self.padding[2:],
                self.weight[2:],
                self.dilation,
                self.strides,
            )
        )
        return self.data[0], self.weight[0], height, width


def plan_conv2d(conv: Conv2d, arch: str) -> Kernel | None:
    """Choose the schedule of a float32 convolution.

    Args:
        conv: The convolution.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when no tile fits.
    """
    product = _product_of(conv)

    def compute(tile: Tile | None, data: Any, weight: Any) -> Any:
        return _compute(conv, product, tile, data, weight)

    return plan_product(product, _AXES, compute, arch)


def _product_of(conv: Conv2d) -> Product:
    batch, channels, *pixels = conv.result
    depth, taps = conv.weight[1], math.prod(conv.weight[2:])
    is_plain = taps == 1 and conv.strides == (1, 1) and not any(conv.padding)
    left_vector = _FLOATS_OF_A_VECTOR if depth * taps % _FLOATS_OF_A_VECTOR == 0 else 1
    right_vector = _FLOATS_OF_A_VECTOR if is_plain and math.prod(pixels) % _FLOATS_OF_A_VECTOR == 0 else 1
    return Product(
        groups=conv.groups,
        rows=channels // conv.groups,
        columns=(batch, *pixels),
        depth=depth,
        taps=taps,
        left_vector=left_vector,
        right_vector=right_vector,
        is_joined=conv.groups > 1,
    )


def _compute(conv: Conv2d, product: Product, tile: Tile | None, data: Any, weight: Any) -> Any:
    rows, depth, taps = product.rows, product.depth, product.taps
    kernel_w = conv.weight[3]

    def weights(group: Any, row: Any, term: Any) -> Any:
        tap = term % taps
        return weight[group * rows + row, term // taps, tap // kernel_w, tap % kernel_w]

    def patches(group: Any, step: Any, tap: Any, image: Any, y: Any, x: Any) -> Any:
        y = y * conv.strides[0] + tap // kernel_w * conv.dilation[0] - conv.padding[0]
        x = x * conv.strides[1] + tap % kernel_w * conv.dilation[1] - conv.padding[1]
        value = data[image, group * depth + step, y, x]
        if not any(conv.padding):
            return value
        is_inside = tir.all(y >= 0, y < conv.data[2], x >= 0, x < conv.data[3])
        return tir.if_then_else(is_inside, value, tir.const(0, data.dtype))

    sums = compute_product(product, tile, weights, patches, data.dtype)

    def result(n: Any, o: Any, y: Any, x: Any) -> Any:
        return sums[0, o, n, y, x] if conv.groups == 1 else sums[o // rows, o % rows, n, y, x]

    return te.compute(conv.result, result, name="conv2d", tag="tvm_fuse_conv2d")
