"""Targets: what the short forms mean, and what is refused."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import tvm
from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.core.errors import MissingDependency, UsageError

target = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay


@pytest.mark.parametrize("text", [None, "llvm", " llvm "])
def test_this_machine(text):
    resolved = target.resolve_target(text)
    assert (resolved.kind.name, resolved.mcpu) == ("llvm", detect_cpu())
    assert not target.is_cuda(resolved)


def test_given_cpu_is_kept():
    resolved = target.resolve_target("llvm -mcpu=haswell -num-cores=3")
    assert (resolved.mcpu, int(resolved.attrs["num-cores"])) == ("haswell", 3)
    assert "cpu" in resolved.keys


@pytest.mark.cuda_codegen
def test_cuda_gets_an_arch_and_a_host():
    resolved = target.resolve_target("cuda -arch=sm_80")
    assert target.is_cuda(resolved)
    assert resolved.arch == "sm_80"
    assert resolved.host.kind.name == "llvm"
    assert resolved.host.mcpu == detect_cpu()
    assert target.resolve_target("cuda -arch=sm_70").arch == "sm_70"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.target.has_cuda_device", lambda: False)


@pytest.mark.cuda_codegen
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("text", ["cuda", " cuda ", "cuda -max_num_threads=512", '{"kind": "cuda"}'])
def test_cuda_without_an_arch_is_refused(text):
    with pytest.raises(UsageError) as caught:
        target.resolve_target(text)
    assert text.strip() in str(caught.value)
    assert "-arch=sm_75|sm_80|sm_86|sm_89|sm_90" in caught.value.hint
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.cuda_codegen
@pytest.mark.usefixtures("no_gpu")
def test_default_arch_of_tvm_is_refused_in_a_target_but_not_in_a_text():
    with pytest.raises(UsageError, match="TVM would take sm_50"):
        target.resolve_target(tvm.target.Target("cuda"))
    assert target.resolve_target("cuda -arch=sm_50").arch == "sm_50"


@pytest.mark.cuda_codegen
@pytest.mark.parametrize("text", ["cuda", "cuda -max_num_threads=512"])
def test_arch_of_a_visible_gpu_is_taken(monkeypatch, text):
    monkeypatch.setattr("tvm_fuse.relay.target.has_cuda_device", lambda: True)
    monkeypatch.setattr("tvm_fuse.relay.target._visible_arch", lambda: "sm_89")
    assert target.resolve_target(text).arch == "sm_89"


@pytest.mark.cuda_codegen
def test_arch_of_a_named_gpu():
    assert target.resolve_target("nvidia/nvidia-a100").arch == "sm_80"


@pytest.mark.cuda_codegen
def test_given_host_is_kept():
    given = tvm.target.Target("cuda -arch=sm_70", host="llvm -mcpu=haswell")
    assert target.resolve_target(given).host.mcpu == "haswell"


def test_target_object_is_taken_as_it_is():
    given = tvm.target.Target("llvm -mcpu=haswell")
    assert target.resolve_target(given).same_as(given)


@pytest.mark.parametrize("text", ["nonsense", "llvm -no-such-option=1", "{", "cuda -arch", "llvm:", "-"])
def test_unknown_target(text):
    with pytest.raises(UsageError) as caught:
        target.resolve_target(text)
    assert text in str(caught.value)
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) == 2


def test_target_without_code_generator():
    """A kind that every TVM knows and hardly one can generate code for."""
    assert "ext_dev" in tvm.target.Target.list_kinds()
    with pytest.raises(MissingDependency):
        target.resolve_target("ext_dev")
