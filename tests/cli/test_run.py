"""``tvm-fuse run`` on whole files: exit codes, streams and what is left on disk."""

from __future__ import annotations

import pytest

from tvm_fuse import cli

pytestmark = pytest.mark.relay


def test_a_missing_file_is_a_usage_error(tmp_path, capsys):
    assert cli.main(["run", str(tmp_path / "m.onnx")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "m.onnx" in err
