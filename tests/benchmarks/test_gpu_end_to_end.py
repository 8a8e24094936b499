"""Both scripts of the GPU benchmark: a small model in all forms, and a layer, on the emulator."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.isolated import ROOT

pytestmark = [
    pytest.mark.relay,
    pytest.mark.cuda_codegen,
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"),
]


def script(name, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    done = script("prepare.py", "-o", folder, "--small")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["suite.tar.xz"]
    return folder


def test_on_the_emulator(prepared, tmp_path):
    out = tmp_path / "gpu.json"
    done = script("run.py", prepared, "--out", out, "--device", "emulator", "--budget", "600s")
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["is_emulated"]
    assert {job["status"] for job in document["jobs"]} == {"passed"}
    checks = {job["name"].split()[-1]: job for job in document["jobs"] if job["kind"] == "check"}
    launches = {form: job["launches"] for form, job in checks.items()}
    assert launches.keys() == {"fused", "unfused", "topi"}
    assert launches["fused"] <= launches["topi"] < launches["unfused"] / 3
    assert all(job["operators"]["checked"] >= 50 for job in checks.values())
    assert all(0 < job["operators"]["largest_error"] < 1e-5 for job in checks.values())
    forms = {
        job["name"]: [row["name"] for row in job["rows"]]
        for job in document["jobs"]
        if job["kind"] == "compare"
    }
    assert forms["forms of mobilenet_v2 batch 1"] == ["fused", "unfused", "topi"]
    assert forms["layer conv3x3_8_16_14_s2 batch 1"][:2] == ["fused", "by_hand"]
    assert '"us": {' not in out.read_text()  # no time of the emulator's is kept
    if importlib.util.find_spec("torch") is None:
        assert {row["why"] for row in document["not_measured"]} == {"PyTorch is not installed"}
    assert "nothing here is a measurement" in Path(out).with_suffix(".md").read_text()


def test_a_mutated_kernel_fails_its_check(prepared, tmp_path):
    """A ReLU6 that is cut at 0.5, in the source that the emulator compiles."""
    from benchmarks.gpu.suite import ARCHIVE, pack, unpack
    from tvm_fuse.cuda.bundle_files import KERNELS_FILE, load_bundle, load_golden, save_bundle

    about, entries = unpack(prepared / ARCHIVE, tmp_path / "parts")
    fused = next(entry for entry in entries if entry.form == "fused" and not entry.is_layer)
    folder = tmp_path / "parts" / fused.folder
    bundle = load_bundle(folder)
    files = {record.name: (folder / record.name).read_bytes() for record in bundle.files}
    assert b"6.000000e+00f" in files[KERNELS_FILE]
    files[KERNELS_FILE] = files[KERNELS_FILE].replace(b"6.000000e+00f", b"5.000000e-01f", 1)
    del files["golden.npz"]
    save_bundle(folder, bundle, files, {}, load_golden(folder, bundle))
    pack(tmp_path / "parts", tmp_path / ARCHIVE, about, entries)
    out = tmp_path / "gpu.json"
    done = script(
        "run.py",
        tmp_path,
        "--out",
        out,
        "--device",
        "emulator",
        "--only",
        "check * fused",
        "--budget",
        "300s",
    )
    assert done.returncode == 1
    assert "failed: check mobilenet_v2 batch 1 fused" in done.stderr
    (job,) = json.loads(out.read_text())["jobs"]
    assert job["status"] == "failed"
    assert job["operators"]["wrong"]


@pytest.mark.torch
def test_pytorch_runs_the_network(prepared, tmp_path):
    import torch

    from benchmarks.gpu.network import draw_weights, load_network
    from benchmarks.gpu.suite import ARCHIVE, unpack
    from benchmarks.gpu.torch_network import TorchNetwork

    _, entries = unpack(prepared / ARCHIVE, tmp_path)
    for entry in entries:
        if entry.form == "torch":
            description, inputs, outputs = load_network(tmp_path / entry.folder)
            with torch.inference_mode():
                got = TorchNetwork(description, draw_weights(description)).eval()(
                    *map(torch.from_numpy, inputs)
                )
            for one, wanted in zip(got, outputs):
                assert abs(one.numpy() - wanted).max() < 1e-5 * abs(wanted).max()
