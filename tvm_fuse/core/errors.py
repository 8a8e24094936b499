"""The errors a user can meet, each with the exit code of the ``tvm-fuse`` command.

An error is for input we cannot work with; a rewrite that merely does not apply is a
``Decision`` (see ``core/reason.py``), never an exception.

Form of a message: what went wrong, where, what was wanted, what was found. The hint says
what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ExpectationFailed",
    "InternalError",
    "MissingDependency",
    "ModelError",
    "ParityFailed",
    "ToolFailed",
    "TvmFuseError",
    "UsageError",
]


class TvmFuseError(Exception):
    """Base of every error that is the input's or the environment's fault.

    Args:
        message: What, where, wanted, got; one or more sentences.
        hint: What the user can do; empty when there is nothing to suggest.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(TvmFuseError):
    """The command line or an argument is wrong (a shape, a target, a name)."""

    exit_code = 2


class ModelError(TvmFuseError):
    """The model cannot be read, or means something we do not support."""

    exit_code = 3


class MissingDependency(TvmFuseError):  # noqa: N818
    """A package or library that this step needs is not installed, or is the wrong one."""

    exit_code = 4


class ToolFailed(TvmFuseError):  # noqa: N818
    """TVM, a compiler or another program failed on input that we believe to be valid."""

    exit_code = 5


class ParityFailed(TvmFuseError):  # noqa: N818
    """The fused model's outputs differ from the unfused model's."""

    exit_code = 1


class ExpectationFailed(TvmFuseError):  # noqa: N818
    """The plan is not the one that ``--expect-fused`` or ``--expect-plan`` asks for."""

    exit_code = 6


class InternalError(Exception):
    """A promise inside tvm-fuse was broken: our bug, not the user's."""

    exit_code = 70
