"""Options: each is parsed into a value, or refused with exit code 2."""

from __future__ import annotations

import pytest

from tvm_fuse.cli.args import make_parser


@pytest.mark.parametrize(("text", "wanted"), [("x=1x3x4", ("x", (1, 3, 4))), ("a=b=2,3", ("a=b", (2, 3)))])
def test_shape(text, wanted):
    assert make_parser().parse_args(["run", "m.onnx", "--shape", text]).shape == [wanted]
