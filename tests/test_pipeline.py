"""The main job: what it reports, what it refuses, and that a wrong fold cannot pass."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import onnx
import pytest

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder
from tests.support.relay_graphs import LLVM, Net, count_operators, feeds, plain_build, relay, run
from tvm_fuse.core import fold, weights
from tvm_fuse.core.channelwise import Affine
from tvm_fuse.core.epsilon import EpsilonConfig, EpsilonOrigin
from tvm_fuse.core.errors import ModelError, ParityFailed, UsageError
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.core.reason import Code
from tvm_fuse.render import render
from tvm_fuse.report import Place

build = Lazy("tvm_fuse.relay.build")
load = Lazy("tvm_fuse.relay.load")
pipeline = Lazy("tvm_fuse.pipeline")

pytestmark = pytest.mark.relay

SHAPE = (1, 8, 6, 6)


def options(**changes):
    return pipeline.Options(**{"latency": False, **changes})


def compile(module, on=LLVM, **changes):
    return pipeline.compile(module, target=on, options=options(**changes))


@pytest.fixture
def compile_onnx(tmp_path):
    """Compile an ONNX model from a file; returns the result and the loaded model."""

    def compile_file(proto, on=LLVM, **changes):
        path = tmp_path / "model.onnx"
        onnx.save(proto, str(path))
        model = load.load_model(path, shapes={})
        return pipeline.compile_model(model, on, options(**changes)), model

    return compile_file


@pytest.fixture
def net():
    return Net()


def square(net, x):
    """conv (with bias) -> batch norm -> relu with as many inputs as outputs."""
    conv = relay.nn.bias_add(net.conv2d(x, 8), net.const(8))
    return relay.nn.relu(net.batch_norm(conv, epsilon=1e-3))


# --- the result ----------------------------------------------------------------------------------


def test_result(net):
    x = net.input("x", SHAPE)
    compiled = compile(net.module(square(net, x), relay.nn.max_pool2d(net.conv2d(x, 4))), latency=True)
    report = compiled.report
    assert [(f.name, f.epsilon, f.layers[0].had_bias) for f in report.folds] == [
        ("batch_norm_0", pytest.approx(1e-3), True)
    ]
    assert [chain.form for chain in report.chains] == ["conv2d_bias_relu"]
    assert [decision.reason.code for decision in report.not_fused] == [Code.CHAIN_NO_EPILOGUE]
    assert report.not_folded == report.notes == ()
    assert [row.output for row in report.parity.rows] == ["output0", "output1"]
    assert report.parity.passed
    assert report.inputs == ("x [1, 8, 6, 6]",)
    assert report.fused.kernels < report.unfused.kernels
    assert report.fused.traffic_bytes < report.unfused.traffic_bytes
    assert len(report.latency.fused) == len(report.latency.unfused) >= 5
    assert min(report.latency.fused) > 0
    assert compiled.cuda_source == ""


def test_library_runs_and_agrees(net):
    module = net.module(square(net, net.input("x", SHAPE)))
    compiled, feed = compile(module), feeds(module)
    np.testing.assert_allclose(
        run(compiled.library, feed)[0], run(plain_build(module, LLVM, 0), feed)[0], atol=1e-5, rtol=1e-5
    )


def test_parameters_are_bound(net):
    x, w = net.input("x", SHAPE), net.input("w", (8, 8, 3, 3))
    module = net.module(net.batch_norm(net.conv2d(x, 8, weight=w)))
    weight = np.random.default_rng(0).normal(size=(8, 8, 3, 3), scale=0.1).astype("float32")
    result = pipeline.compile(module, {"w": weight}, LLVM, options=options(parity=False))
    assert len(result.report.folds) == 1
    assert result.report.parity is None
    assert result.report.inputs == ("x [1, 8, 6, 6]",)


def test_unbound_parameters_are_told(net):
    """B048 (a): nothing folds, the reason says so, and the result is right all the same."""
    x = net.input("x", SHAPE)
    vectors = [net.input(name, (8,)) for name in ("gamma", "beta", "mean")]
    variance = relay.const(np.ones(8, "float32"))
    report = compile(net.module(relay.nn.batch_norm(net.conv2d(x, 8), *vectors, variance)[0])).report
    assert [d.reason.code for d in report.not_folded] == [Code.BN_PARAMETERS_NOT_CONSTANT]
    assert report.parity.passed


def test_model_of_the_caller_stays_as_it_is(net):
    module = net.module(square(net, net.input("x", SHAPE)))
    before = module.astext()
    compile(module, parity=False)
    assert module.astext() == before


@pytest.mark.parametrize("case", ["nothing to fold", "no anchor", "input returned"])
def test_little_models(net, case):
    x = net.input("x", (1, 3))
    y = relay.nn.relu(x)
    results = {"nothing to fold": (net.dense(x, 2),), "no anchor": (y,), "input returned": (x, y, y)}[case]
    report = compile(net.module(*results)).report
    assert report.folds == report.epsilon == ()
    assert report.parity.passed
    assert len(report.parity.rows) == len(results)


@pytest.mark.cuda_codegen
def test_cuda_without_a_gpu_checks_the_same_graph_on_the_cpu(net, monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)
    module = net.module(square(net, net.input("x", SHAPE)))
    compiled = compile(module, "cuda -arch=sm_80", latency=True, device="cpu")
    assert compiled.report.target.startswith("cuda")
    assert compiled.cuda_source.count("__global__") >= 1
    assert [chain.form for chain in compiled.report.chains] == ["conv2d_bias_relu"]
    assert compiled.report.fused.kernels == 1
    assert compiled.report.parity.passed
    assert compiled.report.latency is None
    assert len(compiled.report.notes) == 2
    assert compiled.report.execution.place is Place.CPU_BUILD


@pytest.mark.cuda_codegen
def test_cuda_without_parity_runs_nothing_and_says_so(net, monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)
    module = net.module(square(net, net.input("x", SHAPE)))
    report = compile(module, "cuda -arch=sm_80", parity=False).report
    assert (report.execution, report.parity, report.latency) == (None, None, None)
    assert report.notes == ("1 CUDA kernels were generated and not run",)


# --- a wrong fold cannot pass --------------------------------------------------------------------


def wrong_epsilon(monkeypatch):
    right = fold.fold_scale
    monkeypatch.setattr(fold, "fold_scale", lambda bn: right(dataclasses.replace(bn, epsilon=1e-5)))


def swapped_axis(monkeypatch):
    monkeypatch.setattr(
        weights, "fold_weight", lambda weight, scale, layout: weight * scale.reshape(1, -1, 1, 1)
    )


def forgotten_bias(monkeypatch):
    """The bias before the batch norm is lost when the two maps become one."""
    monkeypatch.setattr(Affine, "after", lambda self, first: Affine(first.scale * self.scale, self.shift))


def unscaled_bias(monkeypatch):
    """... or is added as it is."""
    monkeypatch.setattr(
        Affine, "after", lambda self, first: Affine(first.scale * self.scale, first.shift + self.shift)
    )


def dropped_mean(monkeypatch):
    right = fold.fold_bias
    monkeypatch.setattr(
        fold, "fold_bias", lambda bn, bias: right(dataclasses.replace(bn, mean=0 * bn.mean), bias)
    )


def dropped_beta(monkeypatch):
    right = fold.fold_bias
    monkeypatch.setattr(
        fold, "fold_bias", lambda bn, bias: right(dataclasses.replace(bn, beta=0 * bn.beta), bias)
    )


def absolute_gamma(monkeypatch):
    right = fold.fold_scale
    monkeypatch.setattr(fold, "fold_scale", lambda bn: abs(right(bn)))


MISTAKES = [
    wrong_epsilon, swapped_axis, forgotten_bias, unscaled_bias, dropped_mean, dropped_beta, absolute_gamma,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_wrong_fold_fails_parity(net, monkeypatch, mistake):
    module = net.module(square(net, net.input("x", SHAPE)))
    mistake(monkeypatch)
    with pytest.raises(ParityFailed) as caught:
        compile(module)
    assert caught.value.exit_code == 1
    assert "output0" in str(caught.value)


def test_failed_parity_is_in_the_report_of_the_command(net, monkeypatch):
    module = net.module(square(net, net.input("x", SHAPE)))
    wrong_epsilon(monkeypatch)
    report = pipeline.compile_model(load.model_from_module(module), LLVM, options()).report
    (row,) = report.parity.rows
    assert not report.parity.passed
    assert row.failing > 0
    assert row.needed > 1


def test_wrong_fold_is_seen_on_every_output(net, monkeypatch):
    """B024: the second output is compared as well as the first."""
    x = net.input("x", SHAPE)
    module = net.module(relay.nn.relu(x), square(net, x))
    forgotten_bias(monkeypatch)
    report = pipeline.compile_model(load.model_from_module(module), LLVM, options()).report
    assert [row.passed for row in report.parity.rows] == [True, False]


def test_tolerance_of_zero_fails(net):
    module = net.module(square(net, net.input("x", SHAPE)))
    with pytest.raises(ParityFailed):
        compile(module, tolerance=Tolerance(0.0, 0.0, "none"))


# --- refusals ------------------------------------------------------------------------------------


def with_statistics(net, **changes):
    vectors = net.norm_values(8)
    for name, value in changes.items():
        vectors["gamma beta mean variance".split().index(name)][3] = value
    conv = net.conv2d(net.input("x", SHAPE), 8)
    return net.module(relay.nn.batch_norm(conv, *map(relay.const, vectors), epsilon=1e-5)[0])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"variance": np.nan}, Code.BN_STATISTICS_NOT_FINITE),
        ({"gamma": np.inf}, Code.BN_STATISTICS_NOT_FINITE),
        ({"variance": -1e-3}, Code.BN_VARIANCE_NOT_POSITIVE),
    ],
    ids=str,
)
def test_broken_statistics_stop_the_job(net, changes, code):
    with pytest.raises(ModelError) as caught:
        compile(with_statistics(net, **changes))
    assert code.value in str(caught.value)
    assert "batch_norm_0" in str(caught.value)


def test_epsilon_of_a_keras_model_is_found_in_the_paths_of_its_export(compile_onnx):
    """Its batch norm ``bn`` arrives as ``model/bn/FusedBatchNormV3``; layers that are gone are ignored."""
    b = Builder()
    y = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4), 1e-3, name="model/bn/FusedBatchNormV3")
    proto = b.build([b.relu(y)])
    config = EpsilonConfig({"bn": 1e-3, "gone": 1e-2}, names_layers=True)
    (check,) = compile_onnx(proto, epsilon_config=config)[0].report.epsilon
    assert (check.name, check.origin) == ("model/bn/FusedBatchNormV3", EpsilonOrigin.CONFIG)
    with pytest.raises(ModelError, match=r"wanted epsilon 0\.01 \(training config\), got 0\.001"):
        compile_onnx(proto, epsilon_config=EpsilonConfig({"bn": 1e-2}, names_layers=True))


def test_b062_every_broken_channel_is_named(net):
    """Variances of -1e-3, NaN, 0 and inf in one batch norm; the damaged gamma of a second one as well."""
    x = net.input("x", SHAPE)
    damaged, other = net.norm_values(8), net.norm_values(8)
    damaged[3][:4] = -1e-3, np.nan, 0, np.inf
    other[0][5] = np.nan
    y = relay.nn.batch_norm(net.conv2d(x, 8), *map(relay.const, damaged), epsilon=0.0)[0]
    y = relay.nn.batch_norm(net.conv2d(y, 8), *map(relay.const, other), epsilon=1e-5)[0]
    with pytest.raises(ModelError) as caught:
        compile(net.module(y))
    message = str(caught.value)
    assert message.startswith("3 problem(s) in the numbers of batch norms")
    for code, part in (
        (
            Code.BN_STATISTICS_NOT_FINITE,
            "batch_norm_0: wanted finite statistics, got variance[1] = nan, variance[3] = inf",
        ),
        (Code.BN_VARIANCE_NOT_POSITIVE, "got variance[0] = -0.001, variance[2] = 0 (2 of 8 channels)"),
        (Code.BN_STATISTICS_NOT_FINITE, "batch_norm_1: wanted finite statistics, got gamma[5] = nan"),
    ):
        (line,) = [line for line in message.splitlines() if part in line]
        assert line.strip().startswith(code.value)


def test_b120_default_statistics_warn(net):
    """The job goes on, and the report names each batch norm that was never trained."""
    y = net.input("x", SHAPE)
    for fill in (1.0, 0.5):
        vectors = [relay.const(np.full(8, value, "float32")) for value in (fill, 0, 0, 1)]
        y = relay.nn.batch_norm(net.conv2d(y, 8), *vectors, epsilon=1e-5)[0]
    report = compile(net.module(y)).report
    assert report.parity.passed
    assert len(report.folds) == 2
    (warning,) = report.warnings
    assert (warning.code, warning.at) == (Code.BN_STATISTICS_UNTRAINED, "batch_norm_0")


def test_b004_b005_b110_each_batch_norm_has_its_own_epsilon_and_the_report_says_whose(compile_onnx):
    """1e-3, 1e-5, 1e-6 and ONNX's default in one model; each is used for its own layer."""
    b, given = Builder(), {"bn0": 1e-3, "bn1": 1e-5, "bn2": 1e-6, "bn3": None}
    y = b.input("x", (1, 3, 6, 6))
    for name, epsilon in given.items():
        y = b.batch_norm(b.conv(y, 4, pad=1), epsilon, gamma=0.01, var=1e-4, name=name)
    report = compile_onnx(b.build([y]))[0].report
    origins = {name: EpsilonOrigin.SOURCE_ATTRIBUTE for name in given} | {"bn3": EpsilonOrigin.SOURCE_DEFAULT}
    wanted = [(name, pytest.approx(epsilon or 1e-5), origins[name]) for name, epsilon in given.items()]
    assert [(check.name, check.used, check.origin) for check in report.epsilon] == wanted
    assert [(fold.name, fold.epsilon) for fold in report.folds] == [row[:2] for row in wanted]
    assert report.parity.passed
    lines = [line.split() for line in render(report).splitlines() if line.startswith("  epsilon ")]
    assert [(float(words[1]), words[2]) for words in lines] == [
        (1e-3, "1"), (1e-5, "1"), (1e-5, "1"), (1e-6, "1"),
    ]  # fmt: skip
    assert report.warnings == ()


