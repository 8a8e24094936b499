"""``tvm-fuse fold``, ``manifest`` and ``verify``: exit codes, streams, files; and all of it without TVM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.onnx_models import Builder
from tvm_fuse import __version__, cli
from tvm_fuse.core.manifest import METADATA_KEY

ROOT = Path(__file__).parents[2]


def net(epsilon=1e-3, batch=1, **norm):
    """conv -> bn -> relu, and a batch norm that stays."""
    b = Builder()
    y = b.relu(
        b.batch_norm(b.conv(b.input("x", (batch, 3, 6, 6)), 4, name="conv"), epsilon, name="bn", **norm)
    )
    return b.build([b.batch_norm(y, epsilon, name="late")])


def training_net():
    proto = net()
    node = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    node.attribute.append(helper.make_attribute("training_mode", 1))
    node.output.extend(["saved_mean", "saved_var"])
    return proto


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with ``net.onnx``, ``folded.onnx``, a Relay module and a file that is neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVM_FUSE_TRACEBACK", raising=False)
    onnx.save(net(), "net.onnx")
    onnx.save(net(batch="n"), "dynamic.onnx")
    Path("net.relay").write_text("hello")
    return tmp_path


@pytest.fixture
def run(here, capfd):
    """``run(*arguments)``: exit code, standard output and standard error."""

    def call(*arguments):
        capfd.readouterr()
        code = cli.main(list(arguments))
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def folded(run):
    """``folded.onnx`` is made of ``net.onnx``."""
    assert run("fold", "net.onnx", "-o", "folded.onnx")[0] == 0


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is printed -----------------------------------------------------------------------------


def test_fold_tells_what_it_did(run, here):
    code, out, err = run("fold", "net.onnx", "-o", "folded.onnx")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"net    (tvm-fuse {__version__})"
    assert lines[2].startswith("Batch norms folded into weights ...")
    assert lines[2].endswith(" 1 of 2")
    assert lines[3].split() == "epsilon 0.001 2 x stated in the model file; the graph agrees".split()
    assert lines[4].startswith("  rounding moves an output of a layer by at most ")
    assert "  not: late: bn-after-activation: " in out
    assert lines[-1] == "wrote folded.onnx"
    assert (here / "folded.onnx").is_file()


def test_fold_as_json(run):
    code, out, err = run("fold", "net.onnx", "-o", "folded.onnx", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == {"name": "tvm-fuse/fold-report", "version": 1}
    assert [fold["name"] for fold in document["folds"]] == ["bn"]
    assert document["not_folded"][0]["reason"]["code"] == "bn-after-activation"
    assert document["manifest"]["batch_norms"][0]["layers"][0]["name"] == "conv"
    assert "wrote folded.onnx" in err


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_progress_is_on_standard_error(run, monkeypatch, options):
    class Slow(threading.Event):
        """Not yet set when it is first asked."""

        def wait(self, timeout=None):
            return timeout != 0 and super().wait(timeout)

    monkeypatch.setattr("tvm_fuse.cli.progress._QUIET_S", 0)
    monkeypatch.setattr(
        "tvm_fuse.cli.progress.threading", SimpleNamespace(Event=Slow, Thread=threading.Thread)
    )
    _, out, err = run("fold", "net.onnx", "-o", "folded.onnx", *options)
    steps = ("reading the model", "folding", "saving")
    assert all(f"{step}: " in err for step in steps)
    assert not any(f"{step}: " in out for step in steps)
    _, out, err = run("verify", "folded.onnx", "--source", "net.onnx", *options)
    assert "verifying: " in err
    assert "verifying: " not in out


@pytest.mark.usefixtures("folded")
def test_manifest_lists_every_batch_norm_and_its_layer(run):
    """B121."""
    code, out, err = run("manifest", "folded.onnx")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("folded from net.onnx (SHA-256 ")
    assert lines[1].startswith("by numpy ")
    assert lines[1].endswith(f"tvm-fuse {__version__}")
    assert lines[3] == "bn: epsilon 0.001 (source attribute), into conv"
    assert lines[4].startswith("  variance at least ")
    assert lines[5].startswith("  weight ")
    assert lines[6].startswith("late: not folded: bn-after-activation at late: ")


@pytest.mark.usefixtures("folded")
def test_manifest_as_json(run):
    code, out, _ = run("manifest", "folded.onnx", "--json")
    model = onnx.load("folded.onnx")
    assert code == 0
    assert json.loads(out) == json.loads(model.metadata_props[0].value)


@pytest.mark.usefixtures("folded")
def test_verify_tells_what_holds(run):
    code, out, err = run("verify", "folded.onnx", "--source", "net.onnx")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("Hashes and numbers ...")
    assert lines[0].endswith(" 5 of 5 hold")
    assert lines[2].startswith("Outputs compared with the source, both run by ONNX Runtime ...")
    assert lines[2].endswith(" PASSED")
    assert "  late (float32, 1x4x4x4, 64 values)" in lines


@pytest.mark.usefixtures("folded")
def test_verify_as_json(run):
    code, out, err = run("verify", "folded.onnx", "--source", "net.onnx", "--json", "--seed", "7")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["schema"] == {"name": "tvm-fuse/verification", "version": 1}
    assert document["passed"] is True
    assert document["parity"]["seed"] == 7


def test_dynamic_dimensions_stay(run):
    assert run("fold", "dynamic.onnx", "-o", "folded.onnx")[0] == 0
    model = onnx.load("folded.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    code, _, err = run("verify", "folded.onnx", "--source", "dynamic.onnx")
    assert code == 2
    assert "--shape x=1x3x6x6" in err
    assert run("verify", "folded.onnx", "--source", "dynamic.onnx", "--shape", "x=2x3x6x6")[0] == 0


# --- what was changed ----------------------------------------------------------------------------


def change_tensor(name):
    def tamper(model):
        (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
        array = numpy_helper.to_array(tensor).copy()
        array.reshape(-1)[0] += 1
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return tamper


def change_manifest(*path):
    def tamper(model):
        (entry,) = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
        document = part = json.loads(entry.value)
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = "0" * len(part[path[-1]])
        entry.value = json.dumps(document)

    return tamper


TAMPERED = {
    "a weight": ("folded.onnx", change_tensor("conv.weight_folded"), "weight of conv: no constant of "),
    "a bias": ("folded.onnx", change_tensor("conv_bias"), "1 differ: conv_bias"),
    "a hash of the manifest": (
        "folded.onnx",
        change_manifest("batch_norms", 0, "layers", 0, "weight_after"),
        "batch_norms[0] (bn).layers[0] (conv).weight_after: wanted ",
    ),
    "the manifest's hash of the source": (
        "folded.onnx", change_manifest("source", "sha256"), "it is another file: wanted SHA-256 000",
    ),
    "the source": ("net.onnx", change_tensor("conv.weight"), "it is another file: wanted SHA-256 "),
}  # fmt: skip


@pytest.mark.usefixtures("folded")
@pytest.mark.parametrize(("file", "tamper", "part"), TAMPERED.values(), ids=TAMPERED.keys())
def test_b073_what_was_changed_fails_with_exit_code_1_and_is_named(run, file, tamper, part):
    model = onnx.load(file)
    tamper(model)
    onnx.save(model, file)
    code, out, err = run("verify", "folded.onnx", "--source", "net.onnx")
    assert (code, err) == (1, "")
    assert part in "".join(line for line in out.splitlines() if line.startswith("  FAILED: "))
    code, out, _ = run("verify", "folded.onnx", "--source", "net.onnx", "--json")
    assert code == 1
    assert json.loads(out)["passed"] is False


@pytest.mark.usefixtures("folded")
def test_parity_alone_may_fail(run):
    code, out, _ = run("verify", "folded.onnx", "--source", "net.onnx", "--atol", "0", "--rtol", "0")
    assert code == 1
    assert "FAILED: " not in out
    assert out.splitlines()[2].endswith(" FAILED")


# --- bad input -----------------------------------------------------------------------------------


def write(name, data):
    return lambda: Path(name).write_bytes(data if isinstance(data, bytes) else data.SerializeToString())


def strip_manifest(value=None):
    def prepare():
        model = onnx.load("folded.onnx")
        del model.metadata_props[:]
        if value is not None:
            model.metadata_props.add(key=METADATA_KEY, value=value)
        onnx.save(model, "folded.onnx")

    return prepare


FOLD = ("fold", "net.onnx", "-o")
FOLD_OUT = (*FOLD, "out.onnx")
MANIFEST = ("manifest", "folded.onnx")
VERIFY = ("verify", "folded.onnx", "--source", "net.onnx")
NAN = np.array([1, np.nan, 1, 1])

#: What is done before, the arguments, the exit code, and what the message says.
ERRORS = {
    "output is the input": (None, [*FOLD, "net.onnx"], 2, ["net.onnx", "overwrite its source"]),
    "output is the input by another way": (None, [*FOLD, "../{here}/net.onnx"], 2, ["overwrite its source"]),
    "no folder for the output": (None, [*FOLD, "absent/out.onnx"], 2, ["absent/out.onnx cannot be written"]),
    "file below a file": (None, [*FOLD, "net.onnx/out.onnx"], 2, ["net.onnx/out.onnx cannot be written"]),
    "folder below a file": (None, [*FOLD, "net.relay/out"], 2, ["net.relay/out"]),
    "wrong suffix": (None, [*FOLD, "out.onx"], 2, ["-o out.onx: wanted OUT.onnx or a folder"]),
    "output is a file": (write("out", b""), [*FOLD, "out"], 2, ["-o out: wanted OUT.onnx or a folder"]),
    "output is a folder": (lambda: os.mkdir("o.onnx"), [*FOLD, "o.onnx"], 2, ["o.onnx cannot be written"]),
    "name too long": (None, [*FOLD, "x" * 300], 2, ["File name too long"]),
    "Relay to ONNX": (None, ["fold", "net.relay", "-o", "o.onnx"], 2, ["only an ONNX model can become one"]),
    "shape for ONNX": (None, [*FOLD_OUT, "--shape", "x=1x3x6x6"], 2, ["--shape is for a folder"]),
    "params for ONNX": (None, [*FOLD_OUT, "--params", "p"], 2, ["--params is for Relay modules"]),
    "no such model": (None, ["fold", "no.onnx", "-o", "out.onnx"], 2, ["no such file: no.onnx"]),
    "no model": (write("net.onnx", b"hello"), FOLD_OUT, 3, ["net.onnx is not an ONNX"]),
    "B010, B053: training": (write("net.onnx", training_net()), FOLD_OUT, 3, ["'bn' is in training mode"]),
    "NaN variance": (write("net.onnx", net(var=NAN)), FOLD_OUT, 3, ["bn-statistics-not-finite at bn"]),
    "B073: epsilon": (None, [*FOLD_OUT, "--epsilon", "*=1e-5"], 3, ["mismatch at bn", "mismatch at late"]),
    "epsilon of nothing": (None, [*FOLD_OUT, "--epsilon", "bm=1"], 2, ["'bm'", "bn, late"]),
    "epsilon twice": (None, [*FOLD_OUT, "--epsilon", "a=1", "--epsilon", "a=1"], 2, ["--epsilon a"]),
    "no training config": (None, [*FOLD_OUT, "--epsilon-config", "no.json"], 2, ["no.json"]),
    "manifest of nothing": (None, ["manifest", "no.onnx"], 2, ["no such file: no.onnx"]),
    "manifest of no model": (None, ["manifest", "net.relay"], 3, ["net.relay is not an ONNX file"]),
    "no manifest": (None, ["manifest", "net.onnx"], 3, ["net.onnx has no manifest", "tvm-fuse fold"]),
    "no manifest in the folder": (None, ["manifest", "."], 2, ["no manifest.json in it"]),
    "damaged manifest": (strip_manifest("{"), MANIFEST, 3, ["folded.onnx: not a manifest"]),
    "damaged file": (write("manifest.json", b"\xff"), ["manifest", "."], 3, ["manifest.json: not a"]),
    "another version": (strip_manifest('{"schema": 9}'), MANIFEST, 3, ["the manifest is 9; wanted"]),
    "verify without a manifest": (strip_manifest(), VERIFY, 3, ["folded.onnx has no manifest"]),
    "verify a damaged manifest": (strip_manifest("[]"), VERIFY, 3, ["folded.onnx: not a manifest"]),
    "verify nothing": (None, ["verify", "no.onnx", "--source", "net.onnx"], 2, ["no.onnx"]),
    "verify with no source": (None, [*VERIFY[:3], "no.onnx"], 2, ["no.onnx cannot be read"]),
    "verify with a folder": (None, [*VERIFY[:3], "."], 2, [". cannot be read"]),
    "verify with parameters": (None, [*VERIFY, "--params", "p"], 2, ["--params is for Relay modules"]),
    "verify with a shape of nothing": (None, [*VERIFY, "--shape", "z=1"], 2, ["--shape z"]),
    "verify with a wrong shape": (None, [*VERIFY, "--shape", "x=2x3x6x6"], 2, ["x [1, 3, 6, 6]"]),
}  # fmt: skip


@pytest.mark.usefixtures("folded")
@pytest.mark.parametrize(("prepare", "arguments", "code", "parts"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_one_message_and_leaves_nothing(run, here, prepare, arguments, code, parts):
    if prepare is not None:
        prepare()
    before = contents(here)
    found, out, err = run(*(argument.format(here=here.name) for argument in arguments))
    assert (found, out) == (code, ""), err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert all(part in err for part in parts), err
    assert contents(here) == before


@pytest.mark.parametrize(
    "argv", [["fold", "net.onnx"], ["verify", "f.onnx"], ["manifest"], ["fold", "-o", "x"]]
)
def test_what_is_needed_is_asked_for(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "required" in capsys.readouterr().err


@pytest.mark.usefixtures("folded")
def test_a_failure_in_the_middle_leaves_the_old_file(run, here, monkeypatch):
    before = contents(here)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = run(*FOLD, "folded.onnx")
    assert (code, out) == (2, "")
    assert "folded.onnx cannot be written: No space left on device" in err
    monkeypatch.undo()
    assert contents(here) == before


@pytest.mark.usefixtures("folded")
def test_an_older_file_is_replaced(run):
    onnx.save(net(epsilon=0.25), "net.onnx")
    assert run(*FOLD, "folded.onnx")[0] == 0
    assert run(*VERIFY)[0] == 0


# --- folders -------------------------------------------------------------------------------------


@pytest.mark.relay
def test_a_folder_is_written_shown_and_verified(run, here):
    code, out, _ = run(*FOLD, "out")
    assert code == 0
    assert out.splitlines()[-1] == "wrote out"
    assert sorted(contents(here / "out")) == ["manifest.json", "model.json", "params.bin"]
    code, out, _ = run("manifest", "out")
    assert code == 0
    assert "bn: epsilon 0.001 (source attribute), into conv" in out
    code, out, _ = run("verify", "out", "--source", "net.onnx")
    assert code == 0
    assert "both run by TVM " in out
    code, out, _ = run("verify", "out", "--source", "dynamic.onnx")
    assert code == 1
    assert "it is another file" in out


@pytest.mark.relay
def test_a_folder_with_a_dot_in_its_name_must_exist(run):
    code, _, err = run(*FOLD, "net-v1.0")
    assert (code, "must exist" in err) == (2, True)
    os.mkdir("net-v1.0")
    assert run(*FOLD, "net-v1.0")[0] == 0


@pytest.mark.relay
def test_a_folder_is_a_model_of_run_and_of_fold(run):
    assert run(*FOLD, "out")[0] == 0
    assert run("fold", "out", "-o", "out")[0] == 2
    assert run("fold", "out", "-o", "out.onnx")[0] == 2
    assert run("fold", "out", "-o", "out2")[0] == 0
    code, out, _ = run("run", "out", "--no-latency", "--target", "llvm -opt-level=0")
    assert code == 0
    assert "late (float32, 1x4x4x4, 64 values)" in out


# --- without TVM ---------------------------------------------------------------------------------

#: Runs the command as if these were not installed.
BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(("tvm", "bitblas", "onnxruntime", "torch", "yaml", "scipy")))
from tvm_fuse.cli import main
sys.exit(main(sys.argv[1:]))
"""

