"""``python -m tvm_fuse.runner BUNDLE``: run a bundle, compare its outputs, measure it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tvm_fuse.core.errors import ParityFailed, TvmFuseError, UsageError
from tvm_fuse.runner.report import render, to_json
from tvm_fuse.runner.run import EMULATOR, RunOptions, run_bundle

__all__ = ["main"]

_EXIT_CODES = """\
exit codes: 0 done; 1 the outputs differ from the golden ones; 2 usage; 3 the bundle is damaged;
4 no driver or no GPU; 5 the driver or a kernel failed"""

_REPEATS = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program name; None takes the process's.

    Returns:
        The exit code.
    """
    args = _make_parser().parse_args(argv)
    repeats = args.repeats
    if repeats is None:
        repeats = 0 if args.device == EMULATOR else _REPEATS
    options = RunOptions(args.device, repeats, args.warmup, args.kernels, args.checked)
    try:
        if args.checked and args.device != EMULATOR:
            raise UsageError("--checked is for the emulator", f"--device {EMULATOR}")
        report = run_bundle(args.bundle, options)
    except TvmFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        print(render(report), file=sys.stderr if args.json else sys.stdout)
        if args.json:
            print(to_json(report))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.parity.passed else ParityFailed.exit_code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tvm_fuse.runner",
        description="Run a bundle that `tvm-fuse export` wrote, on its golden input: compare its\n"
        "outputs with the golden ones, and measure. Needs NumPy and the NVIDIA driver, and nothing else.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder of the bundle")
    parser.add_argument(
        "--device",
        type=_parse_device,
        default="0",
        metavar="N",
        help=f"number of the GPU (default: 0), or {EMULATOR}: the same kernels, compiled for this CPU",
    )
    parser.add_argument(
        "--repeats",
        type=_parse_count,
        metavar="N",
        help=f"measurements, 0 for none (default: {_REPEATS}, on the emulator 0)",
    )
    parser.add_argument(
        "--warmup", type=_parse_count, default=10, metavar="N", help="executions before them (default: 10)"
    )
    parser.add_argument("--kernels", action="store_true", help="measure every launch by itself as well")
    parser.add_argument(
        "--checked",
        action="store_true",
        help="on the emulator: look at every access to memory, and name the thread that errs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser


def _parse_device(text: str) -> str:
    if text != EMULATOR and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number such as 0, or {EMULATOR}")
    return text


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number >= 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
