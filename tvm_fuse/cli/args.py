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
    for add in (_add_run, _add_kernels, _add_export, _add_fold, _add_manifest, _add_verify, _add_doctor):
        add(commands)
    return parser


def _add_command(commands: Any, name: str, *, summary: str, description: str) -> Any:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_lazily(name))
    return parser


def _add_run(commands: Any) -> None:
    parser = _add_command(
        commands,
        "run",
        summary="fold, fuse, build and check a model, and show what it bought",
        description="Import a model, fold its batch norms, fuse its chains, build it with relay.build,\n"
        "compare it with the unfused model, and show what the fusion bought.",
    )
    _add_model(parser)
    parser.add_argument(
        "--target",
        default="llvm",
        help="llvm (this machine's CPU, the default), 'cuda -arch=sm_80', or any TVM target string",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="where a model for CUDA runs: auto (the default: the first GPU, else cpu), the number of a GPU, "
        "emulator (its kernels on the CPU), or cpu (the same graph built for the CPU)",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="on the emulator: look at every access to memory, and name the thread that errs",
    )
    _add_epsilon(parser)
    _add_parity(parser)
    parser.add_argument("--no-latency", action="store_true", help="do not measure latency")
    _add_json(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write report.json, and model.so or kernels.cu, into this folder "
        "(default for CUDA without a GPU: MODEL-cuda in the current folder)",
    )


def _add_kernels(commands: Any) -> None:
    parser = _add_command(
        commands,
        "kernels",
        summary="show what each CUDA kernel of a model uses",
        description="Fold and fuse a model, compile its CUDA kernels, and show for each its launch,\n"
        "registers, spills, stack, shared memory and occupancy, the worst first. No GPU is needed.",
    )
    _add_model(parser)
    parser.add_argument(
        "--target", default="cuda", help="such as 'cuda -arch=sm_80' (default: the visible GPU)"
    )
    parser.add_argument(
        "--compiler", default="nvrtc", help="nvrtc (the default), nvcc, or the path of an nvcc"
    )
    parser.add_argument(
        "--source",
        metavar="KERNEL",
        help="print the CUDA C of this kernel instead; a part of its name will do",
    )
    _add_json(parser)


def _add_export(commands: Any) -> None:
    parser = _add_command(
        commands,
        "export",
        summary="write a model as CUDA kernels that run without TVM",
        description="Fold and fuse a model, compile its CUDA kernels, and write them into a folder with\n"
        "the graph, the weights and the outputs to expect. `python -m tvm_fuse.runner` runs it with the\n"
        "NVIDIA driver alone. No GPU is needed here.",
    )
    _add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder for the bundle"
    )
    parser.add_argument(
        "--target", default="cuda", help="such as 'cuda -arch=sm_90' (default: the visible GPU)"
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="sm_80",
        help="compile for this architecture as well; may be repeated",
    )
    parser.add_argument(
        "--seeded",
        action="store_true",
        help="for timing: draw weights like the model's from the seed, instead of shipping them",
    )
    _add_epsilon(parser)
    _add_parity(parser)


def _add_fold(commands: Any) -> None:
    parser = _add_command(
        commands,
        "fold",
        summary="fold a model's batch norms and save it",
        description="Fold the batch norms of a model into its weights and save it, with a manifest of\n"
        "what was folded. An ONNX file becomes an ONNX file without TVM.",
    )
    _add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="OUT.onnx, or a folder for a Relay module and its parameters",
    )
    _add_epsilon(parser)
    _add_json(parser)


def _add_manifest(commands: Any) -> None:
    parser = _add_command(
        commands,
        "manifest",
        summary="show what was folded into a saved model",
        description="Show the manifest of a model that `tvm-fuse fold` saved.",
    )
    parser.add_argument("model", type=Path, metavar="FILE", help="folded ONNX file or folder")
    _add_json(parser)


def _add_verify(commands: Any) -> None:
    parser = _add_command(
        commands,
        "verify",
        summary="check a folded model against its source",
        description="Recompute every hash of a folded model's manifest, fold the source again, and compare\n"
        "the outputs of both models.",
    )
    parser.add_argument("folded", type=Path, metavar="FILE", help="folded ONNX file or folder")
    parser.add_argument(
        "--source", type=Path, required=True, metavar="MODEL", help="the model that it was made from"
    )
    _add_shapes(parser)
    _add_parity(parser)
    _add_json(parser)


def _add_doctor(commands: Any) -> None:
    _add_command(
        commands,
        "doctor",
        summary="tell what is installed and what is missing",
        description="Tell what is there and what is missing.",
    )


# --- options that commands share -------------------------------------------------------------


def _add_model(parser: Any) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="ONNX file, Relay text (.relay) or JSON (.json), or a folder that `tvm-fuse fold` wrote",
    )
    _add_shapes(parser)


def _add_shapes(parser: Any) -> None:
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


def _add_epsilon(parser: Any) -> None:
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


def _add_parity(parser: Any) -> None:
    for name, kind in (("--atol", "absolute"), ("--rtol", "relative")):
        parser.add_argument(
            name,
            type=_argument(_parse_tolerance),
            metavar="X",
            help=f"{kind} tolerance of parity, for all outputs (default: by dtype, 1e-5 for float32)",
        )
    parser.add_argument(
        "--seed",
        type=_argument(_parse_seed),
        default=0,
        metavar="N",
        help="seed of the parity inputs (default: 0)",
    )


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


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
