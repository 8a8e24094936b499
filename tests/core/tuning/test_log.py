"""The log: appended whole, by several processes, and read whatever a crash left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.log import append_entries, read_entries


def test_what_is_appended_is_read(tmp_path):
    log = tmp_path / "log"
    assert read_entries(log).entries == ()
    append_entries(log, [{"a": 1}, {"b": None}])
    append_entries(log, [{"c": [1.5, "ö"]}])
    assert read_entries(log).entries == ({"a": 1}, {"b": None}, {"c": [1.5, "ö"]})


@pytest.mark.parametrize("torn", [b'{"a": 1', b"{", b"\x00\xff", b"[1]", b'{"a": 1}garbage'])
def test_a_torn_line_is_skipped_and_costs_no_other(tmp_path, torn):
    log = tmp_path / "log"
    append_entries(log, [{"n": 0}])
    with log.open("ab") as file:
        file.write(torn)
    assert read_entries(log).entries == ({"n": 0},)
    append_entries(log, [{"n": 1}])
    read = read_entries(log)
    assert (read.entries, read.torn) == (({"n": 0}, {"n": 1}), 1)


def test_a_log_cut_anywhere_keeps_every_whole_line(tmp_path):
    log = tmp_path / "log"
    append_entries(log, [{"n": index, "text": "x" * index} for index in range(5)])
    data = log.read_bytes()
    for cut in range(len(data) + 1):
        log.write_bytes(data[:cut])
        whole = [json.loads(line) for line in data[:cut].split(b"\n")[:-1]]
        got = list(read_entries(log).entries)
        assert got[: len(whole)] == whole
        assert len(got) - len(whole) <= 1  # the last line, when only its end is missing


def test_a_log_that_cannot_be_written_or_read(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        append_entries(tmp_path / "none" / "log", [{}])
    with pytest.raises(UsageError, match="cannot be read"):
        read_entries(tmp_path)


WRITER = """
import sys
from pathlib import Path
from tvm_fuse.core.tuning.log import append_entries
for index in range(50):
    entries = [{"who": sys.argv[2], "index": index, "part": part} for part in range(8)]
    append_entries(Path(sys.argv[1]), entries)
"""


def test_two_processes_on_one_log(tmp_path):
    log = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(log), name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    read = read_entries(log)
    assert read.torn == 0
    assert len(read.entries) == 2 * 50 * 8
    for name in "ab":
        own = [(entry["index"], entry["part"]) for entry in read.entries if entry["who"] == name]
        assert own == [(index, part) for index in range(50) for part in range(8)]
    for start in range(0, len(read.entries), 8):  # rounds lie together
        assert len({(entry["who"], entry["index"]) for entry in read.entries[start : start + 8]}) == 1
