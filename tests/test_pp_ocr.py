"""The three PP-OCR models: detector, text-direction classifier, recognizer. Trained weights, real exports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_models import run
from tvm_fuse.core.affine import RULE, plan_affine_folds
from tvm_fuse.core.channelwise import AFFINE_KINDS, read_step
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import ANCHOR_KINDS
from tvm_fuse.core.weights import output_axes
from tvm_fuse.onnx.fold import fold_onnx
from tvm_fuse.onnx.graph import read_graph
from tvm_fuse.onnx.load import load_onnx

#: File, shape of the input x, batch norms in the file.
MODELS = [
    ("ch_PP-OCRv4_det_infer.onnx", (1, 3, 96, 160), 3),
    ("ch_ppocr_mobile_v2.0_cls_infer.onnx", (1, 3, 48, 192), 35),
    ("ch_PP-OCRv4_rec_infer.onnx", (1, 3, 48, 160), 6),
]


@pytest.fixture(params=MODELS, ids=["det", "cls", "rec"], scope="module")
def case(request):
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        pytest.skip("rapidocr_onnxruntime is not installed")
    name, shape, batch_norms = request.param
    path = Path(spec.origin).parent / "models" / name
    model = load_onnx(path)
    return model, fold_onnx(model), shape, batch_norms


def test_no_batch_norm_is_left(case):
    _, folded, _, batch_norms = case
    assert len(folded.folds) == batch_norms
    assert not [node for node in folded.proto.graph.node if node.op_type == "BatchNormalization"]


def test_no_scale_or_shift_is_left_after_a_layer_without_a_reason(case):
    """Past the one bias, an operator with a constant is there only where a decision names the layer."""
    _, folded, _, _ = case
    graph = read_graph(folded.parts).graph
    assert plan_folds(graph)[0] == plan_affine_folds(graph)[0] == ()
    named = {decision.at for decision in folded.decisions if decision.rule == RULE and not decision.applied}
    for anchor in graph.of_kind(*ANCHOR_KINDS):
        axes, value = output_axes(anchor), anchor
        steps = 0
        while axes and len(graph.readers(value.id)) == 1 and not graph.is_output(value.id):
            value = graph.nodes[graph.readers(value.id)[0]]
            if value.kind not in AFFINE_KINDS or read_step(graph, value, axes) is None:
                break
            steps += 1
        assert steps <= 1 or str(anchor) in named or _belongs_to_activation(graph, value)


def _belongs_to_activation(graph, value):
    """A hard sigmoid written as operators scales and shifts before it clips."""
    return value.op in ("Clip", "Min", "Max", "Relu")


def test_the_outputs_stay(case):
    model, folded, shape, _ = case
    feeds = {model.inputs[0].name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    for got, want in zip(run(folded.proto, feeds), run(model.proto, feeds)):
        assert np.abs(got - want).max() <= 2e-5 * max(1.0, np.abs(want).max())
