"""B061: batch norms of several dtypes, which ONNX allows; casts make them ones of a single dtype."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder, run
from tvm_fuse.core.dtypes import FLOATS
from tvm_fuse.folding import FoldOptions, fold_onnx_model, fold_relay_model
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.mixed import with_casts

folding = Lazy("tvm_fuse.folding")
load = Lazy("tvm_fuse.relay.load")
reader = Lazy("tvm_fuse.relay.read")

SHAPE = (1, 3, 2, 2)
NORM = {
    "gamma": [0.7, -1.3, 1.1], "beta": [0.1, -0.4, 0.3], "mean": [-0.6, 0.2, 0.9], "var": [0.3, 1.7, 2.9],
}  # fmt: skip

#: dtype of the data, dtypes of gamma, beta, mean and variance, and the dtype that all are computed in.
MIXED = {
    "B061: parameters in float32": ("float16", ["float32"] * 4, "float32"),
    "B061: parameters in float64": ("float32", ["float64"] * 4, "float64"),
    "data in float64": ("float64", ["float32"] * 4, "float64"),
    "parameters in float16": ("float32", ["float16"] * 4, "float32"),
    "statistics in float32": ("float16", ["float16", "float16", "float32", "float32"], "float32"),
    "three dtypes": ("float16", ["float32", "float32", "float64", "float64"], "float64"),
}
mixed = pytest.mark.parametrize(("data", "parameters", "wide"), MIXED.values(), ids=MIXED.keys())


def net(data, parameters, opset=17, conv=False, **options):
    b = Builder(opset=opset, dtype=data, **options)
    y = b.input("x", SHAPE)
    y = b.conv(y, 3, kernel=1, name="conv") if conv else y
    vectors = {
        role: b.const(vector, f"bn.{role}", dtype=dtype)
        for (role, vector), dtype in zip(NORM.items(), parameters)
    }
    return b.build([b.batch_norm(y, 1e-3, name="bn", **vectors)])


@pytest.fixture
def read(tmp_path):
    """``read(model)`` through a file."""

    def through_a_file(model):
        onnx.save(model, str(tmp_path / "m.onnx"))
        return load_onnx(tmp_path / "m.onnx")

    return through_a_file


def feed_of(dtype):
    return {"x": np.random.default_rng(0).normal(size=SHAPE).astype(dtype)}


def norm_types(model):
    """The dtypes that meet in the batch norm."""
    known = onnx.shape_inference.infer_shapes(model).graph
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*known.value_info, *known.input)}
    kinds.update((tensor.name, tensor.data_type) for tensor in known.initializer)
    (node,) = [node for node in known.node if node.op_type == "BatchNormalization"]
    return {onnx.helper.tensor_dtype_to_np_dtype(kinds[name]).name for name in node.input}


@pytest.mark.parametrize("form", [{}, {"const_nodes": True}], ids=["initializers", "Constant nodes"])
@mixed
def test_casts_are_put_around_it(read, data, parameters, wide, form):
    model = read(net(data, parameters, **form))
    after = with_casts(model)
    assert norm_types(after.proto) == {wide}
    assert norm_types(model.proto) == {data, *parameters}
    onnx.checker.check_model(after.proto, full_check=True)
    assert after.proto.graph.output == model.proto.graph.output
    assert after.epsilon == model.epsilon
    feed = feed_of(data)
    (got,), (want,) = run(after.proto, feed), run(model.proto, feed)
    assert got.dtype == want.dtype
    tolerance = 8 * max(FLOATS[dtype].roundoff for dtype in (data, *parameters))  # of what runs it
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def late_cast(b):
    return b.batch_norm(b.op("Cast", b.input("x", SHAPE, "float16"), to=onnx.TensorProto.FLOAT), channels=3)


#: Models in which every batch norm has one dtype.
SINGLE = {
    "one dtype": lambda b: b.batch_norm(b.conv(b.input("x", SHAPE), 3, kernel=1)),
    "after a cast": late_cast,
    "no batch norm": lambda b: b.op("Cast", b.input("x", SHAPE), to=onnx.TensorProto.DOUBLE),
}


@pytest.mark.parametrize("make", SINGLE.values(), ids=SINGLE.keys())
def test_other_models_stay(read, make):
    b = Builder()
    model = read(b.build([make(b)]))
    assert with_casts(model) is model


def test_one_parameter_of_two_batch_norms(read):
    """Names of what is cast twice are two names."""
    b = Builder(dtype="float16")
    vectors = {role: b.const(vector, role, dtype="float32") for role, vector in NORM.items()}
    y = b.batch_norm(b.batch_norm(b.input("x", SHAPE), name="one", **vectors), name="two", **vectors)
    after = with_casts(read(b.build([y])))
    onnx.checker.check_model(after.proto, full_check=True)
    assert [node.op_type for node in after.proto.graph.node] == ["Cast", "BatchNormalization", "Cast"] * 2


@mixed
def test_folded_parameters_keep_their_digits(read, data, parameters, wide):
    """The weight is rounded once, from the parameters as they are in the file."""
    source = net(data, parameters, conv=True)
    folded, report = fold_onnx_model(read(source), FoldOptions())
    assert [norm.name for norm in report.manifest.batch_norms] == ["bn"]
    got, _ = folded_arrays(folded.proto)
    assert np.array_equal(got, wanted_weight(source, data))


@pytest.mark.relay
@mixed
def test_in_relay_too(read, tmp_path, data, parameters, wide):
    source = net(data, parameters, conv=True)
    read(source)
    model = load.load_model(tmp_path / "m.onnx", shapes={})
    module, report = fold_relay_model(model, FoldOptions(), folding.Source("", ""))
    assert [norm.name for norm in report.manifest.batch_norms] == ["bn"]
    graph = reader.read_function(module["main"]).graph
    (weight,) = [array for array in graph.constants.values() if array.ndim == 4 and array.shape[0] == 3]
    assert np.array_equal(weight, wanted_weight(source, data))
    assert graph.nodes[graph.outputs[0]].output.dtype == data


def folded_arrays(model):
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (node,) = [node for node in model.graph.node if node.op_type == "Conv"]
    return [arrays[name] for name in node.input[1:]]


def wanted_weight(source, data):
    """By the formula, from the file."""
    arrays = {
        tensor.name: onnx.numpy_helper.to_array(tensor).astype("float64")
        for tensor in source.graph.initializer
    }
    scale = arrays["bn.gamma"] / np.sqrt(arrays["bn.var"] + np.float64(np.float32(1e-3)))
    return (arrays["conv.weight"] * scale[:, None, None, None]).astype(data)
