"""The examples of docs/reasons.md: ``python -m tests.support.reason_page --update`` writes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.reason_models import MODELS, find_reason
from tvm_fuse.core.reason import Code, Reason

__all__ = ["PAGE", "example_of", "read_examples"]

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"

#: Code, meaning, example, and the rest of a row.
_ROW = re.compile(r"^(\| `([a-z0-9-]+)` \| (?:[^|\\]|\\.)* \| )((?:[^|\\]|\\.)*)( \| .*)$", re.M)


def find_any(code: Code) -> Reason:
    """The reason of a code's minimal model, whatever it needs."""
    if code in MODELS:
        return find_reason(code)
    from tests.support.reason_kernels import KERNELS

    return KERNELS[code]()


def example_of(reason: Reason) -> str:
    """A cell of the page."""
    return f"wanted {reason.wanted}, got {reason.got}".replace("|", "\\|")


def read_examples() -> dict[str, str]:
    """Code -> the example on the page."""
    return {row[2]: row[3] for row in _ROW.finditer(PAGE.read_text(encoding="utf-8"))}


def _updated(text: str) -> str:
    return _ROW.sub(lambda row: f"{row[1]}{example_of(find_any(Code(row[2])))}{row[4]}", text)


if __name__ == "__main__":
    updated = _updated(PAGE.read_text(encoding="utf-8"))
    if "--update" in sys.argv:
        PAGE.write_text(updated, encoding="utf-8")
    else:
        sys.stdout.write(updated)
