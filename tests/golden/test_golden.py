"""The golden fixture must be seen to fail."""

from __future__ import annotations

import pytest


@pytest.fixture
def compare(request, monkeypatch, tmp_path):
    """``golden`` with an empty folder, as if ``--update-golden`` were not given; and the test's file."""
    monkeypatch.setattr("tests.support.golden.FOLDER", tmp_path)
    monkeypatch.setattr(request.config.option, "update_golden", False)
    return request.getfixturevalue("golden"), tmp_path / "test_golden" / f"{request.node.name}.txt"


def test_equal_text_passes_whatever_its_last_line_end(compare):
    golden, file = compare
    file.parent.mkdir()
    file.write_text("one\ntwo\n")
    golden("one\ntwo")
    golden("one\ntwo\n")


def test_other_text_fails_with_the_difference(compare):
    golden, file = compare
    file.parent.mkdir()
    file.write_text("one\ntwo\n")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)-two.*\+three"):
        golden("one\nthree\n")


def test_missing_file_fails(compare):
    golden, file = compare
    with pytest.raises(pytest.fail.Exception, match="--update-golden"):
        golden("one")
    assert not file.exists()


def test_update_writes_the_file(compare, request, monkeypatch):
    golden, file = compare
    monkeypatch.setattr(request.config.option, "update_golden", True)
    golden("one")
    assert file.read_text() == "one\n"
