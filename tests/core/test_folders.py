"""Files of a folder: all of them or none."""

from __future__ import annotations

import os

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.folders import write_file, write_files


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_made_and_other_files_stay(tmp_path):
    write_files(tmp_path / "a" / "b", {"one": b"1"})
    write_files(tmp_path / "a" / "b", {"two": b"2"})
    assert files(tmp_path / "a" / "b") == {"one": b"1", "two": b"2"}


def test_older_files_are_replaced_and_stale_ones_go(tmp_path):
    write_files(tmp_path, {"one": b"1", "two": b"2", "three": b"3"})
    write_files(tmp_path, {"one": b"new"}, stale=["one", "two", "not there"])
    assert files(tmp_path) == {"one": b"new", "three": b"3"}


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "older files"])
@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch, is_there, fails_at):
    folder = tmp_path / "out"
    if is_there:
        write_files(folder, {"one": b"1", "stale": b"s", "other": b"o"})
    before = files(folder) if is_there else None
    replace, calls = os.replace, []

    def failing(*paths):
        calls.append(paths)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return replace(*paths)

    monkeypatch.setattr(os, "replace", failing)
    moves = 4 if is_there else 2  # of "one" out and in, of "two" in, of "stale" out
    if fails_at > moves:
        write_files(folder, {"one": b"new", "two": b"2"}, stale=["stale"])
        assert files(folder).items() >= {"one": b"new", "two": b"2"}.items()
        return
    with pytest.raises(UsageError, match=r"cannot write to .*out: No space left"):
        write_files(folder, {"one": b"new", "two": b"2"}, stale=["stale"])
    assert (files(folder) if folder.exists() else None) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file/out: Not a directory"):
        write_files(tmp_path / "file" / "out", {"one": b"1"})


def test_one_file_replaces_itself_and_nothing_else(tmp_path):
    (tmp_path / "other").write_bytes(b"stays")
    for content in (b"old", b"new"):
        write_file(tmp_path / "file", content)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "file": b"new",
        "other": b"stays",
    }


@pytest.mark.parametrize("name", ["folder", "none/file"])
def test_one_file_that_cannot_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        write_file(tmp_path / name, b"content")
    assert (tmp_path / "folder").is_dir()
    assert not (tmp_path / "none").exists()
