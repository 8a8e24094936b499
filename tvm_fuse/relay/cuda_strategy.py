"""Give Relay our CUDA schedules, for targets with the key ``tvm_fuse_cuda`` only.

For every anchor the first that fits of:

1. our schedule for its shape (``schedules/cuda_*.py``): float32 and a layout that we cover;
2. our one-element-a-thread schedule: any dtype and layout that TVM can compute, and results that are
   broadcast after the anchor;
3. TVM's own strategy for CUDA: dynamic shapes, targets with libraries (``-libs=cudnn``), and builds under
   AutoScheduler or MetaSchedule, which bring their own schedules.

TVM's schedules without a tuning record give a dense convolution one thread a block; 2 keeps that out of
every static build. Implementations of ours are no AutoTVM templates, so AlterOpLayout leaves their layout
alone and never chooses Winograd for them.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable

from tvm_fuse.relay.base import relay, tvm

__all__ = ["CUDA_KEY", "register_cuda_schedules"]

#: ``tvm.target.Target({"kind": "cuda", "arch": "sm_80", "keys": ["tvm_fuse_cuda", "cuda", "gpu"]})`` opts in.
CUDA_KEY = "tvm_fuse_cuda"

#: No strategy is registered for it, so TVM's generic functions fall back to their defaults.
_NO_KEY = "tvm_fuse_none"


@functools.cache
def register_cuda_schedules() -> None:
    """Register a strategy for every anchor once."""
    for name in _PLANS:
        generic = tvm.target.get_native_generic_func(f"{name}_strategy")
        generic.register(functools.partial(_strategy, name), [CUDA_KEY])


def _strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    if _is_tuned() or target.libs or not _is_static(inputs, out_type):
        return _call_strategy(name, _without_our_key(target), attrs, inputs, out_type)
    kernel = None
    if {str(tensor.dtype) for tensor in (*inputs, out_type)} == {"float32"}:
        shapes = [_shape(tensor) for tensor in (*inputs, out_type)]
        kernel = _PLANS[name](attrs, shapes, str(target.arch))
    strategy = relay.op.OpStrategy()
    if kernel is None:
        compute = _default_compute(name, attrs, inputs, out_type)
        strategy.add_implementation(compute, _schedule_generic, name=f"{name}_generic.tvm_fuse")
        return strategy

    def schedule(attrs: Any, outs: Any, target: Any) -> Any:
        keeps_shape = _shape(outs[0]) == _shape(out_type)
        return kernel.schedule(outs[0]) if keeps_shape else _schedule_generic(attrs, outs, target)

    strategy.add_implementation(
        lambda attrs, inputs, out_type: [kernel.compute(*inputs)], schedule, name=f"{name}.tvm_fuse"
    )
    return strategy


def _schedule_generic(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.cuda_generic import schedule_generic

    return schedule_generic(outs[0])


def _is_tuned() -> bool:
    strategies = relay.op.strategy.cuda
    return bool(strategies.is_auto_scheduler_enabled() or strategies.is_meta_schedule_enabled())


def _is_static(inputs: Any, out_type: Any) -> bool:
    dims = [dim for tensor in (*inputs, out_type) for dim in tensor.shape]
    return all(isinstance(dim, (int, tvm.tir.IntImm)) for dim in dims)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in tensor.shape)


def _without_our_key(target: Any) -> Any:
    fields = dict(target.export())
    fields["keys"] = [str(key) for key in target.keys if key != CUDA_KEY]
    return tvm.target.Target(fields)


def _call_strategy(name: str, target: Any, attrs: Any, inputs: Any, out_type: Any) -> Any:
    """What TVM's generic function returns for another target."""
    generic = tvm.target.get_native_generic_func(f"{name}_strategy")
    with target:
        return generic(attrs, inputs, out_type, target)


def _default_compute(name: str, attrs: Any, inputs: Any, out_type: Any) -> Callable[..., Any]:
    """TVM's computation of an operator, without any target's tricks."""
    nowhere = tvm.target.Target({"kind": "llvm", "keys": [_NO_KEY]})
    log = logging.getLogger("strategy")
    was_disabled, log.disabled = log.disabled, True  # it warns that nothing is optimized for this target
    try:
        strategy = _call_strategy(name, nowhere, attrs, inputs, out_type)
    finally:
        log.disabled = was_disabled
    (specialization,) = strategy.specializations
    return specialization.implementations[0].compute


# --- plans: attributes, shapes of operands and result -> kernel ------------------------------------------


def _plan_conv2d(attrs: Any, shapes: list[tuple[int, ...]], arch: str) -> Any | None:
    from tvm_fuse_schedules.cuda_conv2d import Conv2d, plan_conv2d
    from tvm_fuse_schedules.cuda_depthwise import plan_depthwise

    layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
    if layouts != ("NCHW", "OIHW", "NCHW"):
        return None
    data, weight, _ = shapes
    strides, dilation = _integers(attrs.strides), _integers(attrs.dilation)
    conv = Conv2d(data, weight, strides, _four_sides(attrs.padding), dilation, int(attrs.groups))
    if conv.groups == data[1] > 1:
        return plan_depthwise(conv, arch)
    return plan_conv2d(conv, arch)


def _plan_dense(attrs: Any, shapes: list[tuple[int, ...]], arch: str) -> Any | None:
    from tvm_fuse_schedules.cuda_matmul import plan_dense

    data, weight, _ = shapes
    return plan_dense(data, weight, arch) if len(data) == 2 else None


def _plan_batch_matmul(attrs: Any, shapes: list[tuple[int, ...]], arch: str) -> Any | None:
    from tvm_fuse_schedules.cuda_matmul import plan_batch_matmul

    left, right, _ = shapes
    return plan_batch_matmul(left, right, bool(attrs.transpose_a), bool(attrs.transpose_b), arch)


def _plan_conv2d_transpose(attrs: Any, shapes: list[tuple[int, ...]], arch: str) -> Any | None:
    from tvm_fuse_schedules.cuda_conv2d_transpose import Conv2dTranspose, plan_conv2d_transpose

    layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
    if layouts != ("NCHW", "IOHW", "NCHW") or _integers(attrs.dilation) != (1, 1):
        return None
    data, weight, result = shapes
    strides, padding = _integers(attrs.strides), _four_sides(attrs.padding)[:2]
    conv = Conv2dTranspose(data, weight, result, strides, padding, int(attrs.groups))
    return plan_conv2d_transpose(conv, arch)


def _plan_nothing(attrs: Any, shapes: list[tuple[int, ...]], arch: str) -> Any | None:
    return None


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _four_sides(padding: Any) -> tuple[int, ...]:
    """Top, left, bottom, right."""
    sides = _integers(padding)
    return {1: sides * 4, 2: sides * 2, 4: sides}[len(sides)]


#: Every operator that starts a chain -> its plan.
_PLANS: dict[str, Callable[..., Any]] = {
    "batch_matmul": _plan_batch_matmul,
    "conv1d": _plan_nothing,
    "conv1d_transpose": _plan_nothing,
    "conv2d": _plan_conv2d,
    "conv2d_transpose": _plan_conv2d_transpose,
    "conv3d": _plan_nothing,
    "conv3d_transpose": _plan_nothing,
    "dense": _plan_dense,
    "matmul": _plan_nothing,
}
