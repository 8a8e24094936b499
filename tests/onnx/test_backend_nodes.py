"""ONNX's own tests of Conv, ConvTranspose, Gemm and BatchNormalization, before and after folding.

Their parameters are inputs, so that nothing may fold; bound as initializers, and with a batch norm
beside them, they fold. The stored outputs are what everything is compared with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.onnx_models import run
from tvm_fuse.core.errors import ModelError
from tvm_fuse.onnx.fold import fold_onnx
from tvm_fuse.onnx.read import OPSETS, read_onnx

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"
LAYERS = ("Conv", "ConvTranspose", "Gemm")
EPSILON = 1e-3


class Case:
    """One stored test: a model of one node, its inputs by name, and its outputs."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.model = onnx.load(folder / "model.onnx")
        (self.node,) = self.model.graph.node
        files = [sorted((folder / "test_data_set_0").glob(f"{role}_*.pb")) for role in ("input", "output")]
        inputs, self.outputs = (
            [numpy_helper.to_array(onnx.load_tensor(file)) for file in fs] for fs in files
        )
        self.feeds = dict(zip(self.node.input, inputs))
        opset = self.model.opset_import[0]
        opset.version = min(opset.version, OPSETS.stop - 1)  # these operators are the same in both

    @property
    def data(self) -> str:
        return self.node.input[0]

    def bound(self, nodes, constants, outputs) -> onnx.ModelProto:
        """A model in which only the data is an input."""
        (data,) = [value for value in self.model.graph.input if value.name == self.data]
        tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
        graph = helper.make_graph(nodes, "bound", [data], outputs, tensors)
        return helper.make_model(graph, ir_version=8, opset_imports=self.model.opset_import)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.feeds.items() if name != self.data}


def load_cases():
    if not FOLDER.is_dir():
        return []
    models = [(path, (path / "model.onnx").read_bytes()) for path in sorted(FOLDER.iterdir())]
    wanted = [op.encode() for op in (*LAYERS, "BatchNormalization")]
    cases = [path for path, data in models if any(op in data for op in wanted)]
    found = [path for path in cases if is_single(onnx.load(path / "model.onnx"))]
    return [Case(path) for path in found]


def is_single(model):
    return len(model.graph.node) == 1 and model.graph.node[0].op_type in (*LAYERS, "BatchNormalization")


CASES = load_cases()
TRAINING = [case for case in CASES if len(case.node.output) > 1]
NORMS = [case for case in CASES if case.node.op_type == "BatchNormalization" and case not in TRAINING]
LAYER_CASES = [case for case in CASES if case.node.op_type in LAYERS]


def each(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


@pytest.fixture
def fold(tmp_path):
    """``fold(model)`` goes through a file, as a user's model does."""

    def through_a_file(model):
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        folded = fold_onnx(read_onnx(path))
        onnx.checker.check_model(folded.proto, full_check=True)
        return folded

    return through_a_file


def operators(model):
    return [node.op_type for node in model.graph.node]


def assert_close(got, wanted, rtol=1e-5):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * max(1.0, np.abs(other).max()))


def norm_of(channels, seed):
    """gamma of both signs, beta, mean, variance; and what they do to a channel, as scale and shift."""
    rng = np.random.default_rng(seed)
    gamma, beta, mean = rng.uniform(0.5, 1.5, (3, channels)) * rng.choice([-1.0, 1.0], (3, channels))
    vectors = [value.astype(np.float32) for value in (gamma, beta, mean, rng.uniform(0.3, 3.0, channels))]
    gamma, beta, mean, variance = (value.astype(np.float64) for value in vectors)
    scale = gamma / np.sqrt(variance + np.float32(EPSILON))
    return dict(zip(("n_gamma", "n_beta", "n_mean", "n_var"), vectors)), scale, beta - mean * scale


def norm_node(data, result, vectors):
    return helper.make_node("BatchNormalization", [data, *vectors], [result], name="norm", epsilon=EPSILON)


