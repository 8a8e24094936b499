"""The kernels of whole models on CUDA: every anchor has one of ours, whole blocks, no spills, no stack."""

from __future__ import annotations

import pytest

from examples.models import MODELS, save
from tests.support.cuda_groups import assert_aligned
from tests.support.lazy import Lazy
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.resources import read_resources

kernels = Lazy("tvm_fuse.relay.kernels")
load = Lazy("tvm_fuse.relay.load")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen, pytest.mark.slow]


@pytest.fixture(scope="module", params=sorted(MODELS))
def folded(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    save(MODELS[request.param](image=224), file)
    return transform.FoldBatchNorm()(load.load_model(file, shapes={}).module)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_every_kernel_of_a_model(folded, arch):
    on = target.resolve_target(f"cuda -arch={arch}")
    built = kernels.build_kernels(transform.FuseChains(on)(folded), on)
    anchors = [launch for launch in built.launches if "conv2d" in launch.symbol or "dense" in launch.symbol]
    assert len(anchors) > 20
    assert_aligned(built.artifact.cuda_source)
    for used in read_resources(compile_cuda(built.artifact.cuda_source, arch), anchors):
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), used.symbol
        assert used.threads_per_block >= 49, used.symbol
        assert used.blocks_per_sm >= 2, used.symbol
