"""Which kernel an anchor gets on a CUDA GPU, and why not the one that fits its operator best.

One function decides, from attributes, shapes, dtypes and target alone: Relay's strategy asks it for what it
schedules (``cuda_strategy.py``), and a report asks it for every kernel of a build (``kernel_choices.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.relay.base import tvm
from tvm_fuse_schedules.cuda_conv2d import Conv2d, plan_conv2d
from tvm_fuse_schedules.cuda_conv2d_transpose import Conv2dTranspose, plan_conv2d_transpose
from tvm_fuse_schedules.cuda_depthwise import plan_depthwise
from tvm_fuse_schedules.cuda_kernel import Kernel, Schedule
from tvm_fuse_schedules.cuda_matmul import plan_batch_matmul, plan_dense
from tvm_fuse_schedules.cuda_plan import FEWEST_COLUMNS

__all__ = ["ANCHORS", "Anchor", "Choice", "Tensor", "choose_schedule", "for_result", "keeps_tvm"]


@dataclass(frozen=True)
class Tensor:
    """Shape, None where a size is known at run time only, and dtype."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Tensor:
        """Of a TE tensor or a Relay type."""
        dims = (int(dim) if isinstance(dim, (int, tvm.tir.IntImm)) else None for dim in tensor.shape)
        return cls(tuple(dims), str(tensor.dtype))


