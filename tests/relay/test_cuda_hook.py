"""TVM's own hook for CUDA: ours inside, TVM's outside; NVRTC where a GPU is visible, without nvcc."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import CUDA, LLVM, Net, relay, tvm
from tvm_fuse.core.errors import MissingDependency, ToolFailed

build = Lazy("tvm_fuse.relay.build")
cuda_hook = Lazy("tvm_fuse.relay.cuda_hook")
target = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CALLBACK = "tvm_callback_cuda_compile"


def model():
    net = Net()
    return net.module(relay.exp(net.input("x", (3, 50))))


def callback():
    return tvm.get_global_func(CALLBACK, allow_missing=True)


@pytest.fixture(autouse=True)
def empty_path(monkeypatch, tmp_path):
    """No nvcc."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def gpu(monkeypatch):
    """As on a machine with a GPU, as far as a build can tell."""
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: True)


@pytest.fixture
def tvms_own():
    """A function in the place of TVM's; says that it was called."""
    before = callback()
    tvm.register_func(CALLBACK, lambda code, *_: "tvm's own", override=True)
    yield
    tvm.register_func(CALLBACK, before, override=True)


def saved(artifact, folder, suffix):
    """What TVM stored as the kernels' code."""
    (part,) = [part for part in artifact.library.get_lib().imported_modules if part.type_key == "cuda"]
    part.save(str(folder / f"kernels.{suffix}"))
    return (folder / f"kernels.{suffix}").read_bytes()


@pytest.mark.usefixtures("gpu")
def test_kernels_are_compiled_by_nvrtc_where_a_gpu_is_visible(tmp_path):
    artifact = build.build_fused(model(), target.resolve_target(CUDA))
    cubin = saved(artifact, tmp_path, "cubin")
    assert cubin.startswith(b"\x7fELF")
    assert artifact.cuda_kernels[0].encode() in cubin


@pytest.mark.usefixtures("gpu")
def test_architecture_that_nvrtc_does_not_know_is_stored_as_ptx(tmp_path, monkeypatch):
    from tvm_fuse.cuda import compile as compile_module

    older = replace(compile_module.load_nvrtc(), archs=(75,))
    monkeypatch.setattr(compile_module, "load_nvrtc", lambda: older)
    artifact = build.build_fused(model(), target.resolve_target(CUDA))
    assert b".target sm_75" in saved(artifact, tmp_path, "ptx")


@pytest.mark.usefixtures("gpu", "tvms_own")
@pytest.mark.parametrize("error", [MissingDependency("no NVRTC"), ToolFailed("NVRTC failed")])
def test_errors_of_the_compiler_reach_the_user(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.compile_cuda", fail)
    with pytest.raises(type(error), match="NVRTC"):
        build.build_fused(model(), target.resolve_target(CUDA))
    assert callback()("") == "tvm's own"


@pytest.mark.usefixtures("tvms_own")
@pytest.mark.parametrize("is_visible", [False, True])
def test_tvms_own_function_is_back_afterwards(monkeypatch, is_visible):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: is_visible)
    resolved = target.resolve_target(CUDA)
    during = []

    def fail():
        with cuda_hook.cuda_compilation(resolved):
            during.append(callback()("", resolved))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert callback()("", resolved) == "tvm's own" not in during
    assert len(during) == 1


@pytest.mark.usefixtures("tvms_own")
def test_other_targets_leave_it_alone():
    with cuda_hook.cuda_compilation(target.resolve_target(LLVM)):
        assert callback()("") == "tvm's own"


def test_a_tvm_without_the_function_has_none_afterwards():
    before = callback()
    tvm._ffi.registry.remove_global_func(CALLBACK)
    try:
        with cuda_hook.cuda_compilation(target.resolve_target(CUDA)):
            assert callback() is not None
        assert callback() is None
    finally:
        tvm.register_func(CALLBACK, before, override=True)
