"""Why an anchor does not get the CUDA kernel for its operator and shape; the kernels of a build."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.reason import Code

choice = Lazy("tvm_fuse.relay.cuda_choice")
kernels = Lazy("tvm_fuse.relay.kernels")
schedule = Lazy("tvm_fuse_schedules.cuda_kernel")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CUDA = "cuda -arch=sm_80"
SHAPE = (1, 8, 14, 14)


def var(name, shape, dtype="float32"):
    return relay.var(name, shape=shape, dtype=dtype)


def conv2d(dtype="float32", **attrs):
    return relay.nn.conv2d(var("x", SHAPE, dtype), var("w", (16, 8, 3, 3), dtype), **attrs)


def choose(body, on=CUDA, **options):
    call = relay.transform.InferType()(tvm.IRModule.from_expr(body))["main"].body
    operands = tuple(choice.Tensor.of(arg.checked_type) for arg in call.args)
    operator = str(call.op.name).removeprefix("nn.")
    anchor = choice.Anchor(operator, call.attrs, operands, choice.Tensor.of(call.checked_type), "layer")
    return choice.choose_schedule(anchor, target.resolve_target(on), **options)


#: Body, schedule, code, what is there.
CASES = [
    (conv2d, "BLOCKED", None, ""),
    (lambda: relay.nn.conv2d(var("x", SHAPE), var("w", (8, 1, 3, 3)), groups=8), "DEPTHWISE", None, ""),
    (lambda: relay.nn.dense(var("x", (1, 64)), var("w", (10, 64))),
     "NARROW", Code.SCHEDULE_FEW_COLUMNS, "1x10"),
    (lambda: conv2d("float64"), "GENERIC", Code.SCHEDULE_DTYPE, "float64"),
    (lambda: conv2d(out_dtype="float64"), "GENERIC", Code.SCHEDULE_DTYPE, "float32, float64"),
    (lambda: relay.nn.conv2d(var("x", (1, 9, 9, 8)), var("w", (3, 3, 8, 4)), data_layout="NHWC",
                             kernel_layout="HWIO"),
     "GENERIC", Code.SCHEDULE_LAYOUT, "NHWC, HWIO, NHWC"),
    (lambda: relay.nn.conv1d(var("x", (1, 8, 9)), var("w", (4, 8, 3))),
     "GENERIC", Code.SCHEDULE_OPERATOR, "conv1d of 1x8x9"),
    (lambda: relay.nn.dense(var("x", (2, 3, 64)), var("w", (10, 64))),
     "GENERIC", Code.SCHEDULE_OPERATOR, "dense of 2x3x64"),
    (lambda: relay.nn.conv2d_transpose(var("x", SHAPE), var("w", (8, 4, 3, 3)), dilation=(2, 2)),
     "GENERIC", Code.SCHEDULE_DILATION, "(2, 2)"),
    (lambda: relay.nn.conv2d(var("x", (1, 3, 2, 2)), var("w", (3, 1, 3, 3)), padding=(1, 1), groups=3),
     "GENERIC", Code.SCHEDULE_NO_TILE, "1x3x2x2 and 3x1x3x3"),
    (lambda: relay.nn.dense(var("x", (relay.Any(), 64)), var("w", (10, 64))),
     "TVM", Code.SCHEDULE_DYNAMIC_SHAPE, "?x64"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted", "code", "got"), CASES)
def test_choice(body, wanted, code, got):
    chosen = choose(body())
    assert chosen.schedule is schedule.Schedule[wanted]
    assert (chosen.kernel is None) == (wanted in ("GENERIC", "TVM"))
    if code is None:
        assert chosen.reason is None
    else:
        assert (chosen.reason.code, chosen.reason.at, chosen.reason.got) == (code, "layer", got)


def test_a_library_and_a_tuner_bring_their_own():
    library, tuner = choose(conv2d(), f"{CUDA} -libs=cudnn"), choose(conv2d(), is_tuned=True)
    assert {library.schedule, tuner.schedule} == {schedule.Schedule.TVM}
    assert (library.reason.code, library.reason.got) == (Code.SCHEDULE_LIBRARY, "-libs=cudnn")
    assert tuner.reason.code is Code.SCHEDULE_TUNER


def build(module):
    on = target.resolve_target(CUDA)
    return kernels.build_kernels(transform.FuseChains(on)(module), on)


def test_kernels_of_a_build():
    net = Net()
    x = net.input("x", SHAPE)
    y = relay.nn.relu(net.conv2d(relay.nn.relu(net.conv2d(x, 8)), 8, groups=8))
    weight = relay.const(np.ones((10, 1568), "float32"))
    z = relay.nn.dense(relay.nn.batch_flatten(y), weight)
    built = build(net.module(relay.tanh(z)))
    chosen = [built.choices.get(launch.symbol) for launch in built.launches if built.calls[launch.symbol]]
    kinds = [each and each.schedule.name for each in chosen]
    assert sorted(kinds, key=str) == ["BLOCKED", "DEPTHWISE", "NARROW"]
    (reason,) = [each.reason for each in chosen if each.reason]
    assert (reason.code, reason.got) == (Code.SCHEDULE_FEW_COLUMNS, "1x10")
    sources = dict(zip(kinds, (launch.symbol for launch in built.launches if built.calls[launch.symbol])))
    assert "dense" in sources["NARROW"]


def test_a_kernel_without_an_anchor_has_no_choice():
    net = Net()
    assert build(net.module(relay.tanh(net.input("x", SHAPE)))).choices == {}


def test_a_broadcast_result():
    params = [var("p0", (1, 8, 4, 4)), var("p1", (16, 8, 4, 4)), var("p2", (1, 16, 9, 9))]
    body = relay.add(relay.nn.conv2d(*params[:2]), params[2])
    function = relay.Function(params, body).with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    args = [var(f"x{index}", param.type_annotation.concrete_shape) for index, param in enumerate(params)]
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Call(function, args)))
    built = kernels.build_kernels(module, target.resolve_target(CUDA))
    (chosen,) = built.choices.values()
    assert chosen.schedule is schedule.Schedule.GENERIC
    assert (chosen.reason.code, chosen.reason.got) == (Code.SCHEDULE_RESULT_BROADCAST, "1x16x9x9")
    (launch,) = built.launches
    assert launch.threads_per_block == 256
