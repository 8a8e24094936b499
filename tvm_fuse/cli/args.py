"""The commands of ``tvm-fuse`` and the options of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Callable

from tvm_fuse import __version__
from tvm_fuse.cli.options import (
    add_epsilon,
    add_gates,
    add_json,
    add_model,
    add_parity,
    add_records,
    add_shapes,
    add_steering,
    count,
    duration,
    to_mapping,
    tracker,
)

__all__ = ["make_parser", "to_mapping"]

_EXIT_CODES = """\
exit codes: 0 done; 1 parity failed; 2 usage; 3 model not supported or broken;
4 dependency missing; 5 TVM or a compiler failed; 6 another plan than expected; 70 a bug in tvm-fuse"""


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
    for add in (
        _add_run,
        _add_plan,
        _add_explain,
        _add_ladder,
        _add_tune,
        _add_kernels,
        _add_export,
        _add_fold,
        _add_manifest,
        _add_verify,
        _add_doctor,
    ):
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
    add_model(parser)
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
    add_epsilon(parser)
    add_parity(parser)
    add_steering(parser)
    add_gates(parser)
    add_records(parser)
    parser.add_argument("--no-latency", action="store_true", help="do not measure latency")
    add_json(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write report.json, and model.so or kernels.cu, into this folder "
        "(default for CUDA without a GPU: MODEL-cuda in the current folder)",
    )


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plan",
        summary="show what would become one kernel, without building it",
        description="Fold a model and plan its fusion, and show each kernel, what it saves, and why\n"
        "other operators are in none. Nothing is built.",
    )
    _add_planned(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="as --save-plan")
    parser.add_argument(
        "--diff", type=Path, metavar="FILE", help="show what changed since this plan (- there, + now)"
    )


def _add_explain(commands: Any) -> None:
    parser = _add_command(
        commands,
        "explain",
        summary="tell for each layer and batch norm what it was fused with, or what stopped it",
        description="Tell for each convolution, matrix product and batch norm, or for NODE, what it was\n"
        "fused with or folded into, or which condition failed, and what helps. Nothing is built.",
    )
    _add_planned(parser, "NODE")


def _add_ladder(commands: Any) -> None:
    parser = _add_command(
        commands,
        "ladder",
        summary="fuse a model bit by bit, and time and check each bit",
        description="Build a model unfused, folded, and fused bit by bit; compare the outputs of each rung\n"
        "with the unfused model's and its time with that of the rung before; name what made it slower or\n"
        "wrong.",
    )
    add_model(parser)
    parser.add_argument("--target", default="llvm", help="as of `tvm-fuse run`; it must run on this machine")
    parser.add_argument(
        "--by",
        choices=("step", "chain"),
        default="step",
        help="add one kind of step after another (bias, activation, ...; the default), or one slice of the "
        "kernels after another",
    )
    parser.add_argument(
        "--slices",
        type=count,
        default=8,
        metavar="N",
        help="rungs of a ladder by chain at most (default: 8)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=30,
        metavar="N",
        help="rounds in which a rung and the one before run in turn, in four seconds at most (default: 30)",
    )
    add_epsilon(parser)
    add_parity(parser)
    add_steering(parser)
    parser.add_argument(
        "--keep-best", type=Path, metavar="PLAN.json", help="write the plan of the fastest rung that is right"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write ladder.json, ladder.txt and ladder.svg"
    )
    add_json(parser)


def _add_tune(commands: Any) -> None:
    parser = _add_command(
        commands,
        "tune",
        summary="search for faster schedules of a model's kernels, and keep those that are",
        description="Measure other schedules of the kernels that a model is built of, check the results of\n"
        "each, and write a record of those that are faster than the kernel without it. Ctrl-C ends the\n"
        "search and keeps what was found; --resume goes on. For CUDA without a GPU: --draft and\n"
        "--export-candidates predict here what is fast, --import-results takes in what a GPU measured.",
    )
    add_model(parser, is_optional=True)
    parser.add_argument("--target", default="llvm", help="as of `tvm-fuse run`; it runs here, or over --rpc")
    parser.add_argument("--time", type=duration, metavar="30m", help="search for so long (default: 10m)")
    parser.add_argument("--trials", type=count, metavar="N", help="measure at most so many candidates")
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tune only kernels of this name, digest or pattern; may be repeated",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="log of the job (default: MODEL.tuning.jsonl in this folder)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the log")
    parser.add_argument(
        "--records",
        type=Path,
        default=Path("tuned"),
        metavar="DIR",
        help="folder that gets the records, for `tvm-fuse run --records DIR` (default: tuned)",
    )
    parser.add_argument(
        "--merge", type=Path, metavar="DIR", help="first take over the records of this folder"
    )
    parser.add_argument(
        "--rpc", type=tracker, metavar="HOST:PORT", help="measure on devices behind TVM's tracker"
    )
    parser.add_argument("--key", metavar="KEY", help="key of the devices at the tracker")
    parser.add_argument(
        "--timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="for one candidate, built and measured (default: 30s)",
    )
    _add_drafting(parser)
    add_epsilon(parser)
    add_parity(parser)
    add_steering(parser)
    add_json(parser)


def _add_drafting(parser: Any) -> None:
    """Tuning for CUDA without a GPU."""
    parser.add_argument(
        "--export-candidates",
        type=Path,
        metavar="DIR",
        help="measure nothing: write the most promising schedules, compiled, into a folder whose run.py "
        "measures them on a GPU, with NumPy and the driver alone",
    )
    parser.add_argument(
        "--import-results",
        type=Path,
        nargs=2,
        metavar=("DIR", "FILE"),
        help="make records of what run.py of the package DIR wrote; takes no MODEL",
    )
    parser.add_argument(
        "--draft",
        action="store_true",
        help="measure nothing: write records of what is predicted to be fastest; only --drafts uses them",
    )
    parser.add_argument("--card", metavar="NAME", help="draft for this card, such as t4, a100 or h100")
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="sm_80",
        help="with --draft: for this architecture as well; may be repeated",
    )


def _add_planned(parser: Any, node: str = "") -> None:
    """What the commands have in common that plan and do not build."""
    add_model(parser)
    if node:
        parser.add_argument(
            "node", nargs="?", metavar=node, help="name of an operator or batch norm, a pattern, or #NUMBER"
        )
    parser.add_argument("--target", default="llvm", help="as of `tvm-fuse run` (default: llvm)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="on CUDA, compile the kernels that may need too many registers and cut those that do, as `run`",
    )
    add_epsilon(parser)
    add_steering(parser)
    add_gates(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan")
    add_json(parser)


def _add_kernels(commands: Any) -> None:
    parser = _add_command(
        commands,
        "kernels",
        summary="show what each CUDA kernel of a model uses",
        description="Fold and fuse a model, compile its CUDA kernels, and show for each its launch,\n"
        "registers, spills, stack, shared memory and occupancy, the worst first. No GPU is needed.",
    )
    add_model(parser)
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
    add_steering(parser)
    add_json(parser)


def _add_export(commands: Any) -> None:
    parser = _add_command(
        commands,
        "export",
        summary="write a model as CUDA kernels that run without TVM",
        description="Fold and fuse a model, compile its CUDA kernels, and write them into a folder with\n"
        "the graph, the weights and the outputs to expect. `python -m tvm_fuse.runner` runs it with the\n"
        "NVIDIA driver alone. No GPU is needed here.",
    )
    add_model(parser)
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
    add_epsilon(parser)
    add_parity(parser)
    add_steering(parser)


def _add_fold(commands: Any) -> None:
    parser = _add_command(
        commands,
        "fold",
        summary="fold a model's batch norms and save it",
        description="Fold the batch norms of a model into its weights and save it, with a manifest of\n"
        "what was folded. An ONNX file becomes an ONNX file without TVM.",
    )
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="OUT.onnx, or a folder for a Relay module and its parameters",
    )
    add_epsilon(parser)
    add_json(parser)


def _add_manifest(commands: Any) -> None:
    parser = _add_command(
        commands,
        "manifest",
        summary="show what was folded into a saved model",
        description="Show the manifest of a model that `tvm-fuse fold` saved.",
    )
    parser.add_argument("model", type=Path, metavar="FILE", help="folded ONNX file or folder")
    add_json(parser)


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
    add_shapes(parser)
    add_parity(parser)
    add_json(parser)


def _add_doctor(commands: Any) -> None:
    _add_command(
        commands,
        "doctor",
        summary="tell what is installed and what is missing",
        description="Tell what is there and what is missing.",
    )


def _lazily(command: str) -> Callable[[argparse.Namespace], int]:
    """Import a command's code only when it runs, so that ``-h`` is quick."""

    def run(args: argparse.Namespace) -> int:
        from tvm_fuse.cli import commands, plan_commands, tune_command

        modules = (plan_commands, tune_command)
        module = next((module for module in modules if command in module.COMMANDS), commands)
        return int(getattr(module, f"run_{command}")(args))

    return run
