"""``tvm-fuse tune`` on whole files: what it prints, writes and refuses, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.onnx_models import Builder
from tvm_fuse import cli
from tvm_fuse.core.tuning.budget import SearchParameters
from tvm_fuse.core.tuning.log import read_entries

pytestmark = pytest.mark.relay


def one_layer(size=6):
    """A convolution, its bias and its activation."""
    b = Builder(dtype=np.float32)
    x = b.input("x", (1, 8, size, size))
    return b.build([b.relu(b.conv(x, 8, name="conv", bias=True), name="y")])


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """``call(command, *options)``: exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tvm_fuse.tuning.scale_search", lambda cores: SearchParameters(16, 1, 4, 4))
    (tmp_path / "net.onnx").write_bytes(one_layer().SerializeToString())

    def run(command, *options):
        capfd.readouterr()
        code = cli.main([command, "net.onnx", *options])
        return (code, *capfd.readouterr())

    return run


def test_a_job_lists_tasks_shows_progress_and_reports(call, tmp_path):
    code, out, err = call("tune", "--trials", "2", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["schema"]["name"] == "tvm-fuse/tuning-report"
    (task,) = report["tasks"]
    assert (task["trials"], task["failed"], task["name"]) == (2, 0, "conv2d_bias_relu")
    lines = err.splitlines()
    table = next(index for index, line in enumerate(lines) if line.startswith("kernel "))
    assert lines[table + 1].split()[:3] == ["conv2d_bias_relu", task["digest"], "1"]
    assert any(line.startswith("2 trials, ") and "to go; network " in line for line in lines)
    kinds = [entry["kind"] for entry in read_entries(tmp_path / "net.tuning.jsonl").entries]
    assert kinds == ["job", "baseline", "measured", "measured"]
    assert (tmp_path / "tuned").is_dir()
    code, _, err = call("tune", "--trials", "3")
    assert code == 2
    assert "--resume goes on with it" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rpc", "localhost:9190"), "--rpc HOST:PORT and --key KEY go together"),
        (("--key", "board"), "--rpc HOST:PORT and --key KEY go together"),
        (("--log", "no/where/log"), "the folder"),
        (("--records", "net.onnx"), "is not a folder"),
        (("--tasks", "nothing"), "got none; there are conv2d_bias_relu"),
        (("--merge", "nowhere"), "--merge nowhere: wanted a folder of records, which is not there"),
    ],
)
def test_what_is_refused(call, options, message):
    code, _, err = call("tune", *options)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--time", "soon"), "wanted a duration"),
        (("--trials", "0"), "wanted a whole number"),
        (("--rpc", "9190"), "wanted HOST:PORT"),
        (("--rpc", "host:99999"), "wanted HOST:PORT"),
    ],
)
def test_what_argparse_refuses(call, options, message, capfd):
    with pytest.raises(SystemExit, match="2"):
        call("tune", *options)
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--records", "none"), "wanted a folder, which is not there"),
        (("--records", ".", "--no-records"), "contradict"),
    ],
)
def test_what_run_refuses(call, options, message):
    code, _, err = call("run", "--no-latency", *options)
    assert code == 2
    assert message in err


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(call, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tvm_fuse.cli", "tune", "net.onnx", "--time", "1h"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log, end = tmp_path / "net.tuning.jsonl", time.monotonic() + 120
    while not any(entry["kind"] == "measured" for entry in read_entries(log).entries):
        assert time.monotonic() < end
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "interrupted: what was measured is in the log, and --resume goes on" in out
    before = sum(entry["kind"] == "measured" for entry in read_entries(log).entries)
    assert before % 16 == 0
    code, out, err = call("tune", "--trials", str(before + 1), "--resume")
    assert code == 0, err
    assert f"{before + 1} candidates measured" in out
