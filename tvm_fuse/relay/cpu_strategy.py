"""Give Relay our schedules for CPUs, for targets with the key ``tvm_fuse`` only.

Convolutions and dense layers in the blocked layouts that ``cpu_layout.py`` decides, static and float32, and
global pools; float32 exp, log, sigmoid, tanh and erf, alone or in any group, are those of
``schedules/cpu_math.py``. What none of ours fits goes to TVM's own strategy.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Callable

from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_target import TARGET_KEY, cpu_of, without_our_key
from tvm_fuse_schedules.cpu_conv2d import BlockedConv

__all__ = ["blocked_conv", "register_cpu_schedules"]

_CONVOLUTIONS = ("conv2d_NCHWc", "depthwise_conv2d_NCHWc")
_FUNCTIONS = ("erf", "exp", "log", "sigmoid", "tanh")
_POOLS = ("nn.max_pool2d", "nn.avg_pool2d")
_GLOBAL_POOLS = ("nn.global_avg_pool2d", "nn.global_max_pool2d")


@functools.cache
def register_cpu_schedules() -> None:
    """Register every strategy once."""
    for name in _CONVOLUTIONS:
        _generic(name).register(
            functools.partial(_layer_strategy, name, functools.partial(_plan_conv, name)), [TARGET_KEY]
        )
    _generic("dense_pack").register(
        functools.partial(_layer_strategy, "dense_pack", _plan_dense), [TARGET_KEY]
    )
    for name in _FUNCTIONS:
        _generic(name).register(functools.partial(_function_strategy, name), [TARGET_KEY])
    for name in _POOLS:
        _generic(name).register(functools.partial(_pool_strategy, name), [TARGET_KEY])
    for name in _GLOBAL_POOLS:
        _generic(name).register(functools.partial(_global_pool_strategy, name), [TARGET_KEY])


def _generic(name: str) -> Any:
    return tvm.target.get_native_generic_func(f"{name}_strategy")


def _layer_strategy(
    name: str, plan: Callable[..., Any], attrs: Any, inputs: Any, out_type: Any, target: Any
) -> Any:
    kernel = plan(attrs, inputs, target)
    if kernel is None:
        return _plain_strategy(name, attrs, inputs, out_type, target)
    return _strategy_of(name, kernel)


def _strategy_of(name: str, kernel: Any) -> Any:
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(
        lambda attrs, inputs, out_type: [kernel.compute(*inputs)],
        lambda attrs, outs, target: kernel.schedule(outs[0]),
        name=f"{name}.tvm_fuse",
    )
    return strategy


def _plain_strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    """TVM's own."""
    plain = without_our_key(target)
    with plain:
        return _generic(name)(attrs, inputs, out_type, plain)


def _plan_conv(name: str, attrs: Any, inputs: Any, target: Any) -> Any | None:
    """The kernel of a convolution; None where none of ours fits: dynamic shapes, other dtypes, groups."""
    from tvm_fuse_schedules.cpu_conv2d import plan_conv2d
    from tvm_fuse_schedules.cpu_depthwise import plan_depthwise

    if not _are_plain(inputs):
        return None
    data, weight = (tuple(map(int, tensor.shape)) for tensor in inputs)
    conv = blocked_conv(attrs, data, weight)
    if name == "conv2d_NCHWc":
        return plan_conv2d(conv, cpu_of(target)) if int(attrs.groups) == 1 else None
    is_one_to_one = (weight[0], weight[5]) == (data[1], data[4])
    return plan_depthwise(conv, cpu_of(target)) if is_one_to_one else None


def _plan_dense(attrs: Any, inputs: Any, target: Any) -> Any | None:
    """The kernel of a dense layer with packed weights; None where none of ours fits."""
    from tvm_fuse_schedules.cpu_dense import plan_dense

    is_ours = re.fullmatch(r"NC[0-9]+n", str(attrs.weight_layout)) and _are_plain(inputs[:2])
    if not is_ours or str(attrs.out_dtype) not in ("", "float32"):
        return None
    (data, weight), cpu = (tuple(map(int, tensor.shape)) for tensor in inputs[:2]), cpu_of(target)
    return plan_dense(data, weight, cpu) if len(data) == 2 and weight[2] <= cpu.lanes else None


