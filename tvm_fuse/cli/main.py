"""Parse, dispatch, and turn errors into exit codes. Imports no TVM."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from tvm_fuse.cli.args import make_parser
from tvm_fuse.core.errors import InternalError, ToolFailed, TvmFuseError

__all__ = ["main"]

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program name; None takes the process's.

    Returns:
        0 done; 1 parity failed; 2 usage; 3 the model is not supported or broken; 4 a dependency
        is missing; 5 TVM or another tool failed; 6 another plan than expected; 70 a bug in tvm-fuse;
        130 interrupted.
    """
    try:
        code = _run(argv)
    finally:
        written = _flush()
    return code if written else ToolFailed.exit_code


def _run(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TvmFuseError as error:
        return _fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        return 0
    except Exception as error:  # whatever is left is a bug of ours
        if os.environ.get("TVM_FUSE_TRACEBACK"):
            traceback.print_exc()
        hint = "hint: please report it; TVM_FUSE_TRACEBACK=1 shows where it happened"
        return _fail(f"internal error: {type(error).__name__}: {error}\n{hint}", InternalError.exit_code)


def _flush() -> bool:
    """Write out standard output here, where a failure can be handled; what cannot be written is dropped."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return False
    return True


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