def test_epsilon_of_the_user(net):
    module = net.module(square(net, net.input("x", SHAPE)))
    with pytest.raises(ModelError) as caught:
        compile(module, epsilon={"*": 1e-5})
    assert Code.BN_EPSILON_MISMATCH.value in str(caught.value)
    with pytest.raises(UsageError):
        compile(module, epsilon={"bn7": 1e-5})
    report = compile(module, epsilon={"batch_norm_0": 1e-5}, align_epsilon=True).report
    (check,) = report.epsilon
    assert (check.in_graph, check.used) == (pytest.approx(1e-3), 1e-5)
    assert check.origin is EpsilonOrigin.USER
    assert report.folds[0].epsilon == pytest.approx(1e-5)
    assert report.parity.passed  # the reference is aligned too


@pytest.mark.parametrize("target", ["nonsense", "llvm -no-such-option=1"])
def test_unknown_target(net, target):
    with pytest.raises(UsageError):
        compile(net.module(relay.nn.relu(net.input("x", SHAPE))), target)


# --- kinds of failures met elsewhere -------------------------------------------------------------


def test_b053_b010_b056_training_mode_is_refused_by_name(compile_onnx):
    b = Builder(opset=15)
    outputs = b.batch_norm(b.input("x", (2, 1)), training_mode=1, n_out=3, name="bn_train")
    with pytest.raises(ModelError, match="bn_train"):
        compile_onnx(b.build([outputs[0]], check=False))