def along_channel(vector, rank):
    return vector.reshape(1, -1, *(1,) * (rank - 2))


def test_the_stored_tests_are_there():
    assert len(TRAINING) >= 2
    assert len(NORMS) >= 2
    assert len(LAYER_CASES) >= 25


@each(TRAINING)
def test_training_mode_is_refused(fold, case):
    with pytest.raises(ModelError, match="training mode"):
        fold(case.model)


@each([case for case in CASES if case not in TRAINING])
def test_what_has_no_constants_stays(fold, case):
    folded = fold(case.model)
    assert (folded.folds, folded.affine_folds) == ((), ())
    assert list(folded.proto.graph.input) == list(case.model.graph.input)
    assert operators(folded.proto) == [case.node.op_type]
    assert_close(run(folded.proto, case.feeds), case.outputs)


@each(LAYER_CASES)
def test_a_batch_norm_after_a_layer_folds(fold, case):
    (stored,) = case.outputs
    vectors, scale, shift = norm_of(stored.shape[1], seed=len(case.name))
    result = helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, stored.shape)
    nodes = [case.node, norm_node(case.node.output[0], "result", vectors)]
    model = case.bound(nodes, {**case.parameters(), **vectors}, [result])
    folded = fold(model)
    has_other_bias = case.name == "test_gemm_default_matrix_bias"  # not one number a channel
    left = ["BatchNormalization"] if has_other_bias else []
    assert operators(folded.proto) == [case.node.op_type, *left]
    wanted = stored * along_channel(scale, stored.ndim) + along_channel(shift, stored.ndim)
    got = run(folded.proto, {case.data: case.feeds[case.data]})
    assert_close(got, [wanted.astype(np.float32)])


@each(LAYER_CASES)
def test_a_batch_norm_before_a_layer_keeps_the_stored_output(fold, case):
    """Its data is what the batch norm turns into the stored data, so that the output is the stored one."""
    data = case.feeds[case.data]
    vectors, scale, shift = norm_of(data.shape[1], seed=len(case.name))
    layer = onnx.NodeProto()
    layer.CopyFrom(case.node)
    layer.input[0] = "normalized"
    nodes = [norm_node(case.data, "normalized", vectors), layer]
    model = case.bound(nodes, {**case.parameters(), **vectors}, case.model.graph.output)
    folded = fold(model)
    before = (data - along_channel(shift, data.ndim)) / along_channel(scale, data.ndim)
    got = run(folded.proto, {case.data: before.astype(np.float32)})
    assert_close(got, case.outputs, rtol=3e-5)
    if case.node.op_type == "Gemm" and not transposes_data(case.node):
        assert operators(folded.proto) == ["Gemm"]
    if case.name in ("test_basic_conv_without_padding", "test_conv_with_strides_no_padding"):
        assert operators(folded.proto) == ["Conv"]


def transposes_data(node):
    return any(entry.name == "transA" and entry.i for entry in node.attribute)


@each(NORMS)
def test_a_stored_batch_norm_folds_into_a_layer_that_copies(fold, case):
    data = case.feeds[case.data]
    channels, rank = data.shape[1], data.ndim
    copies = np.eye(channels, dtype=np.float32).reshape(channels, channels, *(1,) * (rank - 2))
    norm = onnx.NodeProto()
    norm.CopyFrom(case.node)
    norm.input[0] = "copied"
    nodes = [helper.make_node("Conv", [case.data, "W"], ["copied"], name="conv"), norm]
    model = case.bound(nodes, {**case.parameters(), "W": copies}, case.model.graph.output)
    folded = fold(model)
    assert operators(folded.proto) == ["Conv"]
    assert len(folded.folds) == 1
    assert_close(run(folded.proto, {case.data: data}), case.outputs)


def test_the_comparison_fails_for_another_result():
    stored = LAYER_CASES[0].outputs
    with pytest.raises(AssertionError):
        assert_close([stored[0] * 1.001], stored)
