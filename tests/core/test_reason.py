"""Reasons as data; every code is documented, has a hint and is provoked by a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tvm_fuse.core.reason import HINTS, Code, Reason, Stage, applied, declined

ROOT = Path(__file__).parents[2]
REASON = Reason(Code.FOLD_OVERFLOW, "conv1", "a number", "inf")


def test_decisions():
    good, bad = applied("fold", "bn1", "into conv1"), declined("fold", "bn2", REASON)
    assert (good.stage, good.reason, good.applied) == (Stage.APPLIED, None, True)
    assert (bad.stage, bad.reason, bad.applied) == (Stage.CONDITION, REASON, False)
    assert str(good) == "fold: bn1: into conv1"
    assert str(bad) == "fold: not applied: fold-overflow at conv1: wanted a number, got inf"
    assert REASON.hint == HINTS[Code.FOLD_OVERFLOW]


@pytest.mark.parametrize("code", list(Code))
def test_code_is_spelled_like_its_name(code):
    assert code.value == code.name.lower().replace("_", "-")


def test_every_code_has_a_hint():
    assert list(HINTS) == list(Code)
    assert all(HINTS.values())


def documented():
    """Code -> the cells of its row in docs/reasons.md."""
    text = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    rows = [
        re.split(r" *(?<!\\)\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")
    ]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_every_code_is_documented():
    rows = documented()
    assert list(rows) == [code.value for code in Code]
    for code in Code:
        meaning, example, hint, provoke = rows[code.value]
        assert meaning
        assert example.startswith("wanted ")
        assert ", got " in example
        assert hint == HINTS[code]
        assert provoke


def codes_named_in(path):
    """Codes that a test file names: ``Code.X`` anywhere, or the code's text in an assert."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code":
            yield getattr(Code, node.attr, None)
        if isinstance(node, ast.Assert):
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield from (code for code in Code if any(isinstance(t, str) and code.value in t for t in texts))


@pytest.fixture(scope="module")
def provoked():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    return {code for path in files for code in codes_named_in(path)}


@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_provoked(code, provoked):
    assert code in provoked


def test_search_for_codes_finds_and_misses(tmp_path):
    test = tmp_path / "test_it.py"
    test.write_text(
        "x = 'fold-overflow'\nassert y == Code.RESULT_SHARED\nassert 'a bn-axis-not-channel' in z\n"
    )
    assert set(codes_named_in(test)) == {Code.RESULT_SHARED, Code.BN_AXIS_NOT_CHANNEL}