def test_b032_b035_requested_values_keep_names_and_numbers(compile_onnx):
    """The batch norm's own output is asked for, so the relu after it may not swallow it."""
    b = Builder()
    x = b.input("x", (1, 3, 6, 6))
    normalized = b.batch_norm(b.conv(x, 4, pad=1), name="bn_out")
    final = b.op("Identity", b.relu(normalized), name="final")
    compiled, model = compile_onnx(b.build([normalized, final]))
    assert model.outputs == ("bn_out", "final")
    assert [row.output for row in compiled.report.parity.rows] == ["bn_out", "final"]
    assert compiled.report.parity.passed
    assert len(compiled.report.folds) == 1
    inputs = make_inputs(model.inputs, 0)
    first, second = run(compiled.library, inputs)
    assert first.min() < 0
    assert np.array_equal(second, np.maximum(first, 0))


def test_b036_node_names_are_no_value_names(compile_onnx):
    b = Builder()
    scaled = b.op("Mul", b.conv(b.input("x", (1, 3, 6, 6)), 4, name="t1"), b.const(np.full((4, 1, 1), 2.0)))
    proto = b.build([b.relu(scaled, name="out1"), scaled])
    for index, node in enumerate(proto.graph.node):
        node.name = f"n{index}"
    compiled, model = compile_onnx(proto)
    assert model.outputs == ("out1", scaled)
    assert compiled.report.parity.passed


