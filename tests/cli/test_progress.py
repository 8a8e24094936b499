"""Progress: quiet for two seconds, then a line, rewritten on a terminal."""

from __future__ import annotations

import io

from tvm_fuse.cli.progress import show_progress


def test_a_quick_step_is_not_shown():
    stream = io.StringIO()
    with show_progress("folding", stream):
        pass
    assert stream.getvalue() == ""
