"""Batch norms as operators in Relay, and through the whole job: recovered, checked, folded, reported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.support import onnx_pieces
from tests.support.lazy import Lazy
from tests.support.relay_graphs import LLVM, Net, count_operators, feeds, relay, run_unfused, tvm
from tvm_fuse.core.epsilon import EpsilonOrigin
from tvm_fuse.core.errors import ModelError
from tvm_fuse.core.reason import Code
from tvm_fuse.render import render

fold_pass = Lazy("tvm_fuse.relay.fold_pass")
load = Lazy("tvm_fuse.relay.load")
pipeline = Lazy("tvm_fuse.pipeline")
record = Lazy("tvm_fuse.relay.record")
recompose_pass = Lazy("tvm_fuse.relay.recompose_pass")
transform = Lazy("tvm_fuse.transform")

pytestmark = pytest.mark.relay

C, SIZE = 4, 5
SHAPE = (1, C, SIZE, SIZE)
EPSILON = np.float32(1e-3)


@pytest.fixture
def net():
    return Net()


def recompose(module):
    """The new module and the record of what was done."""
    return recompose_pass.recompose_batch_norms(module), record.last_report()["RecomposeBatchNorm"]


def codes(outcome):
    return [decision.reason.code for decision in outcome.decisions if decision.reason is not None]


def assert_same(module, other, tolerance=1e-5):
    feed = feeds(module)
    for want, got in zip(run_unfused(module, feed), run_unfused(other, feed)):
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


# --- spellings -------------------------------------------------------------------------------------

PLACES = {
    "column": lambda v: relay.const(v.reshape(C, 1, 1)),
    "full rank": lambda v: relay.const(v.reshape(1, C, 1, 1)),
    "expand_dims": lambda v: relay.expand_dims(relay.const(v), 1, 2),
    "reshape": lambda v: relay.reshape(relay.const(v), (1, -1, 1, 1)),
    "squeeze": lambda v: relay.squeeze(relay.const(v.reshape(1, C, 1, 1)), [0]),
    "transpose": lambda v: relay.transpose(relay.const(v.reshape(C, 1, 1, 1)), (1, 0, 2, 3)),
    "broadcast_to": lambda v: relay.broadcast_to(relay.const(v.reshape(C, 1, 1)), (C, SIZE, SIZE)),
    "cast": lambda v: relay.cast(relay.const(v.reshape(C, 1, 1), "float64"), str(v.dtype)),
}


class Parts:
    """The constants of a batch norm, as drawn by a Net."""

    def __init__(self, net, place="column", epsilon=EPSILON):
        self.vectors = net.norm_values(C)
        self.gamma, self.beta, self.mean, self.variance = map(PLACES[place], self.vectors)
        self.total = self.variance + relay.const(epsilon, net.dtype)


def tensorflow(x, p):
    scale = p.gamma * relay.rsqrt(p.total)
    return x * scale + (p.beta - p.mean * scale)


SPELLINGS = {
    "rsqrt": lambda x, p: (x - p.mean) * relay.rsqrt(p.total) * p.gamma + p.beta,
    "sqrt": lambda x, p: (x - p.mean) / relay.sqrt(p.total) * p.gamma + p.beta,
    "gamma / sqrt": lambda x, p: p.beta + (x - p.mean) * (p.gamma / relay.sqrt(p.total)),
    "power": lambda x, p: (x - p.mean) * relay.power(p.total, relay.const(-0.5)) * p.gamma + p.beta,
    "negative": lambda x, p: (x + relay.negative(p.mean)) * (p.gamma * relay.rsqrt(p.total)) + p.beta,
    "TensorFlow": tensorflow,
}


def pieces(net, spelling="rsqrt", place="column", epsilon=EPSILON):
    """conv2d, a batch norm in pieces, relu."""
    p = Parts(net, place, epsilon)
    return relay.nn.relu(SPELLINGS[spelling](net.conv2d(net.input("x", SHAPE), C), p)), p


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b048_b049_every_spelling(net, spelling, place):
    body, p = pieces(net, spelling, place)
    module = net.module(body)
    after, outcome = recompose(module)
    assert count_operators(after) == {"nn.conv2d": 1, "nn.batch_norm": 1, "nn.relu": 1}
    (item,) = outcome.details
    assert (item.epsilon, item.axis, codes(outcome), outcome.changed) == (EPSILON, 1, [], True)
    call = after["main"].body.args[0].tuple_value
    for vector, argument in zip(p.vectors, call.args[1:]):
        np.testing.assert_array_equal(argument.data.numpy(), vector)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b050_they_fold(net, spelling):
    module = net.module(pieces(net, spelling)[0])
    folded = fold_pass.fold_batch_norms(module)
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1}
    (item,) = record.last_report()["FoldBatchNorm"].details
    assert (item.name, item.epsilon) == ("batch_norm_0", EPSILON)
    assert record.last_report()["FoldScaleShift"].details == ()
    assert_same(module, folded)


def test_it_computes_the_same(net):
    module = net.module(pieces(net)[0])
    assert_same(module, recompose(module)[0])


def test_channels_in_the_last_axis(net):
    x = net.input("x", (1, SIZE, SIZE, C))
    gamma, beta, mean, variance = map(relay.const, net.norm_values(C))
    y = (net.conv2d(x, C, layout="NHWC") - mean) * (gamma * relay.rsqrt(variance + relay.const(1e-3))) + beta
    module = net.module(y)
    after, outcome = recompose(module)
    assert [item.axis for item in outcome.details] == [3]
    assert count_operators(fold_pass.fold_batch_norms(after)) == {"nn.conv2d": 1, "add": 1}
    assert_same(module, after)


def test_float16():
    net = Net(dtype="float16")
    module = net.module(pieces(net)[0])
    after, outcome = recompose(module)
    assert [item.epsilon for item in outcome.details] == [np.float16(1e-3)]
    assert count_operators(after)["nn.batch_norm"] == 1
    assert_same(module, after, 2e-2)


def test_every_function_of_a_module(net):
    module = net.module(pieces(net)[0])
    other = Net(1)
    module["helper"] = other.module(pieces(other)[0])["main"]
    after, outcome = recompose(module)
    assert len(outcome.details) == 2
    assert all(
        "nn.batch_norm" in str(after[name].astext(show_meta_data=False)) for name in ("main", "helper")
    )


# --- names and records -----------------------------------------------------------------------------


def named(expr, name):
    span = relay.Span(relay.SourceName(name), 0, 0, 0, 0)
    return relay.Call(expr.op, expr.args, expr.attrs, None, span)


def test_the_name_of_the_last_operator_stays(net):
    y = SPELLINGS["rsqrt"](net.input("x", SHAPE), Parts(net))
    after, outcome = recompose(net.module(named(y, "net/bn/add")))
    assert [item.name for item in outcome.details] == ["net/bn/add"]
    assert "net/bn/add" in [check.name for check in checks(after)]


def checks(module, **changes):
    fold_pass.align_epsilon(module, {}, changes, align=False)
    return record.last_report()["AlignEpsilon"].details


def test_made_up_names_count_all_batch_norms(net):
    x = net.input("x", SHAPE)
    y = SPELLINGS["rsqrt"](net.batch_norm(x, 0.5), Parts(net))
    module = net.module(net.batch_norm(tensorflow(y, Parts(net)), 0.25))
    after, outcome = recompose(module)
    assert [item.name for item in outcome.details] == ["batch_norm_1", "batch_norm_2"]
    wanted = {"batch_norm_0": 0.5, "batch_norm_1": EPSILON, "batch_norm_2": EPSILON, "batch_norm_3": 0.25}
    assert {check.name: check.in_graph for check in checks(module)} == wanted
    assert {check.name: check.in_graph for check in checks(after)} == wanted


def test_a_module_that_was_saved_as_text(net):
    text = net.module(pieces(net)[0]).astext()
    (check,) = checks(relay.fromtext(text))
    assert (check.name, check.in_graph, check.origin) == ("batch_norm_0", EPSILON, EpsilonOrigin.RECOVERED)


def test_a_second_run_changes_nothing(net):
    after, _ = recompose(net.module(pieces(net)[0]))
    again, outcome = recompose(after)
    assert tvm.ir.structural_equal(again, after)
    assert (outcome.changed, outcome.details, outcome.decisions) == (False, (), ())


def test_the_record_survives_the_passes_that_begin_with_it(net):
    module = fold_pass.align_epsilon(net.module(pieces(net)[0]), {}, {}, align=False)
    fold_pass.fold_batch_norms(module)
    outcome = record.last_report()["RecomposeBatchNorm"]
    assert outcome.summary == "1 batch norms recovered from operators"
    (decision,) = outcome.decisions
    assert str(decision).endswith("subtract, multiply, multiply, add; axis 1, epsilon 0.00100000005")


def test_as_a_pass_of_tvm(net):
    module = net.module(pieces(net)[0])
    passes = tvm.transform.Sequential([transform.RecomposeBatchNorm(), relay.transform.SimplifyInference()])
    assert_same(module, passes(module))
    assert len(record.last_report()["RecomposeBatchNorm"].details) == 1


# --- what stays ------------------------------------------------------------------------------------


def epsilon_is_not_told(net, x):
    return [SPELLINGS["rsqrt"](x, Parts(net, epsilon=2.0))]


def shared_between(net, x):
    p = Parts(net)
    middle = x - p.mean
    return [middle * relay.rsqrt(p.total) + p.beta, relay.nn.relu(middle)]


def returned_between(net, x):
    p = Parts(net)
    middle = x - p.mean
    return [middle * relay.rsqrt(p.total) + p.beta, middle]


def scalars_only(net, x):
    return [x * relay.rsqrt(relay.const(2.0) + relay.const(1e-3))]


def summed_wider(net, x):
    """Relay's batch norm takes no float64 variance for float32 data."""
    variance = relay.const(net.norm_values(C)[3].reshape(C, 1, 1), "float64")
    return [x * relay.cast(relay.rsqrt(variance + relay.const(1e-3, "float64")), "float32")]


