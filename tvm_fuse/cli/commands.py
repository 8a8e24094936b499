"""The commands. Each gets the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tvm_fuse.cli.args import to_mapping
from tvm_fuse.cli.progress import show_progress
from tvm_fuse.core.errors import ParityFailed, UsageError
from tvm_fuse.core.parity import TOLERANCES, Tolerance

__all__ = ["run_doctor", "run_run"]


def run_doctor(args: argparse.Namespace) -> int:
    """Print what is installed; exit code 4 when something needed is missing."""
    from tvm_fuse.doctor import diagnose, render

    checks = diagnose()
    print(render(checks))
    return 0


def run_run(args: argparse.Namespace) -> int:
    """The main job on one model file."""
    shapes = to_mapping(args.shape, "--shape")
    epsilon = to_mapping(args.epsilon, "--epsilon")
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output} is not a folder")
    with show_progress("loading TVM"):
        from tvm_fuse import pipeline
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.report import render, to_json
    options = pipeline.Options(
        epsilon=epsilon,
        align_epsilon=args.align_epsilon,
        tolerance=_tolerance(args),
        seed=args.seed,
        latency=not args.no_latency,
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=shapes, params=args.params)
    compiled = pipeline.compile_model(model, args.target, options, show_progress)
    document = to_json(compiled.report)
    people = sys.stderr if args.json else sys.stdout
    print(render(compiled.report), file=people)
    if args.json:
        print(document)
    output = args.output
    if output is None and compiled.cuda_source and not _is_compiled(compiled):
        output = Path(f"{args.model.stem}-cuda")
    if output is not None:
        for file in _save(compiled, document, output):
            print(f"wrote {file}", file=people)
    parity = compiled.report.parity
    return ParityFailed.exit_code if parity is not None and not parity.passed else 0


def _tolerance(args: argparse.Namespace) -> Tolerance | None:
    if args.atol is None and args.rtol is None:
        return None
    default = TOLERANCES["float32"]
    atol = default.atol if args.atol is None else args.atol
    rtol = default.rtol if args.rtol is None else args.rtol
    return Tolerance(atol, rtol, "given on the command line")


def _is_compiled(compiled: Any) -> bool:
    """Whether the library can run: CUDA kernels are only source where no GPU is visible."""
    from tvm_fuse.relay.target import has_cuda_device

    return not compiled.cuda_source or has_cuda_device()


def _save(compiled: Any, document: str, folder: Path) -> list[Path]:
    """Write the results; each file is complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write(folder / "report.json", document + "\n")]
    if compiled.cuda_source:
        written.append(_write(folder / "kernels.cu", compiled.cuda_source))
    if _is_compiled(compiled):
        with show_progress("linking the library"), tempfile.TemporaryDirectory(dir=folder) as scratch:
            temporary = Path(scratch, "model.so")
            compiled.library.export_library(str(temporary))
            os.replace(temporary, folder / "model.so")
        written.append(folder / "model.so")
    return written


def _write(file: Path, text: str) -> Path:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as stream:
        stream.write(text)
    os.chmod(stream.name, 0o644)
    os.replace(stream.name, file)
    return file
