"""``main``: errors become exit codes and one message on standard error."""

from __future__ import annotations

import pytest

from tvm_fuse import cli


def test_version_is_on_standard_output(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("tvm-fuse ")
