"""The log of a tuning job: one JSON object a line, appended under a lock and synced to disk.

A job that is killed loses what it has not appended, at most the round in flight. A line that was torn by a
crash is skipped, and the next append starts a line of its own. Several jobs may append to one log.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_fuse.core.errors import UsageError

__all__ = ["LogContents", "append_entries", "locked", "read_entries"]


@dataclass(frozen=True)
class LogContents:
    """The entries of a log, in order, and how many lines could not be read."""

    entries: tuple[Mapping[str, Any], ...]
    torn: int


def append_entries(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append entries, all of them or none, and wait until they are on disk.

    Args:
        path: The log; made if need be, in a folder that is there.
        entries: JSON objects.

    Raises:
        UsageError: It cannot be written.
    """
    data = b"".join(json.dumps(entry, sort_keys=True).encode() + b"\n" for entry in entries)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with locked(descriptor):
                _append(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"{path}: the log cannot be written: {error.strerror}") from error


def _append(descriptor: int, data: bytes) -> None:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    if end and os.pread(descriptor, 1, end - 1) != b"\n":
        data = b"\n" + data
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:  # a full disk: leave no half of a round
        os.ftruncate(descriptor, end)
        raise
    os.fsync(descriptor)


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of an open file; it ends with the process that holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_entries(path: Path) -> LogContents:
    """Read a log.

    Args:
        path: The log; one that is not there is empty.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        with path.open("rb") as file, locked(file.fileno()):
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return LogContents((), 0)
    except OSError as error:
        raise UsageError(f"{path}: the log cannot be read: {error.strerror}") from error
    read = [_parse(line) for line in lines if line]
    return LogContents(tuple(entry for entry in read if entry is not None), read.count(None))


def _parse(line: bytes) -> Mapping[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