@pytest.mark.parametrize("as_inputs", [False, True])
def test_b042_b043_initializers_fold_to_numbers(compile_onnx, as_inputs):
    """Two convolutions share W; initializers may also be listed as inputs (IR < 4)."""
    b = Builder(opset=9, ir_version=3 if as_inputs else 8, initializers_as_inputs=as_inputs)
    x, w = b.input("x", (1, 4, 6, 6)), b.const(np.random.default_rng(0).normal(size=(4, 4, 3, 3)) / 6, "W")
    y = [b.relu(b.batch_norm(b.conv(x, 4, weight=w, pad=1), name=f"bn{index}")) for index in range(2)]
    compiled, model = compile_onnx(b.build(y))
    assert [spec.name for spec in model.inputs] == ["x"]
    assert len(compiled.report.folds) == 2
    assert len({f.layers[0].weight_after for f in compiled.report.folds}) == 2
    counts = count_operators(compiled.module)
    assert not set(counts) & {"cast", "sqrt", "rsqrt", "divide", "multiply"}
    assert compiled.report.parity.passed


def test_b070_batch_norm_of_a_vector_is_a_clear_error(compile_onnx):
    """X of shape (N,): what its channel is, nobody says; the model is refused by name of the file."""
    b = Builder()
    y = b.batch_norm(b.input("x", (3,)), channels=1)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        compile_onnx(b.build([y], check=False))


