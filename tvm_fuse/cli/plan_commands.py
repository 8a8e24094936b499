"""The commands that plan and build nothing. Each gets the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tvm_fuse.cli.options import to_mapping
from tvm_fuse.cli.progress import show_progress
from tvm_fuse.cli.steering import (
    Steering,
    check_folder,
    check_gates,
    check_writable,
    read_epsilons,
    read_steering,
)
from tvm_fuse.core.errors import ParityFailed, UsageError
from tvm_fuse.core.folders import write_file, write_files
from tvm_fuse.core.parity import GivenTolerance
from tvm_fuse.core.plan_file import diff, load, save

__all__ = ["COMMANDS", "run_explain", "run_ladder", "run_plan"]

COMMANDS = ("plan", "explain", "ladder")

_INTERRUPTED = 130


def run_plan(args: argparse.Namespace) -> int:
    """Show the kernels of a plan; exit code 6 when it is not what is expected."""
    if args.output is not None:
        if args.save_plan is not None:
            raise UsageError("-o and --save-plan are the same: give one of them")
        args.save_plan = args.output
    before = None if args.diff is None else load(args.diff)
    steering = read_steering(args)
    fused, report = _plan(args, steering)
    from tvm_fuse.render_plan import render_plan
    from tvm_fuse.report import to_json

    difference = None if before is None else diff(before, report.file)
    if args.json:
        print(to_json(report))
    else:
        print(render_plan(report))
    if difference is not None:
        lines = difference.lines or ("the same plan",)
        people = sys.stderr if args.json else sys.stdout
        print(f"\nchanged since {args.diff.name}:", *lines, sep="\n  ", file=people)
    _finish(args, steering, fused, report)
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Say what became of each layer and batch norm, or of one node."""
    steering = read_steering(args)
    fused, report = _plan(args, steering)
    from tvm_fuse.explain import explain_model
    from tvm_fuse.render_plan import render_explanation
    from tvm_fuse.report import to_json

    explanation = explain_model(report.model, report.target, fused, args.node)
    print(to_json(explanation) if args.json else render_explanation(explanation))
    _finish(args, steering, fused, report)
    return 0


def run_ladder(args: argparse.Namespace) -> int:
    """Climb a ladder; exit code 1 when a rung is wrong, 130 when it was interrupted."""
    steering = read_steering(args)
    if args.keep_best is not None:
        check_writable(args.keep_best, "--keep-best")
    if args.output is not None:
        check_folder(args.output, "-o")
    with show_progress("loading TVM"):
        from tvm_fuse.ladder import LadderOptions, climb_model
        from tvm_fuse.relay.load import load_model
        from tvm_fuse.render_ladder import HEADER, render_ladder, render_rung
        from tvm_fuse.report import to_json
    options = LadderOptions(
        **read_epsilons(args),
        **steering.options,
        by=args.by,
        slices=args.slices,
        repeats=args.repeats,
        tolerance=GivenTolerance(args.atol, args.rtol),
        seed=args.seed,
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=to_mapping(args.shape, "--shape"), params=args.params)
    print(HEADER.rstrip(), file=sys.stderr, flush=True)

    def tell(rung: Any) -> None:
        print(render_rung(rung), file=sys.stderr, flush=True)

    ladder = climb_model(model, args.target, options, show_progress, tell)
    text = render_ladder(ladder)
    print(to_json(ladder) if args.json else text)
    if args.output is not None:
        _write_ladder(args.output, ladder, text)
    if args.keep_best is not None and ladder.best_plan is not None:
        save(args.keep_best, ladder.best_plan)
        print(f"wrote {args.keep_best}", file=sys.stderr)
    if not ladder.is_complete:
        return _INTERRUPTED
    return ParityFailed.exit_code if ladder.wrong else 0


def _write_ladder(folder: Path, ladder: Any, text: str) -> None:
    from tvm_fuse.render_ladder import draw_ladder
    from tvm_fuse.report import to_json

    files = {
        "ladder.json": to_json(ladder) + "\n",
        "ladder.txt": text + "\n",
        "ladder.svg": draw_ladder(ladder),
    }
    write_files(folder, {name: content.encode() for name, content in files.items()})
    print(f"wrote {folder}", file=sys.stderr)


def _plan(args: argparse.Namespace, steering: Steering) -> tuple[Any, Any]:
    shapes = to_mapping(args.shape, "--shape")
    epsilons = read_epsilons(args)
    if args.svg is not None:
        check_writable(args.svg, "--svg")
    with show_progress("loading TVM"):
        from tvm_fuse.planning import plan_model
        from tvm_fuse.relay.fuse import FuseOptions
        from tvm_fuse.relay.load import load_model
    options = FuseOptions(
        is_measured=args.measure,
        **epsilons,
        **steering.options,
    )
    with show_progress("importing the model"):
        model = load_model(args.model, shapes=shapes, params=args.params)
    return plan_model(model, args.target, options, show_progress)


def _finish(args: argparse.Namespace, steering: Steering, fused: Any, report: Any) -> None:
    """Write what was asked for, then look at the expectations."""
    written = [args.save_plan] if args.save_plan is not None else []
    if args.svg is not None:
        from tvm_fuse.picture import draw_plan

        write_file(args.svg, draw_plan(report.model, fused).encode())
        written.append(args.svg)
    for file in written:
        print(f"wrote {file}", file=sys.stderr)
    check_gates(steering, report.fused, report.not_fused, report.file)
