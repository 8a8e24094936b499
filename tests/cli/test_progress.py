"""Progress: quiet for two seconds, then a line, rewritten on a terminal. Needs no TVM."""

from __future__ import annotations

import io
import re
import time

import pytest

from tvm_fuse.cli import progress
from tvm_fuse.cli.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def hurry(monkeypatch):
    """The same, a hundred times faster."""
    monkeypatch.setattr(progress, "_QUIET_S", 0.02)
    monkeypatch.setattr(progress, "_TERMINAL_INTERVAL_S", 0.02)
    monkeypatch.setattr(progress, "_LOG_INTERVAL_S", 0.1)


def wait_for(stream, count, end):
    deadline = time.monotonic() + 10
    while stream.getvalue().count(end) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stream.getvalue().count(end) >= count


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_a_quick_step_is_not_shown(stream_type):
    stream = stream_type()
    with show_progress("folding", stream):
        pass
    assert stream.getvalue() == ""


def test_two_seconds_are_quiet():
    assert progress._QUIET_S == 2.0


@pytest.mark.usefixtures("hurry")
def test_a_log_gets_whole_lines():
    stream = io.StringIO()
    with show_progress("folding", stream):
        wait_for(stream, 2, "\n")
    text = stream.getvalue()
    assert "\r" not in text
    assert text.endswith("\n")
    lines = text.splitlines()
    assert len(lines) >= 3
    assert all(re.fullmatch(r"folding: \d+ s \.\.\.", line) for line in lines[:-1])
    assert re.fullmatch(r"folding: \d+\.\d s", lines[-1])


@pytest.mark.usefixtures("hurry")
def test_a_terminal_line_is_rewritten_and_ended_once():
    stream = Terminal()
    with show_progress("folding", stream):
        wait_for(stream, 3, "\r")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    parts = text.rstrip("\n").split("\r")
    assert all(re.fullmatch(r"folding: \d+ s", part) for part in parts[:-1])
    assert re.fullmatch(r"folding: \d+\.\d s", parts[-1])


@pytest.mark.usefixtures("hurry")
def test_an_error_ends_the_line_and_comes_through():
    stream = Terminal()

    def interrupted():
        with show_progress("folding", stream):
            wait_for(stream, 1, "\r")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue().endswith("\n")


@pytest.mark.usefixtures("hurry")
def test_standard_error_is_the_default(capsys):
    with show_progress("folding"):
        time.sleep(0.1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("folding: ")
