"""Tuning jobs on whole, small models: searched, measured, kept, used."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay
from tvm_fuse.core.errors import MissingDependency, ModelError, UsageError
from tvm_fuse.core.tuning import job
from tvm_fuse.core.tuning.budget import Budget, SearchParameters
from tvm_fuse.core.tuning.log import read_entries
from tvm_fuse.core.tuning.records import load_records
from tvm_fuse.core.tuning.task import Measurement

load = Lazy("tvm_fuse.relay.load")
measure = Lazy("tvm_fuse.relay.tune_measure")
pipeline = Lazy("tvm_fuse.pipeline")
render = Lazy("tvm_fuse.render_tuning")
report = Lazy("tvm_fuse.report")
tune_kernel = Lazy("tvm_fuse.relay.tune_kernel")
tuning = Lazy("tvm_fuse.tuning")

pytestmark = pytest.mark.relay

SEARCH = SearchParameters(population=16, iterations=1, sampled=4, per_round=4)


def conv_module(height=8, width=8, **attrs):
    """A convolution, its bias and its activation."""
    net = Net()
    layout = attrs.get("layout", "NCHW")
    shape = (1, height, width, 8) if layout == "NHWC" else (1, 8, height, width)
    conv = net.conv2d(net.input("x", shape), 8, **attrs)
    return net.module(relay.nn.relu(relay.nn.bias_add(conv, net.const(8), axis=layout.index("C"))))


def tune(module, folder, trials=4, **options):
    options = {
        "budget": Budget(trials=trials),
        "log": folder / "log.jsonl",
        "into": folder / "tuned",
        "search": SEARCH,
        **options,
    }
    return tuning.tune_model(load.model_from_module(module, {}), "llvm", tuning.TuneOptions(**options))


def pretend_slow(patch):
    """Kernels without a record seem slow, so that whatever works is accepted."""
    compare = measure.KernelMeasurer.compare

    def with_slow_baseline(self, task, schedule):
        return dataclasses.replace(compare(self, task, schedule), baseline_s=1.0)

    patch.setattr(measure.KernelMeasurer, "baseline", lambda self, task: Measurement("", 1.0))
    patch.setattr(measure.KernelMeasurer, "compare", with_slow_baseline)


@pytest.fixture
def everything_is_faster(monkeypatch):
    pretend_slow(monkeypatch)


@pytest.mark.parametrize(
    ("height", "width", "attrs"),
    [
        pytest.param(8, 8, {}, id="NCHW", marks=pytest.mark.slow),
        pytest.param(9, 9, {"layout": "NHWC", "groups": 4}, id="B089 grouped, NHWC"),
        pytest.param(7, 12, {"layout": "NHWC"}, id="B090 not square, 3x3, NHWC"),
        pytest.param(12, 12, {"layout": "NHWC"}, id="B090 square", marks=pytest.mark.slow),
        pytest.param(8, 8, {"groups": 8}, id="depthwise", marks=pytest.mark.slow),
    ],
)
def test_tuned_kernels_are_kept_and_used(tmp_path, everything_is_faster, height, width, attrs):
    """B096 too: layouts of NHWC models are decided before their kernels are found."""
    module = conv_module(height, width, **attrs)
    found = tune(module, tmp_path)
    (row,) = found.tasks
    assert (row.trials, row.failed, row.is_accepted) == (4, 0, True)
    (baseline,) = (one for one in read_entries(tmp_path / "log.jsonl").entries if one["kind"] == "baseline")
    layouts = next(line for line in baseline["chain"] if "conv2d" in line)
    assert ("data_layout='NHWC'" in layouts) == (attrs.get("layout") == "NHWC")
    assert found.score.parity.passed
    assert found.score.records == 1
    (record,) = load_records(tmp_path / "tuned", found.device).records.values()
    assert record.needed < 1
    assert record.provenance["trials"] == 4
    options = pipeline.Options(records=tmp_path / "tuned", latency=False)
    compiled = pipeline.compile(module, options=options)
    assert compiled.report.parity.passed
    assert any("1 kernels have tuned schedules" in note for note in compiled.report.notes)
    assert "network: " in render.render_tuning(found)
    json.loads(report.to_json(found))


def test_a_kernel_that_is_not_faster_has_no_record_and_an_old_one_goes(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        pretend_slow(patch)
        written = tune(conv_module(), tmp_path, trials=1).written
    assert len(written) == 1
    monkeypatch.setattr(job, "FASTER", 0.0)  # nothing is faster
    found = tune(conv_module(), tmp_path, trials=1, log=tmp_path / "again.jsonl")
    known = json.loads((tmp_path / "again.jsonl").read_text().splitlines()[2])
    assert known["kind"] == "measured"
    assert found.written == ()
    assert found.removed == (found.tasks[0].digest,)
    assert load_records(tmp_path / "tuned", found.device).records == {}
    assert found.score is None


def test_a_wrong_kernel_is_not_accepted(tmp_path, everything_is_faster, monkeypatch):
    """A mutant: the reference is of other data, so that every candidate computes something else."""
    write = tune_kernel.write_reference
    ready = measure.KernelMeasurer._ready

    def of_other_data(self, task):
        spec, error = ready(self, task)
        if not getattr(self, "is_spoilt", False):
            self.is_spoilt = True
            write(dataclasses.replace(spec, seed=spec.seed + 1))
        return spec, error

    monkeypatch.setattr(measure.KernelMeasurer, "_ready", of_other_data)
    found = tune(conv_module(), tmp_path, trials=2)
    (row,) = found.tasks
    assert (row.trials, row.failed, row.is_accepted) == (2, 2, False)
    assert row.first_error.startswith("wrong results: ")
    assert found.is_failure
    assert found.written == ()


def test_when_nothing_works_the_report_names_the_kernels_and_the_first_error(tmp_path, monkeypatch):
    """B092, B095: every candidate is out of time; the search stops, and says for which kernels."""
    monkeypatch.setattr(
        measure.KernelMeasurer,
        "measure",
        lambda self, task, schedules: [Measurement(text, None, "no result within 1 s") for text in schedules],
    )
    found = tune(conv_module(), tmp_path, trials=10**6)
    assert found.trials == 8
    assert found.is_failure
    text = render.render_tuning(found)
    assert "no candidate works for 1 kernels, which stay as they are: conv2d_bias_relu" in text
    assert "the first error: no result within 1 s" in text


def test_a_timeout_that_is_too_short_for_anything(tmp_path):
    found = tune(conv_module(), tmp_path, timeout_s=0.001)
    assert found.is_failure
    assert "no result within" in found.tasks[0].stopped


def test_dynamic_shapes_are_refused_by_name(tmp_path):
    """B094: not an empty list of tasks."""
    net = Net()
    x = net.input("x", (relay.Any(), 8, 6, 6))
    with pytest.raises(ModelError, match=r"shapes are not static: x"):
        tune(net.module(relay.nn.relu(net.conv2d(x, 8))), tmp_path)


def test_no_task_is_an_error_that_says_why(tmp_path):
    net = Net()
    with pytest.raises(ModelError, match="0 tasks: none of its 1 kernels sums anything up"):
        tune(net.module(relay.nn.relu(net.input("x", (1, 8)))), tmp_path)


def test_tasks_are_chosen_by_pattern(tmp_path):
    net = Net()
    x = relay.nn.relu(relay.nn.bias_add(net.conv2d(net.input("x", (1, 8, 4, 4)), 8), net.const(8)))
    module = net.module(net.dense(relay.nn.batch_flatten(x), 4))
    found = tune(module, tmp_path, trials=1, tasks=("conv2d*",))
    assert [row.name for row in found.tasks] == ["conv2d_bias_relu"]


def test_a_pattern_that_fits_nothing(tmp_path):
    with pytest.raises(UsageError, match=r"--tasks nothing: .* there are conv2d_bias_relu"):
        tune(conv_module(), tmp_path, tasks=("nothing",))


def test_a_log_is_not_continued_by_accident(tmp_path):
    tune(conv_module(), tmp_path, trials=1)
    with pytest.raises(UsageError, match="a job has written to it"):
        tune(conv_module(), tmp_path)
    assert tune(conv_module(), tmp_path, trials=2, resume=True).trials == 2


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("llvm -mcpu=atom", UsageError),
        ("cuda -arch=sm_80", MissingDependency),
    ],
)
def test_a_target_that_is_not_here(tmp_path, target, error):
    model = load.model_from_module(conv_module(), {})
    with pytest.raises(error):
        tuning.tune_model(model, target, tuning.TuneOptions(log=tmp_path / "log", into=tmp_path))


@pytest.mark.slow
def test_the_search_proposes_the_same_again(tmp_path):
    """A job that is resumed in the middle logs what one that was not stopped does, but for the times."""
    tune(conv_module(), tmp_path, trials=8)
    first = [entry["schedule"] for entry in measured(tmp_path / "log.jsonl")]
    (tmp_path / "parts").mkdir()
    for trials in (4, 8):
        tune(conv_module(), tmp_path / "parts", trials=trials, resume=True)
    again = [entry["schedule"] for entry in measured(tmp_path / "parts" / "log.jsonl")]
    assert again[:4] == first[:4]  # the second round follows from the times of the first
    assert len(set(again)) == 8


def measured(log):
    return [entry for entry in read_entries(log).entries if entry["kind"] == "measured"]


# --- killed, in processes of their own --------------------------------------------------------------

JOB = """
import sys
from pathlib import Path
from tests.test_tuning import conv_module, tune
tune(conv_module(), Path(sys.argv[1]), trials=10**6, resume=True)
"""


def start(folder):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", JOB, str(folder)])


def wait_for_rounds(log, count, job_process):
    end = time.monotonic() + 120
    while len(measured(log)) < count:
        assert time.monotonic() < end
        assert job_process.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_job_goes_on(tmp_path):
    log, before = tmp_path / "log.jsonl", 0
    for delay_s in (0.0, 0.7, 1.3):
        running = start(tmp_path)
        wait_for_rounds(log, before + 4, running)
        time.sleep(delay_s)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        got = measured(log)
        assert read_entries(log).torn == 0
        assert len(got) >= before + 4
        assert len(got) % 4 == 0
        assert len({entry["schedule"] for entry in got}) == len(got)
        before = len(got)
    assert tune(conv_module(), tmp_path, trials=before + 4, resume=True).trials == before + 4


@pytest.mark.slow
def test_two_jobs_on_one_log_do_not_damage_it(tmp_path):
    log = tmp_path / "log.jsonl"
    tune(conv_module(), tmp_path, trials=1)
    running = [start(tmp_path) for _ in range(2)]
    wait_for_rounds(log, 17, running[0])
    for one in running:
        one.kill()
        one.wait()
    contents = read_entries(log)
    assert contents.torn == 0
    assert all(np.isfinite(entry["cost_s"] or 0) for entry in measured(log))
    found = tune(conv_module(), tmp_path, trials=1, resume=True)
    assert 0 < found.trials <= len(measured(log))
