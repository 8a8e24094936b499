"""Golden texts: the ``golden`` fixture compares with a committed file, ``--update-golden`` rewrites it.

The file is ``tests/golden/<test file>/<test name>.txt``. A test without its file fails: a text that
nobody has read proves nothing.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

__all__ = ["FOLDER", "golden"]

FOLDER = Path(__file__).parents[1] / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts from this run")


@pytest.fixture
def golden(request):
    """``golden(text)`` passes when the text is the committed one."""
    name = re.sub(r"\W+", "_", request.node.name).strip("_")
    file = FOLDER / request.path.stem / f"{name}.txt"

    def compare(text):
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if not file.is_file():
            pytest.fail(f"no golden text {file}; make it with --update-golden and read it", pytrace=False)
        wanted = file.read_text(encoding="utf-8")
        if text != wanted:
            lines = difflib.unified_diff(wanted.splitlines(), text.splitlines(), "golden", "got", lineterm="")
            pytest.fail("\n".join(["the text differs from the golden one:", *lines]), pytrace=False)

    return compare
