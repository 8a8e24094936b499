"""Launches read from the IR, and whole models: from Relay to what each kernel uses, without nvcc or a GPU."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, Net, relay, tvm
from tvm_fuse.core.errors import InternalError
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.launch import Parameter
from tvm_fuse.cuda.resources import read_resources
from tvm_fuse.cuda.source import read_kernels

kernels = Lazy("tvm_fuse.relay.kernels")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


@pytest.fixture(autouse=True)
def without_nvcc_and_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)


def build(module, on=CUDA):
    fused = transform.FuseChains(on)(transform.FoldBatchNorm()(module))
    return kernels.build_kernels(fused, target.resolve_target(on))


@pytest.mark.parametrize(
    ("elements", "grid", "block"), [(144, (1, 1, 1), (144, 1, 1)), (3000, (3, 1, 1), (1024, 1, 1))]
)
def test_launch_of_an_elementwise_kernel(elements, grid, block):
    net = Net()
    built = build(net.module(relay.exp(net.input("x", (elements,)))))
    (launch,) = built.launches
    assert (launch.grid, launch.block, launch.smem_dynamic_bytes) == (grid, block, 0)
    assert sorted(parameter.name for parameter in launch.parameters) == ["T_exp", "p0"]
    assert launch.parameter_bytes == 16
    assert (launch.symbol,) == built.artifact.cuda_kernels


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_model_from_relay_to_resources(arch):
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    y = relay.nn.relu(net.batch_norm(net.conv2d(x, 4)))
    y = relay.nn.softmax(net.dense(relay.nn.batch_flatten(y), 10))
    built = build(net.module(y), f"cuda -arch={arch}")
    used = read_resources(compile_cuda(built.artifact.cuda_source, arch), built.launches)
    assert built.computed == ()
    assert [kernel.symbol for kernel in used] == list(built.artifact.cuda_kernels)
    assert len(used) == len(built.artifact.calls) + 1  # flattening is generated, and does nothing
    assert sorted(built.calls.values()) == [0, 1, 1, 1]
    assert [symbol for symbol, count in built.calls.items() if not count] == [
        "tvmgen_default_fused_nn_batch_flatten_kernel"
    ]
    assert all(kernel.blocks_per_sm > 0 and 0 < kernel.occupancy_ratio <= 1 for kernel in used)


def test_calls_of_a_kernel_that_several_layers_share():
    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    for _ in range(3):
        x = relay.nn.max_pool2d(x, (3, 3), padding=(1, 1))
    assert list(build(net.module(x)).calls.values()) == [3]


def test_half_precision():
    net = Net(dtype="float16")
    built = build(net.module(relay.nn.relu(net.conv2d(net.input("x", (1, 4, 6, 6)), 4))))
    assert "cuda_fp16.h" in built.artifact.cuda_source
    (kernel,) = read_resources(compile_cuda(built.artifact.cuda_source, "sm_80"), built.launches)
    assert "conv2d" in kernel.symbol


def test_kernel_whose_launch_the_host_computes():
    """A long sort merges in a loop of launches, each with another grid."""
    net = Net()
    built = build(net.module(relay.argsort(net.input("x", (1, 20_000)))))
    assert len(built.computed) == 1
    assert len(built.launches) == len(built.artifact.cuda_kernels) - 1 >= 1
    used = read_resources(compile_cuda(built.artifact.cuda_source, "sm_80"), built.launches)
    assert built.computed[0] not in {kernel.symbol for kernel in used}


def test_ir_that_lacks_a_kernel(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.kernels.read_launches", lambda modules: {})
    net = Net()
    with pytest.raises(InternalError, match="not those of the source"):
        build(net.module(relay.exp(net.input("x", (4,)))))


def test_modules_hold_the_host_functions_as_well():
    net = Net()
    (module,) = build(net.module(relay.exp(net.input("x", (4,))))).modules
    names = {str(symbol.name_hint) for symbol in module.functions}
    assert names == {"tvmgen_default_fused_exp", "tvmgen_default_fused_exp_kernel"}


# --- IR by hand ----------------------------------------------------------------------------------

KERNEL = """
# from tvm.script import ir as I
# from tvm.script import tir as T

@I.ir_module
class Module:
    @T.prim_func(private=True)
    def f(a: T.handle("float32"), n: T.int32, b: T.handle("float16")):
        T.func_attr({"target": T.target("cuda -arch=sm_80"), "tir.is_global_func": T.bool(True)})
        block = T.launch_thread("blockIdx.y", SIZE)
        memory = T.allocate([100, 2], "float16", "shared.dyn")
        thread = T.launch_thread("threadIdx.x", 64)
        again = T.launch_thread("threadIdx.x", AGAIN)
        memory_1 = T.Buffer((200,), "float16", data=memory, scope="shared.dyn")
        memory_1[thread] = T.float16(1)

    @T.prim_func(private=True)
    def on_host(a: T.handle("float32")):
        T.func_attr({"target": T.target("llvm")})
        T.evaluate(0)
"""


def parse(size="5 + 2", again="64"):
    return tvm.script.from_source(KERNEL.replace("SIZE", size).replace("AGAIN", again))


def test_launch_with_dynamic_shared_memory_and_a_scalar():
    assert list(kernels.read_launches([parse()])) == ["f"]
    launch = kernels.read_launches([parse()])["f"]
    assert (launch.grid, launch.block, launch.smem_dynamic_bytes) == ((1, 7, 1), (64, 1, 1), 400)
    assert launch.parameters == (
        Parameter("a", "float32"),
        Parameter("n", "int32", 4, False),
        Parameter("b", "float16"),
    )
    assert launch.parameter_bytes == 24


def test_launch_that_depends_on_a_parameter():
    assert kernels.read_launches([parse(size="n")]) == {"f": None}


def test_two_extents_of_one_axis():
    with pytest.raises(InternalError, match=r"threadIdx\.x has the extents 32 and 64"):
        kernels.read_launches([parse(again="32")])


def test_source_is_that_of_the_launch():
    net = Net()
    built = build(net.module(relay.exp(net.input("x", (4,)))))
    assert list(read_kernels(built.artifact.cuda_source)) == [launch.symbol for launch in built.launches]