def test_b084_every_norm_of_mobilenet_v2_is_accounted_for(tmp_path):
    """17 bottlenecks: conv-BN-ReLU6, the linear bottleneck without activation, residual adds."""
    from examples import models
    from tvm_fuse import transform
    from tvm_fuse.relay.record import last_report

    models.save(models.mobilenet_v2(image=32), tmp_path / "m.onnx")
    module = load.load_model(tmp_path / "m.onnx", shapes={}).module
    transform.PartitionChains()(transform.FoldBatchNorm()(module))
    decisions = last_report()["FoldBatchNorm"].decisions
    assert [decision.applied for decision in decisions] == [True] * 52
    forms = Counter(group.name for group in last_report()["PartitionChains"].details)
    assert forms == {
        "conv2d_bias_relu6": 35, "conv2d_bias_residual": 10, "conv2d_bias": 7, "dense_bias": 1,
    }  # fmt: skip


@pytest.mark.parametrize("opt_level", range(5))
def test_b052_one_number_of_rank_1_after_nhwc(net, opt_level):
    from tvm_fuse import transform

    x = net.input("x", (1, 6, 6, 8))
    y = relay.nn.relu(net.conv2d(x, 8, layout="NHWC") + net.const(8))
    module = net.module(y * relay.const(np.array([0.1], "float32")))
    feed = feeds(module)
    want = run(build.build_unfused(module, resolve(LLVM)).library, feed)[0]
    for group in (transform.PartitionChains(), transform.FuseChains(LLVM)):
        got = run(plain_build(group(module), LLVM, opt_level), feed)[0]
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def resolve(text):
    from tvm_fuse.relay.target import resolve_target

    return resolve_target(text)