def evaluated(net, x):
    return [x * net.const(C, 1, 1) + net.const(C, 1, 1)]


LEFT = {
    epsilon_is_not_told: [Code.BN_EPSILON_INVALID],
    shared_between: [Code.ANCHOR_OUTPUT_SHARED],
    returned_between: [Code.ANCHOR_OUTPUT_RETURNED],
    scalars_only: [Code.BN_AXIS_NOT_CHANNEL],
    summed_wider: [],
    evaluated: [],
}


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_what_is_left_alone(net, make):
    module = net.module(*make(net, net.conv2d(net.input("x", SHAPE), C)))
    after, outcome = recompose(module)
    assert tvm.ir.structural_equal(after, module)
    assert (outcome.changed, outcome.details, codes(outcome)) == (False, (), LEFT[make])
    assert_same(module, fold_pass.fold_batch_norms(module))


def test_data_of_a_wider_dtype_is_no_hindrance():
    net = Net(dtype="float64")
    variance = relay.const(net.norm_values(C)[3].reshape(C, 1, 1).astype("float32"))
    root = relay.cast(relay.sqrt(variance + relay.const(EPSILON)), "float64")
    module = net.module(net.input("x", SHAPE) / root)
    after, outcome = recompose(module)
    assert [(item.dtype, item.epsilon) for item in outcome.details] == [("float32", EPSILON)]
    assert_same(module, after, 1e-6)


