"""A tuning job as text, without TVM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tuning import FakeMeasurer, make_job
from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.job import Phase, run_job
from tvm_fuse.render_tuning import render_line, render_tasks, render_tuning
from tvm_fuse.tuning_report import TuningReport, make_row


@pytest.fixture
def states(tmp_path):
    """The text at every moment of a job of two kernels, and where it ended."""
    lines = []
    job = make_job(
        tmp_path / "log",
        Budget(trials=8),
        measurer=FakeMeasurer(no_baseline=("b",)),
        observe=lambda state: lines.append((state.phase, render_line(state, 90.0), render_tasks(state))),
    )
    return lines, run_job(job)


def test_the_line_of_every_phase(states):
    lines, _ = states
    assert [phase for phase, _, _ in lines[:3]] == [Phase.TIMING, Phase.TIMING, Phase.SEARCHING]
    assert lines[0][1] == "timing the kernels as they are: 1 of 2; conv2d"
    assert lines[2][1].endswith("1m30s to go; network 1000.000 ms")
    searched = [line for phase, line, _ in lines if phase is Phase.SEARCHING][-1]
    assert searched.startswith("8 trials, 0s, 1m30s to go; network ")
    assert "conv2d 1000000.0 us, tuned " in searched
    assert lines[-1][0] is Phase.COMPARING
    assert lines[-1][1].startswith("measuring the best in turn with the kernels as they are: conv2d 1.")


def test_the_tasks(states):
    lines, _ = states
    table = lines[2][2].splitlines()
    assert table[0].split() == ["kernel", "digest", "x", "MFLOP", "us", "now", "x", "roofline"]
    assert table[1].split() == ["conv2d", "a", "1", "0.00", "1000000.0", "-"]
    assert table[2].split() == ["conv2d", "b", "1", "0.00", "-", "-"]


def test_the_report(states):
    _, state = states
    rows = tuple(make_row(one, state) for one in state.tasks)
    report = TuningReport("0", "net", "llvm", "llvm-x", rows, 8, 61.0, False, ("file",), ("gone",), None)
    text = render_tuning(report)
    assert "8 candidates measured, 1m01s in this run" in text
    assert "conv2d: the kernel that is built without tuning cannot be measured: no baseline" in text
    assert "wrote 1 records" in text
    assert "removed 1 records" in text
    assert "interrupted" not in text
    assert "--resume goes on" in render_tuning(replace(report, is_interrupted=True))
    assert not report.is_failure


def test_a_failure_is_one_where_nothing_works(states):
    _, state = states
    rows = [make_row(one, state) for one in state.tasks]
    report = TuningReport("0", "net", "llvm", "llvm-x", tuple(rows[1:]), 0, 1.0, False, (), (), None)
    assert report.is_failure
    failing = replace(rows[0], best_s=None, failed=8, first_error="boom", is_accepted=False)
    failed = replace(report, tasks=(failing,))
    assert failed.is_failure
    assert "no candidate works for 1 kernels, which stay as they are: conv2d" in render_tuning(failed)
    assert "the first error: boom" in render_tuning(failed)
    assert not replace(failed, is_interrupted=True).is_failure
