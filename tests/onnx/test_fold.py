"""Folding from ONNX model to ONNX model: the outputs stay, the batch norms go."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from examples.models import MODELS
from tests.support.onnx_models import Builder, run
from tvm_fuse.core.edit import Direction
from tvm_fuse.core.reason import Code
from tvm_fuse.onnx.fold import fold_onnx
from tvm_fuse.onnx.parts import put_together, take_apart
from tvm_fuse.onnx.read import read_onnx


@pytest.fixture
def fold(tmp_path):
    """``fold(model)`` goes through a file, and sees that the source is not changed."""

    def through_a_file(model):
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        source = read_onnx(path)
        before = source.proto.SerializeToString()
        folded = fold_onnx(source)
        assert source.proto.SerializeToString() == before
        onnx.checker.check_model(folded.proto, full_check=True)
        return folded

    return through_a_file


def operators(model):
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def feeds_of(model, seed=0):
    rng = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for entry in model.graph.input:
        if entry.name not in constants:
            shape = [dim.dim_value or 2 for dim in entry.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            feeds[entry.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


def assert_same_outputs(source, folded, rtol=1e-5):
    assert folded.graph.output == source.graph.output
    for got, wanted in zip(run(folded, feeds_of(source)), run(source, feeds_of(source))):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() <= rtol * max(1.0, np.abs(wanted).max())


def test_the_comparison_fails_for_another_model():
    models = []
    for epsilon in (1e-5, 1e-3):
        b = Builder()
        models.append(
            b.build([b.batch_norm(b.conv(b.input("x", (1, 3, 8, 8)), 4), epsilon=epsilon, name="bn")])
        )
    with pytest.raises(AssertionError):
        assert_same_outputs(*models)


@pytest.mark.parametrize("opset", range(7, 18))
@pytest.mark.parametrize("bias", [False, True])
def test_every_opset(fold, opset, bias):
    b = Builder(opset=opset)
    y = b.batch_norm(b.conv(b.input("x", (2, 3, 8, 8)), 4, bias=bias, pad=1, name="c"), name="bn")
    source = b.build([b.clip(y, name="y")])
    folded = fold(source)
    assert operators(folded.proto) == ["Conv", "Clip"]
    assert [record.name for record in folded.folds] == ["bn"]
    assert folded.folds[0].layers[0].had_bias is bias
    assert_same_outputs(source, folded.proto)


def test_a_stack_of_batch_norms_takes_rounds(fold):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 8, 8)), 4)
    for _ in range(4):
        y = b.batch_norm(y)
    source = b.build([y])
    folded = fold(source)
    assert operators(folded.proto) == ["Conv"]
    assert len(folded.folds) == 4
    assert_same_outputs(source, folded.proto)


def test_a_batch_norm_before_a_padded_layer_becomes_a_map(fold):
    b = Builder()
    y = b.conv(b.batch_norm(b.input("x", (1, 3, 8, 8)), name="bn"), 4, pad=1, bias=True, name="c")
    source = b.build([y])
    folded = fold(source)
    assert operators(folded.proto) == ["Conv", "Add"]
    assert folded.folds[0].direction is Direction.AFTER
    assert_same_outputs(source, folded.proto)


def test_a_linear_layer_with_batch_norms_on_both_sides(fold):
    b = Builder()
    weight, bias = b.rng.standard_normal((6, 5)), b.rng.standard_normal(6)
    y = b.batch_norm(b.input("x", ("n", 5)), name="before")
    y = b.op("Gemm", y, b.const(weight), b.const(bias), transB=1, alpha=0.3, beta=0.7, name="g")
    source = b.build([b.batch_norm(y, name="after")])
    folded = fold(source)
    assert operators(folded.proto) == ["Gemm"]
    assert_same_outputs(source, folded.proto)


def scalar_gemm(alpha, beta, trans_b):
    """X = 1, W = 2, C = 3, then gamma 4, beta 0.5, mean 1, variance 3, epsilon 1: a scale of 2."""
    b = Builder()
    y = b.op(
        "Gemm", b.input("x", (1, 1)), b.const([[2.0]], "W"), b.const([3.0], "C"),
        alpha=alpha, beta=beta, transB=trans_b, name="gemm",
    )  # fmt: skip
    return b.build([b.batch_norm(y, 1.0, gamma=4.0, beta=0.5, mean=1.0, var=3.0, name="y")])


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(
    ("alpha", "beta", "value", "weight", "bias"),
    [(1.0, 2.0, 14.5, 4.0, 10.5), (0.5, 2.0, 12.5, 2.0, 10.5), (0.5, 1.0, 6.5, 2.0, 4.5)],
)
def test_b009_alpha_and_beta_of_a_gemm_count_once(fold, alpha, beta, value, weight, bias, trans_b):
    folded = fold(scalar_gemm(alpha, beta, trans_b))
    (node,) = folded.proto.graph.node
    given = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    assert (node.op_type, given.get("alpha", 1.0), given.get("beta", 1.0)) == ("Gemm", 1.0, 1.0)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in folded.proto.graph.initializer}
    assert [float(arrays[name].squeeze()) for name in node.input[1:]] == [weight, bias]
    for model in (scalar_gemm(alpha, beta, trans_b), folded.proto):
        assert run(model, {"x": np.ones((1, 1), "float32")})[0].tolist() == [[value]]


def transposed_net(b, name, out=16):
    """B014: a weight of (16, 8, 1, 5) in two groups; its first axis is that of the input."""
    weight = b.const(b.rng.standard_normal((16, out // 2, 1, 5)))
    return b.op("ConvTranspose", b.input(f"x_{name}", (1, 16, 3, 4)), weight, group=2, name=name)


@pytest.mark.parametrize("out", [16, 4])
def test_b014_transposed_convolutions_of_groups(fold, out):
    b = Builder()
    source = b.build([b.batch_norm(transposed_net(b, "deconv", out), channels=out, name="y")])
    folded = fold(source)
    assert operators(folded.proto) == ["ConvTranspose"]
    assert_same_outputs(source, folded.proto)


def test_b014_one_that_cannot_fold_stops_no_other(fold):
    b = Builder()
    before = b.batch_norm(b.input("x", (1, 16, 3, 4)), name="before")
    weight = b.const(b.rng.standard_normal((16, 8, 1, 5)))
    stays = b.op("ConvTranspose", before, weight, group=2, name="deconv")
    source = b.build([stays, b.batch_norm(transposed_net(b, "other"), channels=16, name="y")])
    folded = fold(source)
    assert [record.name for record in folded.folds] == ["y"]
    (decision,) = [decision for decision in folded.decisions if not decision.applied]
    assert (decision.at, decision.reason.code) == ("before", Code.BN_SHIFT_BEFORE_PADDING)
    assert "deconv" in decision.reason.got
    assert_same_outputs(source, folded.proto)


def test_b071_five_axes(fold):
    b = Builder()
    conv = b.conv(b.input("x", (1, 3, 16, 64, 64)), 32, kernel=[3, 3, 3], pad=1, bias=True)
    source = b.build([b.batch_norm(conv, name="y")])
    assert [dim.dim_value for dim in source.graph.output[0].type.tensor_type.shape.dim] == [1, 32, 16, 64, 64]
    folded = fold(source)
    assert operators(folded.proto) == ["Conv"]
    assert_same_outputs(source, folded.proto)


def quantized_weight(b, x):
    """The weight is held as integers."""
    weight = b.const(b.rng.randint(-9, 9, (4, 3, 3, 3)), dtype="int8")
    return b.conv(x, 4, weight=b.op("DequantizeLinear", weight, b.const(0.1), int8_zero(b), name="rounded"))


def quantized_result(b, x):
    """The result is rounded to integers and back."""
    scale, zero = b.const(0.1), int8_zero(b)
    y = b.op("QuantizeLinear", b.conv(x, 4), scale, zero)
    return b.op("DequantizeLinear", y, scale, zero, name="rounded")


def int8_zero(b):
    return b.const(0, dtype="int8")


QUANTIZED = {
    "weight": (quantized_weight, Code.WEIGHT_NOT_CONSTANT, "computed by rounded"),
    "result": (quantized_result, Code.BN_PRODUCER_UNSUPPORTED, "DequantizeLinear"),
}


@pytest.mark.parametrize(("make", "code", "got"), QUANTIZED.values(), ids=QUANTIZED.keys())
def test_b119_a_quantizer_that_came_first_is_named(fold, make, code, got):
    """A fold belongs before quantization; after it, there is no weight left to scale."""
    b = Builder()
    source = b.build([b.batch_norm(make(b, b.input("x", (1, 3, 6, 6))), name="y")])
    folded = fold(source)
    (decision,) = folded.decisions
    assert (decision.reason.code, decision.reason.got) == (code, got)
    assert_same_outputs(source, folded.proto)


# --- what does not fold: the table of docs/folding.md -----------------------------------------------


def padded_before(b, x):
    widths = b.const(np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    return b.conv(b.op("Pad", b.batch_norm(x, name="bn"), widths), 4, channels=3)


def after_an_add(b, other):
    return b.batch_norm(b.op("Add", b.conv(b.input("x", (2, 3, 6, 6)), 4), other), channels=4, name="bn")


def in_a_branch(b, x):
    """Both branches are the same."""
    inner = Builder()
    norm = inner.build([inner.batch_norm(inner.conv(inner.input("inner", (1, 3, 6, 6)), 4), name="bn")]).graph
    graphs = []
    for side in ("then", "else"):
        graph = onnx.GraphProto()
        graph.CopyFrom(norm)
        del graph.input[:]
        graph.name = side
        graph.node[0].input[0] = x
        graphs.append(graph)
    return b.op("If", b.input("c", (), np.bool_), then_branch=graphs[0], else_branch=graphs[1], name="y")


def product(*operands, op="MatMul"):
    """The names of its operands, or the shapes of constants."""

    def make(b, x):
        values = [b.input(v, (6, 6)) if isinstance(v, str) else b.const(np.ones(v)) for v in operands]
        return b.batch_norm(b.op(op, *values), channels=6, name="bn")

    return make


STAYS = {
    "explicit padding": (padded_before, Code.BN_SHIFT_BEFORE_PADDING),
    "before a transposed convolution": (
        lambda b, x: b.op("ConvTranspose", b.batch_norm(x, name="bn"), b.const(np.ones((3, 4, 2, 2)))),
        Code.BN_SHIFT_BEFORE_PADDING,
    ),
    "before a concatenation": (
        lambda b, x: b.conv(b.op("Concat", b.batch_norm(x, name="bn"), x, axis=1), 4, channels=6),
        Code.BN_READER_UNSUPPORTED,
    ),
    "before an activation": (
        lambda b, x: b.conv(b.relu(b.batch_norm(x, name="bn")), 4, channels=3), Code.BN_BEFORE_ACTIVATION,
    ),
    "after an activation": (
        lambda b, x: b.batch_norm(b.relu(b.conv(x, 4)), name="bn"), Code.BN_AFTER_ACTIVATION,
    ),
    "after a constant of full size": (
        lambda b, x: after_an_add(b, b.const(np.ones((2, 4, 4, 4)))), Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "after an add that broadcasts": (
        lambda b, x: after_an_add(b, b.conv(x, 4)), Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "after an add of an input": (
        lambda b, x: after_an_add(b, b.input("z", (2, 4, 4, 4))), Code.BN_PRODUCER_UNSUPPORTED,
    ),
    "Gemm of an input B": (product("x1", "x2", (6,), op="Gemm"), Code.BN_PRODUCER_UNSUPPORTED),
    "Gemm of an input C": (product("x1", (6, 6), "x2", op="Gemm"), Code.BN_PRODUCER_UNSUPPORTED),
    "MatMul of a constant on the left": (product((6, 6), "x1"), Code.BN_PRODUCER_UNSUPPORTED),
    "branch": (in_a_branch, None),
}  # fmt: skip


@pytest.mark.parametrize(("make", "code"), STAYS.values(), ids=STAYS.keys())
def test_what_stays(fold, make, code):
    b = Builder()
    source = b.build([make(b, b.input("x0", (1, 3, 6, 6)))])
    folded = fold(source)
    assert folded.folds == ()
    assert [(decision.at, decision.reason.code) for decision in folded.decisions] == [("bn", code)][
        : bool(code)
    ]
    assert operators(folded.proto) == operators(source)


# --- joins and runs ----------------------------------------------------------------------------------


def test_a_residual_sum_and_a_concatenation(fold):
    b = Builder()
    x = b.input("x", (1, 4, 6, 6))
    total = b.op("Add", b.conv(x, 4, pad=1, bias=True), b.conv(x, 4, pad=1))
    joined = b.op("Concat", b.conv(x, 2), b.conv(x, 3, bias=True), axis=1)
    source = b.build([b.batch_norm(total, name="y"), b.batch_norm(joined, name="z")])
    folded = fold(source)
    assert "BatchNormalization" not in operators(folded.proto)
    assert_same_outputs(source, folded.proto)


def test_a_batch_norm_in_pieces(fold):
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 8, 8)), 4, name="c")
    for op in ("Sub", "Mul", "Add", "Div"):
        y = b.op(op, y, b.const(b.rng.uniform(0.5, 1.5, (4, 1, 1))))
    source = b.build([y])
    folded = fold(source)
    assert operators(folded.proto) == ["Conv"]
    assert (len(folded.folds), len(folded.affine_folds)) == (0, 1)
    assert_same_outputs(source, folded.proto)


def test_what_a_branch_reads_is_not_folded_away(fold):
    """``If(c, conv, bn)``: the branches return values from outside, one of them the layer's own."""
    b = Builder()
    x, condition = b.input("x", (1, 3, 6, 6)), b.input("c", (), np.bool_)
    conv = b.conv(x, 4, name="conv")
    b.batch_norm(conv, name="bn")
    graphs = [
        helper.make_graph(
            [helper.make_node("Relu", [name], [f"{name}_out"], name=f"{name}_relu")], name, [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, (1, 4, 4, 4))],
        )
        for name in ("conv", "bn")
    ]  # fmt: skip
    source = b.build([b.op("If", condition, then_branch=graphs[0], else_branch=graphs[1], name="y")])
    folded = fold(source)
    assert operators(folded.proto) == ["Conv", "BatchNormalization", "If"]
    (decision,) = folded.decisions
    assert decision.reason.code is Code.ANCHOR_OUTPUT_SHARED
    for value in (True, False):
        feeds = {**feeds_of(source), "c": np.array(value)}
        assert np.array_equal(run(folded.proto, feeds)[0], run(source, feeds)[0])