def test_b102_each_sample_of_a_batch_is_the_same(net):
    """Several outputs; row 0 of batch 2 is the result of batch 1."""

    def make(batch):
        net = Net()
        y = square(net, net.input("x", (batch, 8, 6, 6)))
        pooled = relay.nn.batch_flatten(relay.nn.global_avg_pool2d(y))
        return compile(net.module(y, net.dense(pooled, 3)))

    both = np.random.default_rng(0).normal(size=(2, 8, 6, 6)).astype("float32")
    one, two = run(make(1).library, {"x": both[:1]}), run(make(2).library, {"x": both})
    for single, batch in zip(one, two):
        np.testing.assert_allclose(batch[:1], single, atol=1e-6, rtol=1e-6)


def test_b104_float16_residual():
    net = Net(dtype="float16")
    x = net.input("x", SHAPE)
    report = compile(net.module(relay.nn.relu(net.batch_norm(net.conv2d(x, 8)) + x))).report
    assert [chain.form for chain in report.chains] == ["conv2d_bias_residual_relu"]
    (row,) = report.parity.rows
    assert (row.dtype, row.passed) == ("float16", True)


def test_b110_leaky_relu_is_in_the_chain(compile_onnx):
    """Nobody should have to ask why it was not fused; nor with an epsilon of 1e-6."""
    b = Builder()
    y = b.batch_norm(b.conv(b.input("x", (1, 3, 6, 6)), 4, bias=True), epsilon=1e-6, name="bn")
    compiled, _ = compile_onnx(b.build([b.op("LeakyRelu", y, alpha=0.1)]))
    assert [chain.form for chain in compiled.report.chains] == ["conv2d_bias_leaky_relu"]
    (check,) = compiled.report.epsilon
    assert (check.origin, check.used) == (EpsilonOrigin.SOURCE_ATTRIBUTE, pytest.approx(1e-6))


HARD_SWISHES = {
    "HardSwish": lambda b, y: b.op("HardSwish", y),
    "Clip, Mul, Div": lambda b, y: b.op(
        "Div",
        b.op("Mul", y, b.clip(b.op("Add", y, b.const(np.array(3.0))), 0.0, 6.0)),
        b.const(np.array(6.0)),
    ),
    "HardSigmoid, Mul": lambda b, y: b.op("Mul", y, b.op("HardSigmoid", y, alpha=1 / 6, beta=0.5)),
    "Mul, HardSigmoid": lambda b, y: b.op("Mul", b.op("HardSigmoid", y, alpha=1 / 6, beta=0.5), y),
    "Clip of rank 1": lambda b, y: b.op(
        "Div", b.op("Mul", y, b.clip(b.op("Add", y, b.const(np.array([3.0]))))), b.const(np.array([6.0]))
    ),
}


def test_every_spelling_of_onnx_is_one_chain(compile_onnx):
    b = Builder()
    x = b.input("x", (1, 4, 6, 6))

    def norm():
        return b.batch_norm(b.conv(x, 4, pad=1))

    swishes = [make(b, norm()) for make in HARD_SWISHES.values()]
    others = [
        b.silu(norm()),
        b.clip(norm()),
        b.op("HardSigmoid", norm()),
        b.op("Sigmoid", norm()),
        b.op("Tanh", norm()),
    ]
    compiled, _ = compile_onnx(b.build([*swishes, *others]))
    forms = [chain.form for chain in compiled.report.chains]
    assert forms[: len(swishes)] == ["conv2d_bias_hard_swish"] * len(swishes)
    assert forms[len(swishes) :] == [
        f"conv2d_bias_{name}" for name in ("silu", "relu6", "hard_sigmoid", "sigmoid", "tanh")
    ]
    assert len(compiled.report.folds) == len(swishes) + len(others)
    assert compiled.report.parity.passed
