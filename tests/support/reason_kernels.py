"""For every reason code of CUDA kernels a layer that provokes it; these need TVM, and no compiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.tuning.records import TunedRecord, save_record
from tvm_fuse.cuda.resources import KernelResources
from tvm_fuse.relay import cuda_choice, partition_pass, records, registers
from tvm_fuse.relay.target import resolve_target

__all__ = ["KERNELS"]

_CUDA = "cuda -arch=sm_80"
_SHAPE = (1, 8, 14, 14)


def _var(name, shape, dtype="float32"):
    return relay.var(name, shape=shape, dtype=dtype)


def _conv2d(dtype="float32", shape=_SHAPE, weight=(16, 8, 3, 3), **attrs):
    return relay.nn.conv2d(_var("x", shape, dtype), _var("w", weight, dtype), **attrs)


def _dense(rows, columns=64):
    return relay.nn.dense(_var("x", (rows, columns)), _var("w", (1000, columns)))


def _anchor(body):
    call = relay.transform.InferType()(tvm.IRModule.from_expr(body))["main"].body
    operands = tuple(cuda_choice.Tensor.of(argument.checked_type) for argument in call.args)
    operator, result = str(call.op.name).removeprefix("nn."), cuda_choice.Tensor.of(call.checked_type)
    return cuda_choice.Anchor(operator, call.attrs, operands, result, "layer")


def _chosen(make, target=_CUDA, **options):
    def reason():
        return cuda_choice.choose_schedule(_anchor(make()), resolve_target(target), **options).reason

    return reason


def _broadcast():
    anchor = _anchor(_conv2d(shape=(1, 8, 3, 3)))
    choice = cuda_choice.choose_schedule(_anchor(_conv2d()), resolve_target(_CUDA))
    return cuda_choice.for_result(choice, anchor, cuda_choice.Tensor((1, 16, 9, 9), "float32")).reason


def _cut(spill_bytes, occupancy):
    """Seven times ``x * sigmoid(x)``; what kernels with more than three of them use is given."""

    def measure(function, target):
        text = str(function)
        is_large = "nn.conv2d(%" in text and text.count("sigmoid(%") > 3
        spilled, share = (spill_bytes, occupancy) if is_large else (0, 0.5)
        return (KernelResources("k", "sm_80", 72, spilled, 0, spilled, 0, 0, 0, 64, 4, share, ()),)

    def reason():
        net, target = Net(), resolve_target(_CUDA)
        value = net.conv2d(net.input("x", _SHAPE), 8)
        for _ in range(7):
            value = relay.multiply(value, relay.sigmoid(value))
        found = []
        with patch.object(registers, "_measure", measure):
            partition_pass.partition_chains(net.module(value), target, refine=_keep(target, found))
        return found[-1].groups[0].end

    return reason


def _keep(target, found):
    def refine(read, plan):
        found.append(registers.split_spilling_groups(read, plan, target)[0])
        return found[-1]

    return refine


#: Code -> what gives its reason.
def _record(**changes):
    """A record of a dense layer that cannot be used, in a folder that goes away."""

    def reason():
        target = resolve_target(_CUDA)
        module = relay.transform.InferType()(tvm.IRModule.from_expr(_dense(8)))
        kernel = records.find_kernels(module, target)[0]
        with tempfile.TemporaryDirectory() as folder:
            values = {"device": "cuda-sm_80", "workload_key": '["of another version"]', **changes}
            texts = kernel.digest, values["device"], "dense", (), values["workload_key"], ""
            made = TunedRecord(*texts, 1, 2, 0, 0, measured=changes.get("measured", True))
            file = save_record(Path(folder), made)
            if "text" in changes:
                file.write_text(changes["text"])
            (decision,) = records.apply_records(module, target, Path(folder)).decisions
        return decision.reason

    return reason


KERNELS: dict[Code, Callable[[], Reason]] = {
    Code.REGISTERS_SPILL: _cut(24, 0.5),
    Code.OCCUPANCY_DROPS: _cut(0, 0.19),
    Code.SCHEDULE_DYNAMIC_SHAPE: _chosen(lambda: _dense(relay.Any())),
    Code.SCHEDULE_LIBRARY: _chosen(_conv2d, f"{_CUDA} -libs=cudnn"),
    Code.SCHEDULE_TUNER: _chosen(_conv2d, is_tuned=True),
    Code.SCHEDULE_OPERATOR: _chosen(
        lambda: relay.nn.conv3d(_var("x", (1, 2, 5, 5, 5)), _var("w", (4, 2, 3, 3, 3)))
    ),
    Code.SCHEDULE_DTYPE: _chosen(lambda: _conv2d("float64")),
    Code.SCHEDULE_LAYOUT: _chosen(
        lambda: _conv2d(shape=(1, 9, 9, 8), weight=(3, 3, 8, 4), data_layout="NHWC", kernel_layout="HWIO")
    ),
    Code.SCHEDULE_DILATION: _chosen(
        lambda: relay.nn.conv2d_transpose(_var("x", _SHAPE), _var("w", (8, 4, 3, 3)), dilation=(2, 2))
    ),
    Code.SCHEDULE_NO_TILE: _chosen(
        lambda: _conv2d(shape=(1, 3, 2, 2), weight=(3, 1, 3, 3), padding=(1, 1), groups=3)
    ),
    Code.SCHEDULE_FEW_COLUMNS: _chosen(lambda: _dense(1)),
    Code.SCHEDULE_RESULT_BROADCAST: _broadcast,
    Code.SCHEDULE_RECORD_DEVICE: _record(device="cuda-sm_90"),
    Code.SCHEDULE_RECORD_STALE: _record(),
    Code.SCHEDULE_RECORD_DAMAGED: _record(text="{}"),
    Code.SCHEDULE_RECORD_DRAFT: _record(measured=False),
}