@pytest.mark.parametrize(
    ("shape", "code"),
    [((5,), Code.BN_AXIS_NOT_CHANNEL), (None, Code.BN_PRODUCER_UNSUPPORTED)],
    ids=["5", "?"],
)
def test_a_batch_norm_that_cannot_be_read_is_told_of(fold, shape, code):
    b = Builder()
    x = b.input("x", shape or (1, 3))
    if shape is None:
        x = b.op("Reshape", x, b.input("sizes", ("rank",), np.int64))
    y = b.batch_norm(x, channels=1 if shape else 3, name="bn")
    source = b.build([y], check=False)
    source.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, TensorProto.FLOAT, shape or ("a", "b")))
    (decision,) = fold(source).decisions
    assert (decision.at, decision.reason.code) == ("bn", code)


def test_the_result_folds_no_further(fold):
    b = Builder()
    source = b.build([b.relu(b.batch_norm(b.conv(b.input("x", (1, 3, 8, 8)), 4)), name="y")])
    once = fold(source).proto
    twice = fold(once)
    assert (twice.folds, twice.affine_folds) == ((), ())
    assert twice.proto == once


# --- random graphs -----------------------------------------------------------------------------


def random_model(seed):
    """Ten to twenty operators over a few values, some of which are outputs as well."""
    rng = np.random.default_rng(seed)
    b = Builder(
        opset=int(rng.choice([9, 11, 13, 17])), seed=seed,
        initializers_as_inputs=bool(rng.integers(2)), const_nodes=bool(rng.integers(2)),
    )  # fmt: skip
    weights = {out: b.const(b.rng.standard_normal((out, 4, 1, 1)) / 2, f"shared{out}") for out in (4,)}
    values = [b.input("x", (2, 4, 5, 5))]
    for _ in range(rng.integers(10, 20)):
        value = str(rng.choice(values[-3:]))
        values.append(random_operator(b, rng, value, values, weights))
    outputs = {values[-1], *(str(name) for name in rng.choice(values[1:], 2))}
    return b.build(sorted(outputs))


