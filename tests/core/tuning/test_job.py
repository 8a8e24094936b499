"""The loop of a job, with a searcher and a measurer that need no TVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.tuning import FakeMeasurer, FakeSearcher, make_job
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.job import run_job
from tvm_fuse.core.tuning.log import append_entries, read_entries


def measured(log):
    return [entry for entry in read_entries(log).entries if entry["kind"] == "measured"]


def test_a_job_measures_logs_learns_and_accepts(tmp_path):
    job = make_job(tmp_path / "log", Budget(trials=24))
    state = run_job(job)
    assert (state.trials, state.done, state.is_interrupted) == (24, 24, False)
    assert [entry["schedule"] for entry in measured(job.log)] == job.searcher.learned
    for one in state.tasks:
        found, times = state.accepted[one.task.digest]
        assert found == one.best
        assert times.is_faster
    assert {entry["kind"] for entry in read_entries(job.log).entries} == {"job", "baseline", "measured"}


def test_a_job_ends_with_its_time(tmp_path):
    ticks = iter(range(1000))
    state = run_job(make_job(tmp_path / "log", Budget(seconds=20), clock=lambda: float(next(ticks))))
    assert 0 < state.trials < 60


@pytest.mark.parametrize("stop", [1, 4, 9, 12])
def test_a_resumed_job_goes_on_as_if_it_had_not_been_stopped(tmp_path, stop):
    whole = make_job(tmp_path / "whole", Budget(trials=48))
    run_job(whole)
    for trials in (4 * stop, 48):
        state = run_job(make_job(tmp_path / "parts", Budget(trials=trials)))
    assert (state.trials, state.done) == (48, 48 - 4 * stop)
    assert measured(tmp_path / "parts") == measured(whole.log)


def test_ctrl_c_keeps_whole_rounds_and_still_compares(tmp_path):
    job = make_job(tmp_path / "log", Budget(trials=100), measurer=FakeMeasurer(interrupt_at=10))
    state = run_job(job)
    assert state.is_interrupted
    assert state.trials == len(measured(job.log)) == 8  # the round in flight is lost
    assert state.accepted


def test_candidates_that_fail_cost_the_task_nothing_else(tmp_path):
    measurer = FakeMeasurer(failing=lambda text: text.endswith(("1", "3")))
    state = run_job(make_job(tmp_path / "log", Budget(trials=24), measurer=measurer))
    assert state.trials == 24
    assert all(one.first_error == "boom" and one.best for one in state.tasks)


def test_a_task_of_which_nothing_works_is_given_up_with_its_first_error(tmp_path):
    """B095: the search does not go on to the end when every candidate fails."""
    measurer = FakeMeasurer(failing=lambda text: True)
    state = run_job(make_job(tmp_path / "log", Budget(trials=10**6), measurer=measurer))
    assert state.trials == 2 * 4 * len(state.tasks)
    assert state.accepted == {}
    for one in state.tasks:
        assert one.stopped == "no candidate of 8 works; the first error: boom"


def test_a_kernel_that_cannot_be_measured_is_not_tuned(tmp_path):
    measurer = FakeMeasurer(no_baseline=("a",))
    state = run_job(make_job(tmp_path / "log", Budget(trials=8), measurer=measurer))
    assert [bool(one.stopped) for one in state.tasks] == [True, False]
    assert "no baseline" in state.tasks[0].stopped
    assert state.tasks[0].measured == []


def test_a_search_that_has_nothing_left_stops(tmp_path):
    state = run_job(make_job(tmp_path / "log", Budget(), searcher=FakeSearcher(size=10)))
    assert [len(one.measured) for one in state.tasks] == [10, 10]
    assert {one.stopped for one in state.tasks} == {"all candidates were measured"}


def test_what_only_seemed_faster_is_not_accepted(tmp_path):
    state = run_job(make_job(tmp_path / "log", Budget(trials=24), measurer=FakeMeasurer(luck=100.0)))
    assert state.compared
    assert state.accepted == {}


def test_known_schedules_are_measured_first(tmp_path):
    job = make_job(tmp_path / "log", Budget(trials=8), known=("a 5",))
    run_job(job)
    assert measured(job.log)[0]["schedule"] == "a 5"


def test_a_log_of_another_device_is_refused(tmp_path):
    run_job(make_job(tmp_path / "log", Budget(trials=4), identity={"device": "cuda-sm_80"}))
    with pytest.raises(UsageError, match="wanted device cuda-sm_90, got device cuda-sm_80"):
        run_job(make_job(tmp_path / "log", Budget(trials=8), identity={"device": "cuda-sm_90"}))


def test_two_jobs_on_one_log(tmp_path):
    """What both measured counts once."""
    log = tmp_path / "log"
    run_job(make_job(log, Budget(trials=8)))
    append_entries(log, measured(log))
    state = run_job(make_job(log, Budget(trials=8)))
    assert (state.trials, state.done) == (8, 0)


JOB = """
import sys, time
from pathlib import Path
from tests.support.tuning import FakeMeasurer, make_job
from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.job import run_job
run_job(make_job(Path(sys.argv[1]), Budget(trials=400), measurer=FakeMeasurer(delay_s=0.002)))
"""


def test_a_job_that_is_killed_loses_at_most_the_round_in_flight(tmp_path):
    whole = make_job(tmp_path / "whole", Budget(trials=400))
    run_job(whole)
    log = tmp_path / "log"
    for delay_s in (0.05, 0.3, 0.0, 0.2):
        job = subprocess.Popen([sys.executable, "-c", JOB, str(log)])
        before = len(measured(log))
        while len(measured(log)) <= before and job.poll() is None:
            time.sleep(0.005)
        time.sleep(delay_s)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        assert measured(log) == measured(whole.log)[: len(measured(log))]
        assert len(measured(log)) % 4 == 0
    run_job(make_job(log, Budget(trials=400)))
    assert measured(log) == measured(whole.log)
