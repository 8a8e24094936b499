"""``tvm-fuse run`` on whole files: exit codes, streams and what is left on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.support.onnx_models import Builder
from tvm_fuse import cli
from tvm_fuse.cli import progress
from tvm_fuse.core.errors import MissingDependency

pytestmark = pytest.mark.relay

QUICK = ("--no-latency", "--target", "llvm -opt-level=0")


def net(epsilon=1e-3, size=6, **norm):
    """conv -> bn -> relu, of which all is folded and fused."""
    b = Builder(dtype=norm.pop("dtype", np.float32))
    x = b.input("x", (1, 3, size, size))
    return b.build([b.relu(b.batch_norm(b.conv(x, 4, name="conv"), epsilon, name="bn", **norm), name="y")])


def stubborn_net():
    """A batch norm that is not folded and a convolution that is not fused."""
    b = Builder()
    x = b.input("x", (1, 3, 6, 6))
    late = b.batch_norm(b.relu(b.conv(x, 4, name="first")), name="late_bn")
    return b.build([late, b.conv(x, 4, name="lonely")])


def training_net():
    proto = net()
    node = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    node.attribute.append(helper.make_attribute("training_mode", 1))
    node.output.extend(["saved_mean", "saved_var"])
    return proto


def headless_net():
    proto = net()
    node = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    del node.input[-1]
    return proto


def dynamic_net():
    b = Builder()
    return b.build([b.relu(b.conv(b.input("x", ("n", 3, 6, 6)), 4), name="y")])


def alien_net():
    b = Builder()
    return b.build([b.op("LpNormalization", b.input("x", (1, 3)), axis=1, p=2, name="norm")])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVM_FUSE_TRACEBACK", raising=False)
    return tmp_path


@pytest.fixture
def run(here, capfd):
    """``run(model, *options)``: exit code, standard output and standard error, also of C++ code."""

    def call(model, *options, quick=True):
        if isinstance(model, bytes):
            (here / "net.onnx").write_bytes(model)
        elif model is not None:
            (here / "net.onnx").write_bytes(model.SerializeToString())
        capfd.readouterr()
        code = cli.main(["run", "net.onnx", *(QUICK if quick else ()), *options])
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def no_gpu(monkeypatch):
    """Where there is a GPU, it is not seen."""

    def find_no_device(ordinal):
        raise MissingDependency("no driver", "--device emulator")

    for module in ("tvm_fuse.places", "tvm_fuse.relay.cuda_hook", "tvm_fuse.relay.target"):
        monkeypatch.setattr(f"{module}.has_cuda_device", lambda *ordinal: False)
    monkeypatch.setattr("tvm_fuse.places.find_device", find_no_device)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- errors ------------------------------------------------------------------------------------

ERRORS = {
    "missing file": (None, [], 2, ["net.onnx"]),
    "text": (b"hello", [], 3, ["net.onnx"]),
    "truncated": (net().SerializeToString()[:-40], [], 3, ["net.onnx"]),
    "unknown operator": (alien_net(), [], 3, ["LpNormalization"]),
    "no shape": (dynamic_net(), [], 2, ["x [n, 3, 6, 6]", "--shape x=1x3x6x6"]),
    "name of a shape": (dynamic_net(), ["--shape", "z=1x3x6x6"], 2, ["z", "x"]),
    "rank of a shape": (dynamic_net(), ["--shape", "x=3x6x6"], 2, ["3x6x6", "x [n, 3, 6, 6]"]),
    "fixed dimension": (dynamic_net(), ["--shape", "x=1x3x6x7"], 2, ["1x3x6x7"]),
    "a shape twice": (dynamic_net(), ["--shape", "x=1x3x6x6", "--shape", "x=1x3x6x6"], 2, ["--shape x"]),
    "an epsilon twice": (net(), ["--epsilon", "bn=1", "--epsilon", "bn=1"], 2, ["--epsilon bn"]),
    "no input of a batch norm": (headless_net(), [], 3, ["bn"]),
    "training mode": (training_net(), [], 3, ["'bn'"]),
    "NaN variance": (net(var=np.array([1, np.nan, 1, 1])), [], 3, ["bn-statistics-not-finite at bn"]),
    "infinite mean": (net(mean=np.array([1, np.inf, 1, 1])), [], 3, ["bn-statistics-not-finite at bn"]),
    "negative variance": (net(var=np.array([1, 1, -7, 1])), [], 3, ["bn-variance-not-positive at bn", "-7"]),
    "zero variance and epsilon": (net(0.0, var=np.zeros(4)), [], 3, ["bn-variance-not-positive at bn"]),
    "another epsilon": (net(), ["--epsilon", "bn=0.25"], 3, ["bn-epsilon-mismatch at bn", "0.25", "0.001"]),
    "epsilon of nothing": (net(), ["--epsilon", "bm=1e-3"], 2, ["'bm'", "bn"]),
    "align epsilon of nothing": (net(), ["--epsilon", "bm=1e-3", "--align-epsilon"], 2, ["'bm'"]),
    "unknown target": (net(), ["--target", "llvmm"], 2, ["llvmm"]),
    "wrong target option": (net(), ["--target", "llvm -mcpuu=x"], 2, ["mcpuu"]),
    "parameters": (net(), ["--params", "net.onnx"], 2, ["--params"]),
    "device of a CPU": (net(), ["--device", "emulator"], 2, ["--device emulator", "llvm"]),
    "a check of nothing": (net(), ["--checked"], 2, ["--checked", "--device emulator"]),
    "output is a file": (net(), ["--output", "net.onnx"], 2, ["net.onnx"]),
    "output is below a file": (net(), ["--output", "net.onnx/a/b"], 2, ["net.onnx"]),
}  # fmt: skip


@pytest.mark.parametrize(("model", "options", "code", "parts"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_one_message_and_leaves_nothing(run, here, model, options, code, parts):
    outputs = () if "--output" in options else ("--output", "new/results")
    found, out, err = run(model, *options, *outputs)
    assert found == code
    assert out == ""
    messages = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1
    assert "Traceback" not in err
    assert all(part in err for part in parts), err
    assert files(here) == ([] if model is None else ["net.onnx"])


def test_relay_options_and_files(run, here, capfd):
    (here / "net.relay").write_text("hello")
    assert cli.main(["run", "net.relay", *QUICK]) == 3
    assert cli.main(["run", "net.relay", "--shape", "x=1", *QUICK]) == 2
    assert cli.main(["run", "net.relay", "--params", "none", *QUICK]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("error: ") == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (ZeroDivisionError("broken"), 70)],
    ids=["interrupt", "bug"],
)
def test_what_interrupts_the_work_leaves_nothing(run, here, monkeypatch, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("tvm_fuse.pipeline.compile_model", fail)
    found, out, err = run(net(), "--output", "results")
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    assert files(here) == ["net.onnx"]


def test_a_folder_that_cannot_be_made_is_a_usage_error_after_the_report(run):
    code, out, err = run(net(), "--output", "/proc/tvm-fuse/results")
    assert code == 2
    assert "PASSED" in out
    assert "/proc/tvm-fuse/results" in err


@pytest.mark.parametrize(("compiler", "code"), [(None, 4), ("/nonexistent/c++", 4), ("false", 5)])
def test_a_library_that_cannot_be_linked_leaves_nothing(run, here, monkeypatch, compiler, code):
    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(here))
    else:
        monkeypatch.setenv("CXX", compiler)
    found, _, err = run(net(), "--output", "results")
    assert found == code
    assert "model.so" in err
    assert "Traceback" not in err
    assert files(here) == ["net.onnx"]


# --- reports -----------------------------------------------------------------------------------


def test_a_good_model_without_output_writes_nothing(run, here):
    code, out, err = run(net())
    assert code == 0
    assert "PASSED" in out
    assert err == "" or "error" not in err
    assert files(here) == ["net.onnx"]


def test_the_report_tells_why_something_was_not_folded_or_fused(run):
    code, out, _ = run(stubborn_net())
    assert code == 0
    reasons = [line for line in out.splitlines() if line.startswith("  not: ")]
    hints = out.splitlines()
    for layer, reason in (("late_bn", "bn-after-activation"), ("lonely", "chain-no-epilogue")):
        (line,) = [line for line in reasons if layer in line]
        assert reason in line
        hint = hints[hints.index(line) + 1]
        assert hint.strip()
        assert not hint.startswith("  not: ")


def test_json_is_one_document_on_standard_output(run):
    code, out, err = run(stubborn_net(), "--json", "--output", "results", "--target", "llvm", quick=False)
    assert code == 0
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["schema"] == {"name": "tvm-fuse/report", "version": 2}
    assert document["parity"]["passed"] is True
    assert [row["output"] for row in document["parity"]["rows"]] == ["late_bn", "lonely"]
    latency = document["latency"]
    assert len(latency["fused"]) == len(latency["unfused"]) >= 5
    speedup = latency["speedup"]
    assert 0 < speedup["quartile_1"] <= speedup["median"] <= speedup["quartile_3"]
    assert [entry["reason"]["code"] for entry in document["not_folded"]] == ["bn-after-activation"]
    assert "PASSED" in err  # the text is for people, on the other stream
    assert "wrote results" in err
    with open("results/report.json", encoding="utf-8") as stream:
        assert json.load(stream) == document


def test_json_of_numbers_that_are_not_finite(run):
    """A bias of infinity is no statistic: it reaches the output, on both sides alike."""
    b = Builder()
    y = b.conv(b.input("x", (1, 3, 4, 4)), 2, bias=np.array([np.inf, 0.0]), name="conv")
    code, out, _ = run(b.build([b.relu(y, name="y")]), "--json")
    document = json.loads(out, parse_constant=pytest.fail)
    assert code == (0 if document["parity"]["passed"] else 1)
    assert document["parity"]["rows"][0]["elements"] == 8


@pytest.mark.parametrize("name", ["bn", "b?", "*"])
def test_an_epsilon_is_aligned_when_told_to(run, name):
    code, out, _ = run(net(), "--epsilon", f"{name}=0.25", "--align-epsilon", "--json")
    assert code == 0
    document = json.loads(out)
    (check,) = document["epsilon"]
    assert (check["name"], check["origin"], check["used"]) == ("bn", "user", 0.25)
    assert np.isclose(check["in_graph"], 1e-3)
    assert document["folds"][0]["epsilon"] == 0.25


def test_an_epsilon_that_agrees_is_no_error(run):
    code, out, _ = run(net(), "--epsilon", "bn=1e-3", "--json")
    assert code == 0
    assert json.loads(out)["epsilon"][0]["origin"] == "user"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.json", '{"b*": 0.25}'),
        ("train.yaml", "epsilon: 25e-2\n"),
        (
            "keras.json",
            '{"layers": [{"class_name": "BatchNormalization", "config": {"name": "bn", "epsilon": 0.25}}]}',
        ),
    ],
)
def test_an_epsilon_of_a_training_config(run, here, name, text):
    (here / name).write_text(text)
    code, out, _ = run(net(0.25), "--epsilon-config", name, "--json")
    assert code == 0
    (check,) = json.loads(out)["epsilon"]
    assert (check["origin"], check["used"], check["impact"]) == ("training config", 0.25, None)
    code, out, err = run(net(), "--epsilon-config", name)
    assert (code, out) == (3, "")
    assert "bn-epsilon-mismatch at bn: wanted epsilon 0.25 (training config)" in err
    code, out, _ = run(net(), "--epsilon-config", name, "--align-epsilon")
    assert code == 0
    lines = out.splitlines()
    (index,) = [index for index, line in enumerate(lines) if "bn: epsilon 0.001 aligned to 0.25" in line]
    assert "the output at one standard deviation changes by " in lines[index + 1]
    assert "given by the training config" in out
    code, out, _ = run(net(), "--epsilon-config", name, "--epsilon", "bn=1e-3", "--json")
    assert code == 0
    assert json.loads(out)["epsilon"][0]["origin"] == "user"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "wanted a mapping with entries, got nothing"),
        ('{"bn": -1}', "bn: wanted a finite number >= 0, got -1"),
        ('{"bm": 1e-3}', "train.json: epsilon for 'bm': no batch norm has that name; the model has 1: bn"),
    ],
)
def test_a_wrong_training_config_is_a_usage_error(run, here, text, part):
    (here / "train.json").write_text(text)
    code, out, err = run(net(), "--epsilon-config", "train.json")
    assert (code, out) == (2, "")
    assert "train.json: " in err
    assert part in err


def test_a_default_batch_norm_is_a_warning(run):
    """B120: mean 0, variance 1, gamma 1, beta 0."""
    code, out, _ = run(net(gamma=1.0, beta=0.0, mean=0.0, var=1.0))
    assert code == 0
    assert "warning: bn-statistics-untrained at bn: " in out


def test_dynamic_shapes_are_given(run):
    code, out, _ = run(dynamic_net(), "--shape", "x=2x3x6x6", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["inputs"] == ["x [2, 3, 6, 6]"]
    assert document["parity"]["rows"][0]["shape"] == [2, 4, 4, 4]


def test_a_failed_parity_is_1_and_everything_is_written(run, here):
    code, out, err = run(net(), "--atol", "0", "--rtol", "0", "--output", "results")
    assert code == 1
    assert "FAILED" in out
    assert "error" not in err
    assert files(here / "results") == ["model.so", "report.json"]
    document = json.loads((here / "results/report.json").read_text())
    assert document["parity"]["passed"] is False
    (row,) = document["parity"]["rows"]
    assert row["failing"] > 0
    assert (row["tolerance"]["atol"], row["tolerance"]["rtol"], row["needed"]) == (0, 0, "inf")


def test_an_atol_alone_leaves_the_rtol_of_the_dtype(run):
    half = run(net(dtype=np.float16), "--atol", "0.5", "--json")[1]
    single = run(net(), "--atol", "0.5", "--json")[1]
    tolerances = [json.loads(out)["parity"]["rows"][0]["tolerance"] for out in (half, single)]
    assert [(row["atol"], row["rtol"]) for row in tolerances] == [(0.5, 1e-2), (0.5, 1e-5)]


def test_the_seed_is_used_and_reported(run):
    documents = [json.loads(run(net(), "--json", "--seed", seed)[1]) for seed in ("0", "5")]
    assert [document["parity"]["seed"] for document in documents] == [0, 5]
    worst = [document["parity"]["rows"][0]["worst_reference"] for document in documents]
    assert worst[0] != worst[1]


def test_relay_text_with_parameters(here, capfd):
    from tvm_fuse.relay.base import relay, tvm

    x, w = relay.var("x", shape=(1, 3)), relay.var("w", shape=(4, 3))
    module = tvm.IRModule.from_expr(relay.Function([x, w], relay.nn.relu(relay.nn.dense(x, w))))
    (here / "net.relay").write_text(relay.transform.InferType()(module).astext())
    (here / "net.params").write_bytes(tvm.runtime.save_param_dict({"w": np.ones((4, 3), "float32")}))
    assert cli.main(["run", "net.relay", "--params", "net.params", "--json", *QUICK]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["inputs"] == ["x [1, 3]"]
    assert [chain["form"] for chain in document["chains"]] == ["dense_relu"]


# --- what is written ---------------------------------------------------------------------------

LOAD_AND_RUN = """
import sys
import numpy as np
from tvm_fuse.relay.compat import load_tvm
tvm = load_tvm()
from tvm.contrib.graph_executor import GraphModule
module = GraphModule(tvm.runtime.load_module(sys.argv[1])["default"](tvm.cpu(0)))
module.run(x=np.load("x.npy"))
np.save("y.npy", module.get_output(0).numpy())
"""


def test_the_library_runs_in_another_process(run, here):
    code, out, _ = run(net(), "--output", "deep/results", "--target", "llvm")
    assert code == 0
    assert files(here / "deep/results") == ["model.so", "report.json"]
    assert all(f"wrote deep/results/{name}" in out for name in ("model.so", "report.json"))
    x = np.random.default_rng(3).normal(size=(1, 3, 6, 6)).astype("float32")
    np.save("x.npy", x)
    subprocess.run([sys.executable, "-c", LOAD_AND_RUN, "deep/results/model.so"], check=True, timeout=120)
    (wanted,) = ReferenceEvaluator(onnx.load("net.onnx")).run(None, {"x": x})
    assert np.load("y.npy").shape == wanted.shape
    assert np.abs(np.load("y.npy") - wanted).max() < 1e-5


def test_older_results_are_replaced_and_other_files_stay(run, here):
    (here / "results").mkdir()
    for name in ("report.json", "model.so", "notes.txt"):
        (here / "results" / name).write_text("old")
    assert run(net(), "--output", "results")[0] == 0
    assert files(here / "results") == ["model.so", "notes.txt", "report.json"]
    assert json.loads((here / "results/report.json").read_text())["model"] == "net"
    assert (here / "results/model.so").read_bytes().startswith(b"\x7fELF")
    assert (here / "results/notes.txt").read_text() == "old"
    umask = os.umask(0)
    os.umask(umask)
    assert (here / "results/report.json").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.cuda_codegen
@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_writes_the_kernels_and_says_that_they_did_not_run(run, here):
    code, out, _ = run(net(), "--target", "cuda -arch=sm_80", quick=False)
    assert code == 0
    assert files(here) == ["net-cuda", "net-cuda/kernels.cu", "net-cuda/report.json", "net.onnx"]
    assert "not run: no GPU is visible" in out
    assert "PASSED" in out
    assert "wrote net-cuda/kernels.cu" in out
    source = (here / "net-cuda/kernels.cu").read_text()
    document = json.loads((here / "net-cuda/report.json").read_text())
    kernels = set(re.findall(r"__global__ void (?:__launch_bounds__\(\d+(?:, 1)?\) )?(\w+)\(", source))
    assert len(kernels) >= document["fused"]["kernels"] > 0
    assert document["target"].startswith("cuda")
    assert "sm_80" in document["target"]
    assert document["parity"]["passed"] is True
    assert document["latency"] is None
    assert any("no GPU" in note and "--device emulator" in note for note in document["notes"])
    assert document["execution"]["place"] == "cpu instead of gpu"


@pytest.mark.cuda_codegen
@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_an_arch_is_refused(run, here):
    code, out, err = run(net(), "--target", "cuda")
    assert (code, out, files(here)) == (2, "", ["net.onnx"])
    assert "-arch=sm_75|sm_80|sm_86|sm_89|sm_90" in err


@pytest.mark.cuda_codegen
@pytest.mark.usefixtures("no_gpu")
def test_cuda_with_an_output_folder_and_an_arch(run, here):
    code, out, err = run(net(), "--target", "cuda -arch=sm_86", "--output", "results", "--json", quick=False)
    assert code == 0
    assert files(here) == ["net.onnx", "results", "results/kernels.cu", "results/report.json"]
    assert "sm_86" in json.loads(out)["target"]
    assert "wrote results/kernels.cu" in err


# --- the kernels on the emulator -----------------------------------------------------------------

EMULATED = ("--target", "cuda -arch=sm_80", "--device", "emulator")


def change_kernels(monkeypatch, old, new):
    """Change the CUDA C after TVM has written it; at least one place must be hit."""
    from tvm_fuse.relay import export

    right = export.build_kernels

    def build(module, target):
        made = right(module, target)
        source = re.sub(old, new, made.artifact.cuda_source)
        assert source != made.artifact.cuda_source
        return replace(made, artifact=replace(made.artifact, cuda_source=source))

    monkeypatch.setattr("tvm_fuse.relay.export.build_kernels", build)


@pytest.mark.cuda_codegen
def test_the_kernels_run_on_the_emulator(run, here):
    code, out, err = run(net(), *EMULATED, "--checked", "--seed", "4", "--json", quick=False)
    assert code == 0, err
    document = json.loads(out)
    assert document["execution"] == {"place": "emulator", "device": "the emulator"}
    assert (document["parity"]["passed"], document["parity"]["seed"]) == (True, 4)
    assert [row["output"] for row in document["parity"]["rows"]] == ["y"]
    assert document["latency"] is None
    assert any("says nothing about speed" in note for note in document["notes"])
    assert "run on: the emulator" in err
    assert files(here) == ["net-cuda", "net-cuda/kernels.cu", "net-cuda/report.json", "net.onnx"]


@pytest.mark.cuda_codegen
def test_a_wrong_kernel_fails_parity_by_the_name_of_the_output(run, monkeypatch):
    change_kernels(monkeypatch, r"\bmax\(", "min(")
    code, out, err = run(net(), *EMULATED, quick=False)
    assert (code, "error" in err) == (1, False)
    assert re.search(r"Parity with the unfused model \.* FAILED\n  y \(float32, 1x4x4x4", out)


@pytest.mark.cuda_codegen
def test_a_kernel_that_reads_too_far_is_named_by_the_checked_emulator(run, here, monkeypatch):
    change_kernels(monkeypatch, r"\bp0\[", "p0[1000 + ")
    code, out, err = run(net(), *EMULATED, "--checked", "--output", "results", quick=False)
    assert (code, out) == (5, "")
    assert re.search(r"^error: cuLaunchKernel \(tvmgen_\w+\) failed: .*out of bounds", err, re.M), err
    assert files(here) == ["net.onnx"]


# --- streams -----------------------------------------------------------------------------------


def test_progress_is_on_standard_error(run, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    code, out, err = run(net(), "--json")
    assert code == 0
    json.loads(out)
    for step in ("importing the model", "building the fused model", "running both models"):
        assert f"{step}: " in err


def test_the_command_as_a_process(here):
    """One run through the console script: streams of C++ code and exit code included."""
    (here / "net.onnx").write_bytes(net().SerializeToString())
    command = [sys.executable, "-m", "tvm_fuse.cli", "run", "net.onnx", "--json", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["parity"]["passed"] is True
    assert "PASSED" in done.stderr