def random_operator(b, rng, value, values, weights):
    """One more value of the same shape."""
    vector = b.rng.uniform(0.5, 1.5, (4, 1, 1))
    choices = {
        "conv": lambda: b.conv(value, 4, pad=1, bias=bool(rng.integers(2))),
        "shared": lambda: b.conv(value, 4, kernel=1, weight=weights[4]),
        "grouped": lambda: b.conv(value, 4, kernel=1, group=2),
        "transposed": lambda: b.op(
            "ConvTranspose", value, b.const(b.rng.standard_normal((4, 2, 3, 3)) / 3), group=2, pads=[1] * 4
        ),
        "norm": lambda: b.batch_norm(value),
        "relu": lambda: b.relu(value),
        "add": lambda: b.op("Add", value, b.const(vector)),
        "mul": lambda: b.op("Mul", b.const(vector), value),
        "sum": lambda: b.op("Add", value, str(rng.choice(values))),
        "identity": lambda: b.op("Identity", value),
        "concat": lambda: b.conv(b.op("Concat", value, str(rng.choice(values)), axis=1), 4, kernel=1),
    }
    odds = {"norm": 5, "conv": 3}
    names = [name for name in choices for _ in range(odds.get(name, 1))]
    return choices[str(rng.choice(names))]()


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(fold, seed):
    source = random_model(seed)
    folded = fold(source)
    assert operators(folded.proto).count("BatchNormalization") <= operators(source).count(
        "BatchNormalization"
    )
    assert_same_outputs(source, folded.proto, rtol=1e-4)


def test_random_graphs_do_fold(fold):
    counts = [len(fold(random_model(seed)).folds) for seed in range(20)]
    assert sum(counts) >= 20


# --- parts -------------------------------------------------------------------------------------


def test_parts_come_together_again():
    source = random_model(3)
    assert put_together(take_apart(source)) == source


# --- whole models ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_whole_models(fold, name):
    source = MODELS[name](image=64)
    folded = fold(source)
    assert "BatchNormalization" not in operators(folded.proto)
    assert_same_outputs(source, folded.proto, rtol=1e-5)


@pytest.mark.slow
def test_memory_beside_the_source_stays_below_three_times_the_weights(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(MODELS["resnet50"](image=64).SerializeToString())
    source = read_onnx(path)
    tracemalloc.start()
    folded = fold_onnx(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(folded.folds) == 53
    assert peak < 3 * path.stat().st_size
