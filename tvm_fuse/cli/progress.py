"""Progress on standard error: a step that takes longer than two seconds is named, with its time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["show_progress"]

_QUIET_S = 2.0
_TERMINAL_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 15.0


@contextmanager
def show_progress(step: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show that a step is running, once it has run for two seconds.

    Args:
        step: What is being done, such as ``building the fused model``.
        stream: Where to; None is standard error. On a terminal one line is rewritten, elsewhere
            a line is written every 15 seconds and at the end.
    """
    stream = stream or sys.stderr
    done = threading.Event()
    start = time.monotonic()
    thread = threading.Thread(target=_report, args=(step, stream, done, start), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report(step: str, stream: TextIO, done: threading.Event, start: float) -> None:
    if done.wait(_QUIET_S):
        return
    terminal = stream.isatty()
    ends = ("\r", "\r") if terminal else (" ...\n", "\n")
    while True:
        _write(stream, f"{step}: {time.monotonic() - start:.0f} s", ends[0])
        if done.wait(_TERMINAL_INTERVAL_S if terminal else _LOG_INTERVAL_S):
            break
    _write(stream, f"{step}: {time.monotonic() - start:.1f} s", "\n")


def _write(stream: TextIO, text: str, end: str) -> None:
    stream.write(text + end)
    stream.flush()
