"""Models exported as bundles, and run from there: on the emulator, without TVM, to the same numbers."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.isolated import run_emulated
from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder, run
from tests.support.relay_graphs import Net, feeds, relay, run_unfused
from tvm_fuse.core.errors import MissingDependency, ModelError, UsageError
from tvm_fuse.core.manifest import Source, hash_files
from tvm_fuse.core.parity import Tolerance
from tvm_fuse.cuda.bundle_files import load_bundle, load_golden, load_parameters, save_bundle

export = Lazy("tvm_fuse.relay.export")
load = Lazy("tvm_fuse.relay.load")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

CUDA = "cuda -arch=sm_90"
SOURCE = Source("module", "00" * 32)

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"
)


def onnx_net():
    """Convolution, batch norm, ReLU, residual, pooling, dense."""
    b = Builder()
    x = b.input("image", (1, 3, 12, 12))
    y = b.relu(b.batch_norm(b.conv(x, 8, pad=1, bias=True)))
    z = b.batch_norm(b.conv(y, 8, pad=1))
    z = b.relu(b.op("Add", z, y))
    z = b.op("Flatten", b.op("GlobalAveragePool", z))
    weight, bias = b.const(b.rng.standard_normal((5, 8))), b.const(b.rng.standard_normal(5))
    scores = b.op("Gemm", z, weight, bias, transB=1, name="scores")
    return b.build([b.op("Softmax", scores, axis=1, name="classes"), scores])


@pytest.fixture(scope="module")
def net_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "net.onnx"
    file.write_bytes(onnx_net().SerializeToString())
    return file


@pytest.fixture(scope="module")
def exported(net_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "bundle"
    options = export.ExportOptions(archs=("sm_80",), seed=3)
    return folder, export.export_file(net_file, folder, CUDA, options)


# --- what is in a bundle -------------------------------------------------------------------------------


def test_the_description(exported, net_file):
    folder, bundle = exported
    assert load_bundle(folder) == bundle
    assert (bundle.model, bundle.seed, bundle.is_seeded) == ("net", 3, False)
    assert bundle.provenance.source == Source("net.onnx", hash_files([net_file]))
    assert bundle.provenance.versions.keys() == {"tvm-fuse", "tvm", "numpy", "compiler"}
    assert "sm_90" in bundle.provenance.target
    assert [port.name for port in bundle.inputs] == ["image"]
    assert [port.name for port in bundle.outputs] == ["classes", "scores"]
    assert {port.tolerance.atol for port in bundle.outputs} == {1e-5}
    kinds = [(image.arch, image.form) for image in bundle.images]
    assert kinds == [("sm_90", "cubin"), ("sm_80", "cubin"), ("sm_80", "ptx")]


def test_the_files(exported):
    folder, bundle = exported
    for image in bundle.images:
        data = (folder / image.file).read_bytes()
        assert data.startswith(b"\x7fELF") if image.form == "cubin" else b".target sm_80" in data
    source = (folder / "kernels.cu").read_text()
    assert all(f" {kernel.symbol}(" in source for kernel in bundle.kernels)
    launched = {call.symbol for operator in bundle.operators for call in operator.calls}
    assert launched == {kernel.symbol for kernel in bundle.kernels}


def test_batch_norms_are_in_the_parameters(exported):
    """Two weights and two biases of convolutions, weight and bias of the dense layer: nothing else."""
    folder, bundle = exported
    parameters = load_parameters(folder, bundle)
    assert sorted(array.size for array in parameters.values()) == [5, 8, 8, 40, 216, 576]


def test_the_golden_outputs_are_the_models(exported):
    folder, bundle = exported
    inputs, outputs = load_golden(folder, bundle)
    for name, wanted in zip(("classes", "scores"), run(onnx_net(), inputs)):
        np.testing.assert_allclose(outputs[name], wanted, rtol=1e-5, atol=1e-5)


# --- run from there ------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("options", [(), ("--checked",)], ids=["fast", "checked"])
def test_it_runs_without_tvm(exported, options):
    folder, _ = exported
    code, report, said = run_emulated(folder, *options)
    assert code == 0, said
    assert report["passed"]
    assert report["is_emulated"]
    rows = report["parity"]["rows"]
    assert [row["output"] for row in rows] == ["classes", "scores"]
    assert all(row["max_abs"] <= 1e-5 for row in rows)
    assert report["timings"] == []


@needs_compiler
def test_it_is_measured_even_there(exported):
    code, report, said = run_emulated(exported[0], "--repeats", "2", "--warmup", "0", "--kernels")
    assert code == 0, said
    assert [timing["is_graph"] for timing in report["timings"]] == [False]
    assert len(report["kernels"]) == report["launches"]
    assert any("CUDA graph" in note for note in report["notes"])


@needs_compiler
def test_other_numbers_than_expected_are_found(exported, tmp_path):
    folder, bundle = exported
    inputs, outputs = load_golden(folder, bundle)
    outputs["scores"][0, 2] += 1e-3
    files = {name: (folder / name).read_bytes() for name in _kernel_files(bundle)}
    save_bundle(tmp_path, bundle, files, load_parameters(folder, bundle), (inputs, outputs))
    code, report, said = run_emulated(tmp_path)
    assert (code, report["passed"]) == (1, False)
    assert [row["failing"] for row in report["parity"]["rows"]] == [0, 1]
    assert "FAILED" in said


@needs_compiler
def test_a_kernel_that_errs_is_named(exported, tmp_path):
    folder, bundle = exported
    parameters = load_parameters(folder, bundle)
    files = {name: (folder / name).read_bytes() for name in _kernel_files(bundle)}
    first = bundle.kernels[0]
    grown = replace(first, grid=(first.grid[0] * 64, *first.grid[1:]))
    changed = replace(bundle, kernels=(grown, *bundle.kernels[1:]))
    save_bundle(tmp_path, changed, files, parameters, load_golden(folder, bundle))
    code, report, said = run_emulated(tmp_path, "--checked")
    assert (code, report) == (5, None)
    assert f"error: cuLaunchKernel ({grown.symbol}) failed: {grown.symbol}: " in said
    assert "(block (" in said


def _kernel_files(bundle):
    return [record.name for record in bundle.files if not record.name.endswith(".npz")]


# --- seeded bundles ------------------------------------------------------------------------------------


def small_model():
    net = Net()
    x = relay.nn.relu(net.dense(net.input("x", (2, 16)), 8))
    return load.model_from_module(net.module(relay.add(net.dense(x, 4), net.const(4))))


def large_model():
    net = Net()
    return load.model_from_module(
        net.module(relay.multiply(net.dense(net.input("x", (2, 16)), 8), relay.const(50.0)))
    )


def export_small(folder, make=small_model, **options):
    return export.export_model(make(), SOURCE, folder, CUDA, export.ExportOptions(**options))


@needs_compiler
def test_a_seeded_bundle_ships_no_weights(tmp_path):
    bundle = export_small(tmp_path, is_seeded=True, seed=5)
    assert not (tmp_path / "params.npz").exists()
    code, report, said = run_emulated(tmp_path)
    assert code == 0, said
    assert report["is_seeded"]
    assert report["parity"]["rows"][0]["reference_max"] > 0.1
    real = load_parameters(tmp_path / "real", export_small(tmp_path / "real"))
    drawn = load_parameters(tmp_path, bundle)
    assert {name: array.shape for name, array in drawn.items()} == {n: a.shape for n, a in real.items()}
    for name, array in drawn.items():
        assert not np.array_equal(array, real[name])
        assert real[name].min() <= array.min() < array.max() <= real[name].max()


@pytest.mark.parametrize(("is_seeded", "wide"), [(True, True), (False, False)], ids=["drawn", "real"])
def test_the_tolerance_of_drawn_outputs_grows_with_them(tmp_path, is_seeded, wide):
    bundle = export_small(tmp_path, large_model, is_seeded=is_seeded)
    golden = load_golden(tmp_path, bundle)[1]["output0"]
    tolerance = bundle.outputs[0].tolerance
    largest = float(np.abs(golden).max())
    assert largest > 1.5
    assert tolerance.atol == pytest.approx(1e-5 * (largest if wide else 1.0))
    assert tolerance.rtol == 1e-5
    given = export_small(tmp_path, large_model, is_seeded=is_seeded, tolerance=Tolerance(1e-7, 0.0, "given"))
    assert given.outputs[0].tolerance.atol == 1e-7


def test_seeds_decide_everything(tmp_path):
    golden = []
    for index, seed in enumerate((0, 0, 1)):
        bundle = export_small(tmp_path / str(index), is_seeded=True, seed=seed)
        golden.append(load_golden(tmp_path / str(index), bundle)[1]["output0"])
    assert np.array_equal(golden[0], golden[1])
    assert not np.allclose(golden[0], golden[2])


def test_weights_that_cannot_be_drawn(tmp_path):
    net = Net()
    values = np.full(8, np.inf, np.float32)
    module = net.module(relay.minimum(net.input("x", (1, 8)), relay.const(values)))
    with pytest.raises(ModelError, match="parameters cannot be drawn like w0"):
        export.export_model(
            load.model_from_module(module), SOURCE, tmp_path, CUDA, export.ExportOptions(is_seeded=True)
        )


# --- Relay modules, dtypes, options --------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_dtypes(tmp_path, dtype):
    net = Net(dtype=dtype)
    x = net.input("x", (1, 32))
    y = relay.add(relay.multiply(x, relay.const(np.arange(32), dtype)), x)
    bundle = export.export_model(load.model_from_module(net.module(y)), SOURCE, tmp_path, CUDA)
    assert {tensor.dtype for tensor in bundle.tensors} == {dtype}
    code, _, said = run_emulated(tmp_path)
    assert code == 0, said


@needs_compiler
def test_several_inputs_outputs_and_a_boolean(tmp_path):
    net = Net()
    x, y = net.input("x", (2, 8)), net.input("y", (2, 8))
    module = net.module(relay.add(x, y), relay.greater(x, y), x, relay.sum(y))
    bundle = export.export_model(load.model_from_module(module), SOURCE, tmp_path, CUDA)
    assert [bundle.tensors[port.tensor].dtype for port in bundle.outputs] == ["float32", "bool"] + [
        "float32"
    ] * 2
    assert bundle.outputs[1].tolerance.atol == 0
    code, report, said = run_emulated(tmp_path)
    assert code == 0, said
    assert len(report["parity"]["rows"]) == 4


def test_an_input_that_nothing_reads(tmp_path):
    net = Net()
    x, _ = net.input("x", (2, 8)), net.input("unused", (3,))
    bundle = export.export_model(load.model_from_module(net.module(relay.exp(x))), SOURCE, tmp_path, CUDA)
    golden = load_golden(tmp_path, bundle)
    wanted = run_unfused(net.module(relay.exp(x)), {**feeds(net.module(relay.exp(x))), **golden[0]})
    np.testing.assert_allclose(golden[1]["output0"], wanted[0], rtol=1e-6)


def test_the_tolerance_can_be_given(tmp_path):
    wide = Tolerance(1e-2, 0.0, "given")
    assert {port.tolerance for port in export_small(tmp_path, tolerance=wide).outputs} == {wide}


@pytest.mark.parametrize(
    ("target", "archs", "message"),
    [
        ("llvm", (), "a bundle holds CUDA kernels; the target is llvm"),
        ("cuda", (), "no GPU architecture is named"),
        (CUDA, ("80",), "'80' is no GPU architecture"),
    ],
)
def test_what_is_refused_before_any_work(net_file, tmp_path, target, archs, message):
    with pytest.raises(UsageError, match=message):
        export.export_file(net_file, tmp_path / "out", target, export.ExportOptions(archs=archs))
    assert not (tmp_path / "out").exists()


def test_without_nvrtc(tmp_path, monkeypatch):
    def missing(source, arch):
        raise MissingDependency("NVRTC cannot be loaded")

    monkeypatch.setattr("tvm_fuse.relay.export.compile_cuda", missing)
    with pytest.raises(MissingDependency, match="NVRTC"):
        export_small(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_is_too_old_for_the_gpu(tmp_path, monkeypatch):
    """It makes PTX only, which the driver of the newer GPU compiles."""
    compile_cuda = export.compile_cuda
    monkeypatch.setattr(
        "tvm_fuse.relay.export.compile_cuda",
        lambda source, arch: replace(compile_cuda(source, arch), cubin=b""),
    )
    bundle = export_small(tmp_path)
    assert [(image.arch, image.form) for image in bundle.images] == [("sm_90", "ptx")]


# --- whole models --------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
def test_the_classifier_of_pp_ocr(tmp_path):
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        pytest.skip("rapidocr_onnxruntime is not installed")
    file = Path(spec.origin).parent / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    _check_whole_model(file, tmp_path, {"x": (1, 3, 48, 192)})


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "image"), [("mobilenet_v2", 96), ("resnet50", 224), ("efficientnet_b0", 224)]
)
def test_an_example_model(name, image, tmp_path):
    from examples.models import MODELS, save

    save(MODELS[name](image=image), tmp_path / f"{name}.onnx")
    _check_whole_model(tmp_path / f"{name}.onnx", tmp_path, {})


def _check_whole_model(file, tmp_path, shapes):
    onnxruntime = pytest.importorskip("onnxruntime")
    bundle = export.export_file(file, tmp_path / "bundle", CUDA, shapes=shapes)
    inputs, outputs = load_golden(tmp_path / "bundle", bundle)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [port.name for port in bundle.outputs]
    for name, wanted in zip(names, session.run(names, inputs)):
        assert np.abs(outputs[name] - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())
    code, report, said = run_emulated(tmp_path / "bundle")
    assert code == 0, said
    assert all(row["failing"] == 0 for row in report["parity"]["rows"])