def _are_plain(tensors: Any) -> bool:
    """Float32 of static shapes, and nothing that sums before them."""
    from tvm_fuse_schedules.cuda_joined import has_sums

    return all(
        str(tensor.dtype) == "float32" and _is_static(tensor) and not has_sums(tensor) for tensor in tensors
    )


def blocked_conv(attrs: Any, data: tuple[int, ...], weight: tuple[int, ...]) -> BlockedConv:
    """A convolution in blocked layout from its Relay attributes and the shapes of its operands."""
    strides, dilation = tuple(map(int, attrs.strides)), tuple(map(int, attrs.dilation))
    return BlockedConv(data, weight, strides, _sides(attrs.padding), dilation)


def _is_static(tensor: Any) -> bool:
    return all(isinstance(size, tvm.tir.IntImm) for size in tensor.shape)


def _function_strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    from tvm_fuse_schedules.cpu_math import apply

    (data,) = inputs
    if str(data.dtype) != "float32":
        return _plain_strategy(name, attrs, inputs, out_type, target)
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(
        lambda attrs, inputs, out_type: [apply(name, inputs[0])],
        relay.op.strategy.schedule_injective,
        name=f"{name}.tvm_fuse",
    )
    return strategy


def _pool_strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    kernel = _plan_pool(name, attrs, inputs, out_type, target)
    if kernel is None:
        return _plain_strategy(name, attrs, inputs, out_type, target)
    return _strategy_of(name, kernel)


def _plan_pool(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any | None:
    """The kernel of a pooling by windows; None for other layouts, other dtypes and dynamic shapes."""
    from tvm_fuse_schedules.cpu_pool import Pool, plan_pool

    layout, out_layout = str(attrs.layout), str(attrs.out_layout)
    if not re.fullmatch(r"NCHW[0-9]+c", layout) or out_layout not in ("", layout) or not _are_plain(inputs):
        return None
    data, result = (tuple(map(int, tensor.shape)) for tensor in (inputs[0], out_type))
    sides = _sides(attrs.padding)
    size, strides, dilation = (
        tuple(map(int, sizes)) for sizes in (attrs.pool_size, attrs.strides, attrs.dilation)
    )
    ends = (
        (result[2 + axis] - 1) * strides[axis]
        + (size[axis] - 1) * dilation[axis]
        + 1
        - data[2 + axis]
        - sides[axis]
        for axis in range(2)
    )
    weight = (data[1], 1, *size, 1, data[4])
    window = BlockedConv(data, weight, strides, (*sides[:2], *ends), dilation)
    is_max = name == "nn.max_pool2d"
    counts_padding = not is_max and bool(attrs.count_include_pad)
    return plan_pool(Pool(window, is_max, sides if counts_padding else (0, 0, 0, 0)), cpu_of(target))


def _sides(padding: Any) -> tuple[int, ...]:
    """Top, left, bottom and right of a padding of 1, 2 or 4 numbers."""
    numbers = tuple(map(int, padding))
    return {1: numbers * 4, 2: numbers * 2, 4: numbers}[len(numbers)]


def _global_pool_strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    compute = relay.op.get(name).get_attr("FTVMCompute")
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(compute, _schedule_global_pool, name="global_pool.tvm_fuse")
    return strategy


def _schedule_global_pool(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.global_pool import find_global_pool, schedule_global_pool

    pool = find_global_pool(outs[0]) if len(outs) == 1 else None
    if pool is not None:
        return schedule_global_pool(outs[0], pool)
    with target:
        return tvm.topi.x86.schedule_adaptive_pool(outs)
