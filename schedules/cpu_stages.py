"""What all schedules for CPUs share: padded rows, and where results are stored."""

from __future__ import annotations

from typing import Any

from tvm import te, tir

from tvm_fuse_schedules.cuda_kernel import inline_all_but

__all__ = ["LEAST_BYTES", "copy_by_vectors", "inline_around", "pad_pixels", "share"]

#: What a thread must move before threads pay. To wake one and to wait for it took 2 to 7 us (an empty loop of
#: TVM's runtime on 2 shared cores); a core moves 30 to 60 bytes a nanosecond from its caches.
LEAST_BYTES = 256 << 10
_STAGED = "staged"


def pad_pixels(data: Any, before: tuple[int, int], sizes: tuple[int, int], value: float = 0.0) -> Any:
    """Rows and columns of one number around images in blocked layout.

    Args:
        data: Shape ``(N, C, H, W, c)``.
        before: Rows above and columns to the left.
        sizes: Height and width of the result.
        value: Of what is beyond the image.

    Returns:
        Shape ``(N, C, *sizes, c)``.
    """
    images, blocks, height, width, lanes = (int(size) for size in data.shape)
    top, left = before
    is_padded = (*before, *sizes) != (0, 0, height, width)

    def pixel(n: Any, c: Any, y: Any, x: Any, lane: Any) -> Any:
        if not is_padded:
            return data[n, c, y, x, lane]
        inside = tir.all(y >= top, y < top + height, x >= left, x < left + width)
        return tir.if_then_else(inside, data[n, c, y - top, x - left, lane], tir.const(value, data.dtype))

    return te.compute((images, blocks, *sizes, lanes), pixel, name=_STAGED, tag="tvm_fuse_staged")


def inline_around(schedule: te.Schedule, output: Any, result: Any, *kept: Any) -> Any:
    """Inline what is before and after an anchor, and find where its results are stored.

    Args:
        schedule: The schedule.
        output: The result tensor of the fused group.
        result: The anchor's.
        kept: Further tensors that stay.

    Returns:
        ``output`` where it has the anchor's shape, so that what follows is computed in registers; the
        anchor's result otherwise, and ``output`` gets a loop of its own.
    """
    shapes = [[int(size) for size in tensor.shape] for tensor in (output, result)]
    if shapes[0] == shapes[1]:
        inline_all_but(schedule, output, *kept)
        return output
    inline_all_but(schedule, output, result, *kept)
    axes = list(schedule[output].op.axis)
    if shapes[0][-1] <= 64:
        schedule[output].vectorize(axes.pop())
    if axes:
        schedule[output].parallel(schedule[output].fuse(*axes))
    return result


def copy_by_vectors(stage: te.Stage) -> None:
    """Vectorize the copy of blocks of channels."""
    stage.vectorize(stage.op.axis[-1])


def share(stage: te.Stage, axis: Any, is_parallel: bool) -> None:
    """Give the iterations of an axis to the threads, where it pays."""
    if is_parallel:
        stage.parallel(axis)
