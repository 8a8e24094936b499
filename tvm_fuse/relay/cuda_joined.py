"""Give Relay our CUDA schedules for reductions, and for kernels with several of them.

Registered for the key of ``cuda_strategy.py``: softmax and log softmax, sums, means, maxima, minima, products
and variances, and pooling. A convolution or matrix product has them too when a reduction is among what it
reads, as in a squeeze-and-excite gate: the inner one is then a twin (``absorb.py``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tvm_fuse.relay.base import relay, tvm

__all__ = ["has_inner_sums", "joined_strategy", "register_joined_schedules"]

_REDUCTIONS = ("max", "mean", "min", "prod", "sum", "variance")
_SOFTMAX = ("log_softmax", "softmax")
_POOLS = (
    "nn.adaptive_avg_pool2d",
    "nn.adaptive_max_pool2d",
    "nn.avg_pool2d",
    "nn.global_avg_pool2d",
    "nn.global_max_pool2d",
    "nn.max_pool2d",
)


#: With fewer results a reduction over any axes gets more than one thread for each.
_FEW_RESULTS = 1024


def register_joined_schedules(key: str) -> None:
    """Register a strategy for every reduction.

    Args:
        key: The target key that asks for it.
    """
    for name in (*_REDUCTIONS, *_SOFTMAX, *_POOLS):
        generic = tvm.target.get_native_generic_func(f"{name}_strategy")
        generic.register(functools.partial(_strategy, name), [key])


def has_inner_sums(inputs: Any) -> bool:
    """Whether an operator reads what another reduction of its kernel computes."""
    from tvm_fuse_schedules.cuda_joined import has_sums

    return any(has_sums(tensor) for tensor in inputs)


def joined_strategy(name: str, attrs: Any, inputs: Any, out_type: Any) -> Any:
    """The strategy of an operator with other reductions in its kernel: TVM's computation, our schedule.

    Args:
        name: Name of the operator's strategy, such as ``conv2d``.
        attrs: The operator's attributes.
        inputs: Its tensors.
        out_type: Its Relay type.

    Returns:
        The strategy.
    """
    from tvm_fuse.relay.cuda_strategy import default_compute

    strategy = relay.op.OpStrategy()
    compute = _WHOLE_IMAGE.get(name) if _lies_in_rows(name, attrs, inputs, out_type) else None
    compute = compute or default_compute(name, attrs, inputs, out_type)
    schedule = _schedule_joined if _lies_in_rows(name, attrs, inputs, out_type) else _schedule_generic
    strategy.add_implementation(compute, schedule, name=f"{name}_joined.tvm_fuse")
    return strategy


def _strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    from tvm_fuse.relay.cuda_strategy import strategy_of_tvm

    is_ours = name in _POOLS or _has_warp_reduction(name, attrs, inputs, out_type)
    theirs = strategy_of_tvm(name, attrs, inputs, out_type, target, always=not is_ours)
    return theirs or joined_strategy(name, attrs, inputs, out_type)


def _has_warp_reduction(name: str, attrs: Any, inputs: Any, out_type: Any) -> bool:
    """Whether our schedules fit; for a softmax over another axis, or of another dtype, TVM's are better."""
    dtypes = {str(tensor.dtype) for tensor in (*inputs, out_type)}
    in_rows = name not in _SOFTMAX or _lies_in_rows(name, attrs, inputs, out_type)
    return in_rows and dtypes <= {"float32", "int32"}


def _lies_in_rows(name: str, attrs: Any, inputs: Any, out_type: Any) -> bool:
    """Whether the threads of a row work on one result together: what they read lies together, or few do."""
    rank = len(inputs[0].shape)
    if name in _SOFTMAX:
        return int(attrs.axis) % rank == rank - 1
    if name in _POOLS:
        return str(attrs.layout) == "NCHW" and [int(dim) for dim in out_type.shape[2:]] == [1, 1]
    if name in _REDUCTIONS:
        axes = range(rank) if attrs.axis is None else [int(axis) % rank for axis in attrs.axis]
        is_last = not attrs.exclude and sorted(axes) == list(range(rank - len(axes), rank))
        return is_last or math.prod(int(dim) for dim in out_type.shape) < _FEW_RESULTS
    return True


def _mean_of_image(attrs: Any, inputs: Any, out_type: Any) -> list[Any]:
    size = math.prod(int(dim) for dim in inputs[0].shape[2:])
    sums = tvm.topi.sum(inputs[0], axis=(2, 3), keepdims=True)
    return [tvm.topi.divide(sums, tvm.tir.const(size, inputs[0].dtype))]


def _maximum_of_image(attrs: Any, inputs: Any, out_type: Any) -> list[Any]:
    return [tvm.topi.max(inputs[0], axis=(2, 3), keepdims=True)]


#: Pooling of whole images; TVM's computation has extents that no schedule can read.
_WHOLE_IMAGE = {
    "nn.adaptive_avg_pool2d": _mean_of_image,
    "nn.adaptive_max_pool2d": _maximum_of_image,
    "nn.global_avg_pool2d": _mean_of_image,
    "nn.global_max_pool2d": _maximum_of_image,
}


def _schedule_joined(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.cuda_joined import schedule_joined

    return schedule_joined(outs[0])


def _schedule_generic(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.cuda_generic import schedule_generic

    return schedule_generic(outs[0])
