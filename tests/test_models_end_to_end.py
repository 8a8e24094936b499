"""Whole models: every batch norm folded, every layer fused, the numbers the same, one CUDA kernel a chain."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.models import MODELS, save
from tests.support.relay_graphs import CUDA

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

#: Against ONNX Runtime, which sums in another order: relative to the largest output.
ORT_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    name: str
    batch_norms: int
    anchors: int
    image: int = 224


GENERATED = [
    Case("mobilenet_v2", 52, 53, image=96),
    pytest.param(Case("resnet50", 53, 54), marks=pytest.mark.slow),
    pytest.param(Case("efficientnet_b0", 49, 82), marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Loaded:
    case: Case
    file: Path
    model: Any


def load(case, file, shapes):
    from tvm_fuse.relay.load import load_model

    return Loaded(case, file, load_model(file, shapes=shapes))


@pytest.fixture(scope="module", params=GENERATED, ids=lambda case: case.name)
def loaded(request, tmp_path_factory):
    case = request.param
    file = tmp_path_factory.mktemp("models") / f"{case.name}.onnx"
    save(MODELS[case.name](image=case.image), file)
    return load(case, file, {})


def check_on_cpu(loaded):
    from tvm_fuse import pipeline
    from tvm_fuse.core.inputs import make_inputs
    from tvm_fuse.relay.build import Artifact, Runner
    from tvm_fuse.relay.target import resolve_target

    compiled = pipeline.compile_model(loaded.model, "llvm", pipeline.Options(latency=False))
    report = compiled.report
    assert len(report.folds) == len(report.epsilon) == loaded.case.batch_norms
    assert (report.not_folded, report.not_fused) == ((), ())
    assert len(report.chains) == loaded.case.anchors
    assert report.parity.passed
    assert not report.parity.rows[0].proves_little
    assert report.fused.kernels < report.unfused.kernels / 4
    assert report.fused.traffic_bytes < report.unfused.traffic_bytes / 2

    ort = pytest.importorskip("onnxruntime")
    inputs = make_inputs(loaded.model.inputs, seed=3)
    runner = Runner(Artifact(compiled.library, ()), resolve_target("llvm"))
    got = runner.run(inputs, loaded.model.outputs)
    session = ort.InferenceSession(str(loaded.file), providers=["CPUExecutionProvider"])
    for name, want in zip(loaded.model.outputs, session.run(list(loaded.model.outputs), inputs)):
        np.testing.assert_allclose(got[name], want, rtol=0, atol=ORT_TOLERANCE * np.abs(want).max())


def check_cuda_source(loaded):
    import tvm_fuse
    from tvm_fuse.relay.build import build_fused
    from tvm_fuse.relay.target import resolve_target

    folded = tvm_fuse.transform.FoldBatchNorm()(loaded.model.module)
    artifact = build_fused(tvm_fuse.transform.FuseChains(CUDA)(folded), resolve_target(CUDA))
    groups = tvm_fuse.last_report()["PartitionChains"].details
    assert sum(count_layers(group) for group in groups) == loaded.case.anchors  # a gate's two are one kernel

    fused_calls = [
        call.function for call in artifact.calls if "conv2d" in call.function or "dense" in call.function
    ]
    assert len(fused_calls) == len([group for group in groups if count_layers(group)])
    kernels = Counter(name.rpartition("_kernel")[0] for name in artifact.cuda_kernels)
    assert {kernels[function] for function in fused_calls} == {1}

    for group in groups:  # the only multiplies left are those of an activation, and of a gate's result
        named = ("silu", "hard_swish", "hard_sigmoid", "multiply")
        assert group.operators.count("multiply") <= sum(map(group.name.count, named)), group
        assert group.operators.count("add") <= 3 * count_layers(group), group


def count_layers(group):
    return sum("conv2d" in operator or "dense" in operator for operator in group.operators)


def test_cpu(loaded):
    check_on_cpu(loaded)


def test_cuda_source(loaded):
    check_cuda_source(loaded)


@pytest.mark.slow
def test_text_direction_classifier():
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None:
        pytest.skip("rapidocr_onnxruntime is not installed")
    file = Path(spec.submodule_search_locations[0], "models", "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    loaded = load(Case("cls", 35, 54), file, {"x": (1, 3, 48, 192)})
    check_on_cpu(loaded)
    check_cuda_source(loaded)