COMMANDS = (
    ("fold", "net.onnx", "-o", "folded.onnx"),
    ("manifest", "folded.onnx"),
    ("verify", "folded.onnx", "--source", "net.onnx"),
)


def run_all(start, folder):
    """Run the three commands in a folder; returns the last output."""
    for command in COMMANDS:
        done = subprocess.run(
            [*start, *command], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_all_of_it_runs_without_tvm(here):
    out = run_all([sys.executable, "-c", BLOCKED], here)
    assert "both run by onnx's reference evaluator" in out


def test_a_folder_without_tvm_is_a_missing_dependency(here):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *FOLD, "out"], cwd=here, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert "tvm-fuse[relay]" in done.stderr
    assert not (here / "out").exists()


@pytest.mark.slow
def test_numpy_and_onnx_are_enough(here):
    """An environment of its own, with what the project depends on and nothing else."""

    def pip(*arguments):
        command = [here / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=here, check=True)
    done = pip("install", f"numpy=={np.__version__}", f"onnx=={onnx.__version__}")
    if done.returncode != 0:
        pytest.skip(f"numpy and onnx cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "results")
    shutil.copytree(ROOT, here / "project", symlinks=True, ignore=ignored)
    done = pip("install", "--no-deps", here / "project")
    assert done.returncode == 0, done.stderr
    names = {entry["name"].lower() for entry in json.loads(pip("list", "--format=json").stdout)}
    assert {"numpy", "onnx", "tvm-fuse"} <= names
    assert not names & {"apache-tvm", "bitblas", "torch", "onnxruntime", "scipy", "pyyaml"}
    out = run_all([str(here / "env" / "bin" / "tvm-fuse")], here)
    assert "both run by onnx's reference evaluator" in out
