"""Builds: the fused one and the reference, their cost, CUDA without a compiler, running and timing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, LLVM, Net, relay, tvm
from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.core.inputs import make_inputs

build = Lazy("tvm_fuse.relay.build")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = pytest.mark.relay

SHAPE = (1, 4, 6, 6)
CALLBACK = "tvm_callback_cuda_compile"


def resolve(on=LLVM):
    return target.resolve_target(on)


def model():
    net = Net()
    return net.module(relay.nn.relu(net.batch_norm(net.conv2d(net.input("x", SHAPE), 4))))


def fuse(module, on=LLVM):
    return transform.FuseChains(on)(transform.FoldBatchNorm()(module))


@pytest.fixture(scope="module")
def pair():
    """The fused artifact and the reference of one small model."""
    module = model()
    return build.build_fused(fuse(module), resolve()), build.build_unfused(module, resolve())


# --- what is built -------------------------------------------------------------------------------


def test_reference_does_every_operator_by_itself(pair):
    fused, unfused = pair
    names = [call.function for call in unfused.calls]
    assert len([name for name in names if "conv2d" in name]) == 1
    assert not [name for name in names if "conv2d" in name and "add" in name]
    assert len(names) > 5  # the batch norm's own arithmetic, at run time
    assert len([call for call in fused.calls if "conv2d" in call.function]) == 1
    assert len(fused.calls) == 2  # and the layout transform at the end; that at the start is in the kernel


def test_both_agree(pair):
    inputs = make_inputs([TensorSpec("x", SHAPE, "float32")], 0)
    got, want = (build.Runner(artifact, resolve()).run(inputs, ["y"])["y"] for artifact in pair)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_builds_ignore_the_context_of_the_caller(pair):
    with tvm.transform.PassContext(opt_level=4):
        unfused = build.build_unfused(model(), resolve())
    assert [call.function for call in unfused.calls] == [call.function for call in pair[1].calls]


def test_traffic_is_every_operand_and_result_once():
    net = Net()
    x = net.input("x", (2, 3))
    artifact = build.build_unfused(net.module(relay.nn.relu(x + net.const(3))), resolve())
    assert [(call.bytes_read, call.bytes_written) for call in artifact.calls] == [(24 + 12, 24), (24, 24)]
    assert artifact.traffic_bytes == 108


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("int8", 1), ("bool", 1), ("float64", 8)])
def test_traffic_counts_bytes_of_a_dtype(dtype, size):
    x = relay.var("x", shape=(5,), dtype=dtype)
    module = tvm.IRModule.from_expr(relay.Function([x], relay.reverse(x, 0)))
    (call,) = build.build_unfused(module, resolve()).calls
    assert (call.bytes_read, call.bytes_written) == (5 * size, 5 * size)


def test_reshapes_that_do_nothing_are_no_kernels():
    net = Net()
    y = relay.nn.relu(relay.reshape(net.input("x", (2, 3)), (3, 2)))
    assert len(build.build_unfused(net.module(y), resolve()).calls) == 1


def test_tvm_that_fails_is_told_in_one_line():
    """Two convolutions in one primitive function have no schedule."""
    net = Net()
    x = relay.var("p0", shape=SHAPE)
    body = net.conv2d(net.conv2d(x, 4), 4)
    function = relay.Function([x], body).with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    module = net.module(relay.Call(function, [net.input("x", SHAPE)]))
    with pytest.raises(ToolFailed) as caught:
        build.build_unfused(module, resolve())
    assert caught.value.exit_code == 5
    assert len(str(caught.value).splitlines()) == 1
    assert "llvm" in str(caught.value)
    assert "complicated" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Traceback:\n  0: f()\nTVMError: no schedule\n", "TVMError: no schedule"),
        ("RuntimeError: Memory verification failed:\n  variable p1\n# from tvm\n y[0] = T.max(x[0], p1[0])",
         "RuntimeError: Memory verification failed:"),
        ("Check failed: (a) is false", "Check failed: (a) is false"),
        ("something else\nentirely", "entirely"),
        ("", "TVMError"),
    ],
)  # fmt: skip
def test_the_line_that_says_what_is_wrong(monkeypatch, text, wanted):
    def fail(*args, **kwargs):
        raise tvm.TVMError(text)

    monkeypatch.setattr("tvm_fuse.relay.build.relay.build", fail)
    with pytest.raises(ToolFailed) as caught:
        build.build_unfused(None, resolve("llvm -mcpu=haswell"))
    assert str(caught.value).endswith(f": {wanted}")


# --- CUDA ----------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)


@pytest.mark.cuda_codegen
def test_cuda_source_needs_no_compiler(no_gpu, monkeypatch):
    def compiler(code, *_):
        raise AssertionError("the CUDA compiler was called")

    before = tvm.get_global_func(CALLBACK, allow_missing=True)
    tvm.register_func(CALLBACK, compiler, override=True)
    try:
        artifact = build.build_fused(fuse(model(), CUDA), resolve(CUDA))
        with pytest.raises(AssertionError, match="was called"):  # ours again afterwards
            tvm.get_global_func(CALLBACK)("")
    finally:
        if before is not None:
            tvm.register_func(CALLBACK, before, override=True)
    assert len(artifact.cuda_kernels) == len(artifact.calls) == 1
    assert f"{artifact.cuda_kernels[0]}(" in artifact.cuda_source
    assert "conv2d_add_nn_relu" in artifact.cuda_kernels[0]


@pytest.mark.cuda_codegen
def test_cuda_kernels_are_counted_once_although_declared_twice(no_gpu):
    artifact = build.build_unfused(model(), resolve(CUDA))
    assert len(set(artifact.cuda_kernels)) == len(artifact.cuda_kernels) > 5


# --- inputs, running, timing ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_outputs():
    net = Net()
    x = net.input("x", (2, 2))
    module = net.module(relay.nn.relu(x), relay.exp(x), relay.tanh(x))
    return build.Runner(build.build_unfused(module, resolve()), resolve())


def test_outputs_are_named_in_order(three_outputs):
    x = np.array([[-1, 0], [1, 2]], "float32")
    got = three_outputs.run({"x": x}, ["a", "b", "c"])
    assert list(got) == ["a", "b", "c"]
    assert np.array_equal(got["a"], np.maximum(x, 0))
    np.testing.assert_allclose(got["c"], np.tanh(x), rtol=1e-5)


def test_outputs_beyond_the_names_are_extra_and_too_many_names_are_missing(three_outputs):
    inputs = {"x": np.zeros((2, 2), "float32")}
    assert list(three_outputs.run(inputs, ["a"])) == ["a", "extra0", "extra1"]
    assert list(three_outputs.run(inputs, ["a", "b", "c", "d"])) == ["a", "b", "c"]


def test_runs_do_not_disturb_each_other(three_outputs):
    one, two = (three_outputs.run({"x": np.full((2, 2), v, "float32")}, ["a"])["a"] for v in (1, 2))
    assert (one.max(), two.max()) == (1, 2)


class Clock:
    """Stands for a Runner; notes when it was asked."""

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def time_once(self):
        self.log.append(self.name)
        return self.seconds


def test_models_are_timed_in_turn():
    log = []
    times = build.measure([Clock(log, "a", 1.0), Clock(log, "b", 2.0)], budget_s=0.0)
    assert times == ((1.0,) * 5, (2.0,) * 5)
    assert log == ["a", "b"] * 5
    assert len(build.measure([Clock([], "a", 1.0)], budget_s=60.0, most=7)[0]) == 7


def test_time_is_positive(three_outputs):
    three_outputs.set_inputs({"x": np.zeros((2, 2), "float32")})
    assert 0 < three_outputs.time_once() < 10
