"""Depthwise conv2d on a CUDA GPU, in NCHW, with any channel multiplier.

::

    out[n, o, y, x] = sum over ky, kx of
                      weight[o, ky, kx] * data[n, o // multiplier, y * sy + ky * dy - py, ...]

After::

    block (n, channels, rows, columns of the result):
      shared = the rows and columns of the data that the block reads   padding as zeros, all threads together
      thread: sums[own rows] += weight * shared                        in registers
              result = epilogue(sums)                                  one store

A thread has neighbouring rows, so that it reads a row of weights once for all of them; a warp has
neighbouring columns. Short rows share a block with the next channels. Numerics: float32 sums in TVM's order.
Source: the textbook stencil in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cuda_conv2d import Conv2d
from tvm_fuse_schedules.cuda_kernel import Kernel, Schedule, find_stage, inline_all_but
from tvm_fuse_schedules.cuda_tiles import device_of, largest_part

__all__ = ["plan_depthwise"]

_THREADS = 128
_FEWEST_THREADS = 32
_MOST_COLUMNS = 32
_OWN_ROWS = (4, 2, 1)
#: Threads that a multiprocessor should have before a thread gets several rows.
_THREADS_PER_MULTIPROCESSOR = 512
_SHARED_BYTES = 24 << 10


@dataclass(frozen=True)
class _Block:
    """Threads of a block along channels, rows and columns, and the rows of a thread."""

    channels: int
    rows: int
    columns: int
    own_rows: int

    @property
    def threads(self) -> int:
        return self.channels * self.rows * self.columns


def plan_depthwise(conv: Conv2d, arch: str) -> Kernel | None:
    """Choose the schedule of a float32 depthwise convolution.

    Args:
        conv: The convolution; its weight is ``(C * multiplier, 1, KH, KW)`` or ``(C, multiplier, KH, KW)``.
        arch: Such as ``sm_80``.

    Returns:
        The kernel; None when the result is too small for a block.
    """
    block = _choose_block(conv, device_of(arch).multiprocessors)
    if block is None:
        return None
    return Kernel(
        Schedule.DEPTHWISE,
        lambda data, weight: _compute(conv, block, data, weight),
        lambda output: _schedule(output, block),
    )


def _choose_block(conv: Conv2d, multiprocessors: int) -> _Block | None:
    """The block with the most rows for a thread that still fills the GPU and fits into shared memory."""
    batch, channels, height, width = _result(conv)
    columns = largest_part(width, _MOST_COLUMNS)
    wanted = multiprocessors * _THREADS_PER_MULTIPROCESSOR
    for own in _OWN_ROWS:
        rows = largest_part(-(-height // own), max(1, _THREADS // columns))
        beside = largest_part(channels, max(1, _THREADS // (rows * columns))) if _multiplier(conv) == 1 else 1
        block = _Block(beside, rows, columns, own)
        is_filling = own == 1 or batch * channels * height * width >= own * wanted
        if is_filling and _shared_bytes(conv, block) <= _SHARED_BYTES and block.threads >= _FEWEST_THREADS:
            return block
    return None


def _shared_bytes(conv: Conv2d, block: _Block) -> int:
    height, width = (
        (size - 1) * stride + (kernel - 1) * dilation + 1
        for size, stride, kernel, dilation in zip(
            (block.rows * block.own_rows, block.columns), conv.strides, conv.weight[2:], conv.dilation
        )
    )
    return 4 * block.channels * height * width


def _multiplier(conv: Conv2d) -> int:
    return conv.weight[0] * conv.weight[1] // conv.data[1]


def _result(conv: Conv2d) -> tuple[int, int, int, int]:
    batch, _, height, width = conv.result
    return batch, conv.weight[0] * conv.weight[1], height, width


def _compute(conv: Conv2d, block: _Block, data: Any, weight: Any) -> Any:
    batch, channels, in_h, in_w = conv.data
    top, left = conv.padding[:2]
    _, _, out_h, out_w = _result(conv)
    (stride_h, stride_w), (dilation_h, dilation_w) = conv.strides, conv.dilation
    kernel_h, kernel_w = conv.weight[2:]
    rows, columns = _round_up(out_h, block.rows * block.own_rows), _round_up(out_w, block.columns)
    high = (rows - 1) * stride_h + (kernel_h - 1) * dilation_h + 1
    wide = (columns - 1) * stride_w + (kernel_w - 1) * dilation_w + 1

    def padded(n: Any, c: Any, y: Any, x: Any) -> Any:
        is_inside = tir.all(y >= top, y < top + in_h, x >= left, x < left + in_w)
        return tir.if_then_else(is_inside, data[n, c, y - top, x - left], tir.const(0, data.dtype))

    def filter_of(o: Any, ky: Any, kx: Any) -> Any:
        inner = conv.weight[1]
        return weight[o // inner, o % inner, ky, kx] if inner > 1 else weight[o, 0, ky, kx]

    multiplier = _multiplier(conv)
    tile = te.compute((batch, channels, high, wide), padded, name="depthwise_data")
    ky, kx = te.reduce_axis((0, kernel_h), name="ky"), te.reduce_axis((0, kernel_w), name="kx")
    sums = te.compute(
        (batch, channels * multiplier, rows, columns),
        lambda n, o, y, x: te.sum(
            tile[n, o // multiplier, y * stride_h + ky * dilation_h, x * stride_w + kx * dilation_w]
            * filter_of(o, ky, kx),
            axis=[ky, kx],
        ),
        name="depthwise_sums",
    )
    return te.compute(_result(conv), lambda *i: sums[i], name="depthwise_conv2d", tag="tvm_fuse_depthwise")


def _schedule(output: Any, block: _Block) -> te.Schedule:
    schedule = te.create_schedule(output.op)
    data, sums = find_stage(output, "depthwise_data"), find_stage(output, "depthwise_sums")
    inline_all_but(schedule, output, data, sums)
    stage = schedule[output]
    image, channel, row, column = stage.op.axis
    channel_block, channel = stage.split(channel, factor=block.channels)
    row_block, row = stage.split(row, factor=block.rows * block.own_rows)
    row, own_row = stage.split(row, factor=block.own_rows)
    column_block, column = stage.split(column, factor=block.columns)
    stage.reorder(image, channel_block, row_block, column_block, channel, row, column, own_row)
    stage.bind(stage.fuse(image, channel_block), te.thread_axis("blockIdx.x"))
    stage.bind(stage.fuse(row_block, column_block), te.thread_axis("blockIdx.y"))
    stage.bind(channel, te.thread_axis("threadIdx.z"))
    stage.bind(row, te.thread_axis("threadIdx.y"))
    stage.bind(column, te.thread_axis("threadIdx.x"))
    stage.unroll(own_row)

    schedule[sums].set_scope("local")
    schedule[sums].compute_at(stage, column)
    _, _, own_row, _ = schedule[sums].op.axis
    schedule[sums].reorder(*schedule[sums].op.reduce_axis, own_row)
    for axis in (*schedule[sums].op.reduce_axis, own_row):
        schedule[sums].unroll(axis)

    schedule[data].set_scope("shared")
    schedule[data].compute_at(schedule[sums], schedule[sums].op.axis[0])
    _load_together(schedule[data], block)
    return schedule


def _load_together(stage: te.Stage, block: _Block) -> None:
    fused = stage.fuse(*stage.op.axis)
    for name, threads in (("x", block.columns), ("y", block.rows), ("z", block.channels)):
        fused, thread = stage.split(fused, factor=threads)
        stage.bind(thread, te.thread_axis(f"threadIdx.{name}"))
    stage.unroll(fused)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
