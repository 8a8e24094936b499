"""Measuring processes: whatever a candidate does, there is an answer, and the next one is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.lazy import Lazy

measure = Lazy("tvm_fuse.relay.tune_measure")

pytestmark = pytest.mark.relay


@pytest.fixture(scope="module")
def worker():
    made = measure.Worker("tests.support.faulty_worker")
    yield made
    made.close()


def test_answers(worker):
    assert worker.ask("add", 2, 3, timeout_s=10) == (5, "")
    data, error = worker.ask("big", 1 << 20, timeout_s=10)
    assert (len(data), error) == (1 << 20, "")
    assert worker.ask("print", timeout_s=10) == ("fine", "")


def test_every_request_has_a_process_of_its_own(worker):
    first, second = (worker.ask("pid", timeout_s=10)[0] for _ in range(2))
    assert len({first, second, os.getpid()}) == 3


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("crash", "the process died: SIGSEGV"),
        ("exit", "the process died: exit code 3"),
        ("fail", "IndexError: list index out of range"),
    ],
)
def test_a_failure_is_an_answer_and_the_next_request_works(worker, function, error):
    assert worker.ask(function, timeout_s=10) == (None, error)
    assert worker.ask("add", 1, 1, timeout_s=10) == (2, "")


def test_an_answer_that_cannot_be_sent_is_a_failure(worker):
    answer, error = worker.ask("unpicklable", timeout_s=10)
    assert answer is None
    assert "pickle" in error


def test_what_hangs_is_ended(worker):
    start = time.monotonic()
    assert worker.ask("hang", timeout_s=0.3) == (None, "no result within 0.3 s")
    assert time.monotonic() - start < 5
    assert worker.ask("add", 1, 1, timeout_s=10) == (2, "")


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


ASKER = """
import sys
from tvm_fuse.relay.tune_measure import Worker
Worker("tests.support.faulty_worker").ask("hang", sys.argv[1], timeout_s=60)
"""


def test_a_job_that_is_killed_leaves_no_process(tmp_path):
    file = tmp_path / "pid"
    job = subprocess.Popen([sys.executable, "-W", "ignore", "-c", ASKER, str(file)])
    wait_until(lambda: file.exists() and file.read_text())
    child = int(file.read_text())
    assert is_running(child)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    wait_until(lambda: not is_running(child))


def test_a_worker_that_died_is_started_again():
    worker = measure.Worker("tests.support.faulty_worker")
    assert worker.ask("add", 1, 1, timeout_s=10) == (2, "")
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert worker.ask("add", 1, 1, timeout_s=10) == (2, "")
    worker.close()
