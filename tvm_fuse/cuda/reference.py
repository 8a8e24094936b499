"""Convolution, folded batch norm and ReLU as in the textbook: a kernel by hand, baseline and oracle."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from string import Template

from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.launch import Dim3

__all__ = ["THREADS", "ReferenceKernel", "reference_conv2d"]

#: Threads of a block.
THREADS = 256

_PACKAGE = "tvm_fuse_schedules"
_FILE = "conv2d_bn_relu.cu"


@dataclass(frozen=True)
class ReferenceKernel:
    """One instance of the kernel.

    Args:
        symbol: Its name.
        source: Its CUDA C.
        stride: Of both axes.
        padding: Zeros on each side.
        kernel: Taps of each axis.
    """

    symbol: str
    source: str
    kernel: int
    stride: int
    padding: int

    def output_size(self, size: int) -> int:
        """Output elements of an axis with ``size`` input elements."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def grid(self, batch: int, filters: int, height: int, width: int) -> Dim3:
        """Blocks for an input of this height and width."""
        elements = batch * filters * self.output_size(height) * self.output_size(width)
        return (-(-elements // THREADS), 1, 1)


def reference_conv2d(kernel: int, stride: int = 1, padding: int = 0) -> ReferenceKernel:
    """Fill in the kernel.

    Args:
        kernel: Taps of each axis, at least 1.
        stride: At least 1.
        padding: At least 0.

    Returns:
        The kernel. Its parameters: x ``(N, C, H, W)``, w ``(O, C, K, K)``, scale ``(O,)``, shift ``(O,)``,
        y ``(N, O, P, Q)``, all float32, then N, C, H, W, O, P and Q.

    Raises:
        UsageError: A number is too small.
    """
    if kernel < 1 or stride < 1 or padding < 0:
        wanted = "a kernel and stride of at least 1 and a padding of at least 0"
        raise UsageError(f"reference convolution: wanted {wanted}, got {kernel}, {stride} and {padding}")
    symbol = f"conv2d_bn_relu_k{kernel}_s{stride}_p{padding}"
    text = files(_PACKAGE).joinpath(_FILE).read_text(encoding="utf-8")
    source = Template(text[text.index('extern "C"') :]).substitute(
        NAME=symbol, KERNEL=kernel, STRIDE=stride, PADDING=padding, THREADS=THREADS
    )
    return ReferenceKernel(symbol, source, kernel, stride, padding)
