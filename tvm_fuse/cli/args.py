"""Command-line options, each parsed into a value with a clear message when it is wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

from tvm_fuse import __version__
from tvm_fuse.core.errors import UsageError

__all__ = ["make_parser", "to_mapping"]

_EXIT_CODES = """\
exit codes: 0 done; 1 parity failed; 2 usage; 3 model not supported or broken;
4 dependency missing; 5 TVM or a compiler failed; 70 a bug in tvm-fuse"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``tvm-fuse``; a parsed command has ``args.run(args)``."""
    parser = argparse.ArgumentParser(
        prog="tvm-fuse",
        description="Fold, fuse and check models with TVM Relay.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tvm-fuse {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_doctor(commands)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="fold, fuse, build and check a model, and show what it bought",
        description="Import a model, fold its batch norms, fuse its chains, build it with relay.build,\n"
        "compare it with the unfused model, and show what the fusion bought.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="ONNX file, or Relay text (.relay) or JSON (.json)"
    )
    parser.add_argument(
        "--params", type=Path, metavar="FILE", help="parameters of a Relay module (save_param_dict)"
    )
    parser.add_argument(
        "--shape",
        type=_argument(_parse_shape),
        action="append",
        default=[],
        metavar="NAME=1x3x224x224",
        help="whole shape of an input with dynamic dimensions; may be repeated",
    )
    parser.add_argument(
        "--target",
        default="llvm",
        help="llvm (this machine's CPU, the default), cuda, or any TVM target string",
    )
    parser.add_argument(
        "--epsilon",
        type=_argument(_parse_epsilon),
        action="append",
        default=[],
        metavar="NAME=1e-3",
        help="epsilon a batch norm was trained with; NAME may be a pattern such as '*'; may be repeated",
    )
    parser.add_argument(
        "--epsilon-config",
        type=Path,
        metavar="FILE",
        help="training config with these epsilons, JSON or YAML: names or patterns, one number under "
        "'epsilon', or a Keras model.to_json(); --epsilon wins",
    )
    parser.add_argument(
        "--align-epsilon", action="store_true", help="use the expected epsilon where the graph's differs"
    )
    parser.add_argument(
        "--atol",
        type=_argument(_parse_tolerance),
        metavar="X",
        help="absolute tolerance of parity, for all outputs (default: 1e-5 for float32)",
    )
    parser.add_argument(
        "--rtol",
        type=_argument(_parse_tolerance),
        metavar="X",
        help="relative tolerance of parity, for all outputs (default: 1e-5 for float32)",
    )
    parser.add_argument(
        "--seed",
        type=_argument(_parse_seed),
        default=0,
        metavar="N",
        help="seed of the parity inputs (default: 0)",
    )
    parser.add_argument("--no-latency", action="store_true", help="do not measure latency")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on standard output")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write report.json, and model.so or kernels.cu, into this folder "
        "(default for CUDA without a GPU: MODEL-cuda in the current folder)",
    )
    parser.set_defaults(run=_lazily("run"))


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="tell what is installed and what is missing",
        description="Tell what is there and what is missing.",
    )
    parser.set_defaults(run=_lazily("doctor"))


def _lazily(command: str) -> Callable[[argparse.Namespace], int]:
    """Import a command's code only when it runs, so that ``-h`` is quick."""

    def run(args: argparse.Namespace) -> int:
        from tvm_fuse.cli import commands

        return int(getattr(commands, f"run_{command}")(args))

    return run


def to_mapping(pairs: Iterable[tuple[str, Any]], option: str) -> dict[str, Any]:
    """Collect repeated ``NAME=VALUE`` options.

    Raises:
        UsageError: A name was given twice.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise UsageError(f"{option} {name}=... was given twice")
        values[name] = value
    return values


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report a ``ValueError`` with its message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _split(text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r}: wanted {form}")
    return name, value


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    form = "NAME=1x3x224x224"
    name, value = _split(text, form)
    sizes = value.lower().replace(",", "x").split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r}: wanted {form}, with sizes above 0")
    return name, tuple(int(size) for size in sizes)


def _parse_epsilon(text: str) -> tuple[str, float]:
    name, value = _split(text, "NAME=1e-3")
    return name, _parse_tolerance(value)


def _parse_seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r}: wanted a whole number >= 0")
    return int(text)


def _parse_tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r}: wanted a number such as 1e-5") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r}: wanted a finite number >= 0")
    return value
