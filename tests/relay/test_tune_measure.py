"""Measuring behind RPC: a tracker and two servers of TVM on this machine."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.lazy import Lazy
from tests.test_tuning import conv_module, measured, tune
from tvm_fuse.core.errors import MissingDependency

fuse = Lazy("tvm_fuse.relay.fuse")
kernel_functions = Lazy("tvm_fuse.relay.kernel_functions")
load = Lazy("tvm_fuse.relay.load")
measure = Lazy("tvm_fuse.relay.tune_measure")
targets = Lazy("tvm_fuse.relay.target")
tasks = Lazy("tvm_fuse.relay.tune_tasks")
tune_kernel = Lazy("tvm_fuse.relay.tune_kernel")

pytestmark = pytest.mark.relay

KEY = "board"


def start(*arguments):
    """A process of ``tests.support.rpc``, and the port that it printed."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.rpc", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, int(process.stdout.readline())


@pytest.fixture(scope="module")
def tracker():
    """A tracker with two devices of one key."""
    processes = []
    try:
        process, port = start("tracker")
        processes.append(process)
        for _ in range(2):
            processes.append(start("server", port, KEY)[0])
        remote = tune_kernel.Remote("127.0.0.1", port, KEY)
        end = time.monotonic() + 30
        while found_servers(remote) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        yield remote
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def found_servers(remote):
    try:
        return measure.count_servers(remote)
    except MissingDependency:
        return 0


def test_what_is_no_schedule_or_of_another_kernel_is_a_failed_candidate():
    target = targets.resolve_target("llvm")
    model = load.model_from_module(conv_module(), {})
    fused = fuse.fuse_model(model, target, fuse.FuseOptions(records=None))
    (one,) = tasks.find_tasks(kernel_functions.find_kernels(fused.module, target), target, None, {})
    other = '{"i": [["[\\"x\\", 1]", "llvm", [1, 64, 64, 0, 0, 0, 0, 0], "", 0, []], [[], [["CI", 99]]]], '
    other += '"r": [[0.1], 0, 0, 0], "v": "v0.6"}'
    with measure.KernelMeasurer([one], target) as measurer:
        bad = measurer.measure(one.task, ["no schedule", other])
        good = measurer.baseline(one.task)
    assert [found.cost_s for found in bad] == [None, None]
    assert "no schedule of AutoScheduler" in bad[0].error
    assert bad[1].error
    assert good.cost_s > 0
    assert good.needed < 1


@pytest.mark.slow
def test_candidates_are_measured_on_all_devices_of_a_key(tracker, tmp_path, monkeypatch):
    used = []
    ask = measure.Worker.ask

    def noting(self, function, *arguments, timeout_s):
        used.append((id(self), function, arguments[0].remote))
        return ask(self, function, *arguments, timeout_s=timeout_s)

    monkeypatch.setattr(measure.Worker, "ask", noting)
    found = tune(conv_module(), tmp_path, trials=8, remote=tracker)
    (row,) = found.tasks
    assert (row.trials, row.failed, row.baseline_s > 0) == (8, 0, True)
    assert found.score is None
    assert all(entry["cost_s"] > 0 for entry in measured(tmp_path / "log.jsonl"))
    assert len({worker for worker, function, _ in used if function == "measure_kernel"}) == 2
    assert {remote for _, function, remote in used if function == "measure_kernel"} == {tracker}


@pytest.mark.slow
def test_a_key_that_no_device_has(tracker):
    with pytest.raises(MissingDependency, match=r"--key other: .* it has: board"):
        measure.count_servers(tune_kernel.Remote(tracker.host, tracker.port, "other"))


def test_a_tracker_that_is_not_there():
    with pytest.raises(MissingDependency, match=r"--rpc 127\.0\.0\.1:1: no tracker answers"):
        measure.count_servers(tune_kernel.Remote("127.0.0.1", 1, KEY))
