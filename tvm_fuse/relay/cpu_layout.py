"""Blocked layouts for convolutions and dense layers on a CPU.

A tensor's block follows from its channels alone: as many as a vector holds, or half of it, or a quarter.
So what one layer writes, the next one reads as it is, and transforms are left at the edges of the network.
Weights are constants, which are transformed when the model is built.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_target import TARGET_KEY, cpu_of, without_our_key

__all__ = ["block_of", "register_cpu_layouts"]

#: An image's channels are one block: it is read once.
_MOST_COLOURS = 4


@functools.cache
def register_cpu_layouts() -> None:
    """Register once what AlterOpLayout asks about a convolution or a dense layer."""
    tvm.topi.nn.conv2d_alter_layout.register(TARGET_KEY, _alter_conv2d)
    tvm.topi.nn.dense_alter_layout.register(TARGET_KEY, _alter_dense)


def block_of(channels: int, lanes: int) -> int:
    """Channels in a block.

    Args:
        channels: Of the tensor.
        lanes: Float32 numbers in a vector.

    Returns:
        The vector, or its half, quarter, ..., that divides the channels.
    """
    if channels <= _MOST_COLOURS:
        return channels
    block = lanes
    while channels % block:
        block //= 2
    return block


def _alter_conv2d(attrs: Any, inputs: Any, tensors: Any, out_type: Any) -> Any:
    target = tvm.target.Target.current()
    data, weight = tensors
    if not _is_ours(attrs, data, weight, out_type):
        with without_our_key(target):
            return tvm.topi.nn.conv2d_alter_layout(attrs, inputs, tensors, out_type)
    (depth, channels), lanes = (int(data.shape[1]), int(weight.shape[0])), cpu_of(target).lanes
    block = block_of(channels, lanes)
    fields = {key: attrs[key] for key in attrs.keys()}
    fields |= {"channels": channels, "kernel_size": list(map(int, weight.shape[2:]))}
    fields["out_layout"] = f"NCHW{block}c"
    if int(attrs.groups) > 1:
        fields |= {"data_layout": f"NCHW{block}c", "kernel_layout": f"OIHW1i{block}o"}
        return relay.nn.contrib_depthwise_conv2d_nchwc(*inputs, **fields)
    read = block_of(depth, lanes)
    fields |= {"data_layout": f"NCHW{read}c", "kernel_layout": f"OIHW{read}i{block}o"}
    return relay.nn.contrib_conv2d_nchwc(*inputs, **fields)


def _is_ours(attrs: Any, data: Any, weight: Any, result: Any) -> bool:
    """Whether it is a convolution that a schedule of ours computes."""
    if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW"):
        return False
    sizes = (*data.shape, *weight.shape)
    if {data.dtype, weight.dtype, result.dtype} != {"float32"} or not all(
        isinstance(size, tvm.tir.IntImm) for size in sizes
    ):
        return False
    groups = int(attrs.groups)
    return groups == 1 or groups == int(data.shape[1]) == int(weight.shape[0])


def _alter_dense(attrs: Any, inputs: Any, tensors: Any, out_type: Any) -> Any:
    target = tvm.target.Target.current()
    data, weight = tensors
    if not _is_our_dense(inputs, data, weight, out_type):
        with without_our_key(target):
            return tvm.topi.nn.dense_alter_layout(attrs, inputs, tensors, out_type)
    block = _dense_block(int(weight.shape[0]), cpu_of(target).lanes)
    return relay.nn.contrib_dense_pack(*inputs, weight_layout=f"NC{block}n", out_dtype="float32")


def _dense_block(channels: int, lanes: int) -> int:
    """The block of `block_of`; where that is a small part of a vector, the most channels that fit in one."""
    block = block_of(channels, lanes)
    return block if block * 4 >= lanes else max(size for size in range(1, lanes + 1) if channels % size == 0)


def _is_our_dense(inputs: Any, data: Any, weight: Any, result: Any) -> bool:
    """Whether it is a dense layer that a schedule of ours computes; other weights are packed at run time."""
    if not isinstance(inputs[1], relay.Constant) or {data.dtype, weight.dtype, result.dtype} != {"float32"}:
        return False
    return all(isinstance(size, tvm.tir.IntImm) for size in (*data.shape, *weight.shape))
