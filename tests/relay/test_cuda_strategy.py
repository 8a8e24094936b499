"""Which schedule an anchor gets on CUDA: ours, our last resort, or TVM's; and who asks for it."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, count_operators, relay, tvm

kernels = Lazy("tvm_fuse.relay.kernels")
strategy = Lazy("tvm_fuse.relay.cuda_strategy")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CUDA = "cuda -arch=sm_80"
#: TVM's CUDA target without our key.
PLAIN = "cuda -arch=sm_80 -keys=cuda,gpu"

SHAPE = (1, 8, 14, 14)


def var(name, shape, dtype="float32"):
    return relay.var(name, shape=shape, dtype=dtype)


def module_of(body):
    function = relay.Function(relay.analysis.free_vars(body), body)
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def build(body, on=CUDA):
    resolved = target.resolve_target(on)
    return kernels.build_kernels(transform.FuseChains(resolved)(module_of(body)), resolved)


def conv2d(dtype="float32", shape=SHAPE, **attrs):
    return relay.nn.conv2d(var("x", shape, dtype), var("w", (16, shape[1], 3, 3), dtype), **attrs)


def names_of(body, on):
    """The implementations that relay.build chooses among."""
    resolved = target.resolve_target(on)
    call = module_of(body)["main"].body
    with resolved:
        found = relay.backend.te_compiler.get_valid_implementations(
            call.op,
            call.attrs,
            [tvm.te.placeholder(arg.checked_type.shape, dtype=arg.checked_type.dtype) for arg in call.args],
            call.checked_type,
            resolved,
        )
    return [implementation.name for implementation in found]


# --- what an anchor gets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (lambda: conv2d(), "conv2d.tvm_fuse"),
        (lambda: conv2d("float16"), "conv2d_generic.tvm_fuse"),
        (lambda: conv2d(out_dtype="float64"), "conv2d_generic.tvm_fuse"),
        (lambda: relay.nn.dense(var("x", (1, 8)), var("w", (4, 8))), "dense.tvm_fuse"),
        (lambda: relay.nn.dense(var("x", (9, 8), "int8"), var("w", (4, 8), "int8"), out_dtype="int32"),
         "dense_generic.tvm_fuse"),
        (lambda: relay.nn.batch_matmul(var("x", (2, 9, 8)), var("y", (2, 9, 8))), "batch_matmul.tvm_fuse"),
        (lambda: relay.nn.matmul(var("x", (9, 8)), var("y", (8, 9))), "matmul_generic.tvm_fuse"),
        (lambda: relay.nn.conv1d(var("x", (1, 8, 9)), var("w", (4, 8, 3))), "conv1d_generic.tvm_fuse"),
        (lambda: relay.nn.conv3d(var("x", (1, 2, 5, 5, 5)), var("w", (4, 2, 3, 3, 3))),
         "conv3d_generic.tvm_fuse"),
        (lambda: relay.nn.conv2d_transpose(var("x", SHAPE), var("w", (8, 4, 2, 2)), strides=(2, 2)),
         "conv2d_transpose.tvm_fuse"),
        (lambda: relay.nn.conv2d(var("x", (1, 9, 9, 8)), var("w", (3, 3, 8, 4)), data_layout="NHWC",
                                 kernel_layout="HWIO"), "conv2d_generic.tvm_fuse"),
    ],
)  # fmt: skip
def test_which_implementation(body, wanted):
    assert names_of(body(), CUDA) == [wanted]


@pytest.mark.parametrize(
    "body",
    [
        lambda: conv2d("float64"),
        lambda: conv2d(out_dtype="float64"),
        lambda: relay.nn.conv2d(
            var("x", (1, 9, 9, 8)), var("w", (3, 3, 8, 4)), data_layout="NHWC", kernel_layout="HWIO"
        ),
        lambda: relay.nn.conv2d(
            var("x", (1, 9, 9, 8)), var("w", (3, 3, 8, 1)), data_layout="NHWC", kernel_layout="HWOI", groups=8
        ),
        lambda: relay.nn.conv1d(var("x", (1, 8, 9)), var("w", (4, 8, 3))),
        lambda: relay.nn.conv1d_transpose(var("x", (1, 8, 9)), var("w", (8, 4, 3))),
        lambda: relay.nn.conv3d(var("x", (1, 2, 5, 5, 5)), var("w", (4, 2, 3, 3, 3))),
        lambda: relay.nn.conv3d_transpose(var("x", (1, 2, 5, 5, 5)), var("w", (2, 4, 3, 3, 3))),
        lambda: relay.nn.matmul(var("x", (9, 8)), var("y", (8, 9))),
        lambda: relay.nn.dense(var("x", (9, 8), "float64"), var("w", (4, 8), "float64")),
    ],
)
def test_the_last_resort_has_whole_blocks(body):
    (launch,) = build(relay.nn.relu(body())).launches
    assert launch.threads_per_block == 256


def test_a_result_that_is_broadcast_after_its_anchor():
    """Not a chain of ours; but a primitive function may hold anything."""
    params = [var("p0", (1, 8, 4, 4)), var("p1", (16, 8, 4, 4)), var("p2", (1, 16, 9, 9))]
    body = relay.add(relay.nn.conv2d(*params[:2]), params[2])
    function = relay.Function(params, body).with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    call = relay.Call(
        function,
        [var(f"x{index}", param.type_annotation.concrete_shape) for index, param in enumerate(params)],
    )
    (launch,) = kernels.build_kernels(module_of(call), target.resolve_target(CUDA)).launches
    assert (launch.threads_per_block, launch.blocks) == (256, -(-16 * 81 // 256))


def test_int8_convolution_has_no_kernel_of_one_thread():
    built = build(conv2d("int8", out_dtype="int32"))
    assert min(launch.threads_per_block for launch in built.launches) >= 32


# --- who asks ------------------------------------------------------------------------------------


def test_a_plain_target_keeps_the_schedules_of_tvm():
    assert "conv2d_nchw.cuda" in names_of(conv2d(), PLAIN)
    assert not [name for name in names_of(conv2d(), PLAIN) if "tvm_fuse" in name]


def test_the_kernel_of_one_thread_that_a_plain_target_gets():
    """What our schedules are for; when TVM no longer does it, they may go."""
    assert min(launch.threads_per_block for launch in build(conv2d(), PLAIN).launches) == 1


def test_libraries_are_kept():
    names = names_of(conv2d(), f"{CUDA} -libs=cudnn")
    assert "conv2d_cudnn.cuda" in names


def test_tuning_brings_its_own_schedules():
    with tvm.transform.PassContext(config={"relay.backend.use_auto_scheduler": True}):
        assert not [name for name in names_of(conv2d(), CUDA) if "tvm_fuse" in name]


def test_dynamic_shapes_go_to_tvm():
    body = relay.nn.dense(var("x", (relay.Any(), 8)), var("w", (4, 8)))
    assert not [name for name in names_of(body, CUDA) if "tvm_fuse" in name]


# --- layouts -------------------------------------------------------------------------------------


def test_layouts_stay_and_nothing_becomes_winograd():
    net = Net()
    x = net.input("x", SHAPE)
    y = relay.nn.relu(net.conv2d(relay.nn.relu(net.conv2d(x, 8)), 8, groups=8))
    operators = count_operators(transform.FuseChains(CUDA)(net.module(y)))
    assert operators["nn.conv2d"] == 2
    assert not [name for name in operators if "layout_transform" in name or "contrib" in name]
