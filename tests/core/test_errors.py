"""The error tree and its exit codes."""

from __future__ import annotations

import pytest

from tvm_fuse.core import errors


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("ParityFailed", 1),
        ("UsageError", 2),
        ("ModelError", 3),
        ("MissingDependency", 4),
        ("ToolFailed", 5),
        ("ExpectationFailed", 6),
        ("InternalError", 70),
    ],
)
def test_exit_codes(name, exit_code):
    error = getattr(errors, name)
    assert error.exit_code == exit_code
    assert issubclass(error, errors.TvmFuseError) is (name != "InternalError")


def test_all_errors_are_listed():
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert sorted(classes) == errors.__all__


def test_message_and_hint():
    error = errors.ModelError("conv1: wanted float32, got int4", "export the model again")
    assert (error.message, error.hint) == ("conv1: wanted float32, got int4", "export the model again")
    assert str(error) == "conv1: wanted float32, got int4\nhint: export the model again"
    assert str(errors.ModelError("conv1: broken")) == "conv1: broken"