@dataclass(frozen=True)
class Anchor:
    """An operator that a kernel is built around.

    Args:
        operator: Such as ``conv2d``.
        attrs: Its Relay attributes.
        operands: Its tensors.
        result: Its result.
        name: Of the node, for people.
    """

    operator: str
    attrs: Any
    operands: tuple[Tensor, ...]
    result: Tensor
    name: str

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Operands and result."""
        return (*self.operands, self.result)


@dataclass(frozen=True)
class Choice:
    """The kernel of an anchor.

    Args:
        schedule: What kind of kernel.
        reason: Why it is not the one for the operator; None where it is.
        kernel: Computation and schedule for the shape; None where they do not depend on it.
    """

    schedule: Schedule
    reason: Reason | None = None
    kernel: Kernel | None = field(default=None, compare=False, repr=False)


def choose_schedule(anchor: Anchor, target: Any, *, is_tuned: bool = False) -> Choice:
    """Choose the kernel of an anchor.

    Args:
        anchor: The operator.
        target: A ``tvm.target.Target`` with the key of our schedules.
        is_tuned: Whether a tuner of TVM's brings schedules.

    Returns:
        The choice.
    """
    reason = keeps_tvm(anchor, target, is_tuned=is_tuned)
    if reason is not None:
        return Choice(Schedule.TVM, reason)
    reason = next(filter(None, (condition(anchor) for condition in _CONDITIONS)), None)
    if reason is not None:
        return Choice(Schedule.GENERIC, reason)
    kernel = _PLANS[anchor.operator](anchor, str(target.arch))
    if kernel is None:
        got = " and ".join("x".join(map(str, tensor.shape)) for tensor in anchor.operands)
        return Choice(
            Schedule.GENERIC, Reason(Code.SCHEDULE_NO_TILE, anchor.name, "sizes that fill a block", got)
        )
    return Choice(kernel.kind, _has_columns(anchor, kernel), kernel)


def for_result(choice: Choice, anchor: Anchor, stored: Tensor) -> Choice:
    """The choice for a kernel that stores something else than the anchor's shape.

    Args:
        choice: What the anchor gets by itself.
        anchor: The anchor.
        stored: What the kernel stores.

    Returns:
        The choice, or the last resort where operators after the anchor broadcast its result.
    """
    if choice.kernel is None or stored.shape == anchor.result.shape:
        return choice
    wanted, got = ("x".join(map(str, tensor.shape)) for tensor in (anchor.result, stored))
    return Choice(Schedule.GENERIC, Reason(Code.SCHEDULE_RESULT_BROADCAST, anchor.name, wanted, got))


def keeps_tvm(anchor: Anchor, target: Any, *, is_tuned: bool = False) -> Reason | None:
    """Why a build is not for our schedules at all; None where it is. Arguments as of `choose_schedule`."""
    return _static(anchor) or _without_libraries(anchor, target) or _untuned(anchor, is_tuned)


# --- conditions --------------------------------------------------------------------------------------


def _static(anchor: Anchor) -> Reason | None:
    dynamic = [tensor for tensor in anchor.tensors if None in tensor.shape]
    if not dynamic:
        return None
    got = "x".join("?" if size is None else str(size) for size in dynamic[0].shape)
    return Reason(Code.SCHEDULE_DYNAMIC_SHAPE, anchor.name, "sizes that are known when it is built", got)


def _without_libraries(anchor: Anchor, target: Any) -> Reason | None:
    libraries = ", ".join(map(str, target.libs))
    if not libraries:
        return None
    return Reason(Code.SCHEDULE_LIBRARY, anchor.name, "a target without -libs", f"-libs={libraries}")


def _untuned(anchor: Anchor, is_tuned: bool) -> Reason | None:
    if not is_tuned:
        return None
    got = "AutoScheduler or MetaSchedule"
    return Reason(Code.SCHEDULE_TUNER, anchor.name, "a build without a tuner's schedules", got)


def _known_operator(anchor: Anchor) -> Reason | None:
    if anchor.operator in _PLANS and (anchor.operator != "dense" or len(anchor.operands[0].shape) == 2):
        return None
    got = f"{anchor.operator} of {'x'.join(map(str, anchor.operands[0].shape))}"
    return Reason(Code.SCHEDULE_OPERATOR, anchor.name, f"one of {', '.join(_PLANS)}", got)


def _float32(anchor: Anchor) -> Reason | None:
    dtypes = sorted({tensor.dtype for tensor in anchor.tensors})
    if dtypes == ["float32"]:
        return None
    return Reason(Code.SCHEDULE_DTYPE, anchor.name, "float32 operands and result", ", ".join(dtypes))


def _plain_layout(anchor: Anchor) -> Reason | None:
    wanted = _LAYOUTS.get(anchor.operator)
    if wanted is None:
        return None
    attrs = anchor.attrs
    layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
    if layouts == wanted:
        return None
    return Reason(Code.SCHEDULE_LAYOUT, anchor.name, ", ".join(wanted), ", ".join(layouts))


def _undilated_when_transposed(anchor: Anchor) -> Reason | None:
    if anchor.operator != "conv2d_transpose" or _integers(anchor.attrs.dilation) == (1, 1):
        return None
    return Reason(
        Code.SCHEDULE_DILATION, anchor.name, "dilation (1, 1)", str(_integers(anchor.attrs.dilation))
    )


def _has_columns(anchor: Anchor, kernel: Kernel) -> Reason | None:
    if kernel.kind is not Schedule.NARROW:
        return None
    wanted = f"at least {FEWEST_COLUMNS} results for each row of weights"
    got = "x".join(map(str, anchor.result.shape))
    return Reason(Code.SCHEDULE_FEW_COLUMNS, anchor.name, wanted, got)


#: Must hold for a kernel of our own for the shape.
_CONDITIONS = (_known_operator, _float32, _plain_layout, _undilated_when_transposed)

#: Layouts of data, weight and result.
_LAYOUTS = {"conv2d": ("NCHW", "OIHW", "NCHW"), "conv2d_transpose": ("NCHW", "IOHW", "NCHW")}


# --- plans -------------------------------------------------------------------------------------------


def _plan_conv2d(anchor: Anchor, arch: str) -> Kernel | None:
    (data, weight), attrs = _shapes(anchor.operands), anchor.attrs
    strides, dilation = _integers(attrs.strides), _integers(attrs.dilation)
    conv = Conv2d(data, weight, strides, _four_sides(attrs.padding), dilation, int(attrs.groups))
    if conv.groups == data[1] > 1:
        return plan_depthwise(conv, arch)
    return plan_conv2d(conv, arch)


def _plan_conv2d_transpose(anchor: Anchor, arch: str) -> Kernel | None:
    (data, weight, result), attrs = _shapes(anchor.tensors), anchor.attrs
    strides, padding = _integers(attrs.strides), _four_sides(attrs.padding)[:2]
    conv = Conv2dTranspose(data, weight, result, strides, padding, int(attrs.groups))
    return plan_conv2d_transpose(conv, arch)


def _plan_dense(anchor: Anchor, arch: str) -> Kernel | None:
    data, weight = _shapes(anchor.operands)
    return plan_dense(data, weight, arch)


def _plan_batch_matmul(anchor: Anchor, arch: str) -> Kernel | None:
    (left, right), attrs = _shapes(anchor.operands), anchor.attrs
    return plan_batch_matmul(left, right, bool(attrs.transpose_a), bool(attrs.transpose_b), arch)


def _shapes(tensors: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    return [tuple(size or 0 for size in tensor.shape) for tensor in tensors]


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _four_sides(padding: Any) -> tuple[int, ...]:
    """Top, left, bottom, right."""
    sides = _integers(padding)
    return {1: sides * 4, 2: sides * 2, 4: sides}[len(sides)]


#: Operators with kernels for their shape.
_PLANS: dict[str, Callable[[Anchor, str], Kernel | None]] = {
    "conv2d": _plan_conv2d,
    "conv2d_transpose": _plan_conv2d_transpose,
    "dense": _plan_dense,
    "batch_matmul": _plan_batch_matmul,
}

#: Every operator that kernels are built around, by the name of its strategy.
ANCHORS = (*_PLANS, "conv1d", "conv1d_transpose", "conv3d", "conv3d_transpose", "matmul")
