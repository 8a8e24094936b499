"""The GPU benchmark's processes, on the stand-in for the driver: what passes, fails, crashes and hangs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gpu import run
from benchmarks.gpu.run import Executor, main, save
from benchmarks.gpu.suite import ARCHIVE, Entry, Job, pack
from benchmarks.gpu.table import render
from tests.runner.conftest import fake_driver  # noqa: F401
from tests.support.bundles import KERNEL_FILES, W, X, bundle, expected
from tvm_fuse.cuda.bundle import Output
from tvm_fuse.cuda.bundle_files import save_bundle
from tvm_fuse.cuda.trace import TRACE_FILE, Probe, pack_trace

FORMS = ("fused", "unfused", "topi")


def save_traced(folder, made=None, y=None, last=None):
    """A bundle by hand with a trace; other golden or last values of one's own."""
    y = expected() if y is None else y
    probes = [Probe(1, 3, (expected() if last is None else last).reshape(-1).astype(float))]
    files = {**KERNEL_FILES, TRACE_FILE: pack_trace(probes)}
    save_bundle(folder, made or bundle(), files, {"w": W}, ({"x": X}, {"y": y}))


def without_scale():
    """y = x + 1, without the kernel that tests let fail."""
    made = bundle()
    operator = made.operators[1]
    return replace(
        made,
        operators=(replace(operator, calls=operator.calls[:1]),),
        outputs=(Output("y", 2, made.outputs[0].tolerance),),
        kernels=made.kernels[:1],
    )


@pytest.fixture
def suite(tmp_path):
    """Two models in three forms; only a's kernels are all of them."""
    root, entries = tmp_path / "parts", []
    for model in "ab":
        for form in FORMS:
            entries.append(Entry(model, 1, form, f"{model}/{form}"))
            if model == "a":
                save_traced(root / model / form)
            else:
                golden = ({"x": X}, {"y": X + np.float32(1)})
                save_bundle(root / model / form, without_scale(), KERNEL_FILES, {"w": W}, golden)
    return root, entries


@pytest.fixture
def start(tmp_path, suite, fake_driver):  # noqa: F811
    def start(*options):
        root, entries = suite
        pack(root, tmp_path / ARCHIVE, {"image": 1}, entries)
        out = tmp_path / "results" / "gpu.json"
        settings = ["--out", str(out), "--rounds", "5", "--measure", "0.1s", "--library", str(fake_driver)]
        code = main([str(tmp_path), *settings, *options])
        document = json.loads(out.read_text())
        return code, document, {job["name"]: job for job in document["jobs"]}

    return start


def test_all_is_right(start, tmp_path):
    code, document, jobs = start()
    assert code == 0
    assert {job["status"] for job in jobs.values()} == {"passed"}
    check = jobs["check a batch 1 fused"]
    assert check["ways"] == {"kernel by kernel": True, "launches": True, "graph": True}
    assert check["operators"] == {"checked": 1, "largest_error": 0.0, "wrong": [], "wrong_count": 0}
    assert check["device"]["name"] == "Fake GPU"
    rows = jobs["forms of a batch 1"]["rows"]
    assert [(row["name"], row["mode"]) for row in rows] == [
        (f, m) for f in FORMS for m in ("launches", "graph")
    ]
    assert all(row["us"]["median"] > 0 and row["ratio"]["median"] > 0 and row["rounds"] == 5 for row in rows)
    assert [row["kernel"] for row in jobs["kernels of a batch 1"]["rows"]] == ["add_one", "add_one", "scale"]
    assert document["not_measured"] == []
    assert document["suite"] == {"image": 1}
    text = (tmp_path / "results" / "gpu.md").read_text()
    assert text == render(document)
    assert "| a batch 1 fused | 2 | passed | 0.0 |" in text
    assert "Emulated" not in text


def test_wrong_outputs_and_a_wrong_operator(start, suite):
    root, _ = suite
    wrong = expected()
    wrong[1, 2] += 1
    save_traced(root / "a" / "unfused", y=wrong)
    save_traced(root / "a" / "topi", last=wrong)
    code, document, jobs = start()
    assert code == 1
    status = {name: job["status"] for name, job in jobs.items() if job["kind"] == "check"}
    assert [name for name, each in status.items() if each == "failed"] == [
        "check a batch 1 unfused", "check a batch 1 topi",
    ]  # fmt: skip
    (operator,) = jobs["check a batch 1 topi"]["operators"]["wrong"]
    assert (operator["operator"], operator["kernels"]) == ("multiply", ["add_one", "scale"])
    assert [row["name"] for row in jobs["forms of a batch 1"]["rows"]] == ["fused", "fused"]
    assert {row["why"] for row in document["not_measured"]} == {
        "a/unfused failed its check", "a/topi failed its check",
    }  # fmt: skip


def test_a_kernel_that_fails_has_a_name_and_the_rest_goes_on(start, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuCtxSynchronize@scale:719")
    code, _, jobs = start()
    assert code == 1
    error = jobs["check a batch 1 fused"]["error"]
    assert "cuCtxSynchronize (scale) failed: CUDA_ERROR_LAUNCH_FAILED" in error
    assert jobs["forms of b batch 1"]["status"] == "passed"
    assert "forms of a batch 1" not in jobs


def test_a_driver_without_graphs(start, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuStreamBeginCapture_v2:801")
    code, _, jobs = start("--only", "*a batch 1*")
    assert code == 0
    assert {row["mode"] for row in jobs["forms of a batch 1"]["rows"]} == {"launches"}
    assert "not captured as a CUDA graph" in jobs["forms of a batch 1"]["notes"][0]
    assert "graph" not in jobs["check a batch 1 fused"]["ways"]


def test_no_driver(start):
    code, _, jobs = start("--library", "libcuda-that-is-not-there.so")
    assert code == 1
    assert {job["status"] for job in jobs.values()} == {"error"}
    assert all("cannot be loaded" in job["error"] for job in jobs.values())


def test_no_time(start):
    code, document, jobs = start("--budget", "0s")
    assert (code, jobs) == (1, {})
    assert {row["why"] for row in document["not_measured"]} == {"the time budget was spent"}


# --- processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error", "timed_out"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the process died of signal 11", False),
        ("import sys; sys.exit('said at the end')", "the process ended with code 1\nsaid at the end", False),
        ("import time; time.sleep(60)", "stopped after 1 s", True),
        ("import subprocess; subprocess.run(['sleep', '60'])", "stopped after 1 s", True),
    ],
    ids=["crash", "exit", "hang", "hanging child"],
)
def test_processes_that_bring_no_result(tmp_path, monkeypatch, code, error, timed_out):
    worker = tmp_path / "benchmarks" / "gpu" / "worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text(code)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    limit_s = 1.0 if timed_out else 60.0
    outcome = Executor(tmp_path, "0", 1, 1.0)(Job("x", "check", ()), limit_s)
    assert (outcome.result, outcome.timed_out) == ({"error": error}, timed_out)
    assert outcome.seconds < 30


def test_results_are_whole_or_not_there(tmp_path):
    file = tmp_path / "gpu.json"
    save(file, {"a": 1})
    with pytest.raises(ValueError, match="1000000 at the most"):
        save(file, {"a": "x" * 1_000_000})
    assert json.loads(file.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