# --- epsilons --------------------------------------------------------------------------------------


def test_an_epsilon_that_is_not_the_user_s(net):
    module = net.module(pieces(net)[0])
    with pytest.raises(ModelError, match=r"bn-epsilon-mismatch at batch_norm_0: wanted epsilon 0\.1 "):
        fold_pass.align_epsilon(module, {}, {"batch_norm_0": 0.1}, align=False)
    aligned = fold_pass.align_epsilon(module, {}, {"*": 0.1}, align=True)
    right = Net()
    assert_same(right.module(pieces(right, epsilon=0.1)[0]), aligned)
    assert_same(aligned, fold_pass.fold_batch_norms(aligned))
    feed = feeds(module)
    assert np.abs(run_unfused(aligned, feed)[0] - run_unfused(module, feed)[0]).max() > 1e-2


# --- the whole job ---------------------------------------------------------------------------------


@pytest.fixture
def load_onnx(tmp_path):
    """``load_onnx(proto)`` imports a model from a file."""

    def through_a_file(proto):
        onnx.save(proto, str(tmp_path / "net.onnx"))
        return load.load_model(tmp_path / "net.onnx", shapes={})

    return through_a_file


@pytest.mark.parametrize("opset", [7, 9, 13, 15, 17])
@pytest.mark.parametrize("spelling", onnx_pieces.SPELLINGS)
def test_b048_b049_b050_onnx_models_arrive_with_their_epsilon(load_onnx, spelling, opset):
    model = load_onnx(onnx_pieces.pieces(spelling, opset=opset))
    module = fold_pass.align_epsilon(model.module, model.epsilon, {}, align=False)
    (check,) = record.last_report()["AlignEpsilon"].details
    assert (check.name, check.in_graph, check.origin) == ("last", EPSILON, EpsilonOrigin.RECOVERED)
    folded = fold_pass.fold_batch_norms(module)
    assert [item.name for item in record.last_report()["FoldBatchNorm"].details] == ["last"]
    assert count_operators(folded) == {"nn.conv2d": 1, "add": 1, "nn.relu": 1}


def test_an_epsilon_of_an_onnx_model_that_is_not_the_user_s(load_onnx):
    model = load_onnx(onnx_pieces.pieces())
    with pytest.raises(ModelError, match=r"bn-epsilon-mismatch at last: wanted epsilon 0\.1 "):
        fold_pass.align_epsilon(model.module, model.epsilon, {"last": 0.1}, align=False)
    aligned = fold_pass.align_epsilon(model.module, model.epsilon, {"last": 0.1}, align=True)
    feed = feeds(model.module)
    assert np.abs(run_unfused(aligned, feed)[0] - run_unfused(model.module, feed)[0]).max() > 1e-2
    (check,) = record.last_report()["AlignEpsilon"].details
    assert (check.in_graph, check.used, check.origin) == (EPSILON, 0.1, EpsilonOrigin.USER)


@pytest.mark.parametrize("source", ["onnx", "relay"])
def test_b050_the_report_shows_the_epsilon(net, load_onnx, source):
    if source == "onnx":
        model = load_onnx(onnx_pieces.pieces("TensorFlow"))
    else:
        model = load.model_from_module(net.module(pieces(net, "TensorFlow")[0]))
    report = pipeline.compile_model(model, LLVM, pipeline.Options(latency=False)).report
    (check,), (item,) = report.epsilon, report.folds
    assert (check.used, check.origin, item.epsilon) == (EPSILON, EpsilonOrigin.RECOVERED, EPSILON)
    assert report.parity.passed
    text = render(report)
    assert "epsilon 0.001        1 x  recovered from the operators that the exporter wrote" in text
    assert "1 of 1" in text.splitlines()[3]
